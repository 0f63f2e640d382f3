"""Overload for minutes: memory must not grow, every answer must be the right one and come once, and who is refused must be told so."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from twoscale.bench.serve import MAX_STEPS, Drawn, Load, ask_from_outside
from twoscale.engine import Scheduler, generate
from twoscale.engine.policy import POLICIES
from twoscale.model import LoopedGPT

KNOWN = 48  # requests whose answers are computed beforehand, each alone
HOWS = ("stream", "whole", "stream", "vanish")
KVS = ("exact", "exact", "exact", "exact", "last")
GROWTH = 0.02  # of the memory after warm-up


def resident() -> float:
    """Megabytes that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def soak(model: LoopedGPT, load: Load, tokenizer: Any, seconds: float, say: Callable[[str], object]) -> int:
    """Twice as many clients as rows and queue can hold, half of the time by each policy; exit code 1 where anything is amiss."""
    from twoscale.serve.limits import Limits
    from twoscale.serve.server import Server

    rules = dict.fromkeys(range(model.config.n_groups), Drawn(1e-9))
    asks, half, clean = _asks(model, load, tokenizer), max(1, load.clients // 2), True
    for policy in POLICIES:
        scheduler = Scheduler(model, policy, max_num_seqs=half)
        server = Server(model, tokenizer, "bench", scheduler, calibration=(rules, MAX_STEPS), limits=Limits(timeout=600.0, max_queue=half))
        say(f"{policy}, {seconds / 2:.0f} s")
        with sampling(seconds / 600) as samples:
            found = ask_from_outside(server, 2 * load.clients, seconds / 2, asks, lambda: None, drain=300.0)
        counts, tenth = found["counts"], max(1, len(samples) // 10)
        lost = counts["asked"] - sum(counts[name] for name in ("answered", "refused", "vanished", "wrong"))
        early, late = median(samples[2 * tenth : 4 * tenth] or samples), median(samples[-2 * tenth :])
        outcome = ", ".join(f"{name} {number}" for name, number in counts.items())
        say(f"{policy}: {outcome}, lost {lost}; {found['tokens']} tokens in {found['seconds']:.0f} s")
        say(f"memory {early:.0f} MB after warm-up, {late:.0f} MB at the end, highest {max(samples):.0f} MB")
        say(f"left over: {len(scheduler.running)} running, {len(scheduler.waiting)} waiting, {scheduler.reserved_bytes} bytes of cache")
        for words in found["troubles"]:
            say(f"wrong: {words}")
        left = len(scheduler.running) + len(scheduler.waiting) + scheduler.reserved_bytes
        clean = clean and not counts["wrong"] and not lost and not left and late <= early * (1 + GROWTH)
    say("clean" if clean else "NOT clean")
    return 0 if clean else 1


def _asks(model: LoopedGPT, load: Load, tokenizer: Any) -> list[dict[str, Any]]:
    """Requests of several kinds, with the steps that each takes alone. Depths are drawn by place and token, so steps tell tokens."""
    asks = []
    for i, request in enumerate(itertools.islice(load.requests(model, Drawn(1e-9)), KNOWN)):
        kv = KVS[i % len(KVS)]
        new = request.sampling.max_new_tokens
        alone = generate(model, [request.prompt], new, exit=Drawn(1e-9), loops=MAX_STEPS, kv=kv, stop=(tokenizer.eot,))
        body = {"prompt": request.prompt, "max_tokens": new, "temperature": 0, "kv": kv}
        asks.append({"body": body, "how": HOWS[i % len(HOWS)], "steps": [list(s) for s in alone.steps[0]]})
    return asks


@contextmanager
def sampling(interval: float) -> Iterator[list[float]]:
    """Memory of this process, looked at again and again."""
    samples, done = [resident()], threading.Event()

    def watch() -> None:
        while not done.wait(max(0.05, interval)):
            samples.append(resident())

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield samples
    finally:
        done.set()
        watching.join()
