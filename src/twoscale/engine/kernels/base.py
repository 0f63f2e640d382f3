"""The interface of kernels: `Kernels` is implemented by `native`, `packed` and `torch_ops`. The engine does not depend on which one it has.

Shapes: N rows, C width, H query heads, J key/value heads, D head width.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from twoscale.exits.rule import StatisticFunction, UpdateNormsFunction
from twoscale.exits.statistics import Condition
from twoscale.model import LoopedGPT
from twoscale.model.layers import MLP, Attend, Block, RMSNorm, Rope

if TYPE_CHECKING:
    from twoscale.engine.cache import LayerCache, Positions
    from twoscale.engine.engine import Engine
    from twoscale.engine.kernels.native_decode import NativeDecoder
    from twoscale.engine.loop import LoopRows
    from twoscale.engine.rows import Rows


class Interrupt:
    """A flag that another thread sets to end a sequence of loop steps after the current step. C code reads it."""

    def __init__(self) -> None:
        self._flag = ctypes.c_int32(0)
        self.address = ctypes.addressof(self._flag)

    def __bool__(self) -> bool:
        return bool(self._flag.value)

    def set(self, value: bool) -> None:
        self._flag.value = value


NO_INTERRUPT = Interrupt()  # never set


@dataclass(frozen=True, slots=True)
class LoopSteps:
    """The result of one or more loop steps, taken by N rows. Rows that exit have exited after the newest step, unless `first_exit` is
    smaller than `taken`: then some have exited after earlier steps, from step `first_exit` on."""

    taken: int
    """The number of steps. A row that exited earlier has taken fewer; `Part.loop_step` has the steps of each row."""
    before: Tensor
    """(N, C): the states before the newest step; may be the same tensor as `after` where `return_previous` is False."""
    after: Tensor
    """(N, C): the states after it."""
    exits: Tensor | bool
    """Which rows exit: bools (N,), or one for all."""
    return_previous: Tensor | bool
    """Which of them return the state before the newest step, because their rule has keep="previous": bools (N,), or one for all."""
    first_exit: int = 0
    """Set by `iterate`: the number of steps after which the first rows exited; 0: none has. `LoopRows.step` leaves it 0."""
    deeper_levels_filled: bool = False
    """Whether the deeper levels of the rows that exit are filled already."""


class StageKernels:
    """Applies the layers of one stage of the network to the rows of a batch.

    This is the definition, layer by layer and step by step; kernels may override it by something faster that gives the same bits.
    """

    def __init__(self, module: nn.Module, first_layer: int) -> None:
        self.module, self.first_layer = module, first_layer
        self.blocks = list(module.blocks)  # type: ignore[arg-type]

    def run(self, x: Tensor, rope: Rope | None, rows: "Rows") -> Tensor:
        """All layers once, (N, C) -> (N, C)."""
        attention_of_layer = rows.attention(self.first_layer, len(self.blocks))
        x = x[None]
        for i, block in enumerate(self.blocks):
            x = block(x, rope, attention_of_layer(i))
        return x[0]

    def iterate(self, loop: "LoopRows", max_steps: int, interrupt: Interrupt, steps_after_exit: int = 0) -> LoopSteps:
        """Loop steps of a group until a row exits, a rule fails, `max_steps` are taken (at least one), a cache has no level for the next
        step, or `interrupt` is set.

        The other rows may go on for `steps_after_exit` steps when the first have exited; here they do not. Precondition: the levels of the
        first step are filled."""
        taken = 0
        while True:
            step, taken = loop.step(), taken + 1
            exits = step.exits if isinstance(step.exits, bool) else bool(step.exits.any())
            if exits or taken >= max_steps or loop.failures or interrupt or loop.needs_levels():
                first_exit = taken if exits else 0
                return LoopSteps(taken, step.before, step.after, step.exits if exits else False, step.return_previous, first_exit)


class RowKernels(Protocol):
    """Kernels bound to the rows of a batch; what is prepared for the rows is reused at every loop step."""

    def attention(self, layer: int) -> Attend:
        """The attention function of one layer: writes the rows' keys and values to the caches; each row attends to its own sequence."""


class Kernels(ABC):
    """A backend: an implementation of all operators of a model for inference (native, packed or torch).

    `linear`, `norm`, `mlp` and `block` make the modules of the inference copy. `for_engine`, `embedding` and `stage_kernels` are called
    when an engine is made, the other methods while it runs.
    """

    name: str
    copies_weights: bool
    """Whether the modules have their own copy of the weights; otherwise they use the model's."""
    batch_invariant = False
    """Whether a row's result is bit-equal in every batch; speculation needs that."""

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

    def embedding(self, model: LoopedGPT) -> "Callable[[Rows], Tensor]":
        """A function that returns the embeddings (N, C) of the rows' tokens and positions, by the inference copy `model`."""
        return lambda rows: model.embed(rows.tokens, rows.positions)

    def stage_kernels(self, module: nn.Module, first_layer: int) -> StageKernels:
        """The kernels of a stage of the inference copy; `first_layer` is the index of its first layer in the network."""
        return StageKernels(module, first_layer)

    def decoder(self, engine: "Engine") -> "NativeDecoder | None":
        """A kernel that decodes several tokens of one sequence in one call; None: every token is a pass."""
        return None

    @abstractmethod
    def bind(self, rows: "Rows") -> RowKernels:
        """Bind to the rows of a batch."""

    @abstractmethod
    def update_norms_function(self) -> UpdateNormsFunction:
        """A function that computes the norms of an update that exit rules compare; it may have state."""

    def statistic_function(self, condition: Condition) -> StatisticFunction | None:
        """A function that computes the statistic of a condition as a fused loop does; None if the rule's `measure` gives the same bits."""
        return None

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
    def fill_deeper_levels(self, layer_cache: "LayerCache", step: int, positions: "Positions") -> None:
        """Copy the keys and values of tokens that exit after this step from its level, (step - 1) mod max_levels, to all deeper levels.

        Tokens at deeper steps then attend to the last state of a token that has exited. Called by `LayerCache.fill_deeper_levels`, which
        has checked that there are deeper levels."""
