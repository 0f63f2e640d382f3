"""A batch: tokens of several sequences on their way through the stages of the network (runs of plain layers, and loop groups).

A *stage pass* applies one stage's layers once to all rows that are at this stage, whatever their sequence and loop step. In a loop group
it is one loop step. The caller chooses the stage. The tokens of one sequence enter a stage together: a chunk of a prompt continues when the
last of its tokens has exited the loop.

Shapes: N rows, n tokens of one sequence, C width, G group.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from twoscale.engine.cache import Cache
from twoscale.engine.engine import Engine
from twoscale.engine.kernels.base import NO_INTERRUPT, Interrupt
from twoscale.engine.loop import ExitedRows, LoopRows
from twoscale.engine.request import Request, RequestGroup
from twoscale.engine.rows import Part, Rows, concat_rows, make_part
from twoscale.model.group import LoopGroup


class Entry(NamedTuple):
    """The next tokens of one sequence, to be added to a batch."""

    prompt_index: int
    """Index of the sequence among the caller's prompts (`Request.prompt_index`)."""
    cache: Cache
    tokens: Sequence[int]
    request: Request | None
    """None if the caller is not a scheduler."""


@dataclass(eq=False, slots=True)
class Chunk:
    """All tokens that one sequence has in a batch: one in decode, a chunk of the prompt in prefill.

    Some of its tokens may have exited the current loop while others are still inside; a `Part` of the loop's rows is then a subset.
    """

    part: Part
    """All its tokens. While some of them are inside a loop, the loop has a part of its own for these."""
    positions_and_tokens: Tensor
    """int64 (2, n)."""
    request: Request | None
    steps_by_group: list[list[int]]
    """[group][token]: loop steps taken."""
    loop_outputs: Tensor | None = None
    """(n, C): outputs of the current loop for the tokens that have exited it while others are still inside (their rows are not set yet);
    None if all tokens are inside, or none."""
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
        return list(zip(*self.steps_by_group, strict=True)) if self.steps_by_group else [()] * self.part.count


@dataclass(eq=False, slots=True)
class WaitingRows:
    """Rows that wait for a stage, stacked in the order of `chunks`."""

    chunks: list[Chunk]
    rows: Rows
    x: Tensor
    """States (N, C)."""
    arrived_at_pass: int = 0
    """`Batch.stage_passes` when they arrived."""
    loop_steps: int = 0
    """The most loop steps that one of them took in the loop before; 0 after plain layers."""


class StepBudget(Protocol):
    """How many loop steps may be taken before the caller chooses a batch again. Every stage pass is charged to it."""

    interrupt: Interrupt
    """When it is set, the loop step that is running is the last one."""

    def steps_allowed(self, rows: Rows, layers: int) -> float:
        """How many loop steps may be taken, at least 1 or infinite, by rows in a loop group of `layers` layers."""

    def steps_after_exit(self) -> float:
        """How many steps the other rows may take when the first ones have exited, before the caller chooses a stage again."""

    def charge(self, rows: Rows, layers: int, steps: Sequence[int]) -> None:
        """Account for `layers` layers, applied to the rows of each part as often as `steps` says."""


