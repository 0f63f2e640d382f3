"""README and docs tell the truth: commands parse, the Python example runs, the file tree is complete."""

import importlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from conftest import ROOT, CommandLine, nano_run
from twoscale.train import start_run
from twoscale.train.trainer import TrainResult

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    """The fenced blocks of that language in all documents."""
    found: list[str] = []
    for path in DOCUMENTS:
        for n, part in enumerate(re.split(r"^```", path.read_text(), flags=re.M)):
            first, _, body = part.partition("\n")
            if n % 2 and first == language:
                found.append(body)
    return found


def commands() -> list[str]:
    lines = [line.strip() for block in blocks("") for line in block.splitlines()]
    return sorted({re.sub(r"^torchrun (--\S+ )+-m ", "", line) for line in lines if re.match(r"^(torchrun (--\S+ )+-m )?twoscale ", line)})


@pytest.mark.parametrize("command", commands())
def test_commands(command: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shards: Path) -> None:
    """Every command in README and docs is accepted, up to the point where the long work would begin."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    for folder in ("data/corpus", "data/fineweb"):
        shutil.copytree(shards, tmp_path / folder)
    started = []
    manifest = {"tokens": {"train": 1, "val": 1}, "counts": {"documents": 1, "empty": 0, "not_text": 0, "bad_utf8": 0}}
    monkeypatch.setattr("twoscale.data.prepare", lambda *a, **k: started.append(a) or manifest)
    monkeypatch.setattr("twoscale.train.start_run", lambda *a, **k: started.append(a) or TrainResult(1, True, None, None))
    monkeypatch.setattr("twoscale.train.checkpoint.load_config", lambda *a: nano_run())
    monkeypatch.setattr("twoscale.interop.load", lambda *a: started.append(a) or pytest.skip("accepted"))
    monkeypatch.setattr("twoscale.tradeoff.open.open_run", lambda *a: started.append(a) or pytest.skip("accepted"))
    monkeypatch.setattr("twoscale.interop.export.ckpt.find_checkpoint", lambda *a: started.append(a) or pytest.skip("accepted"))
    monkeypatch.setattr("twoscale.interop.find", lambda *a: started.append(a) or pytest.skip("accepted"))
    monkeypatch.setattr("twoscale.interop.convert.find", lambda *a: started.append(a) or pytest.skip("accepted"))
    monkeypatch.setattr(importlib.import_module("twoscale.interop.load"), "find", lambda *a: started.append(a) or pytest.skip("accepted"))
    monkeypatch.setattr("twoscale.train.checkpoint.find_checkpoint", lambda *a: started.append(a) or pytest.skip("accepted"))
    monkeypatch.setattr("twoscale.cli.explore.open_session", lambda *a: started.append(a) or pytest.skip("accepted"))
    monkeypatch.setattr("twoscale.load", lambda *a: started.append(a) or pytest.skip("accepted"), raising=False)
    monkeypatch.setattr("twoscale.report.page.load_run", lambda *a: started.append(a) or pytest.skip("accepted"))
    monkeypatch.setattr("twoscale.bench.serve.bench_serve", lambda *a: started.append(a) or pytest.skip("accepted"))
    monkeypatch.setattr("twoscale.bench.soak.soak", lambda *a: started.append(a) or pytest.skip("accepted"))
    monkeypatch.setattr("twoscale.bench.train.bench_train", lambda *a: started.append(a) or pytest.skip("accepted"))
    code, _, err = cli(*shlex.split(command)[1:])
    assert code == 0 and started, err


def test_python(tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Python example runs as it stands, in a folder with a trained run."""
    start_run(nano_run(steps=4), tmp_path / "runs" / "tiny", shards)
    monkeypatch.chdir(tmp_path)
    for block in blocks("python"):
        exec(compile(block, "README", "exec"), {})


def test_file_tree() -> None:
    """The file tree in the README has a line for every file of the package, and none for files that are not there."""
    tree = next(b for b in blocks("") if b.startswith("src/twoscale/"))
    listed = set(re.findall(r"^\s+([\w/]+\.py)", tree, flags=re.M))
    package = ROOT / "src" / "twoscale"
    there = {str(p.relative_to(package)) for p in package.rglob("*.py") if p.name != "__init__.py"}
    assert listed == there, listed ^ there


def test_links() -> None:
    """Every relative link leads to a file, and every test that the README names exists."""
    for path in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), (path, target)
        for name in re.findall(r"`(\w+/\w+\.(?:py|c))`", path.read_text()):
            assert (ROOT / name).exists() or (ROOT / "src" / "twoscale" / name).exists(), (path, name)
    for name in re.findall(r"`(tests/\w+\.py)(?:::(\w+))?`", (ROOT / "README.md").read_text()):
        assert (ROOT / name[0]).exists() and (not name[1] or f"def {name[1]}(" in (ROOT / name[0]).read_text()), name


def test_nothing_large_is_tracked() -> None:
    """The repository holds no large file but the bundled model."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, files.stdout.split("\0")):
        assert not (ROOT / name).exists() or (ROOT / name).stat().st_size < (
            10_000_000 if name.endswith("bundled/model.safetensors") else 2_000_000
        ), name
