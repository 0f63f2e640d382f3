"""Throughput under load: one request after another, batches that wait for their slowest row, and both policies of the scheduler.

The same closed loop of mixed requests for all of them: so many clients, each asks again as soon as it has its answer. Depths are drawn
by place and token, spread evenly over 3 .. 12 steps a group, as a trained model's tokens are; acceleration is paid for.
"""

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import Tensor

from twoscale import exits
from twoscale.config import UserError
from twoscale.engine import stream
from twoscale.exits.rule import Look, Numbers
from twoscale.model import LoopedGPT
from twoscale.serve.job import Job, Settings
from twoscale.serve.scheduler import Policy, Scheduler

LOOPS, LEAST = 12, 3


@dataclass(frozen=True)
class Drawn(exits.Acceleration):
    """Pays for acceleration and leaves after a depth that is a function of group, place and token."""

    hits: int = field(default=1, kw_only=True)

    def measure(self, look: Look) -> Numbers:
        super().measure(look)
        mixed = look.rows.positions * 7919 + look.rows.tokens * 104729 + look.group * 31
        return LEAST + (mixed % 9973) % (LOOPS - LEAST + 1) - look.k

    def passes(self, value: Numbers) -> Tensor | bool:
        return value <= 0


@dataclass(frozen=True)
class Waiting(Drawn):
    """The same, but every row waits for the slowest."""

    def passes(self, value: Numbers) -> Tensor | bool:
        return (value <= 0).all().expand_as(value) if isinstance(value, Tensor) else value <= 0


