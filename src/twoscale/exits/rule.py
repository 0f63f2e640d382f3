"""What an exit rule is: a frozen dataclass that looks at tokens after each step of a group and says which may leave.

    @dataclass(frozen=True)
    class Turned(Rule):
        tau: float = 0.0

        def remember(self, view):
            return view.step                                      # seen again one step later, as view.last

        def measure(self, view):
            last = view.last.expand_as(view.step)                 # NaN at a token's first step: nothing to say yet
            return torch.cosine_similarity(view.step, last, dim=-1)  # one number for each token

        def passes(self, value):
            return value < self.tau

Shapes: N tokens in one group, C width, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.exits.statistics import Condition
from twoscale.geometry.steps import length

Reading = Literal["lens", "coda"]
MAX_COUNT = 1_000_000

# (before, after, previous_update) (N, C) -> ||D||, ||D - previous_update||, ||previous_update||, ||before||, ||after|| for the update
# D = after - before, which is stored in previous_update
UpdateNormsFunction = Callable[[Tensor, Tensor, Tensor], "Sequence[Numbers]"]


class RowInfo(Protocol):
    """What a rule may know of rows besides their states. A row is one token inside the group."""

    @property
    def k(self) -> Tensor:
        """Applications of the group's map so far, int64 (N,)."""

    @property
    def same_k(self) -> int | None:
        """The same as one number, where all rows have it."""

    @property
    def prompt_indices(self) -> Tensor:
        """The index of each row's sequence among the caller's prompts, int64 (N,)."""

    @property
    def positions(self) -> Tensor:
        """int64 (N,)."""

    @property
    def tokens(self) -> Tensor:
        """int64 (N,)."""


Numbers = Tensor | float  # one for each token (N,), or a plain number where there is a single token or all have the same


class StepView:
    """What a rule sees of N tokens after one more application of a group's map. States are fp32 (N, C).

    The numbers that rules compare most are here by name; with a single token they are plain floats, so that a look costs
    next to nothing beside the step.
    """

    __slots__ = ("_after", "_before", "_index", "_kept", "_read", "group", "last", "norms", "rows")

    def __init__(
        self,
        group: int,
        rows: RowInfo,
        before: Tensor,
        after: Tensor,
        last: Tensor,
        read: Callable[[Tensor, Reading | Literal["gate"]], Tensor],
        norms: Sequence[Numbers] | None = None,
        index: Tensor | None = None,
    ) -> None:
        """`last` is what the rule remembered of these tokens one step ago; NaN at a token's first step. `norms` is the result of an
        UpdateNormsFunction. With `index` (int64, (N,)) the tokens are these rows of `before` and `after`, which are gathered when a rule
        asks for them."""
        self.group, self.rows, self.last, self._read, self.norms = group, rows, last, read, norms
        self._before, self._after, self._index = before, after, index
        self._kept: dict[str, Tensor] | None = None

    def _once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """What is computed when it is first asked for."""
        if self._kept is None:
            self._kept = {}
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def _rows_of(self, name: str, states: Tensor) -> Tensor:
        index = self._index
        return states if index is None else self._once(name, lambda: states.index_select(0, index))

    @property
    def before(self) -> Tensor:
        return self._rows_of("before", self._before).float()

    @property
    def after(self) -> Tensor:
        return self._rows_of("after", self._after).float()

    @property
    def k(self) -> Tensor | int:
        """Applications of the group's map so far: one number if all tokens have the same, else int64 (N,)."""
        same = self.rows.same_k
        return self.rows.k if same is None else same

    @property
    def step(self) -> Tensor:
        """D = after - before."""
        return self._once("step", lambda: self.after - self.before)

    @property
    def step_norm(self) -> Numbers:
        """||D||."""
        return length(self.step) if self.norms is None else self.norms[0]

    @property
    def acceleration(self) -> Numbers:
        """||D - previous D||, for a rule with `needs_previous_update`."""
        return length(self.step - self.last) if self.norms is None else self.norms[1]

    @property
    def previous_step_norm(self) -> Numbers:
        """||previous D||, for a rule with `needs_previous_update`."""
        return length(self.last.expand_as(self.step)) if self.norms is None else self.norms[2]

    @property
    def state_norm(self) -> Numbers:
        """||before||."""
        return length(self.before) if self.norms is None else self.norms[3]

    @property
    def new_state_norm(self) -> Numbers:
        """||after||."""
        return length(self.after) if self.norms is None else self.norms[4]

    @property
    def logits(self) -> Tensor:
        """The logits that the final norm and the head give for the state (logit lens): (N, V)."""
        return self._once("logits", lambda: self._read(self._rows_of("after", self._after), "lens").float())

    @property
    def log_probs(self) -> Tensor:
        """The same as log-probabilities (N, V)."""
        return self._once("lens", lambda: torch.log_softmax(self.logits, dim=-1))

    @property
    def coda_log_probs(self) -> Tensor:
        """The same, with the layers after the last group run on the state first."""
        return self._once("coda", lambda: torch.log_softmax(self._read(self._rows_of("after", self._after), "coda").float(), dim=-1))

    @property
    def gate(self) -> Tensor:
        """The probability that the token exits now, by the group's learned gate: (N,)."""
        return self._once("gate", lambda: self._read(self._rows_of("after", self._after), "gate").float())


