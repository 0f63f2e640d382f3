"""Which settings of a run may change while it goes on, and what differs between two configs."""

from pathlib import Path
from typing import Any

from twoscale.config import RunConfig, UserError
from twoscale.config.run_folder import CONFIG
from twoscale.config.serial import to_dict

# What may change between two starts of one run without changing what it computes.
OPERATIONAL = {
    "train.eval_interval", "train.eval_sequences", "train.checkpoint_interval", "train.keep_last", "train.milestones", "train.compile",
    "train.geometry_interval", "train.geometry_sequences", "train.geometry_loops", "train.parallel", "train.shard_degree",
    "train.checkpoint_format", "train.tracker",
    "train.micro_batch_size", "train.staircase_loops", "train.staircase_samples", "data.shard_tokens", "data.max_document_mb", "name",
}  # fmt: skip


def differences(old: RunConfig, new: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Settings in which two configs differ, by dotted name."""
    a, b = flat(to_dict(old)), flat(to_dict(new))
    order = sorted(a, key=lambda name: name not in ("name", "task"))  # a task instead of text says more than a size that follows from it
    return {name: (a[name], b[name]) for name in order if a[name] != b[name]}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def check_same(old: RunConfig, new: RunConfig, run: Path) -> None:
    """Refuse to mix two different runs in one folder; the first difference is named."""
    for name, (theirs, here) in differences(old, new).items():
        if name not in OPERATIONAL:
            raise UserError(
                f"{run} holds a run with other settings ({name} is {theirs!r} there and {here!r} here): "
                f"choose another --out, or go on with its own settings by --resume {run}"
            )


def check_checkpoint(saved: RunConfig, config: RunConfig, checkpoint: Path) -> None:
    """Refuse to go on from a checkpoint with other settings than it was saved with: the run's config.json was edited since."""
    run = checkpoint.parent.parent
    for name, (theirs, here) in differences(saved, config).items():
        if name not in OPERATIONAL:
            raise UserError(
                f"{name} is {here!r} in {run / CONFIG} and {theirs!r} in {checkpoint.name}, from which the run would go on: set it "
                f"back; to train these weights with other settings: twoscale train --init {run} --out ANOTHER"
            )
