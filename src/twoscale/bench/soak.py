"""Overload for minutes: memory must not grow, every answer must be the right one and come once, and who is refused must be told so."""

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from twoscale.bench.serve import LOOPS, Drawn, Load, ask_from_outside
from twoscale.engine import generate
from twoscale.model import LoopedGPT
from twoscale.serve.scheduler import Scheduler

KNOWN = 48  # requests whose answers are computed beforehand, each alone
HOWS = ("stream", "whole", "stream", "vanish")
GROWTH = 0.02  # of the memory after warm-up


def resident() -> float:
    """Megabytes that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def soak(model: LoopedGPT, load: Load, tokenizer: Any, seconds: float, say: Callable[[str], object]) -> int:
    """Twice as many clients as rows and queue can hold; exit code 1 where something was not as it must be."""
    from twoscale.serve.app import Limits, Server

    rule = Drawn(1e-9)
    rules = dict.fromkeys(range(model.config.n_groups), rule)
    jobs = list(itertools.islice(load.jobs(model, rule), KNOWN))
    asks = []
    for i, job in enumerate(jobs):
        # Depths are drawn by place and token, so the steps tell whether the tokens are right.
        alone = generate(model, [job.prompt], job.most, exit=rule, loops=LOOPS, stop=(tokenizer.eot,))
        body = {"prompt": job.prompt, "max_tokens": job.most, "temperature": 0}
        asks.append({"body": body, "how": HOWS[i % len(HOWS)], "steps": [list(s) for s in alone.steps[0]]})
    half = max(1, load.clients // 2)
    scheduler = Scheduler(model, "lockstep", rows=half)
    server = Server(model, tokenizer, "bench", scheduler, calibrated=(rules, LOOPS), limits=Limits(seconds=600.0, queue=half))
    samples: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(max(0.05, seconds / 600)):
            samples.append(resident())

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    began = time.perf_counter()
    found = ask_from_outside(server, 2 * load.clients, seconds, asks, lambda: say(f"{time.perf_counter() - began:5.0f} s"))
    done.set()
    watching.join()
    counts = found["counts"]
    tenth = max(1, len(samples) // 10)
    early, late = median(samples[2 * tenth : 4 * tenth] or samples), median(samples[-2 * tenth :])
    say(", ".join(f"{name} {number}" for name, number in counts.items()) + f", {found['tokens']} tokens in {found['seconds']:.0f} s")
    say(f"memory {early:.0f} MB after warm-up, {late:.0f} MB at the end, highest {max(samples):.0f} MB")
    say(f"left over: {len(scheduler.running)} running, {len(scheduler.waiting)} waiting, {scheduler.held} bytes of cache")
    for words in found["troubles"]:
        say(f"wrong: {words}")
    lost = counts["asked"] - sum(counts[name] for name in ("answered", "refused", "vanished", "wrong"))
    say(f"still on their way at the end: {lost} of {2 * load.clients} clients")
    clean = not counts["wrong"] and lost <= 2 * load.clients and not scheduler.running and not scheduler.waiting and not scheduler.held
    return 0 if clean and late <= early * (1 + GROWTH) else 1
