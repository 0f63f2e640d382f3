"""Means and bands over any number of tokens in constant memory."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Moments:
    """Count, mean and spread of every entry of a (K, tokens) statistic, updated chunk by chunk; NaN and inf do not count."""

    count: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    mean: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    square: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    """Sum of squared distances to the mean."""

    def add(self, values: Tensor) -> None:
        """Take in a chunk (K, tokens)."""
        values = values.double()
        counted = values.isfinite()
        values = torch.where(counted, values, torch.zeros_like(values))
        n = counted.sum(dim=1).double()
        mean = values.sum(dim=1) / n.clamp(min=1)
        square = (torch.where(counted, values - mean[:, None], torch.zeros_like(values)) ** 2).sum(dim=1)
        if not len(self.count):
            self.count, self.mean, self.square = n, mean, square
            return
        total = self.count + n
        gap = mean - self.mean
        self.square = self.square + square + gap**2 * self.count * n / total.clamp(min=1)
        self.mean = self.mean + gap * n / total.clamp(min=1)
        self.count = total

    def as_json(self) -> dict[str, Any]:
        """Mean, one sigma and count of every entry; None where nothing was counted."""
        std = (self.square / self.count.clamp(min=1)).sqrt()
        known = (self.count > 0).tolist()
        return {
            "mean": [m if ok else None for m, ok in zip(self.mean.tolist(), known, strict=True)],
            "std": [s if ok else None for s, ok in zip(std.tolist(), known, strict=True)],
            "count": [int(n) for n in self.count.tolist()],
        }
