"""`twoscale export`: a run as a folder that transformers, and `twoscale.load`, open.

config.json             settings under `twoscale`, and what transformers looks for
model.safetensors       the weights, named model.NAME
modeling_twoscale.py    three lines that import the package: the model is defined in one place
tokenizer.json, tokenizer_config.json, generation_config.json
calibration.json, controller.json, geometry.jsonl, task.json, staircase.json    where the run has them
prompts.json, heldout/  where a model that is exported again has them
README.md               the model card
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from twoscale import __version__
from twoscale.config import DataConfig, TrainConfig, UserError
from twoscale.config.files import atomic_write, make_folder, write_json
from twoscale.config.run_folder import CARD, TOKENIZER_SETTINGS, RunFolder
from twoscale.config.serial import read_json, read_jsonl, read_steps, to_dict
from twoscale.config.words import group_list, plural
from twoscale.data import Tokenizer
from twoscale.geometry.probe import write_record
from twoscale.interop.load import PREFIX, load, noted_training, progress_of, read_exported, recipe_of
from twoscale.model import LoopedGPT
from twoscale.report.advice import recommend
from twoscale.report.depth_words import depth_sentences
from twoscale.report.words import evaluation_text
from twoscale.tasks.file import load_task
from twoscale.tasks.staircase import load_staircase
from twoscale.tradeoff.load_run import calibrated_exit, name_checkpoint
from twoscale.tradeoff.summary import read_calibration_of, read_evaluation, read_sweep
from twoscale.train import checkpoint as ckpt

CODE = '''"""The model is defined in the package `twoscale`, which must be installed; this file only names its classes."""

from twoscale.interop.hf import TwoscaleConfig, TwoscaleForCausalLM

__all__ = ["TwoscaleConfig", "TwoscaleForCausalLM"]
'''

TRANSFORMERS = """```python
import twoscale.interop.hf  # the package twoscale: makes the model known to transformers; no code of this folder is run
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER")
batch = tokenizer(["The loop", "A state that"], return_tensors="pt", padding=True, return_token_type_ids=False)
print(tokenizer.batch_decode(model.generate(**batch, max_new_tokens=32, loops={loops})))
print(tokenizer.batch_decode(model.generate(**batch, max_new_tokens=32, exit="acceleration:0.05", loops=30)))
"""
OURS = """```python
import twoscale

model, tokenizer = twoscale.load("FOLDER")
gen = twoscale.generate(model, [tokenizer.encode("The loop")], max_new_tokens=32, loops={loops}, temperature=0.7)
print(tokenizer.decode(gen.tokens[0]))
"""

Dtype = Literal["float32", "float16", "bfloat16"]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Source:
    """A model to export: a checkpoint of a run, or a folder that holds a model by itself."""

    run: Path
    """Where its calibration, geometry, sweep and metrics lie: the run, or the model's own folder."""
    folder: Path
    """Where its weights lie."""
    name: str
    model: LoopedGPT
    tokenizer: Tokenizer
    progress: ckpt.Progress
    recipe: TrainConfig | None
    """How it was trained, where that is known."""
    data: DataConfig | None
    """What text it was trained on, where that is known."""

    @property
    def about(self) -> dict[str, Any] | None:
        """The weights by name and fingerprint; None where they lie in several files."""
        return name_checkpoint(self.folder) if ckpt.has_weights(self.folder) else None


def export(run: Path, out: Path, checkpoint: str | None = None, dtype: Dtype = "float32", code: bool = True) -> Path:
    """Write the folder and return it. A folder that holds anything else than an older export is left alone.

    `run` is a run, or any folder that `twoscale.load` takes. Without `code` the result is for `twoscale.load` alone.
    """
    source = _source(run, checkpoint)
    if out.exists() and any(out.iterdir()) and not _exported(out):
        raise UserError(f"{out} is not empty and no earlier export: choose another --out")
    companions = Companions.read(source)
    make_folder(out)
    tensors = {PREFIX + name: t.to(DTYPES[dtype]) for name, t in ckpt.model_tensors(source.model).items()}
    save_file(tensors, out / ckpt.MODEL, metadata={"format": "pt"})
    (out / ckpt.MODEL).chmod(0o644)  # as the files beside it: a model folder is for sharing
    _write_settings(source, out, dtype, code)
    companions.write(out)
    if code:
        _text(out / "modeling_twoscale.py", CODE)
    _text(out / CARD, card(source, sum(t.numel() for t in tensors.values()), code))
    return out


