"""Clients at work with and without an attack: a thousand half-open connections and one request for as much as a request may ask for.

The same requests are sent with and without it, in turns, and each is compared with itself. All on 127.0.0.1, bounded in number and time.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from statistics import median
from typing import Any

from twoscale.bench.serve import MAX_STEPS, Drawn, Load
from twoscale.config import UserError
from twoscale.engine import Scheduler
from twoscale.model import LoopedGPT

CONNECTIONS = 1000
EACH = 4  # requests of a client in one pass
SECONDS = 300.0  # after which an attack ends by itself
BOUND = 3.0  # what an attack may slow a request down by


@dataclass(frozen=True)
class Attacked:
    """Seconds of every request, in one entry for each round."""

    quiet: list[list[float]]
    attacked: list[list[float]]
    heavy: int
    """New tokens of the heavy request while clients were at work."""

    @property
    def ratios(self) -> list[float]:
        """How much slower each request was under attack, medians over the rounds."""
        quiet, attacked = ([median(seconds) for seconds in zip(*passes, strict=True)] for passes in (self.quiet, self.attacked))
        return [after / before for before, after in zip(quiet, attacked, strict=True)]


def heavy(model: LoopedGPT) -> dict[str, Any]:
    """16 prompts, four texts each, to the end of the context, with 64 loops and no exits."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    new = model.config.block_size - len(prompt) + 1
    loops = {"exit": "none", "loops": 64} if model.config.n_groups else {}
    return {"prompt": [prompt] * 16, "n": 4, "max_tokens": new, "temperature": 0, **loops}


@contextmanager
def script(task: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    """attackers.py in a process of its own, which ends with the block."""
    with resources.as_file(resources.files("twoscale.bench").joinpath("attackers.py")) as path:
        process = subprocess.Popen([sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            yield process
        finally:
            process.kill()
            process.communicate()


def bench_attack(
    model: LoopedGPT, load: Load, tokenizer: Any, rounds: int, say: Callable[[str], object], connections: int = CONNECTIONS
) -> Attacked:
    """Passes of the same requests without and with the attack, in turns; a first pass to warm up is not counted."""
    from twoscale.serve.app import create_app
    from twoscale.serve.limits import Limits
    from twoscale.serve.local import run_in_thread
    from twoscale.serve.server import Server

    rules = {g: Drawn(1e-9) for g in range(model.config.n_groups)}
    scheduler = Scheduler(model, "lockstep", max_num_seqs=max(2, 2 * load.clients))
    server = Server(model, tokenizer, "bench", scheduler, calibration=(rules, MAX_STEPS), limits=Limits(timeout=SECONDS))
    requests = itertools.islice(load.requests(model, None), EACH * load.clients)
    asks = [{"prompt": r.prompt, "max_tokens": r.sampling.max_new_tokens, "temperature": 0} for r in requests]
    quiet: list[list[float]] = []
    attacked: list[list[float]] = []
    more = 0
    with run_in_thread(create_app(server)) as address:

        def clients() -> tuple[list[float], int]:
            """Seconds of each request, and new tokens of all requests meanwhile."""
            before = scheduler.counters.tokens
            with script({"role": "clients", "address": address, "clients": load.clients, "asks": asks}) as process:
                assert process.stdout is not None
                found = json.loads(process.stdout.readline() or "[]")
            if not found or None in found:
                raise UserError(f"{found.count(None)} of {len(asks)} requests were not answered")
            return [float(seconds) for seconds in found], scheduler.counters.tokens - before

        own = clients()[1]
        for round_ in range(rounds):
            quiet.append(clients()[0])
            task = {"role": "attackers", "address": address, "connections": connections, "heavy": heavy(model), "seconds": SECONDS}
            with script(task) as attackers:
                assert attackers.stdout is not None
                attackers.stdout.readline()
                seconds, tokens = clients()
            attacked.append(seconds)
            more += tokens - own
            say(f"round {round_ + 1}: median {median(quiet[-1]):.3f} s, attacked {median(attacked[-1]):.3f} s")
    return Attacked(quiet, attacked, more)


def words(found: Attacked) -> list[str]:
    """The figures as lines."""
    ratios = sorted(found.ratios)
    within = sum(ratio <= BOUND for ratio in ratios)
    return [
        f"{len(ratios)} requests; attack: {CONNECTIONS} half-open connections, one heavy request (it got {found.heavy} tokens meanwhile)",
        _latency("without", found.quiet),
        _latency("under attack", found.attacked),
        f"each request beside itself: median {median(ratios):.2f}x, worst {ratios[-1]:.2f}x; {within} of {len(ratios)} within {BOUND:g}x",
    ]


def _latency(name: str, passes: list[list[float]]) -> str:
    seconds = list(itertools.chain.from_iterable(passes))
    return f"{name:<15} latency median {median(seconds):.3f} s, worst {max(seconds):.3f} s"
