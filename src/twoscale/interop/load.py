"""`twoscale.load`: a model and its tokenizer from a folder, ours or a published looped model's.

No code of a folder is executed, and nothing is unpickled. Names, shapes and settings are checked before any memory is taken for them.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twoscale.config import ModelConfig, TrainConfig, UserError, missing_package
from twoscale.config.dtypes import DtypeChoice, WeightDtype, check_dtype
from twoscale.config.run_folder import RunFolder
from twoscale.config.serial import from_dict, read_json
from twoscale.data import Tokenizer
from twoscale.interop.families import FAMILIES, Ours
from twoscale.interop.fill import Content, fill, plain_content, quantized_content
from twoscale.interop.weights import Outline, ShardedWeights, Weights
from twoscale.model import LoopedGPT
from twoscale.model.quantized import SCALE_BLOCK
from twoscale.tradeoff.load_run import StoredCalibration
from twoscale.train import checkpoint as ckpt

BUNDLED = Path(__file__).parent.parent / "bundled"
IN_THE_PACKAGE = {"bundled": BUNDLED, "stories": BUNDLED, "hops": BUNDLED / "hops"}  # models that come with the package, by name
PREFIX = "model."  # of the weights' names in an exported folder
Mapper = Callable[[Mapping[str, Tensor], ModelConfig], Ours]
QUANTIZATION = "quantization"  # the key in config.json of a folder made by `twoscale convert --dtype`


def load(path: str | Path, dtype: DtypeChoice = "auto", device: str | torch.device = "cpu") -> tuple[LoopedGPT, Tokenizer | None]:
    """Model (in evaluation mode) and tokenizer of a run, a checkpoint, an export, or a Huginn, Ouro or Llama folder.

    `dtype` says how the weight matrices are held (see `config.dtypes`): auto as in the folder, fp32, bf16, int8 or w8a8. Weights are read
    one by one into their final place. In fp32 the model can be trained; in the others it is for inference alone.

    `bundled` or `stories` is the small text model in the package, `hops` the task model, whose answers have a known depth.
    A name like OWNER/NAME that is no folder is fetched from the Hugging Face hub, where the hub can be reached. A published folder
    without tokenizer.json gives None for its tokenizer. A calibration in the folder is what exit="auto" stands for.
    """
    check_dtype(dtype)
    chosen_device = usable_device(device)
    folder = find(path)
    if RunFolder(folder).is_run:
        folder = ckpt.find_checkpoint(folder, None)
    content = read_folder(folder)
    tokenizer = Tokenizer.load(folder) if RunFolder(folder).tokenizer.exists() else None
    model = fill(content, dtype, chosen_device)
    model.exit_calibration = StoredCalibration(folder, model.weight_dtype)
    return model, tokenizer


def read_folder(folder: Path) -> Content:
    """The weights of one folder with a model, checked and not read yet."""
    settings, config = _settings(folder)
    if config is None:
        if (problem := ckpt.fault(folder)) is not None:
            raise UserError(f"the checkpoint {folder} is damaged ({problem})")
        weights = ShardedWeights(folder) if ckpt.is_sharded(folder) else Weights(folder)
        return _mapped(ckpt.load_config(folder).model, weights, _ours(""), ())
    if settings["model_type"] != "twoscale":
        return _mapped(config, Weights(folder), *FAMILIES[settings["model_type"]][1:])
    if (stored := _stored_dtype(settings, folder)) is not None:
        return quantized_content(config, Weights(folder), stored, PREFIX)
    return _mapped(config, Weights(folder), _ours(PREFIX), ())


def usable_device(device: str | torch.device) -> torch.device:
    """The device, after one number has gone there and back; UserError if the machine does not have it."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of names that torch no longer uses
            chosen = torch.device(device)
        torch.ones(1, device=chosen).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0].split(". ")[0]
        raise UserError(f"device = {str(device)!r} cannot be used here: {why}") from None
    return chosen


def _stored_dtype(settings: dict[str, Any], folder: Path) -> WeightDtype | None:
    """The dtype of a quantised folder; None for others."""
    if QUANTIZATION not in settings:
        return None
    about = settings[QUANTIZATION]
    dtype = about.get("dtype") if isinstance(about, dict) else None
    if dtype not in ("bf16", "int8"):
        raise UserError(f"{folder / ckpt.CONFIG}: {QUANTIZATION}.dtype = {dtype!r}, but it must be bf16 or int8: convert the model again")
    if dtype == "int8" and about.get("group_size") != SCALE_BLOCK:
        size = about.get("group_size")
        raise UserError(f"{folder / ckpt.CONFIG}: {QUANTIZATION}.group_size = {size!r}, but only {SCALE_BLOCK} is supported")
    return dtype  # type: ignore[no-any-return]


def find(path: str | Path) -> Path:
    """The folder that a user means: one that exists, a model in the package (`bundled` or `stories`, `hops`), or OWNER/NAME fetched from
    the hub."""
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
    if ckpt.has_weights(folder) and kind in (None, "twoscale"):
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


def _ours(prefix: str) -> Mapper:
    """The weights of a checkpoint or an exported folder."""
    return lambda raw, config: {name.removeprefix(prefix): lambda name=name: raw[name] for name in raw}  # type: ignore[misc]


def _mapped(config: ModelConfig, weights: Weights, mapper: Mapper, spare: tuple[str, ...]) -> Content:
    """A folder's weights by our names. The mapping runs on shapes alone: what does not fit is named before it is read."""
    folder, outline = weights.folder, Outline(weights.shapes)
    try:
        shapes = {name: tuple(make().shape) for name, make in mapper(outline, config).items()}
    except KeyError as error:
        raise UserError(f"{folder} lacks the weight {error.args[0]}") from None
    except (RuntimeError, ValueError, IndexError) as error:
        raise UserError(f"{folder}: a weight has another shape than config.json says ({str(error).splitlines()[0]})") from None
    if unknown := sorted(weights.keys() - outline.used - set(spare)):
        raise UserError(f"{folder} has {unknown[0]}, which the model does not ({len(unknown)} weights in all)")
    ckpt.check_dtypes({name: weights.dtypes[name] for name in outline.used}, folder)
    matrices = {weights.dtypes[name] for name in outline.used if len(weights.shapes[name]) == 2 and weights.shapes[name][0] > 1}
    return plain_content(config, folder, "bf16" if matrices == {"BF16"} else "fp32", shapes, mapper(weights, config))


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
