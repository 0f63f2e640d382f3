"""A copy of a model for decoding: the same stages, groups and loop, with quicker modules inside.

The copy shares the model's parameters and its code; only linear maps, norms and blocks are swapped for modules that
compute the same in less time. `kernels` says with what:

    auto    the C kernels of native.c, where they could be built and are the quickest; else as `packed`
    packed  weights packed once for oneDNN, by the operators that torch's own compiler uses; small matrices as `plain`
    plain   F.linear everywhere

Another device, another precision or another build of torch means `plain`.

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
from twoscale.engine.native import PANEL, ROWS, BlockWeights, Once, native, panels, pointer
from twoscale.engine.rows import RowAttention
from twoscale.model import LoopedGPT
from twoscale.model.group import Adapter
from twoscale.model.layers import MLP, Attend, Block, RMSNorm, Rope

Kernels = Literal["auto", "packed", "plain"]

# A packed call costs some 30 us more than a plain one, so small matrices are better off without; a single row needs a
# larger one to pay, and with many rows both are alike (measured: 2 cores, AVX2).
PAYS, PAYS_ALONE, MANY = 200_000, 1_000_000, 256
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
    """x -> x @ weight.T, by the quickest operator for the number of rows at hand."""

    def __init__(self, weight: Tensor, kernels: Kernels) -> None:
        super().__init__()
        self.weight = weight.detach()
        self.rows, self.columns = weight.shape
        quick = kernels != "plain" and weight.device.type == "cpu" and weight.dtype == torch.float32
        self.native = native() if quick and kernels == "auto" and weight.is_contiguous() else None
        self.pays = quick and weight.numel() >= PAYS and can_pack()
        self.pays_alone = self.pays and weight.numel() >= PAYS_ALONE
        self.packed: Tensor | None = None
        self.inside: Tensor | None = None  # for the C kernels

    def forward(self, x: Tensor) -> Tensor:
        n = x.numel() // self.columns
        if self.native is not None and n <= ROWS and x.dtype is torch.float32:
            x, y = x.contiguous(), x.new_empty(*x.shape[:-1], self.rows)
            if self.inside is None:
                with _PACKING:
                    self.inside = panels(self.weight) if self.inside is None else self.inside
            weight = pointer(self.inside, -(-self.rows // PANEL) * PANEL * self.columns)
            places = pointer(x, n * self.columns), weight, pointer(y, n * self.rows)
            self.native.linear(torch.get_num_threads(), n, self.columns, self.rows, *places)
            return y
        if n <= MANY and (self.pays_alone or (self.pays and n > 1)):
            if self.packed is None:
                with _PACKING:
                    self.packed = pack(self.weight) if self.packed is None else self.packed
            return packed_linear(x, self.packed)
        return F.linear(x, self.weight)


class QuickAdapter(nn.Module):
    """The two halves of a group's adapter."""

    def __init__(self, adapter: Adapter, kernels: Kernels) -> None:
        super().__init__()
        width = adapter.out_features
        self.of_state = QuickLinear(adapter.weight[:, :width].contiguous(), kernels)
        self.of_input = QuickLinear(adapter.weight[:, width:].contiguous(), kernels)


