"""`twoscale bench decode --speculate MODEL`: plain and speculative decoding of a trained model on held-out text.

Every kind of speculation decodes the same prompts in turn with plain decoding, so that a slow moment of the machine meets them alike;
ratios are taken within a turn. Only the tokens after the first are timed: prompts take the same time either way. All results must be equal.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from statistics import median
from typing import Any

import torch

from twoscale.bench.family import bench_family
from twoscale.bench.serve import Load, closed_loop
from twoscale.config import UserError
from twoscale.engine import LoopRows, Request, SamplingParams, Scheduler, loop_params
from twoscale.engine.cache import Cache
from twoscale.engine.engine import Engine
from twoscale.engine.kernels.base import NO_INTERRUPT
from twoscale.engine.kernels.native_decode import SequenceSampling
from twoscale.engine.rows import Rows, make_part
from twoscale.engine.scheduler import run_until_done
from twoscale.engine.speculation import NO_SPECULATION_STATS, OFF, Auto, Draft, Lookup, Speculation, SpeculationStats, Wavefront
from twoscale.engine.speculator import draft_params
from twoscale.model import LoopedGPT
from twoscale.tradeoff.heldout import heldout_windows
from twoscale.tradeoff.load_run import LoadedRun

PROMPT = 48  # tokens
DEPTHS = (1, 2, 3, 4, 6)  # loop steps of a draft whose acceptance is shown
WIDTHS = (2, 4, 8, 16)
MOST_ROWS = 16  # of one pass
DRAFTED = 8  # tokens in one call, where the cost of a draft is measured


@dataclass(frozen=True)
class Measured:
    """The measurements of one method of speculation on all prompts."""

    method: Speculation
    ratio: float
    """Plain decoding's time divided by its time: the median over turns."""
    seconds: float
    """Median seconds of a token after the first."""
    stats: SpeculationStats
    new: int
    """Tokens after the first, of all prompts."""

    @property
    def passes_per_token(self) -> float:
        """Stage passes."""
        return self.stats.calls / self.new


