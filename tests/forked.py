"""Processes forked from one that has imported torch and the package: a start takes a moment, not seconds.

All of them begin with one thread. What a command leaves behind when it is killed, and what several of them do together, is as with
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


class Forked:
    """One new process for each environment, all with the same words; used like subprocess.Popen."""

    def __init__(self, words: list[str], environments: list[dict[str, str]], script: str | None = None) -> None:
        """Runs `python -m twoscale WORDS`, or with a script `python -c SCRIPT WORDS`."""
        with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"}):
            forkserver.ensure_running()
        self.folder = tempfile.TemporaryDirectory()
        self.logs = [Path(self.folder.name) / name for name in ("stdout", "stderr")]
        self.processes = [
            CONTEXT.Process(target=_run, args=(words, script, [str(log) for log in self.logs], environment), daemon=True)
            for environment in environments
        ]
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

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Wait for the end; what all of them have printed, and their messages."""
        for process in self.processes:
            process.join(timeout)
        out, err = (log.read_text() if log.exists() else "" for log in self.logs)
        if self.returncode is None:
            self.send_signal(9)
            raise subprocess.TimeoutExpired("twoscale", timeout, out, err)
        self.output = out
        return out, err


def start_process(words: list[str], processes: int = 1) -> Forked:
    """`twoscale WORDS` in one process, or in several that work together as torchrun starts them."""
    return Forked(words, environments(processes))


def start_script(script: str, processes: int, *args: str, nodes: int = 1) -> Forked:
    """A script in several processes that work together, on so many nodes."""
    return Forked(list(args), environments(processes, nodes), script)


def environments(processes: int, nodes: int = 1) -> list[dict[str, str]]:
    """What torchrun sets for each of so many processes, which share the nodes evenly."""
    if processes == 1:
        return [{}]
    local = processes // nodes
    world = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(local), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    return [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank % local)} for rank in range(processes)]


def run_script(script: str, *args: str, **environment: str) -> str:
    """The output of a script in a process of its own: a crash there is a failed test here, not the end of pytest."""
    process = Forked(list(args), [environment], script)
    out, err = process.communicate()
    assert process.returncode == 0, f"exit code {process.returncode}\n{out[-2000:]}{err[-2000:]}"
    return out


def _run(words: list[str], script: str | None, logs: list[str], environment: dict[str, str]) -> None:
    """In the new process."""
    os.environ.update(environment)
    for descriptor, log in enumerate(logs, start=1):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), descriptor)
    if script is not None:
        sys.argv = ["-c", *words]
        exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = ["twoscale", *words]
        runpy.run_module("twoscale", run_name="__main__")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
