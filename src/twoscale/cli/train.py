"""`twoscale train`: train a preset, with any setting changed, or go on with a run.

twoscale train --preset tiny
twoscale train --preset small --data.source corpus/ --out runs/mine --train.steps 2000
twoscale train --resume runs/mine
twoscale train --init runs/retrofit --data.source corpus/ --out runs/healed --train.steps 2000
torchrun --nproc-per-node=8 -m twoscale train --preset paper
"""

import os
import signal
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

from twoscale.cli.parse import chosen, is_main_process, parse, say
from twoscale.config import RunConfig, UserError, presets
from twoscale.config.run_folder import RunFolder


@dataclass(frozen=True)
class TrainArgs:
    """Train a looped GPT. The same command in the same folder goes on where it stopped."""

    preset: Literal["nano", "tiny", "huginn", "small", "stories", "paper", "hops", "carry", "hops-paper"] = "tiny"
    """The settings to start from; every one of them can be changed below. With --task and without --preset: the task's own."""
    out: Path | None = None
    """Folder of the run; runs/NAME by default."""
    data_dir: Path | None = None
    """Shards made by `twoscale prepare`; by default they are made in OUT/data from data.source."""
    resume: Path | None = None
    """Go on with the run in this folder, with its own settings."""
    init: str | None = None
    """Start from the weights, the shape and the tokenizer of this model: a run, an export, `bundled`, a Huginn or Llama folder."""
    checkpoint: str | None = None
    """Go on from this checkpoint (for example step-000100) instead of the newest one."""
    config: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=presets.tiny)


def run(args: list[str]) -> int:
    return train(parse_train(args, "twoscale train", TrainArgs))


A = TypeVar("A", bound=TrainArgs)


def parse_train(args: list[str], prog: str, kind: type[A]) -> A:
    """The arguments, on top of the preset and the model that they name."""
    task = chosen(args, "--task", _trained_on(chosen(args, "--init", "")))
    preset = presets.get(chosen(args, "--preset", task if task in presets.PRESETS else "tiny"))
    if init := chosen(args, "--init", ""):
        preset = _like(preset, init)
    elif not chosen(args, "--resume", "") and task == preset.task == "none":
        preset = _fit_vocabulary(preset, args)
    if not chosen(args, "--resume", ""):
        preset = _fit_schedule(_fit_batch(_named(preset, args), args), args)
    parsed = parse(kind, args, prog, default=kind(config=preset))
    parsed = replace(parsed, config=_fit_task(parsed.config, args))
    if parsed.config.task != "none" and kind is not TrainArgs:
        raise UserError(f"{prog} works on text: train on the task {parsed.config.task} with `twoscale train --task {parsed.config.task}`")
    if parsed.resume is not None:
        if parsed.out is not None or parsed.init is not None:
            raise UserError("--resume names the folder already: omit --out and --init")
        if parsed.config != preset:
            raise UserError("--resume takes the settings of the run itself: omit the others")
    return parsed


def _trained_on(init: str) -> str:
    """The task that a model was trained on."""
    if not init or not RunFolder(Path(init)).task.exists():
        return "none"
    from twoscale.tasks.file import load_task

    return getattr(load_task(Path(init)), "name", "none")


def _named(preset: RunConfig, args: list[str]) -> RunConfig:
    """The preset, called as the folder that --out names; a run that is there keeps its name."""
    out = chosen(args, "--out", "")
    if not out:
        return preset
    existing = _run_in(out)
    return replace(preset, name=existing.name if existing is not None else Path(out).resolve().name or preset.name)


def _run_in(out: str) -> RunConfig | None:
    """The settings of the run that a folder holds."""
    from twoscale.config.run_file import load_config

    run = RunFolder(Path(out))
    return load_config(run.path) if run.config.is_file() and run.is_run else None


def _fit_vocabulary(preset: RunConfig, args: list[str]) -> RunConfig:
    """The preset with the vocabulary that the data have, or the run that is there; --model.vocab-size still comes before it."""
    existing = _run_in(chosen(args, "--out", f"runs/{chosen(args, '--name', preset.name)}"))
    data, known = preset.data, 0
    tokenizer, size = chosen(args, "--data.tokenizer", data.tokenizer), chosen(args, "--data.bpe-vocab", "")
    if folder := chosen(args, "--data-dir", ""):
        from twoscale.data.prepare import load_manifest, prepared_config

        known, data = load_manifest(Path(folder))["vocab_size"], prepared_config(Path(folder))
    elif "/" in tokenizer:
        from twoscale.data import Tokenizer

        known, data = Tokenizer.load(Path(tokenizer).expanduser()).vocab_size, replace(data, tokenizer=tokenizer)
    else:
        data = replace(data, tokenizer=tokenizer, bpe_vocab=int(size) if size.isascii() and size.isdigit() else data.bpe_vocab)
    existing_vocab = 0 if existing is None else existing.model.vocab_size
    return replace(preset, data=data, model=replace(preset.model, vocab_size=max(known, data.vocab_size or 0, existing_vocab)))


