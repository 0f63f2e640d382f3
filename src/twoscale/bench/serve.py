"""Throughput under load: one request after another, batches that wait for their slowest row, and both policies of the scheduler.

The same closed loop of mixed requests for all of them: so many clients, each asks again as soon as it has its answer, for so many seconds
from the moment when every client has had its first answer; by then prompts are read at the rate at which texts end. Depths are drawn by
place and token, spread evenly over 3 .. 12 steps a group, as a trained model's tokens are; acceleration is paid for. The ways take turns,
so that a slow minute of the machine hits none alone.
"""

import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib import resources
from statistics import median
from typing import Any

from torch import Tensor

from twoscale import exits
from twoscale.config import UserError
from twoscale.config.dtypes import KVDtype
from twoscale.engine import Request, SamplingParams, Scheduler, loop_params, stream
from twoscale.engine.counters import Counters
from twoscale.engine.policy import POLICIES
from twoscale.engine.request import LoopParams
from twoscale.exits.rule import Numbers, StepView
from twoscale.model import LoopedGPT

MAX_STEPS, MIN_STEPS = 12, 3


@dataclass(frozen=True)
class Drawn(exits.Acceleration):
    """Pays for acceleration and leaves after a depth that is a function of group, place and token, from `low` to `high` steps."""

    hits: int = field(default=1, kw_only=True)
    low: int = field(default=MIN_STEPS, kw_only=True)
    high: int = field(default=MAX_STEPS, kw_only=True)

    def measure(self, view: StepView) -> Numbers:
        super().measure(view)
        mixed = view.rows.positions * 7919 + view.rows.tokens * 104729 + view.group * 31
        return self.low + (mixed % 9973) % (self.high - self.low + 1) - view.k

    def passes(self, value: Numbers) -> Tensor | bool:
        return value <= 0


@dataclass(frozen=True)
class Waiting(Drawn):
    """The same, but every row waits for the slowest."""

    def passes(self, value: Numbers) -> Tensor | bool:
        return (value <= 0).all().expand_as(value) if isinstance(value, Tensor) else value <= 0


