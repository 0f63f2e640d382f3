"""Checkpoints: a folder written aside, synced and renamed, so that what is called step-XXXXXX is whole.

    checkpoints/step-000600/
        model.safetensors       the weights, fp32
        optimizer.safetensors   the optimizers' state and the generator's, named PARAMETER::KEY
        config.json             the run's config
        tokenizer.json
        state.json              format version, step, tokens seen, data position, loop sampler, and size and crc32 of every file above

Nothing in it is a pickle. Loading checks sizes and sums; a folder that does not pass is named, and so is the newest
one before it that does.
"""

import os
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from twoscale.config import ModelConfig, RunConfig, UserError
from twoscale.config.files import make_folder, sync, write_json
from twoscale.config.run_file import load_config as load_config, save_config as save_config
from twoscale.config.run_folder import (
    CONFIG as CONFIG,
    MODEL as MODEL,
    OPTIMIZER as OPTIMIZER,
    STATE as STATE,
    TOKENIZER,
    UNFINISHED,
    RunFolder,
    checkpoint_name as checkpoint_name,
    checkpoint_step,
    old_checkpoint,
    unfinished_checkpoint,
)
from twoscale.config.serial import from_dict, read_json, to_dict
from twoscale.data import Tokenizer
from twoscale.model import LoopedGPT, allocate

VERSION = 1  # of the format; state.json has it, and one without it is of version 1
FLOATS = ("F64", "F32", "F16", "BF16")  # as safetensors calls them


@dataclass(frozen=True)
class Progress:
    """How far a run is. With the config, this is all that the next step depends on besides weights and optimizer."""

    step: int
    """Optimizer steps done."""
    tokens: int
    """Training tokens seen."""
    sample: int
    """Data position: samples drawn so far."""
    seed: int
    """Key of the data order, the loop counts and the start states."""
    val_loss: float | None = None
    """Newest validation loss."""


