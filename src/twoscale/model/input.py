"""What a caller hands to a pass: ids and start states, checked."""

from collections.abc import Sequence
from operator import index

import torch
from torch import Tensor

from twoscale.config import ModelConfig, UserError


def as_batch(ids: Tensor | Sequence[Sequence[int]], vocab_size: int, block_size: int) -> tuple[Tensor, Tensor]:
    """Checked ids (B, T) padded on the right, and the rows' lengths (B,)."""
    if isinstance(ids, Tensor):
        if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise UserError(f"ids must be integers of shape (B, T), not {ids.dtype} of shape {tuple(ids.shape)}")
        tokens, lengths = ids.to(torch.int64), torch.full((ids.shape[0],), ids.shape[1], device="cpu")
    else:
        try:
            rows = [torch.tensor([index(i) for i in row], dtype=torch.int64, device="cpu") for row in ids]
        except (TypeError, ValueError, RuntimeError):
            raise UserError("ids must be a tensor (B, T) or a list of lists of integers") from None
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64, device="cpu")
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) if rows else torch.zeros(0, 0, dtype=torch.int64, device="cpu")
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


def check_start(start: Sequence[Tensor], config: ModelConfig, tokens: Tensor) -> None:
    """Start states must be one for each group, of the tokens' shape."""
    wanted = (*tokens.shape, config.n_embd)
    if len(start) != config.n_groups:
        raise UserError(f"start has {len(start)} states, the model has {config.n_groups} groups: give one for each")
    for g, x in enumerate(start):
        if tuple(x.shape) != wanted:
            raise UserError(f"start[{g}] has shape {tuple(x.shape)}, it must be {wanted}")
