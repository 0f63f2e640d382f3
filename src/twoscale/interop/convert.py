"""`twoscale convert`: a run folder of a model that came from elsewhere, so that every command works on it.

A looped model (an export, Huginn, Ouro, the bundled one) is taken as it is. A plain decoder shaped like Llama becomes looped: chosen layers
become groups, and the start is exact. With `inject="concat"` the first layer of a group sees its input alone, A_g = [0 | I], so the model
computes what the plain one does at any number of loops, until training gives the state a say. With `inject="none"` a group repeats its
layers, which is exact at one loop.
"""

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from twoscale.config import DataConfig, ModelConfig, RunConfig, UserError, presets
from twoscale.config.files import fingerprint, make_folder, write_json
from twoscale.config.serial import from_dict, read_json
from twoscale.data import Tokenizer, prepare
from twoscale.data.prepare import Progress, prepared_config, quiet
from twoscale.geometry.probe import GEOMETRY
from twoscale.interop.load import find, load
from twoscale.model import LoopedGPT
from twoscale.train import checkpoint as ckpt
from twoscale.train.run import note_data

SOURCE = "source.json"
HELD_OUT = 0.5  # of the text, for a model that was not trained on it
Inject = Literal["concat", "none"]


def convert(
    source: str | Path,
    out: Path,
    groups: Sequence[Sequence[int]] = (),
    *,
    loops: int | None = None,
    inject: Inject = "concat",
    data: DataConfig | None = None,
    data_dir: Path | None = None,
    progress: Progress = quiet,
) -> Path:
    """Make the run and return its folder. Its held-out text is `data_dir`, or made from `data` (by default `builtin`)."""
    folder = find(source)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty: choose another --out")
    model, tokenizer = load(folder)
    if tokenizer is None:
        raise UserError(f"{folder} has no tokenizer.json: put the model's own beside its weights")
    if groups:
        model = looped(model, groups, loops or 4, inject)
    elif not model.config.n_groups:
        raise UserError(f"{folder} is a plain model of {model.config.n_layer} layers: say which of them loop, for example --groups 4-7")
    elif loops is not None:
        model.config = dataclasses.replace(model.config, mean_loops=loops)
    made = dataclasses.replace(data or DataConfig(val_fraction=HELD_OUT), tokenizer=str(folder.resolve()))
    settings = made if data_dir is None else prepared_config(data_dir)
    make_folder(out)
    tokenizer.save(out)
    if data_dir is None:
        prepare(settings, out / "data", progress)
    elif Tokenizer.load(data_dir).fingerprint != tokenizer.fingerprint:
        raise UserError(f"{data_dir} was made with another tokenizer than the model's: prepare the text with --tokenizer {folder}")
    else:
        note_data(out, data_dir)
    config = RunConfig(name=out.resolve().name, model=model.config, data=settings, train=presets.small().train)
    ckpt.save_config(out, config)
    if (folder / GEOMETRY).exists():
        shutil.copyfile(folder / GEOMETRY, out / GEOMETRY)
    ckpt.save_checkpoint(out / "checkpoints", config, _progress(folder, bool(groups)), ckpt.model_tensors(model), {}, tokenizer)
    write_json(out / SOURCE, {"path": str(folder.resolve()), "config": fingerprint(folder / ckpt.CONFIG)})
    return out


def converted_from(run: Path, source: str | Path) -> bool:
    """Whether a run was made of this model."""
    noted = read_json(run / SOURCE) if (run / SOURCE).exists() else {}
    return isinstance(noted, dict) and noted.get("config") == fingerprint(find(source) / ckpt.CONFIG)


def _progress(folder: Path, changed: bool) -> ckpt.Progress:
    """How far an exported model was trained; nothing is known of others, nor of what was made out of them."""
    given = read_json(folder / ckpt.CONFIG) if (folder / ckpt.CONFIG).exists() else {}
    known = given.get("training") if isinstance(given, dict) and not changed else None
    return from_dict(ckpt.Progress, known, str(folder / ckpt.CONFIG)) if known is not None else ckpt.Progress(0, 0, 0, 0)


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
    new = new.to_empty(device="cpu").to(model.wte.weight.dtype)
    for ours, theirs in zip(new.blocks(), model.blocks(), strict=True):
        ours.load_state_dict(theirs.state_dict())
    for name in ("wte", "wpe", "ln_f", "lm_head"):
        if getattr(new, name) is not None:
            getattr(new, name).load_state_dict(getattr(model, name).state_dict())
    for group in new.groups:
        if group.adapter is not None:
            group.adapter.weight.copy_(torch.cat((torch.zeros(config.n_embd, config.n_embd), torch.eye(config.n_embd)), dim=1))
    return new.eval()
