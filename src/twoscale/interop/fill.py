"""A model filled with the weights of a folder, tensor by tensor, in the dtype and on the device that were asked for.

Names, shapes and dtypes are checked by the files' headers before any weight is read, and no two weights are in memory twice.
"""

import contextlib
import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from twoscale.config import ModelConfig, UserError
from twoscale.config.dtypes import DtypeChoice, WeightDtype
from twoscale.engine.kernels.quantize import QuantizedModelBuilder, empty_inference_model, matrices_of
from twoscale.interop.weights import Weights
from twoscale.model import LoopedGPT, allocate
from twoscale.model.quantized import Matrix, scales_shape
from twoscale.train import checkpoint as ckpt

SCALE = "_scale"  # a matrix NAME in int8 has its scales as NAME_scale
LARGE = 1 << 20  # so many entries are converted before freed memory is returned
SAFETENSORS = {"bf16": "BF16", "int8": "I8"}


@dataclass(frozen=True)
class Content:
    """The checked weights of a folder, by our names; each is read when it is asked for."""

    config: ModelConfig
    dtype: WeightDtype
    """Of its matrices."""
    sizes: dict[str, int]
    """Entries of each weight."""
    read: dict[str, Callable[[], Tensor | Matrix]]
    """Names as in LoopedGPT, or as in `empty_inference_model` where the folder is quantised."""
    quantized: bool = False
    """Whether `twoscale convert --dtype` made the folder."""

    def by_size(self) -> list[str]:
        """The largest first, while little else is in memory."""
        return sorted(self.read, key=lambda name: -self.sizes[name])


def plain_content(
    config: ModelConfig, folder: Path, dtype: WeightDtype, shapes: dict[str, tuple[int, ...]], read: Mapping[str, Callable[[], Tensor]]
) -> Content:
    """Weights in floating point, with our names and shapes."""
    with torch.device("meta"):
        ckpt.check_shapes(LoopedGPT(config, seed=None), shapes, folder)
    return Content(config, dtype, {name: torch.Size(shape).numel() for name, shape in shapes.items()}, dict(read))


def quantized_content(config: ModelConfig, weights: Weights, dtype: WeightDtype, prefix: str) -> Content:
    """Weights of a folder that `twoscale convert --dtype` made."""
    folder, outline = weights.folder, empty_inference_model(config)
    matrices = matrices_of(outline)
    scales = {f"{name}{SCALE}" for name in matrices} if dtype == "int8" else set()
    shapes = {name.removeprefix(prefix): shape for name, shape in weights.shapes.items()}
    ckpt.check_shapes(outline, {name: shape for name, shape in shapes.items() if name not in scales}, folder)
    for name in sorted(outline_names := {name for name, _ in outline.named_parameters()}):
        found, wanted = weights.dtypes[prefix + name], SAFETENSORS[dtype] if name in matrices else "F32"
        if found != wanted:
            raise UserError(
                f"{folder}: {name} is stored as {found}, but in a folder of {dtype} it must be {wanted}: convert the model again"
            )
    for name in sorted(scales):
        if name not in shapes:
            raise UserError(f"{folder} lacks the scales {name}: convert the model again")
        if shapes[name] != scales_shape(shapes[name.removesuffix(SCALE)]) or weights.dtypes[prefix + name] != "F32":
            raise UserError(f"{folder}: the scales {name} have another shape or dtype than the weight needs: convert the model again")

    def reader(name: str) -> Callable[[], Tensor | Matrix]:
        if name + SCALE not in scales:
            return lambda: weights[prefix + name]
        return lambda: Matrix(weights[prefix + name], _checked_scales(weights[prefix + name + SCALE], name, folder))

    sizes = {name: torch.Size(shapes[name]).numel() for name in outline_names}
    return Content(config, dtype, sizes, {name: reader(name) for name in outline_names}, quantized=True)


def _checked_scales(scales: Tensor, name: str, folder: Path) -> Tensor:
    if not bool((scales.isfinite() & (scales >= 0)).all()):
        raise UserError(f"{folder}: the scales {name}{SCALE} are not all finite and positive: convert the model again")
    return scales


@torch.no_grad()
def fill(content: Content, dtype: DtypeChoice, device: torch.device) -> LoopedGPT:
    """The model, in evaluation mode. In fp32 it is an ordinary module that can be trained; in another dtype it is for inference alone."""
    chosen = content.dtype if dtype == "auto" else dtype
    if chosen == "fp32":
        return fill_plain(content, torch.float32, device)
    if chosen == "bf16" and device.type != "cpu":  # GPUs compute in bf16 throughout
        model = fill_plain(content, torch.bfloat16, device)
        model.weight_dtype = "bf16"
        return model
    builder = QuantizedModelBuilder(content.config, chosen, device)
    as_stored = (chosen == "w8a8" or chosen == "int8") and content.dtype == "int8"
    since = 0
    for name in content.by_size():
        weight = content.read[name]()
        builder.put(name, weight if as_stored or isinstance(weight, Tensor) else weight.dequantize())
        del weight
        since += content.sizes[name]
        if since >= LARGE:
            _return_freed_memory()
            since = 0
    _return_freed_memory()
    return builder.model


def _return_freed_memory() -> None:
    """Gives what rounding a weight took back to the system; glibc would keep some hundred megabytes of it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@torch.no_grad()
def fill_plain(content: Content, dtype: torch.dtype, device: torch.device) -> LoopedGPT:
    with torch.device("meta"):
        model = LoopedGPT(content.config, seed=None)
    if dtype == torch.float32 and device.type == "cpu":
        allocate(model)
    parameters = dict(model.named_parameters())
    for name, p in parameters.items():
        parts = [name] if name in content.read else [name.replace("weight", f"{half}.weight") for half in ("of_state", "of_input")]
        weights = [content.read[part]() for part in parts]
        tensors = [w if isinstance(w, Tensor) else w.dequantize() for w in weights]
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)
        if p.is_meta:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path).register_parameter(leaf, nn.Parameter(whole.to(device, dtype)))
        else:
            p.copy_(whole)
    return model.eval()
