"""Cross-entropy on held-out text at given loop counts, and the bigram that any model should beat."""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from twoscale.data import TokenData
from twoscale.model import LoopedGPT, StateNoise


@torch.no_grad()
def cross_entropy(model: LoopedGPT, ids: Tensor, targets: Tensor, loops: int | Sequence[int] | None = None, batch: int = 16) -> float:
    """Mean loss in nats a token over windows (N, T), fp32."""
    total = 0.0
    for first in range(0, len(ids), batch):
        rows = slice(first, first + batch)
        x, _ = model.hidden(ids[rows], loops=loops, noise=StateNoise())
        total += float(F.cross_entropy(model.head(x).float().flatten(0, 1), targets[rows].flatten(), reduction="sum"))
    return total / targets.numel()


def bigram_cross_entropy(train: TokenData, ids: Tensor, targets: Tensor, smoothing: Sequence[float] = (1.0, 0.3, 0.1, 0.03, 0.01)) -> float:
    """The loss of a bigram model counted on the training split, on the same windows; the best of several smoothings."""
    V = train.vocab_size
    tokens = train.read(0, len(train)).astype(np.int64)
    pairs, counts = np.unique(tokens[:-1] * V + tokens[1:], return_counts=True)
    given = np.bincount(tokens[:-1], minlength=V)
    x, y = ids.numpy().ravel(), targets.numpy().ravel()
    place = np.searchsorted(pairs, x * V + y).clip(max=len(pairs) - 1)
    seen = np.where(pairs[place] == x * V + y, counts[place], 0)
    return min(float(-np.log((seen + a) / (given[x] + a * V)).mean()) for a in smoothing) if len(pairs) else math.log(V)