StatisticFunction = Callable[[StepView], tuple[Tensor, Tensor]]  # the statistics (N,), and what is `view.last` at the next step


@dataclass(frozen=True, kw_only=True)
class Rule:
    """When a token exits a group. A rule of your own needs `measure` and `passes`, and `remember` if it compares steps."""

    hits: int = 1
    """How many consecutive steps must pass."""
    min_steps: int = 1
    """No token exits before this many loop steps."""
    keep: Literal["newest", "previous"] = "newest"
    """Which state an exiting token returns: the one after its newest step, or the one before that step, as in the paper's listing."""

    needs_previous_update: ClassVar[bool] = False
    """Whether the rule uses norms of `StepView` that need the previous update (`acceleration`, `previous_step_norm`). The update is then
    remembered for it; it must not read `view.last`, which may hold the new update already."""
    token_by_token: ClassVar[bool] = False
    """Whether the tokens of one sequence must be computed one after the other: a rule that runs the coda (read="coda")."""

    def __post_init__(self) -> None:
        for name in ("hits", "min_steps"):
            value = getattr(self, name)
            check_count(self, name, value)
        if self.keep not in ("newest", "previous"):
            raise UserError(f"{type(self).__name__}: keep = {self.keep!r}, choose newest or previous")

    def measure(self, view: StepView) -> Numbers:
        """One number for each token, (N,), or one for all; NaN where there is nothing to compare yet."""
        raise NotImplementedError

    def passes(self, value: Numbers) -> Tensor | bool:
        """Which numbers pass the test: bools (N,), or one for all. NaN must not pass."""
        raise NotImplementedError

    def condition(self, group: int) -> Condition | None:
        """The test of `measure` and `passes` in a group as a value, for kernels that check it themselves; None where there is none."""
        return None

    def remember(self, view: StepView) -> Tensor | None:
        """What to see again at the next step as `view.last`: a float tensor with one row for each token, or None."""
        return None


def condition_for(rule: Rule, group: int, width: int) -> Condition | None:
    """The condition of a rule in a group, if it has one for states of this width."""
    condition = rule.condition(group)
    return None if condition is None or condition.width not in (None, width) else condition


@dataclass(frozen=True)
class Threshold(Rule):
    """A rule that passes when its number lies below tau."""

    tau: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "tau", 0.0, math.inf)

    def passes(self, value: Numbers) -> Tensor | bool:
        return value < self.tau


