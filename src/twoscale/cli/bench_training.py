"""`twoscale bench scale` and `bench prepare`: what large runs cost, and how fast text becomes shards."""

from dataclasses import dataclass
from typing import Literal

from twoscale.config import UserError, presets


@dataclass(frozen=True)
class BenchScaleArgs:
    """FLOPs, bytes and hours of large runs by arithmetic (docs/scale-training.md), and the arithmetic beside this machine."""

    share: float = 0.55
    """Share of a large matrix product's FLOP/s that training reaches, as `bench train` measures it."""
    here: Literal["nano", "tiny", "small", "paper"] | None = None
    """Instead: train this preset on this machine; every second step gives the share, the others are foretold and timed."""
    steps: int = 16
    """Steps of that."""


@dataclass(frozen=True)
class BenchPrepareArgs:
    """Tokens a second of `prepare` by number of workers, beside the tokenizer's own speed on one core, measured in one run."""

    megabytes: float = 48.0
    """Text to prepare: the built-in one, repeated."""
    files: int = 32
    """Files that it is in."""
    workers: tuple[int, ...] = (1, 2)
    """Numbers of workers to compare with the first of them."""
    tokenizer: Literal["bytes", "bpe", "gpt2"] = "bpe"
    """Which tokenizer."""
    rounds: int = 3
    """Rounds in which all take turns; medians are reported."""


def scale(args: BenchScaleArgs) -> int:
    from twoscale.bench.scale import here, table

    if not 0 < args.share <= 1 or args.steps < 4:
        raise UserError("--share lies above 0 and up to 1, --steps is at least 4")
    if args.here is None:
        print("\n".join(table(args.share)))
        return 0
    r = here(presets.get(args.here), args.steps)
    print(f"preset {args.here}: {r.share:.2f} of a square matmul's FLOP/s in every second of {args.steps} steps")
    print(f"the other steps   expected {r.expected:8.2f} s   measured {r.measured:8.2f} s   ratio {r.expected / r.measured:.2f}")
    print(f"the whole run on this machine: {r.hours:.2f} hours of computing by the arithmetic")
    return 0


def prepare(args: BenchPrepareArgs) -> int:
    from twoscale.bench.prepare import bench_prepare

    if not 0 < args.megabytes <= 100_000 or not 2 <= args.files <= 9999 or min((args.rounds, *args.workers)) < 1:
        raise UserError("--megabytes lies above 0, --files between 2 and 9999; --workers and --rounds are at least 1")
    r = bench_prepare(args.megabytes, args.files, args.workers, args.tokenizer, args.rounds)
    about = f"{r.text_bytes / 1e6:.1f} MB of text in {args.files} files, tokenizer {args.tokenizer}, {r.tokens:,} tokens"
    print(f"{about}; medians of {args.rounds} rounds")
    own = r.tokens / r.tokenizer_s
    print(f"the tokenizer alone   {own:12,.0f} tokens/s on one core")
    first = r.workers_s[args.workers[0]]
    for count, seconds in r.workers_s.items():
        rate = r.tokens / seconds
        words = f"{rate / count:,.0f} a core ({rate / count / own:.2f} of the tokenizer's), {first / seconds:.2f}x"
        print(f"prepare, {count:2} worker{'s' if count > 1 else ' '}   {rate:12,.0f} tokens/s, {words}")
    return 0
