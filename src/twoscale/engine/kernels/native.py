"""The `native` kernels, in C: linear maps, norms and activations in one call each, for any number of rows. A block is one call for up to
MAX_FUSED_ROWS rows, and one call per operator above.

A row's result is bit-equal in every batch. On AVX2 and AVX-512 the matrix products are faster than oneDNN's for up to about 32 rows and
equally fast above (measured: 2 cores, widths 128 to 768), so they are used for every number of rows.

Shapes: N rows, C width, H query heads, J key/value heads, D head width.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from twoscale.engine.kernels.base import Kernels, RowKernels, StageKernels
from twoscale.engine.kernels.library import (
    MAX_FUSED_ROWS,
    BlockWeights,
    Library,
    input_and_output,
    pointer,
    score_floats,
    threads_to_use,
)  # fmt: skip
from twoscale.engine.kernels.native_decode import NativeDecoder
from twoscale.engine.kernels.native_rows import (
    NORMS,
    EmbedRows,
    NativeAttention,
    NativeRowKernels,
    NativeStageKernels,
    NativeStatistic,
    scratch,
)
from twoscale.engine.kernels.panels import Panels, to_panels
from twoscale.engine.kernels.torch_ops import TorchKernels
from twoscale.exits.rule import Numbers, StatisticFunction, UpdateNormsFunction
from twoscale.exits.statistics import Condition
from twoscale.model import LoopedGPT
from twoscale.model.layers import MLP, Block, RMSNorm, Rope
from twoscale.model.quantized import as_matrix

if TYPE_CHECKING:
    from twoscale.engine.cache import LayerCache, Positions
    from twoscale.engine.engine import Engine
    from twoscale.engine.rows import Rows

MIN_PARALLEL_SIZE = 16_384  # elements from which several threads are faster than one


class NativeLinear(nn.Module):
    """x -> x @ weight.T with the weight in panels. The panels never change, so models and their inference copies share them."""

    def __init__(self, panels: Panels, library: Library) -> None:
        super().__init__()
        self.out_features, self.in_features = panels.shape
        self.square, self.library, self.panels = self.out_features == self.in_features, library, panels
        self.address = panels.address

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:  # under autocast
            return self(x.float()).type_as(x)
        n = x.numel() // self.in_features
        if x.shape[-1] != self.in_features:
            raise ValueError(f"an input of width {x.shape[-1]} for a linear map of inputs of width {self.in_features}")
        x, x_ptr, y, y_ptr = input_and_output(x, n * self.in_features, None if self.square else (*x.shape[:-1], self.out_features))
        self.library.linear(threads_to_use(), n, self.address, x_ptr, y_ptr)
        return y

    def __deepcopy__(self, memo: object) -> "NativeLinear":
        return self


class NativeEmbedding(nn.Module):
    """ids -> rows of an embedding in panels, as fp32; the head may use the same panels."""

    def __init__(self, panels: Panels) -> None:
        super().__init__()
        self.panels = panels

    def forward(self, ids: Tensor) -> Tensor:
        return self.panels.rows(ids.flatten()).view(*ids.shape, -1)

    def __deepcopy__(self, memo: object) -> "NativeEmbedding":
        return self


class NativeNorm(nn.Module):
    """RMSNorm in one call."""

    def __init__(self, norm: RMSNorm, library: Library) -> None:
        """`norm` belongs to the inference copy, so the address of its weight does not change."""
        super().__init__()
        self.norm, self.eps, self.library = norm, norm.eps, library
        self.gain_address = pointer(norm.weight, norm.weight.numel())

    def forward(self, x: Tensor) -> Tensor:
        C, size = x.shape[-1], x.numel()
        x, x_ptr, y, y_ptr = input_and_output(x, size)
        threads = threads_to_use() if size > MIN_PARALLEL_SIZE else 1
        self.library.rms_norm(threads, size // C, C, x_ptr, self.gain_address, self.eps, y_ptr)
        return y


class NativeMLP(nn.Module):
    """An MLP whose activation is one call."""

    def __init__(self, mlp: MLP, up: nn.Module, down: nn.Module, library: Library) -> None:
        super().__init__()
        self.up, self.down, self.gated, self.library = up, down, mlp.gated, library

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.up(x).contiguous()
        M = h.shape[-1] // 2 if self.gated else h.shape[-1]
        y = h.new_empty(*h.shape[:-1], M) if self.gated else h
        threads = threads_to_use() if h.numel() > MIN_PARALLEL_SIZE else 1
        n = y.numel() // M
        self.library.silu(threads, n, M, self.gated, pointer(h, n * M * (2 if self.gated else 1)), pointer(y, n * M))
        return cast(Tensor, self.down(y))


class NativeBlock(nn.Module):
    """A transformer block as one fused call; with more than MAX_FUSED_ROWS rows one call per operator."""

    def __init__(self, block: Block, library: Library) -> None:
        """`block` belongs to the inference copy; its submodules are native already."""
        super().__init__()
        attn, mlp = block.attn, block.mlp
        qkv, out, up, down = (cast(NativeLinear, m) for m in (attn.qkv, attn.out, mlp.up, mlp.down))
        norms = (cast(nn.Module, norm) for norm in (block.norm1, block.norm2, block.norm3, block.norm4))
        # Gains of the norms of attention input, attention output, MLP input, MLP output. Output norms are None in a pre-norm block.
        gain1, gain2, gain3, gain4 = (norm.gain_address if isinstance(norm, NativeNorm) else None for norm in norms)
        bias = None if attn.qk_bias is None else pointer(attn.qk_bias, attn.qk_bias.numel())
        self.block, self.library, self.gains = block, library, (gain2, gain3, gain4)
        self.norm_after_add, self.eps = block.norm_after_add, block.norm1.eps
        self.width, self.head_dim = qkv.in_features, attn.head_dim
        matrices = (m.panels.struct for m in (qkv, out, up, down))
        sizes = (qkv.in_features, attn.heads, attn.kv_heads, attn.head_dim, down.in_features, mlp.gated, block.norm_after_add)
        self.weights = BlockWeights(*sizes, self.eps, gain1, bias, gain2, gain3, gain4, *matrices)
        self.address = ctypes.addressof(self.weights)
        self.scratch_per_row = 3 * qkv.in_features + qkv.out_features + out.in_features + up.out_features  # floats

    def forward(self, x: Tensor, rope: Rope | None, attend: NativeAttention) -> Tensor:
        rows, threads = attend.row_kernels, threads_to_use()
        if rows.n > MAX_FUSED_ROWS:
            return self._operator_by_operator(x, rope, attend)
        n = rows.n
        x, x_ptr, out, out_ptr = input_and_output(x, n * self.width)
        cos, sin = (None, None) if rope is None else rows.cos_sin_addresses(rope, self.head_dim)
        work = scratch(n * self.scratch_per_row + score_floats(threads, rows.longest))
        self.library.block(threads, n, self.address, x_ptr, cos, sin, attend.view_address(), work, out_ptr)
        return out

    def _operator_by_operator(self, x: Tensor, rope: Rope | None, attend: NativeAttention) -> Tensor:
        block, (gain2, gain3, gain4), C = self.block, self.gains, x.shape[-1]
        x = x.contiguous()
        n, threads = x.numel() // C, threads_to_use()
        y, residual, out = block.attn(block.norm1(x), rope, attend), torch.empty_like(x), torch.empty_like(x)
        x_ptr, y_ptr, residual_ptr, out_ptr = (pointer(t, n * C) for t in (x, y, residual, out))
        self.library.residual_norm(threads, n, C, self.norm_after_add, x_ptr, y_ptr, gain2, gain3, self.eps, residual_ptr)
        y = block.mlp(y)
        self.library.residual_norm(threads, n, C, self.norm_after_add, residual_ptr, pointer(y, n * C), gain4, None, self.eps, out_ptr)
        return out


class NativeUpdateNorms:
    """Computes the update norms of all rows in one call; see `exits.rule.UpdateNormsFunction`."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self._one_row = (ctypes.c_float * NORMS)()
        self._checked: tuple[Tensor | None, int, Tensor | None, int] = (None, 0, None, 0)

    def __call__(self, before: Tensor, after: Tensor, previous_update: Tensor) -> Sequence[Numbers]:
        n, C = after.shape
        norms = self._one_row if n == 1 else (ctypes.c_float * (NORMS * n))()
        threads = 1 if n * C < MIN_PARALLEL_SIZE else threads_to_use()
        # One step's `after` is the next one's `before`, and `previous_update` is changed in place: their addresses were checked a step ago.
        checked, after_ptr = self._checked, pointer(after, n * C)
        before_ptr = checked[1] if before is checked[0] else pointer(before, n * C)
        previous_ptr = checked[3] if previous_update is checked[2] else pointer(previous_update, n * C)
        self._checked = after, after_ptr, previous_update, previous_ptr
        self.library.update_norms(threads, n, C, before_ptr, after_ptr, previous_ptr, norms)
        # As doubles, like the Python floats of a single row: the comparison with a threshold must not depend on the batch.
        return norms if n == 1 else torch.frombuffer(norms, dtype=torch.float32).view(n, NORMS).double().unbind(dim=1)  # type: ignore[return-value]


