"""Rows of a batch: tokens of several sequences whose states are stacked in one tensor (N, C).

A group's weights are the same at every loop step, so tokens of different sequences and at different steps can share one matmul. In
attention each row reads the keys and values of its own sequence.

Shapes: N rows.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from twoscale.engine.cache import Cache, Positions
from twoscale.engine.kernels import Kernels, RowKernels
from twoscale.model.group import AttentionOfLayer
from twoscale.model.layers import Rope


@dataclass(slots=True)
class Part:
    """Rows of one sequence: one token in decode, in prefill a chunk of the prompt or a subset of it.

    In a loop the tokens of a chunk exit one by one: those that are still inside and those that exit are then two parts of one chunk.
    """

    prompt_index: int
    """Index of the sequence among the caller's prompts, for exit rules that depend on it."""
    cache: Cache
    positions: Positions
    """Positions of the rows in the sequence."""
    count: int
    """Number of rows."""
    end: int
    """The rows attend to positions 0 .. end - 1 at most."""
    loop_step: int = 0
    """Loop steps taken in the current group (k in exit rules); 0 before the first group."""
    is_whole_prefix: bool = False
    """Whether there are several rows and they are exactly the positions 0 .. end - 1. Their attention is then SDPA's `is_causal`; other
    parts need a mask of their own, or none if they are a single row."""
    chunk: Any = None
    """The `batch.Chunk` that the rows belong to: it may have more tokens."""

    @property
    def level_step(self) -> int:
        """The loop step that says which level of the cache attention uses: level (level_step - 1) mod max_levels.

        In a loop group this is `loop_step`. A plain layer has one level, which every step of at least 1 selects; before the first group
        `loop_step` is 0, and this is 1.
        """
        return self.loop_step or 1


def make_part(prompt_index: int, cache: Cache, first: int, count: int, chunk: Any = None) -> Part:
    """The part of `count` tokens from position `first` on."""
    positions = first if count == 1 else slice(first, first + count)
    return Part(prompt_index, cache, positions, count, first + count, is_whole_prefix=count > 1 and first == 0, chunk=chunk)


class Rows:
    """The parts of several sequences. Row tensors are stacked in the order of the parts."""

    def __init__(self, parts: list[Part], positions_and_tokens: Tensor, kernels: Kernels) -> None:
        """`positions_and_tokens` is int64 (2, N): one tensor, so that selecting rows is one operation."""
        self.parts, self.positions_and_tokens, self.kernels = parts, positions_and_tokens, kernels
        self.positions, self.tokens = positions_and_tokens.unbind()
        self.n = positions_and_tokens.shape[1]
        self.rope: tuple[Rope | None] | None = None
        """cos and sin of the rotary embedding at the rows' positions, cached by `Engine.rope`; None: not computed yet, (None,): the model
        has no rotary embedding."""

    def __len__(self) -> int:
        return self.n

    @property
    def k(self) -> Tensor:
        """`Part.loop_step` of each row, int64 (N,). Exit rules call it k (protocol `exits.rule.RowInfo`)."""
        return self._per_row([part.loop_step for part in self.parts])

    @property
    def same_k(self) -> int | None:
        """`Part.loop_step` if all rows have the same, else None."""
        first = self.parts[0].loop_step
        return first if len(self.parts) == 1 or all(part.loop_step == first for part in self.parts) else None

    @cached_property
    def prompt_indices(self) -> Tensor:
        """`Part.prompt_index` of each row, (N,). Several sequences may have the same: those that are sampled from one prompt."""
        return self._per_row([part.prompt_index for part in self.parts])

    def gather(self, table: Tensor) -> Tensor:
        """The entries of a table over positions (T, ...) at the rows' positions, (N, ...)."""
        position = self.parts[0].positions
        if self.n == 1 and isinstance(position, int):
            return table.narrow(0, position, 1)  # a view
        return table.index_select(0, self.positions)

    @cached_property
    def longest(self) -> int:
        """The largest number of positions that a row may attend to."""
        return max(part.end for part in self.parts)

    @property
    def one_row_per_part(self) -> bool:
        """Whether every part is a single row."""
        return len(self.parts) == self.n

    def _per_row(self, values: list[int]) -> Tensor:
        each = torch.tensor(values, device=self.positions_and_tokens.device)
        if self.one_row_per_part:
            return each
        return each.repeat_interleave(torch.tensor([part.count for part in self.parts], device=self.positions_and_tokens.device))

    def select(self, index: Tensor) -> "Rows":
        """The rows with these indices (ascending int64)."""
        if self.one_row_per_part:
            parts = [self.parts[i] for i in index.tolist()]
        else:
            parts = []
            for part, low, high in self._rows_by_part(index.tolist()):
                if high - low == part.count:
                    parts.append(part)
                elif high > low:
                    parts.append(_subset(part, self.positions[index[low:high]]))
        return Rows(parts, self.positions_and_tokens[:, index], self.kernels)

    def concat(self, others: "Rows") -> "Rows":
        """These rows followed by the others."""
        return Rows(self.parts + others.parts, torch.cat((self.positions_and_tokens, others.positions_and_tokens), dim=1), self.kernels)

    def fill_deeper_levels(self, layers: range) -> None:
        """The rows exit the loop: in these layers copy their last keys and values to all deeper levels."""
        for part in self.parts:
            for layer in layers:
                part.cache.layers[layer].fill_deeper_levels(part.loop_step, part.positions)

    def _rows_by_part(self, rows: list[int]) -> Iterator[tuple[Part, int, int]]:
        """For each part, the range low .. high - 1 of the given row indices (ascending) that belong to it."""
        first = low = 0
        for part in self.parts:
            high = bisect_left(rows, first + part.count, low)
            yield part, low, high
            first, low = first + part.count, high

    @cached_property
    def row_kernels(self) -> RowKernels:
        """The kernels bound to these rows."""
        return self.kernels.bind(self)

    def attention(self, first_layer: int, layers: int) -> AttentionOfLayer:
        """A function of i: the attention of layer `first_layer + i`, for i below `layers`. It writes keys and values to the caches."""
        attention_of_layer = [self.row_kernels.attention(first_layer + i) for i in range(layers)]
        return attention_of_layer.__getitem__


def concat_rows(several: Iterable[Rows]) -> Rows:
    """All rows in order."""
    first, *others = several
    if not others:
        return first
    parts = [part for rows in (first, *others) for part in rows.parts]
    return Rows(parts, torch.cat([rows.positions_and_tokens for rows in (first, *others)], dim=1), first.kernels)


def _subset(part: Part, positions: Tensor) -> Part:
    """The rows of a part at these positions."""
    last = int(positions[-1])
    subset: Positions = last if len(positions) == 1 else positions
    return Part(part.prompt_index, part.cache, subset, len(positions), last + 1, part.loop_step, chunk=part.chunk)
