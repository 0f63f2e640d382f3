"""Depth-aware continuous batching: requests share the engine's calls, and a row that has left a loop costs nothing while others go on.

Two policies over the same rows:

    lockstep   all rows of a round are at the same stage; requests join and leave at token boundaries
    depth      every call takes the rows that wait at one stage, whatever their request and their depth in the loop

Which is quicker depends on what a call costs with few and with many rows, so it is to be measured. What a request gets never
depends on who else is served: rows see their own sequence alone, and the kernels sum in one order.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, Protocol

import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.engine import Engine, Loop
from twoscale.engine.cache import bytes_per_token
from twoscale.engine.quick import quicken
from twoscale.engine.rows import Part, Rows, part_of
from twoscale.model import LoopedGPT
from twoscale.model.group import LoopGroup
from twoscale.serve.job import Job, Settings

LOG = logging.getLogger("twoscale.serve")
Policy = Literal["lockstep", "depth"]
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

    def step(self, jobs: Sequence[Job], counters: Counters) -> list[tuple[Job, Tensor, Tensor]]:
        """Do some work for these jobs; returns those whose tokens have come through: (job, states (n, C), steps (n, G))."""

    def forget(self, job: Job) -> None:
        """A job is taken away, wherever it is."""


class Lockstep:
    """One round: the next token, or a piece of the prompt, of every job through the whole network."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def step(self, jobs: Sequence[Job], counters: Counters) -> list[tuple[Job, Tensor, Tensor]]:
        feeds, room = [], CHUNK
        for job in jobs:
            if job.reading and room <= 0:
                continue  # its piece comes in a later round
            new = job.next_tokens(1 if self.engine.token_by_token else CHUNK)
            room -= len(new) if job.reading else 0
            assert job.cache is not None
            feeds.append((job, (ALONE, job.cache, new)))
        before = sum(self.engine.work)
        with counters.timed():
            x, steps = self.engine.run([feed for _, feed in feeds])
        counters.calls += int(steps.max(dim=0).values.sum()) if steps.numel() else 1
        counters.rows += sum(self.engine.work) - before
        ends = list(accumulate(len(feed[2]) for _, feed in feeds))
        firsts = [0, *ends[:-1]]
        return [(job, x[a:b], steps[a:b]) for (job, _), a, b in zip(feeds, firsts, ends, strict=True)]

    def forget(self, job: Job) -> None:
        """Between rounds nothing is held for anybody."""


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

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.flights: dict[Job, Flight] = {}
        self.loops = {i: Loop(engine, i) for i, stage in enumerate(engine.model.stages) if isinstance(stage, LoopGroup)}
        self.places: dict[int, tuple[Flight, int]] = {}
        self.number = 0

    @torch.inference_mode()
    def step(self, jobs: Sequence[Job], counters: Counters) -> list[tuple[Job, Tensor, Tensor]]:
        self._take_off(jobs)
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


