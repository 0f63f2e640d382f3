"""Sampling: the next tokens of a batch from its logits, greedy or random.

All rows are sampled in one call, each with its own parameters. A row's token depends only on its own logits, parameters and random key
(seed, sample_index, token_index), so neither the batch nor the order of requests changes it.

Shapes: N rows, V vocabulary.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twoscale.engine.kernels.library import Library, c_library, empty_floats, pointer, sample_floats, threads_to_use
from twoscale.engine.kernels.native_decode import SequenceSampling
from twoscale.engine.request import SamplingKey, SamplingParams

_MIN_LOG_WEIGHT = -50.0  # a weight below e^-50 of the largest counts as zero, here and in sample_limits.c
_ROUNDING = 1e-6  # relative tolerance of top_p, for the rounding of fp32 weights


@dataclass(frozen=True)
class Sampled:
    """The result of `sample`."""

    tokens: list[int]
    """One for each row; 0 if the row is not finite."""
    finite: list[bool]
    """Whether all logits of the row are finite."""


def sample(logits: Tensor, keys: Sequence[SamplingKey]) -> Sampled:
    """The next token of every row of logits (N, V) fp32."""
    if len(keys) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits and {len(keys)} sampling keys")
    library = c_library() if logits.device.type == "cpu" else None
    return _sample_torch(logits, keys) if library is None else _sample_native(library, logits, keys)


def _sample_native(library: Library, logits: Tensor, keys: Sequence[SamplingKey]) -> Sampled:
    """One call of sample.c for all rows."""
    n, V = logits.shape
    logits, params = logits.to(torch.float32).contiguous(), [key.sampling for key in keys]
    temperature = (ctypes.c_float * n)(*[_temperature(p) for p in params])
    top_k = (ctypes.c_int32 * n)(*[min(p.top_k or 0, V) for p in params])
    top_p = (ctypes.c_double * n)(*[_top_p(p) for p in params])
    u = (ctypes.c_double * n)(*[uniform_number(key) for key in keys])
    tokens, finite = (ctypes.c_int64 * n)(), (ctypes.c_int32 * n)()
    threads = min(n, threads_to_use())
    size = threads * sample_floats(V)
    scratch = empty_floats(size)
    library.sample(threads, n, V, pointer(logits, n * V), temperature, top_k, top_p, u, pointer(scratch, size), tokens, finite)
    return Sampled(tokens[:], [bool(f) for f in finite])


def _temperature(params: SamplingParams) -> float:
    """As sample.c takes it. A temperature below 1e-30 has no fp32 inverse; it gives the most likely token anyway."""
    return max(params.temperature, 1e-30) if params.temperature else 0.0


def _top_p(params: SamplingParams) -> float:
    return 1.0 if params.top_p is None else params.top_p


def uniform_number(key: SamplingKey) -> float:
    """The number that the token is drawn by; not random without temperature."""
    return key.uniform if key.sampling.temperature else 0.5


def sequence_sampling(params: SamplingParams, V: int) -> SequenceSampling:
    """The sampling parameters of one request, for `NativeDecoder.sequence`."""
    return SequenceSampling(_temperature(params), min(params.top_k or 0, V), _top_p(params), sorted(params.stop_token_ids))


def _sample_torch(logits: Tensor, keys: Sequence[SamplingKey]) -> Sampled:
    """The same with torch's operators in fp64: for GPUs, and the reference for the kernel."""
    finite = logits.isfinite().all(dim=1)
    tokens = logits.argmax(dim=1)
    sampled_rows = [i for i, key in enumerate(keys) if key.sampling.temperature and key.sampling.top_k != 1]
    if sampled_rows:
        rows = torch.tensor(sampled_rows, device=logits.device)
        tokens[rows] = _draw([keys[i] for i in sampled_rows], logits[rows].double().nan_to_num_())
    return Sampled(tokens.masked_fill(~finite, 0).tolist(), finite.tolist())


def _draw(keys: Sequence[SamplingKey], logits: Tensor) -> Tensor:
    """Tokens (N,) by inverse transform sampling in vocabulary order; all temperatures are above zero."""

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    V = logits.shape[1]
    z = (logits - logits.amax(dim=1, keepdim=True)) / column([max(key.sampling.temperature, 1e-30) for key in keys])
    weights = z.exp().masked_fill_(z < _MIN_LOG_WEIGHT, 0.0)
    top_k = [min(key.sampling.top_k or V, V) for key in keys]
    top_p = [1.0 if key.sampling.top_p is None else key.sampling.top_p for key in keys]
    if min(top_k) < V or min(top_p) < 1:
        order = logits.argsort(dim=1, descending=True, stable=True)
        rank = torch.arange(V, device=logits.device)[None]
        ordered = weights.gather(1, order).masked_fill_(rank >= column([float(k) for k in top_k]), 0.0)
        before = ordered.cumsum(dim=1) - ordered
        limit = column(top_p)
        kept = (before < limit * (1 - _ROUNDING) * ordered.sum(dim=1, keepdim=True)) | (rank == 0) | (limit >= 1)
        weights = torch.zeros_like(weights).scatter_(1, order, ordered.masked_fill_(~kept, 0.0))
    total = weights.cumsum(dim=1)
    chosen = torch.searchsorted(total, column([key.uniform for key in keys]) * total[:, -1:], right=True)[:, 0]
    last = V - 1 - (weights.flip(1) > 0).to(torch.int8).argmax(dim=1)  # rounding must not select a token after the last one with weight
    return torch.minimum(chosen, last)
