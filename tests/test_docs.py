"""README and docs tell the truth: every command and every Python example runs, the file tree is complete, the links lead somewhere."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from conftest import ROOT, nano_run, write_corpus
from documents import CHEAPER, DOCUMENTS, NOT_RUN, SERVERS, arguments, blocks, commands, reason_not_to_run
from families import HUGINN, huginn_tensors
from twoscale.cli.main import main
from twoscale.data.tokenizer import train_bpe
from twoscale.geometry.probe import probe_geometry
from twoscale.train import start_run

UNIQUE: dict[str, Path] = {}  # every command, and the first document that has it
for document in DOCUMENTS:
    for line in commands(document):
        UNIQUE.setdefault(line, document)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """A folder with what the documents take for granted: a run, a corpus, models of two other families, a task for the harness."""
    root = tmp_path_factory.mktemp("docs")
    start_run(nano_run(steps=4, geometry_loops=4), root / "runs" / "tiny", shards, probes=[probe_geometry])
    (root / "corpus").mkdir()
    write_corpus(root / "corpus" / "text.txt", 60)
    _foreign_models(root / "models")
    (task,) = (block for path in DOCUMENTS for block in blocks(path, "yaml"))
    data = root / "my" / "lambada.jsonl"
    (root / "my" / "tasks").mkdir(parents=True)
    data.write_text("".join(json.dumps({"text": f"the loop turns until it {word}"}) + "\n" for word in ("settles", "moves")))
    task = re.sub(r"/path/to/\w+\.jsonl", str(data), task.replace("local_lambada", "my_task"))
    (root / "my" / "tasks" / "my_task.yaml").write_text(task)
    return root


def _foreign_models(folder: Path) -> None:
    """A tiny Huginn and a tiny Llama of twelve layers, with random weights and a small tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=12, num_attention_heads=4, max_position_embeddings=64
    )
    LlamaForCausalLM(llama).save_pretrained(folder / "llama")
    (folder / "huginn").mkdir()
    (folder / "huginn" / "config.json").write_text(json.dumps({**HUGINN, "vocab_size": 320, "padded_vocab_size": 320}))
    save_file({**huginn_tensors(), "transformer.wte.weight": torch.randn(320, 32) * 0.2}, folder / "huginn" / "model.safetensors")
    for name in ("llama", "huginn"):
        train_bpe(["the loop turns until no step changes the state"] * 9, 290).save(folder / name)


class Ran:
    """Which commands have run in the folder, so that each runs once and after those before it in its document."""

    def __init__(self) -> None:
        self.done: set[str] = set()

    def __call__(self, path: Path, command: str, place: Path) -> None:
        for earlier in commands(path):
            if reason_not_to_run(earlier) is None and earlier not in self.done and not earlier.startswith("curl"):
                run(earlier, place)
                self.done.add(earlier)
            if earlier == command:
                return


@pytest.fixture(scope="module")
def ran() -> Ran:
    return Ran()


def run(command: str, place: Path) -> None:
    words = arguments(command)
    if words[0] in SERVERS:
        serve(words, place)
    else:
        assert main(words) == 0, words


def serve(words: list[str], place: Path) -> None:
    """Start a server on a free port, wait until it is ready, ask it once, and stop it."""
    words = [word for i, word in enumerate(words) if word != "--port" and words[max(0, i - 1)] != "--port"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "GRADIO_ANALYTICS_ENABLED": "False"}
    with open(place / "server.log", "w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "twoscale", *words, "--port", "0"], cwd=place, env=environment, stdout=log, stderr=log
        )
        try:
            address = wait_for_address(process, place / "server.log")
            if words[0] == "serve":
                for curl in (c for path in DOCUMENTS for c in commands(path) if c.startswith("curl")):
                    ask(re.sub(r"http://[\d.]+:\d+", address, curl))
            else:
                with urllib.request.urlopen(address, timeout=60) as page:
                    assert b"<html" in page.read()
        finally:
            process.send_signal(signal.SIGTERM if words[0] == "serve" else signal.SIGINT)
            try:
                code = process.wait(timeout=60)
            finally:
                process.kill()
    assert code in ((0,) if words[0] == "serve" else (0, 130)), (place / "server.log").read_text()


