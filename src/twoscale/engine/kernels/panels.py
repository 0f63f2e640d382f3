"""Weight matrices in the layout of the C kernels (matmul.c): panels of 16 outputs, in four formats.

    fp32, bf16, int8   (P, I, 16): w[o, i] at [o // 16, i, o % 16]
    w8a8               (P, I / 4, 16, 4): four inputs of an output lie side by side; I is padded to a multiple of 4
    scales             (P, G, 16) fp32, for int8 and w8a8

The last panel is padded with zeros. Shapes: O outputs, I inputs, P panels, G scale blocks: SCALE_BLOCK inputs that share a scale.
"""

import contextlib
import ctypes
import mmap
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from twoscale.config.dtypes import WEIGHT_DTYPES, WeightDtype
from twoscale.engine.kernels.library import SANITIZE, Library, MatrixStruct, empty_floats, pointer, threads_to_use
from twoscale.model.quantized import SCALE_BLOCK, Matrix, QuantizedLinear, quantize_matrix

PANEL = 16  # outputs of a panel, as in matmul.c
MAX_INPUTS = 1 << 17  # of a matrix in any format: a row of quantized inputs (w8a8) must fit the kernels' buffer
HUGE_PAGE = 2 << 20  # bytes
_TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8, "w8a8": torch.int8}


@dataclass(frozen=True)
class Panels:
    """A weight matrix (O, I) for the C kernels. Its memory never changes and stays where it is."""

    values: Tensor
    scales: Tensor | None
    shape: tuple[int, int]
    dtype: WeightDtype

    @cached_property
    def struct(self) -> MatrixStruct:
        O, I = self.shape  # noqa: E741
        values = pointer(self.values, prod(_layout(self.shape, self.dtype)), _TORCH[self.dtype])
        scales = None if self.scales is None else pointer(self.scales, -(-O // PANEL) * -(-I // SCALE_BLOCK) * PANEL)
        return MatrixStruct(values, scales, O, I, WEIGHT_DTYPES.index(self.dtype))

    @property
    def address(self) -> int:
        """Of the struct, for C."""
        return ctypes.addressof(self.struct)

    def rows(self, ids: Tensor) -> Tensor:
        """The rows with these indices (n,) as fp32, (n, I)."""
        panel, output = ids // PANEL, ids % PANEL
        values = self.values[panel, :, output].flatten(1)[:, : self.shape[1]]
        return Matrix(values, None if self.scales is None else self.scales[panel, :, output]).dequantize()


def _layout(shape: tuple[int, int], dtype: WeightDtype) -> tuple[int, ...]:
    O, I = shape  # noqa: E741
    n_panels = -(-O // PANEL)
    return (n_panels, -(-I // 4), PANEL, 4) if dtype == "w8a8" else (n_panels, I, PANEL)


def to_panels(matrix: Matrix, dtype: WeightDtype) -> Panels:
    """The matrix in panels. Its values must be in the storage type of `dtype` already (`quantize_matrix`); only their order changes."""
    O, I = matrix.values.shape  # noqa: E741
    assert matrix.values.dtype == _TORCH[dtype] and I <= MAX_INPUTS
    values = _empty_matrix(_layout((O, I), dtype), _TORCH[dtype])
    whole, rest = O // PANEL, O % PANEL
    by_rows = values.permute(0, 2, 1, 3) if dtype == "w8a8" else values.transpose(1, 2)  # (P, 16, I), or (P, 16, I / 4, 4)
    for panels, rows in (
        (by_rows[:whole], matrix.values[: O - rest]),
        (by_rows[whole:], F.pad(matrix.values[O - rest :], (0, 0, 0, -O % PANEL))),
    ):
        if dtype == "w8a8":
            rows = F.pad(rows, (0, -I % 4)) if I % 4 else rows
        panels.copy_(rows.reshape(panels.shape))
    scales = matrix.scales
    if scales is not None:
        scales = F.pad(scales, (0, 0, 0, -O % PANEL)).view(-1, PANEL, scales.shape[1]).transpose(1, 2).contiguous()
    return Panels(values, scales, (O, I), dtype)


def _empty_matrix(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An empty tensor for a matrix. Large ones use huge pages if the system has them: the kernels are about 5 % faster."""
    size = prod(shape) * dtype.itemsize
    if size < 2 * HUGE_PAGE or SANITIZE or not hasattr(mmap, "MADV_HUGEPAGE"):  # the sanitizer checks memory of malloc only
        return torch.empty(shape, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE_PAGE :][:size].view(dtype).view(shape)


def agrees_with_torch(library: Library) -> bool:
    """Whether small matrix products of the C kernels agree with torch's in every format."""
    for dtype in WEIGHT_DTYPES:
        for n in (1, 3, 7):
            x, w = (torch.linspace(-1, 1, rows * 291, dtype=torch.float32, device="cpu").view(rows, 291).cos() for rows in (n, 83))
            matrix, y = quantize_matrix(w, dtype), empty_floats(n * 83).view(n, 83)
            panels = to_panels(matrix, dtype)
            library.linear(threads_to_use(), n, panels.address, pointer(x, n * 291), pointer(y, n * 83))
            if not torch.allclose(y, QuantizedLinear(matrix, dtype)(x), atol=1e-4):
                return False
    return True
