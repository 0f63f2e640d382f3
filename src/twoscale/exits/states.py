"""Rules that look at states alone; they never touch the head."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.exits.rule import Numbers, Rule, StepView, Threshold, check_count, check_number
from twoscale.geometry.steps import EPS, beside, length


@dataclass(frozen=True)
class StepNorm(Threshold):
    """||D^(k)|| < tau; relative: divided by ||x^(k)||, the state that the step left."""

    relative: bool = False

    follows_steps: ClassVar[bool] = True

    def measure(self, view: StepView) -> Numbers:
        return beside(view.step_norm, view.state_norm) if self.relative else view.step_norm


@dataclass(frozen=True)
class Acceleration(Threshold):
    """a^(k) = ||D^(k) - D^(k-1)|| < tau, twice in a row; so no token leaves before its third application.

    normalize="steps" divides by ||D^(k)|| + ||D^(k-1)||, "state" by ||x^(k)||.
    """

    normalize: Literal["steps", "state"] | None = None
    follows_steps: ClassVar[bool] = True
    hits: int = field(default=2, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalize not in (None, "steps", "state"):
            raise UserError(f"Acceleration: normalize = {self.normalize!r}, choose None, 'steps' or 'state'")

    def measure(self, view: StepView) -> Numbers:
        if self.normalize == "steps":
            return beside(view.acceleration, view.step_norm, view.last_step_norm)
        return beside(view.acceleration, view.state_norm) if self.normalize == "state" else view.acceleration


@dataclass(frozen=True)
class Cosine(Threshold):
    """1 - cos(x^(k+1), x^(k)) < tau (Huginn)."""

    tau: float = 1e-3

    def measure(self, view: StepView) -> Tensor:
        # As half the squared distance of the directions: 1 - cos itself loses all digits where it is small.
        a, b = (x / (length(x) + EPS).unsqueeze(-1) for x in (view.before, view.after))
        return length(a - b).square() / 2


@dataclass(frozen=True)
class Gate(Rule):
    """The probability of having left by now, by a learned gate, is at least q (Ouro)."""

    q: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "q", 0.0, 1.0)

    def remember(self, view: StepView) -> Tensor:
        return self._staying(view)

    def measure(self, view: StepView) -> Tensor:
        return 1 - self._staying(view)

    def passes(self, value: Numbers) -> Tensor | bool:
        return value >= self.q

    def _staying(self, view: StepView) -> Tensor:
        return torch.nan_to_num(view.last, nan=1.0) * (1 - view.gate)


@dataclass(frozen=True)
class Fixed(Rule):
    """k applications, whatever the states do."""

    k: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(self, "k", self.k)

    def measure(self, view: StepView) -> Numbers:
        return self.k - view.k

    def passes(self, value: Numbers) -> Tensor | bool:
        return value <= 0
