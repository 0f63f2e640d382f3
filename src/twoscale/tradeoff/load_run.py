"""A run opened for measuring: its model, its held-out text or samples, and the name of what was measured."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from twoscale import exits
from twoscale.config import RunConfig, UserError
from twoscale.config.dtypes import WeightDtype
from twoscale.config.run_folder import RunFolder
from twoscale.data import TokenData, Tokenizer, source_name
from twoscale.engine.kernels.quantize import quantize
from twoscale.exits.learned import heads_of
from twoscale.model import LoopedGPT
from twoscale.tasks.file import load_task
from twoscale.tasks.task import Task
from twoscale.tradeoff.heldout import HeldOut, Role, heldout_part, task_part
from twoscale.tradeoff.summary import read_calibration
from twoscale.train import checkpoint as ckpt


@dataclass(frozen=True)
class LoadedRun:
    """A checkpoint and the held-out text of its run, or the task that it was trained on."""

    model: LoopedGPT
    tokenizer: Tokenizer
    held_out: TokenData | Task
    about: dict[str, Any]
    """Which checkpoint this is, by name and by content."""
    config: RunConfig

    @property
    def data(self) -> TokenData:
        """The held-out text."""
        if isinstance(self.held_out, Task):
            raise UserError(f"the run was trained on the task {self.held_out.name} and has no text: this command needs text")
        return self.held_out

    @property
    def task(self) -> Task | None:
        """The task; None for text."""
        return self.held_out if isinstance(self.held_out, Task) else None

    @property
    def source(self) -> str:
        """Where the held-out text came from: `builtin`, the name of a file or folder, or a dataset of the hub; the name of a task."""
        return source_name(self.data.folder) if self.task is None else self.task.name

    def text(self, role: Role, windows: int) -> HeldOut:
        """Windows of text, or samples of the task."""
        if self.task is not None:
            return task_part(self.task, role, windows)
        return heldout_part(self.data, self.tokenizer.eot, self.model.config.block_size, role, windows)


def load_run(
    run: Path,
    checkpoint: str | None = None,
    data_dir: Path | None = None,
    device: torch.device | None = None,
    dtype: WeightDtype = "fp32",
) -> LoadedRun:
    """A looped model opened to measure its exits, its weights rounded to a dtype."""
    opened = load_run_model(run, checkpoint, data_dir, device)
    if not opened.model.config.n_groups:
        raise UserError(f"{run} has no loop groups: there is nothing to leave early")
    return opened if dtype == "fp32" else replace(opened, model=quantize(opened.model, dtype))


def load_run_model(run: Path, checkpoint: str | None = None, data_dir: Path | None = None, device: torch.device | None = None) -> LoadedRun:
    """The model of a run and the shards it was trained on, or others made with the same tokenizer; on a task, the task."""
    from twoscale.train.run import find_data  # with it comes torch.distributed, which loading a calibration does not need

    folder = ckpt.find_checkpoint(run, checkpoint)
    model, tokenizer = ckpt.load_model(folder)
    data: TokenData | Task
    if (task := load_task(run)) is not None:
        if data_dir is not None:
            raise UserError(f"--data-dir {data_dir}: {run} was trained on the task {task.name}, which makes its own samples; omit it")
        if tokenizer.fingerprint != task.tokenizer().fingerprint:
            raise UserError(f"{RunFolder(run).task} is not of this model, whose vocabulary is another: put the model's own task.json there")
        data = task
    else:
        data = TokenData(find_data(run, data_dir), "val")
        if data.tokenizer != tokenizer.fingerprint:
            raise UserError(f"{data.folder} was made with another tokenizer than this model's: give its own shards with --data-dir")
    about = name_checkpoint(folder)
    return LoadedRun(model.to(device or torch.device("cpu")), tokenizer, data, about, ckpt.load_config(folder))


def name_checkpoint(folder: Path) -> dict[str, Any]:
    """A checkpoint by name and by content."""
    return {"checkpoint": folder.name, "weights": ckpt.weights_fingerprint(folder)}


def calibrated_exit(
    folder: Path, about: Mapping[str, Any] | None = None, must: bool = True, dtype: WeightDtype = "fp32"
) -> dict[int, exits.Rule] | None:
    """The rules of a run's calibration.json; `about` names the checkpoint that they must have been calibrated for, `dtype` its weights'.

    Where there is none, or it is of another checkpoint or dtype: an error, or None if it need not be there.
    """
    path = RunFolder(folder).calibration
    found = read_calibration(path)
    if found is None:
        if must:
            raise UserError(f"{folder} has no {path.name}: make it with `twoscale calibrate {folder}`")
        return None
    if about is not None and found.get("weights") != about["weights"]:
        if must:
            raise UserError(f"{path} is of {found['checkpoint']}, not of {about['checkpoint']}: calibrate again")
        return None
    if about is not None and (made_with := found.get("dtype", "fp32")) != dtype:
        if must:
            raise UserError(
                f"{path} was made with weights in {made_with}, these are in {dtype}: calibrate with --dtype {dtype}, or load {made_with}"
            )
        return None
    known = {"weights": heads_of(found, path)} if "heads" in found else {}
    return {g: exits.parse(word, **known) for g, word in enumerate(found["rules"]) if word is not None}


def chosen_exit(folder: Path, exit: exits.Exit | None, loops: Any, dtype: WeightDtype = "fp32") -> tuple[Any, Any]:
    """The rule and the most loops that a user asked for; `auto` is what the model in this folder was calibrated for."""
    if exit != "auto":
        return exit, loops
    rules, calibrated_loops = calibration_for(folder, dtype)
    return rules, loops or calibrated_loops


def calibration_for(path: Path, dtype: WeightDtype = "fp32") -> tuple[dict[int, exits.Rule], int]:
    """Rules and most loops that a run, or one checkpoint of it, was calibrated for, with its weights in a dtype."""
    run = RunFolder.of(path)
    calibrated_exit(run.path)  # an error where there is none
    folder = path if ckpt.has_weights(path) else ckpt.find_checkpoint(path, None)
    rules = calibrated_exit(run.path, name_checkpoint(folder), dtype=dtype)
    found = read_calibration(run.calibration)
    assert rules is not None and found is not None
    if isinstance(found["loops"], bool) or not isinstance(found["loops"], int):
        raise UserError(f"{run.calibration}: loops = {found['loops']!r} is not an integer: calibrate again")
    return rules, found["loops"]


@dataclass
class StoredCalibration:
    """`calibration_for` one folder, read at the first call and kept: the weights are fingerprinted only where they are asked for."""

    folder: Path
    dtype: WeightDtype = "fp32"
    found: tuple[dict[int, exits.Rule], int] | None = None

    def __call__(self) -> tuple[dict[int, exits.Rule], int]:
        self.found = self.found or calibration_for(self.folder, self.dtype)
        return self.found
