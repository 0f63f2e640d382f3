"""A copy of a model for decoding: the same stages, groups and loop, with quicker modules inside.

Linear maps, norms and blocks are swapped for modules that compute the same in less time. `kernels` says with what:

    auto    the C kernels of native.c, where they could be built and are the quickest; else as `packed`
    packed  weights packed once for oneDNN, by the operators that torch's own compiler uses; small matrices as `plain`
    plain   F.linear everywhere

With `auto` and `packed` the copy owns all memory that it reads: it decodes with the weights as they were when it was made, and the model
may change, move or go meanwhile. `quicken` compares the fingerprint of the model's weights with that of the copy, and makes a new copy
where they differ. With `plain` nothing is copied: the model's own weights are read at every step. Another device, another precision or
another build of torch means `plain`.

Shapes: N rows, C width.
"""

import ctypes
import math
import threading
from typing import Any, Literal, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoscale.config import UserError
from twoscale.engine.fingerprint import fingerprint, weights_of
from twoscale.engine.native import PANEL, ROWS, BlockWeights, Once, input_and_output, native, panels, pointer, threads_to_use
from twoscale.engine.rows import RowAttention
from twoscale.model import LoopedGPT
from twoscale.model.group import Adapter
from twoscale.model.layers import MLP, Attend, Block, RMSNorm, Rope

Kernels = Literal["auto", "packed", "plain"]

# A packed call costs some 30 us more than a plain one, so small matrices are better off without; a single row needs a
# larger one to pay (measured: 2 cores, AVX2).
PAYS, PAYS_ALONE = 200_000, 1_000_000
PARALLEL = 16_384  # entries from which a second thread pays

M = TypeVar("M", bound=nn.Module)

_PACKING = threading.RLock()  # one thread at a time makes copies; the kernels run without the GIL, and must never lose one that they read


@Once
def can_pack() -> bool:
    """Whether this build of torch has the packed linear operators, and they give the right answer."""
    try:
        x, w = (torch.arange(n * 32, dtype=torch.float32, device="cpu").view(n, 32) for n in (2, 32))
        return torch.allclose(packed_linear(x, pack(w)), F.linear(x, w))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)


