"""`twoscale bench train`: model FLOP/s of real training steps against the square matmul's, from one run."""

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from twoscale.bench.timing import timed
from twoscale.config import RunConfig
from twoscale.data import prepare
from twoscale.model.flops import training_flops
from twoscale.train.trainer import Interrupts, Trainer
from twoscale.train.world import World

SQUARE = 1024
WARM_UP = 3


@dataclass(frozen=True)
class TrainBench:
    """What one run measured; rates are medians over steps, interleaved with the matmul."""

    model_flops: float
    """FLOP/s of training steps (forward, backward, optimizer), attention counted over the whole context."""
    causal_flops: float
    """The same with only the causal half of attention counted."""
    matmul_flops: float
    """FLOP/s of a 1024 x 1024 matmul, fp32."""
    tokens_per_s: float
    compiled: bool
    steps: int
    step_flops: tuple[float, ...]
    """FLOPs of each step, with the causal half of attention."""
    step_seconds: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return self.model_flops / self.matmul_flops


def bench_train(config: RunConfig, steps: int = 12) -> TrainBench:
    """Train `steps` steps of the config on built-in text, with a matmul of the same device after each."""
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        prepare(dataclasses.replace(config.data, source="builtin", max_documents=None, max_tokens=None), data)
        trainer = Trainer(config, Path(folder), data, World(0, 1, device))
        rates, squares, costs = [], [], []
        for i in range(WARM_UP + steps):
            seconds = timed(lambda: trainer._step(Interrupts()), device)
            square = _matmul_seconds(device)
            if i >= WARM_UP:
                loops = trainer.loops_at(trainer.progress.step - 1)
                tokens = config.train.batch_size * config.model.block_size
                flops = [tokens * training_flops(config.model, config.model.block_size, loops, causal) for causal in (False, True)]
                rates.append((flops[0] / seconds, flops[1] / seconds, tokens / seconds))
                squares.append(2 * SQUARE**3 / square)
                costs.append((flops[1], seconds))
        full, causal, per_s = (float(x) for x in np.median(np.array(rates), axis=0))
        return TrainBench(full, causal, median(squares), per_s, trainer.compiled, steps, *zip(*costs, strict=True))


def _matmul_seconds(device: torch.device, repeats: int = 10) -> float:
    a = torch.randn(SQUARE, SQUARE, device=device)
    out = torch.empty_like(a)
    return median(timed(lambda: torch.mm(a, a, out=out), device) for _ in range(repeats))
