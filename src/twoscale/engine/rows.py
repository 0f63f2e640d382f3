"""Rows: tokens that share the engine's calls, each with its sequence, position, group and step.

A group's weights are the same at every step, so rows of different sequences, and of different depths, can share one
matmul. Only attention tells them apart: every row sees its own sequence's keys and values, through views.

Shapes: N rows, H query heads, J key/value heads, D head width.
"""

import ctypes
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twoscale.engine.cache import Cache, Place
from twoscale.engine.native import FUSED, Seen, floats, pointer, row_pointer, threads_to_use
from twoscale.model.group import Layers
from twoscale.model.layers import Rope


@dataclass(slots=True)
class Part:
    """The rows of one sequence that go through the network together: one token, or a piece of a prompt."""

    sequence: int
    """Place in the caller's batch."""
    cache: Cache
    at: Place
    """The rows' positions."""
    count: int
    end: int
    """Positions 0 .. end - 1 are there to be seen."""
    k: int = 0
    """Applications of the current group's map so far."""
    mask: Tensor | None = None
    """(n, end): what is added to the scores, so that no row sees a later position."""
    causal: bool = False
    """Whether the rows are all of positions 0 .. end - 1, and need no mask."""


def part_of(sequence: int, cache: Cache, first: int, count: int) -> Part:
    """The part for `count` tokens from position `first` on."""
    at = first if count == 1 else slice(first, first + count)
    return Part(sequence, cache, at, count, first + count, causal=count > 1 and first == 0)