def wait_for_address(process: subprocess.Popen[bytes], log: Path) -> str:
    """The address that a server prints once it listens."""
    for _ in range(1800):
        if found := re.search(r"http://[\d.]+:\d+", log.read_text()):
            return found[0]
        assert process.poll() is None, log.read_text()
        time.sleep(0.1)
    raise AssertionError(f"no address after three minutes: {log.read_text()}")


def ask(curl: str) -> None:
    """Run a curl command; its answer is a completion with text."""
    done = subprocess.run(["sh", "-c", f"{curl} --max-time 60 --retry 5 --retry-connrefused"], capture_output=True, text=True)
    assert json.loads(done.stdout)["choices"][0]["text"], done


@pytest.mark.parametrize(("command", "path"), UNIQUE.items(), ids=list(UNIQUE))
def test_commands(command: str, path: Path, place: Path, ran: Ran, monkeypatch: pytest.MonkeyPatch, undrawn: None) -> None:
    """Every command in README and docs runs and ends with 0, small settings in place of dear ones."""
    if (why := reason_not_to_run(command)) is not None:
        pytest.skip(why)
    if command.startswith("curl"):
        command = next(c for c in commands(path) if c.startswith("twoscale serve"))  # which asks by all curl commands
    monkeypatch.chdir(place)
    ran(path, command, place)


def test_tables_are_used() -> None:
    """Every exception that the tests make is for a command that is there."""
    words = [re.sub(r"^(torchrun (--\S+ )+-m )?twoscale (launch (--\S+ \S+ )+)?", "", command) for command in UNIQUE]
    assert all(any(word.startswith(start) for word in words) for start, _, _ in CHEAPER)
    patterns = [part for pattern in NOT_RUN for part in pattern.split("|")]
    assert all(any(re.fullmatch(pattern, command) for command in UNIQUE) for pattern in patterns), patterns


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if blocks(p, "python")], ids=lambda p: p.name)
def test_python(path: Path, place: Path, monkeypatch: pytest.MonkeyPatch, undrawn: None) -> None:
    """Every Python example runs as it stands, in a folder with a trained run."""
    monkeypatch.chdir(place)
    for block in blocks(path, "python"):
        exec(compile(block, path.name, "exec"), {})


def test_install_commands() -> None:
    """The extras that README and docs install exist, and the constraints file is the repository's."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for command in UNIQUE:
        if command.startswith("pip install"):
            assert "-c constraints.txt -e" in command, command
            named = re.search(r"\.\[([\w,]+)\]", command)
            assert named is None or set(named[1].split(",")) <= set(extras), command


def test_file_tree() -> None:
    """The file tree in docs/architecture.md has a line for every file of the package, and none for files that are not there."""
    tree = next(b for b in blocks(ROOT / "docs" / "architecture.md", "") if b.startswith("src/twoscale/"))
    listed = set(re.findall(r"^\s+([\w/]+\.py)", tree, flags=re.M))
    package = ROOT / "src" / "twoscale"
    existing = {str(p.relative_to(package)) for p in package.rglob("*.py") if p.name != "__init__.py"}
    assert listed == existing, listed ^ existing


def test_links() -> None:
    """Every relative link leads to a file, and every test that is named exists."""
    for path in DOCUMENTS:
        text = path.read_text()
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
            assert (path.parent / target).exists(), (path, target)
        for name in re.findall(r"`(\w+/\w+\.(?:py|c))`", text):
            assert (ROOT / name).exists() or (ROOT / "src" / "twoscale" / name).exists(), (path, name)
        for name, test in re.findall(r"`(tests/\w+\.py)(?:::(\w+))?`", text):
            assert (ROOT / name).exists() and (not test or f"def {test}(" in (ROOT / name).read_text()), (path, name, test)


def test_nothing_large_is_tracked() -> None:
    """The repository holds no large file but the bundled model."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, files.stdout.split("\0")):
        assert not (ROOT / name).exists() or (ROOT / name).stat().st_size < (
            10_000_000 if name.endswith("bundled/model.safetensors") else 2_000_000
        ), name
