"""Loop counts and start states: the right distributions, and pure functions of their keys."""

import math

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from conftest import small_model
from twoscale.config import presets
from twoscale.model import StateNoise, draw_loops
from twoscale.model.noise import fold, keyed_normal

CUT_STD = 0.98658  # std of a standard normal cut at three sigma


def test_loop_counts() -> None:
    """10^5 draws have the spec's mean 13, sd 7.3 and 5/50/95 percentiles 4/12/27."""
    config = presets.paper().model
    draws = np.array([draw_loops(config, 0, step) for step in range(34_000)]).ravel()
    assert len(draws) > 100_000 and draws.min() >= 1
    assert abs(draws.mean() - 13) < 0.1 and abs(draws.std() - 7.3) < 0.15
    assert np.percentile(draws, [5, 50, 95]).tolist() == [4, 12, 27]


def test_loop_counts_are_keyed() -> None:
    """The same (seed, step) gives the same counts; another seed, step or group gives others."""
    config = presets.paper().model
    table = np.array([draw_loops(config, 1, s) for s in range(200)])
    assert (table == np.array([draw_loops(config, 1, s) for s in range(200)])).all()
    assert (table != np.array([draw_loops(config, 2, s) for s in range(200)])).any(axis=1).mean() > 0.9
    assert abs(np.corrcoef(table.T) - np.eye(3)).max() < 0.25


def test_state_distribution() -> None:
    """Start states are normal, cut at three sigma, with std sqrt(2/5) in every channel (norm about sqrt(2 d / 5))."""
    x = StateNoise(seed=3)(1, torch.arange(4096), 128)
    assert abs(float(x.mean())) < 0.005
    assert abs(float(x.std()) / math.sqrt(0.4) - CUT_STD) < 0.005
    assert float(x.abs().max()) <= 3 * math.sqrt(0.4) + 1e-6
    quantiles = torch.quantile(x.flatten()[:1_000_000] / math.sqrt(0.4), torch.tensor([0.1587, 0.5, 0.8413]))
    assert torch.allclose(quantiles, torch.tensor([-0.9935, 0.0, 0.9935]), atol=0.01)
    neighbours = (x[:-1] * x[1:]).mean() / x.var()
    channels = (x[:, :-1] * x[:, 1:]).mean() / x.var()
    assert abs(float(neighbours)) < 0.005 and abs(float(channels)) < 0.005


@given(st.integers(0, 2**31), st.integers(0, 5), st.lists(st.integers(0, 5000), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_state_is_a_function_of_seed_group_position(seed: int, group: int, positions: list[int]) -> None:
    """The state of a position is bitwise the same whatever else is asked for beside it."""
    noise = StateNoise(seed)
    together = noise(group, torch.tensor(positions), 16)
    for i, p in enumerate(positions):
        assert torch.equal(together[i], noise(group, torch.tensor([p]), 16)[0])


def test_training_noise_is_keyed_by_row() -> None:
    """While training, a row's start state is the same whichever process computes it, and fresh at every step."""
    positions = torch.arange(8)
    whole = StateNoise(0, 5, (0, 1, 2, 3))(0, positions, 16)
    share = StateNoise(0, 5, (2, 3))(0, positions, 16)
    assert torch.equal(whole[2:], share)
    assert not torch.equal(whole, StateNoise(0, 6, (0, 1, 2, 3))(0, positions, 16))
    assert not torch.equal(whole[0], whole[1])


def test_keys_do_not_collide() -> None:
    """Keys that differ in one part, or in order, differ."""
    keys = {fold(a, b, c) for a in range(12) for b in range(12) for c in range(12)}
    assert len(keys) == 12**3 and fold(1, 2) != fold(2, 1) and fold(0) != fold(0, 0)
    assert not torch.equal(keyed_normal(fold(0, 1), torch.arange(4), 8), keyed_normal(fold(1, 0), torch.arange(4), 8))


def test_small_sigma() -> None:
    """With no spread in the rate, counts are 1 + Poisson(r)."""
    config = small_model(loop_sigma=0.0, mean_loops=6)
    draws = np.array([draw_loops(config, 0, s) for s in range(5000)])
    assert abs(draws.mean() - 7) < 0.1 and abs(draws.var() - 6) < 0.4
