"""Short runs, and runs of the nano preset in processes of their own."""

import dataclasses
import time
from pathlib import Path

from conftest import nano_run
from forked import Forked
from twoscale.config import HopsConfig, RunConfig, TrainConfig, presets
from twoscale.config.serial import read_jsonl


def tiny_hops(**train: object) -> RunConfig:
    """Two steps on a tiny hops, with these training settings."""
    base, task = presets.hops(), HopsConfig(4, 3, 2)
    model = dataclasses.replace(base.model, vocab_size=task.vocab_size, block_size=task.length, n_embd=16, n_head=2, mean_loops=3)
    settings: dict[str, object] = {
        "steps": 2, "warmup_steps": 1, "decay_steps": 1, "loops_ramp": 0, "batch_size": 4, "eval_sequences": 4, "staircase_samples": 8,
    }  # fmt: skip
    return dataclasses.replace(base, model=model, train=dataclasses.replace(base.train, **(settings | train)), hops=task)  # type: ignore[arg-type]


def losses(run: Path) -> list[float]:
    records = read_jsonl(run / "metrics.jsonl")
    assert [r["step"] for r in records] == list(range(1, len(records) + 1))
    return [r["loss"] for r in records]


def arguments(config: RunConfig, out: Path, shards: Path) -> list[str]:
    """The command line of a nano run with these training settings."""
    words = ["train", "--preset", "nano", "--out", str(out), "--data-dir", str(shards)]
    base = nano_run().train
    for f in dataclasses.fields(TrainConfig):
        value = getattr(config.train, f.name)
        if value != getattr(base, f.name):
            words += [f"--train.{f.name.replace('_', '-')}", *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return words


def finish(process: Forked, code: int = 0) -> str:
    """Wait for a command's end; its messages."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, out + err
    return err


def wait_for_step(run: Path, step: int) -> None:
    for _ in range(3000):
        if len(read_jsonl(run / "metrics.jsonl")) >= step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was never reached")
