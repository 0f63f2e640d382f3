"""The exit rules of the rows inside one loop group. Rows of different requests may have different rules.

The step norms of all rows are computed in one call. Rows with the same rule share one RuleState. If all rows have the same rule, no rows
are gathered; with several rules a rule's rows are gathered only if it reads their states.
"""

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from twoscale.engine.kernels import Kernels
from twoscale.engine.rows import Part, Rows
from twoscale.exits import Rule, RuleState
from twoscale.exits.rule import Meter, Numbers

Read = Callable[[Rows, Tensor, str], Tensor]  # (rows, states (n, C), "lens" | "coda" | "gate") -> logits or probabilities; see `Loop._read`


class StepHistory:
    """The previous step D of every row, for rules that compare steps (`Rule.follows_steps`)."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.last: Tensor | None = None
        """(N, C); NaN for rows that have taken no step yet."""

    def measure(self, before: Tensor, after: Tensor) -> Sequence[Numbers]:
        """The norms of the step from `before` to `after` (N, C), as `exits.rule.Meter` returns them."""
        if self.last is None:
            self.last = torch.full_like(before, math.nan, dtype=torch.float32)
        return self.meter(before, after, self.last)

    def keep(self, index: Tensor) -> None:
        """Keep the rows with these indices."""
        self.last = None if self.last is None else self.last.index_select(0, index)

    def admit(self, new: int) -> None:
        """`new` rows enter the group."""
        if self.last is not None:
            self.last = torch.cat((self.last, self.last.new_full((new, self.last.shape[1]), math.nan)))


class RuleRows:
    """The rows of one rule, gathered lazily; implements `exits.rule.Tokens`."""

    same_k: None = None

    def __init__(self, rows: Rows, index: Tensor) -> None:
        self.rows, self.index = rows, index
        self.all_k = index
        """Loop steps of all rows, (N,); set before each update."""

    @property
    def k(self) -> Tensor:
        return self.all_k.index_select(0, self.index)

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
        self.rule, self.rows = rule, rows  # `rows` are indices of rows, ascending
        self.state = None if rule is None else RuleState(rule)
        self.view: RuleRows | None = None
        """These rows for the rule; None after a change of the rows."""

    def admit(self, new: list[int]) -> None:
        """Rows with these indices enter the group."""
        if self.state is not None:
            self.state.admit(len(self.rows), len(new))
        self.rows += new


class RowRules:
    """The states of all rules of the rows in a group. `update` tells which rows exit."""

    def __init__(self, group: int, kernels: Kernels) -> None:
        self.group, self.kernels = group, kernels
        self.segments: list[Segment] = []
        self.history: StepHistory | None = None
        """None until a rule needs it."""
        self.n = 0
        self.failures: list[tuple[list[Part], Exception]] = []
        """Parts whose exit rule or cache allocation has raised; they stay in the loop until the caller drops them."""

    def admit(self, rows: Rows) -> None:
        """Rows enter the group."""
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
        self._clear_views()

    def keep(self, index: Tensor) -> None:
        """Keep the rows with these indices (ascending int64)."""
        if self.history is not None:
            self.history.keep(index)
        if len(self.segments) == 1:
            if (state := self.segments[0].state) is not None:
                state.take(index)
            self.n = len(index)
            self.segments[0].rows = list(range(self.n))
            return
        new_index = {old: new for new, old in enumerate(index.tolist())}
        for segment in self.segments:
            kept = [i for i, row in enumerate(segment.rows) if row in new_index]
            if segment.state is not None and len(kept) < len(segment.rows):
                segment.state.take(torch.tensor(kept, dtype=torch.int64, device=index.device))
            segment.rows = [new_index[segment.rows[i]] for i in kept]
        self.segments = [segment for segment in self.segments if segment.rows]
        self.n = len(new_index)
        self._clear_views()

    def _clear_views(self) -> None:
        for segment in self.segments:
            segment.view = None

    def update(self, rows: Rows, before: Tensor, after: Tensor, read: Read) -> tuple[Tensor | bool, Tensor | bool]:
        """Which rows exit after the step from `before` to `after` (N, C), and which of them return the state before the step.

        Both are bools (N,), or one bool for all.
        """
        numbers = None if self.history is None else self.history.measure(before, after)
        if len(self.segments) == 1:
            state = self.segments[0].state
            if state is None:
                return False, False
            try:
                fired = state.update(
                    self.group, rows, before, after, lambda x, how: read(rows, x, how), numbers if state.rule.follows_steps else None
                )
            except Exception as error:  # only the rows of this rule fail
                self.failures.append((rows.parts, error))
                fired = False
            return fired, fired if state.rule.keep == "previous" else False
        return self._update_segments(rows, before, after, read, numbers)

    def _update_segments(
        self, rows: Rows, before: Tensor, after: Tensor, read: Read, numbers: Sequence[Numbers] | None
    ) -> tuple[Tensor, Tensor | bool]:
        """`update` for rows with different rules."""
        exits = torch.zeros(rows.n, dtype=torch.bool, device=after.device)
        keep_previous: Tensor | bool = False
        k = rows.k
        all_numbers = None if numbers is None else torch.stack([torch.as_tensor(each) for each in numbers])
        for segment in self.segments:
            if (state := segment.state) is None:
                continue
            if segment.view is None or segment.view.rows is not rows:
                segment.view = RuleRows(rows, torch.tensor(segment.rows, dtype=torch.int64, device=after.device))
            view, index = segment.view, segment.view.index
            view.all_k = k
            own_numbers = None if all_numbers is None or not state.rule.follows_steps else all_numbers.index_select(1, index).unbind()
            try:
                fired = state.update(
                    self.group, view, before, after, lambda x, how, index=index: read(rows.select(index), x, how), own_numbers, index
                )  # type: ignore[misc]
            except Exception as error:
                self.failures.append((rows.select(index).parts, error))
                continue
            exits[index] = torch.as_tensor(fired, device=after.device)
            if state.rule.keep == "previous":
                keep_previous = torch.zeros_like(exits) if isinstance(keep_previous, bool) else keep_previous
                keep_previous[index] = exits[index]
        return exits, keep_previous


def _same(a: Rule | None, b: Rule | None) -> bool:
    """Whether two rules are equal and can share a state; rules that cannot be compared are different."""
    if a is b:
        return True
    try:
        return bool(a == b)
    except Exception:  # a field that does not compare to one bool, such as a tensor
        return False