def _source(run: Path, checkpoint: str | None) -> Source:
    if RunFolder(run).is_run:
        folder = ckpt.find_checkpoint(run, checkpoint)
        config = ckpt.load_config(folder)
        data = config.data if config.task == "none" else None
        return Source(run, folder, config.name, *ckpt.load_model(folder), ckpt.read_progress(folder), config.train, data)
    if checkpoint is not None:
        raise UserError(f"--checkpoint {checkpoint}: {run} is a model, not a run with checkpoints; omit --checkpoint")
    model, tokenizer = load(run, dtype="fp32")
    if tokenizer is None:
        raise UserError(f"{run} has no tokenizer.json: put the model's own beside its weights")
    return Source(run, run, run.resolve().name, model, tokenizer, progress_of(run), recipe_of(run), None)


def _write_settings(source: Source, out: Path, dtype: Dtype, code: bool) -> None:
    """config.json, generation_config.json, and the tokenizer's files."""
    tokenizer = source.tokenizer
    classes = {"AutoConfig": "modeling_twoscale.TwoscaleConfig", "AutoModelForCausalLM": "modeling_twoscale.TwoscaleForCausalLM"}
    training = {} if source.recipe is None else {"training": {"progress": to_dict(source.progress), "recipe": to_dict(source.recipe)}}
    if training and not RunFolder(source.run).is_run and "text" in (noted := noted_training(source.folder)):
        training["training"]["text"] = noted["text"]
    write_json(
        out / ckpt.CONFIG,
        {
            "model_type": "twoscale", "architectures": ["TwoscaleForCausalLM"], "dtype": dtype, **({"auto_map": classes} if code else {}),
            "twoscale_version": __version__, "eos_token_id": tokenizer.eot, "pad_token_id": tokenizer.eot,
            "twoscale": to_dict(source.model.config), **training,
        },
    )  # fmt: skip
    write_json(out / "generation_config.json", {"eos_token_id": tokenizer.eot, "pad_token_id": tokenizer.eot})
    end = tokenizer.pipeline.id_to_token(tokenizer.eot)
    tokenizer.save(out)
    write_json(
        out / TOKENIZER_SETTINGS,
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end, "padding_side": "left",
            "model_max_length": source.model.config.block_size, "clean_up_tokenization_spaces": False,
        },
    )  # fmt: skip


@dataclass(frozen=True)
class Companions:
    """What goes along with the weights: calibration, controller, geometry over training, task, staircase, prompts and held-out text."""

    calibration: dict[str, Any] | None = None
    controller: dict[str, Any] | None = None
    geometry: tuple[dict[str, Any], ...] = ()
    task: dict[str, Any] | None = None
    staircase: dict[str, Any] | None = None
    prompts: list[str] | None = None
    heldout: tuple[Path, ...] = ()

    @classmethod
    def read(cls, source: Source) -> "Companions":
        run = RunFolder(source.run)
        calibrated = source.about is not None and calibrated_exit(run.path, source.about, must=False) is not None
        stairs = load_staircase(run.path)
        return cls(
            read_json(run.calibration) if calibrated else None,
            read_json(run.controller) if calibrated and run.controller.exists() else None,
            tuple(r for r in read_steps(run.geometry) if r["step"] <= source.progress.step),
            read_json(run.task) if load_task(run.path) is not None else None,
            read_json(run.staircase) if stairs is not None and stairs.step == source.progress.step else None,
            read_json(run.prompts) if run.prompts.exists() else None,
            tuple(sorted(p for p in run.heldout.glob("*") if p.is_file())),
        )

    def write(self, out: Path) -> None:
        folder = RunFolder(out)
        if self.calibration is not None:
            write_json(folder.calibration, self.calibration | name_checkpoint(out))
        files = {
            folder.controller: self.controller,
            folder.task: self.task,
            folder.staircase: self.staircase,
            folder.prompts: self.prompts,
        }
        for path, value in files.items():
            if value is not None:
                write_json(path, value)
        for file in self.heldout:
            if not (copy := make_folder(folder.heldout) / file.name).exists() or not copy.samefile(file):
                shutil.copyfile(file, copy)
        if self.geometry:
            folder.geometry.unlink(missing_ok=True)
            for record in self.geometry:
                write_record(out, record)


