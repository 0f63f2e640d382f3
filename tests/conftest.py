"""Shared pieces of the tests: small configs, a small corpus, and a way to call the command line."""

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import twoscale
from models import small_model
from twoscale.cli.main import main
from twoscale.config import DataConfig, RunConfig, TrainConfig, presets
from twoscale.data import prepare
from twoscale.train import start_run

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"


# Files that take longest, the longest first: they are begun first, so that none runs alone at the end where several run at a time.
SLOW = ("train", "docs", "lint", "memory", "sweep", "report", "engine", "reproduce", "serve", "bundled", "generate", "tradeoff", "export")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}.py": place for place, name in enumerate(SLOW)}
    items.sort(key=lambda item: order.get(item.path.name, len(SLOW)))


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)


def nano_run(**train: object) -> RunConfig:
    """The nano preset with changes to its training."""
    config = presets.nano()
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **train))


def write_corpus(path: Path, documents: int = 40) -> Path:
    """Plain English-like documents, each different."""
    words = ["the", "loop", "turns", "and", "a", "state", "moves", "until", "it", "settles", "near", "a", "point", "no", "step", "changes"]
    texts = []
    for d in range(documents):
        texts.append(" ".join(words[(i * (d + 3) + d) % len(words)] for i in range(120 + d)) + f" ({d}).\n")
    path.write_text("<|endoftext|>\n".join(texts))
    return path


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.txt")


@pytest.fixture(scope="session")
def shards(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte shards of the small corpus."""
    out = tmp_path_factory.mktemp("shards") / "data"
    prepare(DataConfig(source=str(corpus), val_fraction=0.2), out)
    return out


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """A nano run of twenty steps."""
    out = tmp_path_factory.mktemp("trained") / "run"
    start_run(nano_run(steps=20), out, shards)
    return out


@pytest.fixture(scope="session")
def loaded(trained: Path):  # type: ignore[no-untyped-def]
    """Its model and tokenizer."""
    return twoscale.load(trained)


class CommandLine:
    """Calls main([...]) in this process and keeps what it said."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *args: object) -> tuple[int, str, str]:
        self.capsys.readouterr()
        code = main([str(a) for a in args])
        out, err = self.capsys.readouterr()
        return code, out, err


def is_one_line(err: str) -> bool:
    return len(err.strip().splitlines()) == 1 and "Traceback" not in err and err.startswith("twoscale ")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures for print are made but not drawn: their files are empty. For tests of what is around them; test_report.py draws them."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **how: Path(path).touch())


@pytest.fixture
def browser() -> Iterator[object]:
    """Headless Chromium, with a note of every request and of everything the console said."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed (the extra twoscale[test])")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("Chromium is not installed (Debian's packages chromium and chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    with tempfile.TemporaryDirectory() as profile:
        for word in (
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--window-size=1280,1600", f"--user-data-dir={profile}",
        ):  # fmt: skip
            options.add_argument(word)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        yield opened
        opened.quit()


__all__ = ["ROOT", "SHARED", "CommandLine", "TrainConfig", "is_one_line", "nano_run", "small_model", "write_corpus"]
