"""The wavefront: several positions of one sequence inside the loop, each at its own step; one call advances all of them.

    step   1  2  3  4  5  6  7  8  9 10 ...
    t      x  x  x  x  x  x  x  x  x  x         read after `steps` = 4 steps: a guess of t + 1
    t + 1              x  x  x  x  x  x         which enters the loop on it
    t + 2                          x  x

For models with one loop group. Position t + 1 at step k reads the keys and values of t at min(k, k_t); t is ahead of it or has left the
loop, so they are final. A position is read again after twice, four times, ... as many steps; if that changes its guess, the positions after
it are dropped at once. When the first position leaves the loop, its true token is read; then the next one is the first.

The keys and values that a read-out writes in the layers behind the loop are provisional: the position overwrites them when it is its turn.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from twoscale.engine.batch import Batch, InFlight, Pace
from twoscale.engine.engine import Engine
from twoscale.engine.kernels.base import NEVER
from twoscale.engine.loop import Loop
from twoscale.engine.request import Request
from twoscale.engine.rows import Part, Rows, make_part
from twoscale.engine.sample import sample
from twoscale.engine.speculation import SpeculationStats, Wavefront
from twoscale.model import LoopGroup


@dataclass(eq=False)
class Position:
    """A position of the sequence in the wave."""

    part: Part
    ids: Tensor
    """int64 (2, 1): position and token."""
    token: int
    next_read: int
    """The loop step after which it is read next."""
    guess: int | None = None
    """The token after it by the last read-out; None before the first."""
    output: Tensor | None = None
    """(1, C): what it leaves the loop with; None while it is inside."""


class Wave(Batch):
    """The positions of one request on their way through the loop, as a batch of their own: the scheduler calls `advance` as for others.

    A position that is done is returned as a chunk; the scheduler appends its token and calls `verified`.
    """

    def __init__(self, engine: Engine, request: Request, plan: Wavefront) -> None:
        super().__init__(engine)
        assert request.cache is not None
        self.request, self.cache, self.plan = request, request.cache, plan
        stages = engine.stages
        self.stage = next(i for i, stage in enumerate(stages) if isinstance(stage, LoopGroup))
        self.loop, self.max_steps = Loop(engine, self.stage), request.params.loops[0]
        self.positions: list[Position] = []
        """Those not done yet, the first to be done first."""
        ids = torch.tensor([[self.cache.length], [request.tokens[-1]]], dtype=torch.int64, device=engine.device)
        self.chunk = InFlight(make_part(request.batch_index, self.cache, self.cache.length, 1), ids, request, [])
        """Stands for all positions: the batch has this request until it is dropped."""
        self.chunks.add(self.chunk)
        self._next_token: int | None = request.tokens[-1]
        """The token of the position that enters next; None: it has not been guessed yet, or must wait."""

    # -- as a batch ----------------------------------------------------------------------------------------------

    @property
    def earliest_stage(self) -> int:
        return self.stage

    def occupancy(self) -> dict[int, int]:
        return {self.stage: max(1, len(self.positions))}

    def drop(self, request: Request) -> None:
        if request is self.request:
            self.positions, self.loop.rows = [], None
            self.chunks.clear()

    def advance(self, stage: int, pace: Pace | None = None) -> list[InFlight]:
        """Calls until the first position is done, which is returned, or `pace` ends them."""
        while True:
            if self._next_token is not None and len(self.positions) < self.plan.width and self.cache.length < self.cache.capacity:
                self._enter(self._next_token, pace)
            go_on = not len(self.loop) or self._advance_to_next_read(pace)
            if self.failures:
                return []
            due = [p for p in self.positions if (p.output is not None and p.guess is None) or p.part.k >= p.next_read]
            first = self.positions[0]
            if first.output is not None and first not in due:
                due.insert(0, first)
            if due:
                done = self._read(due, pace)
                if done is not None:
                    return [done]
            if not go_on:
                return []

    # -- the loop ------------------------------------------------------------------------------------------------

    def _enter(self, token: int, pace: Pace | None) -> None:
        """The next position enters the loop with this token."""
        engine, at = self.engine, self.cache.extend(1)
        part = make_part(self.request.batch_index, self.cache, at, 1, self.chunk)
        ids = torch.tensor([[at], [token]], dtype=torch.int64, device=engine.device)
        rows = Rows([part], ids, engine.kernels)
        x = engine.embed(rows)
        if self.stage:
            x = engine.run_plain_stage(0, x, rows)
            self._count(rows, 1, len(engine.stage_kernels[0].blocks), pace)
        self.loop.admit(rows, x)
        if self.positions:
            self._add(drafted=1)
        self.positions.append(Position(part, ids, token, min(self.plan.steps, self.max_steps)))
        self._next_token = None

    def _advance_to_next_read(self, pace: Pace | None) -> bool:
        """Loop steps until a position leaves the loop or is to be read; returns False if `pace` has ended them."""
        rows, layers = self.loop.rows, len(self.loop.layers)
        assert rows is not None
        to_next_read = min(p.next_read - p.part.k for p in self.positions if p.output is None)
        allowed, interrupt = (math.inf, NEVER) if pace is None else (pace.max_steps(rows, layers), pace.interrupt)
        exited = self.loop.advance(max(1, min(to_next_read, allowed)), interrupt)
        self._count(rows, self.loop.steps_taken, layers, pace)
        if self.loop.rules.failures:
            self._collect_failures(self.loop)
        elif exited is not None:
            at = {p.part.end: p for p in self.positions}
            for i, part in enumerate(exited.rows.parts):
                at[part.end].output = exited.x[i : i + 1]
        return self.loop.steps_taken < allowed and not interrupt

    def _count(self, rows: Rows, calls: int, layers: int, pace: Pace | None) -> None:
        self._count_calls(rows, calls, layers, pace)
        self._add(calls=calls)

    def _add(self, **counts: int) -> None:
        self.request.speculation += SpeculationStats(**counts)

    # -- reading -------------------------------------------------------------------------------------------------

    def _read(self, due: list[Position], pace: Pace | None) -> InFlight | None:
        """Read positions through the layers behind the loop; returns the first position of the wave if it is done."""
        engine, group = self.engine, self.loop.group
        rows = Rows([p.part for p in due], torch.cat([p.ids for p in due], dim=1), engine.kernels)
        inside = {} if self.loop.rows is None else {part.end: i for i, part in enumerate(self.loop.rows.parts)}
        states = [group.output(self.loop.x[inside[p.part.end]][None]) if p.output is None else p.output for p in due]
        x = torch.cat(states)
        if self.stage + 1 < len(engine.stages):
            x = engine.run_plain_stage(self.stage + 1, x, rows)
            self._count(rows, 1, len(engine.stage_kernels[self.stage + 1].blocks), pace)
        done = None
        if due[0] is self.positions[0] and due[0].output is not None:
            first, x = due.pop(0), torch.cat((x[1:], x[:1]))
            done = InFlight(first.part, first.ids, self.request, [[first.part.k]])
            done.final_states = x[-1:]
        if due:
            first_index = len(self.request.prompt) - 1
            draws = [self.request.draw(p.part.end - 1 - first_index - len(self.request.tokens)) for p in due]
            tokens = sample(engine.model.head(x[: len(due)]).float(), draws).tokens
            for position, token in zip(due, tokens, strict=True):
                if position in self.positions:  # not dropped by the one before
                    self._set_guess(position, token)
        return done

    def _set_guess(self, position: Position, token: int) -> None:
        """A read-out of a position gave this token."""
        position.next_read = self.max_steps + 1 if position.output is not None else 2 * position.part.k
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
        self.cache.length = dropped[0].part.end - 1
        self._add(rewound=len(dropped))
        if self.loop.rows is not None:
            self.loop.drop([part.end > self.cache.length for part in self.loop.rows.parts])

    def verified(self, token: int) -> bool:
        """The first position is done and its true token is known; returns whether the cache must be rewound to it."""
        right = len(self.positions) > 1 and self.positions[1].token == token
        if right:
            self._add(accepted=1)
        else:
            self._drop_after(0)
            self._next_token = token
        del self.positions[0]
        return not right
