"""The exit rules of the rows inside one loop group. Rows of different requests may have different rules.

Rows with the same rule share one RuleState. As long as all rows have the same rule nothing is gathered.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from twoscale.engine.kernels import Kernels
from twoscale.engine.rows import Part, Rows
from twoscale.exits import Rule, RuleState

Read = Callable[[Rows, Tensor, str], Tensor]  # (rows, states (n, C), how) -> what a rule asks of the states


@dataclass(slots=True)
class Segment:
    """Rows that have the same rule."""

    rule: Rule | None
    state: RuleState | None
    """None where there is no rule."""
    rows: list[int]
    """Their places among all rows, ascending."""
    index: Tensor | None = None
    """The same as int64 (n,); None where they are all rows."""
    selected: Rows | None = None
    """These rows by themselves."""


class RowRules:
    """What the rules of a group know of the rows inside, and which rows may leave."""

    def __init__(self, group: int, kernels: Kernels) -> None:
        self.group, self.kernels = group, kernels
        self.segments: list[Segment] = []
        self.n = 0
        self.failures: list[tuple[list[Part], Exception]] = []
        """Rows whose rule has raised; they stay inside until somebody takes them out."""

    def admit(self, rows: Rows) -> None:
        """Rows join, at their first step."""
        for part in rows.parts:
            rule = part.cache.params.rules[self.group]
            segment = next((s for s in self.segments if _same(s.rule, rule)), None)
            new = list(range(self.n, self.n + part.count))
            self.n += part.count
            if segment is None:
                state = None if rule is None else RuleState(rule, self.kernels.meter())
                self.segments.append(Segment(rule, state, new))
            else:
                if segment.state is not None:
                    segment.state.admit(len(segment.rows), len(new))
                segment.rows += new
        self._clear_indices()

    def keep(self, stay: Tensor) -> None:
        """Only these rows (ascending int64) stay."""
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
        self._clear_indices()

    def _clear_indices(self) -> None:
        for segment in self.segments:
            segment.index = segment.selected = None

    def update(self, rows: Rows, before: Tensor, after: Tensor, read: Read) -> tuple[Tensor | bool, Tensor | bool]:
        """Which rows leave after the step from `before` to `after` (N, C), and which of them keep the state before it.

        Both are bools (N,), or one bool for all.
        """
        if len(self.segments) == 1:
            state = self.segments[0].state
            if state is None:
                return False, False
            fired = self._update(state, rows, before, after, read)
            return fired, fired if state.rule.keep == "previous" else False
        exits = torch.zeros(rows.n, dtype=torch.bool, device=after.device)
        keep_previous: Tensor | bool = False
        for segment in self.segments:
            if (state := segment.state) is None:
                continue
            if segment.index is None or segment.selected is None:
                segment.index = torch.tensor(segment.rows, dtype=torch.int64, device=after.device)
                segment.selected = rows.select(segment.index)
            fired = self._update(state, segment.selected, before.index_select(0, segment.index), after.index_select(0, segment.index), read)
            exits[segment.index] = torch.as_tensor(fired, device=after.device)
            if state.rule.keep == "previous":
                keep_previous = torch.zeros_like(exits) if isinstance(keep_previous, bool) else keep_previous
                keep_previous[segment.index] = exits[segment.index]
        return exits, keep_previous

    def _update(self, state: RuleState, rows: Rows, before: Tensor, after: Tensor, read: Read) -> Tensor | bool:
        """A rule that raises harms the rows of its own requests alone."""
        try:
            return state.update(self.group, rows, before, after, lambda x, how: read(rows, x, how))
        except Exception as error:
            self.failures.append((rows.parts, error))
            return False


def _same(a: Rule | None, b: Rule | None) -> bool:
    """Whether two rules can share a state; rules that cannot be compared are different."""
    if a is b:
        return True
    try:
        return bool(a == b)
    except Exception:  # a field that does not compare to one bool, such as a tensor
        return False
