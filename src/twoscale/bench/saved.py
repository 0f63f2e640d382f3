"""`twoscale bench decode --model`: the time that exit rules save beside the loop steps that they save, in cached decoding.

The tokens are a task's own samples, or what a text model writes by itself. A fixed depth and the rules take turns token by token
(`tradeoff.latency`); what counts is the ratio within a round.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from twoscale.engine import generate
from twoscale.exits import Exit, Fixed
from twoscale.model import LoopedGPT
from twoscale.tasks.task import Task
from twoscale.tradeoff.heldout import HeldOut
from twoscale.tradeoff.latency import LatencyTimer

HOPS_DEPTH = 12
HOPS_RULES = ("step-norm:10.64", "kl:0.03928", "cosine:0.01526", "acceleration:3.93,hits=1")
"""The best fixed depth of the model `hops`, and rules certified to the same accuracy (docs/results-tasks.md)."""
FIXED = "fixed"


@dataclass(frozen=True)
class SavedBench:
    """What one rule saves beside a fixed depth."""

    work: float
    """Share of the loop steps."""
    time: float
    """Share of a token's time, the median over rounds."""
    low: float
    """Lower quartile of the share of time over rounds."""
    high: float
    """Upper quartile."""
    ms: float
    """Milliseconds for a token of every row, the median over rounds."""


def windows(model: LoopedGPT, task: Task | None, n: int) -> tuple[Tensor, int]:
    """Token ids (n, T) to decode, and how many of them are the prompt."""
    if task is not None:
        batch = task.heldout(n)
        return batch.ids, int((batch.targets >= 0).any(dim=0).nonzero()[0])
    length = min(64, model.config.block_size)
    prompts = [[i + 1] * 2 for i in range(n)]
    new = generate(model, prompts, max_new_tokens=length - 2).tokens
    return torch.tensor([[*prompt, *tokens] for prompt, tokens in zip(prompts, new, strict=True)]), length // 2


def bench_saved(
    model: LoopedGPT, task: Task | None, rules: Mapping[str, Exit], depth: int, loops: int, rounds: int, rows: int = 1
) -> tuple[float, dict[str, SavedBench]]:
    """Milliseconds for a token of every row at the fixed depth, and what each rule with at most `loops` steps saves beside it."""
    ids, prompt = windows(model, task, (rounds + 1) * rows)
    text = HeldOut(ids, ids, torch.zeros_like(ids), "samples")
    timer = LatencyTimer(model, {FIXED: Fixed(depth), **rules}, loops, text, prompt, tokens=ids.shape[1], rows=rows)
    times: dict[str, list[float]] = {name: [] for name in timer.params}
    steps: dict[str, list[float]] = {name: [] for name in timer.params}
    for i in range(rounds + 1):
        found = timer.round(i, list(timer.params))
        if i:  # the first round warms up
            for name, ms in found.items():
                times[name].append(ms)
                steps[name].append(timer.steps[name])
    saved = {}
    for name in rules:
        ratios = sorted(1 - ms / fixed for ms, fixed in zip(times[name], times[FIXED], strict=True))
        work = 1 - sum(steps[name]) / sum(steps[FIXED])
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        saved[name] = SavedBench(work, median(ratios), low, high, median(times[name]))
    return median(times[FIXED]), saved
