"""Rows: tokens that share the engine's calls, each with its sequence, position, group and step.

A group's weights are the same at every step, so rows of different sequences, and of different depths, can share one matmul. Only
attention tells them apart: every row attends to its own sequence's keys and values, through views.

Shapes: N rows.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from twoscale.engine.cache import Cache, Place
from twoscale.engine.kernels import Kernels, RowKernels
from twoscale.model.group import Layers
from twoscale.model.layers import Rope


@dataclass(slots=True)
class Part:
    """The rows of one sequence that go through the network together: one token, or a chunk of a prompt."""

    sequence: int
    """Place in the caller's batch."""
    cache: Cache
    at: Place
    """The rows' positions."""
    count: int
    end: int
    """Positions 0 .. end - 1 can be attended to."""
    k: int = 0
    """Applications of the current group's map so far."""
    causal: bool = False
    """Whether the rows are all of positions 0 .. end - 1, and need no mask."""
    owner: Any = None
    """What the rows belong to, for whoever made the part."""


def part_of(sequence: int, cache: Cache, first: int, count: int, owner: Any = None) -> Part:
    """The part for `count` tokens from position `first` on."""
    at = first if count == 1 else slice(first, first + count)
    return Part(sequence, cache, at, count, first + count, causal=count > 1 and first == 0, owner=owner)


class Rows:
    """Parts of sequences, one after the other; row tensors are stacked in this order."""

    def __init__(self, parts: list[Part], ids: Tensor, kernels: Kernels) -> None:
        """`ids` is int64 (2, N): the rows' positions and tokens."""
        self.parts, self.ids, self.kernels = parts, ids, kernels
        self.positions, self.tokens = ids.unbind()
        self.n = ids.shape[1]
        self.rope: tuple[Rope | None] | None = None
        """Rotary angles, once they have been computed; see `Engine.rope`."""

    def __len__(self) -> int:
        return self.n

    @property
    def k(self) -> Tensor:
        """Applications so far, (N,)."""
        return self._each([part.k for part in self.parts])

    @property
    def same_k(self) -> int | None:
        """Applications so far where all rows have the same."""
        first = self.parts[0].k
        return first if len(self.parts) == 1 or all(part.k == first for part in self.parts) else None

    @cached_property
    def sequences(self) -> Tensor:
        return self._each([part.sequence for part in self.parts])

    @cached_property
    def owners(self) -> Tensor:
        """The number of each row's part, (N,)."""
        return self._each(list(range(len(self.parts))))

    @cached_property
    def longest(self) -> int:
        return max(part.end for part in self.parts)

    @property
    def one_each(self) -> bool:
        """Whether every part is a single token."""
        return len(self.parts) == self.n

    def _each(self, values: list[int]) -> Tensor:
        each = torch.tensor(values, device=self.ids.device)
        if self.one_each:
            return each
        return each.repeat_interleave(torch.tensor([part.count for part in self.parts], device=self.ids.device))

    def take(self, stay: Tensor) -> "Rows":
        """Only the rows of `stay`, ascending int64."""
        if self.one_each:
            parts = [self.parts[i] for i in stay.tolist()]
        else:
            parts = []
            for part, low, high in self._pieces(stay.tolist()):
                if high - low == part.count:
                    parts.append(part)
                elif high > low:
                    parts.append(_some(part, self.positions[stay[low:high]]))
        return Rows(parts, self.ids[:, stay], self.kernels)

    def join(self, others: "Rows") -> "Rows":
        """These rows, then the others."""
        return Rows(self.parts + others.parts, torch.cat((self.ids, others.ids), dim=1), self.kernels)

    def settle(self, layers: range) -> None:
        """These rows have taken their last step in these layers: what they wrote is what deeper steps find."""
        for part in self.parts:
            for layer in layers:
                part.cache.layers[layer].settle(part.k, part.at)

    def _pieces(self, rows: list[int]) -> Iterator[tuple[Part, int, int]]:
        """Each part, and where its rows begin and end in `rows`, which is ascending."""
        first = low = 0
        for part in self.parts:
            high = bisect_left(rows, first + part.count, low)
            yield part, low, high
            first, low = first + part.count, high

    @cached_property
    def _bound(self) -> RowKernels:
        return self.kernels.bind(self)

    def attention(self, first_layer: int, layers: int) -> Layers:
        """The attention of `layers` layers from `first_layer` on: rows write their keys and values, and attend to their own sequence."""
        return [self._bound.attention(first_layer + i) for i in range(layers)].__getitem__


def joined(several: Iterable[Rows]) -> Rows:
    """All of them as one, in order."""
    first, *others = several
    if not others:
        return first
    parts = [part for rows in (first, *others) for part in rows.parts]
    return Rows(parts, torch.cat([rows.ids for rows in (first, *others)], dim=1), first.kernels)


def _some(part: Part, positions: Tensor) -> Part:
    """Some rows of a part: what a token attends to does not change when others leave."""
    last = int(positions[-1])
    at: Place = last if len(positions) == 1 else positions
    return Part(part.sequence, part.cache, at, len(positions), last + 1, part.k, owner=part.owner)
