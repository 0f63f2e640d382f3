"""A fingerprint of a model's weights: whether they are still what they were, however they may have been changed.

torch's version counters do not answer that: a fused optimizer, `p.data`, NumPy views and inference-mode tensors change weights and leave
the counters alone. So every byte is read, and a change goes unnoticed with a probability of about 2^-64 (2^-32 where
there are no C kernels).
"""

import ctypes
import zlib
from itertools import chain

import torch
from torch import Tensor, nn

from twoscale.engine.kernels.library import native, pointer, threads_to_use

Fingerprint = tuple[tuple[str, torch.Size, int], ...]


def weights_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Names and values of all parameters and buffers; one that is used at several places comes once."""
    return [(name, p.detach()) for name, p in chain(model.named_parameters(), model.named_buffers())]


def fingerprint(model: nn.Module) -> Fingerprint:
    """(name, shape, sum of all bytes) of every weight; they must be fp32, contiguous and on the CPU."""
    weights = weights_of(model)
    sums = _sums([w for _, w in weights])
    return tuple((name, w.shape, sum_) for (name, w), sum_ in zip(weights, sums, strict=True))


def _sums(weights: list[Tensor]) -> list[int]:
    library = native()
    if library is None:
        return [zlib.crc32(w.numpy()) for w in weights]  # type: ignore[arg-type]
    n = len(weights)
    data = (ctypes.c_void_p * n)(*(pointer(w, w.numel()) for w in weights))
    sizes = (ctypes.c_int64 * n)(*(4 * w.numel() for w in weights))
    sums = (ctypes.c_uint64 * n)()
    library.fingerprints(threads_to_use(), n, data, sizes, sums)
    return list(sums)
