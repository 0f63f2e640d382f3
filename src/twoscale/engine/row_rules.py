"""The exit rules of the rows inside one loop group. Rows of different requests may have different rules.

Rows with the same rule share one RuleState. If all rows have the same rule, no rows are gathered.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from twoscale.engine.kernels import Kernels
from twoscale.engine.rows import Part, Rows
from twoscale.exits import Rule, RuleState

Read = Callable[[Rows, Tensor, str], Tensor]  # (rows, states (n, C), "lens" | "coda" | "gate") -> logits or probabilities; see `Loop._read`


@dataclass(slots=True)
class Segment:
    """Rows that have the same rule."""

    rule: Rule | None
    state: RuleState | None
    """None if there is no rule."""
    rows: list[int]
    """Indices of these rows, ascending."""
    index: Tensor | None = None
    """The same as int64 (n,); None if not computed yet."""
    selected: Rows | None = None
    """The rows of this segment; None if not computed yet."""


class RowRules:
    """The states of all rules of the rows in a group. `update` tells which rows exit."""

    def __init__(self, group: int, kernels: Kernels) -> None:
        self.group, self.kernels = group, kernels
        self.segments: list[Segment] = []
        self.n = 0
        self.failures: list[tuple[list[Part], Exception]] = []
        """Parts whose exit rule or cache allocation has raised; they stay in the loop until the caller drops them."""

    def admit(self, rows: Rows) -> None:
        """Rows enter the group."""
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

    def keep(self, index: Tensor) -> None:
        """Keep the rows with these indices (ascending int64)."""
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
        self._clear_indices()

    def _clear_indices(self) -> None:
        for segment in self.segments:
            segment.index = segment.selected = None

    def update(self, rows: Rows, before: Tensor, after: Tensor, read: Read) -> tuple[Tensor | bool, Tensor | bool]:
        """Which rows exit after the step from `before` to `after` (N, C), and which of them return the state before the step.

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
        """The rule's decision for its rows. If it raises, only these rows become failures."""
        try:
            return state.update(self.group, rows, before, after, lambda x, how: read(rows, x, how))
        except Exception as error:
            self.failures.append((rows.parts, error))
            return False


def _same(a: Rule | None, b: Rule | None) -> bool:
    """Whether two rules are equal and can share a state; rules that cannot be compared are different."""
    if a is b:
        return True
    try:
        return bool(a == b)
    except Exception:  # a field that does not compare to one bool, such as a tensor
        return False
