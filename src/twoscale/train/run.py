"""A run from its folder: start it, go on with it, or say why neither can be."""

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from twoscale.config import RunConfig, UserError
from twoscale.config.files import make_folder, write_json
from twoscale.config.lock import lock
from twoscale.config.progress import remark
from twoscale.config.run_folder import RunFolder
from twoscale.config.serial import read_json, to_dict
from twoscale.config.words import group_list, plural
from twoscale.data import Tokenizer, prepare
from twoscale.data.prepare import Progress, describe_skipped, prepared_config, quiet
from twoscale.model import LoopedGPT
from twoscale.tasks.file import load_task, save_task, task_of
from twoscale.tasks.measure import measure_staircase
from twoscale.train import checkpoint as ckpt
from twoscale.train.objective import build_objective
from twoscale.train.settings import check_same, differences as differences, flat
from twoscale.train.trainer import Probe, Trainer, TrainResult
from twoscale.train.world import World, open_world


def start_run(
    config: RunConfig,
    run: Path,
    data: Path | None = None,
    checkpoint: str | None = None,
    progress: Progress = quiet,
    probes: Sequence[Probe] = (),
    init: tuple[LoopedGPT, Tokenizer | None] | None = None,
) -> TrainResult:
    """Train in the folder `run`, from its newest checkpoint if it has one, else from the weights of `init`, else from fresh ones.
    A model with a tokenizer wants shards that were made with it.

    Shards are made in RUN/data unless `data` is given.
    """
    with open_world() as world, contextlib.ExitStack() as held:
        _check_same_start(config, data, checkpoint, world)
        with world.together():
            build_objective(config)  # an error where model or task do not fit it
            if config.task == "none":
                data = find_data(run, data)
                if data != RunFolder(run).data:
                    config = dataclasses.replace(config, data=prepared_config(data))
            elif data is not None:
                raise UserError(f"--data-dir {data}: the task {config.task} makes its own samples, omit --data-dir")
        with world.together():
            if world.main:
                make_folder(run)
                held.enter_context(lock(run, "train"))
                _open_folder(config, run, data, progress, init)
        trainer = Trainer(config, run, data, world, checkpoint, probes, None if init is None else init[0])
        if world.main:
            remark(describe(trainer, world))
        result = trainer.train()
        if world.main and result.finished:
            write_staircase(run, config)
        return result


def _check_same_start(config: RunConfig, data: Path | None, checkpoint: str | None, world: World) -> None:
    """All processes must have been started alike; otherwise they would wait for each other for ever, or train something else.

    Shards that are there already may have been made in other places: the trainer compares what is in them.
    """
    settings = {name: value for name, value in flat(to_dict(config)).items() if data is None or not name.startswith("data.")}
    start = {"the version of torch": torch.__version__, "--checkpoint": checkpoint, **settings}
    world.same("the nodes were not started alike", start, "start all of them with the same command and the same installation")


def write_staircase(run: Path, config: RunConfig) -> None:
    """Measure the newest checkpoint of a run on a task by true depth and loop steps, into RUN/staircase.json."""
    task = task_of(config)
    if task is None:
        return
    folder = ckpt.find_checkpoint(run, None)
    model, _ = ckpt.load_model(folder)
    c, step = config.train, ckpt.read_progress(folder).step
    measure_staircase(model, task, c.staircase_loops, c.staircase_samples, c.seed, step).save(run)


def find_data(run: Path, data_dir: Path | None) -> Path:
    """The shards of a run: the ones given, the ones it was started with (RUN/data_dir.json), or RUN/data."""
    if data_dir is not None:
        if not data_dir.is_dir():
            raise UserError(f"--data-dir {data_dir} does not exist: make it with `twoscale prepare`")
        return data_dir.resolve()
    if RunFolder(run).task.exists():
        name = getattr(load_task(run), "name", "none")
        raise UserError(f"{run} was trained on the task {name} and has no text: this command needs text")
    elsewhere = RunFolder(run).data_dir
    if not elsewhere.exists():
        return RunFolder(run).data
    pointer = read_json(elsewhere)
    if not isinstance(pointer, dict) or not isinstance(pointer.get("path"), str) or not Path(pointer["path"]).is_dir():
        raise UserError(f"the shards that {run} was trained on are gone (see {elsewhere}): name them with --data-dir")
    return Path(pointer["path"])


def _open_folder(
    config: RunConfig, run: Path, data: Path | None, progress: Progress, init: tuple[LoopedGPT, Tokenizer | None] | None
) -> None:
    """Everything about the folder that must be right before a model is built; nothing of an existing run is lost."""
    trained = bool(ckpt.list_checkpoints(RunFolder(run).checkpoints))
    if trained and not RunFolder(run).config.exists():
        raise UserError(f"{run} has checkpoints but no {ckpt.CONFIG}: choose another --out")
    if trained:
        check_same(ckpt.load_config(run), config, run)
    wanted, task = None if init is None else init[1], task_of(config)
    if task is not None:
        load_task(run)  # an error where it is of another version
        if init is not None and (wanted is None or wanted.fingerprint != task.tokenizer().fingerprint):
            raise UserError(
                f"the model that training starts from is not of the task {task.name} with these settings (its vocabulary is another): "
                "start without --init, or from a run on the same task"
            )
        ckpt.save_config(run, config)
        task.tokenizer().save(run)
        save_task(run, task)
        return
    assert data is not None
    if data == RunFolder(run).data:
        skipped = describe_skipped(prepare(config.data, data, progress))
        if skipped is not None:
            remark(skipped)
    tokenizer = Tokenizer.load(data)
    if trained and RunFolder(run).tokenizer.exists() and Tokenizer.load(run).fingerprint != tokenizer.fingerprint:
        raise UserError(f"{data} was made with another tokenizer than the run in {run}: give the run's own shards with --data-dir")
    if wanted is not None and wanted.fingerprint != tokenizer.fingerprint:
        raise UserError(f"{data} was made with another tokenizer than the model that training starts from: prepare the text with its own")
    ckpt.save_config(run, config)
    tokenizer.save(run)
    if data != RunFolder(run).data:
        note_data(run, data)


def note_data(run: Path, data: Path) -> None:
    """Remember shards that lie outside of the run."""
    write_json(RunFolder(run).data_dir, {"path": str(data.resolve())})


def describe(trainer: Trainer, world: World) -> str:
    """Two lines on what is about to run, and on which text or task its validation loss is measured."""
    c, m = trainer.config.train, trainer.config.model
    parameters = sum(p.numel() for p in trainer.model.parameters())
    at = f"going on from step {trainer.progress.step}" if trainer.progress.step else "starting"
    return (
        f"{trainer.config.name}: {parameters / 1e6:.2f}M parameters, {m.n_layer} layers, loop groups {group_list(m.groups)}, "
        f"default depth {plural(m.mean_loops, 'loop')}, optimizer {c.optimizer}, {world.size} x {world.device.type}"
        f"{', compiled' if trainer.compiled else ''}; {at}, {plural(c.steps, 'step')}\n"
        f"losses in nats a token; val: {trainer.val_text}"
    )
