"""`twoscale bench decode --busy` and `bench serve --busy`: the same work on free cores, with one core kept busy, and with all of them.

Other programs are processes that compute without end; they are stopped and continued between the measurements, so that the three cases take
turns within one run. Every figure is a ratio to the free case of its own round.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from twoscale import exits
from twoscale.config.cpu import usable_cores
from twoscale.engine import Scheduler, generate
from twoscale.model import LoopedGPT

SETTLE = 0.3  # seconds that the system gets to spread processes over its cores
README_RULE, README_LOOPS = exits.Acceleration(1.0), 30


class OtherPrograms:
    """Processes that keep cores busy; `busy(n)` lets n of them run."""

    def __init__(self, count: int) -> None:
        self.processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]

    def busy(self, n: int) -> None:
        for i, process in enumerate(self.processes):
            os.kill(process.pid, signal.SIGCONT if i < n else signal.SIGSTOP)
        time.sleep(SETTLE)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Beside:
    """Seconds of some work in each round: with free cores, with one core busy, with all of them busy."""

    free: list[float]
    one: list[float]
    all: list[float]

    @property
    def words(self) -> str:
        ratios = (f"{median(a / b for a, b in zip(busy, self.free, strict=True)):6.2f}x" for busy in (self.one, self.all))
        return f"{median(self.free) * 1e3:10.2f} ms" + "".join(f"{ratio:>16}" for ratio in ratios)


def beside_other_programs(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, Beside]:
    """Every work in every case, in turns; the first call of each is not counted."""
    cases = (0, 1, usable_cores())
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in cases] for name in works}
    for work in works.values():
        work()
    with contextlib.closing(OtherPrograms(max(cases))) as others:
        for _ in range(rounds):
            for case, n in enumerate(cases):
                others.busy(n)
                for name, work in works.items():
                    started = time.perf_counter()
                    work()
                    seconds[name][case].append(time.perf_counter() - started)
    return {name: Beside(*values) for name, values in seconds.items()}


def decode_works(models: Mapping[str, tuple[LoopedGPT, list[int], int]]) -> dict[str, Callable[[], object]]:
    """One text by the README's rule for each model: (model, prompt, new tokens)."""

    def work(model: LoopedGPT, ids: list[int], new: int) -> Callable[[], object]:
        return lambda: generate(model, [ids], new, exit=README_RULE, loops=README_LOOPS, temperature=0.8)

    return {name: work(*settings) for name, settings in models.items()}


@contextlib.contextmanager
def served(model: LoopedGPT, tokenizer: Any, prompt: list[int], new: int) -> Iterator[Callable[[], object]]:
    """One request over HTTP to a server in this process, again and again."""
    import httpx

    from twoscale.serve.app import create_app
    from twoscale.serve.local import run_in_thread
    from twoscale.serve.server import Server

    rules = dict.fromkeys(range(model.config.n_groups), README_RULE)
    server = Server(model, tokenizer, "bench", Scheduler(model), calibration=(rules, README_LOOPS))
    body = {"prompt": prompt, "max_tokens": new, "temperature": 0.8, "seed": 1}
    with run_in_thread(create_app(server)) as address, httpx.Client(timeout=600.0, trust_env=False) as client:
        yield lambda: client.post(f"{address}/v1/completions", json=body).raise_for_status()
