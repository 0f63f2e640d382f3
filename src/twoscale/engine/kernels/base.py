"""The interface of kernels: `Kernels` is implemented by `native`, `packed` and `torch_ops`. The engine does not depend on which one it has.

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
    """Kernels bound to the rows of a batch; what is prepared for the rows is reused at every loop step."""

    def attention(self, layer: int) -> Attend:
        """The attention function of one layer: writes the rows' keys and values to the caches; each row attends to its own sequence."""


class Kernels(ABC):
    """A backend. `linear`, `norm`, `mlp` and `block` make the modules of the decode copy; the other methods are called while decoding."""

    name: str
    copies_weights: bool
    """Whether the modules have their own copy of the weights; otherwise they use the model's."""
    exact_rows = False
    """Whether a row's result is the same to the bit whatever rows are beside it; speculation needs that."""

    @abstractmethod
    def linear(self, weight: Tensor) -> nn.Module:
        """x -> x @ weight.T for a matrix (O, I)."""

    @abstractmethod
    def norm(self, norm: RMSNorm) -> nn.Module:
        """A module equivalent to an RMSNorm."""

    @abstractmethod
    def mlp(self, mlp: MLP, up: nn.Module, down: nn.Module) -> nn.Module:
        """A module equivalent to an MLP: `down(activation(up(x)))` with these two linear modules."""

    @abstractmethod
    def block(self, block: Block) -> nn.Module:
        """A module equivalent to a block, whose submodules have been replaced already; called with `RowKernels.attention`."""

    @abstractmethod
    def bind(self, rows: "Rows") -> RowKernels:
        """Bind to the rows of a batch."""

    @abstractmethod
    def meter(self) -> Meter:
        """A function that computes the step norms which exit rules compare; it may have state. See `exits.rule.Meter`."""

    def for_engine(self) -> "Kernels":
        """The kernels of one engine: a new object if they own memory of its sequences, else the same."""
        return self

    @abstractmethod
    def hint_capacities(self, capacities: Sequence[int]) -> None:
        """Hint: sequences of these capacities will have caches at the same time. May be used to size allocations."""

    @abstractmethod
    def allocate(self, layer: int, shape: tuple[int, int, int, int], like: Tensor) -> tuple[Tensor, Tensor, object | None]:
        """Memory for keys and values (L, J, T, D) of one layer, and an object that must stay referenced while they are used."""

    @abstractmethod
    def addresses(self, keys: Tensor, values: Tensor) -> tuple[int, int]:
        """Memory addresses of keys and values for C kernels; 0 if they are not needed."""

    @abstractmethod
    def settle(self, layer_cache: "LayerCache", step: int, at: "Positions") -> None:
        """Tokens exit the loop after this step: copy their keys and values at its level, (step - 1) mod max_levels, to all deeper levels.

        Tokens at deeper steps then attend to the last state of a token that has exited. Called by `LayerCache.fill_deeper_levels`, which
        has checked that there are deeper levels."""