@dataclass(frozen=True)
class Load:
    """Requests: prompts of 8 to 48 tokens, 8 to 32 new ones; shorter where the context is."""

    requests: int = 64
    clients: int = 32
    seed: int = 0

    def jobs(self, model: LoopedGPT, rule: exits.Rule | None) -> list[Job]:
        chance = random.Random(self.seed)
        c = model.config
        settings = Settings((rule,) * c.n_groups, c.loops_for(LOOPS))
        longest, most = min(48, c.block_size // 2), min(32, c.block_size // 2)
        prompts = [[chance.randrange(c.vocab_size) for _ in range(chance.randint(8, longest))] for _ in range(self.requests)]
        return [Job(prompt, chance.randint(8, most), settings) for prompt in prompts]


@dataclass(frozen=True)
class Result:
    """What one way of serving did."""

    seconds: float
    tokens: int
    latency: list[float]
    first: list[float]
    rows: float = 1.0
    """Mean rows a call."""
    engine: float = 0.0
    """Seconds in the engine."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def words(self) -> str:
        latency = sorted(self.latency)
        late = latency[min(len(latency) - 1, int(0.99 * len(latency)))]
        return (
            f"{self.rate:8.1f} tokens/s   p50 {median(latency):6.2f} s   p99 {late:6.2f} s   first token {median(self.first):6.2f} s   "
            f"{self.rows:5.1f} rows a call"
        )


def one_by_one(model: LoopedGPT, load: Load, share: float = 0.125) -> Result:
    """Each request alone; only a part of them, because it takes long."""
    jobs = load.jobs(model, Drawn(1e-9))[: max(1, int(share * load.requests))]
    latency, first, tokens = [], [], 0
    started = time.perf_counter()
    for job in jobs:
        began = time.perf_counter()
        came = [time.perf_counter() for _ in stream(model, job.prompt, job.most, exit=job.settings.exit, loops=LOOPS)]
        tokens += len(came)
        first.append(came[0] - began)
        latency.append(came[-1] - began)
    return Result(time.perf_counter() - started, tokens, latency, first)


def waiting_batches(model: LoopedGPT, load: Load) -> Result:
    """Batches of as many requests as there are clients; every row waits for the slowest one in every loop, a batch for its last text."""
    jobs = load.jobs(model, Waiting(1e-9))
    latency, first, tokens = [], [], 0
    started = time.perf_counter()
    for i in range(0, len(jobs), load.clients):
        batch = jobs[i : i + load.clients]
        scheduler = Scheduler(model, "lockstep", rows=load.clients)
        asked = started if i == 0 else time.perf_counter()
        for job in batch:
            scheduler.submit(job)
        while scheduler.step():
            pass
        ended = time.perf_counter()
        tokens += sum(len(job.tokens) for job in batch)
        latency += [ended - asked for _ in batch]
        first += [job.first - asked for job in batch]
    return Result(time.perf_counter() - started, tokens, latency, first, rows=float(load.clients))


def scheduled(model: LoopedGPT, load: Load, policy: Policy, rule: exits.Rule | None) -> Result:
    """The scheduler, fed by clients that ask again when they have their answer."""
    jobs = load.jobs(model, rule)
    rest = iter(jobs)
    scheduler = Scheduler(model, policy, rows=load.clients)

    def next_one(_: Job | None = None) -> None:
        job = next(rest, None)
        if job is not None:
            job.submitted = time.perf_counter()
            job.told = lambda j: next_one() if j.finish else None
            scheduler.submit(job)

    started = time.perf_counter()
    for _ in range(load.clients):
        next_one()
    while scheduler.step():
        pass
    seconds = time.perf_counter() - started
    c = scheduler.counters
    if any(job.finish != "length" for job in jobs):
        raise UserError("a request was lost")
    latency, first = [job.ended - job.submitted for job in jobs], [job.first - job.submitted for job in jobs]
    return Result(seconds, c.tokens, latency, first, c.rows / max(1, c.calls), c.engine_seconds)


CLIENT = """
import asyncio, json, sys, time
import httpx

async def main(address, jobs, clients):
    todo, done = iter(enumerate(jobs)), []
    async with httpx.AsyncClient(timeout=600) as client:
        async def ask():
            for i, (prompt, most) in todo:
                began, first = time.perf_counter(), None
                body = {"prompt": prompt, "max_tokens": most, "temperature": 0, "stream": True}
                tokens = 0
                async with client.stream("POST", address + "/v1/completions", json=body) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: {"):
                            first = first or time.perf_counter()
                            tokens += sum(len(c["steps"]) for c in json.loads(line[6:])["choices"])
                done.append((tokens, time.perf_counter() - began, first - began))
        await asyncio.gather(*(ask() for _ in range(clients)))
    return done

given = json.load(sys.stdin)
began = time.perf_counter()
done = asyncio.run(main(given["address"], given["jobs"], given["clients"]))
print(json.dumps({"seconds": time.perf_counter() - began, "done": done}))
"""


def over_http(model: LoopedGPT, load: Load, policy: Policy, tokenizer: Any) -> Result:
    """The same load through the door on loopback, from a process of its own."""
    import json

    import uvicorn

    from twoscale.serve.app import Limits, Server, create_app

    scheduler = Scheduler(model, policy, rows=load.clients)
    rules = {g: Drawn(1e-9) for g in range(model.config.n_groups)}
    server = Server(model, tokenizer, "bench", scheduler, calibrated=(rules, LOOPS), limits=Limits(seconds=600.0))
    config = uvicorn.Config(create_app(server), host="127.0.0.1", port=0, log_level="warning")
    listening = config.bind_socket()
    uv = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: uv.run(sockets=[listening]), daemon=True)
    thread.start()
    while not uv.started:
        time.sleep(0.01)
    try:
        jobs = [(job.prompt, job.most) for job in load.jobs(model, None)]
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        asked = json.dumps({"address": address, "jobs": jobs, "clients": load.clients})
        told = subprocess.run([sys.executable, "-c", CLIENT], input=asked, capture_output=True, text=True, timeout=1800)
        if told.returncode:
            raise UserError(f"the clients failed: {told.stderr.strip().splitlines()[-1]}")
        found = json.loads(told.stdout)
    finally:
        uv.should_exit = True
        thread.join(60)
    c = scheduler.counters
    done = found["done"]
    latency, first = [d[1] for d in done], [d[2] for d in done]
    return Result(found["seconds"], sum(d[0] for d in done), latency, first, c.rows / max(1, c.calls), c.engine_seconds)


def bench_serve(model: LoopedGPT, load: Load, tokenizer: Any, say: Callable[[str], object]) -> dict[str, Result]:
    """All ways, one after the other, in one run; the scheduler's in turns, so that a slow minute hits none alone."""
    found: dict[str, Result] = {}

    def note(name: str, result: Result) -> None:
        found[name] = result
        say(f"{name:<34}{result.words}")

    with torch.inference_mode():
        scheduled(model, Load(4, 4), "lockstep", Drawn(1e-9))  # warm
    note("one request after another", one_by_one(model, load))
    note("batches that wait", waiting_batches(model, load))
    policies: tuple[Policy, ...] = ("lockstep", "depth")
    for policy in policies:
        note(f"{policy}, all {LOOPS} loops", scheduled(model, load, policy, None))
        note(f"{policy}, with exits", scheduled(model, load, policy, Drawn(1e-9)))
    best = max(policies, key=lambda p: found[f"{p}, with exits"].rate)
    note(f"{best}, with exits, over HTTP", over_http(model, load, best, tokenizer))
    return found
