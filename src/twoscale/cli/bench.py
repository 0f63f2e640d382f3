"""`twoscale bench train | trace`: speed on this machine, as ratios within one run."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from twoscale.cli.parse import parse
from twoscale.config import UserError, presets

KINDS = ("train", "trace")


@dataclass(frozen=True)
class BenchTrainArgs:
    """Model FLOP/s of training against the square matmul's FLOP/s, measured in one run."""

    preset: Literal["nano", "tiny", "small", "paper"] = "small"
    """Which config to train."""
    steps: int = 12
    """Steps to measure, after three to warm up."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether to compile the blocks."""


@dataclass(frozen=True)
class BenchTraceArgs:
    """The cost of tracing and of all statistics, beside a plain forward pass of the same loops, measured in one run."""

    preset: Literal["nano", "tiny", "small", "paper"] = "tiny"
    """Which model to trace, with random weights."""
    sequences: int = 16
    """Sequences at full context."""
    loops: int = 30
    """Loop steps."""
    repeats: int = 7
    """Interleaved repeats; medians are reported."""


def run(args: list[str]) -> int:
    if args and args[0] in ("-h", "--help"):
        print(f"usage: twoscale bench {' | '.join(KINDS)} [options]\n\n`twoscale bench train --help` lists the options of one bench.")
        return 0
    if not args or args[0] not in KINDS:
        raise UserError(f"say what to measure: twoscale bench {' | '.join(KINDS)}")
    if args[0] == "trace":
        return _trace(parse(BenchTraceArgs, args[1:], "twoscale bench trace"))
    return _train(parse(BenchTrainArgs, args[1:], "twoscale bench train"))


def _trace(args: BenchTraceArgs) -> int:
    from twoscale.bench.trace import bench_trace

    if min(args.sequences, args.loops, args.repeats) < 1:
        raise UserError("--sequences, --loops and --repeats are at least 1")
    r = bench_trace(presets.get(args.preset).model, args.sequences, args.loops, args.repeats)
    print(f"preset {args.preset}, {r.tokens} tokens, {r.loops} loops, median of {args.repeats} interleaved repeats")
    print(f"plain forward             {r.forward_s * 1e3:8.0f} ms")
    print(f"trace, states stored      {r.trace_s * 1e3:8.0f} ms  {r.trace_s / r.forward_s:.2f}x")
    print(f"all statistics, streamed  {r.measure_s * 1e3:8.0f} ms  {r.measure_s / r.forward_s:.2f}x")
    return 0


def _train(args: BenchTrainArgs) -> int:
    from twoscale.bench.train import bench_train

    if args.steps < 1:
        raise UserError(f"--steps {args.steps}: at least 1")
    config = presets.get(args.preset)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, compile=args.compile))
    result = bench_train(config, args.steps)
    blocks = "compiled" if result.compiled else "not compiled"
    print(f"preset {args.preset}, {config.train.optimizer}, blocks {blocks}, median of {result.steps} steps")
    print(f"model          {result.model_flops / 1e9:8.1f} GFLOP/s  ({result.tokens_per_s:.0f} tokens/s)")
    print(f"square matmul  {result.matmul_flops / 1e9:8.1f} GFLOP/s")
    print(f"ratio          {result.ratio:8.2f}")
    print(f"with only the causal half of attention counted: {result.causal_flops / result.matmul_flops:.2f}")
    return 0
