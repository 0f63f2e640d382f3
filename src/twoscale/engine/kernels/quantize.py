"""Models for inference alone, with weight matrices in bf16, int8 or w8a8.

A `QuantizedModelBuilder` takes a model's weights one by one and puts each into its final place: matrices into panels for the C kernels, or,
without them and on other devices, into modules that dequantize some rows at a time on each call. So no weight is in memory twice. Embedding
and head are matrices too; norms, biases, learned positions and the exit gate stay fp32.

Such a model runs in `generate`, `forward`, `trace` and all that builds on them. It cannot be trained or saved.
"""

import copy

import torch
from torch import Tensor, nn

from twoscale.config import ModelConfig, UserError
from twoscale.config.dtypes import WeightDtype
from twoscale.engine.kernels.library import c_library
from twoscale.engine.kernels.native import NativeEmbedding, NativeLinear
from twoscale.engine.kernels.panels import MAX_INPUTS, to_panels
from twoscale.model import LoopedGPT
from twoscale.model.group import SplitAdapter
from twoscale.model.quantized import Matrix, QuantizedEmbedding, QuantizedLinear, quantize_matrix


def matrices_of(model: nn.Module) -> set[str]:
    """Names of the weights that are stored in a model's dtype."""
    return {f"{name}.weight" for name, module in model.named_modules() if _is_matrix(module)} | {"wte.weight"}


def _is_matrix(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.bias is None


def empty_inference_model(config: ModelConfig) -> LoopedGPT:
    """A model on the meta device, without weights, with the names and shapes of weights that quantised folders have. They are LoopedGPT's,
    except that each group's input projection is two matrices, one for the state and one for the input."""
    with torch.device("meta"):
        model = LoopedGPT(config, seed=None)
        for group in model.groups:
            if group.adapter is not None:
                halves = (nn.Linear(config.n_embd, config.n_embd, bias=False) for _ in range(2))
                group.adapter = SplitAdapter(*halves)  # type: ignore[assignment]
    return model.requires_grad_(False).eval()


class QuantizedModelBuilder:
    """Builds a model weight by weight: `put` all of them, then take `model`."""

    def __init__(self, config: ModelConfig, dtype: WeightDtype, device: str | torch.device = "cpu", native: bool = True) -> None:
        """With `native` the C kernels are used where there are any."""
        self.model = empty_inference_model(config)
        self.dtype, self.device = dtype, torch.device(device)
        self.library = c_library() if native and self.device.type == "cpu" else None
        self.model.weight_dtype = dtype

    def put(self, name: str, weight: Tensor | Matrix) -> None:
        """Add a weight by its name in LoopedGPT or `empty_inference_model`: a tensor, which is rounded to the dtype, or a matrix in it."""
        path, _, leaf = name.rpartition(".")
        parent_path, _, attribute = path.rpartition(".")
        module = self.model.get_submodule(path)
        if isinstance(module, SplitAdapter):
            assert isinstance(weight, Tensor)
            for half, columns in zip(("of_state", "of_input"), weight.chunk(2, dim=1), strict=True):
                self.put(f"{path}.{half}.weight", columns)
        elif name == "wte.weight":
            self._embedding(weight)
        elif _is_matrix(module):
            setattr(self.model.get_submodule(parent_path), attribute, self._linear(weight))
        else:
            assert isinstance(weight, Tensor)
            own = torch.empty(weight.shape, dtype=torch.float32, device=self.device).copy_(weight)
            module.register_parameter(leaf, nn.Parameter(own, requires_grad=False))

    def _matrix(self, weight: Tensor | Matrix) -> Matrix:
        return weight if isinstance(weight, Matrix) else quantize_matrix(weight, self.dtype)

    def _linear(self, weight: Tensor | Matrix) -> nn.Module:
        matrix = self._matrix(weight)
        if self.library is not None:
            if matrix.values.shape[1] > MAX_INPUTS:
                raise UserError(f"a matrix of {matrix.values.shape[1]} inputs is too wide, at most {MAX_INPUTS} are supported")
            return NativeLinear(to_panels(matrix, self.dtype), self.library)
        return QuantizedLinear(_to(matrix, self.device), self.dtype)

    def _embedding(self, weight: Tensor | Matrix) -> None:
        """The token embedding, whose memory is also the head's where the two are tied."""
        model: nn.Module = self.model
        linear = self._linear(weight)
        model.wte = NativeEmbedding(linear.panels) if isinstance(linear, NativeLinear) else QuantizedEmbedding(linear.matrix)  # type: ignore[operator, arg-type]
        if self.model.config.tie_head:
            model.lm_head = linear


def _to(matrix: Matrix, device: torch.device) -> Matrix:
    """A matrix with memory of its own on a device."""
    return Matrix(_own(matrix.values, device), None if matrix.scales is None else _own(matrix.scales, device))


def _own(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor)


@torch.no_grad()
def quantize(model: LoopedGPT, dtype: WeightDtype, native: bool = True) -> LoopedGPT:
    """A copy of a model for inference, its matrices rounded to a dtype; the model itself is left as it is.

    Without `native` it computes by torch's operators, the reference for the C kernels."""
    if model.weight_dtype != "fp32":
        raise UserError(f"this model has its weights in {model.weight_dtype} already: load it again with another dtype")
    device = next(model.parameters()).device
    if dtype == "bf16" and device.type != "cpu":  # GPUs compute in bf16 throughout
        rounded = copy.deepcopy(model).requires_grad_(False).to(torch.bfloat16)
        rounded.weight_dtype = dtype
        return rounded
    builder = QuantizedModelBuilder(model.config, dtype, device, native)
    for name, weight in model.named_parameters():
        builder.put(name, weight.detach())
    builder.model.exit_calibration = model.exit_calibration
    return builder.model
