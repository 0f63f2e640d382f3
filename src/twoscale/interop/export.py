"""`twoscale export`: a run as a folder that transformers, and `twoscale.load`, open.

config.json             settings under `twoscale`, and what transformers looks for
model.safetensors       the weights, named model.NAME
modeling_twoscale.py    three lines that import the package: the model is defined in one place
tokenizer.json, tokenizer_config.json, generation_config.json
calibration.json, controller.json, geometry.jsonl    where the run has them
README.md               the model card
"""

import json
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from twoscale import __version__
from twoscale.config import RunConfig, UserError
from twoscale.config.files import atomic_write, make_folder, write_json
from twoscale.config.serial import read_json, read_jsonl, read_steps, to_dict
from twoscale.geometry.probe import GEOMETRY, write_record
from twoscale.report.verdict import recommend
from twoscale.tradeoff.open import calibrated_exit, name_checkpoint
from twoscale.tradeoff.summary import CALIBRATION, CONTROLLER, EVALUATION, SWEEP, read_evaluation, read_sweep
from twoscale.train import checkpoint as ckpt

PREFIX = "model."
CODE = '''"""The model is defined in the package `twoscale` (pip install 'twoscale[hf]'); this file only names its classes."""

from twoscale.interop.hf import TwoscaleConfig, TwoscaleForCausalLM

__all__ = ["TwoscaleConfig", "TwoscaleForCausalLM"]
'''

TRANSFORMERS = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)  # needs the package twoscale
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


def export(run: Path, out: Path, checkpoint: str | None = None, dtype: Dtype = "float32", code: bool = True) -> Path:
    """Write the folder and return it. A folder that holds anything else than an older export is left alone.

    Without `code` it is for `twoscale.load` alone.
    """
    folder = ckpt.find_checkpoint(run, checkpoint)
    config = ckpt.load_config(folder)
    model, tokenizer = ckpt.load_model(folder)
    if out.exists() and any(out.iterdir()) and not _exported(out):
        raise UserError(f"{out} is not empty and no earlier export: choose another --out")
    make_folder(out)
    tensors = {PREFIX + name: t.to(DTYPES[dtype]) for name, t in ckpt.model_tensors(model).items()}
    save_file(tensors, out / ckpt.MODEL, metadata={"format": "pt"})
    (out / ckpt.MODEL).chmod(0o644)  # as the files beside it: a model folder is for sharing
    progress = ckpt.read_progress(folder)
    classes = {"AutoConfig": "modeling_twoscale.TwoscaleConfig", "AutoModelForCausalLM": "modeling_twoscale.TwoscaleForCausalLM"}
    write_json(
        out / ckpt.CONFIG,
        {
            "model_type": "twoscale", "architectures": ["TwoscaleForCausalLM"], "dtype": dtype, **({"auto_map": classes} if code else {}),
            "twoscale_version": __version__, "eos_token_id": tokenizer.eot, "pad_token_id": tokenizer.eot,
            "twoscale": to_dict(config.model), "training": {"progress": to_dict(progress), "recipe": to_dict(config.train)},
        },
    )  # fmt: skip
    write_json(out / "generation_config.json", {"eos_token_id": tokenizer.eot, "pad_token_id": tokenizer.eot})
    end = tokenizer.pipeline.id_to_token(tokenizer.eot)
    tokenizer.save(out)
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end, "padding_side": "left",
            "model_max_length": config.model.block_size, "clean_up_tokenization_spaces": False,
        },
    )  # fmt: skip
    if calibrated_exit(run, name_checkpoint(folder), must=False) is not None:
        found = read_json(run / CALIBRATION)
        write_json(out / CALIBRATION, found | name_checkpoint(out))
        if (run / CONTROLLER).exists():
            shutil.copyfile(run / CONTROLLER, out / CONTROLLER)
    if records := [r for r in read_steps(run / GEOMETRY) if r["step"] <= progress.step]:
        (out / GEOMETRY).unlink(missing_ok=True)
        for record in records:
            write_record(out, record)
    if code:
        _text(out / "modeling_twoscale.py", CODE)
    _text(out / "README.md", card(run, folder, config, sum(t.numel() for t in tensors.values()), code))
    return out


def _exported(folder: Path) -> bool:
    """Whether a folder holds an export."""
    given = read_json(folder / ckpt.CONFIG) if (folder / ckpt.CONFIG).exists() else None
    return isinstance(given, dict) and read_exported(given) is not None


def _text(path: Path, text: str) -> None:
    with atomic_write(path) as f:
        f.write(text.encode())


def card(run: Path, folder: Path, config: RunConfig, parameters: int, code: bool = True) -> str:
    """The model card: what it is, how it was trained, what was measured."""
    m, t, progress = config.model, config.train, ckpt.read_progress(folder)
    groups = ", ".join("-".join(dict.fromkeys((str(g[0]), str(g[-1])))) for g in m.groups) or "none"
    rows = [
        ("parameters", f"{parameters:,}"),
        ("layers", f"{m.n_layer} of width {m.n_embd}, {m.n_head} heads; loop groups {groups}, mean loops {m.mean_loops}"),
        ("context", f"{m.block_size} tokens, {m.vocab_size:,} in the vocabulary ({config.data.tokenizer})"),
        ("training", f"{progress.step:,} steps, {progress.tokens:,} tokens, {t.optimizer}, seed {t.seed}"),
        ("validation loss", "not measured" if progress.val_loss is None else f"{progress.val_loss:.4f} nats a token"),
    ]
    measured = read_evaluation(run / EVALUATION)
    if measured is not None and measured.get("weights") == name_checkpoint(folder)["weights"]:
        loops = measured["cross_entropy_by_loops"]
        rows.append(("held-out loss by loops", ", ".join(f"{k}: {v:.4f}" for k, v in loops.items())))
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    sweep = read_sweep(run / SWEEP)
    advice = ""
    if sweep is not None and sweep.header.get("weights") == name_checkpoint(folder)["weights"]:
        advice = f"\n## Leaving early\n\n{recommend(sweep)[1]}\n"
    steps = len(read_jsonl(run / "metrics.jsonl"))
    usage = (TRANSFORMERS if code else OURS).format(loops=m.mean_loops)
    return f"""---
library_name: {"transformers" if code else "twoscale"}
tags: [looped-transformer, recurrent-depth, early-exit, twoscale]
---

# {config.name}

A looped (recurrent-depth) language model, trained with `twoscale` {__version__}.

| | |
|---|---|
{table}

{usage}```
{advice}
## How it was made

{steps:,} logged steps; source of the text: {json.dumps(config.data.source)}. Quality and safety were not looked at beyond these figures.
"""


def read_exported(given: dict[str, Any]) -> dict[str, Any] | None:
    """The model's settings in the config.json of an exported folder; None where it is none."""
    inside = given.get("twoscale")
    return inside if given.get("model_type") == "twoscale" and isinstance(inside, dict) else None
