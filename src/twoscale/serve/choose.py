"""Which policy is quicker on this machine: from the measured cost of a call with few and with many rows."""

import time
from itertools import pairwise
from statistics import median

from twoscale.engine import Engine
from twoscale.model import LoopedGPT
from twoscale.serve.scheduler import Policy

SPREAD = (3, 12)  # steps that tokens are taken to need, evenly spread
REPEATS = 5
PAYS = 0.95  # mixing depths has costs of its own


def cost_curve(model: LoopedGPT, rows: int, loops: int = 4) -> dict[int, float]:
    """Seconds of one loop step (a whole pass over its steps) with 1, 2, 4, ... rows, taking turns."""
    engine = Engine(model, loops=loops)
    sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n < rows] + [rows]
    caches = [engine.open(2) for _ in range(rows)]
    engine.run([(0, cache, [0]) for cache in caches])  # makes their levels, which is not counted
    times: dict[int, list[float]] = {n: [] for n in sizes}
    steps = loops * model.config.n_groups
    for _ in range(REPEATS + 1):
        for n in sizes:
            feeds = [(0, cache, [i % model.config.vocab_size]) for i, cache in enumerate(caches[:n])]
            started = time.perf_counter()
            engine.run(feeds)
            times[n].append((time.perf_counter() - started) / steps)
            for cache in caches:
                cache.length = 1  # the same place again
    return {n: median(values[1:]) for n, values in times.items()}


def at(curve: dict[int, float], rows: float) -> float:
    """The cost at a number of rows, in a line between those that were measured."""
    known = sorted(curve)
    if rows <= known[0]:
        return curve[known[0]]
    for low, high in pairwise(known):
        if rows <= high:
            return curve[low] + (curve[high] - curve[low]) * (rows - low) / (high - low)
    return curve[known[-1]] * rows / known[-1]


def choose_policy(model: LoopedGPT, rows: int, curve: dict[int, float] | None = None) -> tuple[Policy, str]:
    """The policy with the lower cost of a row's step, and the reason in words.

    In lockstep rows leave a loop one after the other, so calls grow small towards its end. By depth rows are spread over the groups, so
    every call has about rows / groups of them. The curve is measured where none is given.
    """
    if not model.config.n_groups:
        return "lockstep", "lockstep (the model has no loops)"
    curve = curve or cost_curve(model, rows)
    low, high = SPREAD
    left = [rows * (min(high, high - k + 1) / (high - low + 1) if k > low else 1.0) for k in range(1, high + 1)]
    lockstep = sum(at(curve, n) for n in left) / sum(left)
    part = rows / max(1, model.config.n_groups)
    depth = at(curve, part) / max(1.0, part)
    policy: Policy = "depth" if depth < PAYS * lockstep else "lockstep"
    shown = ", ".join(f"{n}: {1e3 * seconds:.2f}" for n, seconds in curve.items())
    costs = f"a row's step {1e6 * lockstep:.0f} us in lockstep, {1e6 * depth:.0f} us by depth"
    return policy, f"{policy} (ms of a loop step by rows {shown}; {costs})"
