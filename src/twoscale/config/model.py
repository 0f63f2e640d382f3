"""ModelConfig: everything that fixes the shape and the maps of a looped GPT.

The defaults are the paper's model. The options beyond it (rotary positions, gated MLP, grouped-query heads,
norms on the branch or on a group's state) are what the published looped families need.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Literal

from twoscale.config.errors import UserError
from twoscale.config.groups import Groups

# Refuse absurd sizes before anything is allocated: a config may come from a folder that somebody sent us.
MAX_LAYERS = 4096
MAX_PARAMETERS = 200_000_000_000
MAX_LOOPS = 10_000  # steps that a group may take in one pass


@dataclass(frozen=True)
class ModelConfig:
    """A GPT whose layer groups loop."""

    vocab_size: int = 50257
    """How many tokens there are; the embedding is padded to a multiple of 64 rows, the logits are not."""
    block_size: int = 512
    """The longest context, in tokens."""
    n_layer: int = 12
    """How many layers there are, looped ones counted once."""
    n_head: int = 12
    """Attention heads in a layer."""
    n_embd: int = 768
    """Width of the residual stream."""
    groups: Groups = ((4,), (5, 6), (7,))
    """Layer ids (from 0) of each loop group; groups are contiguous, disjoint and in order."""

    n_kv_head: int | None = None
    """Key/value heads (grouped-query attention); None means as many as n_head."""
    head_size: int | None = None
    """Width of one head; None means n_embd / n_head."""
    qk_bias: bool = False
    """Whether queries and keys have a learned bias."""
    positions: Literal["learned", "rotary"] = "learned"
    """How a token knows its place."""
    rope_base: float = 10_000.0
    """Base of the rotary frequencies; only read with positions=rotary."""
    scale_embedding: bool = True
    """Whether the embedding is multiplied by sqrt(n_embd)."""
    mlp: Literal["plain", "gated"] = "plain"
    """`plain`: down(silu(up x)); `gated`: down(silu(gate x) * up x)."""
    mlp_hidden: int | None = None
    """Hidden width of the MLP; None means 4 * n_embd."""
    norm: Literal["sum", "branch", "pre"] = "sum"
    """Where the second norm of a sandwich sits: n(x + f(n x)), x + n(f(n x)), or nowhere, x + f(n x)."""
    norm_eps: float = 1e-6
    """Epsilon of every RMSNorm."""
    final_norm: bool = True
    """Whether the head reads a normalised state."""
    group_norm: Literal["none", "leave", "step"] = "none"
    """A norm on a group's state: none, when the group is left, or after each of its steps."""
    share_group_norm: bool = False
    """Whether that norm is the final norm of the network itself (same gain)."""
    exit_gate: bool = False
    """Whether the last group has a learned gate that says how likely a token is to leave (Ouro): read by exits.Gate, trained by the
    objectives gate, act and lookahead."""
    tie_head: bool = True
    """Whether the head reads with the embedding's own matrix."""

    inject: Literal["concat", "add", "none"] = "concat"
    """How the group's input enters each step: a learned map of [state; input], their sum, or not at all."""
    start: Literal["noise", "zeros", "input"] = "noise"
    """What a group's state is before its first step."""
    noise: Literal["start", "every_step"] = "start"
    """Whether noise is only the start, or is mixed into the state before every step as well."""
    noise_mix: float = 0.1
    """With noise=every_step: the share m in x <- (1 - m) x + m * noise."""

    mean_loops: int = 12
    """r: training draws 1 + Poisson(lambda) steps with E[lambda] = r; evaluation runs r steps unless told otherwise."""
    loop_sigma: float = 0.5
    """Spread of the log-normal rate that training draws loop counts from."""
    backprop_steps: int | None = 8
    """Gradients flow through the last so many steps of a group; None means all."""

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_groups()
        self._check_options()

    # -- derived values ------------------------------------------------------------------------------------------

    @property
    def padded_vocab_size(self) -> int:
        return -(-self.vocab_size // 64) * 64

    @property
    def kv_heads(self) -> int:
        return self.n_kv_head or self.n_head

    @property
    def head_dim(self) -> int:
        return self.head_size or self.n_embd // self.n_head

    @property
    def hidden(self) -> int:
        return self.mlp_hidden or 4 * self.n_embd

    @property
    def n_groups(self) -> int:
        return len(self.groups)

    @property
    def noise_in_steps(self) -> bool:
        """Whether noise is mixed into the state before every loop step."""
        return self.noise == "every_step"

    @property
    def norm_at_exit(self) -> bool:
        """Whether the norm of a group is applied once, to the state with which a token leaves the group."""
        return self.group_norm == "leave"

    @property
    def stages(self) -> tuple[tuple[tuple[int, ...], int | None], ...]:
        """The network in order: (layer ids, group index), with None for a plain run of layers."""
        stages: list[tuple[tuple[int, ...], int | None]] = []
        nxt = 0
        for g, layers in enumerate(self.groups):
            if layers[0] > nxt:
                stages.append((tuple(range(nxt, layers[0])), None))
            stages.append((layers, g))
            nxt = layers[-1] + 1
        if nxt < self.n_layer:
            stages.append((tuple(range(nxt, self.n_layer)), None))
        return tuple(stages)

    @property
    def effective_depth(self) -> int:
        """L of the init: plain layers + mean_loops * looped layers."""
        looped = sum(len(layers) for layers in self.groups)
        return self.n_layer - looped + self.mean_loops * looped

    @property
    def init_std(self) -> float:
        return math.sqrt(2 / (5 * self.n_embd))

    @property
    def out_std(self) -> float:
        """Std of the two output projections of a block."""
        return self.init_std / math.sqrt(2 * self.effective_depth)

    @property
    def layer_parameters(self) -> int:
        """Matrix entries of one layer."""
        q, kv = self.n_head * self.head_dim, self.kv_heads * self.head_dim
        mlp = (3 if self.mlp == "gated" else 2) * self.n_embd * self.hidden
        return self.n_embd * (q + 2 * kv) + q * self.n_embd + mlp

    @property
    def matrix_parameters(self) -> int:
        """Matrix entries of the whole network, embeddings included; norm gains and biases are left out."""
        total = self.n_layer * self.layer_parameters + self.padded_vocab_size * self.n_embd * (1 if self.tie_head else 2)
        if self.positions == "learned":
            total += self.block_size * self.n_embd
        if self.inject == "concat":
            total += self.n_groups * 2 * self.n_embd**2
        return total + min(self.n_groups, 1) * self.n_embd * self.exit_gate

    def loops_for(self, loops: int | Sequence[int] | None) -> tuple[int, ...]:
        """One loop count for each group from what a caller may say: None (mean_loops), one number, or one a group."""
        if loops is None:
            loops = self.mean_loops
        if isinstance(loops, str | bytes):
            raise UserError(f"loops = {loops!r}: give one integer, or one for each group")
        single = _whole_number(loops)
        if single is not None:
            counts: tuple[int | None, ...] = (single,) * self.n_groups
        else:
            try:
                counts = tuple(_whole_number(k) for k in loops)  # type: ignore[union-attr]
            except TypeError:
                raise UserError(f"loops = {loops!r}: give one integer, or one for each group") from None
        if len(counts) != self.n_groups:
            raise UserError(f"loops has {len(counts)} entries, the model has {self.n_groups} groups: give one for each")
        if any(k is None or k < 1 for k in counts):
            raise UserError(f"loops = {loops!r}: a group takes an integer number of steps, at least 1")
        if any(k is not None and k > MAX_LOOPS for k in counts):
            raise UserError(f"loops = {loops!r}: a group takes at most {MAX_LOOPS} steps; ask for fewer")
        return tuple(k for k in counts if k is not None)

    # -- checks --------------------------------------------------------------------------------------------------

    def _check_sizes(self) -> None:
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "mean_loops"):
            _positive(name, getattr(self, name))
        for name in ("n_kv_head", "head_size", "mlp_hidden", "backprop_steps"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if self.mean_loops > MAX_LOOPS:
            raise UserError(f"mean_loops = {self.mean_loops}: at most {MAX_LOOPS} loops are supported")
        if self.n_layer > MAX_LAYERS:
            raise UserError(f"n_layer = {self.n_layer}: at most {MAX_LAYERS} layers are supported")
        if self.head_size is None and self.n_embd % self.n_head:
            raise UserError(
                f"n_embd = {self.n_embd} does not divide into n_head = {self.n_head} heads: change one of them or set head_size"
            )
        if self.n_head % self.kv_heads:
            raise UserError(f"n_head = {self.n_head} must be a multiple of n_kv_head = {self.kv_heads}")
        if self.positions == "rotary" and self.head_dim % 2:
            raise UserError(f"rotary positions need an even head size, not {self.head_dim}")
        if self.matrix_parameters > MAX_PARAMETERS:
            raise UserError(f"this config has {self.matrix_parameters:.2e} parameters; at most {MAX_PARAMETERS:.0e} are supported")

    def _check_groups(self) -> None:
        last = -1
        for layers in self.groups:
            if not layers:
                raise UserError(f"groups = {self.groups}: a loop group needs at least one layer")
            for layer in layers:
                if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < self.n_layer:
                    raise UserError(f"groups = {self.groups}: layer {layer!r} does not exist, layers run from 0 to {self.n_layer - 1}")
            if list(layers) != list(range(layers[0], layers[0] + len(layers))):
                raise UserError(f"groups = {self.groups}: the layers of a group must be contiguous and ascending, {layers} are not")
            if layers[0] <= last:
                raise UserError(f"groups = {self.groups}: groups must be disjoint and in order")
            last = layers[-1]

    def _check_options(self) -> None:
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise UserError(f"{name} = {getattr(self, name)!r}: choose one of {', '.join(allowed)}")
        for name in ("rope_base", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} = {getattr(self, name)}: must be a positive number")
        if not 0 <= self.loop_sigma <= 3:
            raise UserError(f"loop_sigma = {self.loop_sigma}: must lie between 0 and 3")
        if not 0 <= self.noise_mix <= 1:
            raise UserError(f"noise_mix = {self.noise_mix}: a share between 0 and 1")
        if self.groups and self.inject == "none" and self.start != "input":
            raise UserError(f"inject=none with start={self.start} cuts the groups off from their input: use start=input or inject=concat")
        if self.groups and self.inject == "none" and self.backprop_steps is not None:
            raise UserError("inject=none needs backprop_steps=None: a cut gradient would never reach the layers before the group")


CHOICES: dict[str, tuple[str, ...]] = {
    "positions": ("learned", "rotary"),
    "mlp": ("plain", "gated"),
    "norm": ("sum", "branch", "pre"),
    "group_norm": ("none", "leave", "step"),
    "inject": ("concat", "add", "none"),
    "start": ("noise", "zeros", "input"),
    "noise": ("start", "every_step"),
}


def _whole_number(value: object) -> int | None:
    """The value as an int where it is one (numpy's and torch's included), else None."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name} = {value!r}: must be an integer of at least 1")
