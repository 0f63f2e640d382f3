"""`twoscale bench trace`: what tracing costs beside a plain forward pass of the same loops, statistics included."""

from dataclasses import dataclass

import torch

from twoscale.bench.timing import interleaved
from twoscale.geometry import measure
from twoscale.model import LoopedGPT, StateNoise
from twoscale.tracing import trace


@dataclass(frozen=True)
class TraceBench:
    """Median seconds of one pass over the same tokens."""

    forward_s: float
    trace_s: float
    """Storing all states."""
    measure_s: float
    """All statistics, states forgotten chunk by chunk."""
    tokens: int
    loops: int


def bench_trace(model: LoopedGPT, sequences: int = 16, loops: int = 30, repeats: int = 7) -> TraceBench:
    """Random tokens at full context; plain pass, stored trace and streamed statistics in turn."""
    config, device = model.config, next(model.parameters()).device
    ids = torch.randint(0, config.vocab_size, (sequences, config.block_size), generator=torch.Generator().manual_seed(0)).to(device)

    @torch.no_grad()
    def plain() -> None:
        model.head(model.hidden(ids, loops=loops, noise=StateNoise())[0])

    works = {"plain": plain, "trace": lambda: trace(model, ids, loops=loops), "measure": lambda: measure(model, ids, loops)}
    seconds = interleaved(works, repeats, warm=1, device=device)
    return TraceBench(seconds["plain"], seconds["trace"], seconds["measure"], ids.numel(), loops)
