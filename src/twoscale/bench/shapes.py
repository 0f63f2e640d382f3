"""Models with random weights, and folders of them at the shapes of published looped models: the same config.json and names, in bf16.

They stand in for the real checkpoints where only size and speed are asked for.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from twoscale.config import ModelConfig
from twoscale.config.dtypes import WeightDtype
from twoscale.config.run_folder import CONFIG
from twoscale.engine.kernels.quantize import quantize
from twoscale.interop.quantize import ShardWriter
from twoscale.model import LoopedGPT

Settings = dict[str, Any]


def random_model(config: ModelConfig, dtype: WeightDtype = "fp32", device: torch.device | None = None) -> LoopedGPT:
    """A model for inference with its weights in a dtype, on a device."""
    model = LoopedGPT(config).eval().to(device)
    return model if dtype == "fp32" else quantize(model, dtype)


def huginn(width: int, heads: int, hidden: int, vocabulary: int, layers: tuple[int, int, int] = (2, 4, 2)) -> Settings:
    prelude, core, coda = layers
    return {
        "model_type": "huginn_raven", "n_embd": width, "n_heads": heads, "n_layers": sum(layers), "block_size": 4096,
        "vocab_size": vocabulary, "padded_vocab_size": vocabulary, "tie_embeddings": True, "intermediate_size": hidden, "bias": False,
        "block_class_name": "SandwichBlock", "norm_class_name": "RMSNorm_llama", "norm_eps": 1e-6, "mlp_class_name": "GatedMLP",
        "nonlin_name": "SiLU", "state_init": "like-init", "injection_type": "linear", "n_layers_in_recurrent_block": core,
        "n_layers_in_prelude": prelude, "n_layers_in_coda": coda, "mean_recurrence": 32, "qk_bias": True, "rope_base": 50000,
    }  # fmt: skip


def ouro(width: int, heads: int, hidden: int, vocabulary: int, layers: int) -> Settings:
    return {
        "model_type": "ouro", "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "hidden_act": "silu", "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": None, "total_ut_steps": 4, "tie_word_embeddings": False,
    }  # fmt: skip


SHAPES: dict[str, Settings] = {
    "huginn-3.5b": huginn(5280, 55, 17920, 65536),
    "ouro-1.4b": ouro(2048, 16, 5632, 49152, 24),
    "ouro-2.6b": ouro(2048, 16, 5632, 49152, 48),
    "huginn-tiny": huginn(128, 4, 320, 512),
    "ouro-tiny": ouro(128, 4, 320, 512, 3),
}


def weights_of(settings: Settings) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a folder's weights."""
    if settings["model_type"] == "ouro":
        yield from _ouro_weights(settings)
    else:
        yield from _huginn_weights(settings)


def _huginn_weights(s: Settings) -> Iterator[tuple[str, tuple[int, ...]]]:
    C, M, H = s["n_embd"], s["intermediate_size"], s["n_heads"]
    yield "transformer.wte.weight", (s["padded_vocab_size"], C)
    yield "transformer.ln_f.weight", (C,)
    yield "transformer.adapter.weight", (C, 2 * C)
    for part, key in (("prelude", "prelude"), ("core_block", "recurrent_block"), ("coda", "coda")):
        for i in range(s[f"n_layers_in_{key}"]):
            at = f"transformer.{part}.{i}."
            yield at + "attn.Wqkv.weight", (3 * C, C)
            yield at + "attn.qk_bias", (2, 1, H, C // H)
            yield at + "attn.proj.weight", (C, C)
            yield at + "mlp.fc.weight", (2 * M, C)
            yield at + "mlp.proj.weight", (C, M)
            yield from ((f"{at}norm_{j}.weight", (C,)) for j in (1, 2, 3, 4))


def _ouro_weights(s: Settings) -> Iterator[tuple[str, tuple[int, ...]]]:
    C, M, V = s["hidden_size"], s["intermediate_size"], s["vocab_size"]
    yield from (("model.embed_tokens.weight", (V, C)), ("lm_head.weight", (V, C)), ("model.norm.weight", (C,)))
    yield from (("model.early_exit_gate.weight", (1, C)), ("model.early_exit_gate.bias", (1,)))
    for i in range(s["num_hidden_layers"]):
        at = f"model.layers.{i}."
        norms = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")
        yield from ((f"{at}{name}.weight", (C,)) for name in norms)
        yield from ((f"{at}self_attn.{x}_proj.weight", (C, C)) for x in "qkvo")
        yield from ((f"{at}mlp.{x}_proj.weight", (M, C)) for x in ("gate", "up"))
        yield f"{at}mlp.down_proj.weight", (C, M)


def write_folder(settings: Settings, folder: Path) -> int:
    """Writes the folder, file by file in bounded memory; returns the bytes of its weights.

    Matrices are normal with standard deviation 0.02, norms are 1. The random numbers repeat after 16M entries.
    """
    folder.mkdir(parents=True)
    writer, generator = ShardWriter(folder), torch.Generator().manual_seed(0)
    longest = max(math.prod(shape) for _, shape in weights_of(settings))
    noise = torch.randn(min(longest, 1 << 24), generator=generator).mul_(0.02).bfloat16()
    for name, shape in weights_of(settings):
        size = math.prod(shape)
        if len(shape) == 1 and not name.endswith("bias"):
            writer.add(name, torch.ones(shape, dtype=torch.bfloat16))
        else:
            writer.add(name, noise.repeat(-(-size // len(noise)))[:size].view(shape))
    writer.finish()
    (folder / CONFIG).write_text(json.dumps(settings, indent=1))
    return writer.total
