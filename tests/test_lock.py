"""One command at a time writes to a folder: the second one ends with a line that names the first, and nothing is lost."""

import errno
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from conftest import CommandLine, nano_run
from forked import start_process
from training import arguments, finish, losses, wait_for_step
from twoscale.config import DataConfig, UserError, lock as module
from twoscale.config.lock import is_lock, lock
from twoscale.data import prepare


def test_two_trainings_in_one_folder(tmp_path: Path, shards: Path) -> None:
    """A second `train` in the folder of a running one ends with one line and code 2; the first one's metrics are whole."""
    config = nano_run(steps=60, checkpoint_interval=20, eval_interval=20)
    words = arguments(config, tmp_path / "run", shards)
    first = start_process(words)
    wait_for_step(tmp_path / "run", 3)
    first.send_signal(signal.SIGSTOP)  # so that it cannot end before the second one has looked
    said = finish(start_process(words), 2).strip()
    first.send_signal(signal.SIGCONT)
    assert said.startswith(f"twoscale train: {tmp_path / 'run'} is in use by another `train`, process {first.pid} on"), said
    assert len(said.splitlines()) == 1
    finish(first)
    assert len(losses(tmp_path / "run")) == 60 and not [p for p in (tmp_path / "run").iterdir() if is_lock(p)]


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    """The lock of a process that was killed with -9 is free, though its file is still there."""
    script = (
        "import os, sys, pathlib; from twoscale.config.lock import lock\n"
        "with lock(pathlib.Path(sys.argv[1]), 'train'): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)]).returncode == -9
    assert (tmp_path / ".train.lock").exists()
    with lock(tmp_path, "train"):
        pass
    assert not list(tmp_path.iterdir())


def test_one_holder(tmp_path: Path) -> None:
    """While a lock is held nobody else gets it, but another name is free; afterwards it can be had again."""
    with lock(tmp_path, "train"):
        with pytest.raises(UserError, match=rf"another `train`, process {os.getpid()} on"), lock(tmp_path, "train"):
            pass
        with lock(tmp_path, "sweep"):
            pass
        assert (tmp_path / ".train.lock").exists()
    with lock(tmp_path, "train"):
        (tmp_path / ".train.lock").write_text("\udcff", errors="surrogateescape")
        with pytest.raises(UserError, match="in use by another `train`:"), lock(tmp_path, "train"):
            pass
    with pytest.raises(UserError, match="no folder"), lock(tmp_path / "none", "train"):
        pass


def test_a_lock_file_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that opened the file just before its holder removed it does not take the removed file for the lock."""
    flock, calls = module.fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        calls.append(descriptor)
        if len(calls) == 1:
            (tmp_path / ".train.lock").unlink()
        flock(descriptor, how)

    monkeypatch.setattr(module.fcntl, "flock", late)
    with lock(tmp_path, "train"):
        assert len(calls) == 2 and (tmp_path / ".train.lock").exists()


def test_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system has no locks a warning says so and the command goes on."""

    def none(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(module.fcntl, "flock", none)
    with pytest.warns(UserWarning, match="No locks available"), lock(tmp_path, "train"):
        pass
    monkeypatch.setattr(module, "fcntl", None)
    with warnings.catch_warnings(), lock(tmp_path, "train"):
        warnings.simplefilter("error")


def test_other_commands(tmp_path: Path, trained: Path, corpus: Path, cli: CommandLine) -> None:
    """`prepare`, `trace`, `sweep` and `calibrate` keep a second one of their kind out of the folder that they write to."""
    (tmp_path / "data").mkdir()
    for command, folder, words in (
        ("prepare", tmp_path / "data", ["--source", corpus, "--out", tmp_path / "data"]),
        ("trace", trained, [trained]),
        ("sweep", trained, [trained]),
        ("calibrate", trained, [trained, "--windows", 2]),
    ):
        with lock(folder, command):
            code, _, err = cli(command, *words)
        assert code == 2 and f"{folder} is in use by another `{command}`" in err and len(err.strip().splitlines()) == 1, err
    prepare(DataConfig(source=str(corpus)), tmp_path / "data")
