"""Shards train a model: the loop, the optimizers, the processes, the checkpoints."""

from twoscale.train.run import start_run
from twoscale.train.trainer import Diverged, Trainer, TrainResult

__all__ = ["Diverged", "TrainResult", "Trainer", "start_run"]
