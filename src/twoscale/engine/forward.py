"""`twoscale.forward`: one parallel pass over whole sequences.

out = twoscale.forward(model, [[1, 2, 3], [4, 5]], loops=12)
out.logits[1, :2]    # a row's answers never depend on its neighbours or its padding
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.model import LoopedGPT, StateNoise, Stop


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
        _check_start(start, model, tokens)
    x, steps = model.hidden(tokens.to(device), loops=loops, noise=StateNoise(seed), start=start, stop=exit)
    logits = model.head(x).float()
    padding = (torch.arange(tokens.shape[1]) >= lengths[:, None]).to(device)
    return Forward(logits.masked_fill(padding[..., None], 0.0), steps.masked_fill(padding[..., None], 0))


def as_batch(ids: Tensor | Sequence[Sequence[int]], vocab_size: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Checked ids (B, T) padded on the right, and the rows' lengths (B,)."""
    if isinstance(ids, Tensor):
        if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise UserError(f"ids must be whole numbers of shape (B, T), not {ids.dtype} of shape {tuple(ids.shape)}")
        tokens, lengths = ids.to(torch.int64), torch.full((ids.shape[0],), ids.shape[1])
    else:
        try:
            rows = [torch.tensor(list(row), dtype=torch.int64) for row in ids]
        except (TypeError, ValueError, RuntimeError):
            raise UserError("ids must be a tensor (B, T) or a list of lists of whole numbers") from None
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 0, dtype=torch.int64)
    if tokens.shape[0] == 0:
        raise UserError("ids holds no sequence")
    if int(lengths.min()) == 0:
        raise UserError(f"sequence {int(lengths.argmin())} is empty: give at least one token (the end-of-text token starts a document)")
    if int(lengths.max()) > block_size:
        raise UserError(f"a sequence of {int(lengths.max())} tokens does not fit the context of {block_size} tokens: shorten it")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        bad = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
        raise UserError(f"token {bad} does not exist: ids run from 0 to {vocab_size - 1}")
    return tokens, lengths


def _check_start(start: Sequence[Tensor], model: LoopedGPT, tokens: Tensor) -> None:
    wanted = (*tokens.shape, model.config.n_embd)
    if len(start) != model.config.n_groups:
        raise UserError(f"start has {len(start)} states, the model has {model.config.n_groups} groups: give one for each")
    for g, x in enumerate(start):
        if tuple(x.shape) != wanted:
            raise UserError(f"start[{g}] has shape {tuple(x.shape)}, it must be {wanted}")
