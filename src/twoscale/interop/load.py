"""`twoscale.load`: a model and its tokenizer from a folder, ours or a published looped model's.

No code of a folder is executed, and nothing is unpickled. Names, shapes and settings are checked before any memory is taken for them.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twoscale.config import ModelConfig, TrainConfig, UserError, missing_package
from twoscale.config.run_folder import RunFolder
from twoscale.config.serial import from_dict, read_json
from twoscale.data import Tokenizer
from twoscale.interop.families import FAMILIES
from twoscale.interop.weights import Outline, Weights
from twoscale.model import LoopedGPT, allocate
from twoscale.tradeoff.load_run import StoredCalibration
from twoscale.train import checkpoint as ckpt

BUNDLED = Path(__file__).parent.parent / "bundled"
IN_THE_PACKAGE = {"bundled": BUNDLED, "hops": BUNDLED / "hops"}  # models that come with the package, by name
PREFIX = "model."  # of the weights' names in an exported folder
Mapper = Callable[[Mapping[str, Tensor], ModelConfig], dict[str, Tensor]]


def load(path: str | Path) -> tuple[LoopedGPT, Tokenizer | None]:
    """Model (in evaluation mode, fp32) and tokenizer of a run, a checkpoint, an export, or a Huginn, Ouro or Llama folder.

    `bundled` is the small text model in the package, `hops` the task model, whose answers have a known depth.
    A name like OWNER/NAME that is no folder is fetched from the Hugging Face hub, where the hub can be reached. A published folder
    without tokenizer.json gives None for its tokenizer. A calibration in the folder is what exit="auto" stands for.
    """
    folder = find(path)
    if RunFolder(folder).is_run:
        folder = ckpt.find_checkpoint(folder, None)
    model, tokenizer = _load(folder)
    model.calibration = StoredCalibration(folder)
    return model, tokenizer


def _load(folder: Path) -> tuple[LoopedGPT, Tokenizer | None]:
    """Model and tokenizer of one folder with weights."""
    settings, config = _settings(folder)
    if config is None:
        return ckpt.load_model(folder)
    mapped, spare = (_ours, ()) if settings["model_type"] == "twoscale" else FAMILIES[settings["model_type"]][1:]
    return _filled(config, Weights(folder), mapped, spare), _tokenizer(folder)


def find(path: str | Path) -> Path:
    """The folder that a user means: one that exists, a model in the package (`bundled`, `hops`), or OWNER/NAME fetched from the hub."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if str(path) in IN_THE_PACKAGE:
        return IN_THE_PACKAGE[str(path)]
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) or folder.parent.is_dir() or folder.parent.name == "runs":
        raise UserError(f"{folder} is no folder: give a run, a checkpoint, or a folder of a published looped model")
    return _fetched(str(path))


def model_config(folder: Path) -> ModelConfig:
    """The shape of the model in a folder, without its weights."""
    if RunFolder(folder).is_run:
        return ckpt.load_config(folder).model
    return _settings(folder)[1] or ckpt.load_config(folder).model


def _settings(folder: Path) -> tuple[dict[str, Any], ModelConfig | None]:
    """config.json of a folder that is no run, and what it says; None for a checkpoint of ours."""
    settings = read_json(folder / ckpt.CONFIG) if (folder / ckpt.CONFIG).exists() else None
    kind = settings.get("model_type") if isinstance(settings, dict) else None
    if isinstance(settings, dict):
        if (inside := read_exported(settings)) is not None:
            return settings, from_dict(ModelConfig, inside, str(folder / ckpt.CONFIG))
        if isinstance(kind, str) and kind in FAMILIES:
            return settings, FAMILIES[kind][0](settings)
    if (folder / ckpt.MODEL).exists() and kind in (None, "twoscale"):
        return {}, None
    if isinstance(kind, str):
        raise UserError(f"{folder}: model_type = {kind!r} is not supported, only twoscale, {', '.join(FAMILIES)}")
    raise UserError(f"{folder} is neither a run nor a checkpoint: it has no {ckpt.MODEL} and no checkpoints/")


def read_exported(settings: dict[str, Any]) -> dict[str, Any] | None:
    """The model's settings in the config.json of an exported folder; None where it is none."""
    inside = settings.get("twoscale")
    return inside if settings.get("model_type") == "twoscale" and isinstance(inside, dict) else None


def noted_training(folder: Path) -> dict[str, Any]:
    """What an export notes of its training."""
    settings = read_json(folder / ckpt.CONFIG) if (folder / ckpt.CONFIG).exists() else {}
    training = settings.get("training") if isinstance(settings, dict) else None
    return training if isinstance(training, dict) else {}


def progress_of(folder: Path) -> ckpt.Progress:
    """How far a model was trained; nothing is known of other families."""
    if RunFolder(folder).is_run:
        folder = ckpt.find_checkpoint(folder, None)
    if (folder / ckpt.STATE).exists():
        return ckpt.read_progress(folder)
    known = noted_training(folder).get("progress")
    return from_dict(ckpt.Progress, known, str(folder / ckpt.CONFIG)) if known is not None else ckpt.Progress(0, 0, 0, 0)


def recipe_of(folder: Path) -> TrainConfig | None:
    """How a model was trained, where it says so."""
    known = noted_training(folder).get("recipe")
    if known is not None:
        return from_dict(TrainConfig, known, str(folder / ckpt.CONFIG))
    ours = RunFolder(folder).is_run or (folder / ckpt.STATE).exists()
    return ckpt.load_config(folder).train if ours else None


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
    ckpt.load_weights(allocate(model), mapped_of(weights, config), folder)
    return model.eval()


def _tokenizer(folder: Path) -> Tokenizer | None:
    return Tokenizer.load(folder) if RunFolder(folder).tokenizer.exists() else None


def _fetched(name: str) -> Path:
    """A model folder from the hub: weights in safetensors and JSON files, nothing else."""
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError:
        raise missing_package(f"{name} is no folder here; to fetch it from the hub", "hub") from None
    try:
        return Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
    except Exception as error:  # whatever the network and the hub may answer
        raise UserError(f"{name} is no folder here, and the hub did not give it: {str(error).splitlines()[0]}") from None