@dataclass(frozen=True)
class Load:
    """Clients that ask for so long; prompts and answers of these lengths, evenly spread, and shorter where the context is."""

    clients: int = 32
    seconds: float = 20.0
    prompt: tuple[int, int] = (8, 48)
    new: tuple[int, int] = (16, 64)
    seed: int = 0
    kv_dtype: KVDtype = "auto"

    def _params(self, model: LoopedGPT, rules: tuple[exits.Rule | None, ...]) -> list[LoopParams]:
        return [loop_params(model, exit=rule, loops=MAX_STEPS + i, kv_dtype=self.kv_dtype) for i, rule in enumerate(rules)]

    def requests(self, model: LoopedGPT, *rules: exits.Rule | None) -> Iterator[Request]:
        """As many as are asked for, always the same; they take the rules in turn."""
        chance, c = random.Random(self.seed), model.config
        for params in itertools.cycle(self._params(model, rules)):
            length, new = (min(chance.randint(*spread), c.block_size // 2) for spread in (self.prompt, self.new))
            yield Request([chance.randrange(c.vocab_size) for _ in range(length)], SamplingParams(max_new_tokens=new), params)


@dataclass(frozen=True)
class Result:
    """What one way of serving did."""

    seconds: float
    tokens: int
    latency: list[float]
    first: list[float]
    rows: float = 1.0
    """Mean rows of a stage pass."""
    engine: float = 0.0
    """Seconds in the engine."""

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def overhead(self) -> float:
        """Time outside of the engine, relative to the time in it."""
        return self.seconds / self.engine - 1


def words(results: list[Result], rows: bool = True) -> str:
    """Medians over rounds; latencies of all of them. Servers in other processes tell no rows."""
    latency = sorted(seconds for r in results for seconds in r.latency)
    late = latency[min(len(latency) - 1, int(0.99 * len(latency)))]
    first = median(seconds for r in results for seconds in r.first)
    times = f"latency p50 {median(latency):5.2f} s, p99 {late:5.2f} s   first token {first:5.2f} s"
    filled = f"   {median(r.rows for r in results):5.1f} rows a pass" if rows else ""
    return f"{median(r.rate for r in results):7.1f} tokens/s   {times}{filled}"


def one_by_one(model: LoopedGPT, load: Load) -> Result:
    """Each request alone."""
    latency, first, tokens = [], [], 0
    started = time.perf_counter()
    for request in load.requests(model, Drawn(1e-9)):
        began = time.perf_counter()
        made = stream(model, request.prompt, request.sampling, request.loop_params)
        steps = [(time.perf_counter(), len(after.tokens)) for after in made]  # a step may give several tokens
        ended, n_tokens = steps[-1]
        tokens += n_tokens
        first.append(steps[0][0] - began)
        latency.append(ended - began)
        if ended - started > load.seconds:
            break
    return Result(time.perf_counter() - started, tokens, latency, first)


def waiting_batches(model: LoopedGPT, load: Load) -> Result:
    """Batches of as many requests as there are clients; every row waits for the slowest one in every loop, a batch for its last text."""
    requests = load.requests(model, Waiting(1e-9))
    latency: list[float] = []
    first: list[float] = []
    counters = Counters(loop_steps=[0] * model.config.n_groups)
    started = time.perf_counter()
    while not latency or time.perf_counter() - started < load.seconds:
        scheduler = Scheduler(model, "lockstep", max_num_seqs=load.clients)
        scheduler.counters = counters
        asked, batch = time.perf_counter(), list(itertools.islice(requests, load.clients))
        for request in batch:
            scheduler.add(request)
        while scheduler.step():
            pass
        latency += [time.perf_counter() - asked for _ in batch]
        first += [request.first_token - asked for request in batch]
    return _between(Counters(), counters, time.perf_counter() - started, latency, first)


def scheduled(model: LoopedGPT, load: Load, policy: str, *rules: exits.Rule | None) -> Result:
    """The scheduler, fed by clients that ask again when they have their answer; requests take the rules in turn."""
    return closed_loop(Scheduler(model, policy, max_num_seqs=load.clients), load, load.requests(model, *rules))


def closed_loop(scheduler: Scheduler, load: Load, requests: Iterator[Request]) -> Result:
    """A scheduler whose clients take the next of these requests when they have their answer."""
    ended: list[Request] = []

    def ask() -> Request:
        request = next(requests)
        request.submitted, request.on_token = time.perf_counter(), on_token
        scheduler.add(request)
        return request

    def on_token(request: Request) -> None:
        if request.finish_reason:
            ended.append(request)
            ask()

    firsts = [ask() for _ in range(load.clients)]
    while not all(request.finish_reason for request in firsts):
        scheduler.step()
    ended.clear()
    before, started = replace(scheduler.counters), time.perf_counter()
    while not ended or time.perf_counter() - started < load.seconds:
        scheduler.step()
    seconds = time.perf_counter() - started
    if any(request.finish_reason != "length" for request in ended):
        raise UserError("a request was lost")
    latency, first = [r.ended - r.submitted for r in ended], [r.first_token - r.submitted for r in ended]
    return _between(before, scheduler.counters, seconds, latency, first)


def over_http(model: LoopedGPT, load: Load, policy: str, tokenizer: Any) -> Result:
    """The same load over HTTP on loopback, from a process of its own."""
    from twoscale.serve.limits import Limits
    from twoscale.serve.server import Server

    scheduler = Scheduler(model, policy, max_num_seqs=load.clients)
    rules = {g: Drawn(1e-9) for g in range(model.config.n_groups)}
    server = Server(
        model, tokenizer, "bench", scheduler, calibration=(rules, MAX_STEPS), limits=Limits(timeout=600.0), kv_dtype=load.kv_dtype
    )
    requests = itertools.islice(load.requests(model, None), 2000)
    asks = [{"body": {"prompt": r.prompt, "max_tokens": r.sampling.max_new_tokens, "temperature": 0}, "how": "stream"} for r in requests]
    snapshots: list[Counters] = []
    found = ask_from_outside(server, load.clients, load.seconds, asks, lambda: snapshots.append(replace(scheduler.counters)))
    check_served(found)
    before, after = snapshots
    return _between(before, after, found["seconds"], found["latency"], found["first"])


def check_served(found: dict[str, Any]) -> None:
    """UserError if something went wrong for the clients."""
    if found["troubles"] or not found["latency"]:
        raise UserError(f"the clients were not served: {', '.join(found['troubles']) or 'no answer in time'}")


def ask_from_outside(
    server: Any, clients: int, seconds: float, asks: list[dict[str, Any]], mark: Callable[[], object], drain: float = 0.0
) -> dict[str, Any]:
    """Run clients.py against a server in a thread of this process; `mark` is called when its clients start and when they stop."""
    from twoscale.serve.app import create_app
    from twoscale.serve.local import run_in_thread

    with run_in_thread(create_app(server)) as address:
        return run_clients(address, clients, seconds, asks, mark, drain)


def run_clients(
    address: str, clients: int, seconds: float, asks: list[dict[str, Any]], mark: Callable[[], object] = lambda: None, drain: float = 0.0
) -> dict[str, Any]:
    """What clients.py, in a process of its own, found of the server at an address."""
    asked, last = {"clients": clients, "seconds": seconds, "drain": drain, "asks": asks}, ""
    with (
        resources.as_file(resources.files("twoscale.bench").joinpath("clients.py")) as script,
        subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        json.dump({"address": address, **asked}, process.stdin)
        process.stdin.close()
        for line in process.stdout:
            if line.strip() in ("start", "stop"):
                mark()
            last = line
    try:
        return dict(json.loads(last))
    except ValueError:
        raise UserError("the clients failed; what they said is above") from None


def _between(before: Counters, after: Counters, seconds: float, latency: list[float], first: list[float]) -> Result:
    passes = max(1, after.stage_passes - before.stage_passes)
    engine = after.engine_seconds - before.engine_seconds
    return Result(seconds, after.tokens - before.tokens, latency, first, (after.rows - before.rows) / passes, engine)


MIXED = tuple(Drawn(1e-9, low=low, high=high) for low, high in ((3, 6), (5, 8), (7, 10), (9, 12), (3, 12), (4, 11), (5, 10), (6, 9)))
"""Eight rules of different depths; their mean is that of `Drawn` by itself."""


def bench_mixed(model: LoopedGPT, load: Load, rounds: int, say: Callable[[str], object]) -> list[tuple[Result, Result]]:
    """Clients that all have one rule, and the same clients with eight rules and depth limits, in turns: (one rule, eight rules)."""
    scheduled(model, replace(load, clients=4, seconds=0.0), "lockstep", *MIXED)  # warm
    found = []
    for round_ in range(rounds):
        load = replace(load, seed=round_)
        one, eight = (scheduled(model, load, "lockstep", *rules) for rules in ((Drawn(1e-9),), MIXED))
        say(f"round {round_ + 1}: {one.rate:.1f} tokens/s with one rule, {eight.rate:.1f} with eight")
        found.append((one, eight))
    return found


ONE, WAIT = "one request after another", "batches that wait"


def bench_serve(model: LoopedGPT, load: Load, tokenizer: Any, rounds: int, say: Callable[[str], object]) -> dict[str, list[Result]]:
    """All ways, in turns; with all loops in the first round only."""
    found: dict[str, list[Result]] = {}

    def note(name: str, result: Result) -> None:
        found.setdefault(name, []).append(result)
        say(f"{name}: {result.rate:.1f} tokens/s")

    scheduled(model, replace(load, clients=4, seconds=0.0), "lockstep", Drawn(1e-9))  # warm
    for round_ in range(rounds):
        load = replace(load, seed=round_)
        note(ONE, one_by_one(model, load))
        note(WAIT, waiting_batches(model, load))
        for policy in POLICIES:
            if round_ == 0:
                note(f"{policy}, all {MAX_STEPS} loops", scheduled(model, load, policy, None))
            note(f"{policy}, with exits", scheduled(model, load, policy, Drawn(1e-9)))
        best = max(POLICIES, key=lambda p: found[f"{p}, with exits"][0].rate)
        note(f"{best}, with exits, over HTTP", over_http(model, load, best, tokenizer))
    return found
