"""Shards train a model: the loop, the optimizers, the processes, the checkpoints."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twoscale.train.run import start_run
    from twoscale.train.trainer import Diverged, Trainer, TrainResult

__all__ = ["Diverged", "TrainResult", "Trainer", "start_run"]


def __getattr__(name: str) -> Any:
    """Imported when first used: reading a checkpoint needs neither the trainer nor torch.distributed."""
    if name not in __all__:
        raise AttributeError(f"module 'twoscale.train' has no attribute {name!r}")
    return getattr(importlib.import_module("twoscale.train.run" if name == "start_run" else "twoscale.train.trainer"), name)