def packed_linear(x: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")


class QuickLinear(nn.Module):
    """x -> x @ weight.T from a packed copy of the weight, by the quickest operator for the number of rows at hand."""

    def __init__(self, weight: Tensor, library: Any | None) -> None:
        super().__init__()
        self.rows, self.columns = weight.shape
        self.square, self.library = self.rows == self.columns, library
        self.pays = weight.numel() >= PAYS and can_pack()
        self.pays_alone = self.pays and weight.numel() >= PAYS_ALONE
        self.inside: Tensor | None = None  # for the C kernels
        self.packed: Tensor | None = None  # for oneDNN
        self.weight: Tensor | None = None  # for F.linear
        if library is not None:
            self.inside = panels(weight)
            self.place = pointer(self.inside, -(-self.rows // PANEL) * PANEL * self.columns)
        else:
            self.packed = pack(weight) if self.pays else None
            self.weight = None if self.pays_alone else _own(weight)

    def forward(self, x: Tensor) -> Tensor:
        n = x.numel() // self.columns
        if x.shape[-1] != self.columns:
            raise ValueError(f"an input of width {x.shape[-1]} for a matrix of {self.columns} columns")
        if self.library is not None and n <= ROWS:
            x, at, y, at_y = input_and_output(x, n * self.columns, None if self.square else (*x.shape[:-1], self.rows))
            self.library.linear(threads_to_use(), n, self.columns, self.rows, at, self.place, at_y)
            return y
        if self.pays_alone or (self.pays and n > 1):
            return packed_linear(x, self.packed if self.packed is not None else self._unpack("packed"))
        return F.linear(x, self.weight if self.weight is not None else self._unpack("weight"))

    def _unpack(self, name: Literal["packed", "weight"]) -> Tensor:
        """The copy for more rows than the C kernels take; made from their copy when such rows first come."""
        with _PACKING:
            if getattr(self, name) is None:
                assert self.inside is not None
                weight = self.inside.transpose(1, 2).reshape(-1, self.columns)[: self.rows].contiguous()
                setattr(self, name, pack(weight) if name == "packed" else weight)
        return cast(Tensor, getattr(self, name))


class QuickAdapter(nn.Module):
    """The two halves of a group's adapter."""

    def __init__(self, adapter: Adapter, library: Any | None) -> None:
        super().__init__()
        width, weight = adapter.out_features, adapter.weight.detach()
        self.of_state = QuickLinear(weight[:, :width].contiguous(), library)
        self.of_input = QuickLinear(weight[:, width:].contiguous(), library)


class QuickNorm(nn.Module):
    """RMSNorm in one C call, or in a few operations: x sqrt(C) / sqrt(||x||^2 + C eps) * gain."""

    def __init__(self, norm: RMSNorm, library: Any | None) -> None:
        """`norm` is read at every call, unless it belongs to the copy itself and there is a library."""
        super().__init__()
        self.norm, self.eps, self.library = norm, norm.eps, library
        self.root, weight = math.sqrt(norm.weight.shape[0]), norm.weight
        self.floor = torch.tensor(self.root * math.sqrt(norm.eps), dtype=torch.float32, device=weight.device)
        self.gain = pointer(weight, weight.numel()) if library is not None else 0

    def forward(self, x: Tensor) -> Tensor:
        if self.library is not None and x.dtype == torch.float32:
            C, size = x.shape[-1], x.numel()
            x, at, y, at_y = input_and_output(x, size)
            threads = threads_to_use() if size > PARALLEL else 1
            self.library.rms_norm(threads, size // C, C, at, self.gain, self.eps, at_y)
            return y
        x32 = x.float()
        length = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
        return (x32 * (self.root / torch.hypot(length, self.floor))).mul_(self.norm.weight.detach()).type_as(x)


class QuickMLP(nn.Module):
    """An MLP whose activation is one C call."""

    def __init__(self, mlp: MLP, up: nn.Module, down: nn.Module, library: Any) -> None:
        super().__init__()
        self.up, self.down, self.gated, self.library = up, down, mlp.gated, library

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.up(x).contiguous()
        M = h.shape[-1] // 2 if self.gated else h.shape[-1]
        y = h.new_empty(*h.shape[:-1], M) if self.gated else h
        threads = threads_to_use() if h.numel() > PARALLEL else 1
        n = y.numel() // M
        self.library.silu(threads, n, M, self.gated, pointer(h, n * M * (2 if self.gated else 1)), pointer(y, n * M))
        return cast(Tensor, self.down(y))


class QuickBlock(nn.Module):
    """A block whose rows go through one fused C call; very many rows, and a plain forward, go operator by operator."""

    def __init__(self, block: Block, library: Any) -> None:
        """`block` is a copy with quick modules inside."""
        super().__init__()
        attn, mlp = block.attn, block.mlp
        qkv, out, up, down = (cast(QuickLinear, m) for m in (attn.qkv, attn.out, mlp.up, mlp.down))
        gain1, gain2, gain3, gain4 = (
            norm.gain if isinstance(norm, QuickNorm) else None for norm in (block.norm1, block.norm2, block.norm3, block.norm4)
        )
        bias = None if attn.qk_bias is None else pointer(attn.qk_bias, attn.qk_bias.numel())
        self.block, self.library, self.gains = block, library, (gain2, gain3, gain4)
        self.on_sum, self.eps, self.width, self.head_dim = block.on_sum, block.norm1.eps, qkv.columns, attn.head_dim
        places = (gain1, qkv.place, bias, out.place, gain2, gain3, up.place, down.place, gain4)
        sizes = (qkv.columns, attn.heads, attn.kv_heads, attn.head_dim, down.columns, mlp.gated, block.on_sum)
        self.weights = BlockWeights(*sizes, self.eps, *places)
        self.address = ctypes.addressof(self.weights)
        self.scratch = 3 * qkv.columns + qkv.rows + out.columns + up.rows  # floats for each row

    def forward(self, x: Tensor, rope: Rope | None, attend: Attend) -> Tensor:
        if not isinstance(attend, RowAttention) or not attend.rows.native:
            return self._many(x, rope, attend)
        rows, threads = attend.rows, threads_to_use()
        n = rows.n
        x, at, out, at_out = input_and_output(x, n * self.width)
        cos, sin = (None, None) if rope is None else rows.angles(rope, self.head_dim)
        work = rows.scratch(n * self.scratch + 2 * threads * rows.longest)
        self.library.block(threads, n, self.address, at, cos, sin, attend.seen(), work, at_out)
        return out

    def _many(self, x: Tensor, rope: Rope | None, attend: Attend) -> Tensor:
        """The same for many rows, or whole sequences: norms and sums in C, matmuls by torch."""
        block, (gain2, gain3, gain4), C = self.block, self.gains, x.shape[-1]
        x = x.contiguous()
        n, threads = x.numel() // C, threads_to_use() if x.numel() > PARALLEL else 1
        y, middle, out = block.attn(block.norm1(x), rope, attend), torch.empty_like(x), torch.empty_like(x)
        at_x, at_y, at_middle, at_out = (pointer(t, n * C) for t in (x, y, middle, out))
        self.library.residual_norm(threads, n, C, self.on_sum, at_x, at_y, gain2, gain3, self.eps, at_middle)
        y = block.mlp(y)
        self.library.residual_norm(threads, n, C, self.on_sum, at_middle, pointer(y, n * C), gain4, None, self.eps, at_out)
        return out


def quicken(model: LoopedGPT, kernels: Kernels = "auto") -> LoopedGPT:
    """The copy for decoding. It is made once for a model, and again when the model's weights are no longer those of the copy."""
    if kernels not in ("auto", "packed", "plain"):
        raise UserError(f"kernels = {kernels!r}: choose auto, packed or plain")
    if not all(_packable(w) for _, w in weights_of(model)):
        kernels = "plain"
    # A plain copy reads the model's own weights; it has to be made again only where a module was replaced.
    state = list(model.modules())[1:] if kernels == "plain" else fingerprint(model)
    with _PACKING:
        made = _MADE.setdefault(model, {})
        if kernels not in made or made[kernels][0] != state:
            with torch.inference_mode(False), torch.no_grad():
                made[kernels] = (state, _quick(model, kernels))
        return made[kernels][1]


def library_of(model: LoopedGPT) -> Any | None:
    """The C kernels, if this is a copy that uses them."""
    return next((block.library for block in model.blocks() if isinstance(block, QuickBlock)), None)


_MADE: WeakKeyDictionary[LoopedGPT, dict[str, tuple[object, LoopedGPT]]] = WeakKeyDictionary()


def _packable(weight: Tensor) -> bool:
    known = type(weight) in (Tensor, nn.Parameter)  # a subclass may keep its values elsewhere
    return known and weight.is_cpu and weight.dtype == torch.float32 and weight.is_contiguous() and weight.layout == torch.strided


def _own(weight: Tensor) -> Tensor:
    return weight.detach().clone(memory_format=torch.contiguous_format)


def _quick(model: LoopedGPT, kernels: Kernels) -> LoopedGPT:
    library = native() if kernels == "auto" else None
    packs = kernels != "plain"
    done: dict[int, nn.Module] = {}

    def children(module: M) -> M:
        new = _shallow(module)
        new._modules = {name: child and copy(child) for name, child in module._modules.items()}
        if packs:
            own = {name: p if p is None else nn.Parameter(_own(p), requires_grad=False) for name, p in module._parameters.items()}
            new._parameters, new._buffers = own, {name: b if b is None else _own(b) for name, b in module._buffers.items()}
        return new

    def make(module: nn.Module) -> nn.Module:
        if isinstance(module, Adapter) and packs:
            return QuickAdapter(module, library)
        if isinstance(module, nn.Linear) and module.bias is None and packs:
            return QuickLinear(module.weight.detach(), library)
        if isinstance(module, RMSNorm):
            return QuickNorm(children(module) if packs else module, library)
        if isinstance(module, MLP) and library is not None:
            return QuickMLP(module, copy(module.up), copy(module.down), library)
        if isinstance(module, Block) and library is not None:
            return QuickBlock(children(module), library)
        return children(module)

    def copy(module: nn.Module) -> nn.Module:
        if id(module) not in done:
            done[id(module)] = make(module)
        return done[id(module)]

    quick = cast(LoopedGPT, copy(model))
    if quick.lm_head is None and packs:
        quick.lm_head = QuickLinear(model.wte.weight.detach(), library)  # type: ignore[assignment]
    return quick


def _shallow(module: M) -> M:
    """The same module object again, with the same parameters, whose children can be swapped."""
    new = module.__class__.__new__(module.__class__)
    new.__dict__.update(module.__dict__)
    return new