class Rows:
    """Parts of sequences, one after the other; row tensors are stacked in this order."""

    def __init__(self, parts: list[Part], who: Tensor, library: Any | None = None) -> None:
        """`who` is int64 (3, N): positions, tokens, and the places where the rows' results belong."""
        self.parts, self.who, self.library = parts, who, library
        self.positions, self.tokens, self.places = who.unbind()
        self.n = who.shape[1]
        self.native = library is not None and 0 < self.n <= FUSED
        """Whether a fused block takes them."""
        self._scratch, self._scratch_size = 0, 0
        self._rope: Rope | None = None

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

    def steps_of(self, rows: Tensor) -> Tensor:
        """Applications so far of some rows, (n,)."""
        same = self.same_k
        return self.k[rows] if same is None else torch.full_like(rows, same)

    @cached_property
    def sequences(self) -> Tensor:
        return self._each([part.sequence for part in self.parts])

    @cached_property
    def owners(self) -> Tensor:
        """The number of each row's part, (N,)."""
        return self._each(list(range(len(self.parts))))

    def _each(self, values: list[int]) -> Tensor:
        each = torch.tensor(values, device=self.who.device)
        if len(values) == self.n:
            return each
        return each.repeat_interleave(torch.tensor([part.count for part in self.parts], device=self.who.device))

    def take(self, stay: Tensor) -> "Rows":
        """Only the rows of `stay`, ascending int64."""
        if len(self.parts) == self.n:
            parts = [self.parts[i] for i in stay.tolist()]
        else:
            parts = []
            for part, chosen in self._pieces(stay):
                if len(chosen) == part.count:
                    parts.append(part)
                elif len(chosen):
                    parts.append(_some(part, self.positions[chosen]))
        return Rows(parts, self.who[:, stay], self.library)

    def join(self, others: "Rows") -> "Rows":
        """These rows, then the others."""
        return Rows(self.parts + others.parts, torch.cat((self.who, others.who), dim=1), self.library)

    def leave(self, layers: range, gone: Tensor) -> None:
        """The rows of `gone`, ascending int64, have taken their last step in these layers; their keys and values stay visible."""
        if len(self.parts) == self.n:
            leaving: Iterable[tuple[Part, Place]] = ((self.parts[i], self.parts[i].at) for i in gone.tolist())
        else:
            pieces = ((part, chosen) for part, chosen in self._pieces(gone) if len(chosen))
            leaving = ((part, part.at if len(chosen) == part.count else self.positions[chosen]) for part, chosen in pieces)
        for part, at in leaving:
            for layer in layers:
                part.cache.layers[layer].settle(part.k, at)

    def _pieces(self, rows: Tensor) -> Iterator[tuple[Part, Tensor]]:
        """Each part and those of its rows that are among `rows`."""
        numbers = rows.tolist()
        first = low = 0
        for part in self.parts:
            high = bisect_left(numbers, first + part.count, low)
            yield part, rows[low:high]
            first, low = first + part.count, high

    def attention(self, first_layer: int, layers: int) -> Layers:
        """The attention of `layers` layers from `first_layer` on: rows write their keys and values, and see their own sequence."""
        return [RowAttention(self, first_layer + i) for i in range(layers)].__getitem__

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (1, N, H, D), k and v (1, N, J, D) -> (1, N, H, D)."""
        if self.library is not None:
            return self._attend_native(layer, q, k, v)
        gqa = q.shape[2] != k.shape[2]
        outs, first = [], 0
        for part in self.parts:
            n = part.count
            store, step = part.cache.layers[layer], part.k or 1
            if n == 1:
                keys, values = store.write(step, part.at, k[0, first], v[0, first], part.end, part.cache.length)
                y = F.scaled_dot_product_attention(q[:, first, :, None], keys[None], values[None], enable_gqa=gqa)
                outs.append(y.transpose(1, 2))
            else:
                rows = slice(first, first + n)
                keys, values = store.write(
                    step, part.at, k[0, rows].transpose(0, 1), v[0, rows].transpose(0, 1), part.end, part.cache.length
                )
                if not part.causal and part.mask is None:
                    part.mask = self._mask(part, first, q.dtype)
                y = F.scaled_dot_product_attention(
                    q[:, rows].transpose(1, 2), keys[None], values[None], attn_mask=part.mask, is_causal=part.causal, enable_gqa=gqa
                )
                outs.append(y.transpose(1, 2))
            first += n
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _attend_native(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same in one C call: no mask, no copies, and no row sees more keys than it needs."""
        _, n, H, D = q.shape
        attention, threads = RowAttention(self, layer), threads_to_use()
        J, out = k.shape[2], q.new_empty(1, n, H, D)
        places = (row_pointer(heads, n, count, D) for heads, count in ((q, H), (k, J), (v, J)))
        self.library.attend(  # type: ignore[union-attr]
            threads, n, H, J, D, *places, q.stride(1), k.stride(1), v.stride(1),
            attention.seen(), self.scratch(2 * threads * self.longest), pointer(out, n * H * D),
        )  # fmt: skip
        return out

    def scratch(self, size: int) -> int:
        """The address of memory for `size` floats that a kernel may overwrite; the same for all steps of these rows."""
        if size > self._scratch_size:
            self._memory, self._scratch_size = floats(size), size
            self._scratch = pointer(self._memory, size)
        return self._scratch

    def angles(self, rope: Rope, head_dim: int) -> tuple[int, int]:
        """The addresses of cos and sin, for C; the same for all steps of these rows."""
        if rope is not self._rope:
            self._angles = pointer(rope[0], self.n * head_dim), pointer(rope[1], self.n * head_dim)
            self._rope = rope
        return self._angles

    @cached_property
    def longest(self) -> int:
        return max(part.end for part in self.parts)

    @cached_property
    def rooms(self) -> "ctypes.Array[ctypes.c_int64]":
        """How many positions each part's cache has, for C."""
        for part in self.parts:
            if not 0 < part.end <= part.cache.capacity:
                raise IndexError(f"position {part.end - 1} lies outside a cache for {part.cache.capacity} tokens")
        return (ctypes.c_int64 * len(self.parts))(*(part.cache.capacity for part in self.parts))

    @cached_property
    def places_in_memory(self) -> tuple[int, int, int]:
        """The addresses of the rows' owners, of the caches' sizes and of the rows' positions, for C."""
        owners, positions = pointer(self.owners, self.n, torch.int64), pointer(self.positions, self.n, torch.int64)
        return owners, ctypes.addressof(self.rooms), positions

    def _mask(self, part: Part, first: int, dtype: torch.dtype) -> Tensor:
        positions = self.positions[first : first + part.count]
        hidden = torch.arange(part.end, device=positions.device) > positions[:, None]
        return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)


class RowAttention:
    """The attention of one layer over rows: `Attend`, and for the C kernels the places of keys and values."""

    def __init__(self, rows: Rows, layer: int) -> None:
        self.rows, self.layer = rows, layer
        self._seen: Seen | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.rows.attend(self.layer, q, k, v)

    def seen(self) -> int:
        """The address of what the C kernels must know of these rows at their current steps."""
        rows, layer = self.rows, self.layer
        if self._seen is None:
            self._keys, self._values = ((ctypes.c_void_p * len(rows.parts))() for _ in range(2))
            self._seen = Seen(*rows.places_in_memory, ctypes.addressof(self._keys), ctypes.addressof(self._values), rows.longest)
        for i, part in enumerate(rows.parts):
            store = part.cache.layers[layer]
            self._keys[i], self._values[i] = store.address(store.open_level(part.k or 1, part.cache.length))
        return ctypes.addressof(self._seen)


def _some(part: Part, positions: Tensor) -> Part:
    """Some rows of a part: what a token sees does not change when others leave."""
    last = int(positions[-1])
    if len(positions) == 1:
        return Part(part.sequence, part.cache, last, 1, last + 1, part.k)
    return Part(part.sequence, part.cache, positions, len(positions), last + 1, part.k)
