"""Keys and values of one sequence, for every layer and loop step.

Token t at loop step k sees token j at step min(k, k_j), where k_j is the last step that j took. Slots are
(layer, level, position): level k holds what a reader at step k sees, so reading is one slice and needs no look-up. A token
that leaves at k_j has its last key and value written into all deeper levels at once; a level that nobody has reached
yet does not exist, and begins as a copy of the one above it.

    kv="exact"   a level for every loop step that was ever taken
    kv="last"    one level: each token's newest key and value, as much memory as a plain GPT's
    kv="ring:n"  n levels: step k writes and reads level k mod n, so a reader finds the kept step that is congruent to its own

Shapes: L level, J key/value heads, T position, D head width.
"""

import re
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twoscale.config import ModelConfig, UserError
from twoscale.engine.kernels.base import Kernels
from twoscale.engine.kernels.torch_ops import TorchKernels

if TYPE_CHECKING:
    from twoscale.engine.request import LoopParams

Positions = int | slice | Tensor  # one position, a run of them, or any


CHECKED_SIZE = 64 << 20  # bytes from which a layer checks whether there is so much memory


def free_memory() -> int | None:
    """Bytes that new memory can take without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def parse_kv(kv: str) -> int | None:
    """How many levels a looped layer keeps; None means one for every step."""
    if kv == "exact":
        return None
    if kv == "last":
        return 1
    match = re.fullmatch(r"ring:(\d{1,9})", kv) if isinstance(kv, str) else None
    if match is None or int(match[1]) < 1:
        raise UserError(f"kv = {kv!r}: choose exact, last or ring:n with n of at least 1")
    return int(match[1])


class LayerCache:
    """Keys and values of one layer."""

    def __init__(self, layer: int, shape: tuple[int, int, int], levels: int, like: Tensor, kernels: Kernels) -> None:
        self.layer, self.shape, self.max_levels, self.kernels = layer, shape, levels, kernels  # (J, T, D)
        self.slot: object | None = None
        """Holds the memory of keys and values for kernels that share it between sequences."""
        self.n_levels = 0  # levels that exist
        self.keys = self.values = like.new_empty(0)  # (L, J, T, D)
        self.addresses, self.level_bytes = (0, 0), 0

    def write(self, k: int, at: Positions, key: Tensor, value: Tensor, end: int, length: int) -> tuple[Tensor, Tensor]:
        """Store keys and values (J, D), or (J, n, D) for several places; returns what a reader at step k sees: (J, end, D).

        `length` is that of the sequence so far.
        """
        level = self.ensure_level(k, length)
        keys, values = self.keys[level], self.values[level]
        keys[:, at], values[:, at] = key, value
        return keys[:, :end], values[:, :end]

    def ensure_level(self, k: int, length: int) -> int:
        """The level of step k, which exists from now on."""
        level = (k - 1) % self.max_levels
        if level >= self.n_levels:
            self._add_levels(level, length)
        return level

    def address(self, level: int) -> tuple[int, int]:
        """Where the keys and the values of a level lie in memory."""
        offset = level * self.level_bytes
        return self.addresses[0] + offset, self.addresses[1] + offset

    def fill_deeper_levels(self, k: int, at: Positions) -> None:
        """Tokens leave after step k: what they wrote there is what all deeper steps see."""
        if k < self.n_levels:
            self.kernels.settle(self, k, at)

    def _add_levels(self, level: int, length: int) -> None:
        """Let a level begin: for every token so far the step before was the last."""
        if level >= len(self.keys):
            levels = min(self.max_levels, max(1, 2 * len(self.keys), level + 1))
            self._check_memory(levels)
            self._reallocate(levels, length)
            self.level_bytes = self.keys[0].nbytes
        for new in range(self.n_levels, level + 1):
            if new:
                for store in (self.keys, self.values):
                    store[new, :, :length] = store[new - 1, :, :length]
        self.n_levels = level + 1

    def _reallocate(self, levels: int, length: int) -> None:
        """Into memory for so many levels."""
        old = self.keys, self.values
        self.keys, self.values, slot = self.kernels.allocate(self.layer, (levels, *self.shape), old[0])
        if self.n_levels:
            for new, before in ((self.keys, old[0]), (self.values, old[1])):
                new[: self.n_levels, :, :length] = before[: self.n_levels, :, :length]
        self.slot = slot
        self.update_addresses()

    def _check_memory(self, levels: int) -> None:
        """Refuse to hold more levels than there is memory for: the system would end the process."""
        J, T, D = self.shape
        needed = 2 * levels * J * T * D * self.keys.itemsize
        if needed < CHECKED_SIZE or not self.keys.is_cpu:
            return
        free = free_memory()
        if free is not None and needed > free:
            raise UserError(
                f"keys and values of {levels} loop steps and {T} tokens need {needed / 1e9:.1f} GB in one layer, "
                f"{free / 1e9:.1f} GB are free: ask for fewer loops or tokens, or kv=last"
            )

    def copy(self, kernels: Kernels | None = None) -> "LayerCache":
        """The same content in memory of its own, for other kernels if they are given."""
        new = copy(self)
        new.kernels = kernels or self.kernels
        if len(self.keys):
            new._reallocate(len(self.keys), self.shape[1])
        return new

    def update_addresses(self) -> None:
        """Note where keys and values lie, after they have moved."""
        self.addresses = self.kernels.addresses(self.keys, self.values)

    @property
    def nbytes(self) -> int:
        return 2 * self.keys.nbytes


class Cache:
    """Keys and values of one sequence of at most `capacity` tokens, and the parameters of the request that it was opened for."""

    def __init__(
        self, config: ModelConfig, capacity: int, params: "LoopParams", like: Tensor | None = None, kernels: Kernels | None = None
    ) -> None:
        """`like` has the type and the device of keys and values; fp32 on the CPU if it is not given."""
        self.capacity, self.length, self.params = capacity, 0, params
        like = torch.empty(0, dtype=torch.float32, device="cpu") if like is None else like
        shape, kernels = (config.kv_heads, capacity, config.head_dim), kernels or TorchKernels()
        self.layers = [LayerCache(i, shape, n, like, kernels) for i, n in enumerate(levels_of(config, params))]

    def extend(self, n: int) -> int:
        """Make n more tokens part of the sequence; returns the position of the first."""
        if self.length + n > self.capacity:
            raise UserError(f"a sequence of {self.length + n} tokens does not fit the context of {self.capacity} tokens")
        self.length += n
        return self.length - n

    def rewind(self, length: int) -> None:
        """Forget all tokens from position `length` on. What they wrote is overwritten by the tokens that come in their place."""
        if not 0 <= length <= self.length:
            raise ValueError(f"a sequence of {self.length} tokens cannot be rewound to {length}")
        self.length = length

    def copy(self) -> "Cache":
        """The same content in memory of its own."""
        new = copy(self)
        new.layers = [layer.copy() for layer in self.layers]
        return new

    @property
    def nbytes(self) -> int:
        """Bytes that are held now."""
        return sum(layer.nbytes for layer in self.layers)


def levels_of(config: ModelConfig, params: "LoopParams") -> list[int]:
    """The most levels that each layer keeps."""
    kept = parse_kv(params.kv)
    return [
        1 if group is None else min(params.loops[group], kept or params.loops[group]) for layers, group in config.stages for _ in layers
    ]


def bytes_per_token(config: ModelConfig, params: "LoopParams", itemsize: int = 4) -> int:
    """What one more token costs when every level exists; a plain GPT of as many layers is the case kv="last"."""
    return sum(levels_of(config, params)) * 2 * config.kv_heads * config.head_dim * itemsize
