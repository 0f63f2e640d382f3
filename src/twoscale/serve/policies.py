"""The two policies at work: which rows share a call of the engine."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from twoscale.engine import Engine, Loop
from twoscale.engine.cache import Cache
from twoscale.engine.loop import Call
from twoscale.engine.rows import Part, Rows, part_of
from twoscale.model.group import LoopGroup
from twoscale.serve.fair import charge, select
from twoscale.serve.job import Job, Share

ALONE = 0  # the number of every sequence: rules that draw by it draw as if each were served alone
CHUNK = 64  # tokens of prompts in one round, so that those who write do not wait long for those who read


@dataclass
class Counters:
    """What has been done so far."""

    calls: int = 0
    """Steps of loops that rows took together (by depth: and passes of plain stages)."""
    rows: int = 0
    """Rows in all these calls."""
    tokens: int = 0
    """New tokens."""
    passed: int = 0
    """Tokens that went through the network, those of prompts included."""
    engine_seconds: float = 0.0
    finished: int = 0
    steps: list[int] = field(default_factory=list)
    """Applications of each group's map to one token."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """What happens in here is the engine's time."""
        started = time.perf_counter()
        yield
        self.engine_seconds += time.perf_counter() - started


class Way(Protocol):
    """A policy at work on the jobs that share an engine."""

    def step(self, jobs: Sequence[Job], counters: Counters, go_on: Callable[[], bool]) -> list[tuple[Job, Tensor, Tensor]]:
        """Do some work for these jobs, as long as `go_on` says so between two calls of the engine.

        Returns those whose tokens have come through: (job, states (n, C), steps (n, G)).
        """

    def forget(self, job: Job) -> None:
        """A job is taken away, wherever it is."""

    def ahead_of(self, work: float) -> bool:
        """Whether all requests whose rows are on their way have had more than so much."""


class Lockstep:
    """One round: the next token, or a piece of the prompt, of every job through the whole network. It may be left between two calls."""

    def __init__(self, engine: Engine, rows: int) -> None:
        self.engine, self.rows = engine, rows
        self.calls: Generator[Call, None, tuple[Tensor, Tensor]] | None = None
        self.feeds: list[tuple[Job, tuple[int, Cache, list[int]]]] = []
        self.shares: dict[Cache, Share] = {}
        self.before = 0

    def _begin(self, jobs: Sequence[Job]) -> Generator[Call, None, tuple[Tensor, Tensor]]:
        self.feeds, room = [], CHUNK
        for job in select(jobs, self.rows):
            if job.reading and room <= 0:
                continue  # its piece comes in a later round
            new = job.next_tokens(1 if self.engine.token_by_token else CHUNK)
            room -= len(new) if job.reading else 0
            assert job.cache is not None
            self.feeds.append((job, (ALONE, job.cache, new)))
        self.shares = {cache: job.share for job, (_, cache, _) in self.feeds}
        self.before = sum(self.engine.work)
        return self.engine.calls([feed for _, feed in self.feeds])

    @torch.inference_mode()
    def step(self, jobs: Sequence[Job], counters: Counters, go_on: Callable[[], bool]) -> list[tuple[Job, Tensor, Tensor]]:
        if self.calls is None:
            self.calls = self._begin(jobs)
        try:
            with counters.timed():
                while True:
                    rows, layers = next(self.calls)
                    charge(rows.parts, layers, self.shares)
                    if not go_on():
                        return []
        except StopIteration as done:
            x, steps = done.value
        self.calls = None
        counters.calls += int(steps.max(dim=0).values.sum()) if steps.numel() else 1
        counters.rows += sum(self.engine.work) - self.before
        ends = list(accumulate(len(feed[2]) for _, feed in self.feeds))
        firsts = [0, *ends[:-1]]
        found = zip(self.feeds, firsts, ends, strict=True)
        return [(job, x[a:b], steps[a:b]) for (job, _), a, b in found if not job.finish]

    def forget(self, job: Job) -> None:
        """Its rows finish the round, and nothing comes of them."""

    def ahead_of(self, work: float) -> bool:
        return all(share.work > work for share in self.shares.values())


@dataclass(eq=False)
class Flight:
    """Tokens of one job on their way through the stages; they enter a stage together."""

    job: Job
    part: Part
    who: Tensor
    """int64 (3, n): positions, tokens, and where in `x` each belongs."""
    x: Tensor
    """(n, C)"""
    steps: Tensor
    """int64 (n, G)"""
    stage: int = 0
    inside: int = 0
    """Rows that are in the loop of this stage."""


class Depth:
    """Every call takes the rows of one stage: the one where most of them are, the latest stage among equals."""

    def __init__(self, engine: Engine, rows: int) -> None:
        self.engine, self.rows = engine, rows
        self.flights: dict[Job, Flight] = {}
        self.loops = {i: Loop(engine, i) for i, stage in enumerate(engine.model.stages) if isinstance(stage, LoopGroup)}
        self.places: dict[int, tuple[Flight, int]] = {}
        self.number = 0

    @torch.inference_mode()
    def step(self, jobs: Sequence[Job], counters: Counters, go_on: Callable[[], bool]) -> list[tuple[Job, Tensor, Tensor]]:
        self._take_off(select(jobs, self.rows))
        if not self.flights:
            return []
        waiting: dict[int, list[Flight]] = {}
        for flight in self.flights.values():
            if not flight.inside:
                waiting.setdefault(flight.stage, []).append(flight)
        sizes = {i: sum(len(f.x) for f in waiting.get(i, ())) + len(self.loops.get(i, ())) for i in range(len(self.engine.model.stages))}
        stage = max(sizes, key=lambda i: (sizes[i], i))
        counters.calls += 1
        counters.rows += sizes[stage]
        if stage in self.loops:
            self._turn(stage, waiting.get(stage, []), counters)
        else:
            self._pass(stage, waiting[stage], counters)
        done = [f for f in self.flights.values() if f.stage == len(self.engine.model.stages)]
        for flight in done:
            del self.flights[flight.job]
        return [(f.job, f.x, f.steps) for f in done]

    def _take_off(self, jobs: Sequence[Job]) -> None:
        """Jobs whose last tokens have landed go again."""
        room = CHUNK - sum(len(f.x) for f in self.flights.values() if len(f.x) > 1)
        for job in jobs:
            if job in self.flights or (job.reading and room <= 0):
                continue
            new = job.next_tokens(1 if self.engine.token_by_token else CHUNK)
            room -= len(new) if job.reading else 0
            cache, device = job.cache, self.engine.device
            assert cache is not None
            part = part_of(ALONE, cache, cache.length, len(new))
            cache.length += len(new)
            who = torch.tensor([range(part.end - part.count, part.end), new, range(len(new))], device=device)
            x = self.engine.model.embed(who[1], who[0])
            steps = torch.empty(len(new), self.engine.config.n_groups, dtype=torch.int64, device=device)
            self.flights[job] = Flight(job, part, who, x, steps)

    def _charge(self, rows: Rows, stage: int) -> None:
        layers = self.engine.first_layers[stage + 1] - self.engine.first_layers[stage]
        charge(rows.parts, layers, {flight.part.cache: job.share for job, flight in self.flights.items()})

    def _rows(self, flights: Sequence[Flight], places: Sequence[int] | None = None) -> Rows:
        who = torch.cat([f.who for f in flights], dim=1)
        if places is not None:
            who = torch.stack((who[0], who[1], torch.tensor(places, device=who.device)))
        for flight in flights:
            flight.part.k = 0
        return Rows([f.part for f in flights], who, self.engine.library)

    def _pass(self, stage: int, flights: Sequence[Flight], counters: Counters) -> None:
        """A plain stage."""
        rows, x = self._rows(flights), torch.cat([f.x for f in flights])
        with counters.timed():
            x = self.engine.plain(stage, x, self.engine.model.rope(rows.positions), rows)
        first = 0
        self._charge(rows, stage)
        for flight in flights:
            flight.x, first = x[first : first + len(flight.x)], first + len(flight.x)
            flight.stage = stage + 1

    def _turn(self, stage: int, flights: Sequence[Flight], counters: Counters) -> None:
        """One step of a loop; those that wait before it join."""
        loop = self.loops[stage]
        if flights:
            numbers = range(self.number, self.number + sum(len(f.x) for f in flights))
            self.number = numbers.stop
            at = iter(numbers)
            for flight in flights:
                flight.inside = len(flight.x)
                self.places.update({next(at): (flight, i) for i in range(len(flight.x))})
            rows, x = self._rows(flights, list(numbers)), torch.cat([f.x for f in flights])
            with counters.timed():
                loop.admit(rows, x)
            for flight in flights:
                flight.x = torch.empty_like(flight.x)
        self._charge(loop.rows, stage)
        with counters.timed():
            left = loop.advance()
        if left is None:
            return
        group = loop.group.index
        for i, (place, k) in enumerate(zip(left.places.tolist(), left.steps.tolist(), strict=True)):
            flight, row = self.places.pop(place)
            flight.x[row], flight.steps[row, group] = left.x[i], k
            flight.inside -= 1
            if not flight.inside:
                flight.stage = stage + 1

    def forget(self, job: Job) -> None:
        """Its rows leave at once, from inside a loop too."""
        if self.flights.pop(job, None) is None:
            return
        for loop in self.loops.values():
            loop.keep([self.places[place][0].job is not job for place in loop.rows.places.tolist()])
        self.places = {place: held for place, held in self.places.items() if held[0].job is not job}

    def ahead_of(self, work: float) -> bool:
        return True  # there is a choice after every call
