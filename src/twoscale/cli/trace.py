"""`twoscale trace RUN`: measure the loops' geometry of a run's checkpoints on its held-out text.

twoscale trace runs/tiny
twoscale trace runs/tiny --all --sequences 64
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from twoscale.cli.parse import options, parse, say
from twoscale.cli.runs import as_run


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
    parsed = parse(TraceArgs, args, "twoscale trace")

    from twoscale.geometry.run import measure_run

    measure_run(as_run(parsed.run), **options(parsed), progress=say)
    return 0
