"""Weights that change between two calls: the inference copy sees every change, however it was made."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

import twoscale
from conftest import small_model
from models import loud
from twoscale.engine import Engine, Request, SamplingParams, Scheduler, loop_params
from twoscale.engine.kernels import fingerprint as fingerprints, inference_copy
from twoscale.engine.kernels.library import c_library
from twoscale.model import LoopedGPT


def fused_adamw(model: LoopedGPT) -> None:
    """What the Trainer of transformers does by default."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2, 3, 4, 5]])).backward()
    optimizer.step()


def data_in_place(model: LoopedGPT) -> None:
    for p in model.parameters():
        p.data.mul_(-1.3)


def numpy_view(model: LoopedGPT) -> None:
    for p in model.parameters():
        p.detach().numpy()[...] *= -1.3


def other_data(model: LoopedGPT) -> None:
    for p in model.parameters():
        p.data = p.detach() * -1.3


def one_entry(model: LoopedGPT) -> None:
    list(model.parameters())[-2].data.view(-1)[-1] += 30.0


CHANGES = [fused_adamw, data_in_place, numpy_view, other_data, one_entry]


def wide_model() -> LoopedGPT:
    """Wide enough that packing pays."""
    model = LoopedGPT(small_model(n_embd=512, n_head=8, n_layer=2, groups=((1,),)), seed=None)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.03)
    return model.eval()


def states(model: LoopedGPT, kernels: str) -> torch.Tensor:
    engine = Engine(model, kernels=kernels)
    cache = engine.new_cache(9, loop_params(model, loops=3))
    return torch.cat([engine.run([(0, cache, ids)])[0] for ids in ([1, 2, 3], [4], [5])])


def same_as_fresh(model: LoopedGPT, kernels: str) -> bool:
    """Whether a model decodes, to the bit, as a new one with the same weights does."""
    fresh = LoopedGPT(model.config, seed=None)
    fresh.load_state_dict(model.state_dict())
    return torch.equal(states(model, kernels), states(fresh, kernels))


@pytest.mark.parametrize("kernels", ["auto", "packed", "torch"])
def test_weights_that_change(kernels: str) -> None:
    """Decoding uses the weights as they are at the call, however they were changed since the last one."""
    stale = []
    for change in CHANGES:
        model = wide_model()
        states(model, kernels)
        change(model)
        if not same_as_fresh(model, kernels):
            stale.append(change.__name__)
    assert stale == []


@pytest.mark.parametrize("kernels", ["auto", "packed", "torch"])
def test_inference_mode_weights_that_change(kernels: str) -> None:
    """The same for a model that was made in inference mode, whose parameters have no version counter."""
    with torch.inference_mode():
        model = wide_model()
        states(model, kernels)
        for p in model.parameters():
            p.mul_(-1.3)
        assert same_as_fresh(model, kernels)


def test_weights_that_change_under_transformers() -> None:
    """A model under transformers generates with its new weights after a step of the fused optimizer."""
    from twoscale.config.serial import to_dict
    from twoscale.interop.hf import TwoscaleConfig, TwoscaleForCausalLM

    config = TwoscaleConfig(twoscale=to_dict(small_model()))
    wrapped, fresh = TwoscaleForCausalLM(config), TwoscaleForCausalLM(config)
    wrapped.model.load_state_dict(loud(small_model(), scale=0.1).state_dict())

    def logits(model: TwoscaleForCausalLM) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([[1, 2, 3, 4]]), use_cache=True, loops=3).logits

    before = logits(wrapped)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01, fused=True)
    wrapped(torch.tensor([[1, 2, 3, 4]]), labels=torch.tensor([[1, 2, 3, 4]])).loss.backward()
    optimizer.step()
    fresh.load_state_dict(wrapped.state_dict())
    assert torch.equal(logits(wrapped), logits(fresh)) and not torch.equal(logits(wrapped), before)


def changed(data: st.DataObject, weight: torch.Tensor) -> None:
    """Change fp32 weights, given as int32: a bit of one entry, the signs of one or two, swap two, or change two such that the sum stays."""
    bits = weight.view(-1)
    i, j = data.draw(st.lists(st.integers(0, len(bits) - 1), min_size=2, max_size=2, unique=True))
    match data.draw(st.sampled_from(["bit", "sign", "two signs", "swap", "sum"])):
        case "bit":
            bits[i] ^= 1 << data.draw(st.integers(0, 30))
        case "sign":
            bits[i] ^= -(1 << 31)
        case "two signs":
            bits[i] ^= -(1 << 31)
            bits[j] ^= -(1 << 31)
        case "swap":
            bits[i], bits[j] = int(bits[j]), int(bits[i])
        case "sum":
            step = data.draw(st.integers(1, 1000))
            bits[i] += step
            bits[j] -= step


@pytest.mark.parametrize("with_library", [True, False])
def test_fingerprint(with_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of one entry or two of any weight changes the fingerprint; taken back, it is the old one, for any number of threads."""
    if with_library and c_library() is None:
        pytest.skip("no C compiler on this machine")
    if not with_library:
        monkeypatch.setattr(fingerprints, "c_library", lambda: None)
    model = loud(small_model(n_embd=36, n_head=3, mlp_hidden=50, block_size=4000))  # wpe is more than one piece of 2^18 bytes
    weights, want = dict(model.named_parameters()), fingerprints.fingerprint(model)

    @given(st.data())
    @settings(max_examples=200, deadline=None, derandomize=True)
    def check(data: st.DataObject) -> None:
        bits = weights[data.draw(st.sampled_from(sorted(weights)))].detach().view(torch.int32)
        torch.set_num_threads(data.draw(st.integers(1, 3)))
        before = bits.clone()
        try:
            changed(data, bits)
            assert (fingerprints.fingerprint(model) == want) == torch.equal(bits, before)
        finally:
            bits.copy_(before)
        assert fingerprints.fingerprint(model) == want

    check()


@pytest.mark.parametrize("kernels", ["auto", "packed"])
def test_engine_owns_its_weights(kernels: str) -> None:
    """An engine decodes with the weights as they were when it was made, to the bit, though they change or are freed meanwhile."""
    model = wide_model()
    want = states(model, kernels)
    engine = Engine(model, kernels=kernels)
    cache = engine.new_cache(9, loop_params(model, loops=3))
    found = [engine.run([(0, cache, [1, 2, 3])])[0]]
    numpy_view(model)
    found.append(engine.run([(0, cache, [4])])[0])
    other_data(model)
    found.append(engine.run([(0, cache, [5])])[0])
    assert torch.equal(torch.cat(found), want)


def test_scheduler_reads_the_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler serves the weights as they were when it was made; requests do not read all weights again."""
    model = loud(small_model(), scale=0.1)
    want = twoscale.generate(model, [[1, 2, 3]], 6, loops=3).tokens[0]
    scheduler, reads = Scheduler(model), []
    monkeypatch.setattr(inference_copy, "fingerprint", lambda model: reads.append(model))
    data_in_place(model)
    for seed in (0, 0, 1):
        request = Request([1, 2, 3], SamplingParams(max_new_tokens=6), loop_params(model, loops=3, seed=seed))
        scheduler.add(request)
        while scheduler.step():
            pass
        assert request.tokens == want or seed
    assert reads == []
