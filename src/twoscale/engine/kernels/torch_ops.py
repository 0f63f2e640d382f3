"""The `torch` kernels: torch's operators on the model's own weights, for any device and dtype. The reference for the other kernels.

Shapes: N rows, C width, S sequences, H query heads, J key/value heads, T positions, D head width.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoscale.engine.kernels.base import Kernels, RowKernels
from twoscale.engine.kernels.slots import Slab, Slot, Slots
from twoscale.exits.rule import Numbers, UpdateNormsFunction
from twoscale.geometry.steps import length as vector_norm
from twoscale.model.layers import MLP, Attend, Block, RMSNorm

if TYPE_CHECKING:
    from twoscale.engine.cache import LayerCache, Positions
    from twoscale.engine.rows import Part, Rows


MIN_POSITIONS = 64  # smallest number of positions of a slot


def _slot_positions(capacity: int) -> int:
    """Number of positions of a slot: a power of two, so that sequences of similar length share a slab."""
    return max(MIN_POSITIONS, 1 << (capacity - 1).bit_length())


class TorchNorm(nn.Module):
    """RMSNorm in few operators: x sqrt(C) / sqrt(||x||^2 + C eps) * gain."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.norm, self.root = norm, math.sqrt(norm.weight.shape[0])
        self.floor = torch.tensor(self.root * math.sqrt(norm.eps), dtype=torch.float32, device=norm.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
        return (x32 * (self.root / torch.hypot(norm, self.floor))).mul_(self.norm.weight.detach()).type_as(x)


def update_norms(before: Tensor, after: Tensor, previous_update: Tensor) -> tuple[Numbers, ...]:
    """||D||, ||D - previous_update||, ||previous_update||, ||before|| and ||after|| for the update D = after - before of each row (N, C).

    D is stored in `previous_update`."""
    before, after = before.float(), after.float()
    update = after - before
    vectors = update, update - previous_update, previous_update, before, after
    norms = tuple(vector_norm(vector) for vector in vectors)
    previous_update.copy_(update)
    return norms


class TorchKernels(Kernels):
    """torch's operators on the model's own weights."""

    name = "torch"
    copies_weights = False

    def __init__(self, batch_attention: bool = True) -> None:
        """Without `batch_attention` there is one attention call per sequence, for benchmarks and tests."""
        self.slots, self.batch_attention = Slots(), batch_attention

    def linear(self, weight: Tensor) -> nn.Module:
        raise AssertionError("the model's own linear maps are used")

    def norm(self, norm: RMSNorm) -> nn.Module:
        return TorchNorm(norm)

    def mlp(self, mlp: MLP, up: nn.Module, down: nn.Module) -> nn.Module:
        new = MLP.__new__(MLP)
        new.__dict__.update(mlp.__dict__)
        new._modules = {"up": up, "down": down}
        return new

    def block(self, block: Block) -> nn.Module:
        return block

    def bind(self, rows: "Rows") -> RowKernels:
        return TorchRowKernels(rows, self.batch_attention)

    def update_norms_function(self) -> UpdateNormsFunction:
        return update_norms

    def for_engine(self) -> Kernels:
        return type(self)(self.batch_attention)

    def hint_capacities(self, capacities: Sequence[int]) -> None:
        self.slots.n_expected = Counter(map(_slot_positions, capacities))

    def allocate(self, layer: int, shape: tuple[int, int, int, int], like: Tensor) -> tuple[Tensor, Tensor, object | None]:
        L, J, T, D = shape
        slot = self.slots.allocate(layer, (L, J, _slot_positions(T), D), like)
        return slot.keys[:, :, :T], slot.values[:, :, :T], slot

    def addresses(self, keys: Tensor, values: Tensor) -> tuple[int, int]:
        return 0, 0

    def fill_deeper_levels(self, layer_cache: "LayerCache", step: int, positions: "Positions") -> None:
        level = (step - 1) % layer_cache.max_levels
        for tensor in (layer_cache.keys, layer_cache.values):
            tensor[step : layer_cache.n_levels, :, positions] = tensor[level, :, positions]


class TorchRowKernels:
    """Attention of the rows of a batch: in decode one padded call per slab of caches, in prefill one call per sequence."""

    def __init__(self, rows: "Rows", batch_attention: bool) -> None:
        self.parts, self.positions, self.n = rows.parts, rows.positions, rows.n  # not `rows` itself: it refers to this object
        self.masks: dict[object, Tensor | None] = {}
        self.indices: dict[tuple[int, ...], Tensor] = {}
        self.use_slabs = batch_attention and len(rows.parts) > 1 and rows.one_row_per_part
        """Whether attention is one padded call per slab: there are several sequences with one row each."""

    def attention(self, layer: int) -> Attend:
        attend = self._attend_slabs if self.use_slabs else self._attend_parts
        return lambda q, k, v: attend(layer, q, k, v)

    def _attend_slabs(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (1, N, H, D), k and v (1, N, J, D) -> (1, N, H, D): one SDPA call per slab, with a mask for shorter sequences."""
        by_slab: dict[Slab, list[tuple[int, int, int]]] = {}
        for i, part in enumerate(self.parts):
            layer_cache = part.cache.layers[layer]
            level, slot = layer_cache.ensure_level(part.level_step, part.cache.length), layer_cache.slot
            assert isinstance(slot, Slot)
            by_slab.setdefault(slot.slab, []).append((i, slot.index, level))
        if len(by_slab) == 1:
            ((slab, entries),) = by_slab.items()
            return self._attend_slab(slab, entries, q[0], k[0], v[0])[None]
        out = torch.empty_like(q)
        for slab, entries in by_slab.items():
            index = self._index([i for i, _, _ in entries])
            out[0, index] = self._attend_slab(slab, entries, q[0, index], k[0, index], v[0, index])
        return out

    def _attend_slab(self, slab: Slab, entries: list[tuple[int, int, int]], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (n, H, D), k and v (n, J, D) of entries (row, slot, level) -> (n, H, D)."""
        row_indices, slots, levels = ([entry[i] for entry in entries] for i in range(3))
        parts = [self.parts[i] for i in row_indices]
        positions = self.positions if len(row_indices) == self.n else self.positions[self._index(row_indices)]
        longest = max(part.end for part in parts)
        keys: Tensor
        values: Tensor
        if (
            len(set(levels)) == 1 and slots[-1] - slots[0] == len(slots) - 1 and slots == sorted(slots)
        ):  # adjacent slots at one level: views, no copy
            rows = self._index(range(len(slots)))
            keys, values = (x[slots[0] : slots[0] + len(slots), levels[0]] for x in (slab.keys, slab.values))
            keys[rows, :, positions], values[rows, :, positions] = k.to(keys.dtype), v.to(keys.dtype)
            keys, values = keys[:, :, :longest].to(k.dtype), values[:, :, :longest].to(k.dtype)
        else:
            slot, level = self._index(slots), self._index(levels)
            dtype = slab.keys.dtype
            slab.keys[slot, level, :, positions], slab.values[slot, level, :, positions] = k.to(dtype), v.to(dtype)
            keys, values = (x[slot, level, :, :longest].to(k.dtype) for x in (slab.keys, slab.values))
        mask = self._padding(tuple(row_indices), positions, [part.end for part in parts], q.dtype)
        y = F.scaled_dot_product_attention(q[:, :, None], keys, values, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
        return y[:, :, 0]

    def _index(self, indices: Sequence[int]) -> Tensor:
        key = tuple(indices)
        if key not in self.indices:
            self.indices[key] = torch.tensor(key, device=self.positions.device)
        return self.indices[key]

    def _padding(self, row_indices: tuple[int, ...], positions: Tensor, ends: list[int], dtype: torch.dtype) -> Tensor | None:
        """Additive attention mask (n, 1, 1, T) for padding; None if all sequences have the same length."""
        if min(ends) == max(ends):
            return None
        if row_indices not in self.masks:
            self.masks[row_indices] = _mask(positions, max(ends), dtype)[:, None, None]
        return self.masks[row_indices]

    def _attend_parts(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (1, N, H, D), k and v (1, N, J, D) -> (1, N, H, D): one SDPA call per sequence."""
        gqa = q.shape[2] != k.shape[2]
        outs, first = [], 0
        for i, part in enumerate(self.parts):
            layer_cache, rows = part.cache.layers[layer], slice(first, first + part.count)
            new_keys, new_values = (x[0, rows].transpose(0, 1) for x in (k, v))
            positions = slice(part.positions, part.positions + 1) if isinstance(part.positions, int) else part.positions
            keys, values = layer_cache.write(part.level_step, positions, new_keys, new_values, part.end, part.cache.length)
            mask = None if part.is_whole_prefix or part.count == 1 else self._causal(i, part, first, q.dtype)
            y = F.scaled_dot_product_attention(
                q[:, rows].transpose(1, 2), keys[None], values[None], attn_mask=mask, is_causal=part.is_whole_prefix, enable_gqa=gqa
            )
            outs.append(y.transpose(1, 2))
            first += part.count
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _causal(self, i: int, part: "Part", first: int, dtype: torch.dtype) -> Tensor:
        """Additive causal mask (n, T) for the rows of a part."""
        key = ("part", i)
        if key not in self.masks:
            self.masks[key] = _mask(self.positions[first : first + part.count], part.end, dtype)
        return cast(Tensor, self.masks[key])


def _mask(positions: Tensor, end: int, dtype: torch.dtype) -> Tensor:
    hidden = torch.arange(end, device=positions.device) > positions[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)
