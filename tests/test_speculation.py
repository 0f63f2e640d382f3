"""Speculation changes nothing: tokens, steps and logits are those of plain decoding to the bit, and so is the cache after any rejection."""

import dataclasses
import gc
import weakref
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file

import twoscale
from conftest import CommandLine, is_one_line
from models import LAYOUTS, loud, small_model
from twoscale import UserError, exits
from twoscale.config.dtypes import WEIGHT_DTYPES, WeightDtype
from twoscale.engine.adaptive import estimates_of
from twoscale.engine.cache import bytes_per_token
from twoscale.engine.engine import Engine
from twoscale.engine.kernels.base import NO_INTERRUPT
from twoscale.engine.kernels.library import c_library
from twoscale.engine.kernels.native_decode import Decoded, NativeSequence, SequenceSampling
from twoscale.engine.kernels.quantize import quantize
from twoscale.engine.request import Request, SamplingParams, loop_params
from twoscale.engine.scheduler import Scheduler, run_until_done
from twoscale.engine.speculation import Auto, Draft, Lookup, Speculation, SpeculationStats, Wavefront, parse_speculation
from twoscale.engine.speculator import look_up
from twoscale.exits import StepView
from twoscale.exits.rule import Numbers
from twoscale.model import LoopedGPT

pytestmark = pytest.mark.skipif(c_library() is None, reason="no C compiler on this machine: speculation is off")
GOLDEN = Path(__file__).parent / "golden"

ONE_GROUP: dict[str, dict[str, object]] = {
    "prelude, loop, coda": {"groups": ((1, 2),)},
    "loop alone": {"groups": ((0, 1, 2, 3, 4),), "norm": "branch", "group_norm": "step", "inject": "none", "start": "input"},
    "loop first": {"groups": ((0, 1),), "positions": "rotary", "mlp": "gated", "group_norm": "leave", "share_group_norm": True},
    "loop last, noise at every step": {"groups": ((3, 4),), "noise": "every_step"},
}
RULES = (
    None, exits.StepNorm(0.5), exits.Acceleration(1.0), exits.Acceleration(1.0, keep="previous"), exits.KL(0.05),
    exits.ArgmaxStable(hits=2), exits.RandomExit(3.0), exits.Fixed(3),
)  # fmt: skip


@cache
def model_of(layout: str, seed: int) -> LoopedGPT:
    """A small model; at a small scale its guesses are often right, at a large one seldom."""
    changes = LAYOUTS[layout] if layout in LAYOUTS else {"backprop_steps": None, **ONE_GROUP[layout]}
    return loud(dataclasses.replace(small_model(block_size=40), **changes), seed, scale=(0.02, 0.1)[seed % 2])


class Recorder:
    """The logits of every token of the requests of a scheduler, and the caches between its steps. Tokens that are decoded in one call (see
    test_single.py) show no logits, so each is a pass here."""

    def __init__(self, scheduler: Scheduler, requests: list[Request]) -> None:
        self.logits: list[list[torch.Tensor]] = [[] for _ in requests]
        self.caches: list[dict[int, list[torch.Tensor]]] = [{} for _ in requests]
        scheduler._decode_alone = lambda: False  # type: ignore[method-assign]
        for request in requests:
            scheduler.add(request)
            request.append = self._append(request)  # type: ignore[method-assign]
        while scheduler.step():
            for request, found in zip(requests, self.caches, strict=True):
                kept, speculator = request.cache, scheduler._speculators.get(request)
                drafting = speculator is not None and speculator.in_cycle  # drafts may have opened a level that the verification takes back
                if kept is not None and not request.in_prefill and kept.length == request.n_computed and not drafting:
                    found[kept.length] = [
                        store[: layer.n_levels, :, : kept.length].clone() for layer in kept.layers for store in (layer.keys, layer.values)
                    ]

    def _append(self, request: Request):  # type: ignore[no-untyped-def]
        def append(token: int, logits: torch.Tensor, steps: tuple[int, ...]) -> None:
            self.logits[request.prompt_index].append(logits.clone())
            Request.append(request, token, logits, steps)

        return append


def decode(model: LoopedGPT, prompts: list[list[int]], sampling: SamplingParams, speculate: Speculation, policy: str = "lockstep", **loop):  # type: ignore[no-untyped-def]
    """Requests decoded together, with what was recorded of them."""
    params = loop_params(model, **loop)
    requests = [Request(p, sampling, params, sample_index=i, prompt_index=i, speculate=speculate) for i, p in enumerate(prompts)]
    return requests, Recorder(Scheduler(model, policy, max_num_seqs=3, isolate_errors=False), requests)


