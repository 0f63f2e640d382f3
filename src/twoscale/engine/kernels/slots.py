"""Memory for the keys and values of several sequences in common tensors, so that one attention call serves many of them.

A sequence's keys (L, J, T, D) in one layer are a slot of a slab (S, L, J, T, D). A slab has a slot for each sequence that is expected with
this T and has none yet; beyond that slabs double, so that no more than half of the slots are idle. A slab without a sequence is dropped.

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
    """One sequence's place in a slab; it is given back when nobody holds the slot any more."""

    def __init__(self, slab: Slab, index: int) -> None:
        self.slab, self.index = slab, index
        # What the last sequence left must not be read: a NaN would survive a mask.
        self.keys, self.values = slab.keys[index].zero_(), slab.values[index].zero_()

    def __del__(self) -> None:
        self.slab.free.append(self.index)  # one bytecode: needs no lock, and may happen at any time


class Slots:
    """The slabs of all layers of an engine; used by one thread."""

    def __init__(self) -> None:
        self.slabs: dict[Hashable, list[Slab]] = {}
        self.n_expected: Counter[int] = Counter()
        """How many sequences of each T will have slots at the same time, as far as is known."""

    def allocate(self, layer: int, shape: tuple[int, int, int, int], like: Tensor) -> Slot:
        """A slot for keys and values (L, J, T, D) of one layer."""
        self._drop_unused()
        slabs = self.slabs.setdefault((layer, shape, like.dtype, like.device), [])
        for slab in slabs:
            if slab.free:
                slab.free.sort(reverse=True)  # neighbours attend without a copy, so the lowest comes first
                return Slot(slab, slab.free.pop())
        total, n_expected = sum(len(slab.keys) for slab in slabs), self.n_expected[shape[2]]
        size = min(MAX_SLOTS, max(1, n_expected - total if total < n_expected else total))
        with torch.inference_mode(False):  # so that they can be written to outside of inference mode too
            keys, values = (torch.zeros(size, *shape, dtype=like.dtype, device=like.device) for _ in range(2))
        slabs.append(Slab(keys, values, list(range(1, size))))
        return Slot(slabs[-1], 0)

    def _drop_unused(self) -> None:
        """Drop slabs that no sequence uses."""
        for key, slabs in list(self.slabs.items()):
            if any(len(slab.free) == len(slab.keys) for slab in slabs):
                self.slabs[key] = [slab for slab in slabs if len(slab.free) < len(slab.keys)]
                if not self.slabs[key]:
                    del self.slabs[key]
