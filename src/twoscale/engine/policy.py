"""Which rows share the engine's next call: the scheduling policies, and the choice between them from measured costs.

    lockstep   requests join at token boundaries; the rows of a round go through the stages together
    depth      tokens enter at any time; every call takes the stage where most rows are

Which is quicker depends on what a call costs with few and with many rows, so it is measured. A policy of your own is a subclass of
`Policy` and an entry of POLICIES.
"""

import math
import time
from itertools import pairwise
from statistics import median

from twoscale.config import UserError
from twoscale.engine.engine import Engine
from twoscale.engine.pipeline import Pipeline
from twoscale.engine.request import loop_params
from twoscale.model import LoopedGPT

MIN_PATIENCE, PATIENCE = 16, 2.0


class Policy:
    """How tokens go through a pipeline."""

    joins = False
    """Whether tokens may enter while others are in flight."""
    calls_at_once = True
    """Whether a loop is applied until rows leave it; else there is a new choice after every call."""

    def stage(self, pipeline: Pipeline) -> int:
        """The stage of the next call."""
        raise NotImplementedError

    def split_at(self, pipeline: Pipeline) -> float:
        """The number of calls of the pipeline after which the rows at its first stage no longer keep the others waiting."""
        return math.inf


class Lockstep(Policy):
    """A round: the rows that entered together go through the stages together. Rows that have left a loop wait for the others.

    They wait for PATIENCE times the calls that they took themselves, and at least for MIN_PATIENCE calls; then the rows that are still
    inside become a round of their own, so a request with many loops does not hold up the others.
    """

    def stage(self, pipeline: Pipeline) -> int:
        return pipeline.lowest

    def split_at(self, pipeline: Pipeline) -> float:
        if len(pipeline.flights) == 1:
            return math.inf
        stage = pipeline.lowest
        later = [w for at, waiting in pipeline.waiting.items() if at > stage for w in waiting]
        return min((w.arrived + max(MIN_PATIENCE, PATIENCE * w.steps) for w in later), default=math.inf)


class Depth(Policy):
    """Every call takes the rows of one stage: the one where most of them are, the latest stage among equals."""

    joins = True
    calls_at_once = False

    def stage(self, pipeline: Pipeline) -> int:
        rows = pipeline.occupancy()
        return max(rows, key=lambda stage: (rows[stage], stage))


POLICIES: dict[str, Policy] = {"lockstep": Lockstep(), "depth": Depth()}


def policy_of(name: str) -> Policy:
    if name not in POLICIES:
        raise UserError(f"policy = {name!r}: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]


EXPECTED_STEPS = (3, 12)  # steps that tokens are taken to need, evenly spread
REPEATS = 5
MIN_GAIN = 0.95  # mixing depths has costs of its own


def cost_curve(model: LoopedGPT, max_num_seqs: int, loops: int = 4) -> dict[int, float]:
    """Seconds of one loop step (a whole pass over its steps) with 1, 2, 4, ... rows, taking turns."""
    engine, params = Engine(model), loop_params(model, loops=loops)
    sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n < max_num_seqs] + [max_num_seqs]
    caches = [engine.open(2, params) for _ in range(max_num_seqs)]
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
                cache.rewind(1)
    return {n: median(values[1:]) for n, values in times.items()}


def cost_of(rows: float, curve: dict[int, float]) -> float:
    """The cost of a call with a number of rows, in a line between those that were measured."""
    known = sorted(curve)
    if rows <= known[0]:
        return curve[known[0]]
    for low, high in pairwise(known):
        if rows <= high:
            return curve[low] + (curve[high] - curve[low]) * (rows - low) / (high - low)
    return curve[known[-1]] * rows / known[-1]


def choose_policy(model: LoopedGPT, max_num_seqs: int, curve: dict[int, float] | None = None) -> tuple[str, str]:
    """The policy with the lower cost of a row's step, and the reason in words.

    In lockstep rows leave a loop one after the other, so calls grow small towards its end. By depth rows are spread over the groups, so
    every call has about max_num_seqs / groups of them. The curve is measured where none is given.
    """
    if not model.config.n_groups:
        return "lockstep", "lockstep (the model has no loops)"
    curve = curve or cost_curve(model, max_num_seqs)
    low, high = EXPECTED_STEPS
    left = [max_num_seqs * (min(high, high - k + 1) / (high - low + 1) if k > low else 1.0) for k in range(1, high + 1)]
    lockstep = sum(cost_of(n, curve) for n in left) / sum(left)
    part = max_num_seqs / max(1, model.config.n_groups)
    depth = cost_of(part, curve) / max(1.0, part)
    policy = "depth" if depth < MIN_GAIN * lockstep else "lockstep"
    shown = ", ".join(f"{n}: {1e3 * seconds:.2f}" for n, seconds in curve.items())
    costs = f"a row's step {1e6 * lockstep:.0f} us in lockstep, {1e6 * depth:.0f} us by depth"
    return policy, f"{policy} (ms of a loop step by rows {shown}; {costs})"
