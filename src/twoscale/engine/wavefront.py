"""The wavefront: several positions of one sequence inside the loop, each at its own step; one stage pass advances all of them.

    step   1  2  3  4  5  6  7  8  9 10 ...
    t      x  x  x  x  x  x  x  x  x  x         read out after `steps` = 4 steps: a guess of token t + 1
    t + 1              x  x  x  x  x  x         enters the loop with that guess
    t + 2                          x  x

To *read out* a position is to run the coda (the plain layers after the loop) and the head on its current state, and to sample a token.

For models with one loop group. Position t + 1 at step k attends to the keys and values of t at min(k, k_t); t is ahead of it or has
exited the loop, so they are final. A position is read out again after twice, four times, ... as many steps; if that changes its guess, the
positions after it are dropped at once. When the first position exits the loop, its read-out gives the true token after it, and the next
position becomes the first.

The keys and values that a read-out writes in the coda are provisional: the final read-out of the position overwrites them.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from twoscale.engine.batch import Batch, Chunk, StepBudget
from twoscale.engine.engine import Engine
from twoscale.engine.kernels.base import NO_INTERRUPT
from twoscale.engine.loop import LoopRows
from twoscale.engine.request import Request
from twoscale.engine.rows import Part, Rows, make_part
from twoscale.engine.sample import sample
from twoscale.engine.speculation import SpeculationStats, Wavefront
from twoscale.model import LoopGroup


@dataclass(eq=False)
class WavePosition:
    """A position of the sequence in the wave."""

    part: Part
    positions_and_tokens: Tensor
    """int64 (2, 1)."""
    token: int
    next_read_out: int
    """The loop step after which it is read out next."""
    guess: int | None = None
    """The next token by the newest read-out; None before the first."""
    output: Tensor | None = None
    """(1, C): its output of the loop group; None while it is inside."""


class Wave(Batch):
    """The positions of one request inside the loop, as a batch of their own: the scheduler calls `advance` as for other batches.

    A position that is done is returned as a chunk; the scheduler appends its token and calls `Speculator.on_verified`.
    """

    def __init__(self, engine: Engine, request: Request, method: Wavefront) -> None:
        super().__init__(engine)
        assert request.cache is not None
        self.request, self.cache, self.method = request, request.cache, method
        stages = engine.stages
        self.stage_index = next(i for i, stage in enumerate(stages) if isinstance(stage, LoopGroup))
        self.loop, self.step_limit = LoopRows(engine, self.stage_index), request.loop_params.loops[0]
        self.positions: list[WavePosition] = []
        """Those that are not done yet, in the order of the sequence."""
        positions_and_tokens = torch.tensor([[self.cache.length], [request.tokens[-1]]], dtype=torch.int64, device=engine.device)
        self.chunk = Chunk(make_part(request.prompt_index, self.cache, self.cache.length, 1), positions_and_tokens, request, [])
        """A placeholder for all positions, whose number changes: it keeps the request in `chunks` of this batch until the request is
        dropped. It is never computed."""
        self.chunks.add(self.chunk)
        self._next_token: int | None = request.tokens[-1]
        """The token of the position that enters next; None if it has not been guessed yet, or is a stop token."""

    # -- as a batch ----------------------------------------------------------------------------------------------

    @property
    def earliest_stage(self) -> int:
        return self.stage_index

    def occupancy(self) -> dict[int, int]:
        return {self.stage_index: max(1, len(self.positions))}

    def drop(self, request: Request) -> None:
        if request is self.request:
            self.positions, self.loop.rows = [], None
            self.chunks.clear()

    def advance(self, stage: int, budget: StepBudget | None = None) -> list[Chunk]:
        """Stage passes until the first position is done, which is returned, or `budget` ends them."""
        while True:
            fits = len(self.positions) < self.method.max_positions and self.cache.length < self.cache.capacity
            if self._next_token is not None and fits:
                self._enter(self._next_token, budget)
            go_on = not len(self.loop) or self._advance_to_next_read_out(budget)
            if self.failures:
                return []
            due = [p for p in self.positions if (p.output is not None and p.guess is None) or p.part.loop_step >= p.next_read_out]
            first = self.positions[0]
            if first.output is not None and first not in due:
                due.insert(0, first)
            if due:
                done = self._read_out(due, budget)
                if done is not None:
                    return [done]
            if not go_on:
                return []

    # -- the loop ------------------------------------------------------------------------------------------------

    def _enter(self, token: int, budget: StepBudget | None) -> None:
        """Add the next position, with this token, to the loop."""
        engine, position = self.engine, self.cache.extend(1)
        part = make_part(self.request.prompt_index, self.cache, position, 1, self.chunk)
        positions_and_tokens = torch.tensor([[position], [token]], dtype=torch.int64, device=engine.device)
        rows = Rows([part], positions_and_tokens, engine.kernels)
        x = engine.embed(rows)
        if self.stage_index:
            x = engine.run_plain_stage(0, x, rows)
            self._count(rows, len(engine.stage_kernels[0].blocks), budget)
        self.loop.admit(rows, x)
        if self.positions:
            self._add(drafted=1)
        self.positions.append(WavePosition(part, positions_and_tokens, token, min(self.method.steps, self.step_limit)))
        self._next_token = None

    def _advance_to_next_read_out(self, budget: StepBudget | None) -> bool:
        """Loop steps until a position exits the loop or is due for a read-out; returns False if `budget` has ended them."""
        rows, layers = self.loop.rows, len(self.loop.layers)
        assert rows is not None
        to_next_read_out = min(p.next_read_out - p.part.loop_step for p in self.positions if p.output is None)
        allowed, interrupt = (math.inf, NO_INTERRUPT) if budget is None else (budget.steps_allowed(rows, layers), budget.interrupt)
        exited = self._advance_rows(self.loop, rows, max(1, min(to_next_read_out, allowed)), interrupt, 0, budget)
        self._add(calls=self.loop.steps_taken)
        if self.loop.failures:
            self._collect_failures(self.loop)
        elif exited is not None:
            by_position = {_position(p.part): p for p in self.positions}
            for i, part in enumerate(exited.rows.parts):
                by_position[_position(part)].output = exited.x[i : i + 1]
        return self.loop.steps_taken < allowed and not interrupt

    def _count(self, rows: Rows, layers: int, budget: StepBudget | None) -> None:
        """Plain layers were applied to the rows."""
        self._count_passes(rows, [1] * len(rows.parts), layers, budget)
        self._add(calls=1)

    def _add(self, **counts: int) -> None:
        self.request.speculation_stats += SpeculationStats(**counts)

    # -- reading out ---------------------------------------------------------------------------------------------

    def _read_out(self, due: list[WavePosition], budget: StepBudget | None) -> Chunk | None:
        """Read out positions: coda, head, sampling. Returns the first position of the wave, not sampled yet, if it is done."""
        engine, group = self.engine, self.loop.group
        rows = Rows([p.part for p in due], torch.cat([p.positions_and_tokens for p in due], dim=1), engine.kernels)
        inside = {} if self.loop.rows is None else {_position(part): i for i, part in enumerate(self.loop.rows.parts)}
        states = [group.output(self.loop.x[inside[_position(p.part)]][None]) if p.output is None else p.output for p in due]
        x = torch.cat(states)
        if self.stage_index + 1 < len(engine.stages):
            x = engine.run_plain_stage(self.stage_index + 1, x, rows)
            self._count(rows, len(engine.stage_kernels[self.stage_index + 1].blocks), budget)
        done = None
        if due[0] is self.positions[0] and due[0].output is not None:
            first, x = due.pop(0), torch.cat((x[1:], x[:1]))
            done = Chunk(first.part, first.positions_and_tokens, self.request, [[first.part.loop_step]])
            done.final_states = x[-1:]
        if due:
            newest = len(self.request.prompt) + len(self.request.tokens) - 1  # the position of the newest token
            keys = [self.request.sampling_key(_position(p.part) - newest) for p in due]
            tokens = sample(engine.model.head(x[: len(due)]).float(), keys).tokens
            for position, token in zip(due, tokens, strict=True):
                if position in self.positions:  # else it was dropped in this loop, because the guess before it has changed
                    self._set_guess(position, token)
        return done

    def _set_guess(self, position: WavePosition, token: int) -> None:
        """Set the guess of a position to the token of its read-out. If it changes, the positions after it are dropped."""
        position.next_read_out = self.step_limit + 1 if position.output is not None else 2 * position.part.loop_step
        if token != position.guess:
            position.guess = token
            self._drop_after(self.positions.index(position))
            self._next_token = None if token in self.request.sampling.stop_token_ids else token

    def _drop_after(self, index: int) -> None:
        """Drop the positions after this one."""
        dropped = self.positions[index + 1 :]
        if not dropped:
            return
        del self.positions[index + 1 :]
        self.cache.length = _position(dropped[0].part)
        self._add(rewound=len(dropped))
        if self.loop.rows is not None:
            self.loop.drop([_position(part) >= self.cache.length for part in self.loop.rows.parts])

    def on_verified(self, token: int) -> bool:
        """Remove the first position, whose true next token is `token`; returns whether the cache must be rewound to it."""
        right = len(self.positions) > 1 and self.positions[1].token == token
        if right:
            self._add(accepted=1)
        else:
            self._drop_after(0)
            self._next_token = token
        del self.positions[0]
        return not right


def _position(part: Part) -> int:
    """The position of a part of one row."""
    return part.end - 1
