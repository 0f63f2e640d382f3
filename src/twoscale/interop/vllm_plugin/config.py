# mypy: ignore-errors
# transformers is an extra
"""The settings of looped folders as vLLM reads them: transformers' names for the sizes, and the depth.

`--hf-overrides '{"loops": [4, 12, 8]}'` comes in by `update`, in vLLM's first process, so a depth that the folder cannot do is refused
before anything is loaded.
"""

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from twoscale.config import ModelConfig, UserError
from twoscale.config.run_folder import CONFIG
from twoscale.config.serial import from_dict
from twoscale.engine.request import LoopParams
from twoscale.interop.families import FAMILIES
from twoscale.interop.load import read_exported
from twoscale.interop.vllm_plugin import ARCHITECTURE
from twoscale.interop.vllm_plugin.depth import check_depth

KEPT = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "name_or_path", "_name_or_path")


class TwoscaleConfig(PretrainedConfig):
    """A folder made by `twoscale export`."""

    model_type = "twoscale"

    def __init__(self, **settings: Any) -> None:
        self.settings = {name: value for name, value in settings.items() if not name.startswith("_")}
        self.loops, self.exit, self.start_seed = None, None, None
        kept = {name: settings[name] for name in KEPT if name in settings}
        super().__init__(architectures=[ARCHITECTURE], tie_word_embeddings=False, **kept)
        if settings:  # transformers makes an empty one to compare with
            self._describe()

    def _describe(self) -> None:
        """The sizes by the names that vLLM looks for."""
        c = self.model_config
        self.vocab_size, self.hidden_size, self.num_hidden_layers = c.vocab_size, c.n_embd, c.n_layer
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = c.n_head, c.kv_heads, c.head_dim
        self.intermediate_size, self.max_position_embeddings = c.hidden, c.block_size

    def update(self, config_dict: dict[str, Any]) -> None:
        """Overrides: `loops`, `exit`, `start_seed`, or settings of config.json."""
        super().update(config_dict)
        self.settings = self.settings | {name: value for name, value in config_dict.items() if name not in ("loops", "exit", "start_seed")}
        self._describe()
        if self.exit != "auto":
            self.depth(None)

    @property
    def model_config(self) -> ModelConfig:
        """What config.json says, as ours."""
        if (inside := read_exported(self.settings | {"model_type": self.model_type})) is not None:
            return from_dict(ModelConfig, inside, CONFIG)
        if self.model_type not in FAMILIES:
            raise UserError(f"{CONFIG} has no settings under `twoscale`: export the model again")
        return FAMILIES[self.model_type][0](self.settings)

    def depth(self, folder: Path | None) -> LoopParams:
        """Loops and rules of each group."""
        return check_depth(self.model_config, folder, loops=self.loops, exit=self.exit, seed=self.start_seed)


class HuginnConfig(TwoscaleConfig):
    """A Huginn folder."""

    model_type = "huginn_raven"

    def __init__(self, **settings: Any) -> None:  # transformers would make one from the annotations
        super().__init__(**settings)


class OuroConfig(TwoscaleConfig):
    """An Ouro folder."""

    model_type = "ouro"

    def __init__(self, **settings: Any) -> None:  # transformers would make one from the annotations
        super().__init__(**settings)


CONFIGS = (TwoscaleConfig, HuginnConfig, OuroConfig)