def _exported(folder: Path) -> bool:
    """Whether a folder holds an export."""
    settings = read_json(folder / ckpt.CONFIG) if (folder / ckpt.CONFIG).exists() else None
    return isinstance(settings, dict) and read_exported(settings) is not None


def _text(path: Path, text: str) -> None:
    with atomic_write(path) as f:
        f.write(text.encode())


def _validation(recipe: TrainConfig, mean_loops: int, loss: float) -> str:
    """The loss that training measured, and on what."""
    where = f"{plural(recipe.eval_sequences, 'window')} spread over all held-out text, at {plural(mean_loops, 'loop')}"
    return f"{loss:.4f} nats a token ({where})"


def card(source: Source, parameters: int, code: bool = True) -> str:
    """The model card: the source's own with the usage added, or a new one: what it is, how it was trained, what was measured."""
    m = source.model.config
    usage = (TRANSFORMERS if code else OURS).format(loops=m.mean_loops) + "```\n"
    own = source.run / CARD
    if source.data is None and own.exists():
        text = own.read_text(encoding="utf-8", errors="replace").rstrip() + "\n"
        return text if not code or "AutoModelForCausalLM" in text else f"{text}\n## With transformers\n\n{usage}"
    table = "\n".join(f"| {name} | {value} |" for name, value in _rows(source, parameters))
    sweep = read_sweep(RunFolder(source.run).sweep, m.mean_loops)
    advice = ""
    if sweep is not None and source.about is not None and sweep.header.get("weights") == source.about["weights"]:
        words = recommend(sweep, read_calibration_of(source.run, sweep))[1] if sweep.task is None else "\n\n".join(depth_sentences(sweep))
        advice = f"\n## Leaving early\n\n{words}\n"
    steps, task = len(read_jsonl(RunFolder(source.run).metrics)), load_task(source.run)
    text = "not known" if source.data is None else json.dumps(source.data.source)
    trained_on = f"source of the text: {text}" if task is None else f"trained on the task {task!r}"
    return f"""---
library_name: {"transformers" if code else "twoscale"}
tags: [looped-transformer, recurrent-depth, early-exit, twoscale]
---

# {source.name}

A looped (recurrent-depth) language model, written by `twoscale` {__version__}.

| | |
|---|---|
{table}

{usage}{advice}
## How it was made

{steps:,} logged steps; {trained_on}. Quality and safety were not looked at beyond these figures.
"""


def _rows(source: Source, parameters: int) -> list[tuple[str, str]]:
    """The card's table."""
    m, t, progress = source.model.config, source.recipe, source.progress
    tokens = f"{m.vocab_size:,} in the vocabulary"
    loops = f"loop groups {group_list(m.groups)}; default depth {plural(m.mean_loops, 'loop')}"
    rows = [
        ("parameters", f"{parameters:,}"),
        ("layers", f"{m.n_layer} of width {m.n_embd}, {m.n_head} heads; {loops}"),
        ("context", f"{m.block_size} tokens, {tokens}" + ("" if source.data is None else f" ({source.data.tokenizer})")),
    ]
    if t is not None:
        rows += [
            ("training", f"{progress.step:,} steps, {progress.tokens:,} tokens, {t.optimizer}, seed {t.seed}"),
            ("validation loss", "not measured" if progress.val_loss is None else _validation(t, m.mean_loops, progress.val_loss)),
        ]
    measured = read_evaluation(RunFolder(source.run).evaluation)
    if measured is not None and source.about is not None and measured.get("weights") == source.about["weights"]:
        shown = ", ".join(f"{k}: {v:.4f}" for k, v in measured["cross_entropy_by_loops"].items())
        rows.append(("loss by loops, nats a token", f"{shown} (on {evaluation_text(measured)})"))
    return rows
