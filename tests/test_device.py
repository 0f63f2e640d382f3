"""The path that GPUs take: torch's kernels, on the CPU here and on a GPU where there is one (`make test-gpu`)."""

import dataclasses

import pytest
import torch

import twoscale
from models import LAYOUTS, loud, small_model
from scheduling import RULES
from twoscale import exits
from twoscale.engine import Engine, Scheduler, loop_params
from twoscale.engine.kernels import InferenceCopy, TorchKernels
from twoscale.engine.request import Request, SamplingParams

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    return str(request.param)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("layout", ["default", "rotary, grouped queries"])
def test_generate(device: str, layout: str) -> None:
    """Ragged prompts decode on the device to the tokens and steps that they have on the CPU."""
    model = loud(dataclasses.replace(small_model(block_size=64), **LAYOUTS[layout]), 0, scale=0.1)
    prompts = [[1, 2, 3], [4], [5] * 9, [7, 8]]
    want = twoscale.generate(model, prompts, 10, exit=exits.Fixed(3), loops=6)
    got = twoscale.generate(model.to(device), prompts, 10, exit=exits.Fixed(3), loops=6, kernels="torch")
    assert got.tokens == want.tokens and got.steps == want.steps


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_forward(device: str) -> None:
    """A pass with exits on the device gives the CPU's logits and steps, up to rounding."""
    model = loud(small_model(), scale=0.1)
    want = twoscale.forward(model, [[1, 2, 3, 4], [5]], exit=exits.RandomExit(3.0), loops=6)
    got = twoscale.forward(model.to(device), [[1, 2, 3, 4], [5]], exit=exits.RandomExit(3.0), loops=6)
    assert torch.equal(got.steps.cpu(), want.steps) and torch.allclose(got.logits.cpu(), want.logits, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_scheduler(device: str) -> None:
    """Requests with different rules share stage passes on the device too."""
    model = loud(small_model(block_size=64), scale=0.1).to(device)
    scheduler = Scheduler(model, kernels="torch")
    requests = [
        Request([1 + i, 2, 3], SamplingParams(max_new_tokens=5), loop_params(model, exit=rule, loops=5)) for i, rule in enumerate(RULES)
    ]
    for request in requests:
        scheduler.add(request)
    while scheduler.step():
        pass
    assert [len(request.tokens) for request in requests] == [5] * len(requests)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reserved_bytes(dtype: torch.dtype) -> None:
    """The scheduler reserves the bytes that a request's cache takes at its full length, in any precision."""
    model = loud(small_model(block_size=64), scale=0.1).to(dtype)
    scheduler = Scheduler(model, kernels="torch")
    request = Request([1, 2, 3], SamplingParams(max_new_tokens=5), loop_params(model, loops=3, kv="last"))
    scheduler.add(request)
    scheduler.step()
    assert request.cache is not None and scheduler.reserved_bytes == request.cache.nbytes > 0


def test_batched_attention() -> None:
    """One attention call for the sequences of a slab gives what one call a sequence gives, at any depths and lengths."""
    model = loud(small_model(block_size=64, positions="rotary", n_kv_head=2), 0, scale=0.1)
    params = loop_params(model, exit=exits.Acceleration(1.0, normalize="steps"), loops=5)

    def states(batch_attention: bool) -> torch.Tensor:
        engine = Engine(model, inference_copy=InferenceCopy(model, TorchKernels(batch_attention)))
        caches, found = [engine.new_cache(20, params) for _ in range(5)], []
        engine.run([(b, cache, list(range(1, 3 + 3 * b))) for b, cache in enumerate(caches)])
        for token in (5, 9, 2):
            found.append(engine.run([(b, cache, [token + b]) for b, cache in enumerate(caches)])[0])
        return torch.cat(found)

    assert torch.allclose(states(True), states(False), atol=1e-5)


def test_slots_are_used_again() -> None:
    """A sequence that has ended gives its memory back, and the next one finds nothing of it, not even NaN."""
    model = loud(small_model(), scale=0.1)
    params, engine = loop_params(model, loops=3), Engine(model, inference_copy=InferenceCopy(model, TorchKernels()))
    kernels = engine.kernels
    assert isinstance(kernels, TorchKernels)

    def states() -> torch.Tensor:
        caches = [engine.new_cache(12, params) for _ in range(3)]
        engine.run([(0, cache, [1, 2, 3][: i + 1]) for i, cache in enumerate(caches)])
        x, _ = engine.run([(0, cache, [7]) for cache in caches])
        for slabs in kernels.slots.slabs.values():
            for slab in slabs:
                slab.keys.fill_(torch.nan)
                slab.values.fill_(torch.nan)
        return x

    first = states()
    assert all(len(slab.free) == len(slab.keys) for slabs in kernels.slots.slabs.values() for slab in slabs)
    assert torch.allclose(first, states(), atol=1e-5)
    longer = engine.new_cache(40, params)
    engine.run([(0, longer, [1, 2, 3])])
    assert all(len(slab.free) < len(slab.keys) for slabs in kernels.slots.slabs.values() for slab in slabs), "unused slabs are dropped"
