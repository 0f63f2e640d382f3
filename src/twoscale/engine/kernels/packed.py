"""The `packed` kernels, for CPUs without a C compiler: weights prepacked for oneDNN, with the operators that torch.compile uses."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoscale.engine.kernels.library import Once
from twoscale.engine.kernels.torch_ops import TorchKernels

# Weight sizes from which packing is faster, for several rows and for one: a packed call has about 30 us more overhead than F.linear
# (measured: 2 cores, AVX2).
MIN_PACKED_SIZE, MIN_PACKED_SIZE_ONE_ROW = 200_000, 1_000_000


@Once
def can_pack() -> bool:
    """Whether this build of torch has the packed linear operators, and they work."""
    try:
        x, w = (torch.arange(n * 32, dtype=torch.float32, device="cpu").view(n, 32) for n in (2, 32))
        return torch.allclose(packed_linear(x, pack(w)), F.linear(x, w))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)


def packed_linear(x: Tensor, packed: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")


def own_copy(weight: Tensor) -> Tensor:
    return weight.detach().clone(memory_format=torch.contiguous_format)


class PackedLinear(nn.Module):
    """x -> x @ weight.T with a copy of the weight; packed or F.linear, whichever is faster for the number of rows."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        use_packed = weight.numel() >= MIN_PACKED_SIZE and can_pack()
        self.in_features, self.one_row_packed = weight.shape[1], use_packed and weight.numel() >= MIN_PACKED_SIZE_ONE_ROW
        self.packed = pack(weight) if use_packed else None
        self.weight = None if self.one_row_packed else own_copy(weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None and (self.one_row_packed or x.numel() > self.in_features):
            return packed_linear(x, self.packed)
        assert self.weight is not None
        return F.linear(x, self.weight)


class PackedKernels(TorchKernels):
    """Packed linear maps; everything else as in `TorchKernels`."""

    name = "packed"
    copies_weights = True

    def linear(self, weight: Tensor) -> nn.Module:
        return PackedLinear(weight)