def check_number(rule: Rule, name: str, low: float, high: float) -> None:
    value = getattr(rule, name)
    whole = isinstance(value, int) and abs(value) > 2**53  # would not survive as a float
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high or whole:
        bounds = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
        raise UserError(f"{type(rule).__name__}: {name} = {value!r}, but it is a number {bounds}")


def check_count(rule: Rule, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
        raise UserError(f"{type(rule).__name__}: {name} = {value!r}, but it must be an integer of at least 1 and at most {MAX_COUNT}")


_NOTHING = torch.tensor(math.nan, dtype=torch.float32, device="cpu")  # never changed in place


class RuleState:
    """The state of a rule for the tokens in one group: what it remembers of each, and how many consecutive steps each has passed."""

    def __init__(self, rule: Rule, statistic_function: StatisticFunction | None = None) -> None:
        """`statistic_function` is the kernels' own computation of what the rule measures."""
        self.rule, self.statistic_function = rule, statistic_function
        self.remembered = _NOTHING
        """What `Rule.remember` returned after the previous step, one row for each token; a scalar NaN before the first."""
        self.streak: Tensor | int = 0

    def update(
        self,
        group: int,
        rows: RowInfo,
        before: Tensor,
        after: Tensor,
        read: Callable[..., Tensor],
        norms: Sequence[Numbers] | None = None,
        index: Tensor | None = None,
    ) -> Tensor | bool:
        """Which of the tokens exit after a step from `before` to `after` (N, C): bools (N,), or one for all.

        `norms` is the result of an UpdateNormsFunction, for a rule with `needs_previous_update`; without it the RuleState remembers the
        updates. With `index` the tokens are these rows of `before` and `after`.
        """
        rule = self.rule
        if self.remembered.device != after.device:
            self.remembered = self.remembered.to(after.device)
            self.streak = self.streak.to(after.device) if isinstance(self.streak, Tensor) else self.streak
        view = StepView(group, rows, before, after, self.remembered, read, norms, index)
        if self.statistic_function is not None:
            value, self.remembered = self.statistic_function(view)
            return self.count(rule.passes(value), view.k)
        passed = rule.passes(rule.measure(view))
        if norms is None:
            new = view.step if rule.needs_previous_update else rule.remember(view)
            if new is not None:
                self.remembered = new
        return self.count(passed, view.k)

    def count(self, passed: Tensor | bool, k: Tensor | int) -> Tensor | bool:
        """Which tokens exit after step k, given which of them have passed its test."""
        if self.rule.hits > 1:
            self.streak = (self.streak + 1) * passed
            passed = self.streak >= self.rule.hits
        return passed & (k >= self.rule.min_steps) if self.rule.min_steps > 1 else passed

    def streaks(self, n: int) -> list[int]:
        """How many consecutive steps each of the n tokens has passed."""
        return [int(self.streak)] * n if n == 1 or not isinstance(self.streak, Tensor) else self.streak.expand(n).tolist()

    def set_streaks(self, streaks: list[int]) -> None:
        """Set the streaks, for a caller that has counted them itself."""
        self.streak = streaks[0] if len(streaks) == 1 else torch.tensor(streaks, device=self.remembered.device)

    def take(self, rows: Tensor) -> None:
        """Keep the rows with these indices (int64)."""
        if self.remembered.dim():
            self.remembered = self.remembered.index_select(0, rows)
        if isinstance(self.streak, Tensor) and self.streak.dim():
            self.streak = self.streak[rows]

    def admit(self, inside: int, new: int) -> None:
        """Add `new` tokens, which have taken no step yet, to the `inside` tokens."""
        if self.remembered.dim():
            assert len(self.remembered) == inside
            self.remembered = torch.cat((self.remembered, self.remembered.new_full((new, *self.remembered.shape[1:]), math.nan)))
        streak = torch.as_tensor(self.streak, device=self.remembered.device).expand(inside)
        self.streak = torch.cat((streak, streak.new_zeros(new)))