def assert_equal(plain, speculative) -> int:  # type: ignore[no-untyped-def]
    """All results are equal to the bit, and so is the cache wherever both have stopped; returns at how many lengths it was compared."""
    compared = 0
    for i, (a, b) in enumerate(zip(plain[0], speculative[0], strict=True)):
        assert (a.tokens, a.steps, a.prompt_steps, a.finish_reason, a.logprobs) == (
            b.tokens,
            b.steps,
            b.prompt_steps,
            b.finish_reason,
            b.logprobs,
        )
        assert all(map(torch.equal, plain[1].logits[i], speculative[1].logits[i]))
        for length, stores in speculative[1].caches[i].items():
            wanted = plain[1].caches[i].get(length)
            if wanted is not None:
                assert all(map(torch.equal, stores, wanted)), f"the caches differ at length {length}"
                compared += 1
    return compared


def check_settings(data: st.DataObject) -> None:
    one_group = data.draw(st.booleans())
    model = model_of(data.draw(st.sampled_from(sorted(ONE_GROUP if one_group else LAYOUTS))), data.draw(st.integers(0, 3)))
    kinds = [
        st.builds(Draft, st.integers(1, 6), st.integers(1, 3)),
        st.builds(Lookup, st.integers(1, 3), st.integers(1, 6)),
        st.just(Auto()),
    ]
    if model.config.n_groups == 1:
        kinds.append(st.builds(Wavefront, st.integers(1, 4), st.integers(1, 5)))
    speculate = data.draw(st.one_of(kinds))
    new = data.draw(st.integers(1, 14))
    prompts = data.draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=41 - new), min_size=1, max_size=3))  # up to the limit
    sampling = SamplingParams(
        temperature=data.draw(st.sampled_from((0.0, 0.0, 0.3, 1.0))),
        top_k=data.draw(st.sampled_from((None, 3))),
        seed=data.draw(st.integers(0, 9)),
        max_new_tokens=new,
        stop_token_ids=data.draw(st.sampled_from((frozenset[int](), frozenset(range(0, 64, 9))))),
        logprobs=2,
    )
    loop = {
        "exit": data.draw(st.sampled_from(RULES)),
        "loops": data.draw(st.integers(1, 7)),
        "kv_dtype": data.draw(st.sampled_from(("auto", "bf16"))),
    }
    plain = decode(model, prompts, sampling, parse_speculation("off"), **loop)
    speculative = decode(model, prompts, sampling, speculate, data.draw(st.sampled_from(("lockstep", "depth"))), **loop)
    assert_equal(plain, speculative)
    for request in speculative[0]:
        did = request.speculation_stats
        assert 0 <= did.accepted <= did.drafted and did.rewound >= 0 and did.accepted < new


@given(st.data())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_changes_nothing(data: st.DataObject) -> None:
    """Any layout, rule, depth, sampling, stop token, batch and length: tokens, steps, logits and caches are plain decoding's to the bit."""
    check_settings(data)


@pytest.mark.long
@given(st.data())
@settings(max_examples=500, deadline=None)
def test_changes_nothing_in_500_settings(data: st.DataObject) -> None:
    """The same for 500 settings that are drawn anew in every run."""
    check_settings(data)


@pytest.mark.parametrize("speculate", [Draft(3, 1), Draft(5, 2), Lookup(1), Wavefront(2, 4)], ids=repr)
def test_rewinding(speculate: Speculation) -> None:
    """After every rejection the cache equals plain decoding's bit for bit, its levels included."""
    model = model_of("prelude, loop, coda", 1)
    sampling, loop = SamplingParams(0.9, max_new_tokens=30), {"exit": exits.RandomExit(4.0), "loops": 9}
    plain, speculative = (decode(model, [[1, 2, 1, 2, 1]], sampling, s, **loop) for s in (parse_speculation("off"), speculate))
    compared = assert_equal(plain, speculative)
    did = speculative[0][0].speculation_stats
    assert did.rewound > 5 and compared > 3


def test_memory() -> None:
    """Rejections take no more cache than the request at its full length and depth."""
    model = model_of("default", 1)
    params, sizes = loop_params(model, loops=6), set()
    scheduler, request = Scheduler(model), Request([1, 2, 3], SamplingParams(1.0, max_new_tokens=34), params, speculate=Draft(4, 1))
    scheduler.add(request)
    while scheduler.step():
        if request.cache is not None and request.tokens:
            sizes.add(request.cache.nbytes)
    assert sizes == {request.capacity * bytes_per_token(model.config, params)} and request.speculation_stats.rewound > 20