def prompts_of(run: LoadedRun, n: int, length: int = PROMPT) -> list[list[int]]:
    """The beginnings of n windows that are spread over the held-out text."""
    size = run.model.config.block_size
    return [row[: min(length, size // 2)] for row in heldout_windows(run.data, size, n).ids.tolist()]


def compare(
    model: LoopedGPT,
    prompts: Sequence[list[int]],
    methods: Sequence[Speculation],
    new: int,
    repeats: int,
    temperature: float = 0.0,
    **loop: Any,
) -> list[Measured]:
    """Plain decoding first, then the methods, each beside plain decoding of the same prompt in the same turn."""
    scheduler, params = Scheduler(model, isolate_errors=False), loop_params(model, **loop)
    new = min(new, model.config.block_size - max(map(len, prompts)) + 1)
    every = [OFF, *methods]
    seconds: dict[Speculation, list[float]] = {method: [] for method in every}
    ratios: dict[Speculation, list[float]] = {method: [] for method in every}
    stats = dict.fromkeys(every, NO_SPECULATION_STATS)
    for turn in range(repeats + 1):  # the first is not counted
        for prompt in prompts:
            times, results = {}, []
            for method in every:
                request = Request(prompt, SamplingParams(temperature, max_new_tokens=new), params, speculate=method)
                run_until_done(scheduler, [request])
                times[method] = (request.ended - request.first_token) / max(1, new - 1)
                results.append((request.tokens, request.steps))
                if turn == 1:
                    stats[method] += request.speculation_stats
            if any(result != results[0] for result in results):
                raise AssertionError("speculation has changed a result")
            for method in every if turn else ():
                seconds[method].append(times[method])
                ratios[method].append(times[OFF] / times[method])
    count = len(prompts) * (new - 1)
    return [Measured(method, median(ratios[method]), median(seconds[method]), stats[method], count) for method in every]


class PassCosts:
    """The cost of a pass with several rows of one sequence relative to a pass with one, at a context of `length` tokens."""

    def __init__(self, model: LoopedGPT, length: int, repeats: int, **loop: Any) -> None:
        self.engine, self.params, self.repeats = Engine(model), loop_params(model, **loop), max(9, repeats)
        self.cache = self.engine.new_cache(length + MOST_ROWS, self.params)
        length = min(length, self.cache.capacity - MOST_ROWS)
        if length < 1:
            raise UserError(f"the context of {model.config.block_size} tokens is too short for this bench")
        self.engine.run([(0, self.cache, [1] * length)])
        self.length = length

    @property
    def one(self) -> float:
        """Seconds of a token without guesses, measured now: what is compared with it is measured in the same moment."""
        return self._token(self.cache)

    def _token(self, cache: Cache, is_draft: bool = False) -> float:
        """Seconds of a token of a sequence that is alone: in one call for several of them if the kernels can, else of a pass."""
        decoder = self.engine.draft_decoder if is_draft else self.engine.decoder
        sequence = None if decoder is None else decoder.sequence(cache, SequenceSampling(0.0, 0, 1.0, ()), is_draft)

        def work() -> int:
            return 0 if sequence is None else len(sequence.decode(2, [0.5] * DRAFTED, NO_INTERRUPT).tokens)

        return _least(work, self.repeats) / DRAFTED if work() == DRAFTED else self._pass(cache, 1)

    def _pass(self, cache: Cache, rows: int) -> float:
        """Seconds of a pass of `rows` tokens at once, which are then rewound: the least of several."""

        def work() -> None:
            self.engine.run([(0, cache, [2] * rows)])
            cache.rewind(self.length)

        return _least(work, self.repeats)

    def together(self, rows: int) -> float:
        """c(W) of a pass of rows at the same loop step: a verification."""
        decoder, uniform = self.engine.decoder, [0.5] * rows
        sequence = None if decoder is None else decoder.sequence(self.cache, SequenceSampling(0.0, 0, 1.0, ()), max_rows=rows)
        if sequence is None or sequence.verify([2] * rows, uniform, NO_INTERRUPT) is None:
            return self._pass(self.cache, rows) / self.one
        return _least(lambda: sequence.verify([2] * rows, uniform, NO_INTERRUPT), self.repeats) / self.one

    def draft(self, steps: int) -> float:
        """The cost of a drafted token with at most `steps` loop steps in each group."""
        return self._token(self.cache.view(draft_params(self.params, steps)), is_draft=True) / self.one

    @torch.inference_mode()
    def apart(self, rows: int) -> float:
        """c(W) of a loop step of rows at different steps: a wavefront."""
        group_stage = next(i for i, (_, group) in enumerate(self.engine.config.stages) if group is not None)
        loops = self.params.loops[0]
        n = max(1, loops // rows)

        def steps(width: int) -> Iterator[Callable[[], None]]:
            for _ in range(self.repeats):
                loop = LoopRows(self.engine, group_stage)
                parts = [make_part(0, self.cache, self.length + i, 1) for i in range(width)]
                positions_and_tokens = torch.tensor([list(range(self.length, self.length + width)), [2] * width])
                loop.admit(Rows(parts, positions_and_tokens, self.engine.kernels), torch.zeros(width, self.engine.config.n_embd))
                for i, part in enumerate(parts):
                    part.loop_step = min(loops - n, (width - 1 - i) * n)
                yield lambda loop=loop: [loop.advance() for _ in range(n - 1)] and None  # type: ignore[misc]

        many, one = (min(_timed(work) for work in steps(width)) for width in (rows, 1))
        return many / one

    def bound(self, method: Speculation) -> float | None:
        """The ratio to plain decoding if every guess were right; None where it depends on the text."""
        if isinstance(method, Draft):
            return (method.tokens + 1) / (method.tokens * self.draft(method.steps) + self.together(method.tokens + 1))
        if isinstance(method, Wavefront):
            width = min(method.max_positions, max(1, self.params.loops[0] // method.steps))
            return self.params.loops[0] / (method.steps * self.apart(width))
        return None


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _least(work: Callable[[], object], repeats: int) -> float:
    return min(_timed(work) for _ in range(repeats + 1))


def _name(method: Speculation) -> str:
    if isinstance(method, Draft):
        return f"{method}, {method.steps} steps"
    if isinstance(method, Wavefront):
        return f"wavefront, {method.steps} steps, {method.max_positions} wide"
    return "plain" if method == OFF else str(method)


def table(found: Sequence[Measured], costs: PassCosts | None = None) -> list[str]:
    """Lines of a table."""
    lines = [f"  {'':<30}{'ms a token':>11}{'ratio':>8}{'bound':>8}{'of it':>7}{'right':>8}{'passes a token':>15}"]
    for m in found:
        bound = None if costs is None else costs.bound(m.method)
        beside = f"{'-':>8}{'-':>7}" if bound is None else f"{bound:7.2f}x{m.ratio / bound:7.0%}"
        right = f"{m.stats.acceptance:8.0%}" if m.stats.drafted else f"{'-':>8}"
        passes = f"{m.passes_per_token:15.1f}" if m.stats.calls else f"{'-':>15}"
        lines.append(f"  {_name(m.method):<30}{m.seconds * 1e3:11.2f}{m.ratio:7.2f}x{beside}{right}{passes}")
    return lines


def bench_clients(run: LoadedRun, load: Load, rounds: int, loops: int, say: Callable[[str], object]) -> dict[int, list[float]]:
    """For 1, 4, 16 and 32 clients (no more than the load has): tokens/s with `auto` beside `off`, one ratio for each round."""
    model, texts, found = run.model, prompts_of(run, 32), dict[int, list[float]]()
    params, new = loop_params(model, loops=loops), min(64, model.config.block_size // 2)

    def requests(method: Speculation) -> Iterator[Request]:
        return (Request(prompt, SamplingParams(max_new_tokens=new), params, speculate=method) for prompt in cycle(texts))

    for round_ in range(rounds):
        for clients in (n for n in (1, 4, 16, 32) if n <= load.clients):
            its_load = replace(load, clients=clients)
            off, auto = (closed_loop(Scheduler(model, max_num_seqs=clients), its_load, requests(method)).rate for method in (OFF, Auto()))
            found.setdefault(clients, []).append(auto / off)
            say(f"round {round_ + 1}, {clients} clients: {off:.1f} tokens/s off, {auto:.1f} auto")
    return found


def bench_speculation(
    run: LoadedRun, calibration: tuple[Any, int] | None, prompts: int, new: int, repeats: int, say: Callable[[str], object]
) -> None:
    """All tables, line by line."""
    model = run.model
    texts = prompts_of(run, prompts)
    one_group = model.config.n_groups == 1
    methods: list[Speculation] = [Draft(m, d) for d in (1, 2, 3) for m in ((7, 15) if one_group else (3, 5, 7))]
    methods += [Lookup(3), *([Wavefront(4, 8), Wavefront(2, 16)] if one_group else []), Auto()]
    for loops in (16, 32) if one_group else (model.config.mean_loops,):
        costs = PassCosts(model, len(texts[0]) + new // 2, repeats, loops=loops)
        say(f"\nT = {loops}, greedy")
        say(f"  c(W), a pass of W rows:  {', '.join(f'c({w}) = {costs.together(w):.2f}' for w in WIDTHS)}")
        if one_group:
            say(f"  rows at different steps: {', '.join(f'c({w}) = {costs.apart(w):.2f}' for w in WIDTHS if loops // w > 1)}")
        measured = compare(model, texts, methods, new, repeats, loops=loops)
        for line in table(measured, costs):
            say(line)
        if one_group:
            straight = bench_family(model, loops, costs.length, repeats).straightforward
            plain, best = measured[0], max(measured, key=lambda m: m.ratio)
            times = straight / plain.seconds
            say(f"  a straightforward loop on the same weights takes {straight * 1e3:.1f} ms a token:")
            say(f"  plain decoding is {times:.1f} times as fast, {_name(best.method)} {best.ratio * times:.1f} times")
        depths = [d for d in DEPTHS if d < loops]
        found = compare(model, texts, [Draft(3, d) for d in depths], new, 1, loops=loops)[1:]
        say("  right guesses of draft:3 by its steps: " + ", ".join(f"{m.method.steps}: {m.stats.acceptance:.0%}" for m in found))  # type: ignore[attr-defined]
    say(f"\nT = {loops}, sampled at temperature 0.8")
    for line in table(compare(model, texts, [methods[0], Auto()], new, repeats, 0.8, loops=loops)):
        say(line)
    if calibration is None:
        say("\nno calibrated exit rule here: `twoscale calibrate` makes one, and this bench measures `auto` with it")
        return
    rules, most = calibration
    say(f"\nthe calibrated exit rule, at most {most} loops, greedy")
    for line in table(compare(model, texts, [Auto()], new, repeats, exit=rules, loops=most)):
        say(line)
