"""Kernels made of torch's operators: any device and precision, the model's own weights, and the reference for the other kernels.

Shapes: N rows, C width, S sequences, H query heads, J key/value heads, T positions, D head width.
"""

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoscale.engine.kernels.base import Kernels, RowKernels
from twoscale.exits.rule import Meter, Numbers
from twoscale.geometry.steps import length
from twoscale.model.layers import MLP, Attend, Block, RMSNorm

if TYPE_CHECKING:
    from twoscale.engine.cache import LayerCache, Place
    from twoscale.engine.rows import Part, Rows


class EagerNorm(nn.Module):
    """RMSNorm in a few operations: x sqrt(C) / sqrt(||x||^2 + C eps) * gain."""

    def __init__(self, norm: RMSNorm) -> None:
        super().__init__()
        self.norm, self.root = norm, math.sqrt(norm.weight.shape[0])
        self.floor = torch.tensor(self.root * math.sqrt(norm.eps), dtype=torch.float32, device=norm.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        norm = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
        return (x32 * (self.root / torch.hypot(norm, self.floor))).mul_(self.norm.weight.detach()).type_as(x)


def measure(before: Tensor, after: Tensor, last: Tensor) -> tuple[Numbers, ...]:
    """||D||, ||D - last||, ||last|| and ||before|| for the step D = after - before of every row (N, C); `last` becomes D."""
    before = before.float()
    step = after.float() - before
    found = length(step), length(step - last), length(last), length(before)
    last.copy_(step)
    return found


class EagerKernels(Kernels):
    """torch's operators on the model's own weights."""

    name = "torch"
    copies_weights = False

    def linear(self, weight: Tensor) -> nn.Module:
        raise AssertionError("the model's own linear maps are used")

    def norm(self, norm: RMSNorm) -> nn.Module:
        return EagerNorm(norm)

    def mlp(self, mlp: MLP, up: nn.Module, down: nn.Module) -> nn.Module:
        new = MLP.__new__(MLP)
        new.__dict__.update(mlp.__dict__)
        new._modules = {"up": up, "down": down}
        return new

    def block(self, block: Block) -> nn.Module:
        return block

    def bind(self, rows: "Rows") -> RowKernels:
        return EagerRows(rows)

    def meter(self) -> Meter:
        return measure

    def addresses(self, keys: Tensor, values: Tensor) -> tuple[int, int]:
        return 0, 0

    def settle(self, store: "LayerCache", k: int, at: "Place") -> None:
        level = (k - 1) % store.max_levels
        for held in (store.keys, store.values):
            held[k : store.depth, :, at] = held[level, :, at]


class EagerRows:
    """Attention of rows: parts of several tokens one by one, single tokens of all sequences in one padded call."""

    def __init__(self, rows: "Rows") -> None:
        self.rows = rows
        self.masks: dict[int, Tensor] = {}
        self.together = len(rows.parts) > 1 and len(rows.parts) == rows.n
        """Whether there are several sequences with one token each."""

    def attention(self, layer: int) -> Attend:
        attend = self._attend_padded if self.together else self._attend_parts
        return lambda q, k, v: attend(layer, q, k, v)

    def _attend_padded(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (1, S, H, D), k and v (1, S, J, D) -> (1, S, H, D): one call for all sequences, shorter ones padded and masked."""
        parts, longest = self.rows.parts, self.rows.longest
        S, J, D = k.shape[1:]
        keys, values = (x.new_zeros(S, J, longest, D) for x in (k, v))
        for i, part in enumerate(parts):
            store = part.cache.layers[layer]
            held_keys, held_values = store.write(part.k or 1, part.at, k[0, i], v[0, i], part.end, part.cache.length)
            keys[i, :, : part.end], values[i, :, : part.end] = held_keys, held_values
        y = F.scaled_dot_product_attention(q[0, :, :, None], keys, values, attn_mask=self._padding(q.dtype), enable_gqa=q.shape[2] != J)
        return y[None, :, :, 0]

    def _padding(self, dtype: torch.dtype) -> Tensor | None:
        """(S, 1, 1, T): what is added to the scores, so that no row attends to padding; None where no sequence is shorter."""
        ends = [part.end for part in self.rows.parts]
        if min(ends) == max(ends):
            return None
        if -1 not in self.masks:
            self.masks[-1] = _mask(self.rows.positions, max(ends), dtype)[:, None, None]
        return self.masks[-1]

    def _attend_parts(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same, one call a sequence."""
        gqa = q.shape[2] != k.shape[2]
        outs, first = [], 0
        for i, part in enumerate(self.rows.parts):
            store, rows = part.cache.layers[layer], slice(first, first + part.count)
            new_keys, new_values = (x[0, rows].transpose(0, 1) for x in (k, v))
            at = slice(part.at, part.at + 1) if isinstance(part.at, int) else part.at
            keys, values = store.write(part.k or 1, at, new_keys, new_values, part.end, part.cache.length)
            mask = None if part.causal or part.count == 1 else self._causal(i, part, first, q.dtype)
            y = F.scaled_dot_product_attention(
                q[:, rows].transpose(1, 2), keys[None], values[None], attn_mask=mask, is_causal=part.causal, enable_gqa=gqa
            )
            outs.append(y.transpose(1, 2))
            first += part.count
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _causal(self, i: int, part: "Part", first: int, dtype: torch.dtype) -> Tensor:
        """(n, T): what is added to the scores of a part's rows, so that none attends to a later position."""
        if i not in self.masks:
            self.masks[i] = _mask(self.rows.positions[first : first + part.count], part.end, dtype)
        return self.masks[i]


def _mask(positions: Tensor, end: int, dtype: torch.dtype) -> Tensor:
    hidden = torch.arange(end, device=positions.device) > positions[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)
