"""`twoscale convert`: a run folder of a model that came from elsewhere, so that every command works on it.

A looped model (an export, Huginn, Ouro, the bundled one) is taken as it is. A plain decoder shaped like Llama becomes looped: chosen layers
become groups, and the start is exact. With `inject="concat"` the first layer of a group sees its input alone, A_g = [0 | I], so the model
computes what the plain one does at any number of loops, until training gives the state a say. With `inject="none"` a group repeats its
layers, which is exact at one loop.
"""

import dataclasses
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from twoscale.config import DataConfig, ModelConfig, RunConfig, UserError, presets
from twoscale.config.files import fingerprint, make_folder, write_json
from twoscale.config.groups import format_groups
from twoscale.config.run_folder import RunFolder
from twoscale.config.serial import read_json, read_steps
from twoscale.config.task import CarryConfig, HopsConfig
from twoscale.data import Tokenizer, prepare
from twoscale.data.prepare import Progress, prepared_config, quiet
from twoscale.geometry.probe import write_record
from twoscale.interop import measured
from twoscale.interop.load import find, load, noted_training, progress_of, recipe_of
from twoscale.model import LoopedGPT, allocate
from twoscale.tasks.file import load_task, save_task
from twoscale.tasks.staircase import load_staircase
from twoscale.train import checkpoint as ckpt
from twoscale.train.run import note_data

WINDOW = 1024  # tokens; a whole context of a published model would be gigabytes of states
HELD_OUT = 0.5  # of the text, for a model that was not trained on it
OWN_TEXT = "text of its own"  # what geometry that comes with a model was measured on, where it does not say
Inject = Literal["concat", "none"]