class NativeKernels(TorchKernels):
    """The C kernels with their own copy of the weights."""

    name = "native"
    copies_weights = True
    batch_invariant = True

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.library = library

    def for_engine(self) -> Kernels:
        return self

    def linear(self, weight: Tensor) -> nn.Module:
        return NativeLinear(to_panels(as_matrix(weight), "fp32"), self.library)

    def norm(self, norm: RMSNorm) -> nn.Module:
        return NativeNorm(norm, self.library)

    def mlp(self, mlp: MLP, up: nn.Module, down: nn.Module) -> nn.Module:
        return NativeMLP(mlp, up, down, self.library)

    def block(self, block: Block) -> nn.Module:
        return NativeBlock(block, self.library)

    def embedding(self, model: LoopedGPT) -> "Callable[[Rows], Tensor]":
        readable = isinstance(model.wte, nn.Embedding | NativeEmbedding) and (model.wpe is None or isinstance(model.wpe, nn.Embedding))
        return EmbedRows(model, self.library) if readable else super().embedding(model)

    def stage_kernels(self, module: nn.Module, first_layer: int) -> StageKernels:
        return NativeStageKernels(module, first_layer, self.library)

    def decoder(self, engine: "Engine") -> NativeDecoder | None:
        return NativeDecoder.of(engine)

    def bind(self, rows: "Rows") -> RowKernels:
        return NativeRowKernels(rows, self.library)  # type: ignore[return-value]

    def update_norms_function(self) -> UpdateNormsFunction:
        return NativeUpdateNorms(self.library)

    def statistic_function(self, condition: Condition) -> StatisticFunction | None:
        # Statistics that Python computes from the update norms have the same bits as in C: only the others need C.
        from_norms = not condition.statistic.reads_logits and not condition.parameters
        return None if from_norms else NativeStatistic(condition, self.library)

    def allocate(self, layer: int, shape: tuple[int, int, int, int], like: Tensor) -> tuple[Tensor, Tensor, object | None]:
        return like.new_empty(shape), like.new_empty(shape), None

    def addresses(self, keys: Tensor, values: Tensor) -> tuple[int, int]:
        dtype = torch.bfloat16 if keys.dtype is torch.bfloat16 else torch.float32  # the formats of attention.c
        return pointer(keys, keys.numel(), dtype), pointer(values, values.numel(), dtype)

    def fill_deeper_levels(self, layer_cache: "LayerCache", step: int, positions: "Positions") -> None:
        if not isinstance(positions, int):
            return super().fill_deeper_levels(layer_cache, step, positions)
        J, capacity, D = layer_cache.shape
        level = (step - 1) % layer_cache.max_levels
        form = layer_cache.kv_pointers.format
        self.library.fill_deeper_levels(J, D, form, capacity, positions, level, step, layer_cache.n_levels, *layer_cache.addresses)
        return None
