"""Folders of published families, tiny and with random weights: Huginn, Ouro, Llama."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from twoscale.data.tokenizer import train_bpe
from twoscale.interop.weights import SINGLE

OURO: dict[str, Any] = {
    "model_type": "ouro", "vocab_size": 70, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "rope_scaling": None, "total_ut_steps": 3, "tie_word_embeddings": False, "layer_types": ["full_attention", "full_attention"],
}  # fmt: skip

HUGINN: dict[str, Any] = {
    "model_type": "huginn_raven", "n_embd": 32, "n_heads": 4, "n_layers": 4, "block_size": 64, "vocab_size": 64, "padded_vocab_size": 64,
    "tie_embeddings": True, "intermediate_size": 48, "bias": False, "block_class_name": "SandwichBlock", "norm_class_name": "RMSNorm_llama",
    "norm_eps": 1e-6, "mlp_class_name": "GatedMLP", "nonlin_name": "SiLU", "state_init": "like-init", "injection_type": "linear",
    "n_layers_in_recurrent_block": 2, "n_layers_in_prelude": 1, "n_layers_in_coda": 1, "mean_recurrence": 4,
    "qk_bias": True, "rope_base": 50000,
}  # fmt: skip


def ouro_tensors() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (70, 32), "model.norm.weight": (32,), "lm_head.weight": (70, 32),
        "model.early_exit_gate.weight": (1, 32), "model.early_exit_gate.bias": (1,),
    }  # fmt: skip
    for i in range(2):
        layer = f"model.layers.{i}."
        for name in ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"):
            shapes[f"{layer}{name}.weight"] = (32,)
        shapes |= {f"{layer}self_attn.{x}_proj.weight": (32 if x in "qo" else 16, 32) for x in "qkvo"}
        shapes |= {
            f"{layer}mlp.gate_proj.weight": (48, 32),
            f"{layer}mlp.up_proj.weight": (48, 32),
            f"{layer}mlp.down_proj.weight": (32, 48),
        }
    return {name: torch.randn(shape, generator=g) * 0.2 for name, shape in shapes.items()}


def huginn_tensors() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (64, 32), "transformer.ln_f.weight": (32,), "transformer.adapter.weight": (32, 64),
        "freqs_cis": (1, 64, 1, 4, 2),
    }  # fmt: skip
    for layer in ("prelude.0", "core_block.0", "core_block.1", "coda.0"):
        at = f"transformer.{layer}."
        shapes |= {at + "attn.Wqkv.weight": (96, 32), at + "attn.qk_bias": (2, 1, 4, 8), at + "attn.proj.weight": (32, 32)}
        shapes |= {at + "mlp.fc.weight": (96, 32), at + "mlp.proj.weight": (32, 48)}
        shapes |= {f"{at}norm_{j}.weight": (32,) for j in (1, 2, 3, 4)}
    return {name: torch.randn(shape, generator=g) * 0.2 for name, shape in shapes.items()}


def folder(path: Path, config: object, tensors: dict[str, Tensor] | None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, path / SINGLE)
    return path


def llama(folder: Path, **settings: object) -> torch.nn.Module:
    """A tiny random Llama, saved as transformers saves it."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, rms_norm_eps=1e-5, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():  # gains other than one, and weights that matter
            p.add_(torch.randn_like(p) * 0.1)
    model.save_pretrained(folder)
    return model


def with_tokenizer(folder: Path) -> None:
    """A tokenizer whose end of text has a name of its own."""
    pipeline = train_bpe(["the loop turns until no step changes the state"] * 9, 290).pipeline
    pipeline.add_special_tokens(["</s>"])
    (folder / "tokenizer.json").write_text(pipeline.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
