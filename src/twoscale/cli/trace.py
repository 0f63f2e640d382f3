"""`twoscale trace RUN`: measure the loops' geometry of a run's checkpoints on its held-out text.

twoscale trace runs/tiny
twoscale trace runs/tiny --all --sequences 64
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from twoscale.cli.parse import parse, say
from twoscale.cli.runs import on_run
from twoscale.config import UserError
from twoscale.config.lock import lock
from twoscale.config.model import MAX_LOOPS
from twoscale.config.words import group_label, plural


@dataclass(frozen=True)
class TraceArgs:
    """Measure step norms, cosines, accelerations, drift, verdicts, contraction and trajectories; written to RUN/geometry.jsonl."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run, or `bundled`."""
    checkpoint: str | None = None
    """Which checkpoint (for example step-000120); the newest by default."""
    all: bool = False
    """Every checkpoint of the run."""
    loops: int | None = None
    """Loop steps to trace; by default as many as training measured (30)."""
    limit_loops: int = 64
    """Loop steps after which a state is taken for its limit."""
    sequences: int | None = None
    """Held-out sequences to measure on; by default those that training measured on."""
    data_dir: Path | None = None
    """Shards to take the held-out text from; by default the run's own."""


def run(args: list[str]) -> int:
    trace_run(on_run(parse(TraceArgs, args, "twoscale trace")))
    return 0


def trace_run(args: TraceArgs) -> None:
    from twoscale.geometry.probe import measure_checkpoint, trace_sequence
    from twoscale.train.checkpoint import find_checkpoint, list_checkpoints
    from twoscale.train.run import find_data

    numbers = [n for n in (args.loops, args.limit_loops) if n is not None]
    if min(numbers) < 1 or max(numbers) > MAX_LOOPS or (args.sequences is not None and args.sequences < 1):
        raise UserError(f"--loops and --limit-loops lie between 1 and {MAX_LOOPS}, --sequences is at least 1")
    folders = list_checkpoints(args.run / "checkpoints") if args.all else []
    folders = folders or [find_checkpoint(args.run, args.checkpoint)]
    data = find_data(args.run, args.data_dir)
    with lock(args.run, "trace"):
        for i, folder in enumerate(folders, start=1):
            record = measure_checkpoint(args.run, folder, data, args.loops, args.sequences, args.limit_loops)
            shares = ", ".join(f"{group_label(n, g['name'])} {g['verdict']}" for n, g in enumerate(record["groups"]))
            tokens = f"{plural(record['tokens'], 'token')} of held-out text of {record['source']}"
            say(f"{i}/{len(folders)} {folder.name}: {tokens} in {record['seconds']:.1f} s; most tokens: {shares}")
        trace_sequence(args.run, folders[-1], data, args.loops)
