"""Commands in processes of their own, forked from one that has imported torch and the package: a start takes a moment, not seconds.

All of them run on one thread each. What a command leaves behind when it is killed, and what several of them do together, is as with
`python -m twoscale`: it is the same module that runs.
"""

import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "twoscale.api", "twoscale.train", "twoscale.cli.main", "twoscale.cli.train", "twoscale.cli.sweep"])


class Command:
    """`twoscale WORDS` in one process, or in several that train together as torchrun starts them; used like subprocess.Popen."""

    def __init__(self, words: list[str], processes: int = 1, **environment: str) -> None:
        with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
            forkserver.ensure_running()
        handle, log = tempfile.mkstemp(suffix=".log")
        os.close(handle)
        self.log = Path(log)
        ranks = [environment]
        if processes > 1:
            world = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
            ranks = [{**environment, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
        self.processes = [CONTEXT.Process(target=_run, args=(words, log, rank), daemon=True) for rank in ranks]
        for process in self.processes:
            process.start()

    @property
    def pid(self) -> int:
        assert self.processes[0].pid is not None
        return self.processes[0].pid

    @property
    def returncode(self) -> int | None:
        """The first exit code that is not 0; None while one is running."""
        codes = [process.exitcode for process in self.processes]
        return None if None in codes else next((code for code in codes if code), 0)

    def send_signal(self, number: int) -> None:
        for process in self.processes:
            assert process.pid is not None
            os.kill(process.pid, number)

    def communicate(self, timeout: float = 300) -> tuple[str, None]:
        """Wait for the end; what all of them have printed."""
        for process in self.processes:
            process.join(timeout)
        said = self.log.read_text()
        if self.returncode is None:
            self.send_signal(9)
            raise subprocess.TimeoutExpired("twoscale", timeout, said)
        self.log.unlink()
        return said, None


def _run(words: list[str], log: str, environment: dict[str, str]) -> None:
    """In the new process: `python -m twoscale WORDS`, with its output in a file."""
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = ["twoscale", *words]
    runpy.run_module("twoscale", run_name="__main__")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
