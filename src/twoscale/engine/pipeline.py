"""Tokens on their way through the stages of the network. One call takes all rows that are at one stage, whatever their request and step.

Tokens of a sequence enter a stage together: a chunk of a prompt goes on when the last of its tokens has left the loop. Which stage the next
call takes is the caller's choice.

Shapes: N rows, n tokens of one sequence, C width, G group.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twoscale.engine.cache import Cache
from twoscale.engine.engine import Engine
from twoscale.engine.loop import Finished, Loop
from twoscale.engine.request import Request, Share
from twoscale.engine.rows import Part, Rows, joined, part_of
from twoscale.model.group import LoopGroup

Entry = tuple[int, Cache, Sequence[int], Request | None]  # a sequence's number, its cache, its next tokens, and whose they are


@dataclass(eq=False, slots=True)
class InFlight:
    """Tokens of one sequence that go through the stages together."""

    part: Part
    ids: Tensor
    """int64 (2, n): positions and tokens."""
    request: Request | None
    steps: list[list[int]]
    """[group][token]: applications of the group's map."""
    x: Tensor
    """(n, C): the state before the stage that it waits for; in the end, before the closing norm."""
    start: list[Tensor] | None = None
    """Initial states, one (n, C) for each group; the model's own if None."""
    stages: list[Tensor] | None = None
    """The embedding and the state after each stage, if they are to be kept."""
    inside: int = 0
    """Tokens that are inside of the loop of this stage."""

    def steps_of_tokens(self) -> list[tuple[int, ...]]:
        """For each token, its steps in each group."""
        return list(zip(*self.steps, strict=True)) if self.steps else [()] * self.part.count


@dataclass(eq=False, slots=True)
class Waiting:
    """Rows that wait before a stage, stacked in the order of their flights."""

    flights: list[InFlight]
    rows: Rows
    x: Tensor
    """(N, C)"""
    arrived: int = 0
    """Calls of the pipeline until they came."""
    steps: int = 0
    """Calls that they took in the loop before."""


