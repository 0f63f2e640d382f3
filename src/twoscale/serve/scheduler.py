"""Depth-aware continuous batching: requests share the engine's calls, and a row that has left a loop costs nothing while others go on.

Two policies over the same rows:

    lockstep   all rows of a round are at the same stage; requests join and leave at token boundaries
    depth      every call takes the rows that wait at one stage, whatever their request and their depth in the loop

Which is quicker depends on what a call costs with few and with many rows, so it is to be measured. What a request gets never
depends on who else is served: rows see their own sequence alone, and the kernels sum in one order. Which requests are served first, and
what each of them may hold, is decided in `fair`.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.engine import Engine
from twoscale.engine.cache import bytes_per_token
from twoscale.engine.quick import quicken
from twoscale.engine.sample import sample
from twoscale.model import LoopedGPT
from twoscale.serve.fair import QUANTUM, FairShares
from twoscale.serve.job import Job, Settings
from twoscale.serve.logs import LOG
from twoscale.serve.policies import Counters, Depth, Lockstep, Way

Policy = Literal["lockstep", "depth"]
FAILED = "the server has failed inside"


class Scheduler:
    """Takes jobs from any thread; `step` does the work, in one thread."""

    def __init__(self, model: LoopedGPT, policy: Policy = "lockstep", *, rows: int = 32, cache_bytes: int = 1 << 30) -> None:
        if policy not in ("lockstep", "depth"):
            raise UserError(f"policy = {policy!r}: choose lockstep or depth")
        self.model, self.policy, self.rows, self.cache_bytes = model, policy, rows, cache_bytes
        self.counters = Counters(steps=[0] * model.config.n_groups)
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.fair = FairShares()
        self._arrived = False
        self._decoder = quicken(model)  # one copy for all engines: the weights as they are now
        self._ways: dict[Settings, tuple[Engine, Way]] = {}
        self._lock = threading.Lock()

    def submit(self, job: Job) -> None:
        """Put a job at the end of the queue; UserError where it can never be served."""
        self.check(job)
        with self._lock:
            self.waiting.append(job)
            self._arrived = True

    @property
    def held(self) -> int:
        """Bytes of keys and values that the running jobs may come to hold."""
        return self.fair.held.total()

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
        # Jobs with other settings cannot share a call: those whose request has had the least have their turn, until another has had less.
        first, others = self.fair.lead(self.running)
        settings, limit = first.settings, others + QUANTUM
        kind = [job for job in self.running if job.settings == settings]
        try:
            engine, way = self._way(settings)
            before = list(engine.work)
            came = way.step(kind, self.counters, lambda: not (self._arrived or way.ahead_of(limit)))
            for g, (now, then) in enumerate(zip(engine.work, before, strict=True)):
                self.counters.steps[g] += now - then
            self._extend(engine, came)
        except Exception as error:  # whatever it was, it came of these settings or these requests: the others go on
            LOG.exception("a round has failed")
            for job in kind:
                if job in self.running:
                    self._fail(job, str(error) if isinstance(error, UserError) else FAILED)
        return True

    def _fail(self, job: Job, error: str = FAILED) -> None:
        job.error, job.finish = error, "error"
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
            sampled = sample(logits, [job.draw for job, _, _ in ready])
        for i, (job, _, taken) in enumerate(ready):
            job.take(logits[i], sampled.tokens[i], sampled.finite[i], taken)
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
        self.fair.end(job, self._bytes(job))
        job.cache = None
        if job.settings in self._ways:
            self._ways[job.settings][1].forget(job)
        if not any(other.settings == job.settings for other in self.running):
            self._ways.pop(job.settings, None)

    def _drop(self) -> None:
        """Those that nobody waits for any more leave their place at once."""
        with self._lock:
            gone = [job for job in self.waiting if job.cancelled]
            if gone:
                self.waiting = deque(job for job in self.waiting if not job.cancelled)
        for job in gone:
            job.finish = "cancelled"
            if job.told is not None:
                job.told(job)
        for job in [job for job in self.running if job.cancelled]:
            job.finish = "cancelled"
            self._tell(job)

    def _admit(self) -> None:
        """Let waiting jobs begin, as long as there is room for them."""
        came = []
        with self._lock:
            self._arrived = False
            while self.waiting and (job := self.fair.next(self.waiting, self.running, self.rows, self.cache_bytes, self._bytes)):
                self.waiting.remove(job)
                self.fair.begin(job, self._bytes(job))
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
            self._ways[settings] = engine, (Lockstep if self.policy == "lockstep" else Depth)(engine, self.rows)
        return self._ways[settings]
