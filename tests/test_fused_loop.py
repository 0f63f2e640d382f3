"""Several loop steps in one C call are the same, to the bit, as the steps one by one."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor

import twoscale
from models import LAYOUTS, loud, small_model
from random_rules import HEADS, LOOPS, rules
from twoscale import exits
from twoscale.config import ModelConfig
from twoscale.engine import Engine, LoopRows, Request, SamplingParams, Scheduler, loop_params
from twoscale.engine.kernels.base import Interrupt
from twoscale.engine.kernels.library import c_library
from twoscale.engine.kernels.native_rows import FusedLoop, NativeStatistic
from twoscale.engine.kernels.torch_ops import update_norms
from twoscale.engine.request import RequestGroup
from twoscale.engine.rows import Rows, make_part
from twoscale.exits.rule import Numbers
from twoscale.model import LoopedGPT, LoopGroup

pytestmark = pytest.mark.skipif(c_library() is None, reason="there are no C kernels")

MODELS = {name: loud(small_model(**changes)) for name, changes in LAYOUTS.items()}


@pytest.fixture(autouse=True)
def _nan_in_fresh_memory() -> Iterator[None]:
    """Memory that nobody has written reads as NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def step_by_step() -> Iterator[None]:
    """Loops take their steps one by one, as `LoopRows.step` defines them."""
    with mock.patch.object(FusedLoop, "applies", staticmethod(lambda loop: False)):
        yield


def passes(model: LoopedGPT, prompts: list[list[int]], each: list[dict[str, Any]]) -> tuple[Any, ...]:
    """States, steps and caches of a prefill and three tokens more, and the work that was counted."""
    engine = Engine(model)
    caches = [engine.new_cache(len(prompt) + 3, loop_params(model, **params)) for prompt, params in zip(prompts, each, strict=True)]
    states, steps = [], []
    for new in (prompts, *([[t + b] for b in range(len(prompts))] for t in range(3))):
        x, taken = engine.run([(b, cache, tokens) for b, (cache, tokens) in enumerate(zip(caches, new, strict=True))])
        states.append(x)
        steps.append(taken.tolist())
    layers = [(layer, cache.length) for cache in caches for layer in cache.layers]
    keys_and_values = [store[: layer.n_levels, :, :length] for layer, length in layers for store in (layer.keys, layer.values)]
    return steps, engine.loop_steps, [layer.n_levels for layer, _ in layers], states, keys_and_values


def check_same(got: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    *counts, states, stores = got
    *wanted_counts, wanted_states, wanted_stores = wanted
    assert counts == wanted_counts
    for a, b in zip([*states, *stores], [*wanted_states, *wanted_stores], strict=True):
        assert a.shape == b.shape and torch.equal(a, b) and not a.isnan().any()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_layout_and_rule(data: st.DataObject) -> None:
    """States, steps, caches and counted work are those of the steps one by one, for any layout, rules, kv and prompts."""
    model = MODELS[data.draw(st.sampled_from(sorted(MODELS)))]
    prompts = data.draw(st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=5), min_size=1, max_size=4))
    groups = model.config.n_groups
    params = st.fixed_dictionaries(
        {
            "exit": st.fixed_dictionaries({g: rules() for g in range(groups)}).map(
                lambda by: {g: r for g, r in by.items() if r is not None}
            ),
            "loops": st.lists(st.integers(1, LOOPS), min_size=groups, max_size=groups),
            "kv": st.sampled_from(["exact", "last", "ring:2"]),
            "seed": st.integers(0, 1),
        }
    )
    each = [data.draw(params) for _ in prompts]
    if model.config.n_embd != 32:
        assume(not any(isinstance(rule, exits.Learned) and len(rule.heads[0]) > 7 for own in each for rule in own["exit"].values()))
    got = passes(model, prompts, each)
    with step_by_step():
        check_same(got, passes(model, prompts, each))


