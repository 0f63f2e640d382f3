"""`twoscale.forward`: one parallel pass over whole sequences.

out = twoscale.forward(model, [[1, 2, 3], [4, 5]], loops=12)
out.logits[1, :2]    # a row's answers never depend on its neighbours or its padding
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twoscale.model import LoopedGPT, StateNoise, Stop
from twoscale.model.input import as_batch, check_start


@dataclass(frozen=True)
class Forward:
    """The answers of one pass."""

    logits: Tensor
    """(B, T, V) fp32; zero where a row is shorter than T."""
    steps: Tensor
    """(B, T, G) int64: applications of each group's map; zero where a row is shorter than T."""

    def __post_init__(self) -> None:
        assert self.logits.shape[:2] == self.steps.shape[:2] and self.logits.dtype == torch.float32


@torch.no_grad()
def forward(
    model: LoopedGPT,
    ids: Tensor | Sequence[Sequence[int]],
    *,
    loops: int | Sequence[int] | None = None,
    exit: Stop | None = None,
    start: Sequence[Tensor] | None = None,
    seed: int = 0,
) -> Forward:
    """Logits and steps for ids (B, T), or for a ragged list of lists.

    `loops` is the most steps that a group may take (one number, or one for each group; default: the model's
    mean_loops). `exit` lets tokens leave one by one. `start` gives the groups' initial states, one (B, T, C) each;
    without it they are a function of (`seed`, group, position).
    """
    tokens, lengths = as_batch(ids, model.config.vocab_size, model.config.block_size)
    device = next(model.parameters()).device
    if start is not None:
        check_start(start, model.config, tokens)
    x, steps = model.hidden(tokens.to(device), loops=loops, noise=StateNoise(seed), start=start, stop=exit)
    logits = model.head(x).float()
    padding = (torch.arange(tokens.shape[1]) >= lengths[:, None]).to(device)
    return Forward(logits.masked_fill(padding[..., None], 0.0), steps.masked_fill(padding[..., None], 0))
