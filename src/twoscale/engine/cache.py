"""Keys and values of one sequence, for every layer and loop step.

Keys and values are stored by (layer, level, position). A token at step k writes and reads one level, so reading is one slice. A level is
added when the first token reaches it, as a copy of the level before. With kv="exact" token t at loop step k attends to token j at step
min(k, k_j), where k_j is the last step that j took.

    kv="exact"   step k uses level k - 1: a level for every loop step that was ever taken
    kv="last"    every step uses level 0: each token's newest key and value, as much memory as a plain GPT's
    kv="ring:n"  step k uses level (k - 1) mod n

When a token exits after step k_j, its last key and value are copied to all deeper levels. In a ring this happens if k_j < n. A token that
exits later has written all n levels and nothing is copied: they hold the keys and values of its last n steps, one in each level; a token at
step k attends to the one in level (k - 1) mod n, which may be a later step than k.

Shapes: L level, J key/value heads, T position, D head width.
"""

import ctypes
import re
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twoscale.config import ModelConfig, UserError
from twoscale.engine.kernels.base import Kernels
from twoscale.engine.kernels.library import KVPointers
from twoscale.engine.kernels.torch_ops import TorchKernels

if TYPE_CHECKING:
    from twoscale.engine.request import LoopParams

Positions = int | slice | Tensor  # one position, a slice, or an index tensor

KV_FORMATS = {torch.float32: 0, torch.bfloat16: 1}  # FP32 and BF16 of matmul.c
MIN_CHECKED_BYTES = 64 << 20  # smaller allocations are not compared with the free memory


def free_memory() -> int | None:
    """Bytes that can be allocated without swapping; None if the system does not tell (no /proc/meminfo)."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def parse_kv(kv: str) -> int | None:
    """The number of levels that a looped layer keeps; None means one for every step."""
    if kv == "exact":
        return None
    if kv == "last":
        return 1
    match = re.fullmatch(r"ring:(\d{1,9})", kv) if isinstance(kv, str) else None
    if match is None or int(match[1]) < 1:
        raise UserError(f"kv = {kv!r}: choose exact, last or ring:n with n of at least 1")
    return int(match[1])


class LayerCache:
    """Keys and values of one layer of one sequence."""

    def __init__(self, layer: int, shape: tuple[int, int, int], levels: int, like: Tensor, kernels: Kernels) -> None:
        self.layer, self.shape, self.max_levels, self.kernels = layer, shape, levels, kernels  # (J, T, D)
        self.slot: object | None = None
        """One sequence's memory in one layer, for kernels that allocate it in common tensors (see `slots`); it must stay referenced."""
        self.keys = self.values = like.new_empty(0)  # (L, J, T, D)
        self.addresses, self.level_bytes = (0, 0), 0
        self._new_kv_pointers(0)

    def _new_kv_pointers(self, n_levels: int) -> None:
        """`kv_pointers` is the struct at a fixed address from which C kernels read where keys and values are."""
        self.kv_pointers = KVPointers(max_levels=self.max_levels, n_levels=n_levels, format=KV_FORMATS.get(self.keys.dtype, -1))
        self.kv_pointers_address = ctypes.addressof(self.kv_pointers)

    @property
    def n_levels(self) -> int:
        """Levels allocated and filled so far."""
        return self.kv_pointers.n_levels

    @n_levels.setter
    def n_levels(self, n: int) -> None:
        self.kv_pointers.n_levels = n

    def write(self, step: int, positions: Positions, key: Tensor, value: Tensor, end: int, length: int) -> tuple[Tensor, Tensor]:
        """Store keys and values (J, D), or (J, n, D) for several positions; returns what this loop step attends to, (J, end, D) each, in
        the dtype of `key`.

        `length` is the sequence's current length.
        """
        level = self.ensure_level(step, length)
        keys, values = self.keys[level], self.values[level]
        keys[:, positions], values[:, positions] = key.to(keys.dtype), value.to(keys.dtype)
        return keys[:, :end].to(key.dtype), values[:, :end].to(key.dtype)

    def ensure_level(self, step: int, length: int) -> int:
        """The level of a loop step (1, 2, ...); it is allocated and filled if it does not exist yet."""
        level = (step - 1) % self.max_levels
        if level >= self.n_levels:
            self._add_levels(level, length)
        return level

    def address(self, level: int) -> tuple[int, int]:
        """Memory addresses of the keys and the values of a level."""
        offset = level * self.level_bytes
        return self.addresses[0] + offset, self.addresses[1] + offset

    def fill_deeper_levels(self, step: int, positions: Positions) -> None:
        """Copy the keys and values of tokens that exit after this step to all deeper levels, if there are any.

        There are none in a ring of no more levels than `step`: the tokens have written all of them.
        """
        if step < self.n_levels:
            self.kernels.fill_deeper_levels(self, step, positions)

    def _add_levels(self, level: int, length: int) -> None:
        """Add levels up to `level`, each a copy of the level before: no token has gone deeper so far."""
        if level >= len(self.keys):
            levels = min(self.max_levels, max(1, 2 * len(self.keys), level + 1))
            self._check_memory(levels)
            self._reallocate(levels, length)
        for new in range(self.n_levels, level + 1):
            if new:
                for store in (self.keys, self.values):
                    store[new, :, :length] = store[new - 1, :, :length]
        self.n_levels = level + 1

    def _reallocate(self, levels: int, length: int) -> None:
        """Move keys and values to new memory for this many levels."""
        old = self.keys, self.values
        self.keys, self.values, slot = self.kernels.allocate(self.layer, (levels, *self.shape), old[0])
        if self.n_levels:
            for new, before in ((self.keys, old[0]), (self.values, old[1])):
                new[: self.n_levels, :, :length] = before[: self.n_levels, :, :length]
        self.slot = slot
        self.update_addresses()

    def _check_memory(self, levels: int) -> None:
        """UserError if the free memory is too small for this many levels; otherwise the system would kill the process."""
        J, T, D = self.shape
        needed = 2 * levels * J * T * D * self.keys.itemsize
        if needed < MIN_CHECKED_BYTES or not self.keys.is_cpu:
            return
        free = free_memory()
        if free is not None and needed > free:
            raise UserError(
                f"keys and values of {levels} loop steps and {T} tokens need {needed / 1e9:.1f} GB in one layer, "
                f"{free / 1e9:.1f} GB are free: ask for fewer loops or tokens, or kv=last"
            )

    def copy(self, kernels: Kernels | None = None) -> "LayerCache":
        """A copy with its own memory, allocated by other kernels if they are given."""
        new = copy(self)
        new.kernels = kernels or self.kernels
        new._new_kv_pointers(self.n_levels)
        if len(self.keys):
            new._reallocate(len(self.keys), self.shape[1])
        return new

    def update_addresses(self) -> None:
        """Update the addresses after keys and values have moved."""
        self.addresses, self.level_bytes = self.kernels.addresses(self.keys, self.values), self.keys[0].nbytes
        self.kv_pointers.keys, self.kv_pointers.values = self.addresses
        self.kv_pointers.level_size = self.keys[0].numel()

    @property
    def nbytes(self) -> int:
        return 2 * self.keys.nbytes