CONDITIONS = [
    exits.KL(0.1), exits.KL(0.1, reverse=True), exits.MinPKL(), exits.MinPKL(min_p=0.5), exits.Entropy(), exits.ArgmaxStable(),
    exits.Confidence(0.1), *(exits.Learned(0.5, weights=heads) for heads in HEADS),
]  # fmt: skip


@pytest.mark.parametrize("rule", CONDITIONS, ids=str)
@pytest.mark.parametrize("vocab", [64, 301])
def test_statistics(rule: exits.Rule, vocab: int) -> None:
    """What C computes of a step is what the rule measures, to rounding, for several steps of several tokens; NaN where that is."""
    library, generator, n = c_library(), torch.Generator().manual_seed(1), 3
    assert library is not None
    condition = rule.condition(0)
    assert condition is not None
    head = torch.randn(32, vocab, generator=generator)
    x, previous_update = torch.randn(n, 32, generator=generator), torch.full((n, 32), torch.nan)
    evaluate, native = NativeStatistic(condition, library), torch.tensor(torch.nan)
    remembered: Tensor | None = torch.tensor(torch.nan)
    for k in range(1, 5):
        y = x + torch.randn(n, 32, generator=generator) / k
        tokens = Tokens(torch.full((n,), k))
        norms = [norm.double() for norm in update_norms(x, y, previous_update)]
        views = [exits.StepView(0, tokens, x, y, last, lambda states, _: states @ head, norms) for last in (native, remembered)]
        got, native = evaluate(views[0])
        wanted = torch.as_tensor(rule.measure(views[1])).double()
        assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-6, equal_nan=True), f"step {k}"
        assert torch.equal(torch.as_tensor(rule.passes(got)), torch.as_tensor(rule.passes(wanted)))
        remembered, x = rule.remember(views[1]), y
        remembered = torch.tensor(torch.nan) if remembered is None else remembered


@dataclass
class Tokens:
    """Rows at one loop step."""

    k: Tensor
    same_k: None = None


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_is_used(name: str) -> None:
    """The C loop is used for every layout except one with noise in every step, with rules that compare statistics and without rules."""
    model, runs = MODELS[name], []
    with mock.patch.object(FusedLoop, "run", autospec=True, side_effect=FusedLoop.run) as run:
        for rule in (None, exits.Fixed(2), exits.StepNorm(1.0), exits.Acceleration(1.0, keep="previous"), exits.Cosine()):
            passes(model, [[1, 2], [3]], [{"exit": rule, "loops": 4}] * 2)
            runs.append(run.call_count)
    assert runs == [0] * 5 if model.config.noise == "every_step" else runs[0] > 0 and runs == sorted(set(runs))


@dataclass(frozen=True)
class Spread(exits.StepNorm):
    """A subclass with a test of its own."""

    def measure(self, view: exits.StepView) -> Numbers:
        return view.rows.k.double() - 3 - view.rows.positions % 3

    def passes(self, value: Numbers) -> Tensor | bool:
        return value >= self.tau


def test_subclass_with_its_own_test() -> None:
    """A rule that overrides `measure` or `passes` is never replaced by the condition of its parent."""
    assert Spread(0.0).condition(0) is None and exits.StepNorm(0.5).condition(0) is not None
    steps = passes(MODELS["default"], [[1, 2, 3]], [{"exit": Spread(0.0), "loops": LOOPS}])[0]
    assert steps[0] == [[3, 3], [4, 4], [5, 5]]


def a_loop(model: LoopedGPT, rule: exits.Rule | None, n: int) -> tuple[Engine, LoopRows]:
    """`n` tokens of one sequence and one of another inside the first group."""
    engine, stage = Engine(model), next(i for i, (_, group) in enumerate(model.config.stages) if group is not None)
    loop, parts = LoopRows(engine, stage), []
    for b, count in enumerate((n, 1)):
        cache = engine.new_cache(8, loop_params(model, exit=rule, loops=LOOPS))
        parts.append(make_part(b, cache, cache.extend(count), count))
    ids = torch.tensor([[*range(n), 0], [*range(n), 5]])
    rows = Rows(parts, ids, engine.kernels)
    with torch.inference_mode():
        loop.admit(rows, engine.embed(rows))
    return engine, loop