class Pipeline:
    """Rows in flight. `len` is the number of sequences that have tokens in it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.flights: set[InFlight] = set()
        self.waiting: dict[int, list[Waiting]] = {}
        self.loops: dict[int, Loop] = {}
        self.calls = 0
        self.rows_called = 0
        """Rows in all these calls."""
        self.failures: list[tuple[Request, Exception]] = []
        """Requests whose exit rule has raised, until the caller takes them out."""
        self._done: list[InFlight] = []

    def __len__(self) -> int:
        return len(self.flights)

    # -- entering ------------------------------------------------------------------------------------------------

    def enter(self, entries: Sequence[Entry], start: Sequence[Tensor] | None = None, keep_stages: bool = False) -> list[InFlight]:
        """The next tokens of several sequences wait before the first stage; `start` gives the groups' initial states, one (N, C) each."""
        engine, groups = self.engine, self.engine.config.n_groups
        firsts = [cache.extend(len(new)) for _, cache, new, _ in entries]
        positions = [p for first, entry in zip(firsts, entries, strict=True) for p in range(first, first + len(entry[2]))]
        ids = torch.tensor([positions, [token for entry in entries for token in entry[2]]], dtype=torch.int64, device=engine.device)
        flights, at, nothing = [], 0, ids.new_empty(0, 0)
        for first, (sequence, cache, new, request) in zip(firsts, entries, strict=True):
            n = len(new)
            own = slice(at, at + n)
            part = part_of(sequence, cache, first, n)
            flight = InFlight(part, ids[:, own], request, [[0] * n for _ in range(groups)], nothing)
            part.owner = flight
            if start is not None:
                flight.start = [states[own] for states in start]
            flights.append(flight)
            at += n
        rows = Rows([flight.part for flight in flights], ids, engine.kernels)
        x = engine.embed(rows)
        if keep_stages:
            for flight in flights:
                flight.stages = []
        self.flights.update(flights)
        self._arrive(0, Waiting(flights, rows, x))
        return flights

    def _arrive(self, stage: int, waiting: Waiting) -> None:
        """Rows have reached a stage, or the end."""
        if waiting.flights[0].stages is not None:
            for flight, x in zip(waiting.flights, _split(waiting), strict=True):
                assert flight.stages is not None
                flight.stages.append(x)
        if stage < len(self.engine.stages):
            waiting.arrived = self.calls
            self.waiting.setdefault(stage, []).append(waiting)
            return
        for flight, x in zip(waiting.flights, _split(waiting), strict=True):
            flight.x = x
            self._forget(flight)
            self._done.append(flight)

    # -- choosing ------------------------------------------------------------------------------------------------

    def occupancy(self) -> dict[int, int]:
        """Rows at each stage that has any, those inside of its loop included."""
        rows = {stage: len(loop) for stage, loop in self.loops.items()}
        for stage, waiting in self.waiting.items():
            rows[stage] = rows.get(stage, 0) + sum(w.rows.n for w in waiting)
        return rows

    @property
    def lowest(self) -> int:
        """The first stage that has rows."""
        return min((*self.loops, *self.waiting))

    # -- calls ---------------------------------------------------------------------------------------------------

    def advance(self, stage: int, go_on: Callable[[Rows, int], bool] | None = None) -> list[InFlight]:
        """Call the engine on the rows of one stage; returns the flights that have come to the end.

        `go_on(rows, layers)` is called after each call with what it took. A loop is applied until rows leave it, or as long as `go_on`
        returns True; without it, until rows leave.
        """
        waiting = self.waiting.pop(stage, [])
        if isinstance(self.engine.stages[stage], LoopGroup):
            self._advance_loop(stage, waiting, go_on)
        else:
            rows = joined(w.rows for w in waiting)
            x = self.engine.plain(stage, _stack([w.x for w in waiting]), rows)
            self._called(rows)
            if go_on is not None:
                go_on(rows, len(self.engine.blocks[stage]))
            self._arrive(stage + 1, Waiting([f for w in waiting for f in w.flights], rows, x))
        done, self._done = self._done, []
        return done

    def _called(self, rows: Rows) -> None:
        self.calls += 1
        self.rows_called += rows.n

    def _advance_loop(self, stage: int, waiting: list[Waiting], go_on: Callable[[Rows, int], bool] | None) -> None:
        loop = self.loops.get(stage)
        if loop is None:
            loop = self.loops[stage] = Loop(self.engine, stage)
        if waiting:
            self._admit(loop, waiting)
        finished = None
        while finished is None:
            rows, finished = loop.rows, loop.advance()
            assert rows is not None
            self._called(rows)
            if loop.rules.failures:
                self._collect_failures(loop)
                break
            if go_on is not None and not go_on(rows, len(loop.layers)):
                break
        if not len(loop):
            del self.loops[stage]
        if finished is not None:
            self._leave(stage, finished)

    def _collect_failures(self, loop: Loop) -> None:
        for rows, error in loop.rules.failures:
            requests = dict.fromkeys(part.owner.request for part in rows.parts)
            if None in requests:  # not a scheduler's
                raise error
            self.failures += [(request, error) for request in requests]
        loop.rules.failures = []

    def _admit(self, loop: Loop, waiting: list[Waiting]) -> None:
        rows = joined(w.rows for w in waiting)
        start, group = None, loop.group.index
        for flight in (f for w in waiting for f in w.flights):
            flight.inside = flight.part.count
        if waiting[0].flights[0].start is not None:
            start = torch.cat([flight.start[group] for w in waiting for flight in w.flights])  # type: ignore[index]
        loop.admit(rows, _stack([w.x for w in waiting]), start)

    def _leave(self, stage: int, finished: Finished) -> None:
        """Rows have left a loop. A sequence's tokens go on together."""
        group: int = self.engine.stages[stage].index  # type: ignore[assignment]
        rows, parts = finished.rows, finished.rows.parts
        calls = max(part.k for part in parts)
        if all(part.owner.part is part for part in parts):  # all tokens of each sequence at once
            flights: list[InFlight] = [part.owner for part in parts]
            for flight, part in zip(flights, parts, strict=True):
                flight.steps[group] = [part.k] * part.count
                flight.inside = 0
            self._arrive(stage + 1, Waiting(flights, rows, finished.x, steps=calls))
            return
        whole, first = [], 0
        for part in parts:
            flight, own = part.owner, slice(first, first + part.count)
            first = own.stop
            places = rows.positions[own] - flight.ids[0, 0]
            if len(flight.x) != flight.part.count:
                flight.x = finished.x.new_empty(flight.part.count, finished.x.shape[1])
            flight.x[places] = finished.x[own]
            for place in places.tolist():
                flight.steps[group][place] = part.k
            flight.inside -= part.count
            if not flight.inside:
                whole.append(flight)
        if not whole:
            return
        ids, x = torch.cat([flight.ids for flight in whole], dim=1), torch.cat([flight.x for flight in whole])
        for flight in whole:
            flight.x = x[:0]
        self._arrive(stage + 1, Waiting(whole, Rows([f.part for f in whole], ids, self.engine.kernels), x, steps=calls))

    # -- taking rows out -----------------------------------------------------------------------------------------

    def drop(self, request: Request) -> None:
        """Remove the rows of a request, from inside of a loop too."""
        flight = next((f for f in self.flights if f.request is request), None)
        if flight is None:
            return
        for stage, waiting in list(self.waiting.items()):
            self.waiting[stage] = [w if flight not in w.flights else self._without(w, flight) for w in waiting if w.flights != [flight]]
            if not self.waiting[stage]:
                del self.waiting[stage]
        for stage, loop in list(self.loops.items()):
            if loop.rows is not None:
                loop.drop([part.owner is flight for part in loop.rows.parts for _ in range(part.count)])
            if not len(loop):
                del self.loops[stage]
        self._forget(flight)

    def _forget(self, flight: InFlight) -> None:
        self.flights.discard(flight)
        flight.part.owner = None  # part and flight refer to each other, and would keep the cache until the garbage collector comes

    def _without(self, waiting: Waiting, flight: InFlight) -> Waiting:
        kept = [f for f in waiting.flights if f is not flight]
        states = dict(zip(waiting.flights, _split(waiting), strict=True))
        rows = Rows([f.part for f in kept], torch.cat([f.ids for f in kept], dim=1), self.engine.kernels)
        return Waiting(kept, rows, torch.cat([states[f] for f in kept]), waiting.arrived, waiting.steps)

    def split(self, stage: int) -> "Pipeline":
        """Take out the rows that are at a stage, as a pipeline of their own."""
        new = Pipeline(self.engine)
        if stage in self.loops:
            loop = new.loops[stage] = self.loops.pop(stage)
            assert loop.rows is not None
            new.flights.update(part.owner for part in loop.rows.parts)
        if stage in self.waiting:
            new.waiting[stage] = self.waiting.pop(stage)
            new.flights.update(f for w in new.waiting[stage] for f in w.flights)
        self.flights -= new.flights
        return new

    def shares(self) -> Iterator[Share]:
        """Of those whose tokens are in flight."""
        return (flight.request.share for flight in self.flights if flight.request is not None)


def _stack(states: list[Tensor]) -> Tensor:
    return states[0] if len(states) == 1 else torch.cat(states)


def _split(waiting: Waiting) -> Iterable[Tensor]:
    """The states of each flight, (n, C)."""
    if len(waiting.flights) == 1:
        return (waiting.x,)
    return torch.split(waiting.x, [flight.part.count for flight in waiting.flights])  # type: ignore[no-untyped-call, no-any-return]
