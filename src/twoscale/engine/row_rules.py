"""The exit rules of the rows inside one loop group. Rows of different requests may have different rules.

Steps are measured in one call for all rows. Rows with the same rule share one RuleState; as long as all rows have the same rule nothing
is gathered, and with several rules a row's states are gathered only where its rule asks for them.
"""

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from twoscale.engine.kernels import Kernels
from twoscale.engine.rows import Rows
from twoscale.exits import Rule, RuleState
from twoscale.exits.rule import Meter, Numbers

Read = Callable[[Rows, Tensor, str], Tensor]  # (rows, states (n, C), how) -> what a rule asks of the states


class StepHistory:
    """The last step of every row, for rules that follow steps."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.last: Tensor | None = None
        """(N, C); NaN for rows at their first step."""

    def measure(self, before: Tensor, after: Tensor) -> Sequence[Numbers]:
        """The numbers of the step from `before` to `after` (N, C)."""
        if self.last is None:
            self.last = torch.full_like(before, math.nan, dtype=torch.float32)
        return self.meter(before, after, self.last)

    def take(self, stay: Tensor) -> None:
        self.last = None if self.last is None else self.last.index_select(0, stay)

    def admit(self, new: int) -> None:
        if self.last is not None:
            self.last = torch.cat((self.last, self.last.new_full((new, self.last.shape[1]), math.nan)))


class RowsOfRule:
    """Some of the rows, as their rule sees them; see `exits.rule.Tokens`."""

    same_k: None = None

    def __init__(self, rows: Rows, index: Tensor) -> None:
        self.rows, self.index = rows, index
        self.k_of_all = index
        """The steps of all rows, (N,); set before each look."""

    @property
    def k(self) -> Tensor:
        return self.k_of_all.index_select(0, self.index)

    @cached_property
    def sequences(self) -> Tensor:
        return self.rows.sequences.index_select(0, self.index)

    @cached_property
    def positions(self) -> Tensor:
        return self.rows.positions.index_select(0, self.index)

    @cached_property
    def tokens(self) -> Tensor:
        return self.rows.tokens.index_select(0, self.index)


class Segment:
    """Rows that have the same rule."""

    def __init__(self, rule: Rule | None, rows: list[int]) -> None:
        self.rule, self.rows = rule, rows  # `rows` are their places among all rows, ascending
        self.state = None if rule is None else RuleState(rule)
        self.view: RowsOfRule | None = None
        """These rows by themselves, while they stay the same."""

    def admit(self, new: list[int]) -> None:
        if self.state is not None:
            self.state.admit(len(self.rows), len(new))
        self.rows += new


class RowRules:
    """What the rules of a group know of the rows inside, and which rows may leave."""

    def __init__(self, group: int, kernels: Kernels) -> None:
        self.group, self.kernels = group, kernels
        self.segments: list[Segment] = []
        self.history: StepHistory | None = None
        """There once a rule follows steps."""
        self.n = 0
        self.failures: list[tuple[Rows, Exception]] = []
        """Rows whose rule has raised; they stay inside until somebody takes them out."""

    def admit(self, rows: Rows) -> None:
        """Rows join, at their first step."""
        if self.history is not None:
            self.history.admit(rows.n)
        for part in rows.parts:
            rule = part.cache.params.rules[self.group]
            if self.history is None and rule is not None and rule.follows_steps:
                self.history = StepHistory(self.kernels.meter())
            segment = next((s for s in self.segments if _same(s.rule, rule)), None)
            new = list(range(self.n, self.n + part.count))
            self.n += part.count
            if segment is None:
                self.segments.append(Segment(rule, new))
            else:
                segment.admit(new)
        self._changed()

    def take(self, stay: Tensor) -> None:
        """Only these rows (ascending int64) stay."""
        if self.history is not None:
            self.history.take(stay)
        if len(self.segments) == 1:
            if (state := self.segments[0].state) is not None:
                state.take(stay)
            self.n = len(stay)
            self.segments[0].rows = list(range(self.n))
            return
        places = {old: new for new, old in enumerate(stay.tolist())}
        for segment in self.segments:
            kept = [i for i, row in enumerate(segment.rows) if row in places]
            if segment.state is not None and len(kept) < len(segment.rows):
                segment.state.take(torch.tensor(kept, dtype=torch.int64, device=stay.device))
            segment.rows = [places[segment.rows[i]] for i in kept]
        self.segments = [segment for segment in self.segments if segment.rows]
        self.n = len(places)
        self._changed()

    def _changed(self) -> None:
        for segment in self.segments:
            segment.view = None

    def update(self, rows: Rows, before: Tensor, after: Tensor, read: Read) -> tuple[Tensor | bool, Tensor | bool]:
        """Which rows leave after the step from `before` to `after` (N, C), and which of them keep the state before it.

        Both are bools (N,), or one bool for all.
        """
        numbers = None if self.history is None else self.history.measure(before, after)
        if len(self.segments) == 1:
            state = self.segments[0].state
            if state is None:
                return False, False
            try:
                passed = state.update(
                    self.group, rows, before, after, lambda x, how: read(rows, x, how), numbers if state.rule.follows_steps else None
                )
            except Exception as error:  # a rule that raises harms the rows of its own requests alone
                self.failures.append((rows, error))
                passed = False
            return passed, passed if state.rule.keep == "previous" else False
        return self._update_segments(rows, before, after, read, numbers)

    def _update_segments(
        self, rows: Rows, before: Tensor, after: Tensor, read: Read, numbers: Sequence[Numbers] | None
    ) -> tuple[Tensor, Tensor | bool]:
        """The same with several rules."""
        leaves = torch.zeros(rows.n, dtype=torch.bool, device=after.device)
        keeps: Tensor | bool = False
        k = rows.k
        stacked = None if numbers is None else torch.stack([torch.as_tensor(each) for each in numbers])
        for segment in self.segments:
            if (state := segment.state) is None:
                continue
            if segment.view is None or segment.view.rows is not rows:
                segment.view = RowsOfRule(rows, torch.tensor(segment.rows, dtype=torch.int64, device=after.device))
            view, index = segment.view, segment.view.index
            view.k_of_all = k
            own = None if stacked is None or not state.rule.follows_steps else stacked.index_select(1, index).unbind()
            try:
                passed = state.update(
                    self.group, view, before, after, lambda x, how, index=index: read(rows.take(index), x, how), own, index
                )  # type: ignore[misc]
            except Exception as error:
                self.failures.append((rows.take(index), error))
                continue
            leaves[index] = torch.as_tensor(passed, device=after.device)
            if state.rule.keep == "previous":
                keeps = torch.zeros_like(leaves) if isinstance(keeps, bool) else keeps
                keeps[index] = leaves[index]
        return leaves, keeps


def _same(a: Rule | None, b: Rule | None) -> bool:
    """Whether two rules can share a state; rules that cannot be compared are different."""
    if a is b:
        return True
    try:
        return bool(a == b)
    except Exception:  # a field that does not compare to one bool, such as a tensor
        return False
