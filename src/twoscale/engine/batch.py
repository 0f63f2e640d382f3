"""A batch: tokens of several sequences on their way through the stages of the network (runs of plain layers, and loop groups).

One call computes all rows that are at one stage, whatever their sequence and loop step; the caller chooses the stage. The tokens of one
sequence enter a stage together: a chunk of a prompt continues when the last of its tokens has exited the loop.

Shapes: N rows, n tokens of one sequence, C width, G group.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twoscale.engine.cache import Cache
from twoscale.engine.engine import Engine
from twoscale.engine.loop import ExitedRows, Loop
from twoscale.engine.request import Client, Request
from twoscale.engine.rows import Part, Rows, concat_rows, make_part
from twoscale.model.group import LoopGroup

Entry = tuple[int, Cache, Sequence[int], Request | None]  # index in the caller's batch, cache, next tokens, and the request if there is one


@dataclass(eq=False, slots=True)
class InFlight:
    """The tokens of one sequence in a batch: one token in decode, a chunk of the prompt in prefill."""

    part: Part
    ids: Tensor
    """int64 (2, n): positions and tokens."""
    request: Request | None
    steps: list[list[int]]
    """[group][token]: loop steps taken."""
    x: Tensor
    """(n, C): while some of the tokens are in a loop, the outputs of the others; at the end the states before the final norm."""
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
    """Rows that wait for a stage, stacked in the order of `in_flight`."""

    in_flight: list[InFlight]
    rows: Rows
    x: Tensor
    """States (N, C)."""
    arrived_at_call: int = 0
    """Number of calls of the batch when they arrived."""
    loop_calls: int = 0
    """Calls that they took in the loop before; 0 after plain layers."""


class Batch:
    """A batch in flight. `len` is its number of sequences."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.in_flight: set[InFlight] = set()
        self.waiting: dict[int, list[WaitingRows]] = {}
        self.loops: dict[int, Loop] = {}
        self.calls = 0
        self.rows_computed = 0
        """Rows of all calls together."""
        self.failures: list[tuple[Request, Exception]] = []
        """Requests whose exit rule or cache allocation has raised; the caller must drop them."""
        self._done: list[InFlight] = []

    def __len__(self) -> int:
        return len(self.in_flight)

    # -- entering ------------------------------------------------------------------------------------------------

    def enter(self, entries: Sequence[Entry], start: Sequence[Tensor] | None = None, keep_stage_states: bool = False) -> list[InFlight]:
        """Add the next tokens of several sequences. `start` gives the groups' initial states, one (N, C) each."""
        engine, groups = self.engine, self.engine.config.n_groups
        firsts = [cache.extend(len(new)) for _, cache, new, _ in entries]
        positions = [p for first, entry in zip(firsts, entries, strict=True) for p in range(first, first + len(entry[2]))]
        ids = torch.tensor([positions, [token for entry in entries for token in entry[2]]], dtype=torch.int64, device=engine.device)
        in_flight, at, no_state = [], 0, ids.new_empty(0, 0)
        for first, (batch_index, cache, new, request) in zip(firsts, entries, strict=True):
            n = len(new)
            row_range = slice(at, at + n)
            part = make_part(batch_index, cache, first, n)
            item = InFlight(part, ids[:, row_range], request, [[0] * n for _ in range(groups)], no_state)
            part.in_flight = item
            if start is not None:
                item.start = [states[row_range] for states in start]
            in_flight.append(item)
            at += n
        rows = Rows([item.part for item in in_flight], ids, engine.kernels)
        x = engine.embed(rows)
        if keep_stage_states:
            for item in in_flight:
                item.stage_states = []
        self.in_flight.update(in_flight)
        self._arrive(0, WaitingRows(in_flight, rows, x))
        return in_flight

    def _arrive(self, stage: int, waiting: WaitingRows) -> None:
        """Rows have reached a stage, or the end of the network."""
        if waiting.in_flight[0].stage_states is not None:
            for item, x in zip(waiting.in_flight, _split(waiting), strict=True):
                assert item.stage_states is not None
                item.stage_states.append(x)
        if stage < len(self.engine.stages):
            waiting.arrived_at_call = self.calls
            self.waiting.setdefault(stage, []).append(waiting)
            return
        for item, x in zip(waiting.in_flight, _split(waiting), strict=True):
            item.x = x
            self._remove(item)
            self._done.append(item)

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

    def advance(self, stage: int, keep_going: Callable[[Rows, int], bool] | None = None) -> list[InFlight]:
        """Compute one stage for the rows that are there; returns the tokens that have reached the end of the network.

        `keep_going(rows, n_layers)` is called after each call. Loop steps are repeated until rows exit or `keep_going` returns False.
        """
        waiting = self.waiting.pop(stage, [])
        if isinstance(self.engine.stages[stage], LoopGroup):
            self._advance_loop(stage, waiting, keep_going)
        else:
            rows = concat_rows(w.rows for w in waiting)
            x = self.engine.run_plain_stage(stage, _concat([w.x for w in waiting]), rows)
            self._count_call(rows)
            if keep_going is not None:
                keep_going(rows, len(self.engine.blocks[stage]))
            self._arrive(stage + 1, WaitingRows([f for w in waiting for f in w.in_flight], rows, x))
        done, self._done = self._done, []
        return done

    def _count_call(self, rows: Rows) -> None:
        self.calls += 1
        self.rows_computed += rows.n

    def _advance_loop(self, stage: int, waiting: list[WaitingRows], keep_going: Callable[[Rows, int], bool] | None) -> None:
        loop = self.loops.get(stage)
        if loop is None:
            loop = self.loops[stage] = Loop(self.engine, stage)
        if waiting:
            self._admit(loop, waiting)
        exited = None
        while exited is None:
            rows, exited = loop.rows, loop.advance()
            assert rows is not None
            self._count_call(rows)
            if loop.rules.failures:
                self._collect_failures(loop)
                break
            if keep_going is not None and not keep_going(rows, len(loop.layers)):
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
        for item in (f for w in waiting for f in w.in_flight):
            item.n_in_loop = item.part.count
        if waiting[0].in_flight[0].start is not None:
            start = torch.cat([item.start[group] for w in waiting for item in w.in_flight])  # type: ignore[index]
        loop.admit(rows, _concat([w.x for w in waiting]), start)

    def _exit(self, stage: int, exited: ExitedRows) -> None:
        """Rows have exited a loop. The tokens of a sequence continue together, when the last of them has exited."""
        group: int = self.engine.stages[stage].index  # type: ignore[assignment]
        rows, parts = exited.rows, exited.rows.parts
        calls = max(part.k for part in parts)
        if all(part.in_flight.part is part for part in parts):  # all tokens of each sequence have exited together
            in_flight: list[InFlight] = [part.in_flight for part in parts]
            for item, part in zip(in_flight, parts, strict=True):
                item.steps[group] = [part.k] * part.count
                item.n_in_loop = 0
            self._arrive(stage + 1, WaitingRows(in_flight, rows, exited.x, loop_calls=calls))
            return
        complete, first = [], 0
        for part in parts:
            item, row_range = part.in_flight, slice(first, first + part.count)
            first = row_range.stop
            token_indices = rows.positions[row_range] - item.ids[0, 0]
            if len(item.x) != item.part.count:
                item.x = exited.x.new_empty(item.part.count, exited.x.shape[1])
            item.x[token_indices] = exited.x[row_range]
            for i in token_indices.tolist():
                item.steps[group][i] = part.k
            item.n_in_loop -= part.count
            if not item.n_in_loop:
                complete.append(item)
        if not complete:
            return
        ids, x = torch.cat([item.ids for item in complete], dim=1), torch.cat([item.x for item in complete])
        for item in complete:
            item.x = x[:0]
        self._arrive(stage + 1, WaitingRows(complete, Rows([f.part for f in complete], ids, self.engine.kernels), x, loop_calls=calls))

    # -- removing rows -------------------------------------------------------------------------------------------

    def drop(self, request: Request) -> None:
        """Remove the rows of a request, also from inside a loop."""
        item = next((f for f in self.in_flight if f.request is request), None)
        if item is None:
            return
        for stage, waiting in list(self.waiting.items()):
            self.waiting[stage] = [w if item not in w.in_flight else self._without(w, item) for w in waiting if w.in_flight != [item]]
            if not self.waiting[stage]:
                del self.waiting[stage]
        for stage, loop in list(self.loops.items()):
            if loop.rows is not None:
                loop.drop([part.in_flight is item for part in loop.rows.parts for _ in range(part.count)])
            if not len(loop):
                del self.loops[stage]
        self._remove(item)

    def _remove(self, item: InFlight) -> None:
        self.in_flight.discard(item)
        item.part.in_flight = None  # break the reference cycle, which would keep the cache until the next garbage collection

    def _without(self, waiting: WaitingRows, item: InFlight) -> WaitingRows:
        kept = [f for f in waiting.in_flight if f is not item]
        states = dict(zip(waiting.in_flight, _split(waiting), strict=True))
        rows = Rows([f.part for f in kept], torch.cat([f.ids for f in kept], dim=1), self.engine.kernels)
        return WaitingRows(kept, rows, torch.cat([states[f] for f in kept]), waiting.arrived_at_call, waiting.loop_calls)

    def split(self, stage: int) -> "Batch":
        """Move the rows at a stage to a new batch and return it."""
        new = Batch(self.engine)
        if stage in self.loops:
            loop = new.loops[stage] = self.loops.pop(stage)
            assert loop.rows is not None
            new.in_flight.update(part.in_flight for part in loop.rows.parts)
        if stage in self.waiting:
            new.waiting[stage] = self.waiting.pop(stage)
            new.in_flight.update(f for w in new.waiting[stage] for f in w.in_flight)
        self.in_flight -= new.in_flight
        return new

    def clients(self) -> Iterator[Client]:
        """The clients of the requests in this batch."""
        return (item.request.client for item in self.in_flight if item.request is not None)


def _concat(states: list[Tensor]) -> Tensor:
    return states[0] if len(states) == 1 else torch.cat(states)


def _split(waiting: WaitingRows) -> Iterable[Tensor]:
    """The states of each `InFlight`, (n, C)."""
    if len(waiting.in_flight) == 1:
        return (waiting.x,)
    return torch.split(waiting.x, [item.part.count for item in waiting.in_flight])  # type: ignore[no-untyped-call, no-any-return]
