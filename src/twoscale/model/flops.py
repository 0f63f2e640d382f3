"""Counted floating-point operations, as torch's FlopCounterMode counts them: two for a multiply-add, matrix products
and attention only, attention over the whole context (`causal=True` counts the half below the diagonal)."""

from collections.abc import Sequence

from twoscale.config import ModelConfig


def layer_flops(c: ModelConfig, context: int, causal: bool = False) -> float:
    """One layer on one token that sees `context` tokens."""
    return 2 * c.layer_parameters + 4 * c.n_head * c.head_dim * context * (0.5 if causal else 1)


def step_flops(c: ModelConfig, group: int, context: int, causal: bool = False) -> float:
    """A group's map, once, on one token. The injected input's share of the adapter is `enter_flops`."""
    adapter = 2 * c.n_embd**2 if c.inject == "concat" else 0
    return adapter + len(c.groups[group]) * layer_flops(c, context, causal)


def enter_flops(c: ModelConfig) -> float:
    """What entering a group costs one token, once: A_e e."""
    return 2 * c.n_embd**2 if c.inject == "concat" else 0


def head_flops(c: ModelConfig) -> float:
    return 2 * c.n_embd * c.padded_vocab_size


def token_flops(c: ModelConfig, context: int, loops: Sequence[int], causal: bool = False) -> float:
    """A forward pass on one token, with that many steps in each group."""
    plain = c.n_layer - sum(len(g) for g in c.groups)
    looped = sum(enter_flops(c) + k * step_flops(c, g, context, causal) for g, k in enumerate(loops))
    return plain * layer_flops(c, context, causal) + looped + head_flops(c)


def training_flops(c: ModelConfig, context: int, loops: Sequence[int], causal: bool = False) -> float:
    """Forward and backward on one token: a step with gradients costs three forward ones, the others one."""
    tracked = [k if c.backprop_steps is None else min(k, c.backprop_steps) for k in loops]
    untracked = sum((k - t) * step_flops(c, g, context, causal) for g, (k, t) in enumerate(zip(loops, tracked, strict=True)))
    return 3 * token_flops(c, context, tracked, causal) + untracked
