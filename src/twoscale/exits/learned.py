"""A learned controller: a tiny head for each group on cheap geometry, no logits.

It is trained post hoc on a frozen model (`twoscale.tradeoff.controller`) to say how likely it is that more steps will lower the
token's loss; a token leaves when that is unlikely.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.config.serial import read_json
from twoscale.exits.rule import Numbers, StepView, Threshold
from twoscale.geometry.steps import beside, cosine_of

FEATURES = ("bias", "log step", "log acceleration", "log ratio", "cosine", "log k", "log step x log k")
"""What the head sees: steps and accelerations beside the state, the step beside the one before, the angle between them, and k."""


def features(view: StepView) -> list[Numbers]:
    """The features of each token after a step, in the order of FEATURES; NaN at its first step, where there is none to compare."""
    step, last, acceleration, state = view.step_norm, view.last_step_norm, view.acceleration, view.state_norm
    log = _log if isinstance(step, Tensor) else _log_of_number
    k = view.k
    depth = torch.log(k.float()) if isinstance(k, Tensor) else math.log(k)
    relative, turned = log(beside(step, state)), cosine_of(step, last, acceleration)
    return [1.0, relative, log(beside(acceleration, state)), log(beside(step, last)), turned, depth, relative * depth]


def _log(x: Numbers) -> Tensor:
    assert isinstance(x, Tensor)
    return torch.log(x + 1e-9)


def _log_of_number(x: Numbers) -> float:
    return math.nan if x != x else math.log(float(x) + 1e-9)


@dataclass(frozen=True)
class Learned(Threshold):
    """The chance that more steps will lower the token's loss, by a head trained for this model, is below tau."""

    tau: float = 0.5
    file: str = ""
    """controller.json of the run, as `twoscale calibrate RUN --rule learned` writes it."""
    weights: tuple[tuple[float, ...], ...] = field(default=(), repr=False)
    """The heads themselves, one for each group; read from `file` if not given."""

    follows_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.file and not self.weights:
            raise UserError("Learned: name the run's controller, for example learned:0.1,file=runs/tiny/controller.json")
        _ = self.heads

    @cached_property
    def heads(self) -> tuple[tuple[float, ...], ...]:
        heads: Any = self.weights or read_heads(Path(self.file))
        if not heads or any(len(head) != len(FEATURES) or not all(math.isfinite(w) for w in head) for head in heads):
            raise UserError(f"Learned: a head has {len(FEATURES)} finite weights, one for each of {', '.join(FEATURES)}")
        return tuple(tuple(head) for head in heads)

    def measure(self, view: StepView) -> Numbers:
        if view.group >= len(self.heads):
            raise UserError(f"Learned: the controller has {len(self.heads)} heads, the model more groups: it was trained for another model")
        score: Numbers = 0.0
        for weight, value in zip(self.heads[view.group], features(view), strict=True):
            score = score + weight * value
        if isinstance(score, Tensor):
            return score.sigmoid()
        return score if score != score else 1 / (1 + math.exp(-max(-80.0, min(80.0, score))))


def read_heads(path: Path) -> tuple[tuple[float, ...], ...]:
    """The heads of a controller.json."""
    return heads_of(read_json(path), path)


def heads_of(found: Any, path: Path) -> tuple[tuple[float, ...], ...]:
    """The heads in what was read from a file."""
    heads = found.get("heads") if isinstance(found, dict) else None
    if not isinstance(heads, list) or not all(
        isinstance(head, list) and all(isinstance(w, int | float) and not isinstance(w, bool) for w in head) for head in heads
    ):
        raise UserError(f"{path} holds no controller: train it with `twoscale calibrate RUN --rule learned`")
    return tuple(tuple(float(w) for w in head) for head in heads)
