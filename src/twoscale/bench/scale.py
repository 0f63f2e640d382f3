"""`twoscale bench scale`: the arithmetic of large runs, and how well it holds on this machine."""

from dataclasses import dataclass, replace
from statistics import median

from twoscale.bench.train import TrainBench, bench_train
from twoscale.config import ModelConfig, RunConfig, presets
from twoscale.train.cost import H100, Machine, cost

SHARE = 0.55  # of a square matrix product's FLOP/s, as `bench train` measured it for `small` (causal half of attention counted)
ONE_B = ModelConfig(n_layer=18, n_head=16, n_embd=2048, block_size=2048, groups=(tuple(range(5, 13)),), mean_loops=4)
HEAD = (
    "| run | GPUs | sharding | sequences a step | steps | EFLOPs | GB exchanged a step | checkpoint, GB | state a GPU, GB | activations a "
    "sequence, GB | hours |"
)


@dataclass(frozen=True)
class Run:
    """A line of the table."""

    name: str
    model: ModelConfig
    tokens: float
    batch_size: int
    devices: int
    parallel: str
    micro_batches: int = 1


def runs() -> list[Run]:
    paper = presets.paper().model
    return [
        Run("paper", paper, 307.2e6, 80, 8, "ddp"),
        Run("paper", paper, 307.2e6, 64, 64, "ddp"),
        Run("1B", ONE_B, 100e9, 512, 8, "fsdp", 16),
        Run("1B", ONE_B, 100e9, 512, 64, "fsdp", 2),
        Run("1B", ONE_B, 100e9, 512, 64, "hsdp", 2),
    ]


def table(share: float = SHARE, machine: Machine = H100) -> list[str]:
    """The table of docs/scale-training.md."""
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    for run in runs():
        c = cost(run.model, run.tokens, run.batch_size, machine, run.devices, share, run.parallel, run.micro_batches)
        least, most = c.hours
        sizes = " | ".join(f"{size / 1e9:.2f}" for size in (c.exchanged, c.checkpoint, c.state, c.activations))
        first = f"{run.name}, {run.tokens / 1e9:.3g}B tokens | {run.devices} | {run.parallel} | {run.batch_size}"
        lines.append(f"| {first} | {c.steps:,} | {c.flops / 1e18:,.1f} | {sizes} | {least:,.2f} to {most:,.2f} |")
    return lines


@dataclass(frozen=True)
class Here:
    """The arithmetic beside a measurement on this machine."""

    share: float
    """Of the square matrix product's FLOP/s, from every second step."""
    expected: float
    """Seconds of the other steps by the arithmetic, with that share and the loops that they drew."""
    measured: float
    hours: float
    """Of the preset's whole run on this machine, by the arithmetic."""
    bench: TrainBench


def here(config: RunConfig, steps: int) -> Here:
    """Train some steps; every second one gives the share, the others are foretold and timed."""
    found = bench_train(config, max(4, steps))
    rates = [flops / seconds for flops, seconds in zip(found.step_flops, found.step_seconds, strict=True)]
    rate = median(rates[::2])
    machine = replace(H100, name="this machine", flops=found.matmul_flops, matmul=1.0, node=1)
    tokens = float(config.train.steps * config.train.batch_size * config.model.block_size)
    share = rate / found.matmul_flops
    whole = cost(config.model, tokens, config.train.batch_size, machine, 1, share, "ddp")
    return Here(share, sum(found.step_flops[1::2]) / rate, sum(found.step_seconds[1::2]), whole.compute_hours, found)
