"""`twoscale.forward`: one parallel pass over whole sequences.

out = twoscale.forward(model, [[1, 2, 3], [4, 5]], loops=12)
out.logits[1, :2]    # a sequence's logits do not depend on the other sequences or on padding
out = twoscale.forward(model, ids, exit=exits.Acceleration(1e-2), loops=30)
out.steps            # (B, T, G): loop steps of every token in every group
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.config.dtypes import KVDtype
from twoscale.config.show import ShortRepr
from twoscale.data import Tokenizer
from twoscale.data.text import Tokens, as_token_ids
from twoscale.engine.engine import Engine
from twoscale.engine.request import LoopParams, loop_params
from twoscale.engine.scheduler import NOT_FINITE
from twoscale.exits import Exit
from twoscale.model import LoopedGPT, StateNoise
from twoscale.model.input import as_batch, check_start

MIN_WARNED_PASSES = 256  # a rule that needs the tokens one at a time, and so at least this many passes, gives a warning


@dataclass(frozen=True, repr=False)
class Forward(ShortRepr):
    """The result of `forward`."""

    logits: Tensor
    """(B, T, V) fp32; zero at padding."""
    steps: Tensor
    """(B, T, G) int64: loop steps in each group; zero at padding."""

    def __post_init__(self) -> None:
        assert self.logits.shape[:2] == self.steps.shape[:2] and self.logits.dtype == torch.float32


@torch.no_grad()
def forward(
    model: LoopedGPT,
    ids: Tokens,
    *,
    loops: int | Sequence[int] | None = None,
    exit: Exit | None = None,
    start: Sequence[Tensor] | None = None,
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
    kv_dtype: KVDtype = "auto",
) -> Forward:
    """Logits and steps for ids (B, T), or for a ragged list of lists.

    `loops` is the maximum number of loop steps (one number, or one for each group; default: the model's mean_loops). `exit` is a rule of
    twoscale.exits, {group: rule}, or "auto" (the model's calibration, including its loops unless given): a token that exits is not computed
    any more. `start` gives the groups' initial states, one (B, T, C) each; by default they are a function of (`seed`, group, position).
    With a `tokenizer` the sequences may be strings. With a `kv_dtype` (fp32, bf16) tokens attend to keys and values that were stored in it,
    as in `generate`.
    """
    tokens, lengths = as_batch(as_token_ids(ids, tokenizer), model.config.vocab_size, model.config.block_size)
    device = next(model.parameters()).device
    if start is not None:
        check_start(start, model.config, tokens)
    padding = (torch.arange(tokens.shape[1], device=lengths.device) >= lengths[:, None]).to(device)
    if exit is None and kv_dtype == "auto":
        x, steps = model.hidden(tokens.to(device), loops=loops, noise=StateNoise(seed), start=start)
        logits = model.head(x).float().masked_fill(padding[..., None], 0.0)
        steps = steps.masked_fill(padding[..., None], 0)
    else:
        params = loop_params(model, loops=loops, exit=exit, seed=seed, kv_dtype=kv_dtype)
        logits, steps = _by_engine(model, tokens, lengths.tolist(), ~padding, params, start)
    check_finite(logits)
    return Forward(logits, steps)


def check_finite(logits: Tensor) -> None:
    """UserError if the logits contain NaN or infinity."""
    if not logits.amax().isfinite():
        raise UserError(NOT_FINITE)


def _by_engine(
    model: LoopedGPT, tokens: Tensor, lengths: list[int], not_padding: Tensor, params: LoopParams, start: Sequence[Tensor] | None
) -> tuple[Tensor, Tensor]:
    """The pass with exits, or with stored keys and values, by the engine: logits (B, T, V) and steps (B, T, G)."""
    engine = Engine(model)
    if not params.token_by_token:
        # The tokens of a sequence that are still inside the loop are at the same step, so only the newest keys and values are read.
        params = replace(params, kv="last")
    elif max(lengths) >= MIN_WARNED_PASSES:
        warnings.warn(
            f"this exit rule needs the tokens one at a time, {max(lengths)} passes instead of one: with read='coda' it runs the layers "
            "after the last loop group, where a token attends to the finished tokens before it; read='lens' is faster",
            stacklevel=4,
        )
    inputs = [(b, engine.new_cache(n, params), row[:n]) for b, (row, n) in enumerate(zip(tokens.tolist(), lengths, strict=True))]
    states, steps = engine.run(inputs, None if start is None else [x.to(engine.device)[not_padding] for x in start])
    logits = engine.model.head(states).float()
    if bool(not_padding.all()):
        return logits.view(*tokens.shape, -1), steps.view(*tokens.shape, -1)
    padded = [torch.zeros(*tokens.shape, x.shape[-1], dtype=x.dtype, device=x.device) for x in (logits, steps)]
    padded[0][not_padding], padded[1][not_padding] = logits, steps
    return padded[0], padded[1]
