"""Weights in bf16 and int8: the formats, their kernels, and models that have them."""

import copy
import dataclasses
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import twoscale
from models import LAYOUTS, loud, small_model
from twoscale import exits
from twoscale.config.dtypes import WEIGHT_DTYPES, WeightDtype
from twoscale.engine import Scheduler, loop_params
from twoscale.engine.kernels import optimize_for_inference
from twoscale.engine.kernels.library import c_library, empty_floats, pointer
from twoscale.engine.kernels.native import NativeEmbedding, NativeLinear
from twoscale.engine.kernels.panels import Panels, to_panels
from twoscale.engine.kernels.quantize import matrices_of, quantize
from twoscale.engine.request import Request, SamplingParams
from twoscale.geometry.spectrum import loop_spectral_radius
from twoscale.model import LoopedGPT
from twoscale.model.quantized import SCALE_BLOCK, QuantizedEmbedding, QuantizedLinear, quantize_matrix

needs_kernel = pytest.mark.skipif(c_library() is None, reason="no C compiler")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product(x: Tensor, w: Panels) -> Tensor:
    n, (O, I) = len(x), w.shape  # noqa: E741
    y = empty_floats(n * O).fill_(torch.nan).view(n, O)
    c_library().linear(1, n, w.address, pointer(x, n * I), pointer(y, n * O))
    return y


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 600), st.integers(0, 10**6), st.sampled_from([1e-30, 1e-3, 1.0, 1e20]))
def test_rounding(outputs: int, inputs: int, seed: int, size: float) -> None:
    """An int8 weight is an integer of at most 127 times its scale, and lies within half a scale of the weight; the largest one of a
    group is 127 scales."""
    w = normal(outputs, inputs, seed=seed) * size
    matrix = quantize_matrix(w, "int8")
    assert matrix.scales is not None and int(matrix.values.abs().max()) == 127
    scales = matrix.scales.repeat_interleave(SCALE_BLOCK, dim=1)[:, :inputs].double()
    assert bool(((matrix.values.double() * scales - w.double()).abs() <= 0.5001 * scales).all())
    for values in matrix.values.split(SCALE_BLOCK, dim=1):
        assert bool((values.abs().amax(dim=1) == 127).all())


def test_extreme_weights() -> None:
    """Zeros stay zeros, and NaN or infinity in a group of weights or inputs shows in the result."""
    w = normal(4, 300)
    w[0], w[1, 3], w[2, 299] = 0, torch.nan, torch.inf
    for dtype in WEIGHT_DTYPES:
        y = QuantizedLinear(quantize_matrix(w, dtype), dtype)(normal(2, 300, seed=1))
        assert bool((y[:, 0] == 0).all()) and not y[:, 1:3].isfinite().any() and y[:, 3].isfinite().all(), dtype


@needs_kernel
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
@pytest.mark.parametrize("outputs, inputs", [(5, 3), (83, 291), (64, 256), (33, 1000), (17, 512)])
def test_kernels(dtype: WeightDtype, outputs: int, inputs: int) -> None:
    """A C kernel computes what torch's operators do, to the bit with w8a8, whose sums are exact; a row's bits do not depend on how many
    rows there are; zeros, NaN and infinity stay what they are."""
    matrix = quantize_matrix(normal(outputs, inputs), dtype)
    w, x = to_panels(matrix, dtype), normal(32, inputs, seed=1)
    x[3], x[5, -1], x[6, 0] = 0, torch.nan, -torch.inf
    want, each = QuantizedLinear(matrix, dtype)(x), torch.cat([product(row, w) for row in x.split(1)])
    assert bool((each[3] == 0).all()) and not each[5:7].isfinite().any()
    assert torch.allclose(each, want, rtol=1e-4, atol=1e-4, equal_nan=True)
    if dtype == "w8a8":
        assert torch.equal(each.nan_to_num(), want.nan_to_num())
    for n in (2, 3, 4, 5, 6, 7, 8, 13, 32):
        assert product(x[:n].contiguous(), w).nan_to_num().equal(each[:n].nan_to_num()), n


@needs_kernel
def test_many_rows_of_many_inputs() -> None:
    """With w8a8 more rows than fit the kernel's buffer of integers are computed in parts, to the same bits."""
    matrix = quantize_matrix(normal(48, 40_000), "w8a8")
    w, x = to_panels(matrix, "w8a8"), normal(120, 40_000, seed=1)
    whole = product(x, w)
    assert torch.equal(whole, QuantizedLinear(matrix, "w8a8")(x)) and torch.equal(whole[110:111], product(x[110:111].contiguous(), w))


@needs_kernel
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_rows_of_panels(dtype: WeightDtype) -> None:
    """An embedding in panels gives the rows of the matrix, to the bit."""
    matrix, ids = quantize_matrix(normal(50, 301), dtype), torch.tensor([[0, 49], [15, 16]])
    assert torch.equal(to_panels(matrix, dtype).rows(ids.flatten()).view(2, 2, -1), QuantizedEmbedding(matrix)(ids))


