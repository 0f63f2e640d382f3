"""A learned controller: a small head for each group, no logits.

It is trained post hoc on a frozen model (`twoscale.tradeoff.controller`) to say how likely it is that more steps will lower the
token's loss; a token leaves when that is unlikely. A head has one of two kinds of inputs, which its number of weights tells:

    geometry   7 weights, linear in the lengths of steps and the angle between them (FEATURES)
    state      HIDDEN (3 + 2C) + 1 weights: w2 . gelu(W1 f) + b with f = [1, log k, x^(k+1), x^(k+1) - x^(k)]

Shapes: N tokens, C width, H hidden units, F features.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from twoscale.config import UserError
from twoscale.config.serial import read_json
from twoscale.exits import statistics
from twoscale.exits.rule import Numbers, StepView, Threshold
from twoscale.exits.statistics import Condition
from twoscale.geometry.steps import cosine_of, ratio

FEATURES = ("bias", "log step", "log acceleration", "log ratio", "cosine", "log k", "log step x log k")
"""What the head sees: steps and accelerations beside the state, the step beside the one before, the angle between them, and k."""


def features(view: StepView) -> list[Numbers]:
    """The features of each token after a step, in the order of FEATURES; NaN at its first step, where there is none to compare."""
    step, previous, acceleration, state = view.step_norm, view.previous_step_norm, view.acceleration, view.state_norm
    log = _log if isinstance(step, Tensor) else _log_of_number
    k = view.k
    depth = torch.log(k.float()) if isinstance(k, Tensor) else math.log(k)
    relative, turned = log(ratio(step, state)), cosine_of(step, previous, acceleration)
    return [1.0, relative, log(ratio(acceleration, state)), log(ratio(step, previous)), turned, depth, relative * depth]


HIDDEN = 8


def state_features(view: StepView) -> list[Numbers]:
    """The inputs of a head on the state, 2 + 2C of them; they are there from the first step on."""
    return [1.0, _log_k(view), *view.after.unbind(dim=-1), *view.step.unbind(dim=-1)]


def _log_k(view: StepView) -> Numbers:
    return torch.log(view.k.double()) if isinstance(view.k, Tensor) else math.log(view.k)


def score_of_state(weights: Tensor, x: Tensor) -> Tensor:
    """The score of a head on the state for features x (N, F): (N,)."""
    first, second, bias = weights[: HIDDEN * x.shape[1]].view(HIDDEN, -1), weights[-HIDDEN - 1 : -1], weights[-1]
    return F.gelu(x @ first.T) @ second + bias


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

    needs_previous_update: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.file and not self.weights:
            raise UserError("Learned: name the run's controller, for example learned:0.1,file=runs/tiny/controller.json")
        _ = self.heads

    @cached_property
    def heads(self) -> tuple[tuple[float, ...], ...]:
        heads: Any = self.weights or read_heads(Path(self.file))
        if not heads or not all(map(_is_head, heads)):
            allowed = f"{len(FEATURES)} finite weights ({', '.join(FEATURES)}), or {HIDDEN} (3 + 2C) + 1 for a model of width C"
            raise UserError(f"Learned: a head has {allowed}")
        return tuple(tuple(head) for head in heads)

    @cached_property
    def _on_state(self) -> dict[int, Tensor]:
        """The weights of the heads on states, by group, as doubles."""
        return {g: torch.tensor(head, dtype=torch.float64, device="cpu") for g, head in enumerate(self.heads) if len(head) != len(FEATURES)}

    def flops(self, group: int) -> int:
        """Of one look: a multiplication and an addition for each weight."""
        return 2 * len(self.heads[group])

    @cached_property
    def _conditions(self) -> list[Condition]:
        """The condition of each group."""
        widths = [(len(head) - 1 - 3 * HIDDEN) // (2 * HIDDEN) if g in self._on_state else None for g, head in enumerate(self.heads)]
        kinds = [statistics.LEARNED_FROM_NORMS if width is None else statistics.LEARNED_FROM_STATE for width in widths]
        each = zip(kinds, self.heads, widths, strict=True)
        return [Condition(kind, self.tau, parameters=head, width=width) for kind, head, width in each]

    def condition(self, group: int) -> Condition | None:
        return self._conditions[group] if group < len(self.heads) and type(self) is Learned else None

    def measure(self, view: StepView) -> Numbers:
        if view.group >= len(self.heads):
            raise UserError(f"Learned: the controller has {len(self.heads)} heads, the model more groups: it was trained for another model")
        score = self._of_state(view) if view.group in self._on_state else self._of_geometry(view)
        if isinstance(score, Tensor):
            return score.sigmoid()
        return score if score != score else 1 / (1 + math.exp(-max(-80.0, min(80.0, score))))

    def _of_geometry(self, view: StepView) -> Numbers:
        score: Numbers = 0.0
        for weight, value in zip(self.heads[view.group], features(view), strict=True):
            score = score + weight * value
        return score

    def _of_state(self, view: StepView) -> Tensor:
        """In doubles: a token's score must not depend on the rows beside it, whose number decides the order of sums in a matrix product."""
        after, weights = view.after.double(), self._on_state[view.group].to(view.after.device)
        n, width = after.shape
        if len(weights) != HIDDEN * (3 + 2 * width) + 1:
            raise UserError(f"Learned: the head of group {view.group} is not for states of width {width}: it was trained for another model")
        log_k = torch.as_tensor(_log_k(view), dtype=torch.float64, device=after.device).expand(n)[:, None]
        return score_of_state(weights, torch.cat((torch.ones_like(log_k), log_k, after, after - view.before.double()), dim=1))


def _is_head(head: Any) -> bool:
    """Whether these are the weights of a head: finite, and as many as one of the two kinds has."""
    width, rest = divmod(len(head) - 1 - 3 * HIDDEN, 2 * HIDDEN)
    return (len(head) == len(FEATURES) or (width > 0 and rest == 0)) and all(math.isfinite(w) for w in head)


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