@torch.inference_mode()
def all_exits(loop: LoopRows, limits: list[float], interrupt: Interrupt) -> tuple[list[Any], list[int]]:
    """The rows in the order in which they exit, and the steps of each call."""
    exited, calls = [], []
    while len(loop):
        rows = loop.advance(limits[len(calls) % len(limits)], interrupt)
        calls.append(loop.steps_taken)
        if rows is not None:
            exited.append([(part.prompt_index, part.positions, part.loop_step) for part in rows.rows.parts if part.count == 1])
            exited.append(rows.x.clone())
    return exited, calls


@pytest.mark.parametrize("rule", [None, exits.StepNorm(3.0, hits=2), exits.Acceleration(4.0, keep="previous")], ids=str)
def test_any_cut(rule: exits.Rule | None) -> None:
    """It does not matter how many steps a call takes, and a call takes no more than it may."""
    wanted, _ = all_exits(a_loop(MODELS["default"], rule, 4)[1], [1], Interrupt())
    for limits in ([2], [3, 1], [1e9], [float("inf")]):
        got, calls = all_exits(a_loop(MODELS["default"], rule, 4)[1], limits, Interrupt())
        assert all(1 <= n <= limits[i % len(limits)] for i, n in enumerate(calls))
        assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(got, wanted, strict=True))


def sequences_in_a_loop(model: LoopedGPT, rules: list[exits.Rule | None]) -> LoopRows:
    """One token of a sequence for each rule in the first group, all levels of the caches allocated."""
    engine = Engine(model)
    caches = [engine.new_cache(4, loop_params(model, exit=rule, loops=LOOPS)) for rule in rules]
    full = loop_params(model, loops=LOOPS)
    for b, cache in enumerate(caches):
        engine.run([(b, cache.view(full), [b + 1])])
    rows = Rows(
        [make_part(b, cache, cache.extend(1), 1) for b, cache in enumerate(caches)],
        torch.tensor([[0] * len(rules), [5] * len(rules)]),
        engine.kernels,
    )
    loop = LoopRows(engine, next(i for i, stage in enumerate(engine.stages) if isinstance(stage, LoopGroup)))
    x = engine.embed(rows)
    loop.admit(rows, x + torch.arange(len(rules))[:, None] * 0.1)
    return loop


@pytest.mark.parametrize("layout", ["default", "rotary, grouped queries", "norm on leaving"])
@torch.inference_mode()
def test_rows_exit_in_one_call(layout: str) -> None:
    """When rows have exited the others go on in the same call, as long as they may; steps and outputs are those of single steps."""
    model = MODELS[layout]
    rules = [exits.Fixed(3), exits.StepNorm(4.0), None, exits.Fixed(2, keep="previous"), exits.Acceleration(4.0, hits=2), exits.KL(0.05)]

    def outputs(limit: float, steps_after_exit: float) -> tuple[dict[int, tuple[int, Tensor]], list[int]]:
        loop, found, calls = sequences_in_a_loop(model, rules), {}, []
        while len(loop):
            exited = loop.advance(limit, Interrupt(), steps_after_exit)
            calls.append(loop.steps_taken)
            if exited is not None:
                found |= {part.prompt_index: (part.loop_step, exited.x[i]) for i, part in enumerate(exited.rows.parts)}
                assert loop.steps_since_exit <= min(steps_after_exit, LOOPS)
        return found, calls

    wanted, _ = outputs(1, 0)
    assert len({steps for steps, _ in wanted.values()}) >= 3 and wanted[2][0] == LOOPS
    for limit, after in ((math.inf, math.inf), (math.inf, 1), (2, math.inf), (3, 2)):
        got, calls = outputs(limit, after)
        assert sorted(got) == list(range(len(rules))) and all(n <= limit for n in calls)
        for b, (steps, x) in wanted.items():
            assert got[b][0] == steps and torch.equal(got[b][1], x), f"row {b}"
        if (limit, after) == (math.inf, math.inf):
            assert calls == [LOOPS]


