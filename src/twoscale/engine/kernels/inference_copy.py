"""A copy of a model for inference: the same structure, with linear maps, norms, MLPs and blocks replaced by those of a backend.

    native  the C kernels, if they could be compiled
    packed  weights prepacked for oneDNN, with the operators that torch.compile uses; F.linear for small matrices
    torch   torch's operators on the model's own weights: any device and dtype
    auto    native if available, else packed

With `native` and `packed` the copy owns all its memory: later changes of the model do not affect it, and the model may be moved or freed.
`optimize_for_inference` compares a fingerprint of the model's weights with that of the cached copy, and makes a new copy if they differ.
With `torch` nothing is copied. A model on a GPU, or with a parameter or buffer in another dtype than fp32, always uses `torch`. Weights in
panels (`quantize.py`: bf16, int8, w8a8) are neither parameters nor buffers, so a model that has them may use any kernels; the model and its
copy share them.
"""

import threading
from dataclasses import dataclass
from typing import Literal, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from twoscale.config import UserError
from twoscale.engine.kernels.base import Kernels
from twoscale.engine.kernels.fingerprint import fingerprint, weights_of
from twoscale.engine.kernels.library import c_library
from twoscale.engine.kernels.native import NativeEmbedding, NativeKernels, NativeLinear
from twoscale.engine.kernels.packed import PackedKernels, own_copy
from twoscale.engine.kernels.torch_ops import TorchKernels
from twoscale.model import LoopedGPT
from twoscale.model.group import Adapter, SplitAdapter
from twoscale.model.layers import MLP, Block, RMSNorm
from twoscale.model.quantized import QuantizedLinear

KernelName = Literal["auto", "native", "packed", "torch"]
NAMES = ("auto", "native", "packed", "torch")

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class InferenceCopy:
    """A copy of a model for inference, prefill and decode, and its kernels.

    With the `torch` kernels it shares the model's weights; under autocast `model` is the model itself (see `Engine`).
    """

    model: LoopedGPT
    kernels: Kernels


_COPYING = threading.RLock()  # one thread at a time makes copies: kernels run without the GIL, and the weights they read must not be freed
_COPIES: WeakKeyDictionary[LoopedGPT, dict[str, tuple[object, InferenceCopy]]] = WeakKeyDictionary()


def choose_kernels(name: KernelName, model: LoopedGPT) -> Kernels:
    """The kernels for a model by name; always `torch` unless all weights are plain fp32 tensors on the CPU, or in panels."""
    if name not in NAMES:
        raise UserError(f"kernels = {name!r}: choose one of {', '.join(NAMES)}")
    has_torch_quantized = any(isinstance(module, QuantizedLinear) for module in model.modules())
    if name == "torch" or has_torch_quantized or not all(_is_plain(w) for _, w in weights_of(model)):
        return TorchKernels()
    library = None if name == "packed" else c_library()
    if library is not None:
        return NativeKernels(library)
    if name == "native":
        raise UserError("kernels = 'native': there is no C compiler, or the C kernels are turned off (TWOSCALE_NATIVE=0)")
    return PackedKernels()


def optimize_for_inference(model: LoopedGPT, kernels: KernelName = "auto") -> InferenceCopy:
    """The model's copy for inference. It is cached, and made again when the model's weights have changed."""
    chosen = choose_kernels(kernels, model)
    # A copy that uses the model's own weights must be made again only if a module was replaced.
    state = fingerprint(model) if chosen.copies_weights else list(model.modules())[1:]
    with _COPYING:
        copies = _COPIES.setdefault(model, {})
        if chosen.name not in copies or copies[chosen.name][0] != state:
            with torch.inference_mode(False), torch.no_grad():
                copies[chosen.name] = (state, InferenceCopy(_copy(model, chosen), chosen))
        return copies[chosen.name][1]


def _is_plain(weight: Tensor) -> bool:
    ordinary = type(weight) in (Tensor, nn.Parameter)  # a subclass may store its values elsewhere
    return ordinary and weight.is_cpu and weight.dtype == torch.float32 and weight.is_contiguous() and weight.layout == torch.strided


def _copy(model: LoopedGPT, kernels: Kernels) -> LoopedGPT:
    copies = kernels.copies_weights
    done: dict[int, nn.Module] = {}

    def with_new_children(module: M) -> M:
        new = module.__class__.__new__(module.__class__)
        new.__dict__.update(module.__dict__)
        new._modules = {name: child and replacement(child) for name, child in module._modules.items()}
        if copies:
            own = {name: p if p is None else nn.Parameter(own_copy(p), requires_grad=False) for name, p in module._parameters.items()}
            new._parameters, new._buffers = own, {name: b if b is None else own_copy(b) for name, b in module._buffers.items()}
        return new

    def make(module: nn.Module) -> nn.Module:
        if isinstance(module, NativeLinear | NativeEmbedding):
            return module  # its panels never change
        if isinstance(module, Adapter) and copies:
            return SplitAdapter(*(kernels.linear(half.contiguous()) for half in module.weight.detach().chunk(2, dim=1)))
        if isinstance(module, nn.Linear) and module.bias is None and copies:
            return kernels.linear(module.weight.detach())
        if isinstance(module, RMSNorm):
            return kernels.norm(with_new_children(module) if copies else module)
        if isinstance(module, MLP):
            return kernels.mlp(module, replacement(module.up), replacement(module.down))
        if isinstance(module, Block):
            return kernels.block(with_new_children(module))
        return with_new_children(module)

    def replacement(module: nn.Module) -> nn.Module:
        if id(module) not in done:
            done[id(module)] = make(module)
        return done[id(module)]

    new = cast(LoopedGPT, replacement(model))
    if new.lm_head is None and copies:
        new.lm_head = kernels.linear(model.wte.weight.detach())  # type: ignore[assignment]
    return new
