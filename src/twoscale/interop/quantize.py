"""`twoscale convert MODEL --dtype int8 --out FOLDER`: a model folder with its weights in fewer bits.

config.json                  settings under `twoscale`, the dtype under `quantization`
model-0000i.safetensors      the weights: matrices in bf16 or int8, everything else in fp32; NAME_scale are the scales of NAME
model.safetensors.index.json which weight is in which file
tokenizer.json, task.json    where the model has them
README.md                    the model card: what was rounded, by how much, and what it cost where the source is a run with held-out text

Weights are read, rounded and written one by one, so the memory needed is about that of one file of SHARD bytes. The folder is written aside
and renamed at the end: it is whole, or not there.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from twoscale import __version__
from twoscale.config import UserError
from twoscale.config.dtypes import WeightDtype
from twoscale.config.files import atomic_write, make_folder, sync, write_json
from twoscale.config.run_folder import CARD, CONFIG, RunFolder
from twoscale.config.serial import to_dict
from twoscale.config.words import group_list, plural
from twoscale.data import Tokenizer
from twoscale.engine.kernels.quantize import empty_inference_model, matrices_of, quantize
from twoscale.interop.fill import SCALE, Content
from twoscale.interop.load import PREFIX, QUANTIZATION, find, read_folder
from twoscale.interop.weights import INDEX
from twoscale.model.quantized import SCALE_BLOCK, Matrix, quantize_matrix
from twoscale.tasks.file import load_task, save_task
from twoscale.tradeoff.evaluate import describe, evaluate
from twoscale.tradeoff.load_run import load_run
from twoscale.train.checkpoint import find_checkpoint

SHARD = 1 << 29  # bytes of a file, about
WINDOWS = 16  # of held-out text, for the cost in the card
MEASURED = 1 << 30  # bytes of the largest model whose cost is measured: this holds it in fp32


@dataclass
class ShardWriter:
    """Writes tensors to files of about SHARD bytes, and their index."""

    folder: Path
    places: dict[str, str] = field(default_factory=dict)
    waiting: dict[str, Tensor] = field(default_factory=dict)
    total: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        self.waiting[name] = tensor.contiguous()
        self.total += tensor.nbytes
        if sum(t.nbytes for t in self.waiting.values()) >= SHARD:
            self.flush()

    def flush(self) -> None:
        if self.waiting:
            path = self.folder / f"model-{len(set(self.places.values())) + 1:05}.safetensors"
            save_file(self.waiting, path, metadata={"format": "pt"})
            path.chmod(0o644)
            sync(path)
            self.places |= dict.fromkeys(self.waiting, path.name)
            self.waiting = {}

    def finish(self) -> None:
        self.flush()
        write_json(self.folder / INDEX, {"metadata": {"total_size": self.total}, "weight_map": self.places})


@dataclass(frozen=True)
class Rounding:
    """How far a matrix moved."""

    name: str
    relative: float
    """||rounded - weight|| / ||weight||"""


@torch.no_grad()
def convert_dtype(source: str | Path, out: Path, dtype: WeightDtype) -> Path:
    """Write the folder and return it."""
    folder = find(source)
    checkpoint = find_checkpoint(folder, None) if RunFolder(folder).is_run else folder
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty: choose another --out")
    if dtype not in ("bf16", "int8"):
        raise UserError(f"--dtype {dtype}: a folder has its weights in bf16 or int8" + (", and w8a8 loads int8" if dtype == "w8a8" else ""))
    content = read_folder(checkpoint)
    if content.quantized:
        raise UserError(f"{folder} was converted to {content.dtype} already: convert the model that it was made of")
    with _written_aside(out) as aside:
        roundings = _write_weights(content, aside, dtype)
        _write_settings(content, checkpoint, folder, aside, dtype)
        with atomic_write(aside / CARD) as f:
            f.write(_card(folder, content, dtype, roundings, measured_cost(folder, checkpoint, dtype)).encode())
    return out


def _write_weights(content: Content, folder: Path, dtype: WeightDtype) -> list[Rounding]:
    matrices, writer, roundings = matrices_of(empty_inference_model(content.config)), ShardWriter(folder), []
    for name in content.by_size():
        for own_name, weight in _halves(name, content.read[name]()):
            if own_name not in matrices:
                writer.add(PREFIX + own_name, weight.float())
                continue
            matrix = quantize_matrix(weight, dtype)
            relative = _relative_error(weight, matrix)
            if not relative < float("inf"):
                raise UserError(f"the weight {own_name} has entries that are not finite: it cannot be rounded")
            roundings.append(Rounding(own_name, relative))
            writer.add(PREFIX + own_name, matrix.values)
            if matrix.scales is not None:
                writer.add(PREFIX + own_name + SCALE, matrix.scales)
    writer.finish()
    return roundings


def _halves(name: str, weight: Tensor | Matrix) -> Iterator[tuple[str, Tensor]]:
    """A weight by its names in `empty_inference_model`."""
    assert isinstance(weight, Tensor)
    if name.endswith(".adapter.weight"):
        for half, columns in zip(("of_state", "of_input"), weight.chunk(2, dim=1), strict=True):
            yield name.replace("weight", f"{half}.weight"), columns
    else:
        yield name, weight


def _relative_error(weight: Tensor, matrix: Matrix) -> float:
    moved = size = 0.0
    first = 0
    for block in matrix.blocks():
        rows = weight[first : first + len(block.values)].float()
        moved += float((block.dequantize() - rows).double().square().sum())
        size += float(rows.double().square().sum())
        first += len(rows)
    return (moved / size) ** 0.5 if size else 0.0


def _write_settings(content: Content, checkpoint: Path, folder: Path, out: Path, dtype: WeightDtype) -> None:
    """config.json, and the tokenizer and the task where there are any."""
    settings: dict[str, Any] = {
        "model_type": "twoscale", "architectures": ["TwoscaleForCausalLM"], "twoscale_version": __version__,
        QUANTIZATION: {"dtype": dtype} | ({"group_size": SCALE_BLOCK} if dtype == "int8" else {}), "twoscale": to_dict(content.config),
    }  # fmt: skip
    if RunFolder(checkpoint).tokenizer.exists():
        tokenizer = Tokenizer.load(checkpoint)
        tokenizer.save(out)
        settings |= {"eos_token_id": tokenizer.eot, "pad_token_id": tokenizer.eot}
    if (task := load_task(RunFolder.of(folder).path)) is not None:
        save_task(out, task)
    write_json(out / CONFIG, settings)


def measured_cost(folder: Path, checkpoint: Path, dtype: WeightDtype) -> str:
    """Rows of the card's table: the change of a run's held-out loss at its default depth. Empty for large models, and without such text."""
    if not RunFolder(folder).is_run or sum(file.stat().st_size for file in checkpoint.iterdir()) > MEASURED:
        return ""
    try:
        run = load_run(folder)
    except UserError:  # its text is somewhere else, or it has no loops
        return ""
    text, loops = run.text("report", WINDOWS), run.model.config.mean_loops
    exact, rounded = (evaluate(model, text, None, loops) for model in (run.model, quantize(run.model, dtype)))
    r = describe(run.model.config, text, rounded, exact, None)
    return (
        f"| change of the loss, {plural(loops, 'loop')} | {r['dce']:+.5f} [{r['dce_low']:+.5f}, {r['dce_high']:+.5f}] nats a token, "
        f"95 % interval over {text.by} ({text.n_asked:,} held-out tokens of {run.source}) |\n"
        f"| the most likely token is the same | {r['agree']:.2%} |\n"
    )


def _card(folder: Path, content: Content, dtype: WeightDtype, roundings: list[Rounding], cost: str) -> str:
    c, worst = content.config, max(roundings, key=lambda r: r.relative)
    mean = (sum(r.relative**2 for r in roundings) / len(roundings)) ** 0.5
    how = "integers from -127 to 127 with a scale for each output and 256 inputs" if dtype == "int8" else "16-bit floating point"
    return f"""---
