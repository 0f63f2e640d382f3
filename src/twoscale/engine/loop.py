"""The rows that are inside one loop group now (`LoopRows`). `step` applies the group's map once to all of them; they may be at different
loop steps. `advance` takes several steps, in one call of a fused kernel if the kernels have one.

Rows may join between two steps. They exit one by one: when their exit rule fires, or at their request's maximum number of loop steps.

Shapes: N rows, C width.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twoscale.engine.kernels.base import NO_INTERRUPT, Interrupt, LoopSteps
from twoscale.engine.row_rules import LoopExitRules
from twoscale.engine.rows import Part, Rows
from twoscale.model import LoopGroup
from twoscale.model.group import AttentionOfLayer

if TYPE_CHECKING:
    from twoscale.engine.engine import Engine
    from twoscale.engine.kernels.native_rows import FusedLoop


@dataclass(frozen=True, slots=True)
class ExitedRows:
    """Rows that have exited a group; `loop_step` of each part is the number of loop steps taken."""

    rows: Rows
    x: Tensor
    """(n, C): output of the group."""


class LoopRows:
    """The rows that are inside one loop group now, with their states, and the exit rules of their requests."""

    def __init__(self, engine: "Engine", stage_index: int) -> None:
        group = engine.stages[stage_index]
        assert isinstance(group, LoopGroup)
        self.engine, self.group, self.stage_index = engine, group, stage_index
        self.layers = range(engine.first_layers[stage_index], engine.first_layers[stage_index + 1])
        self.stage_kernels = engine.stage_kernels[stage_index]
        self.rows: Rows | None = None
        self.failures: list[tuple[list[Part], Exception]] = []
        """Parts whose exit rule or cache allocation has raised; they stay in the loop until the caller drops them."""
        self.rules = self._new_rules()
        self.steps_taken = 0
        """Steps of the last call of `advance`."""
        self.steps_since_exit = 0
        """How many of them came after the first rows had exited."""

    def _new_rules(self) -> LoopExitRules:
        return LoopExitRules(self.group.index, self.engine.config.n_embd, self.engine.kernels, self.failures)

    def __len__(self) -> int:
        return 0 if self.rows is None else self.rows.n

    def admit(self, rows: Rows, e: Tensor, start: Tensor | None = None) -> None:
        """Add rows with the group's input e (N, C). The rows that are inside already are not affected.

        Every loop step uses the input again: it is injected (`config.inject`). Its share of a step is the same in all of them, so it is
        computed once here (`LoopGroup.inject`) and added at each step; None if the group injects nothing.
        """
        g = self.group.index
        for part in rows.parts:
            part.loop_step = 0
        x = (self.engine.start_states(g, e, rows) if start is None else start.to(e)).contiguous()
        injected = self.group.inject(e)
        self.rules.admit(rows)
        if self.rows is not None:
            rows, x = self.rows.concat(rows), torch.cat((self.x, x))
            injected = None if injected is None or self.injected is None else torch.cat((self.injected, injected))
        self._set_rows(rows, x, injected)

    def _set_rows(self, rows: Rows, x: Tensor, injected: Tensor | None) -> None:
        self.rows, self.x, self.injected = rows, x, injected
        self.rope = self.engine.rope(rows)
        self.fused: FusedLoop | None = None
        """The fused kernel for these rows, made at the first step; None if the kernels have none for them."""
        self.fused_decided = False
        """Whether the kernels have decided if these rows get a fused kernel (`fused`)."""
        self._attention_of_layer: AttentionOfLayer | None = None
        self.step_limits = [part.cache.loop_params.loops[self.group.index] for part in rows.parts]
        """For each part its request's maximum number of loop steps (`loops`): its rows exit there at the latest."""
        self.filled_steps = [self._filled(part) for part in rows.parts]
        """For each part the loop step up to which the levels of its cache are filled."""

    def _clear(self) -> None:
        self.rows, self.rules = None, self._new_rules()

    def drop(self, gone: Sequence[bool]) -> None:
        """Remove rows without a result; `gone` has one bool for each row."""
        index = [i for i, dropped in enumerate(gone) if not dropped]
        if not index:
            self._clear()
        elif len(index) < len(gone):
            self._select_rows(torch.tensor(index, dtype=torch.int64, device=self.engine.device))

    def _select_rows(self, index: Tensor) -> None:
        """Keep the rows with these indices (ascending int64)."""
        assert self.rows is not None
        self.rules.select_rows(index)
        injected = None if self.injected is None else self.injected.index_select(0, index)
        self._set_rows(self.rows.select(index), self.x.index_select(0, index), injected)

    def advance(self, max_steps: float = 1, interrupt: Interrupt = NO_INTERRUPT, steps_after_exit: float = 0) -> ExitedRows | None:
        """Steps until rows exit, `max_steps` are taken (at least one), or `interrupt` is set; returns the rows that exit, if any.

        When the first rows have exited, the others may take up to `steps_after_exit` steps more, and exit too. Fewer steps are taken where
        a cache has no level for the next one yet, or a rule fails: see `steps_taken`. The steps of each row are in `Part.loop_step`.
        """
        rows = self.rows
        assert rows is not None
        self.steps_taken = self.steps_since_exit = 0
        if self.needs_levels() and not self._fill_levels(rows):
            return None
        limit = min(max_steps, max(self.step_limits))
        before = sum(part.loop_step * part.count for part in rows.parts)
        steps = self.stage_kernels.iterate(self, int(limit), interrupt, int(min(steps_after_exit, limit)))
        self.steps_taken, self.x = steps.taken, steps.after
        self.steps_since_exit = steps.taken - steps.first_exit if steps.first_exit else 0
        self.engine.loop_steps[self.group.index] += sum(part.loop_step * part.count for part in rows.parts) - before
        if steps.exits is False:
            return None
        if steps.exits is True:
            return self._exit_all(rows, steps.before if steps.return_previous is True else steps.after, steps.deeper_levels_filled)
        return self._exit_some(rows, steps)

    def step(self) -> LoopSteps:
        """Apply the map once to every row. This is the definition of a loop step."""
        rows, before = self.rows, self.x
        assert rows is not None
        at_limit = False
        for part, limit in zip(rows.parts, self.step_limits, strict=True):
            part.loop_step += 1
            at_limit = at_limit or part.loop_step >= limit
        x = before if not self.engine.config.noise_in_steps else self.group.mix_noise(before, self._step_noise(rows))
        injected = None if self.injected is None else self.injected[None]
        if self._attention_of_layer is None:
            self._attention_of_layer = rows.attention(self.layers.start, len(self.layers))
        after = self.group.step(x[None], injected, self.rope, self._attention_of_layer)[0]
        self.x = after
        exits, return_previous = self.rules.update(rows, before, after, self._read)
        if rows.n == 1:
            return LoopSteps(1, before, after, bool(exits or at_limit), bool(return_previous))
        if at_limit:
            ended = [part.loop_step >= limit for part, limit in zip(rows.parts, self.step_limits, strict=True) for _ in range(part.count)]
            exits = torch.tensor(ended, device=after.device) | exits
        return LoopSteps(1, before, after, exits, return_previous)

    def needs_levels(self) -> bool:
        """Whether a cache has no level for the next step yet."""
        assert self.rows is not None
        return any(part.loop_step >= k for part, k in zip(self.rows.parts, self.filled_steps, strict=True))

    def _filled(self, part: Part) -> int:
        """The loop step up to which the levels of a part's cache are filled."""
        layer = part.cache.layers[self.layers.start]
        return sys.maxsize if layer.n_levels == layer.max_levels else layer.n_levels

    def _fill_levels(self, rows: Rows) -> bool:
        """Fill the levels of the next step: tokens before have there what they had at their last step. Parts whose cache cannot grow
        become failures; False if there are any.

        Done before the step, so that a failure belongs to one request and nothing has been computed for the others yet.
        """
        for part, filled in zip(rows.parts, self.filled_steps, strict=True):
            if part.loop_step < filled:
                continue
            try:
                for layer in self.layers:
                    part.cache.layers[layer].ensure_level(part.loop_step + 1, part.cache.length)
            except Exception as error:
                self.failures.append(([part], error))
        self.filled_steps = [self._filled(part) for part in rows.parts]
        return not self.failures

    def _exit_all(self, rows: Rows, states: Tensor, deeper_levels_filled: bool) -> ExitedRows:
        """All rows exit with these states (N, C); `deeper_levels_filled`: the deeper levels of their caches are filled already."""
        if not deeper_levels_filled:
            rows.fill_deeper_levels(self.layers)
        self._clear()
        return ExitedRows(rows, self.group.output(states))

    def _exit_some(self, rows: Rows, steps: LoopSteps) -> ExitedRows:
        """Remove the rows that exit, and return them."""
        assert isinstance(steps.exits, Tensor)
        exit_index, states = steps.exits.nonzero().flatten(), steps.after
        if steps.return_previous is not False:
            states = torch.where(torch.as_tensor(steps.return_previous, device=states.device)[..., None], steps.before, states)
        if len(exit_index) == rows.n:
            return self._exit_all(rows, states, steps.deeper_levels_filled)
        exited_rows = rows.select(exit_index)
        if not steps.deeper_levels_filled:
            exited_rows.fill_deeper_levels(self.layers)
        exited = ExitedRows(exited_rows, self.group.output(states.index_select(0, exit_index)))
        self.x = states
        self._select_rows((~steps.exits).nonzero().flatten())
        return exited

    def _step_noise(self, rows: Rows) -> Tensor:
        """The noise of this step for every row (noise="every_step"), (N, C)."""
        width, each, first = self.engine.config.n_embd, [], 0
        for part in rows.parts:
            noise = self.engine.noise(part.cache.loop_params.seed)
            each.append(noise(self.group.index, rows.positions[first : first + part.count], width, part.loop_step))
            first += part.count
        return torch.cat(each)

    def _read(self, rows: Rows, x: Tensor, kind: str) -> Tensor:
        """What exit rules read from states x (n, C). `kind` is one of:

        lens   logits (n, V) of the final norm and the head on the state (logit lens)
        coda   the same after the plain layers behind the last group (the coda) have been run on the state
        gate   the exit probability (n,) of the group's learned gate
        """
        model = self.engine.model
        if kind == "gate":
            assert self.group.gate is not None
            return self.group.gate(x).sigmoid().squeeze(-1)
        last = len(self.engine.stages) - 1
        if kind == "coda" and not isinstance(self.engine.stages[last], LoopGroup):
            # The keys and values that the coda writes are provisional: the next read-out and the token's own pass overwrite them.
            assert rows.one_row_per_part, "a rule that runs the coda needs one token of each sequence at a time"
            x = self.engine.run_plain_stage(last, self.group.output(x), rows)
        return model.head(x)
