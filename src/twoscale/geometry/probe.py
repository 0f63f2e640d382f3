"""Geometry over training and of checkpoints: lines of geometry.jsonl, and one sequence in full for the report."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.config.files import atomic_write, make_folder, write_json
from twoscale.config.lock import lock
from twoscale.config.run_folder import RunFolder
from twoscale.config.serial import read_steps
from twoscale.data import TokenData, Tokenizer, held_out, source_name
from twoscale.geometry.pca import pca
from twoscale.geometry.record import group_names, measure, measure_limit
from twoscale.geometry.steps import VERDICTS, verdicts
from twoscale.tasks.task import Task
from twoscale.tracing import Trace, trace
from twoscale.train import Trainer, checkpoint as ckpt

SEQUENCE_TOKENS = 64
TRACKED_STEPS = (1, 2, 4, 8, 16)
SHOWN_TOKENS = 6


def write_record(run: Path, record: dict[str, Any]) -> None:
    """Put a record into geometry.jsonl in the order of steps; it takes the place of an older one of the same step."""
    with lock(run, "geometry", wait=True):  # training and `trace` may both have something to add
        others = [r for r in read_steps(RunFolder(run).geometry) if r["step"] != record["step"]]
        records = sorted([*others, record], key=lambda r: r["step"])
        with atomic_write(RunFolder(run).geometry) as f:
            f.write("".join(json.dumps(_rounded(r)) + "\n" for r in records).encode())


def probe_geometry(trainer: Trainer) -> None:
    """A Trainer's probe: the statistics on a few held-out sequences. Every process computes, the first one writes."""
    c = trainer.config.train
    if not trainer.config.model.n_groups:
        return
    started = time.perf_counter()
    ids = trainer.source.heldout(c.geometry_sequences)[0]
    record = measure(trainer.model, ids, c.geometry_loops, run=trainer.evaluated)
    if trainer.world.main:
        write_record(trainer.run, _about(trainer.config, trainer.progress, record, started, trainer.source.name))
        trainer.track(tracked(record))


def tracked(record: dict[str, Any]) -> dict[str, float]:
    """What a tracker shows of a measurement: for each group the mean step norm, cosine and acceleration after some steps, and the drift.

    Keys: geometry/step_norm/GROUP/k=4, and geometry/dlr_settled/FROM_TO for the reading without the step that leaves the noise.
    """
    values: dict[str, float | None] = {}
    for group in record["groups"]:
        for name, first in (("step_norm", 0), ("step_cosine", 1), ("acceleration", 1)):
            means = group.get(name, {}).get("mean", [])
            values |= {f"geometry/{name}/{group['name']}/k={k}": means[k - first] for k in TRACKED_STEPS if first <= k < len(means) + first}
    for boundary in record["boundaries"]:
        values[f"geometry/dlr_settled/{boundary['from']}_{boundary['to']}"] = boundary["dlr"].get("settled_k1", {}).get("mean")
    return {key: value for key, value in values.items() if value is not None}


def measure_checkpoint(
    run: Path, folder: Path, data: Path | Task, loops: int | None, sequences: int | None, limit_loops: int
) -> dict[str, Any]:
    """Everything that is measured of one checkpoint, written to geometry.jsonl; returns the record.

    Without `loops` and `sequences` it is measured on the very windows, and as deep, as training measured.
    """
    started = time.perf_counter()
    config, progress = ckpt.load_config(folder), ckpt.read_progress(folder)
    model, tokenizer = ckpt.load_model(folder)
    ids = _windows(data, config.model.block_size, sequences or config.train.geometry_sequences, tokenizer)
    record = measure(model, ids, loops or config.train.geometry_loops)
    for group, limit in zip(record["groups"], measure_limit(model, ids, limit_loops), strict=True):
        group["limit"] = limit
    record = _about(config, progress, record, started, data.name if isinstance(data, Task) else source_name(data))
    write_record(run, record)
    return record


def trace_sequence(run: Path, folder: Path, data: Path | Task, loops: int | None) -> None:
    """One held-out sequence in full: states, tokens, each token's verdict, and trajectories in a common space."""
    model, tokenizer = ckpt.load_model(folder)
    loops = loops or ckpt.load_config(folder).train.geometry_loops
    length = min(SEQUENCE_TOKENS, model.config.block_size)
    ids = _windows(data, model.config.block_size, 1, tokenizer)[:, :length]
    traced = trace(model, ids, loops=loops)
    make_folder(RunFolder(run).sequence.parent)
    traced.save(RunFolder(run).sequence_states)
    about = {"step": ckpt.read_progress(folder).step, "loops": loops, "optimizer": ckpt.load_config(folder).train.optimizer}
    write_json(RunFolder(run).sequence, _rounded(about | sequence_record(traced, tokenizer)))


def sequence_record(traced: Trace, tokenizer: Tokenizer) -> dict[str, Any]:
    """What the report shows of one traced sequence, as plain numbers."""
    flat = [x[:, 0] for x in traced.states]  # (K+1, T, C)
    stages = torch.stack([x[0] for x in traced.stages])  # (S+1, T, C)
    plane = pca([*flat, stages], n=3)
    T = traced.ids.shape[1]
    shown = sorted(set(torch.linspace(T // 8, T - 1, min(SHOWN_TOKENS, T)).long().tolist()))
    paths = []
    for t in shown:
        groups = [plane.points[g][:, t].tolist() for g in range(len(flat))]
        paths.append({"token": t, "groups": groups, "stages": plane.points[-1][:, t].tolist()})
    return {
        "tokens": [tokenizer.decode([i]) for i in traced.ids[0].tolist()],
        "groups": group_names(traced.layers),
        "stage_of_group": traced.stage_of_group,
        "verdict_names": list(VERDICTS),
        "verdicts": [verdicts(x).tolist() for x in flat],
        "pca": {"explained": plane.explained.tolist(), "paths": paths},
    }


def _windows(data: Path | Task, block_size: int, sequences: int, tokenizer: Tokenizer) -> Tensor:
    """Held-out windows of text, or samples of a task."""
    if isinstance(data, Task):
        return data.heldout(sequences).ids
    text = TokenData(data, "val")
    if text.tokenizer != tokenizer.fingerprint:
        raise UserError(f"{data} was made with another tokenizer than this model's: give its own shards with --data-dir")
    return held_out(text, block_size, sequences)[0]


def _about(config: Any, progress: ckpt.Progress, record: dict[str, Any], started: float, source: str) -> dict[str, Any]:
    """A record with what it was measured on."""
    head = {"step": progress.step, "trained_tokens": progress.tokens, "optimizer": config.train.optimizer, "source": source}
    return head | {"seconds": time.perf_counter() - started} | record


def _rounded(value: Any) -> Any:
    """Six significant digits are plenty for a statistic."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value