def convert(
    source: str | Path,
    out: Path,
    groups: Sequence[Sequence[int]] = (),
    *,
    loops: int | None = None,
    inject: Inject = "concat",
    block_size: int | None = None,
    data: DataConfig | None = None,
    data_dir: Path | None = None,
    progress: Progress = quiet,
) -> Path:
    """Make the run and return its folder: whole, or not at all.

    Its held-out text is `data_dir`, or made from `data`: by default the text that comes with the model, else `builtin`. With rotary
    positions `block_size` may shorten the context that is measured with (by default to 1024 tokens).
    """
    folder = find(source)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty: choose another --out")
    model, tokenizer = load(folder, dtype="fp32")
    if tokenizer is None:
        raise UserError(f"{folder} has no tokenizer.json: put the model's own beside its weights")
    if groups:
        model = looped(model, groups, loops or 4, inject)
    elif not model.config.n_groups:
        layers = model.config.n_layer
        raise UserError(
            f"{folder} is a plain model: say which of its {layers} layers loop, for example --groups {suggested_groups(layers)}"
        )
    elif loops is not None:
        model.config = dataclasses.replace(model.config, mean_loops=loops)
    task = load_task(folder)
    if task is not None and (groups or data is not None or data_dir is not None):
        raise UserError(f"{folder} is a model of the task {task.name}, which makes its own samples: omit data and groups")
    model.config = _shortened(model.config, block_size)
    own_text = heldout_text(folder)
    default = DataConfig(source=str(own_text or "builtin"), val_fraction=HELD_OUT)
    prepared = dataclasses.replace(data or default, tokenizer=str(folder.resolve()))
    settings = prepared if data_dir is None else prepared_config(data_dir)
    if data_dir is not None and Tokenizer.load(data_dir).fingerprint != tokenizer.fingerprint:
        raise UserError(f"{data_dir} was made with another tokenizer than the model's: prepare the text with --tokenizer {folder}")
    aside = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        make_folder(aside)
        tokenizer.save(aside)
        if task is not None:
            save_task(aside, task)
            if (stairs := load_staircase(folder)) is not None:
                stairs.save(aside)
        elif data_dir is None:
            prepare(settings, RunFolder(aside).data, progress)
        else:
            note_data(aside, data_dir)
        recipe = recipe_of(folder)
        config = RunConfig(name=out.resolve().name, model=model.config, data=settings, train=recipe or presets.small().train)
        if task is not None:
            kind = {"hops": HopsConfig, "carry": CarryConfig}[task.name]
            own = kind(**{f.name: getattr(task, f.name) for f in dataclasses.fields(kind)})
            config = dataclasses.replace(config, data=DataConfig(), **{"task": task.name, task.name: own})
        ckpt.save_config(aside, config)
        reached = ckpt.Progress(0, 0, 0, 0) if groups else progress_of(folder)
        lines = [] if groups else [r for r in read_steps(RunFolder(folder).geometry) if r["step"] <= reached.step]
        for record in lines:
            write_record(aside, {"source": OWN_TEXT} | record)
        ckpt.save_checkpoint(RunFolder(aside).checkpoints, config, reached, ckpt.model_tensors(model), {}, tokenizer)
        about = {"path": str(folder.resolve()), "config": fingerprint(folder / ckpt.CONFIG), "recipe": recipe is not None}
        as_it_came = data is None and data_dir is None and block_size is None and not groups and loops is None
        if isinstance(trained_on := noted_training(folder).get("text"), str):
            about |= {"trained_on": trained_on, "same_kind": data is None and data_dir is None and own_text is not None}
        if as_it_came and task is None and measured.unpack(folder, aside):
            about |= {"measured": fingerprint(RunFolder(aside).sweep)}
        write_json(RunFolder(aside).source, about)
        if out.exists():
            out.rmdir()
        os.rename(aside, out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return out


def heldout_text(folder: Path) -> Path | None:
    """Text that comes with a model, held out from its training: the file, or the folder where there are several; None without any."""
    files = sorted(p for p in RunFolder(folder).heldout.glob("*") if p.is_file())
    return (files[0] if len(files) == 1 else RunFolder(folder).heldout).resolve() if files else None


def converted_from(run: Path, source: str | Path) -> bool:
    """Whether a run was made of this model."""
    source_file = RunFolder(run).source
    recorded = read_json(source_file) if source_file.exists() else {}
    return isinstance(recorded, dict) and recorded.get("config") == fingerprint(find(source) / ckpt.CONFIG)


def suggested_groups(n_layer: int) -> str:
    """Loop groups for a plain model as --groups writes them: the middle half of its layers as one group."""
    first = n_layer // 4
    return format_groups((tuple(range(first, max(first + 1, n_layer - first))),))


def _shortened(config: ModelConfig, block_size: int | None) -> ModelConfig:
    """A model with rotary positions may be measured on shorter windows than its context."""
    if config.positions != "rotary":
        if block_size is not None and block_size != config.block_size:
            raise UserError("--block-size goes with rotary positions: a table of learned ones has its length")
        return config
    return dataclasses.replace(config, block_size=min(config.block_size, block_size or WINDOW))


@torch.no_grad()
def looped(model: LoopedGPT, groups: Sequence[Sequence[int]], loops: int, inject: Inject = "concat") -> LoopedGPT:
    """A plain model with some of its layers as loop groups, computing the same at the start."""
    if model.config.n_groups:
        raise UserError("this model has loop groups already: --groups is for plain ones")
    settings: dict[str, object] = (
        {"inject": "concat"} if inject == "concat" else {"inject": "none", "start": "input", "backprop_steps": None}
    )
    config: ModelConfig = dataclasses.replace(
        model.config,
        groups=tuple(tuple(group) for group in groups),
        mean_loops=loops,
        **settings,  # type: ignore[arg-type]
    )
    with torch.device("meta"):
        new = LoopedGPT(config, seed=None)
    new = allocate(new).to(model.wte.weight.dtype)
    for ours, theirs in zip(new.blocks(), model.blocks(), strict=True):
        ours.load_state_dict(theirs.state_dict())
    for name in ("wte", "wpe", "ln_f", "lm_head"):
        if getattr(new, name) is not None:
            getattr(new, name).load_state_dict(getattr(model, name).state_dict())
    for group in new.groups:
        if group.adapter is not None:
            group.adapter.weight.copy_(torch.cat((torch.zeros(config.n_embd, config.n_embd), torch.eye(config.n_embd)), dim=1))
    return new.eval()
