"""`twoscale.load`: a model and its tokenizer from a folder, ours or a published looped model's.

No code of a folder is executed, and nothing is unpickled. Names, shapes and settings are checked before any memory is taken for them.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twoscale.config import ModelConfig, UserError
from twoscale.config.serial import from_dict, read_json
from twoscale.data import Tokenizer
from twoscale.interop.export import PREFIX, read_exported
from twoscale.interop.families import FAMILIES
from twoscale.interop.weights import Outline, Weights
from twoscale.model import LoopedGPT
from twoscale.train import checkpoint as ckpt

BUNDLED = Path(__file__).parent.parent / "bundled"
Mapper = Callable[[Mapping[str, Tensor], ModelConfig], dict[str, Tensor]]


def load(path: str | Path) -> tuple[LoopedGPT, Tokenizer]:
    """Model (in evaluation mode, fp32) and tokenizer of a run, a checkpoint, an export, or a Huginn, Ouro or Llama folder.

    `bundled` is the small model in the package.
    A name like OWNER/NAME that is no folder is fetched from the Hugging Face hub, where the hub can be reached. A published folder
    without tokenizer.json gives None for its tokenizer.
    """
    folder = find(path)
    if (folder / "checkpoints").is_dir():
        return ckpt.load_model(ckpt.find_checkpoint(folder, None))
    given, config = _settings(folder)
    if config is None:
        return ckpt.load_model(folder)
    mapped, spare = (_ours, ()) if given["model_type"] == "twoscale" else FAMILIES[given["model_type"]][1:]
    return _filled(config, Weights(folder), mapped, spare), _tokenizer(folder)  # type: ignore[return-value]


def find(path: str | Path) -> Path:
    """The folder that a user means: one that exists, the model in the package (`bundled`), or OWNER/NAME fetched from the hub."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if str(path) == "bundled":
        return BUNDLED
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) or folder.parent.is_dir() or folder.parent.name == "runs":
        raise UserError(f"{folder} is no folder: give a run, a checkpoint, or a folder of a published looped model")
    return _fetched(str(path))


def model_config(folder: Path) -> ModelConfig:
    """The shape of the model in a folder, without its weights."""
    if (folder / "checkpoints").is_dir():
        return ckpt.load_config(folder).model
    return _settings(folder)[1] or ckpt.load_config(folder).model


def _settings(folder: Path) -> tuple[dict[str, Any], ModelConfig | None]:
    """config.json of a folder that is no run, and what it says; None for a checkpoint of ours."""
    given = read_json(folder / ckpt.CONFIG) if (folder / ckpt.CONFIG).exists() else None
    kind = given.get("model_type") if isinstance(given, dict) else None
    if isinstance(given, dict):
        if (inside := read_exported(given)) is not None:
            return given, from_dict(ModelConfig, inside, str(folder / ckpt.CONFIG))
        if isinstance(kind, str) and kind in FAMILIES:
            return given, FAMILIES[kind][0](given)
    if (folder / ckpt.MODEL).exists() and kind in (None, "twoscale"):
        return {}, None
    if isinstance(kind, str):
        raise UserError(f"{folder}: model_type = {kind!r} is not supported, only twoscale, {', '.join(FAMILIES)}")
    raise UserError(f"{folder} is neither a run nor a checkpoint: it has no {ckpt.MODEL} and no checkpoints/")


def _ours(raw: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The weights of an exported folder."""
    return {name.removeprefix(PREFIX): raw[name] for name in raw}


def _filled(config: ModelConfig, weights: Weights, mapped_of: Mapper, spare: tuple[str, ...]) -> LoopedGPT:
    """A model with a folder's weights. The mapping of names runs on shapes alone first: what does not fit is named before it is read."""
    folder, outline = weights.folder, Outline(weights.shapes)
    try:
        mapped = mapped_of(outline, config)
    except KeyError as error:
        raise UserError(f"{folder} lacks the weight {error.args[0]}") from None
    except (RuntimeError, ValueError, IndexError) as error:
        raise UserError(f"{folder}: a weight has another shape than config.json says ({str(error).splitlines()[0]})") from None
    if unknown := sorted(weights.keys() - outline.used - set(spare)):
        raise UserError(f"{folder} has {unknown[0]}, which the model does not ({len(unknown)} weights in all)")
    with torch.device("meta"):
        model = LoopedGPT(config, seed=None)
    ckpt.check_shapes(model, {name: tuple(t.shape) for name, t in mapped.items()}, folder)
    ckpt.check_dtypes({name: weights.dtypes[name] for name in outline.used}, folder)
    model = model.to_empty(device="cpu")
    ckpt.load_weights(model, mapped_of(weights, config), folder)
    return model.eval()


def _tokenizer(folder: Path) -> Tokenizer | None:
    return Tokenizer.load(folder) if (folder / "tokenizer.json").exists() else None


def _fetched(name: str) -> Path:
    """A model folder from the hub: weights in safetensors and JSON files, nothing else."""
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise UserError(f"{name} is no folder here; to fetch it from the hub: pip install 'twoscale[hub]'") from None
    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # whatever the network and the hub may answer
        raise UserError(f"{name} is no folder here, and the hub did not give it: {str(error).splitlines()[0]}") from None
