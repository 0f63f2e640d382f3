"""Memory for the keys and values of several sequences in common tensors, so that one attention call serves many of them.

A sequence's keys (L, J, T, D) in one layer are a slot of a slab (S, L, J, T, D). A slab has as many slots as sequences are expected
(`Slots.expected`) and have none yet; without a number slabs double in size, so that no more than half of the slots are idle.

Shapes: S slots, L level, J key/value heads, T position, D head width.
"""

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

MAX_SLOTS = 64


@dataclass(eq=False)
class Slab:
    """Keys and values of S sequences in one layer."""

    keys: Tensor
    """(S, L, J, T, D)"""
    values: Tensor
    free: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Slot:
    """One sequence's place in a slab; it is given back when nobody holds the slot any more."""

    def __init__(self, slab: Slab, index: int) -> None:
        self.slab, self.index = slab, index
        # What the last sequence left must not be read: a NaN would survive a mask.
        self.keys, self.values = slab.keys[index].zero_(), slab.values[index].zero_()

    def __del__(self) -> None:
        with self.slab.lock:
            self.slab.free.append(self.index)


class Slots:
    """The slabs of all layers."""

    def __init__(self) -> None:
        self.slabs: dict[Hashable, list[Slab]] = {}
        self.expected = 1
        """Sequences that will have slots at the same time, as far as is known."""
        self.lock = threading.Lock()

    def take(self, layer: int, shape: tuple[int, int, int, int], like: Tensor) -> Slot:
        """A slot for keys and values (L, J, T, D) of one layer."""
        with self.lock:
            slabs = self.slabs.setdefault((layer, shape, like.dtype, like.device), [])
            for slab in slabs:
                with slab.lock:
                    index = slab.free.pop(0) if slab.free else None
                if index is not None:
                    return Slot(slab, index)
            total = sum(len(slab.keys) for slab in slabs)
            size = min(MAX_SLOTS, max(1, self.expected - total if total < self.expected else total))
            with torch.inference_mode(False):  # so that they can be written to outside of inference mode too
                keys, values = (torch.zeros(size, *shape, dtype=like.dtype, device=like.device) for _ in range(2))
            slabs.append(Slab(keys, values, list(range(1, size))))
            return Slot(slabs[-1], 0)
