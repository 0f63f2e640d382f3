"""`twoscale bench train`: speed on this machine, as ratios within one run."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from twoscale.cli.parse import parse
from twoscale.config import UserError, presets

KINDS = ("train",)


@dataclass(frozen=True)
class BenchTrainArgs:
    """Model FLOP/s of training against the square matmul's FLOP/s, measured in one run."""

    preset: Literal["nano", "tiny", "small", "paper"] = "small"
    """Which config to train."""
    steps: int = 12
    """Steps to measure, after three to warm up."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether to compile the blocks."""


def run(args: list[str]) -> int:
    if args and args[0] in ("-h", "--help"):
        print("usage: twoscale bench train [options]\n\n`twoscale bench train --help` lists the options.")
        return 0
    if not args or args[0] not in KINDS:
        raise UserError(f"say what to measure: twoscale bench {' | '.join(KINDS)}")
    return _train(parse(BenchTrainArgs, args[1:], "twoscale bench train"))


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
