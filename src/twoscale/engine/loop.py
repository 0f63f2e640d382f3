"""Rows inside one loop group: every call of `advance` applies the group's map once to all of them, whatever their step.

Rows may join between two calls, and leave one by one: when their exit rule says so, or after the most steps that their request allows.

Shapes: N rows, C width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twoscale.engine.row_rules import RowRules
from twoscale.engine.rows import Rows
from twoscale.model import LoopGroup

if TYPE_CHECKING:
    from twoscale.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Finished:
    """Rows that have left a group; each part of `rows` says how many steps it took (`k`)."""

    rows: Rows
    x: Tensor
    """(n, C): the group's output."""


class Loop:
    """Rows inside one group."""

    def __init__(self, engine: "Engine", stage: int) -> None:
        group = engine.stages[stage]
        assert isinstance(group, LoopGroup)
        self.engine, self.group, self.stage = engine, group, stage
        self.layers = range(engine.first_layers[stage], engine.first_layers[stage + 1])
        self.rows: Rows | None = None
        self.rules = RowRules(group.index, engine.kernels)

    def __len__(self) -> int:
        return 0 if self.rows is None else self.rows.n

    def admit(self, rows: Rows, e: Tensor, start: Tensor | None = None) -> None:
        """Rows enter the group with the input e (N, C); those that are inside already stay at their steps."""
        g = self.group.index
        for part in rows.parts:
            part.k = 0
        x = (self.engine.start(g, e, rows) if start is None else start.to(e)).contiguous()
        injected = self.group.inject(e)
        self.rules.admit(rows)
        if self.rows is not None:
            rows, x = self.rows.join(rows), torch.cat((self.x, x))
            injected = None if injected is None or self.injected is None else torch.cat((self.injected, injected))
        self._hold(rows, x, injected)

    def _hold(self, rows: Rows, x: Tensor, injected: Tensor | None) -> None:
        self.rows, self.x, self.injected = rows, x, injected
        self.rope = self.engine.rope(rows)
        self.attention = rows.attention(self.layers.start, len(self.layers))
        self.max_steps = [part.cache.params.loops[self.group.index] for part in rows.parts]

    def _empty(self) -> None:
        failures, self.rows = self.rules.failures, None
        self.rules = RowRules(self.group.index, self.engine.kernels)
        self.rules.failures = failures

    def drop(self, gone: Sequence[bool]) -> None:
        """Remove rows without a result: one bool for each row."""
        stay = [i for i, dropped in enumerate(gone) if not dropped]
        if not stay:
            self._empty()
        elif len(stay) < len(gone):
            self._stay(torch.tensor(stay, dtype=torch.int64, device=self.engine.device))

    def _stay(self, stay: Tensor) -> None:
        """Only the rows of `stay`, ascending int64."""
        assert self.rows is not None
        self.rules.take(stay)
        injected = None if self.injected is None else self.injected.index_select(0, stay)
        self._hold(self.rows.take(stay), self.x.index_select(0, stay), injected)

    def advance(self) -> Finished | None:
        """Apply the map once to every row; returns those that have left, if any."""
        rows, before, engine = self.rows, self.x, self.engine
        assert rows is not None
        at_limit = False
        for part, limit in zip(rows.parts, self.max_steps, strict=True):
            part.k += 1
            at_limit = at_limit or part.k >= limit
        x = before if engine.config.noise == "start" else self.group.stir(before, self._step_noise(rows))
        injected = None if self.injected is None else self.injected[None]
        after = self.group.step(x[None], injected, self.rope, self.attention)[0]
        engine.work[self.group.index] += rows.n
        passed, keeps = self.rules.update(rows, before, after, self._read)
        if rows.n == 1:
            if not (passed or at_limit):
                self.x = after
                return None
            return self._all_leave(rows, before if keeps else after)
        return self._some_leave(rows, before, after, passed, keeps, at_limit)

    def _all_leave(self, rows: Rows, kept: Tensor) -> Finished:
        rows.settle(self.layers)
        self._empty()
        return Finished(rows, self.group.leave(kept))

    def _some_leave(
        self, rows: Rows, before: Tensor, after: Tensor, passed: Tensor | bool, keeps: Tensor | bool, at_limit: bool
    ) -> Finished | None:
        """Release the rows that have passed their rule or taken all their steps."""
        leaves = torch.full((rows.n,), passed, device=after.device) if isinstance(passed, bool) else passed
        if at_limit:
            ended = [part.k >= limit for part, limit in zip(rows.parts, self.max_steps, strict=True) for _ in range(part.count)]
            leaves = leaves | torch.tensor(ended, device=after.device)
        gone = leaves.nonzero().flatten()
        if not len(gone):
            self.x = after
            return None
        kept = after if keeps is False else torch.where(torch.as_tensor(keeps, device=after.device)[..., None], before, after)
        if len(gone) == rows.n:
            return self._all_leave(rows, kept)
        left = rows.take(gone)
        left.settle(self.layers)
        finished = Finished(left, self.group.leave(kept.index_select(0, gone)))
        self.x = kept
        self._stay((~leaves).nonzero().flatten())
        return finished

    def _step_noise(self, rows: Rows) -> Tensor:
        """Noise for this step of every row (noise="every_step")."""
        width, each, first = self.engine.config.n_embd, [], 0
        for part in rows.parts:
            noise = self.engine.noise(part.cache.params.seed)
            each.append(noise(self.group.index, rows.positions[first : first + part.count], width, part.k))
            first += part.count
        return torch.cat(each)

    def _read(self, rows: Rows, x: Tensor, how: str) -> Tensor:
        """What a rule may ask of states x (n, C) of some rows: logits (n, V), or the gate's probability (n,)."""
        model = self.engine.model
        if how == "gate":
            assert self.group.gate is not None
            return self.group.gate(x).sigmoid().squeeze(-1)
        last = len(self.engine.stages) - 1
        if how == "coda" and not isinstance(self.engine.stages[last], LoopGroup):
            # The keys and values that this writes are provisional: the next reading and the token itself overwrite them.
            assert rows.one_each, "reading through the coda goes token by token"
            x = self.engine.plain(last, self.group.leave(x), rows)
        return model.head(x)
