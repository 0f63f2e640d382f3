"""A pool of KV-cache memory: the caches of several sequences are slices of common tensors, so that one attention call serves them all.

A slab is a tensor (S, L, J, T, D) with S slots; a sequence's keys (L, J, T, D) in one layer are one slot. The size of a new slab is the
number of sequences that are expected with this T and have no slot yet. Beyond that each new slab doubles the number of slots, up to a slab
of MAX_SLOTS. Slots of sequences that have ended are used again; a slab without sequences is freed.

Shapes: S slots, L level, J key/value heads, T position, D head width.
"""

from collections import Counter
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


class Slot:
    """One sequence's slice of a slab. It is returned to the slab when the object is garbage-collected."""

    def __init__(self, slab: Slab, index: int) -> None:
        self.slab, self.index = slab, index
        # Zeros, because a NaN of the previous sequence would stay NaN under an additive mask.
        self.keys, self.values = slab.keys[index].zero_(), slab.values[index].zero_()

    def __del__(self) -> None:
        self.slab.free.append(self.index)  # atomic, so no lock is needed in a finalizer


class Slots:
    """The slabs of all layers of an engine. Not thread-safe."""

    def __init__(self) -> None:
        self.slabs: dict[Hashable, list[Slab]] = {}
        self.n_expected: Counter[int] = Counter()
        """For each T, the number of sequences that are expected to have slots at the same time."""

    def allocate(self, layer: int, shape: tuple[int, int, int, int], like: Tensor) -> Slot:
        """A slot for keys and values (L, J, T, D) of one layer."""
        self._drop_unused()
        slabs = self.slabs.setdefault((layer, shape, like.dtype, like.device), [])
        for slab in slabs:
            if slab.free:
                slab.free.sort(reverse=True)  # lowest first: adjacent slots are attended without a copy
                return Slot(slab, slab.free.pop())
        total, n_expected = sum(len(slab.keys) for slab in slabs), self.n_expected[shape[2]]
        size = min(MAX_SLOTS, max(1, n_expected - total if total < n_expected else total))
        with torch.inference_mode(False):  # so that they can be modified outside of inference mode too
            keys, values = (torch.zeros(size, *shape, dtype=like.dtype, device=like.device) for _ in range(2))
        slabs.append(Slab(keys, values, list(range(1, size))))
        return Slot(slabs[-1], 0)

    def _drop_unused(self) -> None:
        """Free the slabs without sequences."""
        for key, slabs in list(self.slabs.items()):
            if any(len(slab.free) == len(slab.keys) for slab in slabs):
                self.slabs[key] = [slab for slab in slabs if len(slab.free) < len(slab.keys)]
                if not self.slabs[key]:
                    del self.slabs[key]
