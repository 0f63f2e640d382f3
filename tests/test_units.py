"""Preparing the files of a source by several workers: the same shards, kills at any point, nodes that share the work."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from conftest import CommandLine, is_one_line, write_corpus
from twoscale.config import DataConfig, UserError
from twoscale.data import Tokenizer, prepare
from twoscale.data.sources import Documents
from twoscale.data.units import FOLDER, Units, Workers


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven files of different lengths, one of them with documents that are left out."""
    out = tmp_path_factory.mktemp("files")
    for i, documents in enumerate((3, 21, 1, 14, 30, 2, 9)):
        write_corpus(out / f"{i}.txt", documents)
    (out / "2.txt").write_bytes(
        b"one bad byte \xff " + b"in a long text. " * 20 + b"\n<|endoftext|>\n \n<|endoftext|>\n" + bytes(range(128, 256))
    )
    return out


@pytest.fixture(scope="module")
def config(folder: Path) -> DataConfig:
    return DataConfig(source=str(folder), val_fraction=0.2, tokenizer="bpe", bpe_vocab=300, shard_tokens=3000)


@pytest.fixture(scope="module")
def alone(config: DataConfig, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process makes of them, without workers."""
    out = tmp_path_factory.mktemp("alone") / "out"
    manifest = prepare(config, out)
    assert len(manifest["shards"]) >= 5 and manifest["counts"] == {"documents": 82, "empty": 1, "bad_utf8": 1, "not_text": 1}
    return files(out)


def files(out: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in out.iterdir()}


def make_units(config: DataConfig, out: Path) -> Units:
    """The units of a folder that was opened by a run that did not get far."""

    class Stopped(BaseException):
        pass

    def stop(documents: int, tokens: int, doing: str) -> None:
        if doing == "encoding":
            raise Stopped

    with pytest.raises(Stopped):
        prepare(config, out, stop)
    (out / FOLDER).mkdir(exist_ok=True)
    return Units(config, out, Documents(config), Tokenizer.load(out))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_change_nothing(workers: int, config: DataConfig, alone: dict[str, bytes], tmp_path: Path) -> None:
    """Shards, manifest and all other files are byte for byte those of one process, for 1, 2 and 3 workers."""
    prepare(config, tmp_path / "out", workers=workers)
    assert files(tmp_path / "out") == alone


def test_units_read_as_their_files(config: DataConfig, tmp_path: Path) -> None:
    """A unit gives the documents of its file, those before `skip` without tokens; without its tokens the file is read again."""
    units = make_units(config, tmp_path / "out")
    for number in (1, 2):
        direct = list(units.read(number))
        assert units.claim(number) and not units.claim(number)
        for skip in (0, 2, len(direct)):
            stored = list(units.read(number, skip))
            assert [d.kind for d in stored] == [d.kind for d in direct]
            for place, (a, b) in enumerate(zip(stored, direct, strict=True)):
                assert (a.ids is None and (place < skip or b.ids is None)) or (
                    np.array_equal(a.ids, b.ids) and a.text_bytes == b.text_bytes
                )
        units.forget_tokens(number)
        assert [d.ids is None for d in units.read(number, 1)] == [d.ids is None or not i for i, d in enumerate(direct)]


def test_limits(config: DataConfig, folder: Path, tmp_path: Path) -> None:
    """max_documents and max_tokens stop at the same document with workers as without."""
    for name, limit in (("documents", {"max_documents": 40}), ("tokens", {"max_tokens": 9000})):
        limited = DataConfig(source=str(folder), val_fraction=0.2, shard_tokens=3000, **limit)
        prepare(limited, tmp_path / name)
        prepare(limited, tmp_path / f"{name}-2", workers=2)
        assert files(tmp_path / name) == files(tmp_path / f"{name}-2")


def test_killed_at_any_point(config: DataConfig, alone: dict[str, bytes], tmp_path: Path) -> None:
    """kill -9 of the command and of a worker, before, between and after shards: the same command ends with the same files."""
    out, command = tmp_path / "out", [sys.executable, "-c", KILLED]
    for at, whom in ((1, "main"), (26, "worker"), (60, "main"), (82, "main")):
        process = subprocess.Popen([*command, str(at), whom, config.source, str(out)], stderr=subprocess.PIPE, text=True)
        _, err = process.communicate(timeout=120)
        assert process.returncode == (-signal.SIGKILL if whom == "main" else 2), err
        assert whom == "main" or "a worker has failed" in err
        assert not (out / "manifest.json").exists() and len(list(out.glob("train-*.bin"))) >= (2 if at == 60 else 0)
    prepare(config, out, workers=2)
    assert files(out) == alone


KILLED = """
import os, sys
from pathlib import Path
from twoscale.config import DataConfig, UserError
from twoscale.data import prepare, units
at, whom, source, out = sys.argv[1:]
started = []
begin = units.Workers.__init__
units.Workers.__init__ = lambda self, *args: (begin(self, *args), started.append(self))[0]
def progress(documents, tokens, doing):
    if doing == "encoding" and documents == int(at):
        if whom == "main":
            os.kill(os.getpid(), 9)
        started[0].processes[0].kill()
        started[0].processes[0].wait()
        started[0].check()
try:
    prepare(DataConfig(source=source, val_fraction=0.2, tokenizer="bpe", bpe_vocab=300, shard_tokens=3000), Path(out), progress, workers=2)
except UserError as error:
    sys.stderr.write(str(error))
    sys.exit(2)
"""


def test_nodes_share_the_work(config: DataConfig, alone: dict[str, bytes], tmp_path: Path) -> None:
    """Two nodes on one folder make the shards of one; where the node that writes them is killed, the other one finishes."""
    out = tmp_path / "out"
    words = ["prepare", "--source", config.source, "--val-fraction", "0.2", "--tokenizer", "bpe", "--bpe-vocab", "300"]
    command = [sys.executable, "-m", "twoscale", *words, "--shard-tokens", "3000", "--out", str(out), "--workers", "1", "--share"]
    process = subprocess.Popen([sys.executable, "-c", WRITER, *command[3:]], stderr=subprocess.DEVNULL)
    for _ in range(1200):
        if (out / ".prepare.lock").exists():
            break
        time.sleep(0.05)
    other = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.wait(timeout=120) == -signal.SIGKILL
    _, err = other.communicate(timeout=120)
    assert other.returncode == 0, err
    assert files(out) == alone


WRITER = """
import os, sys
from twoscale.data.progress import DocumentLine
said = DocumentLine.__call__
def progress(self, documents, tokens, doing):
    if documents >= 40 and doing == "encoding":
        os.kill(os.getpid(), 9)
    said(self, documents, tokens, doing)
DocumentLine.__call__ = progress
from twoscale.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_bad_input(config: DataConfig, tmp_path: Path, cli: CommandLine) -> None:
    """A file that a worker cannot read, and a number of workers that makes no sense, are one line and exit code 2; nothing is lost."""
    (tmp_path / "in").mkdir()
    write_corpus(tmp_path / "in" / "a.txt", 9)
    (tmp_path / "in" / "b.jsonl").write_text('{"text": "fine"}\nnot json\n')
    code, _, err = cli("prepare", "--source", tmp_path / "in", "--out", tmp_path / "out", "--workers", 2)
    assert code == 2 and is_one_line(err) and "b.jsonl, line 2 is not JSON" in err
    code, _, err = cli("prepare", "--source", tmp_path / "in", "--out", tmp_path / "out", "--workers", -1)
    assert code == 2 and is_one_line(err) and "--workers -1" in err
    units = make_units(config, tmp_path / "cut")
    assert units.claim(4)
    with open(units.tokens(4), "r+b") as f:
        f.truncate(100)
    with pytest.raises(UserError, match="is truncated"):
        list(units.read(4))


def test_orphans_end(config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker whose command was killed leaves, and its file stays unclaimed."""
    units = make_units(config, tmp_path / "out")
    monkeypatch.setattr("twoscale.data.units.BATCH_DOCUMENTS", 1)
    monkeypatch.setattr("twoscale.data.units.PARENT", os.getppid() + 1)
    with pytest.raises(SystemExit):
        units.claim(1)
    assert not units.index(1).exists() and not list((tmp_path / "out" / FOLDER).iterdir())
    with Workers(tmp_path / "out", 1) as pool:
        pool.wait()
    assert all(units.index(number).exists() for number in range(len(units)))
