"""The model is general enough for the two published families: tiny checkpoints of both, with their own code's answers.

The files lie outside the repository; where they are absent these tests are skipped.
"""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import twoscale
from conftest import ROOT
from twoscale import exits
from twoscale.model import LoopedGPT
from twoscale.tradeoff.heldout import HeldOut
from twoscale.tradeoff.signals import exit_steps, record_signals

GOLDEN = ROOT / "tests" / "golden"


class States:
    """Records every group's states."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def start(self, group: int, x: Tensor, projected: Tensor) -> None:
        self.states.append(x.clone())

    def step(self, group: int, k: int, x: Tensor) -> None:
        self.states.append(x.clone())

    def stage(self, index: int, x: Tensor) -> None:
        pass


def huginn() -> tuple[LoopedGPT, dict[str, Tensor]]:
    return twoscale.load(GOLDEN / "huginn-tiny")[0], load_file(GOLDEN / "huginn-tiny" / "expected.safetensors")


def ouro() -> tuple[LoopedGPT, dict[str, Tensor]]:
    return twoscale.load(GOLDEN / "ouro-tiny")[0], load_file(GOLDEN / "ouro-tiny" / "expected.safetensors")


@pytest.mark.parametrize("loops", [1, 2, 4, 8, 16])
def test_huginn_logits(loops: int) -> None:
    """Huginn's logits from a given start state, for every loop count of the golden file."""
    model, expected = huginn()
    out = twoscale.forward(model, expected["input_ids"], loops=loops, start=[expected["initial_state"]])
    assert torch.allclose(out.logits, expected[f"logits_{loops}"], atol=1e-4)


def test_huginn_states() -> None:
    """Huginn's iterates, and the state that leaves the loop through the final norm, after every loop count of the golden file."""
    model, expected = huginn()
    recorder = States()
    with torch.no_grad():
        model.hidden(expected["input_ids"], loops=16, start=[expected["initial_state"]], recorder=recorder)
        assert torch.allclose(torch.stack(recorder.states[:9]), expected["iterates"], atol=1e-4)
        for k in (1, 2, 4, 8, 16):
            assert torch.allclose(model.groups[0].output(recorder.states[k]), expected[f"latent_{k}"], atol=1e-4)


def greedy_without_cache(model: LoopedGPT, ids: list[int], n: int, loops: int, **start: object) -> list[int]:
    """One whole pass for each new token."""
    new: list[int] = []
    for _ in range(n):
        x = torch.tensor([ids + new])
        given = [torch.zeros(1, x.shape[1], model.config.n_embd)] if start else None
        new.append(int(twoscale.forward(model, x, loops=loops, start=given).logits[0, -1].argmax()))
    return new


def test_huginn_greedy() -> None:
    """Greedy decoding of 32 tokens from a zero state, with and without the cache, exactly."""
    model, expected = huginn()
    zero = LoopedGPT(dataclasses.replace(model.config, start="zeros"), seed=None)
    zero.load_state_dict(model.state_dict())
    want = expected["greedy_zero_state_8"][0].tolist()
    prompt = expected["input_ids"][0, :12].tolist()
    assert want[:12] == prompt and len(want) == 44
    assert twoscale.generate(zero.eval(), [prompt], 32, loops=8).tokens[0] == want[12:]
    assert greedy_without_cache(model, prompt, 32, 8, start="zeros") == want[12:]


def test_ouro() -> None:
    """Ouro's hidden states after every loop, and its logits when it stops after each of them."""
    model, expected = ouro()
    recorder = States()
    with torch.no_grad():
        model.hidden(expected["input_ids"], loops=4, recorder=recorder)
    assert torch.allclose(torch.stack(recorder.states[1:]), expected["hidden_by_loop"], atol=1e-4)
    for n in (1, 2, 3, 4):
        logits = twoscale.forward(model, expected["input_ids"], loops=n).logits
        assert torch.allclose(logits, expected[f"logits_exit_at_{n}"], atol=1e-4)
    assert torch.allclose(logits, expected["logits"], atol=1e-4)


def test_ouro_gate() -> None:
    """Ouro's gate after every loop; exits.Gate(0.5) picks the loop that its own code picks; greedy decoding exactly, with and without
    the cache.

    Ouro's code runs all loops for all tokens and picks afterwards, so a token still sees the others at its own loop. As a rule that stops
    computing, a token sees those that have left at their last loop; its first token, which sees only itself, must agree either way.
    """
    model, expected = ouro()
    ids = expected["input_ids"]
    gate = model.groups[0].gate
    assert gate is not None
    with torch.no_grad():
        printed = gate(expected["hidden_by_loop"])
    assert torch.allclose(printed, expected["gate_by_loop"], atol=1e-4)
    rule = exits.Gate(0.5)
    steps = exit_steps(rule, record_signals(model, HeldOut(ids, ids, ids, "windows"), rule, 4)[0][..., 0]).view(ids.shape)
    every = torch.stack([twoscale.forward(model, ids, loops=n).logits for n in (1, 2, 3, 4)])
    picked = every.gather(0, (steps - 1)[None, ..., None].expand(1, *every.shape[1:]))[0]
    assert torch.allclose(picked, expected["logits_gate_0.5"], atol=1e-4) and len(set(steps.flatten().tolist())) > 1
    out = twoscale.forward(model, ids, exit=rule, loops=4)
    assert torch.allclose(out.logits[:, 0], expected["logits_gate_0.5"][:, 0], atol=1e-4) and int(out.steps.sum()) < 4 * ids.numel()
    prompt, want = ids[0, :12].tolist(), expected["greedy"][0].tolist()
    assert want[:12] == prompt and twoscale.generate(model, [prompt], 24, loops=4).tokens[0] == want[12:]
    assert greedy_without_cache(model, prompt, 24, 4) == want[12:]


HUGINN = (exits.KL(5e-4, reverse=True), exits.Entropy(), exits.MinPKL(), exits.ArgmaxStable(), exits.Cosine(), exits.Acceleration(0.05))


@pytest.mark.parametrize("rule", [*HUGINN, exits.StepNorm(0.5), exits.Confidence(0.01), exits.Fixed(3)], ids=lambda r: type(r).__name__)
def test_rules(rule: exits.Rule) -> None:
    """Every rule works on both; through the cache steps are those of the parallel pass."""
    for model, expected in (huginn(), ouro()):
        row = expected["input_ids"][0].tolist()
        steps = twoscale.forward(model, [row], exit=rule, loops=8).steps[0].tolist()
        gen = twoscale.generate(model, [row[:20]], 1, exit=rule, loops=8)
        assert [list(s) for s in gen.prompt_steps[0]] == steps[:20] and all(1 <= k <= 8 for (k,) in steps)