def _fit_task(config: RunConfig, args: list[str]) -> RunConfig:
    """The config with vocabulary and context of its task, unless they are given."""
    if config.task == "none":
        return config
    task, model = getattr(config, config.task), config.model
    if not chosen(args, "--model.vocab-size", ""):
        model = replace(model, vocab_size=task.vocab_size)
    if not chosen(args, "--model.block-size", ""):
        model = replace(model, block_size=task.length)
    return replace(config, model=model)


def _fit_batch(preset: RunConfig, args: list[str]) -> RunConfig:
    """The preset with a micro-batch that divides the batch that is asked for, unless one is given."""
    size, micro = chosen(args, "--train.batch-size", ""), preset.train.micro_batch_size
    if chosen(args, "--train.micro-batch-size", "") or micro is None or not (size.isascii() and size.isdigit() and int(size)):
        return preset
    share = max(1, int(size) // int(os.environ.get("WORLD_SIZE", "1")))
    fits = max(n for n in range(1, min(micro, share) + 1) if share % n == 0)
    return replace(preset, train=replace(preset.train, batch_size=int(size), micro_batch_size=fits))


def _fit_schedule(preset: RunConfig, args: list[str]) -> RunConfig:
    """A preset whose loops grow, with warm-up, growing loops and falling rate in their shares of the steps that are asked for."""
    steps, c = chosen(args, "--train.steps", ""), preset.train
    if not c.loops_ramp or not (steps.isascii() and steps.isdigit() and int(steps)):
        return preset
    share = int(steps) / c.steps
    warmup, hold, ramp = (int(n * share) for n in (c.warmup_steps, c.loops_hold, c.loops_ramp))
    decay = None if c.decay_steps is None else max(1, int(c.decay_steps * share))
    return replace(preset, train=replace(c, steps=int(steps), warmup_steps=warmup, loops_hold=hold, loops_ramp=ramp, decay_steps=decay))


def _like(preset: RunConfig, init: str) -> RunConfig:
    """The preset with shape and tokenizer of a model that is there already; with its task too, where it was trained on one."""
    from twoscale.config.task import CarryConfig, HopsConfig
    from twoscale.interop.load import find, model_config
    from twoscale.tasks.file import load_task

    folder = find(init)
    config = model_config(folder)
    if preset.task != "none" and (task := load_task(folder)) is not None:
        kind = {"hops": HopsConfig, "carry": CarryConfig}[task.name]
        preset = replace(preset, **{"task": task.name, task.name: kind(**{f.name: getattr(task, f.name) for f in fields(kind)})})
    data = replace(preset.data, tokenizer=str(folder.resolve())) if RunFolder(folder).tokenizer.exists() else preset.data
    return replace(preset, name=f"{folder.resolve().name}-trained", model=config, data=data)


def train(args: TrainArgs) -> int:
    from twoscale.data.progress import DocumentLine
    from twoscale.geometry.probe import probe_geometry
    from twoscale.interop import load
    from twoscale.tasks.staircase import load_staircase
    from twoscale.train import Diverged, start_run
    from twoscale.train.checkpoint import list_checkpoints, load_config

    config, out = args.config, args.out or Path("runs") / args.config.name
    if args.resume is not None:
        if RunFolder(args.resume).source.exists():
            raise UserError(f"{args.resume} was made by `convert`, not trained: go on from it with --init {args.resume} --out ANOTHER")
        config, out = load_config(args.resume), args.resume
    try:
        with DocumentLine() as line:
            init = None if args.init is None or list_checkpoints(RunFolder(out).checkpoints) else load(args.init, dtype="fp32")
            result = start_run(config, out, args.data_dir, args.checkpoint, line, [probe_geometry], init)
    except Diverged as error:
        say(f"twoscale train: {error}")
        return 3
    if result.finished:
        val = f", validation loss {result.val_loss:.4f} nats a token on {result.val_text}" if result.val_loss is not None else ""
        say(f"{out}: finished at step {result.step}{val}; weights in {result.checkpoint}")
        if (staircase := load_staircase(out)) is not None and config.task != "none" and is_main_process():
            print(f"{config.task}: percent right by true depth and loop steps ({RunFolder(out).staircase})\n{staircase.table()}")
        return 0
    assert result.signal is not None
    name = signal.Signals(result.signal).name
    say(f"stopped by {name} at step {result.step}, saved in {result.checkpoint}; go on with: twoscale train --resume {out}")
    return 128 + result.signal
