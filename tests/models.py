"""Small models for the tests: configs, layouts, and weights under which every part of a model shows in its output."""

import dataclasses
from pathlib import Path

import torch
from safetensors.torch import save_file

from twoscale.config import ModelConfig
from twoscale.config.files import write_json
from twoscale.config.serial import to_dict
from twoscale.data.tokenizer import byte_tokenizer
from twoscale.interop.load import PREFIX
from twoscale.model import LoopedGPT

LAYOUTS: dict[str, dict[str, object]] = {
    "default": {},
    "all loops": {"groups": ((0, 1), (2, 3, 4))},
    "one group": {"groups": ((1,),)},
    "three": {"groups": ((0,), (2,), (4,))},
    "rotary, grouped queries": {"positions": "rotary", "n_kv_head": 2, "mlp": "gated", "qk_bias": True},
    "norm on leaving": {"group_norm": "leave", "share_group_norm": True, "inject": "add"},
    "branch norms": {"norm": "branch", "group_norm": "step", "inject": "none", "start": "input", "backprop_steps": None, "tie_head": False},
    "no outer norms": {"norm": "pre", "positions": "rotary", "n_kv_head": 2, "mlp": "gated", "tie_head": False},
    "noise at every step": {"noise": "every_step"},
    "odd sizes": {"n_embd": 36, "n_head": 3, "mlp_hidden": 50},
}


def small_model(**changes: object) -> ModelConfig:
    """Five layers at width 32, groups [1] and [2, 3]; any setting can be changed."""
    base = ModelConfig(vocab_size=64, block_size=32, n_layer=5, n_head=4, n_embd=32, groups=((1,), (2, 3)), mean_loops=4)
    return dataclasses.replace(base, **changes)


def save_folder(config: ModelConfig, folder: Path) -> Path:
    """A folder with a loud model and the tokenizer of bytes, as `twoscale.load` and `twoscale export` take it."""
    folder.mkdir()
    save_file({PREFIX + name: t for name, t in loud(config).state_dict().items()}, folder / "model.safetensors")
    write_json(folder / "config.json", {"model_type": "twoscale", "twoscale": to_dict(config)})
    byte_tokenizer().save(folder)
    return folder


def loud(config: ModelConfig, seed: int = 0, scale: float = 0.15) -> LoopedGPT:
    """A model whose output projections and gains are large enough that every part of it shows in the logits."""
    model = LoopedGPT(config, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(scale * torch.randn(p.shape, generator=generator))
    return model.eval()
