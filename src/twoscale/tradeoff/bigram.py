"""The bigram that any model should beat."""

import math
from collections.abc import Sequence

import numpy as np

from twoscale.data import TokenData
from twoscale.tradeoff.heldout import HeldOut


def bigram_cross_entropy(train: TokenData, text: HeldOut, smoothing: Sequence[float] = (1.0, 0.3, 0.1, 0.03, 0.01)) -> float:
    """The loss of a bigram model counted on the training split, on the same windows; the best of several smoothings."""
    V = train.vocab_size
    tokens = train.read(0, len(train)).astype(np.int64)
    pairs, counts = np.unique(tokens[:-1] * V + tokens[1:], return_counts=True)
    context_counts = np.bincount(tokens[:-1], minlength=V)
    x, y = text.ids.numpy().ravel(), text.targets.numpy().ravel()
    place = np.searchsorted(pairs, x * V + y).clip(max=len(pairs) - 1)
    seen = np.where(pairs[place] == x * V + y, counts[place], 0)
    return min(float(-np.log((seen + a) / (context_counts[x] + a * V)).mean()) for a in smoothing) if len(pairs) else math.log(V)
