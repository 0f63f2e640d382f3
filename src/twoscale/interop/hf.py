# mypy: ignore-errors
# transformers is an extra, and its annotations do not fit models that keep their own cache
"""A looped GPT for transformers (the extra `hf`): a thin coat around LoopedGPT and the engine.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)    # a folder made by `twoscale export`
    model.generate(**batch, max_new_tokens=32, loops=12)
    model.generate(**batch, max_new_tokens=32, exit="acceleration:0.05", loops=30)

Padding may stand on either side; a row's answers never depend on it. `generate` goes through the engine's own cache. Importing this module
registers the model with transformers' Auto classes, which then need no trust_remote_code and run no code of a folder.

`output_hidden_states=True` gives the embedding, then the state after each stage (a run of plain layers, or a loop group: its state after
the last step that a token took), all before the final norm: len(config.stages) + 1 tensors (B, T, C), zero at padding.

Shapes: B rows, T tokens, C width, V vocabulary, G group.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from twoscale.config import ModelConfig, UserError
from twoscale.config.run_folder import CONFIG
from twoscale.config.serial import from_dict, to_dict
from twoscale.engine import Engine, LoopParams, loop_params
from twoscale.exits import Exit
from twoscale.interop.load import QUANTIZATION
from twoscale.model import LoopedGPT, StateNoise
from twoscale.tradeoff.load_run import StoredCalibration


class TwoscaleConfig(PretrainedConfig):
    """ModelConfig in transformers' clothes; the settings themselves are under `twoscale`."""

    model_type = "twoscale"

    def __init__(self, twoscale: dict[str, Any] | None = None, **others: Any) -> None:
        if QUANTIZATION in others:
            raise UserError("this folder was made by `twoscale convert --dtype`: open it with twoscale.load, not with transformers")
        c = from_dict(ModelConfig, twoscale or {}, CONFIG)
        self.twoscale = to_dict(c)
        self.vocab_size, self.hidden_size, self.num_hidden_layers = c.vocab_size, c.n_embd, c.n_layer
        self.num_attention_heads, self.num_key_value_heads, self.max_position_embeddings = c.n_head, c.kv_heads, c.block_size
        others.pop("tie_word_embeddings", None)
        super().__init__(tie_word_embeddings=False, **others)

    @property
    def model_config(self) -> ModelConfig:
        return from_dict(ModelConfig, self.twoscale, CONFIG)


class EngineCache:
    """Keys and values of a batch: the engine that made them, and one cache for each row."""

    def __init__(self, engine: Engine, params: LoopParams, rows: int, capacity: int) -> None:
        self.engine, self.rows = engine, [engine.new_cache(capacity, params) for _ in range(rows)]
        self.seen = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows for the beams that go on."""
        self.rows = [self.rows[i].copy() for i in beam_idx.tolist()]

    @torch.inference_mode()
    def run(self, ids: Tensor, real: Tensor, states_wanted: bool = False) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """New tokens (B, T), those that are real: logits (B, T, V), and if wanted the states (B, T, C) of all stages; zero elsewhere."""
        engine = self.engine
        live = [b for b in range(len(ids)) if bool(real[b].any())]
        stages: list[Tensor] | None = [] if states_wanted else None
        x, _ = engine.run([(b, self.rows[b], ids[b][real[b]].tolist()) for b in live], stage_states=stages)
        self.seen += ids.shape[1]
        real = real.to(engine.device)

        def padded(rows: Tensor) -> Tensor:
            whole = torch.zeros(*ids.shape, rows.shape[-1], dtype=rows.dtype, device=engine.device)
            whole[real] = rows
            return whole

        logits = padded(engine.model.head(x).float())
        return logits, None if stages is None else tuple(padded(rows) for rows in stages)


class StageStates:
    """Keeps the embedding and the state after each stage of a plain pass, with their gradients (a Recorder)."""

    def __init__(self) -> None:
        self.states: list[Tensor] = []

    def start(self, group: int, x: Tensor, projected: Tensor) -> None:
        """Not kept."""

    def step(self, group: int, k: int, x: Tensor) -> None:
        """Not kept."""

    def stage(self, index: int, x: Tensor) -> None:
        self.states.append(x)


class TwoscaleForCausalLM(PreTrainedModel, GenerationMixin):
    """A looped GPT with a language-modelling head."""

    config_class = TwoscaleConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ["LoopGroup", "PlainStage"]  # noqa: RUF012 (as the base class has it)

    def __init__(self, config: TwoscaleConfig) -> None:
        super().__init__(config)
        self.model = LoopedGPT(config.model_config, seed=None)
        if (folder := Path(config.name_or_path or "")).is_dir():
            self.model.exit_calibration = StoredCalibration(folder)  # what exit="auto" stands for
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
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **ignored: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits (B, T, V) fp32. `exit` and `loops` are those of `twoscale.forward`; a cache keeps those that it began with."""
        wanted_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        as_dict = self.config.return_dict if return_dict is None else return_dict
        B, T = input_ids.shape
        real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask[:, -T:].bool()
        cache = past_key_values if isinstance(past_key_values, EngineCache) else None
        on_the_right = bool((real[:, 1:] <= real[:, :-1]).all() and real[:, 0].all())  # no token sees padding that comes after it
        if cache is None and not use_cache and exit is None and on_the_right:
            recorder, gone = StageStates() if wanted_states else None, ~real[..., None]
            x, _ = self.model.hidden(input_ids, loops=loops, noise=StateNoise(), recorder=recorder)  # the plain pass, which has gradients
            logits = self.model.head(x).float().masked_fill(gone, 0.0)
            states = None if recorder is None else tuple(state.masked_fill(gone, 0.0) for state in recorder.states)
        else:
            if cache is None:
                cache = EngineCache(Engine(self.model), loop_params(self.model, exit=exit, loops=loops), B, self.model.config.block_size)
            logits, states = cache.run(input_ids, real, wanted_states)
        loss = None
        if labels is not None:
            wanted = labels[:, 1:].masked_fill(~real[:, 1:], -100)
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), wanted.flatten())
        out = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache if use_cache else None, hidden_states=states)
        return out if as_dict else out.to_tuple()


AutoConfig.register("twoscale", TwoscaleConfig, exist_ok=True)
AutoModelForCausalLM.register(TwoscaleConfig, TwoscaleForCausalLM, exist_ok=True)
