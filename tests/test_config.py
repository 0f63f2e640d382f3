"""Configs: JSON and back, presets, derived values."""

import dataclasses
import json

import pytest

import twoscale
from conftest import small_model
from twoscale.config import ModelConfig, RunConfig, UserError, presets
from twoscale.config.serial import from_dict, to_dict


@pytest.mark.parametrize("name", presets.PRESETS)
def test_round_trip(name: str) -> None:
    """A config written as JSON and read again is the same config."""
    config = presets.get(name)
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_paper_numbers() -> None:
    """The paper preset has the spec's stages, depth, stds and parameter count."""
    c = presets.paper().model
    assert [(layers, g) for layers, g in c.stages] == [((0, 1, 2, 3), None), ((4,), 0), ((5, 6), 1), ((7,), 2), ((8, 9, 10, 11), None)]
    assert c.effective_depth == 56 and c.padded_vocab_size == 50304
    assert round(c.init_std, 5) == 0.02282 and round(c.out_std, 6) == 0.002156
    by_hand = 50304 * 768 + 512 * 768 + 12 * 12 * 768**2 + 3 * 2 * 768**2
    assert c.matrix_parameters == by_hand


@pytest.mark.parametrize(
    "groups,stages",
    [
        ((), [((0, 1, 2, 3, 4), None)]),
        (((0, 1, 2, 3, 4),), [((0, 1, 2, 3, 4), 0)]),
        (((0,), (4,)), [((0,), 0), ((1, 2, 3), None), ((4,), 1)]),
    ],
)
def test_stages(groups: tuple[tuple[int, ...], ...], stages: list[object]) -> None:
    """Stages cover every layer once, in order, for any layout."""
    assert list(small_model(groups=groups).stages) == stages


def test_lr_schedule() -> None:
    """Warm-up is linear to the peak, the cosine ends at its floor, and so does a late line."""
    c = dataclasses.replace(presets.tiny().train, steps=100, warmup_steps=10, min_lr_ratio=0.1)
    assert c.lr_scale(0) == pytest.approx(0.1) and c.lr_scale(9) == 1.0 and c.lr_scale(10) == 1.0
    assert c.lr_scale(100) == pytest.approx(0.1) and c.lr_scale(55) == pytest.approx(0.55)
    late = dataclasses.replace(c, decay_steps=20)
    assert late.lr_scale(0) == pytest.approx(0.1) and late.lr_scale(10) == late.lr_scale(80) == 1.0
    assert late.lr_scale(90) == pytest.approx(0.55) and late.lr_scale(100) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "values,word",
    [
        ({"n_layers": 3}, "n_layers"),
        ({"n_layer": "3"}, "expected int"),
        ({"n_layer": True}, "expected int"),
        ({"groups": [[1], ["a"]]}, "expected int"),
        ({"groups": 3}, "expected a list"),
        ({"positions": "alibi"}, "learned"),
        ({"n_layer": 10**9}, "at most"),
        ([], "expected an object"),
    ],
)
def test_foreign_json(values: object, word: str) -> None:
    """A config file with an unknown key or a wrong type is refused by name, before anything is built."""
    with pytest.raises(UserError, match=word):
        from_dict(ModelConfig, values)


def test_public_names() -> None:
    """The public names of the foundation are where the documentation says."""
    assert twoscale.ModelConfig is ModelConfig and twoscale.presets is presets
    assert {"LoopedGPT", "forward", "load"} <= set(dir(twoscale))
    assert twoscale.LoopedGPT(twoscale.presets.nano()).config == twoscale.presets.nano().model
    with pytest.raises(AttributeError):
        _ = twoscale.nothing


def test_loops_grow() -> None:
    """The mean number of loops rises in a line to the model's own, and stays."""
    c = dataclasses.replace(presets.tiny().train, steps=100, loops_ramp=50)
    assert [c.mean_loops(step, 9) for step in (0, 25, 50, 99)] == [1, 5, 9, 9]
    assert dataclasses.replace(c, loops_ramp=0).mean_loops(0, 9) == 9
    held = dataclasses.replace(c, loops_start=3, loops_hold=40)
    assert [held.mean_loops(step, 9) for step in (0, 39, 40, 65, 90, 99)] == [3, 3, 3, 6, 9, 9]
    assert [dataclasses.replace(held, loops_ramp=0).mean_loops(step, 9) for step in (39, 40)] == [3, 9]
    with pytest.raises(UserError, match="loops_ramp"):
        dataclasses.replace(c, loops_ramp=101)
    with pytest.raises(UserError, match="loops_ramp"):
        dataclasses.replace(held, loops_ramp=61)
