"""A run from its folder: start it, go on with it, or say why neither can be."""

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from twoscale.config import RunConfig, UserError
from twoscale.config.files import make_folder, write_json
from twoscale.config.lock import lock
from twoscale.config.run_folder import RunFolder
from twoscale.config.serial import read_json
from twoscale.config.words import group_list, plural
from twoscale.data import Tokenizer, prepare
from twoscale.data.prepare import Progress, describe_skipped, prepared_config, quiet
from twoscale.model import LoopedGPT
from twoscale.train import checkpoint as ckpt
from twoscale.train.parallel import World, open_world
from twoscale.train.settings import check_same, differences as differences
from twoscale.train.trainer import Probe, Trainer, TrainResult


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
    if config.model.exit_gate:
        raise UserError("model.exit_gate: gates are read by exits.Gate where a loaded model has them; training one is not supported")
    data = find_data(run, data)
    if data != RunFolder(run).data:
        config = dataclasses.replace(config, data=prepared_config(data))
    with open_world() as world, contextlib.ExitStack() as held:
        error = None
        if world.main:
            try:
                make_folder(run)
                held.enter_context(lock(run, "train"))
                _open_folder(config, run, data, progress, None if init is None else init[1])
            except UserError as problem:
                error = str(problem)
        world.agree(error)
        trainer = Trainer(config, run, data, world, checkpoint, probes, None if init is None else init[0])
        if world.main:
            print(describe(trainer, world), file=sys.stderr, flush=True)
        return trainer.train()


def find_data(run: Path, given: Path | None) -> Path:
    """The shards of a run: the ones given, the ones it was started with (RUN/data_dir.json), or RUN/data."""
    if given is not None:
        if not given.is_dir():
            raise UserError(f"--data-dir {given} does not exist: make it with `twoscale prepare`")
        return given.resolve()
    elsewhere = RunFolder(run).data_dir
    if not elsewhere.exists():
        return RunFolder(run).data
    noted = read_json(elsewhere)
    if not isinstance(noted, dict) or not isinstance(noted.get("path"), str) or not Path(noted["path"]).is_dir():
        raise UserError(f"the shards that {run} was trained on are gone (see {elsewhere}): name them with --data-dir")
    return Path(noted["path"])


def _open_folder(config: RunConfig, run: Path, data: Path, progress: Progress, wanted: Tokenizer | None) -> None:
    """Everything about the folder that must be right before a model is built; nothing of an existing run is lost."""
    trained = bool(ckpt.list_checkpoints(RunFolder(run).checkpoints))
    if trained and not RunFolder(run).config.exists():
        raise UserError(f"{run} has checkpoints but no {ckpt.CONFIG}: choose another --out")
    if trained:
        check_same(ckpt.load_config(run), config, run)
    if data == RunFolder(run).data:
        skipped = describe_skipped(prepare(config.data, data, progress))
        if skipped is not None:
            print(skipped, file=sys.stderr, flush=True)
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
    """Two lines on what is about to run, and on which text its validation loss is measured."""
    c, m = trainer.config.train, trainer.config.model
    parameters = sum(p.numel() for p in trainer.model.parameters())
    at = f"going on from step {trainer.progress.step}" if trainer.progress.step else "starting"
    return (
        f"{trainer.config.name}: {parameters / 1e6:.2f}M parameters, {m.n_layer} layers, loop groups {group_list(m.groups)}, "
        f"default depth {plural(m.mean_loops, 'loop')}, optimizer {c.optimizer}, {world.size} x {world.device.type}"
        f"{', compiled' if trainer.compiled else ''}; {at}, {plural(c.steps, 'step')}\n"
        f"losses in nats a token; val: {trainer.val_text}"
    )
