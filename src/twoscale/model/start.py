"""What is drawn at random in a forward pass: loop counts and start states, each a pure function of its key."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from twoscale.config import ModelConfig
from twoscale.config.model import MAX_LOOPS
from twoscale.model.noise import fold, keyed_normal

_EVALUATION, _TRAINING = 0, 1


def draw_loops(config: ModelConfig, seed: int, step: int, mean: float | None = None) -> tuple[int, ...]:
    """One loop count for each group at a training step: K = 1 + Poisson(lambda), lambda ~ LogNormal(ln r - s^2/2, s).

    r is `mean`, by default the model's mean_loops. Keyed by (seed, step, group) alone, so every rank and every resumed
    run draws the same.
    """
    return tuple(_draw(mean or config.mean_loops, config.loop_sigma, seed, step, g) for g in range(config.n_groups))


def _draw(mean: float, sigma: float, seed: int, step: int, group: int) -> int:
    generator = np.random.default_rng((seed, step, group))
    rate = generator.lognormal(math.log(mean) - sigma**2 / 2, sigma)
    return min(1 + int(generator.poisson(rate)), MAX_LOOPS)


@dataclass(frozen=True)
class StateNoise:
    """Start states of a group: truncated normal, std sqrt(2/(5d)) times sqrt(d).

    While evaluating (`step` is None) a state depends on (seed, group, position) alone; while training it depends on
    (seed, step, group, row, position), where `rows` are the rows' places in the global batch.
    """

    seed: int = 0
    step: int | None = None
    rows: tuple[int, ...] = ()

    def __call__(self, group: int, positions: Tensor, width: int, k: int = 0) -> Tensor:
        """States for int64 positions (T,): (T, C) while evaluating, (B, T, C) while training; `k` counts loop steps."""
        if self.step is None:
            normal = keyed_normal(fold(self.seed, _EVALUATION, group, k), positions, width)
        else:
            keys = [fold(self.seed, _TRAINING, self.step, group, k, row) for row in self.rows]
            normal = keyed_normal(keys, positions.expand(len(self.rows), -1), width)
        return normal * math.sqrt(2 / 5)  # sqrt(2 / (5 d)) * sqrt(d)


def start_state(config: ModelConfig, group: int, e: Tensor, positions: Tensor, noise: StateNoise) -> Tensor:
    """x^(0) of a group whose input is e (B, T, C)."""
    if config.start == "zeros":
        return torch.zeros_like(e)
    if config.start == "input":
        return e
    return noise(group, positions, config.n_embd).to(e.dtype).expand_as(e)
