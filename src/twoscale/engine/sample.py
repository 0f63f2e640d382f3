"""The next token from logits: the most likely one, or a draw that is a function of its key.

Shapes: V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.model.noise import fold, keyed_uniform


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. temperature 0 takes the most likely one, and top_k and top_p have nothing to say."""

    temperature: float = 0.0
    top_k: int | None = None
    """Draw among the k most likely tokens."""
    top_p: float | None = None
    """Draw among the most likely tokens that together reach this probability."""
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, int | float) or not 0 <= self.temperature <= 1000:
            raise UserError(f"temperature = {self.temperature!r}: a number from 0 (the most likely token) to 1000")
        if self.top_k is not None and (isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 1):
            raise UserError(f"top_k = {self.top_k!r}: a whole number of at least 1, or None")
        if self.top_p is not None and (isinstance(self.top_p, bool) or not isinstance(self.top_p, int | float) or not 0 < self.top_p <= 1):
            raise UserError(f"top_p = {self.top_p!r}: a probability above 0 and up to 1, or None")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise UserError(f"seed = {self.seed!r}: a whole number")

    def choose(self, logits: Tensor, stream: int, index: int) -> int:
        """Token number `index` of a text from logits (V,); `stream` tells texts apart that share a seed."""
        if self.temperature == 0:
            return int(logits.argmax())
        p, tokens = torch.softmax((logits.double() - logits.max()) / self.temperature, dim=-1).sort(descending=True, stable=True)
        if self.top_k is not None:
            p = p[: self.top_k]
        total = p.cumsum(dim=-1)
        if self.top_p is not None:
            # Every token is kept whose predecessors have not yet reached top_p, so the first one always is.
            total = total[: 1 + int((total[:-1] < self.top_p * total[-1]).sum())]
        u = keyed_uniform(fold(self.seed, stream), torch.tensor([index]), 1).double().item()
        return int(tokens[min(int(torch.searchsorted(total, u * total[-1])), len(total) - 1)])
