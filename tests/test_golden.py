"""The model is general enough for the two published families: tiny checkpoints of both, with their own code's answers.

The files lie outside the repository; where they are absent these tests are skipped.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import twoscale
from conftest import SHARED
from twoscale.config import ModelConfig
from twoscale.model import LoopedGPT
from twoscale.train.checkpoint import load_weights

GOLDEN = SHARED / "golden"
pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden files of the published models are not here")


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


def unpair(w: Tensor, heads: int) -> Tensor:
    """Rows of a projection for rotary pairs (0, 1), (2, 3), ... to ours, (0, D/2), (1, D/2 + 1), ..."""
    return w.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(w.shape)


def huginn() -> tuple[LoopedGPT, dict[str, Tensor]]:
    config = ModelConfig(
        vocab_size=512, block_size=128, n_layer=8, n_head=4, n_embd=64, groups=((2, 3, 4, 5),), qk_bias=True, positions="rotary",
        rope_base=50_000.0, mlp="gated", mlp_hidden=176, group_norm="leave", share_group_norm=True, mean_loops=8,
    )  # fmt: skip
    raw = load_file(GOLDEN / "huginn-tiny" / "model.safetensors")
    t = {"wte.weight": raw["transformer.wte.weight"], "ln_f.weight": raw["transformer.ln_f.weight"]}
    t["stages.1.adapter.weight"] = raw["transformer.adapter.weight"]
    for stage, (part, n) in enumerate((("prelude", 2), ("core_block", 4), ("coda", 2))):
        for i in range(n):
            old, new = f"transformer.{part}.{i}.", f"stages.{stage}.blocks.{i}."
            q, k, v = raw[old + "attn.Wqkv.weight"].chunk(3)
            t[new + "attn.qkv.weight"] = torch.cat((unpair(q, 4), unpair(k, 4), v))
            bias = raw[old + "attn.qk_bias"].squeeze(1)
            t[new + "attn.qk_bias"] = torch.cat([unpair(b.flatten(), 4).view(4, 16) for b in bias])
            t[new + "attn.out.weight"] = raw[old + "attn.proj.weight"]
            t[new + "mlp.up.weight"], t[new + "mlp.down.weight"] = raw[old + "mlp.fc.weight"], raw[old + "mlp.proj.weight"]
            t.update({f"{new}norm{j}.weight": raw[f"{old}norm_{j}.weight"] for j in (1, 2, 3, 4)})
    model = LoopedGPT(config)
    load_weights(model, t, Path("huginn-tiny"))
    return model, load_file(GOLDEN / "huginn-tiny" / "expected.safetensors")


def ouro() -> tuple[LoopedGPT, dict[str, Tensor]]:
    config = ModelConfig(
        vocab_size=512, block_size=256, n_layer=3, n_head=4, n_embd=64, groups=((0, 1, 2),), positions="rotary", scale_embedding=False,
        mlp="gated", mlp_hidden=176, norm="branch", group_norm="step", share_group_norm=True, final_norm=False, tie_head=False,
        inject="none", start="input", backprop_steps=None, mean_loops=4,
    )  # fmt: skip
    raw = load_file(GOLDEN / "ouro-tiny" / "model.safetensors")
    t = {"wte.weight": raw["model.embed_tokens.weight"], "ln_f.weight": raw["model.norm.weight"], "lm_head.weight": raw["lm_head.weight"]}
    norms = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")
    for i in range(3):
        old, new = f"model.layers.{i}.", f"stages.0.blocks.{i}."
        t[new + "attn.qkv.weight"] = torch.cat([raw[f"{old}self_attn.{x}_proj.weight"] for x in "qkv"])
        t[new + "attn.out.weight"] = raw[old + "self_attn.o_proj.weight"]
        t[new + "mlp.up.weight"] = torch.cat((raw[old + "mlp.gate_proj.weight"], raw[old + "mlp.up_proj.weight"]))
        t[new + "mlp.down.weight"] = raw[old + "mlp.down_proj.weight"]
        t.update({f"{new}norm{j}.weight": raw[f"{old}{name}.weight"] for j, name in enumerate(norms, start=1)})
    model = LoopedGPT(config)
    load_weights(model, t, Path("ouro-tiny"))
    return model, load_file(GOLDEN / "ouro-tiny" / "expected.safetensors")


@pytest.mark.parametrize("loops", [1, 2, 4, 8, 16])
def test_huginn_logits(loops: int) -> None:
    """Huginn's logits from a given start state, for every loop count of the golden file."""
    model, expected = huginn()
    out = twoscale.forward(model, expected["input_ids"], loops=loops, start=[expected["initial_state"]])
    assert torch.allclose(out.logits, expected[f"logits_{loops}"], atol=1e-4)


def test_huginn_states() -> None:
    """Huginn's iterates, and the state that leaves the loop through the closing norm."""
    model, expected = huginn()
    recorder = States()
    with torch.no_grad():
        model.hidden(expected["input_ids"], loops=8, start=[expected["initial_state"]], recorder=recorder)
        latent = model.groups[0].leave(recorder.states[-1])
    assert torch.allclose(torch.stack(recorder.states), expected["iterates"], atol=1e-4)
    assert torch.allclose(latent, expected["latent_8"], atol=1e-4)


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
