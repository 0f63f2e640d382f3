"""The exit rules of the rows inside one loop group. Rows of different requests may have different rules.

The update of a row is the vector D = after - before of its states at a loop step. "Update norms" are five norms of the update, the previous
update and the states (see `exits.rule.UpdateNormsFunction`); they are computed for all rows in one call. Rows with the same rule share one
RuleState. If all rows have the same rule, no rows are gathered; with several rules a rule's rows are gathered only if it reads their
states.
"""

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from twoscale.engine.kernels import Kernels
from twoscale.engine.rows import Part, Rows
from twoscale.exits import Rule, RuleState
from twoscale.exits.rule import Numbers, UpdateNormsFunction, condition_for
from twoscale.exits.statistics import Condition

# (rows, states (n, C), kind) -> logits (n, V) for the kinds "lens" and "coda", exit probabilities (n,) for "gate"; see `LoopRows._read`
Read = Callable[[Rows, Tensor, str], Tensor]


class PreviousUpdates:
    """The previous update D of every row, for rules with `needs_previous_update`."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self._update_norms: UpdateNormsFunction | None = None
        self.vectors: Tensor | None = None
        """(N, C); NaN for rows that have taken no step yet; None before the first step of the loop."""

    def vectors_like(self, states: Tensor) -> Tensor:
        """`vectors` of the rows with these states (N, C), created if necessary. The caller overwrites them in place at every step."""
        if self.vectors is None:
            self.vectors = torch.full_like(states, math.nan, dtype=torch.float32)
        return self.vectors

    def update_norms(self, before: Tensor, after: Tensor) -> Sequence[Numbers]:
        """The five norms of the update from `before` to `after` (N, C), as `exits.rule.UpdateNormsFunction` returns them."""
        if self._update_norms is None:
            self._update_norms = self.kernels.update_norms_function()
        return self._update_norms(before, after, self.vectors_like(before))

    def select_rows(self, index: Tensor) -> None:
        """Keep the rows with these indices."""
        self.vectors = None if self.vectors is None else self.vectors.index_select(0, index)

    def admit(self, new: int) -> None:
        """Add `new` rows, which have taken no step yet."""
        if self.vectors is not None:
            self.vectors = torch.cat((self.vectors, self.vectors.new_full((new, self.vectors.shape[1]), math.nan)))


class RuleRowView:
    """Loop steps, prompt indices, positions and tokens of the rows of one rule, gathered lazily. Implements `exits.rule.RowInfo`."""

    same_k: None = None

    def __init__(self, rows: Rows, index: Tensor) -> None:
        self.rows, self.index = rows, index
        self.all_k = index
        """Loop steps of all rows, (N,); set before each update."""

    @property
    def k(self) -> Tensor:
        return self.all_k.index_select(0, self.index)

    @cached_property
    def prompt_indices(self) -> Tensor:
        return self.rows.prompt_indices.index_select(0, self.index)

    @cached_property
    def positions(self) -> Tensor:
        return self.rows.positions.index_select(0, self.index)

    @cached_property
    def tokens(self) -> Tensor:
        return self.rows.tokens.index_select(0, self.index)


class RowsOfRule:
    """The rows that have the same rule, and its RuleState (None without a rule)."""

    def __init__(self, rule: Rule | None, row_indices: list[int], condition: Condition | None, kernels: Kernels) -> None:
        self.rule, self.row_indices, self.condition = rule, row_indices, condition  # ascending
        self.rule_state = None if rule is None else RuleState(rule, None if condition is None else kernels.statistic_function(condition))
        self.row_view: RuleRowView | None = None
        """The view of these rows that the rule gets; None after a change of the rows."""

    def admit(self, new: list[int]) -> None:
        """Add the rows with these indices."""
        if self.rule_state is not None:
            self.rule_state.admit(len(self.row_indices), len(new))
        self.row_indices += new


class LoopExitRules:
    """The states of all rules of the rows in a group. `update` returns which rows exit."""

    def __init__(self, group: int, width: int, kernels: Kernels, failures: list[tuple[list[Part], Exception]]) -> None:
        """Parts whose rule has raised are appended to `failures`."""
        self.group, self.width, self.kernels, self.failures = group, width, kernels, failures
        self.by_rule: list[RowsOfRule] = []
        self.previous_updates: PreviousUpdates | None = None
        """None until a rule needs them."""
        self.n = 0

    def admit(self, rows: Rows) -> None:
        """Add rows."""
        if self.previous_updates is not None:
            self.previous_updates.admit(rows.n)
        by_rule: list[tuple[Rule | None, list[int]]] = []
        for part in rows.parts:
            rule = part.cache.loop_params.rules[self.group]
            new = next((indices for own, indices in by_rule if _same(own, rule)), None)
            if new is None:
                by_rule.append((rule, new := []))
            new += range(self.n, self.n + part.count)
            self.n += part.count
        for rule, new in by_rule:
            if self.previous_updates is None and rule is not None and rule.needs_previous_update:
                self.previous_updates = PreviousUpdates(self.kernels)
            same_rule = next((entry for entry in self.by_rule if _same(entry.rule, rule)), None)
            if same_rule is None:
                condition = None if rule is None else condition_for(rule, self.group, self.width)
                self.by_rule.append(RowsOfRule(rule, new, condition, self.kernels))
            else:
                same_rule.admit(new)
        self._clear_views()

    def select_rows(self, index: Tensor) -> None:
        """Keep the rows with these indices (ascending int64)."""
        if self.previous_updates is not None:
            self.previous_updates.select_rows(index)
        if len(self.by_rule) == 1:
            if (rule_state := self.by_rule[0].rule_state) is not None:
                rule_state.take(index)
            self.n = len(index)
            self.by_rule[0].row_indices = list(range(self.n))
            return
        new_index = {old: new for new, old in enumerate(index.tolist())}
        for entry in self.by_rule:
            kept = [i for i, row in enumerate(entry.row_indices) if row in new_index]
            if entry.rule_state is not None and len(kept) < len(entry.row_indices):
                entry.rule_state.take(torch.tensor(kept, dtype=torch.int64, device=index.device))
            entry.row_indices = [new_index[entry.row_indices[i]] for i in kept]
        self.by_rule = [entry for entry in self.by_rule if entry.row_indices]
        self.n = len(new_index)
        self._clear_views()

    def _clear_views(self) -> None:
        for entry in self.by_rule:
            entry.row_view = None

    def conditions(self) -> list[tuple[Rule | None, Condition | None]] | None:
        """The rules and their conditions, in the order of `by_rule`; (None, None) is "no rule". None if a rule has no condition."""
        pairs = [(entry.rule, entry.condition) for entry in self.by_rule]
        return None if any(rule is not None and condition is None for rule, condition in pairs) else pairs

    def streaks(self) -> list[int] | None:
        """For each row, how many consecutive steps have passed its rule's test; None if no rule counts them."""
        if not any(entry.rule is not None and entry.rule.hits > 1 for entry in self.by_rule):
            return None
        streaks = [0] * self.n
        for entry in self.by_rule:
            if entry.rule_state is not None:
                for row, streak in zip(entry.row_indices, entry.rule_state.streaks(len(entry.row_indices)), strict=True):
                    streaks[row] = streak
        return streaks

    def set_streaks(self, streaks: Sequence[int]) -> None:
        for entry in self.by_rule:
            if entry.rule_state is not None and entry.rule_state.rule.hits > 1:
                entry.rule_state.set_streaks([streaks[row] for row in entry.row_indices])

    def update(self, rows: Rows, before: Tensor, after: Tensor, read: Read) -> tuple[Tensor | bool, Tensor | bool]:
        """Which rows exit after the step from `before` to `after` (N, C), and which of them return the state before the step, because their
        rule has keep="previous".

        Both are bools (N,), or one bool for all.
        """
        norms = None if self.previous_updates is None else self.previous_updates.update_norms(before, after)
        if len(self.by_rule) == 1:
            rule_state = self.by_rule[0].rule_state
            if rule_state is None:
                return False, False
            try:
                fired = rule_state.update(
                    self.group,
                    rows,
                    before,
                    after,
                    lambda x, kind: read(rows, x, kind),
                    norms if rule_state.rule.needs_previous_update else None,
                )
            except Exception as error:  # only the rows of this rule fail
                self.failures.append((rows.parts, error))
                fired = False
            return fired, fired if rule_state.rule.keep == "previous" else False
        return self._update_by_rule(rows, before, after, read, norms)

    def _update_by_rule(
        self, rows: Rows, before: Tensor, after: Tensor, read: Read, norms: Sequence[Numbers] | None
    ) -> tuple[Tensor, Tensor | bool]:
        """`update` for rows with different rules."""
        exits = torch.zeros(rows.n, dtype=torch.bool, device=after.device)
        return_previous: Tensor | bool = False
        k = rows.k
        all_norms = None if norms is None else torch.stack([torch.as_tensor(norm) for norm in norms])
        for entry in self.by_rule:
            if (rule_state := entry.rule_state) is None:
                continue
            if entry.row_view is None or entry.row_view.rows is not rows:
                entry.row_view = RuleRowView(rows, torch.tensor(entry.row_indices, dtype=torch.int64, device=after.device))
            row_view, index = entry.row_view, entry.row_view.index
            row_view.all_k = k
            own_norms = (
                None if all_norms is None or not rule_state.rule.needs_previous_update else all_norms.index_select(1, index).unbind()
            )

            def own_read(x: Tensor, kind: str, index: Tensor = index) -> Tensor:
                return read(rows.select(index), x, kind)

            try:
                fired = rule_state.update(self.group, row_view, before, after, own_read, own_norms, index)
            except Exception as error:
                self.failures.append((rows.select(index).parts, error))
                continue
            exits[index] = torch.as_tensor(fired, device=after.device)
            if rule_state.rule.keep == "previous":
                return_previous = torch.zeros_like(exits) if isinstance(return_previous, bool) else return_previous
                return_previous[index] = exits[index]
        return exits, return_previous


def _same(a: Rule | None, b: Rule | None) -> bool:
    """Whether two rules are equal and can share a RuleState; rules that cannot be compared are different."""
    if a is b:
        return True
    try:
        return bool(a == b)
    except Exception:  # a field that does not compare to one bool, such as a tensor
        return False
