"""A batch: tokens of several sequences on their way through the stages of the network (runs of plain layers, and loop groups).

A *call* applies one stage's layers once to all rows that are at this stage, whatever their sequence and loop step; the caller chooses
the stage. The tokens of one
sequence enter a stage together: a chunk of a prompt continues when the last of its tokens has exited the loop.

Shapes: N rows, n tokens of one sequence, C width, G group.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from twoscale.engine.cache import Cache
from twoscale.engine.engine import Engine
from twoscale.engine.kernels.base import NEVER, Interrupt
from twoscale.engine.loop import ExitedRows, Loop
from twoscale.engine.request import Client, Request
from twoscale.engine.rows import Part, Rows, concat_rows, make_part
from twoscale.model.group import LoopGroup

Entry = tuple[int, Cache, Sequence[int], Request | None]  # index in the caller's batch, cache, next tokens, and the request if there is one


@dataclass(eq=False, slots=True)
class InFlight:
    """A chunk in flight: all tokens that one sequence has in a batch, one in decode, a chunk of the prompt in prefill.

    Some of its tokens may have exited the current loop while others are still inside; a `Part` of the loop's rows is then a subset.
    """

    part: Part
    """All its tokens, also while the rows in a loop are subsets."""
    ids: Tensor
    """int64 (2, n): positions and tokens."""
    request: Request | None
    steps: list[list[int]]
    """[group][token]: loop steps taken."""
    loop_outputs: Tensor | None = None
    """(n, C): while some of the tokens are in a loop, the outputs of the others; None: no token has exited before the others."""
    final_states: Tensor = field(init=False, repr=False)
    """(n, C): the states before the final norm; set at the end of the network."""
    start: list[Tensor] | None = None
    """Initial states given by the caller, one (n, C) for each group; None: the model's."""
    stage_states: list[Tensor] | None = None
    """The embedding and the state after each stage, (n, C) each, if requested."""
    n_in_loop: int = 0
    """Number of its tokens inside the current loop."""

    def steps_of_tokens(self) -> list[tuple[int, ...]]:
        """For each token, its loop steps in each group."""
        return list(zip(*self.steps, strict=True)) if self.steps else [()] * self.part.count


@dataclass(eq=False, slots=True)
class WaitingRows:
    """Rows that wait for a stage, stacked in the order of `chunks`."""

    chunks: list[InFlight]
    rows: Rows
    x: Tensor
    """States (N, C)."""
    arrived_at_call: int = 0
    """Number of calls of the batch when they arrived."""
    loop_calls: int = 0
    """Calls that they took in the loop before; 0 after plain layers."""


class Pace(Protocol):
    """How far loop steps may go before the caller decides again, and who pays for them."""

    interrupt: Interrupt
    """Ends the loop steps after the current one."""

    def max_steps(self, rows: Rows, layers: int) -> float:
        """The most steps (at least one, or infinity) of rows in a loop of so many layers."""

    def charge(self, rows: Rows, layers: int) -> None:
        """So many layers were applied to rows."""