library_name: twoscale
tags: [looped-transformer, recurrent-depth, early-exit, twoscale, {dtype}]
---

# {folder.resolve().name} in {dtype}

A looped (recurrent-depth) language model, rounded to {dtype} by `twoscale convert` {__version__}: {c.n_layer} layers of width {c.n_embd},
loop groups {group_list(c.groups)}, default depth {plural(c.mean_loops, "loop")}.

All {len(roundings)} weight matrices, embedding and head included, are in {dtype}: {how}. Norms and biases are in fp32.

| cost | |
|---|---|
| change of a matrix, relative to its size | {mean:.2%} (root mean square over matrices) |
| largest change | {worst.relative:.2%}, `{worst.name}` |
{cost}
What rounding does to the loss at other depths and to loop steps: `twoscale bench quantize RUN`.
A calibration of exit rules belongs to a dtype: `twoscale calibrate RUN --dtype {dtype}`.

```python
import twoscale

model, tokenizer = twoscale.load("FOLDER")
```
"""


@contextlib.contextmanager
def _written_aside(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` at the end. What killed conversions to the same place left is removed first."""
    for rest in out.parent.glob(f".{out.name}.*.tmp"):
        pid = rest.name.removesuffix(".tmp").rpartition(".")[2]
        if pid.isdigit() and not _is_running(int(pid)):
            shutil.rmtree(rest, ignore_errors=True)
    aside = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        make_folder(aside)
        yield aside
        if out.exists():
            out.rmdir()
        os.rename(aside, out)
        sync(out.parent)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True
