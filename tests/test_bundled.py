"""The model in the package: what is said of it holds, every command takes it, and the notebooks run."""

import json
import lzma
import re
import shlex
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch

import twoscale
from conftest import ROOT, CommandLine
from twoscale.cli.runs import as_run
from twoscale.config.run_folder import RunFolder
from twoscale.explore.session import load_prompts
from twoscale.interop import find
from twoscale.interop.load import BUNDLED

CARD = (BUNDLED / "README.md").read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/bundled, as the commands make it."""
    from twoscale.interop.convert import convert

    return convert("bundled", tmp_path_factory.mktemp("bundled") / "runs" / "bundled")


def test_files() -> None:
    """Small, without code, with tokenizer, geometry over training, licence, figures, held-out text and prompts."""
    files = [p for p in BUNDLED.rglob("*") if p.is_file()]  # the other bundled models lie in folders below it
    assert sum(p.stat().st_size for p in files) < 10_000_000
    assert {p.suffix for p in files} <= {".json", ".jsonl", ".md", ".safetensors", ".xz"}
    steps = [json.loads(line)["step"] for line in (BUNDLED / "geometry.jsonl").read_text().splitlines()]
    assert steps == sorted(steps) and steps[0] == 0 and len(steps) >= 4
    assert "license:" in CARD and "bits per byte" in CARD and (BUNDLED / "calibration.json").exists()
    assert len(load_prompts(RunFolder(BUNDLED).prompts)) >= 4


def test_figures(run: Path) -> None:
    """The card's bits per byte on the held-out stories come out again, and taking the loops away costs a tenth of a nat and more."""
    printed = float(re.search(r"([\d.]+) bits per byte", CARD)[1])  # type: ignore[index]
    found = twoscale.evaluate(run, windows=64)
    assert found.bits_per_byte == pytest.approx(printed, rel=0.002) and found.source == "stories.txt.xz"
    shallow = twoscale.evaluate(run, windows=64, loops=1)
    assert found.loops == [12] * 3 and shallow.tokens == found.tokens
    assert shallow.ce - found.ce >= 0.10


@pytest.mark.long
def test_more_loops_do_no_harm(run: Path) -> None:
    """With more loops than it was trained with, the loss stays what it was."""
    ce = {k: twoscale.evaluate(run, windows=64, loops=k).ce for k in (12, 30)}
    assert ce[30] == pytest.approx(ce[12], rel=0.005), ce


def test_two_names() -> None:
    """`stories` is the bundled model."""
    assert find("stories") == find("bundled") == BUNDLED


def sample_in(text: str) -> tuple[list[str], str]:
    """The first command `twoscale generate bundled` with a quoted text below it, as words, and that text."""
    found = re.search(r"(twoscale generate bundled[^\n]+)\n```\n(?:[^>]*?)\n((?:>[^\n]*\n)+)", text)
    assert found is not None
    quoted = [line.removeprefix(">").removeprefix(" ") for line in found[2].splitlines()]
    return shlex.split(found[1])[1:], "\n".join(quoted)


def test_readme_sample(cli: CommandLine) -> None:
    """The story in the README is what its command writes."""
    words, wanted = sample_in((ROOT / "README.md").read_text())
    code, out, err = cli(*words)
    assert code == 0, err
    assert out.split() == wanted.split()


def test_it_writes() -> None:
    """Stories of words that the held-out stories have, and the same for a seed."""
    model, tokenizer = twoscale.load("stories")
    with lzma.open(BUNDLED / "heldout" / "stories.txt.xz", "rt") as f:
        known = set(re.findall(r"[a-z]+", f.read().lower()))
    how: dict[str, Any] = {"temperature": 0.7, "seed": 1, "stop": tokenizer.eot}
    prompts = [tokenizer.encode(prompt) for prompt in load_prompts(RunFolder(BUNDLED).prompts)]
    gen = twoscale.generate(model, prompts, 120, **how)
    assert gen.tokens == twoscale.generate(model, prompts, 120, **how).tokens
    words = [word for tokens in gen.tokens for word in re.findall(r"[a-z]+", tokenizer.decode(tokens).lower())]
    assert sum(word in known for word in words) >= 0.95 * len(words), [word for word in words if word not in known]


def test_commands(tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch, run: Path) -> None:
    """`bundled` is a name for every command; a run is made of it once, and a run of something else is not taken for it."""
    monkeypatch.chdir(run.parent.parent)
    assert as_run(Path("bundled")) == Path("runs/bundled")
    assert twoscale.evaluate("bundled", windows=2, loops=1) == twoscale.evaluate(run, windows=2, loops=1)
    code, out, err = cli("eval", "bundled", "--windows", "4", "--loops", "2")
    assert code == 0 and "bits per byte" in out, err
    code, out, err = cli("generate", "bundled", "The loop", "--max-new-tokens", "4")
    assert code == 0 and out.startswith("The loop"), err
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "bundled").mkdir(parents=True)
    (tmp_path / "runs" / "bundled" / "notes.txt").write_text("mine")
    code, _, err = cli("eval", "bundled")
    assert code == 2 and "move it away" in err
    code, _, err = cli("sweep", BUNDLED)
    assert code == 2 and "twoscale convert" in err


@pytest.mark.parametrize("name", ["geometry", "custom_rule"])
def test_notebooks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell runs, and the notebook is shipped with its figures."""
    monkeypatch.setattr(matplotlib, "get_backend", lambda: "agg")
    matplotlib.use("agg")
    book = json.loads((ROOT / "examples" / f"{name}.ipynb").read_text())
    cells = [c for c in book["cells"] if c["cell_type"] == "code"]
    space: dict[str, object] = {"__name__": "notebook"}
    with torch.random.fork_rng():
        for cell in cells:
            exec(compile("".join(cell["source"]), name, "exec"), space)
    figures = [c for c in cells if "plt.show()" in "".join(c["source"])]
    assert figures and all(any("image/png" in o.get("data", {}) for o in c["outputs"]) for c in figures)
    assert not any(o["output_type"] == "error" for c in cells for o in c["outputs"])
    matplotlib.pyplot.close("all")
