"""Rules that look at states alone; they never touch the head."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.exits import statistics
from twoscale.exits.rule import Numbers, Rule, StepView, Threshold, check_count, check_number
from twoscale.exits.statistics import Condition, Statistic, has_tests_of


@dataclass(frozen=True)
class StepThreshold(Threshold):
    """A rule that passes when a statistic of the step lies below tau."""

    needs_previous_update: ClassVar[bool] = True

    @property
    def statistic(self) -> Statistic:
        raise NotImplementedError

    def measure(self, view: StepView) -> Numbers:
        assert self.statistic.of is not None
        return self.statistic.of(view)

    def condition(self, group: int) -> Condition | None:
        return Condition(self.statistic, self.tau) if has_tests_of(self, StepThreshold) and self.needs_previous_update else None


@dataclass(frozen=True)
class StepNorm(StepThreshold):
    """||D^(k)|| < tau; relative: divided by ||x^(k)||, the state that the step left."""

    relative: bool = False

    @property
    def statistic(self) -> Statistic:
        return statistics.STEP_NORM_OVER_STATE if self.relative else statistics.STEP_NORM


@dataclass(frozen=True)
class Acceleration(StepThreshold):
    """a^(k) = ||D^(k) - D^(k-1)|| < tau, twice in a row; so no token leaves before its third application.

    normalize="steps" divides by ||D^(k)|| + ||D^(k-1)||, "state" by ||x^(k)||.
    """

    normalize: Literal["steps", "state"] | None = None
    hits: int = field(default=2, kw_only=True)

    STATISTICS: ClassVar[dict[str | None, Statistic]] = {
        None: statistics.ACCELERATION,
        "steps": statistics.ACCELERATION_OVER_STEP_NORMS,
        "state": statistics.ACCELERATION_OVER_STATE,
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalize not in self.STATISTICS:
            raise UserError(f"Acceleration: normalize = {self.normalize!r}, choose None, 'steps' or 'state'")

    @property
    def statistic(self) -> Statistic:
        return self.STATISTICS[self.normalize]


@dataclass(frozen=True)
class Cosine(StepThreshold):
    """1 - cos(x^(k+1), x^(k)) < tau (Huginn)."""

    tau: float = 1e-3

    @property
    def statistic(self) -> Statistic:
        return statistics.COSINE_DISTANCE


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
        return -view.k

    def passes(self, value: Numbers) -> Tensor | bool:
        return value < 1 - self.k

    def condition(self, group: int) -> Condition | None:
        return Condition(statistics.NEGATED_STEP, 1 - self.k) if has_tests_of(self, Fixed) else None
