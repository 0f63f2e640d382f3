"""A fingerprint of a model's weights, to detect that they have changed.

torch's version counters are not enough: fused optimizers, `p.data`, NumPy views and inference-mode tensors change weights without
increasing them. So every byte is hashed. A change is missed with a probability of about 2^-64 (2^-32 without C kernels, by CRC-32).
"""

import ctypes
import zlib
from itertools import chain

import torch
from torch import Tensor, nn

from twoscale.engine.kernels.library import c_library, pointer, threads_to_use

Fingerprint = tuple[tuple[str, torch.Size, int], ...]


def weights_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Names and values of all parameters and buffers; shared ones are listed once."""
    return [(name, p.detach()) for name, p in chain(model.named_parameters(), model.named_buffers())]


def fingerprint(model: nn.Module) -> Fingerprint:
    """(name, shape, hash) of every weight; the weights must be fp32, contiguous and on the CPU."""
    weights = weights_of(model)
    hashes = _hashes([w for _, w in weights])
    return tuple((name, w.shape, hash_) for (name, w), hash_ in zip(weights, hashes, strict=True))


def _hashes(weights: list[Tensor]) -> list[int]:
    library = c_library()
    if library is None:
        return [zlib.crc32(w.numpy()) for w in weights]  # type: ignore[arg-type]
    n = len(weights)
    data = (ctypes.c_void_p * n)(*(pointer(w, w.numel()) for w in weights))
    sizes = (ctypes.c_int64 * n)(*(4 * w.numel() for w in weights))
    hashes = (ctypes.c_uint64 * n)()
    library.fingerprints(threads_to_use(), n, data, sizes, hashes)
    return list(hashes)