class QuickNorm(nn.Module):
    """RMSNorm in one C call, or in four operations: x / sqrt(||x||^2 + C eps) * (sqrt(C) gain)."""

    def __init__(self, norm: RMSNorm, library: Any | None) -> None:
        super().__init__()
        width = norm.weight.shape[0]
        self.gain = norm.weight.detach().float() * math.sqrt(width)
        self.weight, self.eps, self.library = norm.weight.detach(), norm.eps, library
        self.floor = torch.tensor(math.sqrt(width * norm.eps), dtype=torch.float32, device=norm.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        if self.library is not None and x.dtype == torch.float32:
            x, C = x.contiguous(), x.shape[-1]
            y, size = torch.empty_like(x), x.numel()
            threads = torch.get_num_threads() if size > PARALLEL else 1
            self.library.norms(threads, size // C, C, pointer(x, size), pointer(self.weight, C), self.eps, pointer(y, size))
            return y
        x32 = x.float()
        length = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
        return (x32 / torch.hypot(length, self.floor)).mul_(self.gain).type_as(x)


class QuickMLP(nn.Module):
    """An MLP whose activation is one C call."""

    def __init__(self, mlp: MLP, up: nn.Module, down: nn.Module, library: Any) -> None:
        super().__init__()
        self.up, self.down, self.gated, self.library = up, down, mlp.gated, library

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.up(x).contiguous()
        M = h.shape[-1] // 2 if self.gated else h.shape[-1]
        y = h.new_empty(*h.shape[:-1], M) if self.gated else h
        threads = torch.get_num_threads() if h.numel() > PARALLEL else 1
        n = y.numel() // M
        self.library.silus(threads, n, M, self.gated, pointer(h, n * M * (2 if self.gated else 1)), pointer(y, n * M))
        return cast(Tensor, self.down(y))


class QuickBlock(nn.Module):
    """A block whose rows go through one fused C call; very many rows, and a plain forward, go operator by operator."""

    def __init__(self, block: Block, ordinary: Block, library: Any) -> None:
        super().__init__()
        self.block, self.ordinary, self.library = [block], ordinary, library  # in a list: it is not a child
        self.on_sum, self.eps, self.width, self.head_dim = block.on_sum, block.norm1.eps, block.attn.qkv.in_features, block.attn.head_dim
        norms = (block.norm2, block.norm3, block.norm4)
        self.gains = [pointer(norm.weight, norm.weight.numel()) if isinstance(norm, RMSNorm) else None for norm in norms]
        self.address: int | None = None

    def _open(self) -> int:
        """Put the weights into panels and tell the kernel where everything lies; when few rows first come."""
        with _PACKING:
            return self.address or self._pack()

    def _pack(self) -> int:
        block = self.block[0]
        attn, mlp = block.attn, block.mlp
        order: tuple[Any, ...] = (block.norm1, attn.qkv, attn.qk_bias, attn.out, block.norm2, block.norm3, mlp.up, mlp.down, block.norm4)
        weights = [_inside(m) for m in order]
        sizes = (attn.qkv.in_features, attn.heads, attn.kv_heads, attn.head_dim, mlp.down.in_features)
        places = (None if w is None else pointer(w, w.numel()) for w in weights)
        self.inside = weights, BlockWeights(*sizes, mlp.gated, block.on_sum, self.eps, *places)
        self.scratch = 3 * sizes[0] + 2 * (attn.heads + attn.kv_heads) * attn.head_dim + mlp.up.out_features
        self.address = ctypes.addressof(self.inside[1])
        return self.address

    def forward(self, x: Tensor, rope: Rope | None, attend: Attend) -> Tensor:
        if not isinstance(attend, RowAttention) or not attend.rows.native:
            return self._many(x, rope, attend)
        rows, address, threads = attend.rows, self.address or self._open(), torch.get_num_threads()
        x = x.contiguous()
        out, size = torch.empty_like(x), rows.n * self.width
        cos, sin = (None, None) if rope is None else (pointer(angle, rows.n * self.head_dim) for angle in rope)
        work = rows.scratch(rows.n * self.scratch + 2 * threads * rows.longest)
        self.library.block(threads, rows.n, address, pointer(x, size), cos, sin, attend.seen(), work, pointer(out, size))
        return out

    def _many(self, x: Tensor, rope: Rope | None, attend: Attend) -> Tensor:
        """The same for many rows, or whole sequences: norms and sums in C, matmuls by torch."""
        block, (gain2, gain3, gain4), C = self.ordinary, self.gains, x.shape[-1]
        x = x.contiguous()
        n, threads = x.numel() // C, torch.get_num_threads() if x.numel() > PARALLEL else 1
        y, middle, out = block.attn(block.norm1(x), rope, attend), torch.empty_like(x), torch.empty_like(x)
        at_x, at_y, at_middle, at_out = (pointer(t, n * C) for t in (x, y, middle, out))
        self.library.joins(threads, n, C, self.on_sum, at_x, at_y, gain2, gain3, self.eps, at_middle)
        y = block.mlp(y)
        self.library.joins(threads, n, C, self.on_sum, at_middle, pointer(y, n * C), gain4, None, self.eps, at_out)
        return out


def _inside(part: nn.Module | nn.Parameter | None) -> Tensor | None:
    """The weights of a part of a block as the kernel wants them; None where there are none."""
    if isinstance(part, nn.Linear):
        return panels(part.weight)
    return part.weight.detach() if isinstance(part, RMSNorm) else part if isinstance(part, Tensor) else None


def quicken(model: LoopedGPT, kernels: Kernels = "auto") -> LoopedGPT:
    """The copy for decoding; made once for a model, and again when its weights have changed."""
    if kernels not in ("auto", "packed", "plain"):
        raise UserError(f"kernels = {kernels!r}: choose auto, packed or plain")
    state = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters()]
    with _PACKING:
        made = _MADE.setdefault(model, {})
        if kernels not in made or made[kernels][0] != state:
            made[kernels] = (state, _quick(model, kernels))
        return made[kernels][1]


def library_of(model: LoopedGPT) -> Any | None:
    """The C kernels, if this is a copy that uses them."""
    return next((block.library for block in model.blocks() if isinstance(block, QuickBlock)), None)


_MADE: WeakKeyDictionary[LoopedGPT, dict[str, tuple[list[tuple[int, int]], LoopedGPT]]] = WeakKeyDictionary()


def _quick(model: LoopedGPT, kernels: Kernels) -> LoopedGPT:
    weights = list(model.parameters())
    whole = all(w.device.type == "cpu" and w.dtype == torch.float32 and w.is_contiguous() for w in weights)
    library = native() if kernels == "auto" and whole else None
    done: dict[int, nn.Module] = {}

    def children(module: M) -> M:
        new = _shallow(module)
        new._modules = {name: child and copy(child) for name, child in module._modules.items()}
        return new

    def copy(module: nn.Module) -> nn.Module:
        if id(module) not in done:
            if isinstance(module, Adapter):
                done[id(module)] = QuickAdapter(module, kernels)
            elif isinstance(module, nn.Linear) and module.bias is None:
                done[id(module)] = QuickLinear(module.weight, kernels)
            elif isinstance(module, RMSNorm):
                done[id(module)] = QuickNorm(module, library)
            elif isinstance(module, MLP) and library is not None:
                done[id(module)] = QuickMLP(module, copy(module.up), copy(module.down), library)
            elif isinstance(module, Block) and library is not None:
                done[id(module)] = QuickBlock(module, children(module), library)
            else:
                done[id(module)] = children(module)
        return done[id(module)]

    quick = cast(LoopedGPT, copy(model))
    if quick.lm_head is None:
        quick.lm_head = QuickLinear(model.wte.weight, kernels)  # type: ignore[assignment]
    return quick


def _shallow(module: M) -> M:
    """The same module object again, with the same parameters, whose children can be swapped."""
    new = module.__class__.__new__(module.__class__)
    new.__dict__.update(module.__dict__)
    return new