class Batch:
    """A batch in flight. `len` is its number of sequences."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.chunks: set[InFlight] = set()
        self.waiting: dict[int, list[WaitingRows]] = {}
        self.loops: dict[int, Loop] = {}
        self.calls = 0
        self.rows_computed = 0
        """Rows of all calls together."""
        self.failures: list[tuple[Request, Exception]] = []
        """Requests whose exit rule or cache allocation has raised; the caller must drop them."""
        self._done: list[InFlight] = []

    def __len__(self) -> int:
        return len(self.chunks)

    # -- entering ------------------------------------------------------------------------------------------------

    def enter(self, entries: Sequence[Entry], start: Sequence[Tensor] | None = None, keep_stage_states: bool = False) -> list[InFlight]:
        """Add the next tokens of several sequences. `start` gives the groups' initial states, one (N, C) each."""
        engine, groups = self.engine, self.engine.config.n_groups
        firsts = [cache.extend(len(new)) for _, cache, new, _ in entries]
        positions = [p for first, entry in zip(firsts, entries, strict=True) for p in range(first, first + len(entry[2]))]
        ids = torch.tensor([positions, [token for entry in entries for token in entry[2]]], dtype=torch.int64, device=engine.device)
        chunks, at = [], 0
        for first, (batch_index, cache, new, request) in zip(firsts, entries, strict=True):
            n = len(new)
            row_range = slice(at, at + n)
            part = make_part(batch_index, cache, first, n)
            chunk = InFlight(part, ids if len(entries) == 1 else ids[:, row_range], request, [[0] * n for _ in range(groups)])
            part.in_flight = chunk
            if start is not None:
                chunk.start = [states[row_range] for states in start]
            chunks.append(chunk)
            at += n
        rows = Rows([chunk.part for chunk in chunks], ids, engine.kernels)
        x = engine.embed(rows)
        if keep_stage_states:
            for chunk in chunks:
                chunk.stage_states = []
        self.chunks.update(chunks)
        self._arrive(0, WaitingRows(chunks, rows, x))
        return chunks

    def _arrive(self, stage: int, waiting: WaitingRows) -> None:
        """Rows have reached a stage, or the end of the network."""
        if waiting.chunks[0].stage_states is not None:
            for chunk, x in zip(waiting.chunks, _split(waiting), strict=True):
                assert chunk.stage_states is not None
                chunk.stage_states.append(x)
        if stage < len(self.engine.stages):
            waiting.arrived_at_call = self.calls
            self.waiting.setdefault(stage, []).append(waiting)
            return
        for chunk, x in zip(waiting.chunks, _split(waiting), strict=True):
            chunk.final_states = x
            self._remove(chunk)
            self._done.append(chunk)

    # -- state ---------------------------------------------------------------------------------------------------

    def occupancy(self) -> dict[int, int]:
        """The number of rows at each stage that has any, including those inside its loop."""
        rows = {stage: len(loop) for stage, loop in self.loops.items()}
        for stage, waiting in self.waiting.items():
            rows[stage] = rows.get(stage, 0) + sum(w.rows.n for w in waiting)
        return rows

    @property
    def earliest_stage(self) -> int:
        """The earliest stage that has rows."""
        return min((*self.loops, *self.waiting))

    # -- calls ---------------------------------------------------------------------------------------------------

    def advance(self, stage: int, pace: Pace | None = None) -> list[InFlight]:
        """Compute one stage for the rows that are there; returns the chunks that have reached the end of the network.

        Loop steps are repeated until rows exit or `pace` ends them.
        """
        waiting = self.waiting.pop(stage, [])
        if isinstance(self.engine.stages[stage], LoopGroup):
            self._advance_loop(stage, waiting, pace)
        else:
            rows = concat_rows(w.rows for w in waiting)
            x = self.engine.run_plain_stage(stage, _concat([w.x for w in waiting]), rows)
            self._count_calls(rows, 1, len(self.engine.stage_kernels[stage].blocks), pace)
            self._arrive(stage + 1, WaitingRows([chunk for w in waiting for chunk in w.chunks], rows, x))
        done, self._done = self._done, []
        return done

    def _count_calls(self, rows: Rows, calls: int, layers: int, pace: Pace | None) -> None:
        self.calls += calls
        self.rows_computed += calls * rows.n
        if pace is not None:
            pace.charge(rows, calls * layers)

    def _advance_loop(self, stage: int, waiting: list[WaitingRows], pace: Pace | None) -> None:
        loop = self.loops.get(stage)
        if loop is None:
            loop = self.loops[stage] = Loop(self.engine, stage)
        if waiting:
            self._admit(loop, waiting)
        rows = loop.rows
        assert rows is not None
        steps_left = math.inf if pace is None else pace.max_steps(rows, len(loop.layers))
        interrupt = NEVER if pace is None else pace.interrupt
        exited = None
        while exited is None:
            exited = loop.advance(steps_left, interrupt)
            steps_left -= loop.steps_taken
            self._count_calls(rows, loop.steps_taken, len(loop.layers), pace)
            if loop.rules.failures:
                self._collect_failures(loop)
                break
            if steps_left < 1 or interrupt:
                break
        if not len(loop):
            del self.loops[stage]
        if exited is not None:
            self._exit(stage, exited)

    def _collect_failures(self, loop: Loop) -> None:
        for parts, error in loop.rules.failures:
            requests = dict.fromkeys(part.in_flight.request for part in parts)
            if None in requests:  # called by Engine.run, not by a scheduler
                raise error
            self.failures += [(request, error) for request in requests]
        loop.rules.failures = []

    def _admit(self, loop: Loop, waiting: list[WaitingRows]) -> None:
        rows = concat_rows(w.rows for w in waiting)
        start, group = None, loop.group.index
        for chunk in (chunk for w in waiting for chunk in w.chunks):
            chunk.n_in_loop = chunk.part.count
        if waiting[0].chunks[0].start is not None:
            start = torch.cat([chunk.start[group] for w in waiting for chunk in w.chunks])  # type: ignore[index]
        loop.admit(rows, _concat([w.x for w in waiting]), start)

    def _exit(self, stage: int, exited: ExitedRows) -> None:
        """Rows have exited a loop. The tokens of a sequence continue together, when the last of them has exited."""
        group: int = self.engine.stages[stage].index  # type: ignore[assignment]
        rows, parts = exited.rows, exited.rows.parts
        calls = max(part.k for part in parts)
        if all(part.in_flight.part is part for part in parts):  # no part is a subset: all tokens of each chunk have exited together
            chunks: list[InFlight] = [part.in_flight for part in parts]
            for chunk, part in zip(chunks, parts, strict=True):
                chunk.steps[group] = [part.k] * part.count
                chunk.n_in_loop = 0
            self._arrive(stage + 1, WaitingRows(chunks, rows, exited.x, loop_calls=calls))
            return
        complete, outputs, first = [], [], 0
        for part in parts:
            chunk, row_range = part.in_flight, slice(first, first + part.count)
            first = row_range.stop
            token_indices = rows.positions[row_range] - chunk.ids[0, 0]
            if chunk.loop_outputs is None:
                chunk.loop_outputs = exited.x.new_empty(chunk.part.count, exited.x.shape[1])
            chunk.loop_outputs[token_indices] = exited.x[row_range]
            for i in token_indices.tolist():
                chunk.steps[group][i] = part.k
            chunk.n_in_loop -= part.count
            if not chunk.n_in_loop:
                complete.append(chunk)
                outputs.append(chunk.loop_outputs)
                chunk.loop_outputs = None
        if not complete:
            return
        all_rows = Rows([chunk.part for chunk in complete], torch.cat([chunk.ids for chunk in complete], dim=1), self.engine.kernels)
        self._arrive(stage + 1, WaitingRows(complete, all_rows, torch.cat(outputs), loop_calls=calls))

    # -- removing rows -------------------------------------------------------------------------------------------

    def drop(self, request: Request) -> None:
        """Remove the rows of a request, also from inside a loop."""
        chunk = next((chunk for chunk in self.chunks if chunk.request is request), None)
        if chunk is None:
            return
        for stage, waiting in list(self.waiting.items()):
            self.waiting[stage] = [w if chunk not in w.chunks else self._without(w, chunk) for w in waiting if w.chunks != [chunk]]
            if not self.waiting[stage]:
                del self.waiting[stage]
        for stage, loop in list(self.loops.items()):
            if loop.rows is not None:
                loop.drop([part.in_flight is chunk for part in loop.rows.parts for _ in range(part.count)])
            if not len(loop):
                del self.loops[stage]
        self._remove(chunk)

    def _remove(self, chunk: InFlight) -> None:
        self.chunks.discard(chunk)
        chunk.part.in_flight = None  # break the reference cycle, which would keep the cache until the next garbage collection

    def _without(self, waiting: WaitingRows, dropped: InFlight) -> WaitingRows:
        kept = [chunk for chunk in waiting.chunks if chunk is not dropped]
        states = dict(zip(waiting.chunks, _split(waiting), strict=True))
        rows = Rows([chunk.part for chunk in kept], torch.cat([chunk.ids for chunk in kept], dim=1), self.engine.kernels)
        return WaitingRows(kept, rows, torch.cat([states[chunk] for chunk in kept]), waiting.arrived_at_call, waiting.loop_calls)

    def split(self, stage: int) -> "Batch":
        """Move the rows at a stage to a new batch and return it."""
        new = Batch(self.engine)
        if stage in self.loops:
            loop = new.loops[stage] = self.loops.pop(stage)
            assert loop.rows is not None
            new.chunks.update(part.in_flight for part in loop.rows.parts)
        if stage in self.waiting:
            new.waiting[stage] = self.waiting.pop(stage)
            new.chunks.update(chunk for w in new.waiting[stage] for chunk in w.chunks)
        self.chunks -= new.chunks
        return new

    def clients(self) -> Iterator[Client]:
        """The clients of the requests in this batch."""
        return (chunk.request.client for chunk in self.chunks if chunk.request is not None)


def _concat(states: list[Tensor]) -> Tensor:
    return states[0] if len(states) == 1 else torch.cat(states)


def _split(waiting: WaitingRows) -> Iterable[Tensor]:
    """The states of each chunk, (n, C)."""
    if len(waiting.chunks) == 1:
        return (waiting.x,)
    return torch.split(waiting.x, [chunk.part.count for chunk in waiting.chunks])  # type: ignore[no-untyped-call, no-any-return]