@pytest.mark.parametrize("speculate", ["draft:3", "lookup:2", "wavefront", "auto"])
@pytest.mark.parametrize(("folder", "loops"), [("huginn-tiny", 8), ("ouro-tiny", 4)])
def test_golden(folder: str, loops: int, speculate: str) -> None:
    """The published families' own greedy tokens come out of every kind of speculation."""
    model, expected = twoscale.load(GOLDEN / folder)[0], load_file(GOLDEN / folder / "expected.safetensors")
    if folder == "huginn-tiny":
        zero = LoopedGPT(dataclasses.replace(model.config, start="zeros"), seed=None)
        zero.load_state_dict(model.state_dict())
        model = zero.eval()
    want = expected["greedy_zero_state_8" if folder == "huginn-tiny" else "greedy"][0].tolist()
    gen = twoscale.generate(model, [want[:12]], len(want) - 12, loops=loops, speculate=speculate)
    assert gen.tokens[0] == want[12:] and gen.speculation.calls > 0


@pytest.mark.parametrize(
    ("layout", "dtype"), [*((layout, "fp32") for layout in (*LAYOUTS, *ONE_GROUP)), *(("default", d) for d in WEIGHT_DTYPES)]
)
def test_drafts_in_one_call(layout: str, dtype: WeightDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens that the kernel drafts are those of passes of one row with the same weights, and so is what is counted of them."""
    monkeypatch.setattr(Engine, "draft_decoder", property(lambda engine: engine.decoder))
    model, real, drafted = model_of(layout, 1), NativeSequence.decode, list[list[int]]()
    model = model if dtype == "fp32" else quantize(model, dtype)

    def decode(sequence: NativeSequence, *arguments: Any) -> Decoded:
        decoded = real(sequence, *arguments)
        if sequence.is_draft:
            drafted.append(decoded.tokens)
        return decoded

    for sampling in (SamplingParams(0.0, max_new_tokens=20), SamplingParams(0.9, top_k=7, top_p=0.9, max_new_tokens=20, seed=3)):
        results, counters = [], []
        for method in (decode, lambda *_: Decoded([], [])):
            monkeypatch.setattr(NativeSequence, "decode", method)
            request = Request(
                [1, 5, 2], dataclasses.replace(sampling, stop_token_ids=frozenset({4})), loop_params(model, loops=6), speculate=Draft(5)
            )
            scheduler = Scheduler(model, isolate_errors=False)
            run_until_done(scheduler, [request])
            results.append((request.tokens, request.speculation_stats, request.request_group.virtual_time))
            counters.append((scheduler.counters.stage_passes, scheduler.counters.rows, scheduler.engine.loop_steps))
        assert results[0] == results[1] and counters[0] == counters[1]
    assert any(drafted) == (model.config.noise == "start" and model.config.n_groups > 0)


def test_drafts_use_rounded_weights() -> None:
    """The drafts of a model in fp32 are decoded with its weights rounded to w8a8: one copy for all of its engines, until it changes or is
    gone. Other dtypes draft with their own weights."""
    model = loud(small_model())
    engine = Engine(model)
    decoder = engine.draft_decoder
    if engine.decoder is None or decoder is None:
        pytest.skip("the C kernels are not available")
    assert engine.decoder.head.panels.dtype == "fp32" and decoder.head.panels.dtype == "w8a8"
    assert Engine(model).draft_decoder is decoder
    tokens = [[3, 1, 4, 1, 5]]
    rounded = Engine(quantize(model, "w8a8"))
    caches = [e.new_cache(16, loop_params(model, loops=2)) for e in (engine, rounded)]
    for kv in caches:  # the same keys and values: those of the rounded model
        rounded.run([(0, kv, tokens[0])])
    sampling = SequenceSampling(0.0, 0, 1.0, ())
    found = [
        d.sequence(cache, sampling, is_draft=True).decode(9, [0.0] * 6, NO_INTERRUPT)  # type: ignore[union-attr]
        for d, cache in zip((decoder, rounded.decoder), caches, strict=True)
    ]
    assert found[0] == found[1] and len(found[0].tokens) == 6
    in_bf16 = Engine(quantize(model, "bf16"))
    assert in_bf16.draft_decoder is in_bf16.decoder
    with torch.no_grad():
        model.ln_f.weight.mul_(1.5)  # type: ignore[union-attr, operator]
    assert Engine(model).draft_decoder is not decoder
    gone = weakref.ref(decoder)
    del decoder, engine, model
    for _ in range(2):  # the entry is dropped with the model; what it held is then garbage in a cycle
        gc.collect()
    assert gone() is None


def test_lookup() -> None:
    """A lookup gives what followed the last occurrence of the last n tokens, at most as many tokens as asked for."""
    assert look_up([1, 2, 3, 4, 1, 2], 2, 5) == [3, 4, 1, 2]
    assert look_up([1, 2, 3, 1, 2, 4, 1, 2], 2, 1) == [4]
    assert look_up([7, 7, 7], 1, 4) == [7] and look_up([1, 2, 3], 1, 4) == [] and look_up([1, 2], 5, 4) == []


def test_right_guesses_save_calls() -> None:
    """Where drafting and full depth are the same, every guess is right and a verification of m + 1 rows gives m + 1 tokens."""
    model = quantize(model_of("default", 0), "int8")
    gen = twoscale.generate(model, [[1, 2, 3]], 13, loops=2, speculate=Draft(3, 2))
    assert gen.speculation == SpeculationStats(drafted=9, accepted=9, rewound=0, calls=12 * 6)


@dataclasses.dataclass(frozen=True)
class Failing(exits.Rule):
    """A rule that cannot be asked about positions from `position` on."""

    position: int = 0

    def measure(self, view: StepView) -> Numbers:
        if int(view.rows.positions.max()) >= self.position:
            raise ValueError("no such position")
        return 0.0

    def passes(self, value: Numbers) -> bool:
        return False


def test_a_failure_ahead_is_none() -> None:
    """A rule that fails on a position which plain decoding never reaches does not fail the request."""
    model, sampling = model_of("prelude, loop, coda", 0), SamplingParams(max_new_tokens=12)
    plain = twoscale.generate(model, [[1, 2, 3]], 12, loops=4)
    stop = frozenset(plain.tokens[0][5:6])
    n = plain.tokens[0].index(next(iter(stop))) + 1
    for speculate in (Draft(6, 3), Wavefront(1, 4)):
        loop = {"exit": Failing(position=3 + n - 1), "loops": 4}
        requests, _ = decode(model, [[1, 2, 3]], dataclasses.replace(sampling, stop_token_ids=stop), speculate, **loop)
        assert requests[0].tokens == plain.tokens[0][:n]


@pytest.mark.parametrize(
    ("speculate", "changes", "word"),
    [
        ("draft:0", {}, "at least 1"),
        ("lookup:0", {}, "at least 1"),
        ("draft", {}, "choose off, auto, wavefront"),
        ("draft:-1", {}, "choose off, auto, wavefront"),
        ("beam", {}, "choose off, auto, wavefront"),
        (3, {}, "choose off, auto, wavefront"),
        ("draft:40", {}, "the context has 40 tokens"),
        ("lookup:40", {}, "the context has 40 tokens"),
        ("draft:2", {"kv": "last"}, "kv=exact"),
        ("lookup:2", {"kv": "ring:2"}, "kv=exact"),
        ("draft:2", {"exit": exits.KL(0.05, read="coda")}, "read=coda"),
        ("wavefront", {}, "one loop group, this one has 2"),
    ],
    ids=str,
)
def test_bad_input(speculate: str, changes: dict[str, object], word: str) -> None:
    """What cannot be exact, or makes no sense, is refused in one line; `auto` is off instead."""
    model = model_of("default", 0)
    with pytest.raises(UserError, match=word) as error:
        twoscale.generate(model, [[1, 2, 3]], 4, loops=3, speculate=speculate, **changes)
    assert "\n" not in str(error.value)
    if changes:
        plain, auto = (twoscale.generate(model, [[1, 2, 3]], 4, loops=3, speculate=s, **changes) for s in ("off", "auto"))
        assert plain.tokens == auto.tokens and auto.speculation == SpeculationStats()


def test_auto_leaves_rows_to_others() -> None:
    """While another request is running, `auto` makes no guesses; alone it does."""
    model = model_of("prelude, loop, coda", 0)
    params, sampling = loop_params(model, loops=7), SamplingParams(max_new_tokens=30)
    estimates_of(model, Request([1], sampling, params)).baseline_seconds = 1.0
    for n, guessed in ((2, False), (1, True)):
        requests = [Request([1, 2, i + 1], sampling, params, prompt_index=i, speculate=Auto()) for i in range(n)]
        Recorder(Scheduler(model, isolate_errors=False), requests)
        assert all(bool(request.speculation_stats.drafted) == guessed for request in requests)


def test_without_c_kernels() -> None:
    """On kernels whose rows are not exact to the bit speculation is off, with a word."""
    model = model_of("default", 0)
    with pytest.warns(UserWarning, match=r"draft:3 is off"):
        gen = twoscale.generate(model, [[1, 2, 3]], 6, loops=3, speculate="draft:3", kernels="torch")
    assert gen.speculation == SpeculationStats()


def test_command_line(trained: Path, cli: CommandLine) -> None:
    """`--speculate` gives the same text, and says how many guesses were right; a bad value is one line and exit code 2."""
    ask = ("generate", trained, "the loop turns", "--max-new-tokens", 20, "--temperature", 0)
    (_, plain, _), (code, text, err) = cli(*ask), cli(*ask, "--speculate", "draft:3")
    assert code == 0 and text == plain and "guesses right" in err
    code, _, err = cli(*ask, "--speculate", "draft:0")
    assert code == 2 and is_one_line(err) and "at least 1" in err
