"""`twoscale trace RUN`: measure the loops' geometry of a run's checkpoints on its held-out text.

twoscale trace runs/tiny
twoscale trace runs/tiny --all --sequences 64
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from twoscale.cli.parse import parse, say
from twoscale.config import UserError


@dataclass(frozen=True)
class TraceArgs:
    """Measure step norms, cosines, accelerations, drift, verdicts, contraction and trajectories; written to RUN/geometry.jsonl."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    checkpoint: str | None = None
    """Which checkpoint (for example step-000120); the newest by default."""
    all: bool = False
    """Every checkpoint of the run."""
    loops: int = 30
    """Loop steps to trace."""
    limit_loops: int = 64
    """Loop steps after which a state is taken for its limit."""
    sequences: int = 16
    """Held-out sequences to measure on."""
    data_dir: Path | None = None
    """Shards to take the held-out text from; RUN/data by default."""


def run(args: list[str]) -> int:
    trace_run(parse(TraceArgs, args, "twoscale trace"))
    return 0


def trace_run(args: TraceArgs) -> None:
    from twoscale.geometry.probe import measure_checkpoint, trace_sequence
    from twoscale.train.checkpoint import list_checkpoints, newest_checkpoint

    if not args.run.is_dir():
        raise UserError(f"{args.run} is no folder: give a run")
    if min(args.loops, args.limit_loops, args.sequences) < 1 or max(args.loops, args.limit_loops) > 10_000:
        raise UserError("--loops and --limit-loops lie between 1 and 10000, --sequences is at least 1")
    root = args.run / "checkpoints"
    newest = newest_checkpoint(root)
    if newest is None:
        raise UserError(f"{args.run} has no checkpoint yet: train it first")
    chosen = root / Path(args.checkpoint).name if args.checkpoint else newest
    folders = list_checkpoints(root) if args.all else [chosen]
    if not all(f.is_dir() for f in folders):
        raise UserError(f"{chosen} does not exist (checkpoints of this run: {', '.join(p.name for p in list_checkpoints(root))})")
    data = args.data_dir or args.run / "data"
    for i, folder in enumerate(folders, start=1):
        record = measure_checkpoint(args.run, folder, data, args.loops, args.sequences, args.limit_loops)
        shares = ", ".join(f"{g['name']} {g['verdict']}" for g in record["groups"])
        say(f"{i}/{len(folders)} {folder.name}: {record['tokens']} tokens in {record['seconds']:.1f} s; groups {shares}")
    trace_sequence(args.run, folders[-1], data, args.loops)
