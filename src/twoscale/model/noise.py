"""Start states and weights: truncated normals, and noise that is a pure function of its key.

A counter-based generator (the splitmix64 finaliser over a key, a position and a channel) gives every element
its value without any history. So the state of a position never depends on the batch it is in, on padding, on
chunking, on the cache or on how rows are spread over processes; and no generator state needs saving.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

CUT = 3.0  # every truncated normal of this project is cut at three sigma
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL1, _MUL2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(x: int) -> int:
    """The int64 with the same bits."""
    x &= _MASK
    return x - (1 << 64) if x >= 1 << 63 else x


def _mix(x: int) -> int:
    """splitmix64's finaliser on a Python integer."""
    x = (x + _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * _MUL1) & _MASK
    x = ((x ^ (x >> 27)) * _MUL2) & _MASK
    return x ^ (x >> 31)


def _mix_tensor(x: Tensor) -> Tensor:
    """The same on int64 tensors, whose products wrap; the shifts are made logical by a mask."""
    x = x + _signed(_GOLDEN)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_MUL1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_MUL2)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def fold(*keys: int) -> int:
    """One 64-bit key out of several integers; their order counts."""
    key = 0
    for part in keys:
        key = _mix(key ^ (part & _MASK))
    return key


def _truncate(uniform: Tensor) -> Tensor:
    """A uniform in (0, 1) to a standard normal cut at three sigma."""
    low = 0.5 * math.erfc(CUT / math.sqrt(2))
    normal = math.sqrt(2) * torch.erfinv(2 * (low + (1 - 2 * low) * uniform) - 1)
    return normal.clamp_(-CUT, CUT)  # rounding may step over the cut


def keyed_normal(key: int | Iterable[int], positions: Tensor, width: int) -> Tensor:
    """Truncated standard normals of shape (*positions.shape, width), keyed as `keyed_uniform`."""
    return _truncate(keyed_uniform(key, positions, width))


def keyed_uniform(key: int | Iterable[int], positions: Tensor, width: int) -> Tensor:
    """Uniforms in (0, 1) of shape (*positions.shape, width), each a function of (key, position, channel).

    `positions` is an int64 tensor; `key` is one number for all of it, or one for each entry of its first dimension.
    """
    keys = [key] if isinstance(key, int) else list(key)
    base = torch.tensor([_signed(k) for k in keys], dtype=torch.int64, device=positions.device)
    base = base.view(-1, *[1] * (positions.dim() - 1)) if positions.dim() else base[0]
    rows = _mix_tensor(base ^ _mix_tensor(positions.to(torch.int64)))
    channels = torch.arange(width, device=positions.device)
    bits = _mix_tensor(rows.unsqueeze(-1) + channels * _signed(_GOLDEN))
    return ((bits >> 40) & ((1 << 24) - 1)).to(torch.float32).add_(0.5).mul_(2.0**-24)


@torch.no_grad()
def truncated_normal_(weight: Tensor, std: float, generator: torch.Generator | None = None) -> Tensor:
    """Fill a weight with a normal of that std, cut at three sigma."""
    return torch.nn.init.trunc_normal_(weight, 0.0, std, -CUT * std, CUT * std, generator=generator)
