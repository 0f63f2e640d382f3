"""A request that is alone is decoded several tokens at a time in one C call; tokens, steps, cache and counters are those of passes."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

import twoscale
from models import LAYOUTS, loud, small_model
from random_rules import LOOPS, rules
from twoscale import UserError, exits
from twoscale.engine import Request, SamplingParams, Scheduler, loop_params
from twoscale.engine.adaptive import MAX_BACKOFF, Chooser
from twoscale.engine.cache import LayerCache
from twoscale.engine.engine import Engine
from twoscale.engine.kernels.base import Interrupt
from twoscale.engine.kernels.library import c_library
from twoscale.engine.kernels.native_decode import NativeDecoder, NativeSequence
from twoscale.engine.kernels.quantize import quantize
from twoscale.engine.sample import sequence_sampling
from twoscale.engine.single import SingleRequest
from twoscale.engine.speculation import Auto, Draft, Lookup
from twoscale.model import LoopedGPT

pytestmark = pytest.mark.skipif(c_library() is None, reason="there are no C kernels")
MODELS = {name: loud(small_model(block_size=40, **changes)) for name, changes in LAYOUTS.items()}


@contextmanager
def by_passes() -> Iterator[None]:
    """Every token is a pass."""
    with mock.patch.object(NativeDecoder, "of", staticmethod(lambda engine: None)):
        yield


def decoded(model: LoopedGPT, prompt: list[int], sampling: SamplingParams, **how: Any) -> tuple[Any, ...]:
    """The request, the counters and the cache, of which the last step leaves a copy."""
    speculate = how.pop("speculate", None)
    request = Request(prompt, sampling, loop_params(model, **how), **({} if speculate is None else {"speculate": speculate}))
    scheduler, caches = Scheduler(model, isolate_errors=False), []
    finish = scheduler._finish

    def keep_cache(request: Request, *arguments: Any) -> None:
        assert request.cache is not None
        layers = [(layer, request.cache.length) for layer in request.cache.layers]
        caches.extend(store[: layer.n_levels, :, :n].clone() for layer, n in layers for store in (layer.keys, layer.values))
        finish(request, *arguments)

    with mock.patch.object(scheduler, "_finish", keep_cache):
        scheduler.add(request)
        while scheduler.step():
            pass
    c = scheduler.counters
    counted = c.tokens, c.processed_tokens, c.stage_passes, c.rows, c.loop_steps, request.request_group.virtual_time
    return (request.tokens, request.steps, request.finish_reason, request.n_computed, counted, request.speculation_stats), caches


def check_same(got: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    assert got[0] == wanted[0]
    for a, b in zip(got[1], wanted[1], strict=True):
        assert a.shape == b.shape and torch.equal(a, b)


def setting(data: st.DataObject) -> tuple[LoopedGPT, list[int], SamplingParams, dict[str, Any]]:
    """A model, a prompt and parameters."""
    model = MODELS[data.draw(st.sampled_from(sorted(MODELS)))]
    groups = model.config.n_groups
    by_group = {g: data.draw(rules()) for g in range(groups)}
    rule = {g: r for g, r in by_group.items() if r is not None}
    if model.config.n_embd != 32:
        assume(not any(isinstance(r, exits.Learned) and len(r.heads[0]) > 7 for r in rule.values()))
    loops = [data.draw(st.integers(1, LOOPS)) for _ in range(groups)]
    how = {"exit": rule, "loops": loops, "seed": data.draw(st.integers(0, 1)), "kv_dtype": data.draw(st.sampled_from(["auto", "bf16"]))}
    prompt = data.draw(st.lists(st.integers(0, 63), min_size=1, max_size=9))
    sampling = SamplingParams(
        data.draw(st.sampled_from([0.0, 0.9, 3.0])), data.draw(st.sampled_from([None, 7])), data.draw(st.sampled_from([None, 0.9])),
        data.draw(st.integers(0, 3)), data.draw(st.integers(1, 41 - len(prompt))),
        frozenset(data.draw(st.lists(st.integers(0, 63), max_size=3))),
    )  # fmt: skip
    return model, prompt, sampling, how


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_layout_and_rule(data: st.DataObject) -> None:
    """Tokens, steps, cache and counted work are those of passes, for any layout, rules, kv, sampling and stop tokens."""
    model, prompt, sampling, how = setting(data)
    how["kv"] = data.draw(st.sampled_from(["exact", "exact", "last", "ring:2"]))
    got = decoded(model, prompt, sampling, **how)
    with by_passes():
        check_same(got, decoded(model, prompt, sampling, **how))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(data=st.data())
def test_speculation_in_two_calls(data: st.DataObject) -> None:
    """A cycle of one call for the drafts and one for the verification is equal to passes, cache, guesses and counted work included, and
    tokens and steps are those of decoding without guesses."""
    model, prompt, sampling, how = setting(data)
    steps = data.draw(st.integers(1, 3))
    speculate = data.draw(
        st.sampled_from([Draft(1, steps), Draft(4, steps), Draft(15, steps), Draft(17, steps), Lookup(1, 4), Lookup(2, 15)])
    )
    assume(not isinstance(speculate, Draft) or model.config.n_groups > 0)
    rounded = decoded(model, prompt, sampling, speculate=speculate, **how)  # drafts with the weights that they have by default
    with mock.patch.object(Engine, "draft_decoder", property(lambda engine: engine.decoder)):
        got = decoded(model, prompt, sampling, speculate=speculate, **how)
    with by_passes():
        check_same(got, decoded(model, prompt, sampling, speculate=speculate, **how))
        plain = decoded(model, prompt, sampling, **how)
    for found in (got, rounded):
        assert found[0][:3] == plain[0][:3]
        for a, b in zip(found[1], plain[1], strict=True):
            assert a.shape == b.shape and torch.equal(a, b)


def test_verifications_are_calls() -> None:
    """A verification of at most 16 rows is one call of the kernel, with and without a rule."""
    model, calls, real = MODELS["default"], list[int](), NativeSequence.verify

    def count(sequence: NativeSequence, tokens: list[int], uniform: list[float], interrupt: Interrupt) -> Any:
        found = real(sequence, tokens, uniform, interrupt)
        calls.append(len(tokens) if found is not None else 0)
        return found

    with mock.patch.object(NativeSequence, "verify", count):
        for rule in (None, exits.Acceleration(0.9)):
            calls.clear()
            twoscale.generate(model, [[1, 2]], 36, loops=5, exit=rule, speculate="draft:15")
            assert calls and max(calls) == 16


@pytest.mark.parametrize("dtype", ["bf16", "int8", "w8a8"])
def test_other_weights(dtype: Any) -> None:
    """Weights in fewer bits too."""
    model = quantize(MODELS["default"], dtype)
    how = {"exit": exits.Acceleration(0.9), "loops": 6}
    got = decoded(model, [3, 1], SamplingParams(0.8, max_new_tokens=30), **how)
    with by_passes():
        check_same(got, decoded(model, [3, 1], SamplingParams(0.8, max_new_tokens=30), **how))


def test_it_is_used() -> None:
    """A request that is alone has several tokens a call; beside another one, or with log-probabilities, every token is a pass."""
    model, calls = MODELS["default"], list[int]()
    real = NativeSequence.decode

    def count(sequence: NativeSequence, token: int, uniform: list[float], interrupt: Interrupt) -> Any:
        found = real(sequence, token, uniform, interrupt)
        calls.append(len(found.tokens))
        return found

    with mock.patch.object(NativeSequence, "decode", count):
        twoscale.generate(model, [[1, 2]], 30, loops=3)
        assert sum(calls) == 29 and len(calls) < 15
        calls.clear()
        twoscale.generate(model, [[1, 2]], 8, loops=3, logprobs=2)
        twoscale.generate(model, [[1, 2], [3]], 8, loops=3)
        assert not calls


def test_rules_without_a_condition() -> None:
    """A rule that is not implemented in C decodes by passes."""
    model = MODELS["default"]
    params = loop_params(model, exit=exits.RandomExit(3.0), loops=5)
    engine = Engine(model)
    assert engine.decoder is not None
    assert engine.decoder.sequence(engine.new_cache(8, params), sequence_sampling(SamplingParams(), 64)) is None
    got = decoded(model, [1, 2], SamplingParams(max_new_tokens=9), exit=exits.RandomExit(3.0), loops=5)
    with by_passes():
        check_same(got, decoded(model, [1, 2], SamplingParams(max_new_tokens=9), exit=exits.RandomExit(3.0), loops=5))


def test_callbacks_and_stop_strings() -> None:
    """A callback sees one token at a time; after a stop string nothing more is computed."""
    model, seen = MODELS["default"], list[int]()
    request = Request([1, 2], SamplingParams(max_new_tokens=30, stop=("x",)), loop_params(model, loops=3))

    def on_token(request: Request) -> None:
        seen.append(len(request.tokens))
        if len(request.tokens) == 11:
            request.finish_reason = "stop"

    request.on_token = on_token
    scheduler = Scheduler(model, isolate_errors=False)
    scheduler.add(request)
    while scheduler.step():
        pass
    assert seen[:11] == list(range(1, 12)) and len(request.tokens) == 11
    assert scheduler.engine.loop_steps == [3 * (2 + 10)] * model.config.n_groups


def test_an_arrival_ends_the_call() -> None:
    """A request that arrives while a call runs ends it after one loop step, and both are then decoded in batches with the same results."""
    model = MODELS["default"]
    first, second = (Request([1, b], SamplingParams(max_new_tokens=30), loop_params(model, loops=4)) for b in (2, 3))
    alone = [twoscale.generate(model, [r.prompt], 30, loops=4).tokens[0] for r in (first, second)]
    scheduler, real, lengths = Scheduler(model, isolate_errors=False), NativeSequence.decode, list[int]()

    def arrive(sequence: NativeSequence, token: int, uniform: list[float], interrupt: Interrupt) -> Any:
        if len(uniform) > 1 and second not in (*scheduler.running, *scheduler.waiting) and not second.finish_reason:
            scheduler.add(second)
            found = real(sequence, token, uniform, interrupt)
            lengths.append(len(found.tokens))
            return found
        return real(sequence, token, uniform, interrupt)

    with mock.patch.object(NativeSequence, "decode", arrive):
        scheduler.add(first)
        while scheduler.step():
            pass
    assert lengths == [0] and [first.tokens, second.tokens] == alone


@pytest.mark.parametrize("logprobs", [None, 1])
def test_only_skipped_cycles_are_given_back(logprobs: int | None) -> None:
    """What `auto` is told did not happen are cycles that it had skipped, also where every token is a pass."""
    model, left, real = MODELS["default"], list[int](), Chooser.unskip

    def unskip(chooser: Chooser, n: int) -> None:
        assert n >= 0
        real(chooser, n)
        left.append(chooser._backoff_left)

    with mock.patch.object(Chooser, "unskip", unskip):
        twoscale.generate(model, [[1, 2]], 36, loops=5, temperature=0.5, speculate="auto", logprobs=logprobs)
    assert left and all(0 <= n <= MAX_BACKOFF for n in left)


def test_a_callback_that_ends_the_request() -> None:
    """A callback may end a request in the middle of a call: what comes after it is neither kept nor counted."""
    model, results = MODELS["default"], []
    for passes in (False, True):
        request = Request([1, 2], SamplingParams(max_new_tokens=30), loop_params(model, loops=3))

        def on_token(request: Request) -> None:
            if len(request.tokens) == 11:
                request.finish_reason = "stop"

        request.on_token = on_token
        with by_passes() if passes else nullcontext():
            scheduler = Scheduler(model, isolate_errors=False)
            scheduler.add(request)
            while scheduler.step():
                pass
        c = scheduler.counters
        results.append((request.tokens, c.rows, c.stage_passes, c.loop_steps, request.n_computed, request.request_group.virtual_time))
    assert results[0] == results[1] and len(results[0][0]) == 11


def test_a_draft_that_gets_no_memory() -> None:
    """A draft that cannot get a deeper level is given up for good: the request goes on without guesses, with the same tokens and cache."""
    model, real = MODELS["default"], LayerCache._check_memory
    how: dict[str, Any] = {"exit": exits.Fixed(2), "loops": 4}
    sampling = SamplingParams(max_new_tokens=24)
    plain = decoded(model, [1, 2, 3], sampling, **how)

    def check(layer: LayerCache, levels: int) -> None:
        if levels > 2:
            raise UserError("no memory")
        real(layer, levels)

    with mock.patch.object(LayerCache, "_check_memory", check):
        got = decoded(model, [1, 2, 3], sampling, speculate=Draft(4, 3), **how)
    assert got[0][:3] == plain[0][:3]
    for a, b in zip(got[1], plain[1], strict=True):
        assert a.shape == b.shape and torch.equal(a, b)


def test_weights_that_are_not_finite() -> None:
    """Logits that are not finite end the request with the error of a pass."""
    model = LoopedGPT(dataclasses.replace(MODELS["default"].config), seed=1).eval()
    with torch.no_grad():
        model.ln_f.weight[3] = float("nan")  # type: ignore[union-attr]
    with pytest.raises(UserError, match="not finite"):
        twoscale.generate(model, [[1, 2]], 8, loops=2)


@pytest.mark.parametrize("speculate", [Auto(), Lookup(9)])
def test_cycles_without_guesses(speculate: Any) -> None:
    """Speculation that does not guess decodes by the same calls: same tokens, and the stage passes are counted."""
    model = MODELS["default"]
    plain = decoded(model, [1, 2], SamplingParams(3.0, max_new_tokens=30), loops=3)
    used, real = list[int](), SingleRequest.decode

    def count(single: SingleRequest, interrupt: Interrupt) -> Any:
        found = real(single, interrupt)
        used.append(0 if found.together else len(found.tokens))
        return found

    with mock.patch.object(SingleRequest, "decode", count):
        got = decoded(model, [1, 2], SamplingParams(3.0, max_new_tokens=30), loops=3, speculate=speculate)
    assert got[0][0] == plain[0][0] and got[0][1] == plain[0][1] and sum(used) > 0
