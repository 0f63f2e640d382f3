"""Weight matrices in fewer bits, and the modules that compute with them by torch's operators: the reference for the C kernels.

A matrix (O, I) in int8 has a scale for each output and each scale block of SCALE_BLOCK inputs: w = scale * q, q an integer from -127 to
127. With dtype="w8a8" the inputs of a product are rounded in the same way, with a scale for each row and scale block; the products within a
block are then sums of integers below 2^24, which fp32 adds without rounding in any order.

Shapes: O outputs, I inputs, G scale blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoscale.config.dtypes import WeightDtype

SCALE_BLOCK = 256  # inputs that share a scale, as in matmul.c; `group_size` in config.json, as GPTQ and AWQ call it
MAX_LEVEL = 127  # the largest |q|
BLOCK = 1 << 18  # weights that are converted at a time


@dataclass(frozen=True)
class Matrix:
    """A weight matrix (O, I) as it is stored."""

    values: Tensor
    """(O, I): float32, bfloat16, or int8."""
    scales: Tensor | None = None
    """(O, G) float32 for int8, else None."""

    def __post_init__(self) -> None:
        assert (self.scales is not None) == (self.values.dtype == torch.int8)
        assert self.scales is None or self.scales.shape == scales_shape(self.values.shape)

    def dequantize(self) -> Tensor:
        """The weights (O, I) as fp32."""
        if self.scales is None:
            return self.values.float()
        return self.values.float() * self.scales.repeat_interleave(SCALE_BLOCK, dim=1)[:, : self.values.shape[1]]

    def rows(self, index: Tensor | slice) -> "Matrix":
        return Matrix(self.values[index], None if self.scales is None else self.scales[index])

    def blocks(self) -> Iterator["Matrix"]:
        """The matrix in blocks of rows, so that what is made of them needs little memory."""
        size = max(1, BLOCK // self.values.shape[1])
        return (self.rows(slice(first, first + size)) for first in range(0, len(self.values), size))


def scales_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(O, G) for a matrix (O, I)."""
    return shape[0], -(-shape[1] // SCALE_BLOCK)


def as_matrix(weight: Tensor) -> Matrix:
    """A matrix (O, I) of fp32 weights; nothing is rounded."""
    return Matrix(weight.detach().float())


@torch.no_grad()
def quantize_matrix(weight: Tensor, dtype: WeightDtype) -> Matrix:
    """A matrix (O, I) rounded to a dtype. A scale block with NaN or infinity has a scale that is not finite, so that results show it."""
    weight = weight.detach()
    if dtype == "fp32":
        return as_matrix(weight)
    if dtype == "bf16":
        return Matrix(weight.bfloat16())
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(scales_shape(weight.shape), dtype=torch.float32, device=weight.device)
    size = max(1, BLOCK // weight.shape[1])
    for first in range(0, len(weight), size):
        rows = slice(first, first + size)
        q, scales[rows] = quantize_blocks(weight[rows].float())
        values[rows] = q.to(torch.int8)
    return Matrix(values, scales)


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """(n, I) fp32 -> int8 values q (n, I) as fp32 and scales (n, G), with scale * q within scale / 2 of x."""
    n, width = x.shape
    blocks = F.pad(x, (0, -width % SCALE_BLOCK)).view(n, -1, SCALE_BLOCK)
    largest = blocks.abs().amax(dim=-1)
    to_int = torch.full_like(largest, MAX_LEVEL) / largest  # not 127 / largest, which torch computes as 127 * (1 / largest)
    to_int = to_int.masked_fill(~(to_int <= 1e38), 0.0)  # all zero, or too small for fp32: taken as zero
    q = (blocks * to_int[..., None]).round_().nan_to_num_(0.0, 0.0, 0.0)
    return q.view(n, -1)[:, :width], largest / MAX_LEVEL + (blocks * 0).sum(dim=-1)  # NaN and infinity end up in the scale


class QuantizedLinear(nn.Module):
    """x -> x @ weight.T with the weight as it is stored; it becomes fp32 in blocks at every call."""

    def __init__(self, matrix: Matrix, dtype: WeightDtype) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.values.shape
        self.quantize_inputs = dtype == "w8a8"
        self.register_buffer("values", matrix.values, persistent=False)
        self.register_buffer("scales", matrix.scales, persistent=False)

    @property
    def matrix(self) -> Matrix:
        return Matrix(self.values, self.scales)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).float()
        product = _int8_product if self.quantize_inputs else _product
        y = torch.cat([product(rows, block) for block in self.matrix.blocks()], dim=-1)
        return y.view(*x.shape[:-1], self.out_features).type_as(x)


def _product(x: Tensor, matrix: Matrix) -> Tensor:
    return F.linear(x, matrix.dequantize())


def _int8_product(x: Tensor, matrix: Matrix) -> Tensor:
    """x (n, I) quantized to int8, times the matrix: scale block after scale block, as the C kernels do."""
    assert matrix.scales is not None
    q, scales = quantize_blocks(x)
    y = None
    for g in range(scales.shape[1]):
        inputs = slice(g * SCALE_BLOCK, (g + 1) * SCALE_BLOCK)
        part = F.linear(q[:, inputs], matrix.values[:, inputs].float()) * (matrix.scales[:, g] * scales[:, g, None])
        y = part if y is None else y + part
    assert y is not None
    return y


class QuantizedEmbedding(nn.Module):
    """ids -> rows of an embedding as it is stored, in fp32."""

    def __init__(self, matrix: Matrix) -> None:
        super().__init__()
        self.register_buffer("values", matrix.values, persistent=False)
        self.register_buffer("scales", matrix.scales, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        matrix = Matrix(self.values, self.scales)  # type: ignore[arg-type]
        return matrix.rows(ids.flatten()).dequantize().view(*ids.shape, -1)
