"""A fingerprint of a model's weights, to detect that they have changed.

torch's version counters are not enough: fused optimizers, `p.data`, NumPy views and inference-mode tensors change weights without
increasing them. So every byte is hashed. A change is missed with a probability of about 2^-64 (2^-32 without C kernels, by CRC-32).

Where the system can tell which pages of memory were written (`written_pages.py`), the hash of a large weight is kept until one of its pages
is. Its edges, which share pages with other data, and small weights are hashed every time.
"""

import ctypes
import os
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from twoscale.engine.kernels.library import c_library, pointer, threads_to_use
from twoscale.engine.kernels.written_pages import PageWatch, Span, whole_pages

Fingerprint = tuple[tuple[str, torch.Size, tuple[int, ...]], ...]
MIN_WATCHED = 1 << 20  # bytes of a large weight


@dataclass(frozen=True)
class _Hashed:
    """The large weights of a model when they were hashed: their whole pages."""

    watch: PageWatch
    hashes: list[int]


_HASHED: WeakKeyDictionary[nn.Module, _Hashed] = WeakKeyDictionary()
_LOCK = threading.Lock()


def _new_lock() -> None:
    """In a child process: another thread of the parent may have held the lock."""
    global _LOCK
    _LOCK = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


def weights_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Names and values of all parameters and buffers; shared ones are listed once."""
    return [(name, p.detach()) for name, p in chain(model.named_parameters(), model.named_buffers())]


def fingerprint(model: nn.Module) -> Fingerprint:
    """(name, shape, hashes) of every weight; the weights must be fp32, contiguous and on the CPU."""
    weights = weights_of(model)
    memory = [(pointer(w, w.numel()), 4 * w.numel()) for _, w in weights]
    pages = [whole_pages(*span) if span[1] >= MIN_WATCHED else (span[0], 0) for span in memory]
    edges = [
        ((start, first - start), (first + n, start + size - first - n)) for (start, size), (first, n) in zip(memory, pages, strict=True)
    ]
    with _LOCK:
        inner, outer = _page_hashes(model, pages), _hashes(list(chain.from_iterable(edges)))
    hashes = zip(inner, outer[::2], outer[1::2], strict=True)
    return tuple((name, w.shape, hash_) for (name, w), hash_ in zip(weights, hashes, strict=True))


def _page_hashes(model: nn.Module, pages: list[Span]) -> list[int]:
    """Hashes of the whole pages of each weight: those of the last time if none was written since."""
    known = _HASHED.get(model)
    if known is None or known.watch.spans != pages or not known.watch.unwritten():
        watch = PageWatch(pages)  # before the pages are read: a write meanwhile is seen the next time
        known = _HASHED[model] = _Hashed(watch, _hashes(pages))
    return known.hashes


def _hashes(memory: Sequence[Span]) -> list[int]:
    library, n = c_library(), len(memory)
    if library is None:
        return [zlib.crc32((ctypes.c_char * size).from_address(start)) for start, size in memory]
    data, sizes = (ctypes.c_void_p * n)(*(start for start, _ in memory)), (ctypes.c_int64 * n)(*(size for _, size in memory))
    hashes = (ctypes.c_uint64 * n)()
    library.fingerprints(threads_to_use(), n, data, sizes, hashes)
    return list(hashes)