class Cache:
    """Keys and values of one sequence of at most `capacity` tokens, and the loop parameters of its request."""

    def __init__(
        self, config: ModelConfig, capacity: int, params: "LoopParams", like: Tensor | None = None, kernels: Kernels | None = None
    ) -> None:
        """`like` gives dtype and device of keys and values; default: fp32 on the CPU."""
        self.capacity, self.length, self.loop_params = capacity, 0, params
        like = torch.empty(0, dtype=torch.float32, device="cpu") if like is None else like
        shape, kernels = (config.kv_heads, capacity, config.head_dim), kernels or TorchKernels()
        self.layers = [LayerCache(i, shape, n, like, kernels) for i, n in enumerate(levels_of(config, params))]
        self.group_layers = config.groups

    def allocate(self) -> None:
        """Allocate the first level of all layers. Deeper levels are allocated when a token reaches them."""
        for layer in self.layers:
            layer.ensure_level(1, self.length)

    def levels_filled(self) -> bool:
        """Whether all levels that tokens may reach by the loop parameters exist."""
        loops = self.loop_params.loops
        return all(
            self.layers[layer].n_levels >= min(loops[group], self.layers[layer].max_levels)
            for group, layers in enumerate(self.group_layers)
            for layer in layers
        )

    def extend(self, n: int) -> int:
        """Append n tokens to the sequence; returns the position of the first."""
        if self.length + n > self.capacity:
            raise UserError(f"a sequence of {self.length + n} tokens does not fit the context of {self.capacity} tokens")
        self.length += n
        return self.length - n

    def rewind(self, length: int, deepest: Sequence[int] | None = None) -> None:
        """Truncate the sequence to `length` tokens. The tokens that come next overwrite the old keys and values.

        `deepest` is, for each group, the most loop steps of the tokens that stay: with kv="exact" levels that only later tokens have
        reached are dropped too. Their memory stays allocated.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"a sequence of {self.length} tokens cannot be rewound to {length}")
        self.length = length
        for layers, steps in zip(self.group_layers, deepest or (), strict=deepest is not None):
            for layer in layers:
                self.layers[layer].n_levels = min(self.layers[layer].n_levels, steps)

    def view(self, params: "LoopParams") -> "Cache":
        """The same keys and values for passes with other loop parameters; the length of the view is its own."""
        new = copy(self)
        new.loop_params = params
        return new

    def copy(self) -> "Cache":
        """A copy with its own memory."""
        new = copy(self)
        new.layers = [layer.copy() for layer in self.layers]
        return new

    @property
    def nbytes(self) -> int:
        """Bytes allocated now."""
        return sum(layer.nbytes for layer in self.layers)


def levels_of(config: ModelConfig, params: "LoopParams") -> list[int]:
    """The maximum number of levels of each layer."""
    kept = parse_kv(params.kv)
    return [
        1 if group is None else min(params.loops[group], kept or params.loops[group]) for layers, group in config.stages for _ in layers
    ]


def bytes_per_token(config: ModelConfig, params: "LoopParams", itemsize: int = 4) -> int:
    """Bytes of keys and values of one token when all levels are allocated; `itemsize` is 4 for fp32. kv="last" needs as much as a plain GPT
    of as many layers."""
    return sum(levels_of(config, params)) * 2 * config.kv_heads * config.head_dim * itemsize
