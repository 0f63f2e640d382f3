"""The arithmetic of large runs: closed forms, the page's table, and the same arithmetic beside this machine."""

import dataclasses

import pytest

from conftest import ROOT, CommandLine, is_one_line
from twoscale.bench import scale
from twoscale.config import ModelConfig, presets
from twoscale.model import draw_loops
from twoscale.model.flops import training_flops
from twoscale.train.cost import Machine, cost, expected_flops

PLAIN = ModelConfig(vocab_size=256, block_size=64, n_layer=4, n_head=2, n_embd=32, groups=())
TOY = Machine("toy", flops=1e9, matmul=0.5, node=2, link=1e6, network=1e5, memory=1e9)


def test_a_plain_model_by_hand() -> None:
    """Without loops: hours are FLOPs over the devices' FLOP/s, and the bytes of every way to share the work have their closed forms."""
    weights = 4 * PLAIN.matrix_parameters
    tokens = 64.0 * 8 * 100
    for devices, parallel, near, far, state in (
        (1, "ddp", 0, 0, 4 * weights),
        (2, "ddp", 2 * weights / 2, 0, 4 * weights),
        (2, "fsdp", 3 * weights / 2, 0, 2 * weights),
        (4, "fsdp", 0, 3 * weights * 3 / 4, weights),
        (4, "hsdp", 3 * weights / 2, 2 * (1 / 2) * weights / 2, 2 * weights),
    ):
        found = cost(PLAIN, tokens, 8, TOY, devices, 0.4, parallel)
        assert found.steps == 100 and found.flops == tokens * training_flops(PLAIN, 64, (), causal=True)
        assert found.compute_hours == pytest.approx(found.flops / (devices * 1e9 * 0.5 * 0.4) / 3600)
        assert found.exchanged == pytest.approx(near + far) and found.state == pytest.approx(state)
        assert found.communication_hours == pytest.approx(100 * (near / 1e6 + far / 1e5) / 3600)
        assert found.checkpoint == 3 * weights
    twice = cost(PLAIN, tokens, 8, TOY, 2, 0.4, "fsdp", micro_batches=2)
    assert twice.gathered == pytest.approx(2 * 2 * weights / 2) and twice.exchanged == pytest.approx(5 * weights / 2)


def test_loops_are_drawn() -> None:
    """FLOPs a token are the mean over the loop counts of training: between K = 1 and K = 30, and the same with other draws."""
    model = presets.paper().model
    low, high = (training_flops(model, model.block_size, (k,) * 3, causal=True) for k in (1, 30))
    found = expected_flops(model)
    assert low < found < high
    some = [training_flops(model, model.block_size, draw_loops(model, 1, step), causal=True) for step in range(2000)]
    assert found == pytest.approx(sum(some) / len(some), rel=0.03)
    assert expected_flops(PLAIN) == training_flops(PLAIN, 64, (), causal=True)


def test_the_page_is_the_table(cli: CommandLine) -> None:
    """docs/scale-training.md shows what `twoscale bench scale` prints."""
    code, out, _ = cli("bench", "scale")
    page = (ROOT / "docs" / "scale-training.md").read_text()
    assert code == 0 and out.strip() in page and len(out.strip().splitlines()) == 2 + len(scale.runs())


@pytest.mark.long
def test_here(cli: CommandLine) -> None:
    """Every second step gives the share and the others are foretold; a whole run takes its tokens times FLOPs at that rate."""
    config = presets.nano()
    found = scale.here(config, 4)
    assert found.expected > 0 and found.measured == pytest.approx(sum(found.bench.step_seconds[1::2]))
    tokens = config.train.steps * config.train.batch_size * config.model.block_size
    assert found.hours == pytest.approx(tokens * expected_flops(config.model) / (found.share * found.bench.matmul_flops) / 3600)
    code, out, _ = cli("bench", "scale", "--here", "nano", "--steps", 4)
    assert code == 0 and "expected" in out and "measured" in out
    for words in (("--share", 0), ("--steps", 2)):
        code, _, err = cli("bench", "scale", *words)
        assert code == 2 and is_one_line(err)


def test_prepare(cli: CommandLine) -> None:
    """`bench prepare` measures the tokenizer alone and each number of workers on the same text."""
    code, out, _ = cli("bench", "prepare", "--megabytes", 0.1, "--files", 3, "--workers", 1, 2, "--rounds", 1, "--tokenizer", "bytes")
    assert code == 0 and "the tokenizer alone" in out and "1 worker " in out and "2 workers" in out
    code, _, err = cli("bench", "prepare", "--workers", 0)
    assert code == 2 and is_one_line(err)


def test_one_machine_has_no_network() -> None:
    """On one device nothing is exchanged, whatever the network."""
    slow = dataclasses.replace(TOY, network=1.0, link=1.0, node=1)
    assert cost(PLAIN, 1e6, 8, slow, 1, 0.5, "ddp").communication_hours == 0
