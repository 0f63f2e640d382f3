"""The statistics of a step that exit rules compare with a threshold, each defined once, and the condition of a rule as a value.

A rule whose test is "statistic below tau" (or above it) has a `Condition`. The C kernels read it and check it themselves; all others call
the rule's `measure` and `passes`, which are the definition. `Statistic.code` must match the enum in engine/kernels/statistics.c.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from twoscale.geometry.steps import cosine_distance, ratio

if TYPE_CHECKING:
    from twoscale.exits.rule import Numbers, Rule, StepView


@dataclass(frozen=True)
class Statistic:
    """One number for each token after a step."""

    code: int
    of: "Callable[[StepView], Numbers] | None" = field(default=None, compare=False)
    """Computes it from the norms of `StepView`; None if the rule's `measure` computes it."""
    reads_logits: bool = False
    """Whether it is computed from the logits that final norm and head give for the state."""
    remembers: Literal["nothing", "number", "distribution"] = "nothing"
    """What is kept of a token until its next step (`RuleState.remembered`), besides the update itself."""


# X_OVER_Y is the ratio X / Y.
STEP_NORM = Statistic(0, lambda view: view.step_norm)
STEP_NORM_OVER_STATE = Statistic(1, lambda view: ratio(view.step_norm, view.state_norm))
ACCELERATION = Statistic(2, lambda view: view.acceleration)
ACCELERATION_OVER_STEP_NORMS = Statistic(3, lambda view: ratio(view.acceleration, view.step_norm, view.previous_step_norm))
ACCELERATION_OVER_STATE = Statistic(4, lambda view: ratio(view.acceleration, view.state_norm))
COSINE_DISTANCE = Statistic(5, lambda view: cosine_distance(view.step_norm, view.state_norm, view.new_state_norm))
NEGATED_STEP = Statistic(6)
"""-k, so that "k steps are taken" is a condition of the common form, statistic below tau."""
LEARNED_FROM_NORMS = Statistic(7)
"""The output of a learned head whose inputs are norms of updates."""
LEARNED_FROM_STATE = Statistic(8)
"""The output of a learned head whose input is the state."""
KL_FORWARD = Statistic(9, reads_logits=True, remembers="distribution")
KL_REVERSE = Statistic(10, reads_logits=True, remembers="distribution")
KL_MIN_P = Statistic(11, reads_logits=True, remembers="distribution")
ENTROPY_CHANGE = Statistic(12, reads_logits=True, remembers="number")
ARGMAX_CHANGE = Statistic(13, reads_logits=True, remembers="number")
CONFIDENCE = Statistic(14, reads_logits=True)


@dataclass(frozen=True)
class Condition:
    """A step passes if `statistic` is below tau, or above it; NaN does not pass."""

    statistic: Statistic
    tau: float
    above: bool = False
    parameters: tuple[float, ...] = ()
    """What the statistic depends on besides the token: the weights of a learned head, or min_p."""
    width: int | None = None
    """The width of the states that `parameters` are for; None: any."""

    @cached_property
    def parameter_array(self) -> "array[float]":
        """`parameters` as doubles in memory."""
        return array("d", self.parameters)


def has_tests_of(rule: "Rule", cls: "type[Rule]") -> bool:
    """Whether the rule's test is that of `cls`: a subclass may have another one, and then no condition."""
    return type(rule).measure is cls.measure and type(rule).passes is cls.passes
