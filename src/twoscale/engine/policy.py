"""Scheduling policies: which rows share the next stage pass. `choose_policy` chooses between them from measured costs.

    lockstep   a batch goes through the stages of the network together; requests join between tokens
    depth      tokens join a batch at any time and are at different depths of the network; each stage pass is for the stage (plain layers
               or loop group) that has the most rows

Which is faster depends on the cost of a stage pass with few and with many rows, so it is measured. To add a policy, subclass `Policy` and
add it to POLICIES.
"""

import math
import time
from itertools import pairwise
from statistics import median

from twoscale.config import UserError
from twoscale.engine.batch import Batch
from twoscale.engine.engine import Engine
from twoscale.engine.request import loop_params
from twoscale.model import LoopedGPT

# Rows that have exited a loop wait for the rest of their batch for at most max(WAIT_LIMIT_FLOOR, WAIT_LIMIT_FACTOR x own loop steps) stage
# passes, where the own loop steps are those that the rows took in the loop.
WAIT_LIMIT_FLOOR = 16
WAIT_LIMIT_FACTOR = 2.0


class Policy:
    """How the tokens of a batch go through the stages."""

    joins_running_batch = False
    """Whether tokens may join a batch that is already running."""
    loop_until_exit = True
    """Whether loop steps are repeated until rows exit; otherwise `next_stage` is asked after every step."""
    steps_after_exit = 0
    """How many loop steps the other rows may take after the first rows have exited, before `next_stage` is asked."""

    def next_stage(self, batch: Batch) -> int:
        """The stage of the next pass, an index into `model.stages`."""
        raise NotImplementedError

    def split_at_pass(self, batch: Batch) -> float:
        """The value of `Batch.stage_passes` at which the batch is split: rows at its earliest stage then continue as a separate batch."""
        return math.inf


class Lockstep(Policy):
    """The rows of a batch go through the stages together. Rows that have exited a loop wait for the others, up to a limit.

    The limit is max(WAIT_LIMIT_FLOOR, WAIT_LIMIT_FACTOR x own loop steps). Then the rows that are still in the loop become a batch of
    their own, so a request with many loop steps does not delay the others.
    """

    steps_after_exit = WAIT_LIMIT_FLOOR

    def next_stage(self, batch: Batch) -> int:
        return batch.earliest_stage

    def split_at_pass(self, batch: Batch) -> float:
        if len(batch) == 1:
            return math.inf
        earliest = batch.earliest_stage
        later = [w for stage, waiting in batch.waiting.items() if stage > earliest for w in waiting]
        return min((w.arrived_at_pass + max(WAIT_LIMIT_FLOOR, WAIT_LIMIT_FACTOR * w.loop_steps) for w in later), default=math.inf)


class MostRows(Policy):
    """The policy `depth`: rows of one batch may be at different stages (depths) of the network. Each pass is for the stage that has the
    most rows; of stages with equally many, the last."""

    joins_running_batch = True
    loop_until_exit = False

    def next_stage(self, batch: Batch) -> int:
        rows = batch.occupancy()
        return max(rows, key=lambda stage: (rows[stage], stage))


POLICIES: dict[str, Policy] = {"lockstep": Lockstep(), "depth": MostRows()}


def policy_of(name: str) -> Policy:
    if name not in POLICIES:
        raise UserError(f"policy = {name!r}: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]


EXPECTED_STEPS = (3, 12)  # tokens are assumed to exit after 3 to 12 loop steps, uniformly
REPEATS = 5
# `depth` is used only if its estimated cost is below 0.95 of lockstep's. The estimate leaves out that `depth` takes one loop step per call
# instead of several, and copies the rows of a loop whenever others join them.
MAX_COST_RATIO = 0.95


def cost_curve(model: LoopedGPT, max_num_seqs: int, loops: int = 4) -> dict[int, float]:
    """Seconds per loop step of a whole forward pass with 1, 2, 4, ... rows; medians of interleaved repeats."""
    engine, params = Engine(model), loop_params(model, loops=loops)
    sizes = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n < max_num_seqs] + [max_num_seqs]
    caches = [engine.new_cache(2, params) for _ in range(max_num_seqs)]
    engine.run([(0, cache, [0]) for cache in caches])  # allocates the caches, which is not timed
    times: dict[int, list[float]] = {n: [] for n in sizes}
    steps = loops * model.config.n_groups
    for _ in range(REPEATS + 1):
        for n in sizes:
            inputs = [(0, cache, [i % model.config.vocab_size]) for i, cache in enumerate(caches[:n])]
            started = time.perf_counter()
            engine.run(inputs)
            times[n].append((time.perf_counter() - started) / steps)
            for cache in caches:
                cache.rewind(1)
    return {n: median(values[1:]) for n, values in times.items()}


def interpolate_cost(rows: float, curve: dict[int, float]) -> float:
    """The cost of a stage pass with this many rows, interpolated linearly between measured numbers of rows."""
    sizes = sorted(curve)
    if rows <= sizes[0]:
        return curve[sizes[0]]
    for low, high in pairwise(sizes):
        if rows <= high:
            return curve[low] + (curve[high] - curve[low]) * (rows - low) / (high - low)
    return curve[sizes[-1]] * rows / sizes[-1]


def choose_policy(model: LoopedGPT, max_num_seqs: int, curve: dict[int, float] | None = None) -> tuple[str, str]:
    """The policy with the lower estimated cost of one loop step of one row, and an explanation to print.

    In lockstep, rows exit a loop one after the other, so its last passes have few rows. With `depth`, rows are spread over the groups, so
    every pass has about max_num_seqs / n_groups rows. The cost curve is measured unless it is given.
    """
    if not model.config.n_groups:
        return "lockstep", "lockstep (the model has no loops)"
    curve = curve or cost_curve(model, max_num_seqs)
    low, high = EXPECTED_STEPS
    rows_left = [max_num_seqs * (min(high, high - k + 1) / (high - low + 1) if k > low else 1.0) for k in range(1, high + 1)]
    lockstep = sum(interpolate_cost(n, curve) for n in rows_left) / sum(rows_left)
    rows_per_pass = max_num_seqs / max(1, model.config.n_groups)
    depth = interpolate_cost(rows_per_pass, curve) / max(1.0, rows_per_pass)
    policy = "depth" if depth < MAX_COST_RATIO * lockstep else "lockstep"
    points = ", ".join(f"{1e3 * seconds:.2f} ms with {n}" for n, seconds in curve.items())
    costs = f"for one row that is {1e6 * lockstep:.0f} us in lockstep and {1e6 * depth:.0f} us by depth"
    return policy, f"{policy} (measured time of a loop step by number of rows: {points}; {costs})"
