"""A copy of a model for decoding: the same stages, groups and loop, with the modules of a set of kernels inside.

    native  the C kernels, where they could be built
    packed  weights packed once for oneDNN, by the operators that torch's own compiler uses; small matrices by F.linear
    torch   torch's operators on the model's own weights: any device and precision
    auto    native where it can be had, else packed

With `native` and `packed` the copy owns all memory that it reads: it decodes with the weights as they were when it was made, and the
model may change, move or go meanwhile. `optimize_for_decode` compares the fingerprint of the model's weights with that of the copy, and
makes a new copy where they differ. With `torch` nothing is copied. Another device or another precision means `torch`.
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
from twoscale.engine.kernels.library import native
from twoscale.engine.kernels.native import NativeKernels
from twoscale.engine.kernels.packed import PackedKernels, own_copy
from twoscale.engine.kernels.torch_ops import TorchKernels
from twoscale.model import LoopedGPT
from twoscale.model.group import Adapter
from twoscale.model.layers import MLP, Block, RMSNorm

KernelName = Literal["auto", "native", "packed", "torch"]
NAMES = ("auto", "native", "packed", "torch")

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class DecodeCopy:
    """A model to decode with, and the kernels inside of it."""

    model: LoopedGPT
    kernels: Kernels


class SplitAdapter(nn.Module):
    """The two halves of a group's adapter."""

    def __init__(self, adapter: Adapter, kernels: Kernels) -> None:
        super().__init__()
        width, weight = adapter.out_features, adapter.weight.detach()
        self.of_state = kernels.linear(weight[:, :width].contiguous())
        self.of_input = kernels.linear(weight[:, width:].contiguous())


_COPYING = threading.RLock()  # one thread at a time makes copies; kernels run without the GIL, and must never lose one that they read
_COPIES: WeakKeyDictionary[LoopedGPT, dict[str, tuple[object, DecodeCopy]]] = WeakKeyDictionary()


def choose_kernels(name: KernelName, model: LoopedGPT) -> Kernels:
    """The kernels for a model by their name; `torch` where the model's weights are not plain fp32 on the CPU."""
    if name not in NAMES:
        raise UserError(f"kernels = {name!r}: choose one of {', '.join(NAMES)}")
    if name == "torch" or not all(_is_plain(w) for _, w in weights_of(model)):
        return TorchKernels()
    library = None if name == "packed" else native()
    if library is not None:
        return NativeKernels(library)
    if name == "native":
        raise UserError("kernels = 'native': there is no C compiler, or the C kernels are turned off (TWOSCALE_NATIVE=0)")
    return PackedKernels()


def optimize_for_decode(model: LoopedGPT, kernels: KernelName = "auto") -> DecodeCopy:
    """The copy for decoding. It is made once for a model, and again when the model's weights are no longer those of the copy."""
    chosen = choose_kernels(kernels, model)
    # A copy that reads the model's own weights has to be made again only where a module was replaced.
    state = fingerprint(model) if chosen.copies_weights else list(model.modules())[1:]
    with _COPYING:
        copies = _COPIES.setdefault(model, {})
        if chosen.name not in copies or copies[chosen.name][0] != state:
            with torch.inference_mode(False), torch.no_grad():
                copies[chosen.name] = (state, DecodeCopy(_copy(model, chosen), chosen))
        return copies[chosen.name][1]


def _is_plain(weight: Tensor) -> bool:
    known = type(weight) in (Tensor, nn.Parameter)  # a subclass may keep its values elsewhere
    return known and weight.is_cpu and weight.dtype == torch.float32 and weight.is_contiguous() and weight.layout == torch.strided


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
        if isinstance(module, Adapter) and copies:
            return SplitAdapter(module, kernels)
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
