"""Checkpoints: a folder written aside, synced and renamed, so that what is called step-XXXXXX is whole.

    checkpoints/step-000600/
        model.safetensors       the weights, fp32
        optimizer.safetensors   the optimizers' state and the generator's, named PARAMETER::KEY
        config.json             the run's config
        tokenizer.json
        state.json              format version, step, tokens seen, data position, loop sampler, and size and crc32 of every file above

A sharded one (train/sharded.py) has the tensors in parts, and shards.json in place of the first two. Nothing in it is a pickle.
Loading checks sizes and sums; a folder that does not pass is named, and so is the newest
one before it that does.
"""

import contextlib
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from twoscale.config import ModelConfig, RunConfig, UserError
from twoscale.config.files import fingerprint, make_folder, sync, write_json
from twoscale.config.run_file import load_config as load_config, save_config as save_config
from twoscale.config.run_folder import (
    CONFIG as CONFIG,
    MODEL as MODEL,
    OPTIMIZER as OPTIMIZER,
    SHARDS as SHARDS,
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

if TYPE_CHECKING:
    from twoscale.train.world import World

VERSION = 2  # of the format; state.json has it, and one without it is of version 1. Whole checkpoints are of version 1, sharded ones of 2
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
    """Write one whole checkpoint and return its folder."""
    final = root / checkpoint_name(progress.step)
    aside = unfinished_checkpoint(final)
    try:
        make_folder(root)
        aside.mkdir()
        save_file(model, aside / MODEL)
        save_file({**optimizer, "generator::cpu": torch.get_rng_state()}, aside / OPTIMIZER)
        for name in (MODEL, OPTIMIZER):
            _sync_file(aside / name)
        return _finish(aside, final, config, progress, tokenizer, {n: _facts(aside / n) for n in (MODEL, OPTIMIZER)}, version=1)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write the checkpoint {final}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def save_sharded(
    root: Path, config: RunConfig, progress: Progress, tensors: dict[str, Tensor], tokenizer: Tokenizer, world: "World"
) -> Path:
    """Write one sharded checkpoint and return its folder. A collective call: each process writes its parts, the first one the rest."""
    from twoscale.train.sharded import save_parts

    final = root / checkpoint_name(progress.step)
    aside = Path(world.gather(str(unfinished_checkpoint(final)))[0])
    try:
        with world.together(), _written(final):
            if world.main:
                make_folder(root)
                aside.mkdir()
        with _written(final):
            save_parts(aside, tensors, world.rank, alone=world.size == 1)
        facts: dict[str, dict[str, int]] = {}
        with world.together(), _written(final):
            facts = {p.name: _facts(p) for p in aside.glob(f"*-{world.rank:05d}-*.safetensors")}
        for more in world.gather(facts):
            facts |= more
        with world.together(), _written(final):
            if world.main:
                _finish(aside, final, config, progress, tokenizer, facts | {SHARDS: _facts(aside / SHARDS)}, version=2)
        return final
    finally:
        if world.main:
            shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _written(final: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, UserError) as error:
        raise UserError(f"cannot write the checkpoint {final}: {error}") from error


def _finish(
    aside: Path, final: Path, config: RunConfig, progress: Progress, tokenizer: Tokenizer, facts: dict[str, dict[str, int]], version: int
) -> Path:
    """Settings, tokenizer and state.json beside the tensors; then the folder gets its name."""
    written = set(aside.iterdir())
    save_config(aside, config)
    tokenizer.save(aside)
    for path in sorted(set(aside.iterdir()) - written):
        _sync_file(path)
        facts = facts | {path.name: _facts(path)}
    write_json(aside / STATE, {"version": version, **to_dict(progress), "files": dict(sorted(facts.items()))})
    if final.exists():
        shutil.rmtree(final)
    os.rename(aside, final)
    sync(final.parent)
    return final


def _sync_file(path: Path) -> None:
    with open(path, "rb") as f:
        os.fsync(f.fileno())


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


def fault(folder: Path, rank: int = 0, size: int = 1) -> str | None:
    """What is wrong with a checkpoint, or None. One of a newer format is an error of its own: it is not damaged.

    With `size` processes each of them compares the checksums of some of the files.
    """
    check_version(folder)
    try:
        state = read_json(folder / STATE)
        version, files = state.get("version", 1), state["files"]
        if type(version) is not int or version < 1:
            return f"{STATE} has version = {version!r}"
        if lacking := {SHARDS if version > 1 else MODEL, CONFIG, TOKENIZER} - set(files):
            return f"{STATE} does not list {min(lacking)}"
        for number, (name, facts) in enumerate(files.items()):
            path = folder / Path(name).name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != facts["bytes"]:
                return f"{name} has {path.stat().st_size} bytes, {facts['bytes']} were written"
            if number % size == rank and _facts(path)["crc32"] != facts["crc32"]:
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


def newest_checkpoint(root: Path, rank: int = 0, size: int = 1) -> Path | None:
    """The newest checkpoint. If it is damaged, an error that offers the one before it."""
    folders = list_checkpoints(root)
    if not folders:
        return None
    problem = fault(folders[-1], rank, size)
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


def check_shapes(model: LoopedGPT, shapes: dict[str, tuple[int, ...]], where: Path, gate: bool = True) -> None:
    """Names and shapes of the weights must be the model's, exactly; without `gate` those of an exit gate may be missing."""
    wanted = {name: tuple(p.shape) for name, p in model.named_parameters() if gate or name in shapes or ".gate." not in name}
    if missing := sorted(wanted.keys() - shapes.keys()):
        raise UserError(f"{where} lacks {missing[0]} ({len(missing)} weights in all)")
    if unknown := sorted(shapes.keys() - wanted.keys()):
        raise UserError(f"{where} has {unknown[0]}, which the model does not ({len(unknown)} weights in all)")
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise UserError(f"{where}: {name} has shape {shapes[name]}, the model's is {shape}")


@torch.no_grad()
def load_weights(model: LoopedGPT, tensors: dict[str, Tensor], where: Path, gate: bool = True) -> None:
    """Put whole tensors into the model; without `gate` an exit gate that they lack keeps its weights."""
    check_shapes(model, {name: tuple(t.shape) for name, t in tensors.items()}, where, gate)
    for name, p in model.named_parameters():
        if name not in tensors:
            continue
        tensor = tensors[name].to(p.dtype)
        if sharded(p):
            from twoscale.train.parallel import place_like

            tensor = place_like(tensor, p)
        p.copy_(tensor)


def load_model(folder: Path) -> tuple[LoopedGPT, Tokenizer]:
    """Model (in evaluation mode) and tokenizer of one checkpoint folder, sharded or not."""
    if (problem := fault(folder)) is not None:
        raise UserError(f"the checkpoint {folder} is damaged ({problem})")
    config: ModelConfig = load_config(folder).model
    with torch.device("meta"):  # no memory is taken on the word of a config alone: first the file must hold these weights
        model = LoopedGPT(config, seed=None)
    if is_sharded(folder):
        _load_sharded(model, folder)
        return model.eval(), Tokenizer.load(folder)
    shapes, dtypes = read_header(folder / MODEL)
    check_shapes(model, shapes, folder / MODEL)
    check_dtypes(dtypes, folder / MODEL)
    load_weights(allocate(model), read_tensors(folder / MODEL), folder / MODEL)
    return model.eval(), Tokenizer.load(folder)


def _load_sharded(model: LoopedGPT, folder: Path) -> None:
    """Fill a model that was made on the meta device with the weights of a sharded checkpoint, in this process alone."""
    from twoscale.train.sharded import MODEL_PREFIX, load_parts, read_manifest

    entries = {name: entry for name, entry in read_manifest(folder).items() if name.startswith(MODEL_PREFIX)}
    check_shapes(model, {name.removeprefix(MODEL_PREFIX): entry.shape for name, entry in entries.items()}, folder / SHARDS)
    check_dtypes({name: entry.dtype for name, entry in entries.items()}, folder / SHARDS)
    load_parts(folder, entries, {MODEL_PREFIX + name: p.detach() for name, p in allocate(model).named_parameters()}, alone=True)


def is_sharded(folder: Path) -> bool:
    return (folder / SHARDS).exists()


def has_weights(folder: Path) -> bool:
    """Whether this is a checkpoint, or another folder with its weights in one file."""
    return (folder / MODEL).exists() or is_sharded(folder)


def weights_fingerprint(folder: Path) -> str:
    """A short name for the content of a checkpoint: of its file of weights, or of a sharded one's state.json, which has all checksums."""
    return fingerprint(folder / (STATE if is_sharded(folder) else MODEL))