# -- models ------------------------------------------------------------------------------------------------------------------------------

CONFIGS = {
    "learned positions, tied": small_model(block_size=64),
    "rotary, gated, untied": dataclasses.replace(small_model(block_size=64), **LAYOUTS["rotary, grouped queries"], tie_head=False),
}


@pytest.mark.parametrize("dtype", WEIGHT_DTYPES[1:])
@pytest.mark.parametrize("layout", CONFIGS)
def test_quantized_model(dtype: WeightDtype, layout: str) -> None:
    """A quantised model computes what an fp32 model with the rounded weights does: parallel passes, traces and decoding; w8a8 is compared
    with torch's operators."""
    model = loud(CONFIGS[layout], 0, scale=0.1)
    rounded, quantized, by_torch = LoopedGPT(model.config, seed=None).eval(), quantize(model, dtype), quantize(model, dtype, native=False)
    halves = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in rounded.named_parameters():
            matrix = name in matrices_of(model)
            parts = halves[name].chunk(2, dim=1) if "adapter" in name else (halves[name],)
            p.copy_(torch.cat([quantize_matrix(w, dtype).dequantize() for w in parts], dim=1) if matrix else halves[name])
    ids, reference = [[1, 2, 3, 4, 5], [6, 7]], by_torch if dtype == "w8a8" else rounded
    for one in (quantized, by_torch):
        assert one.weight_dtype == dtype and not any(p.requires_grad for p in one.parameters())
        found, want = twoscale.forward(one, ids, loops=3), twoscale.forward(reference, ids, loops=3)
        assert torch.allclose(found.logits, want.logits, atol=1e-3)
        traced = twoscale.trace(one, ids, loops=3)
        assert torch.allclose(traced.states[0], twoscale.trace(reference, ids, loops=3).states[0], atol=1e-3)
        assert twoscale.generate(one, ids, 6, loops=3).tokens == twoscale.generate(reference, ids, 6, loops=3).tokens
    changed = twoscale.forward(model, ids, loops=3).logits
    assert not torch.allclose(changed, twoscale.forward(quantized, ids, loops=3).logits, atol=1e-5)


def test_memory_of_a_quantized_model() -> None:
    """A quantised model has no fp32 matrix, its inference copy shares its panels, and a copy of it does too."""
    model = quantize(loud(small_model()), "int8")
    assert all(p.ndim < 2 or "wpe" in name for name, p in model.named_parameters())
    if c_library() is None:
        return
    mine = {id(m.panels) for m in model.modules() if isinstance(m, NativeLinear | NativeEmbedding)}
    for other in (optimize_for_inference(model).model, copy.deepcopy(model)):
        assert {id(m.panels) for m in other.modules() if isinstance(m, NativeLinear | NativeEmbedding)} == mine


@needs_kernel
@pytest.mark.parametrize("layout", CONFIGS)
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES[1:])
def test_quantized_models_use_the_c_kernels(dtype: WeightDtype, layout: str) -> None:
    """All matrices of a quantised model are in panels, the embedding too where it is not the head, so it decodes by the C kernels."""
    model = quantize(loud(CONFIGS[layout], 0, scale=0.1), dtype)
    assert isinstance(model.wte, NativeEmbedding) and optimize_for_inference(model, "native").kernels.name == "native"
    gen = twoscale.generate(model, [[1, 2, 3]], 8, loops=3, speculate="draft:2", kernels="native")
    assert gen.speculation.drafted and gen.tokens == twoscale.generate(model, [[1, 2, 3]], 8, loops=3).tokens


def test_quantized_models_are_not_trained() -> None:
    """A quantised model refuses training mode, derivatives and another quantisation, in one line."""
    model = quantize(loud(small_model()), "int8")
    traced = twoscale.trace(model, [[1, 2]], loops=2)
    for refused in (model.train, lambda: quantize(model, "bf16"), lambda: loop_spectral_radius(model, traced, 0)):
        with pytest.raises(twoscale.UserError, match=r"fp32|another dtype"):
            refused()
    assert not model.eval().training


@needs_kernel
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES[1:])
def test_scheduler(dtype: WeightDtype) -> None:
    """Under the scheduler a request has the same tokens, steps and log-probabilities, to the bit, alone and among others with other
    rules."""
    model = quantize(loud(small_model(block_size=64), scale=0.1), dtype)
    rules = (None, exits.Acceleration(0.5, normalize="steps"), exits.StepNorm(0.3, relative=True), exits.Fixed(2))

    def run(chosen: Sequence[int]) -> list[object]:
        scheduler, found = Scheduler(model), []
        for i in chosen:
            sampling = SamplingParams(max_new_tokens=5, temperature=0.7, seed=i, logprobs=2)
            found.append(Request([1 + i, 2, 3 + i][: 1 + i % 3], sampling, loop_params(model, exit=rules[i % 4], loops=4)))
            scheduler.add(found[-1])
        while scheduler.step():
            pass
        return [(request.tokens, request.steps, request.logprobs) for request in found]

    together = run(range(9))
    assert together == [run([i])[0] for i in range(9)]
