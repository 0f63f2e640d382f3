"""Counted FLOPs equal a formula by hand and what torch counts."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from conftest import small_model
from twoscale.bench.train import bench_train
from twoscale.config import presets
from twoscale.model import LoopedGPT, StateNoise
from twoscale.model.flops import token_flops, training_flops


def test_paper_preset_by_hand() -> None:
    """A token of the paper preset at 12 loops and a context of 512, added up by hand."""
    d, T, V = 768, 512, 50304
    layer = 2 * 12 * d * d + 4 * d * T
    by_hand = 8 * layer + 12 * 4 * layer + 3 * 12 * 2 * d * d + 3 * 2 * d * d + 2 * d * V
    assert token_flops(presets.paper().model, T, (12, 12, 12)) == by_hand


def test_against_torch() -> None:
    """Forward passes of several layouts cost what FlopCounterMode counts."""
    for options in ({}, {"mlp": "gated", "mlp_hidden": 48}, {"inject": "add"}, {"groups": ((0, 1),)}):
        config = small_model(**options)
        model, loops = LoopedGPT(config), tuple(range(2, 2 + config.n_groups))
        ids = torch.zeros(2, 24, dtype=torch.int64)
        with torch.no_grad(), FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            model(ids, loops=loops)
        assert counter.get_total_flops() == 2 * 24 * token_flops(config, 24, loops), options


def test_training_against_torch() -> None:
    """A training step costs what FlopCounterMode counts, the steps without gradient included.

    Torch's count lacks the gradient with respect to the noise that the first tracked step starts from, which nobody
    needs and nobody computes; ours counts three passes throughout. The difference is one adapter product a group.
    """
    config = small_model(backprop_steps=2)
    model = LoopedGPT(config)
    ids = torch.zeros(2, 24, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(ids, ids, loops=(5, 3), noise=StateNoise(0, 0, (0, 1))).backward()
    unneeded = 2 * 2 * 32 * 32
    assert counter.get_total_flops() == 2 * 24 * (training_flops(config, 24, (5, 3)) - unneeded)


def test_bench_runs() -> None:
    """The bench measures both rates in one run."""
    result = bench_train(presets.nano(), steps=2)
    assert result.model_flops > result.causal_flops > 0 and result.matmul_flops > 0 and 0 < result.ratio < 2
