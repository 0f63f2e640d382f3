# mypy: ignore-errors
# transformers is an extra, and its annotations do not fit models that keep their own cache
"""A looped GPT for transformers (an extra, `pip install 'twoscale[hf]'`): a thin coat around LoopedGPT and the engine.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)    # a folder made by `twoscale export`
    model.generate(**batch, max_new_tokens=32, loops=12)
    model.generate(**batch, max_new_tokens=32, exit="acceleration:0.05", loops=30)

Padding may stand on either side; a row's answers never depend on it. `generate` goes through the engine's own cache.

Shapes: B rows, T tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from twoscale.config import ModelConfig
from twoscale.config.serial import from_dict, to_dict
from twoscale.engine import Engine
from twoscale.exits import Exit
from twoscale.model import LoopedGPT, StateNoise


class TwoscaleConfig(PretrainedConfig):
    """ModelConfig in transformers' clothes; the settings themselves are under `twoscale`."""

    model_type = "twoscale"

    def __init__(self, twoscale: dict[str, Any] | None = None, **others: Any) -> None:
        c = from_dict(ModelConfig, twoscale or {}, "config.json")
        self.twoscale = to_dict(c)
        self.vocab_size, self.hidden_size, self.num_hidden_layers = c.vocab_size, c.n_embd, c.n_layer
        self.num_attention_heads, self.num_key_value_heads, self.max_position_embeddings = c.n_head, c.kv_heads, c.block_size
        others.pop("tie_word_embeddings", None)
        super().__init__(tie_word_embeddings=False, **others)

    @property
    def model_config(self) -> ModelConfig:
        return from_dict(ModelConfig, self.twoscale, "config.json")


class EngineCache:
    """Keys and values of a batch: the engine that made them, and one cache for each row."""

    def __init__(self, engine: Engine, rows: int, capacity: int) -> None:
        self.engine, self.rows = engine, [engine.open(capacity) for _ in range(rows)]
        self.seen = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows for the beams that go on."""
        self.rows = [self.rows[i].copy() for i in beam_idx.tolist()]

    @torch.inference_mode()
    def run(self, ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """New tokens (B, T), those that are real: logits (B, T, V), zero elsewhere, and steps (B, T, G)."""
        engine = self.engine
        live = [b for b in range(len(ids)) if bool(real[b].any())]
        states, taken = engine.run([(b, self.rows[b], ids[b][real[b]].tolist()) for b in live])
        self.seen += ids.shape[1]
        there = real.to(engine.device)
        logits = torch.zeros(*ids.shape, engine.config.vocab_size, dtype=torch.float32, device=engine.device)
        steps = torch.zeros(*ids.shape, engine.config.n_groups, dtype=torch.int64, device=engine.device)
        logits[there], steps[there] = engine.model.head(states).float(), taken
        return logits, steps


class TwoscaleForCausalLM(PreTrainedModel, GenerationMixin):
    """A looped GPT with a language-modelling head."""

    config_class = TwoscaleConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ["LoopGroup", "PlainStage"]  # noqa: RUF012 (as the base class has it)

    def __init__(self, config: TwoscaleConfig) -> None:
        super().__init__(config)
        self.model = LoopedGPT(config.model_config, seed=None)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Weights come from the folder."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # a key and value for every loop step: the engine has its own

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.model.wte

    def set_input_embeddings(self, value: torch.nn.Module) -> None:
        self.model.wte = value

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: EngineCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        exit: Exit | None = None,
        loops: int | Sequence[int] | None = None,
        **ignored: Any,
    ) -> CausalLMOutputWithPast:
        """Logits (B, T, V) fp32. `exit` and `loops` are those of `twoscale.forward`; a cache keeps those that it began with."""
        B, T = input_ids.shape
        real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask[:, -T:].bool()
        cache = past_key_values if isinstance(past_key_values, EngineCache) else None
        on_the_right = bool((real[:, 1:] <= real[:, :-1]).all() and real[:, 0].all())  # no token sees padding that comes after it
        if cache is None and not use_cache and exit is None and on_the_right:
            x, _ = self.model.hidden(input_ids, loops=loops, noise=StateNoise())  # the plain pass, which has gradients
            logits = self.model.head(x).float().masked_fill(~real[..., None], 0.0)
        else:
            if cache is None:
                cache = EngineCache(Engine(self.model, exit=exit, loops=loops), B, self.model.config.block_size)
            logits, _ = cache.run(input_ids, real)
        loss = None
        if labels is not None:
            wanted = labels[:, 1:].masked_fill(~real[:, 1:], -100)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), wanted.flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache if use_cache else None)