def test_interrupt() -> None:
    """A call ends after the step in which the flag is set; the result is the same."""
    wanted, calls = all_exits(a_loop(MODELS["default"], None, 2)[1], [float("inf")], Interrupt())
    interrupt = Interrupt()
    interrupt.set(True)
    got, interrupted_calls = all_exits(a_loop(MODELS["default"], None, 2)[1], [float("inf")], interrupt)
    assert interrupted_calls == [1] * sum(calls) and len(interrupted_calls) == LOOPS
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(got, wanted, strict=True))


def scheduled(model: LoopedGPT, policy: str) -> tuple[Any, ...]:
    """Requests of three request groups with different rules and limits: their results, and everything that is counted."""
    scheduler, requests = Scheduler(model, max_num_seqs=4, policy=policy, prefill_chunk=3), []
    request_groups = [RequestGroup() for _ in range(3)]
    rules = (None, exits.StepNorm(3.0), exits.Acceleration(4.0), exits.Fixed(2), exits.Cosine(0.2, keep="previous"))
    for i, rule in enumerate(rules * 2):
        params = loop_params(model, exit=rule, loops=3 + i % 4, kv=("exact", "last")[i % 2])
        requests.append(Request([i + 1] * (1 + i % 5), SamplingParams(max_new_tokens=4 + i), params, request_group=request_groups[i % 3]))
        scheduler.add(requests[-1])
        scheduler.step()
    while scheduler.step():
        pass
    counters = scheduler.counters
    counts = counters.stage_passes, counters.rows, counters.tokens, counters.processed_tokens, list(counters.loop_steps)
    return [(r.tokens, r.steps, r.prompt_steps) for r in requests], counts, [group.virtual_time for group in request_groups]


@pytest.mark.parametrize("policy", ["lockstep", "depth"])
def test_scheduling(policy: str) -> None:
    """Stage passes, rows, loop steps and the service of each request group are counted as with the steps one by one, in the same order."""
    got = scheduled(MODELS["default"], policy)
    with step_by_step():
        assert got == scheduled(MODELS["default"], policy)


def test_batches_exit_in_one_call() -> None:
    """`generate` removes rows from the loop in the kernel: once all cache levels are there, a token of all rows is one call a group."""
    model, rule = MODELS["one group"], exits.Acceleration(4.0)
    calls, run = [], FusedLoop.run

    def counted(self: FusedLoop, loop: LoopRows, *rest: Any) -> Any:
        calls.append(len(loop))
        return run(self, loop, *rest)

    prompts = [[i + 1, 2 * i + 1, 7] for i in range(6)]
    with mock.patch.object(FusedLoop, "run", counted):
        gen = twoscale.generate(model, prompts, 12, exit=rule, loops=LOOPS)
    steps = [[k for (k,) in row] for row in gen.steps]
    assert any(len(set(column)) > 1 for column in zip(*steps, strict=True)), "rows exit at different steps"
    alone = [twoscale.generate(model, [prompt], 12, exit=rule, loops=LOOPS) for prompt in prompts]
    assert [one.tokens[0] for one in alone] == gen.tokens and [one.steps[0] for one in alone] == gen.steps
    assert len(calls) <= len(steps[0]) + 3 * LOOPS, "each row may need a level for the first time at some of its steps"


def test_threads() -> None:
    """The number of threads does not change a bit."""
    model = loud(ModelConfig(vocab_size=64, block_size=16, n_layer=3, n_head=4, n_embd=128, groups=((0, 1),), mean_loops=4))
    params: list[dict[str, Any]] = [{"exit": exits.Acceleration(4.0), "loops": 6}] * 3
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(passes(model, [[1, 2, 3], [4], [5, 6]], params))
    finally:
        torch.set_num_threads(before)
    check_same(*results)