class Scheduler:
    """Takes jobs from any thread; `step` does the work, in one thread."""

    def __init__(self, model: LoopedGPT, policy: Policy = "lockstep", *, rows: int = 32, cache_bytes: int = 1 << 30) -> None:
        if policy not in ("lockstep", "depth"):
            raise UserError(f"policy = {policy!r}: choose lockstep or depth")
        self.model, self.policy, self.rows, self.cache_bytes = model, policy, rows, cache_bytes
        self.counters = Counters(steps=[0] * model.config.n_groups)
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.held = 0
        """Bytes of keys and values that the running jobs may come to hold."""
        self._decoder = quicken(model)  # one copy for all engines: the weights as they are now
        self._ways: dict[Settings, tuple[Engine, Way]] = {}
        self._lock = threading.Lock()

    def submit(self, job: Job) -> None:
        """Put a job at the end of the queue; UserError where it can never be served."""
        self.check(job)
        with self._lock:
            self.waiting.append(job)

    def abandon(self) -> list[Job]:
        """All jobs, which nobody will serve any more."""
        with self._lock:
            jobs = [*self.running, *self.waiting]
            self.running, self.waiting = [], deque()
        return jobs

    def check(self, job: Job) -> None:
        """UserError where a job can never be served."""
        config = self.model.config
        if not job.prompt or job.most < 1 or job.capacity > config.block_size:
            raise UserError(
                f"a prompt of {len(job.prompt)} tokens and {job.most} new ones do not fit the context of {config.block_size} tokens"
            )
        if self._bytes(job) > self.cache_bytes:
            raise UserError("this request needs more memory for keys and values than there is: ask for fewer tokens or loops")

    def _bytes(self, job: Job) -> int:
        return job.capacity * bytes_per_token(self.model.config, job.settings.loops, job.settings.kv)

    def step(self) -> bool:
        """Some work for those whose turn it is; False where there is none."""
        self._drop()
        self._admit()
        if not self.running:
            return False
        # Jobs with other settings cannot share a call: each kind has its turn, so that none starves.
        settings = self.running[0].settings
        kind = [job for job in self.running if job.settings == settings]
        self.running = [job for job in self.running if job.settings != settings] + kind
        try:
            engine, way = self._way(settings)
            before = list(engine.work)
            came = way.step(kind, self.counters)
            for g, (now, then) in enumerate(zip(engine.work, before, strict=True)):
                self.counters.steps[g] += now - then
            self._extend(engine, came)
        except Exception:  # whatever it was, it came of these settings or these requests: the others go on
            LOG.exception("a round has failed")
            for job in kind:
                if job in self.running:
                    self._fail(job)
        return True

    def _fail(self, job: Job) -> None:
        job.error, job.finish = "the server has failed inside", "error"
        self._tell(job)

    def _extend(self, engine: Engine, came: Iterable[tuple[Job, Tensor, Tensor]]) -> None:
        """Tokens for the jobs whose prompt is through."""
        ready = []
        for job, x, steps in came:
            reading = job.reading
            job.fed += len(x)
            self.counters.passed += len(x)
            if reading:
                job.prompt_steps += [tuple(s) for s in steps.tolist()]
            if not job.reading:
                ready.append((job, x[-1], tuple(steps[-1].tolist())))
        if not ready:
            return
        with torch.inference_mode():
            with self.counters.timed():
                logits = engine.model.head(torch.stack([x for _, x, _ in ready])).float()
            highest, likeliest = (found.tolist() for found in logits.max(dim=1))
            lowest = logits.amin(dim=1).tolist()
        for i, (job, _, taken) in enumerate(ready):
            job.take(logits[i], likeliest[i], math.isfinite(highest[i]) and math.isfinite(lowest[i]), taken)
            self.counters.tokens += not job.error
            self._tell(job)

    def _tell(self, job: Job) -> None:
        if job.finish:
            job.ended = time.perf_counter()
            self._remove(job)
            self.counters.finished += 1
        if job.told is not None:
            job.told(job)

    def _remove(self, job: Job) -> None:
        self.running.remove(job)
        self.held -= self._bytes(job)
        job.cache = None
        if job.settings in self._ways:
            self._ways[job.settings][1].forget(job)
        if not any(other.settings == job.settings for other in self.running):
            self._ways.pop(job.settings, None)

    def _drop(self) -> None:
        """Those that nobody waits for any more leave their place at once."""
        with self._lock:
            gone = [job for job in self.waiting if job.cancelled]
            self.waiting = deque(job for job in self.waiting if not job.cancelled)
        for job in gone:
            job.finish = "cancelled"
            if job.told is not None:
                job.told(job)
        for job in [job for job in self.running if job.cancelled]:
            job.finish = "cancelled"
            self._tell(job)

    def _admit(self) -> None:
        """First come, first served: a job that does not fit yet is not overtaken."""
        came = []
        with self._lock:
            while self.waiting and len(self.running) < self.rows and self.held + self._bytes(self.waiting[0]) <= self.cache_bytes:
                job = self.waiting.popleft()
                self.held += self._bytes(job)
                self.running.append(job)
                came.append(job)
        for job in came:
            try:
                job.cache = self._way(job.settings)[0].open(job.capacity)
            except Exception:
                LOG.exception("a request could not begin")
                self._fail(job)

    def _way(self, settings: Settings) -> tuple[Engine, Way]:
        if settings not in self._ways:
            engine = Engine(self.model, loops=settings.loops, exit=settings.exit, kv=settings.kv, seed=settings.seed, decoder=self._decoder)
            self._ways[settings] = engine, Lockstep(engine) if self.policy == "lockstep" else Depth(engine)
        return self._ways[settings]