def model_tensors(model: LoopedGPT) -> dict[str, Tensor]:
    """The weights as whole tensors, shared ones once. A collective call where they are sharded."""
    whole = {n: p.full_tensor() if sharded(p) else p for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    return {n: p.detach().cpu().contiguous() for n, p in whole.items()}


def sharded(p: Tensor) -> bool:
    """Whether this is a DTensor; asked by its method, because importing torch.distributed.tensor takes a second or two."""
    return hasattr(p, "full_tensor")


def save_checkpoint(
    root: Path, config: RunConfig, progress: Progress, model: dict[str, Tensor], optimizer: dict[str, Tensor], tokenizer: Tokenizer
) -> Path:
    """Write one checkpoint and return its folder."""
    make_folder(root)
    final = root / checkpoint_name(progress.step)
    aside = unfinished_checkpoint(final)
    try:
        aside.mkdir()
        save_file(model, aside / MODEL)
        save_file({**optimizer, "generator::cpu": torch.get_rng_state()}, aside / OPTIMIZER)
        save_config(aside, config)
        tokenizer.save(aside)
        names = sorted(p.name for p in aside.iterdir())
        for name in names:
            with open(aside / name, "rb") as f:
                os.fsync(f.fileno())
        write_json(aside / STATE, {"version": VERSION, **to_dict(progress), "files": {n: _facts(aside / n) for n in names}})
        if final.exists():
            shutil.rmtree(final)
        os.rename(aside, final)
        sync(root)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write the checkpoint {final}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def _facts(path: Path) -> dict[str, int]:
    crc = 0
    with open(path, "rb") as f:
        while chunk := f.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return {"bytes": path.stat().st_size, "crc32": crc}


def list_checkpoints(root: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; unfinished ones have other names."""
    steps = {p: checkpoint_step(p.name) for p in root.glob("*")}
    return sorted((p for p, step in steps.items() if step is not None and p.is_dir()), key=lambda p: steps[p] or 0)


def fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None. One of a newer format is an error of its own: it is not damaged."""
    check_version(folder)
    try:
        state = read_json(folder / STATE)
        version, files = state.get("version", 1), state["files"]
        if type(version) is not int or version < 1:
            return f"{STATE} has version = {version!r}"
        if lacking := {MODEL, CONFIG, TOKENIZER} - set(files):
            return f"{STATE} does not list {min(lacking)}"
        for name, facts in files.items():
            path = folder / Path(name).name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != facts["bytes"]:
                return f"{name} has {path.stat().st_size} bytes, {facts['bytes']} were written"
            if _facts(path)["crc32"] != facts["crc32"]:
                return f"{name} is damaged, its checksum differs"
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return f"{STATE} is unreadable ({error})"
    return None


def check_version(folder: Path) -> None:
    """Refuse a checkpoint whose format is newer than this program's. A state.json that cannot be read is left to `fault`."""
    try:
        version = read_json(folder / STATE).get("version", 1)
    except (ValueError, AttributeError, OSError):
        return
    if type(version) is int and version > VERSION:
        raise UserError(f"the checkpoint {folder} has format version {version}, this twoscale reads up to {VERSION}: update twoscale")


def newest_checkpoint(root: Path) -> Path | None:
    """The newest checkpoint. If it is damaged, an error that offers the one before it."""
    folders = list_checkpoints(root)
    if not folders:
        return None
    problem = fault(folders[-1])
    if problem is None:
        return folders[-1]
    whole = next((f for f in reversed(folders[:-1]) if fault(f) is None), None)
    offer = f"go on from the one before with --checkpoint {whole.name}" if whole else "there is no whole one before it: start the run anew"
    raise UserError(f"the checkpoint {folders[-1]} is damaged ({problem}); {offer}")


def find_checkpoint(run: Path, name: str | None) -> Path:
    """One checkpoint of a run, the newest by default."""
    if not run.is_dir():
        raise UserError(f"{run} is no folder: give a run")
    root = RunFolder(run).checkpoints
    if name is None:
        newest = newest_checkpoint(root)
        if newest is None:
            raise UserError(f"{run} has no checkpoint yet: train it first")
        return newest
    folder = root / Path(name).name
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist (checkpoints of this run: {', '.join(p.name for p in list_checkpoints(root))})")
    check_version(folder)
    return folder


def set_aside_after(root: Path, step: int) -> None:
    """Going on from an older checkpoint: later ones are renamed, so that they are neither resumed from nor pruned against."""
    for folder in list_checkpoints(root):
        if (checkpoint_step(folder.name) or 0) > step:
            aside = old_checkpoint(folder)
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)


def prune(root: Path, keep_last: int, milestones: Iterable[int]) -> None:
    """Remove all but the newest checkpoints and the milestones, and what a killed save left behind."""
    kept = set(milestones)
    for folder in list_checkpoints(root)[:-keep_last]:
        if checkpoint_step(folder.name) not in kept:
            shutil.rmtree(folder, ignore_errors=True)
    for rest in root.glob(UNFINISHED):
        shutil.rmtree(rest, ignore_errors=True)


def read_progress(folder: Path) -> Progress:
    values = read_json(folder / STATE)
    if isinstance(values, dict):
        values = {key: value for key, value in values.items() if key not in ("version", "files")}
    progress = from_dict(Progress, values, str(folder / STATE))
    if min(progress.step, progress.tokens, progress.sample) < 0:
        raise UserError(f"{folder / STATE} has a negative step, tokens or sample: the checkpoint is damaged")
    return progress


def check_dtypes(dtypes: dict[str, str], where: Path) -> None:
    """Weights are floating-point numbers: others would be loaded with another meaning."""
    for name, dtype in sorted(dtypes.items()):
        if dtype not in FLOATS:
            raise UserError(f"{where}: {name} is stored as {dtype}, weights must be one of {', '.join(FLOATS)}")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """A safetensors file, or a clear word on what is wrong with it."""
    try:
        return load_file(path)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is truncated or no safetensors file: {error}") from None


def read_header(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """Shapes and dtypes (F32, BF16, I64, ...) of the tensors in a safetensors file, by its header."""
    try:
        with safe_open(path, framework="pt") as f:
            slices = {name: f.get_slice(name) for name in f.keys()}  # noqa: SIM118 (not a dict)
            return {n: tuple(s.get_shape()) for n, s in slices.items()}, {n: str(s.get_dtype()) for n, s in slices.items()}
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is truncated or no safetensors file: {error}") from None


def check_shapes(model: LoopedGPT, shapes: dict[str, tuple[int, ...]], where: Path) -> None:
    """Names and shapes of the weights must be the model's, exactly."""
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if missing := sorted(wanted.keys() - shapes.keys()):
        raise UserError(f"{where} lacks {missing[0]} ({len(missing)} weights in all)")
    if unknown := sorted(shapes.keys() - wanted.keys()):
        raise UserError(f"{where} has {unknown[0]}, which the model does not ({len(unknown)} weights in all)")
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise UserError(f"{where}: {name} has shape {shapes[name]}, the model's is {shape}")


@torch.no_grad()
def load_weights(model: LoopedGPT, tensors: dict[str, Tensor], where: Path) -> None:
    """Put whole tensors into the model."""
    check_shapes(model, {name: tuple(t.shape) for name, t in tensors.items()}, where)
    for name, p in model.named_parameters():
        tensor = tensors[name].to(p.dtype)
        if sharded(p):
            from twoscale.train.parallel import place_like

            tensor = place_like(tensor, p)
        p.copy_(tensor)


def load_model(folder: Path) -> tuple[LoopedGPT, Tokenizer]:
    """Model (in evaluation mode) and tokenizer of one checkpoint folder."""
    if (problem := fault(folder)) is not None:
        raise UserError(f"the checkpoint {folder} is damaged ({problem})")
    config: ModelConfig = load_config(folder).model
    with torch.device("meta"):  # no memory is taken on the word of a config alone: first the file must hold these weights
        model = LoopedGPT(config, seed=None)
    shapes, dtypes = read_header(folder / MODEL)
    check_shapes(model, shapes, folder / MODEL)
    check_dtypes(dtypes, folder / MODEL)
    load_weights(allocate(model), read_tensors(folder / MODEL), folder / MODEL)
    return model.eval(), Tokenizer.load(folder)
