"""Ouro by transformers' own operators: what a user of the published folder has instead of this engine.

The layers are transformers' attention, MLP and norms of Llama in Ouro's order, with a norm before and after each branch. All of them are
applied again in every loop, with the final norm behind it; the cache is transformers' DynamicCache with an entry for every layer and loop.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.cache_utils import DynamicCache
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from twoscale.config import UserError
from twoscale.config.run_folder import CONFIG
from twoscale.config.serial import read_json
from twoscale.interop.weights import Weights


class OuroLayer(nn.Module):
    """The names are those of the folder's weights."""

    def __init__(self, config: LlamaConfig, layer: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(config, layer), LlamaMLP(config)
        self.input_layernorm, self.input_layernorm_2, self.post_attention_layernorm, self.post_attention_layernorm_2 = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(4)
        )

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: DynamicCache, entry: int) -> Tensor:
        self.self_attn.layer_idx = entry  # where it finds its keys and values
        y, _ = self.self_attn(self.input_layernorm(x), rope, None, past_key_values=cache)
        x = x + self.input_layernorm_2(y)
        return x + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(x)))


class TransformersOuro(nn.Module):
    """The model of a folder in Ouro's format, for one sequence."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Weights are read one by one."""
        super().__init__()
        settings = read_json(folder / CONFIG)
        if not isinstance(settings, dict) or settings.get("model_type") != "ouro":
            raise UserError(f"{folder} is no folder of an Ouro model")
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        config = LlamaConfig(
            **{name: settings[name] for name in names}, max_position_embeddings=settings["max_position_embeddings"],
            rms_norm_eps=settings["rms_norm_eps"], rope_parameters={"rope_type": "default", "rope_theta": settings["rope_theta"]},
            attn_implementation="sdpa",
        )  # fmt: skip
        with torch.device("meta"):
            self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
            self.layers = nn.ModuleList(OuroLayer(config, i) for i in range(config.num_hidden_layers))
            self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        weights = Weights(folder)
        for name, _ in list(self.named_parameters()):
            path, _, leaf = name.rpartition(".")
            stored = name if path == "lm_head" else f"model.{name}"
            own = nn.Parameter(weights[stored].to(device, dtype, copy=True), requires_grad=False)
            self.get_submodule(path).register_parameter(leaf, own)
        self.rotary = LlamaRotaryEmbedding(config).to(device)
        self.device = device
        self.eval()

    @torch.inference_mode()
    def forward(self, cache: DynamicCache, token: int, position: int, loops: int) -> Tensor:
        """Logits (V,) after one more token."""
        x = self.embed_tokens(torch.tensor([[token]], device=self.device))
        rope = self.rotary(x, torch.tensor([[position]], device=self.device))
        for loop in range(loops):
            for i, layer in enumerate(self.layers):
                x = layer(x, rope, cache, loop * len(self.layers) + i)
            x = self.norm(x)
        return self.lm_head(x)[0, 0]  # type: ignore[no-any-return]
