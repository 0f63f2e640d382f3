"""What the engine needs of a set of kernels. The engine never asks which set it has.

Shapes: N rows, C width, H query heads, J key/value heads, D head width.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from twoscale.exits.rule import Meter
from twoscale.model.layers import MLP, Attend, Block, RMSNorm

if TYPE_CHECKING:
    from twoscale.engine.cache import LayerCache, Positions
    from twoscale.engine.rows import Rows


class RowKernels(Protocol):
    """Kernels that are bound to some rows; what they prepare is used again at every step of these rows."""

    def attention(self, layer: int) -> Attend:
        """The attention of one layer: rows write their keys and values, and each attends to its own sequence."""


class Kernels(ABC):
    """How a decode copy computes. `linear`, `norm`, `mlp` and `block` make its modules; the rest is called at every step."""

    name: str
    copies_weights: bool
    """Whether the modules hold weights of their own; else they read the model's."""

    @abstractmethod
    def linear(self, weight: Tensor) -> nn.Module:
        """x -> x @ weight.T for a matrix (O, I)."""

    @abstractmethod
    def norm(self, norm: RMSNorm) -> nn.Module:
        """The same RMSNorm."""

    @abstractmethod
    def mlp(self, mlp: MLP, up: nn.Module, down: nn.Module) -> nn.Module:
        """The same MLP, with these two linear maps and the activation between them."""

    @abstractmethod
    def block(self, block: Block) -> nn.Module:
        """The same block, whose modules are already those of these kernels; it is called with the attention of rows."""

    @abstractmethod
    def bind(self, rows: "Rows") -> RowKernels:
        """Attention for these rows."""

    @abstractmethod
    def meter(self) -> Meter:
        """Measures the steps of rows for exit rules; it may keep what it needs from one step to the next."""

    def for_engine(self) -> "Kernels":
        """The kernels for one engine: the same, unless they keep memory for its sequences."""
        return self

    @abstractmethod
    def hint_capacities(self, capacities: Sequence[int]) -> None:
        """Sequences of these capacities will have caches at the same time."""

    @abstractmethod
    def allocate(self, layer: int, shape: tuple[int, int, int, int], like: Tensor) -> tuple[Tensor, Tensor, object | None]:
        """Memory for the keys and the values (L, J, T, D) of a layer, and what must be kept for as long as they are used."""

    @abstractmethod
    def addresses(self, keys: Tensor, values: Tensor) -> tuple[int, int]:
        """Where keys and values lie in memory, for kernels that need to know."""

    @abstractmethod
    def settle(self, layer_cache: "LayerCache", k: int, at: "Positions") -> None:
        """What tokens wrote at step k becomes what all deeper levels of a layer hold at their positions."""