class Batch:
    """Chunks on their way through the network. `len` is the number of sequences, one chunk each."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.chunks: set[Chunk] = set()
        self.waiting: dict[int, list[WaitingRows]] = {}
        self.loop_of_stage: dict[int, LoopRows] = {}
        """The loops that have rows, by stage index."""
        self.stage_passes = 0
        self.rows_computed = 0
        """Rows of all stage passes together."""
        self.failures: list[tuple[Request, Exception]] = []
        """Requests whose exit rule or cache allocation has raised; the caller must drop them."""
        self._done: list[Chunk] = []

    def __len__(self) -> int:
        return len(self.chunks)

    # -- entering ------------------------------------------------------------------------------------------------

    def enter(self, entries: Sequence[Entry], start: Sequence[Tensor] | None = None, keep_stage_states: bool = False) -> list[Chunk]:
        """Add the next tokens of several sequences. `start` gives the groups' initial states, one (N, C) each."""
        engine, groups = self.engine, self.engine.config.n_groups
        first_positions = [entry.cache.extend(len(entry.tokens)) for entry in entries]
        with_first = zip(first_positions, entries, strict=True)
        positions = [p for first, entry in with_first for p in range(first, first + len(entry.tokens))]
        tokens = [token for entry in entries for token in entry.tokens]
        positions_and_tokens = torch.tensor([positions, tokens], dtype=torch.int64, device=engine.device)
        chunks, first_row = [], 0
        for first, entry in zip(first_positions, entries, strict=True):
            n = len(entry.tokens)
            row_range = slice(first_row, first_row + n)
            part = make_part(entry.prompt_index, entry.cache, first, n)
            own = positions_and_tokens if len(entries) == 1 else positions_and_tokens[:, row_range]
            chunk = part.chunk = Chunk(part, own, entry.request, [[0] * n for _ in range(groups)])
            if start is not None:
                chunk.start = [states[row_range] for states in start]
            chunks.append(chunk)
            first_row += n
        rows = Rows([chunk.part for chunk in chunks], positions_and_tokens, engine.kernels)
        x = engine.embed(rows)
        if keep_stage_states:
            for chunk in chunks:
                chunk.stage_states = []
        self.chunks.update(chunks)
        self._arrive(0, WaitingRows(chunks, rows, x))
        return chunks

    def _arrive(self, stage: int, waiting: WaitingRows, passes_ago: int = 0) -> None:
        """Rows have reached a stage, or the end of the network, `passes_ago` stage passes before."""
        if waiting.chunks[0].stage_states is not None:
            for chunk, x in zip(waiting.chunks, _split(waiting), strict=True):
                assert chunk.stage_states is not None
                chunk.stage_states.append(x)
        if stage < len(self.engine.stages):
            waiting.arrived_at_pass = self.stage_passes - passes_ago
            self.waiting.setdefault(stage, []).append(waiting)
            return
        for chunk, x in zip(waiting.chunks, _split(waiting), strict=True):
            chunk.final_states = x
            self._remove(chunk)
            self._done.append(chunk)

    # -- state ---------------------------------------------------------------------------------------------------

    def occupancy(self) -> dict[int, int]:
        """The number of rows at each stage that has any, including those inside its loop."""
        rows = {stage: len(loop) for stage, loop in self.loop_of_stage.items()}
        for stage, waiting in self.waiting.items():
            rows[stage] = rows.get(stage, 0) + sum(w.rows.n for w in waiting)
        return rows

    @property
    def earliest_stage(self) -> int:
        """The earliest stage that has rows."""
        return min((*self.loop_of_stage, *self.waiting))

    # -- stage passes --------------------------------------------------------------------------------------------

    def advance(self, stage: int, budget: StepBudget | None = None) -> list[Chunk]:
        """Compute one stage for the rows that are there; returns the chunks that have reached the end of the network.

        Loop steps are repeated until rows exit or `budget` ends them.
        """
        waiting = self.waiting.pop(stage, [])
        if isinstance(self.engine.stages[stage], LoopGroup):
            self._advance_loop(stage, waiting, budget)
        else:
            rows = concat_rows(w.rows for w in waiting)
            x = self.engine.run_plain_stage(stage, _concat([w.x for w in waiting]), rows)
            self._count_passes(rows, [1] * len(rows.parts), len(self.engine.stage_kernels[stage].blocks), budget)
            self._arrive(stage + 1, WaitingRows([chunk for w in waiting for chunk in w.chunks], rows, x))
        done, self._done = self._done, []
        return done

    def _count_passes(self, rows: Rows, steps: Sequence[int], layers: int, budget: StepBudget | None) -> None:
        """A stage was applied to the rows of each part as often as `steps` says."""
        self.stage_passes += max(steps)
        self.rows_computed += sum(n * part.count for n, part in zip(steps, rows.parts, strict=True))
        if budget is not None:
            budget.charge(rows, layers, steps)

    def _advance_loop(self, stage: int, waiting: list[WaitingRows], budget: StepBudget | None) -> None:
        loop = self.loop_of_stage.get(stage)
        if loop is None:
            loop = self.loop_of_stage[stage] = LoopRows(self.engine, stage)
        if waiting:
            self._admit(loop, waiting)
        rows = loop.rows
        assert rows is not None
        steps_left = steps_after_exit = math.inf
        interrupt = NO_INTERRUPT
        if budget is not None:
            steps_left, steps_after_exit, interrupt = (
                budget.steps_allowed(rows, len(loop.layers)),
                budget.steps_after_exit(),
                budget.interrupt,
            )
        exited = None
        while exited is None:
            exited = self._advance_rows(loop, rows, steps_left, interrupt, steps_after_exit, budget)
            steps_left -= loop.steps_taken
            if loop.failures:
                self._collect_failures(loop)
                break
            if steps_left < 1 or interrupt:
                break
        if not len(loop):
            del self.loop_of_stage[stage]
        if exited is not None:
            self._exit(stage, exited, loop.steps_since_exit)

    def _advance_rows(
        self, loop: LoopRows, rows: Rows, max_steps: float, interrupt: Interrupt, steps_after_exit: float, budget: StepBudget | None
    ) -> ExitedRows | None:
        """`LoopRows.advance`, with the steps of each row counted."""
        before = [part.loop_step for part in rows.parts]
        exited = loop.advance(max_steps, interrupt, steps_after_exit)
        self._count_passes(rows, [part.loop_step - k for part, k in zip(rows.parts, before, strict=True)], len(loop.layers), budget)
        return exited

    def _collect_failures(self, loop: LoopRows) -> None:
        for parts, error in loop.failures:
            requests = dict.fromkeys(part.chunk.request for part in parts)
            if None in requests:  # the caller is Engine.run, not a scheduler
                raise error
            self.failures += [(request, error) for request in requests]
        loop.failures.clear()

    def _admit(self, loop: LoopRows, waiting: list[WaitingRows]) -> None:
        rows = concat_rows(w.rows for w in waiting)
        start, group = None, loop.group.index
        for chunk in (chunk for w in waiting for chunk in w.chunks):
            chunk.n_in_loop = chunk.part.count
        if waiting[0].chunks[0].start is not None:
            start = torch.cat([chunk.start[group] for w in waiting for chunk in w.chunks])  # type: ignore[index]
        loop.admit(rows, _concat([w.x for w in waiting]), start)

    def _exit(self, stage: int, exited: ExitedRows, passes_ago: int) -> None:
        """Rows have exited a loop. The tokens of a sequence continue together, when the last of them has exited."""
        group: int = self.engine.stages[stage].index  # type: ignore[assignment]
        rows, parts = exited.rows, exited.rows.parts
        loop_steps = max(part.loop_step for part in parts)
        if all(part.chunk.part is part for part in parts):  # no part is a subset: all tokens of each chunk have exited together
            chunks: list[Chunk] = [part.chunk for part in parts]
            for chunk, part in zip(chunks, parts, strict=True):
                chunk.steps_by_group[group] = [part.loop_step] * part.count
                chunk.n_in_loop = 0
            self._arrive(stage + 1, WaitingRows(chunks, rows, exited.x, loop_steps=loop_steps), passes_ago)
            return
        complete, outputs, first = [], [], 0
        for part in parts:
            chunk, row_range = part.chunk, slice(first, first + part.count)
            first = row_range.stop
            token_indices = rows.positions[row_range] - chunk.positions_and_tokens[0, 0]
            if chunk.loop_outputs is None:
                chunk.loop_outputs = exited.x.new_empty(chunk.part.count, exited.x.shape[1])
            chunk.loop_outputs[token_indices] = exited.x[row_range]
            for i in token_indices.tolist():
                chunk.steps_by_group[group][i] = part.loop_step
            chunk.n_in_loop -= part.count
            if not chunk.n_in_loop:
                complete.append(chunk)
                outputs.append(chunk.loop_outputs)
                chunk.loop_outputs = None
        if not complete:
            return
        self._arrive(stage + 1, WaitingRows(complete, self._rows_of(complete), torch.cat(outputs), loop_steps=loop_steps), passes_ago)

    def _rows_of(self, chunks: list[Chunk]) -> Rows:
        """All rows of several chunks."""
        return Rows(
            [chunk.part for chunk in chunks], torch.cat([chunk.positions_and_tokens for chunk in chunks], dim=1), self.engine.kernels
        )

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
        for stage, loop in list(self.loop_of_stage.items()):
            if loop.rows is not None:
                loop.drop([part.chunk is chunk for part in loop.rows.parts for _ in range(part.count)])
            if not len(loop):
                del self.loop_of_stage[stage]
        self._remove(chunk)

    def _remove(self, chunk: Chunk) -> None:
        self.chunks.discard(chunk)
        chunk.part.chunk = None  # break the reference cycle, which would keep the cache until the next garbage collection

    def _without(self, waiting: WaitingRows, dropped: Chunk) -> WaitingRows:
        kept = [chunk for chunk in waiting.chunks if chunk is not dropped]
        states = dict(zip(waiting.chunks, _split(waiting), strict=True))
        return WaitingRows(
            kept, self._rows_of(kept), torch.cat([states[chunk] for chunk in kept]), waiting.arrived_at_pass, waiting.loop_steps
        )

    def split(self, stage: int) -> "Batch":
        """Move the rows at a stage to a new batch and return it."""
        new = Batch(self.engine)
        if stage in self.loop_of_stage:
            loop = new.loop_of_stage[stage] = self.loop_of_stage.pop(stage)
            assert loop.rows is not None
            new.chunks.update(part.chunk for part in loop.rows.parts)
        if stage in self.waiting:
            new.waiting[stage] = self.waiting.pop(stage)
            new.chunks.update(chunk for w in new.waiting[stage] for chunk in w.chunks)
        self.chunks -= new.chunks
        return new

    def request_groups(self) -> Iterator[RequestGroup]:
        """The request groups of the requests in this batch."""
        return (chunk.request.request_group for chunk in self.chunks if chunk.request is not None)


def _concat(states: list[Tensor]) -> Tensor:
    return states[0] if len(states) == 1 else torch.cat(states)


def _split(waiting: WaitingRows) -> Iterable[Tensor]:
    """The states of each chunk, (n, C)."""
    if len(waiting.chunks) == 1:
        return (waiting.x,)
    return torch.split(waiting.x, [chunk.part.count for chunk in waiting.chunks])  # type: ignore[no-untyped-call, no-any-return]
