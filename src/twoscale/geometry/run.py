"""`twoscale trace RUN`: the geometry of a run's checkpoints on its held-out text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from twoscale.config import UserError
from twoscale.config.lock import lock
from twoscale.config.model import MAX_LOOPS
from twoscale.config.run_folder import RunFolder
from twoscale.config.words import group_label, plural
from twoscale.geometry.probe import measure_checkpoint, trace_sequence
from twoscale.tasks.file import load_task
from twoscale.train.checkpoint import find_checkpoint, list_checkpoints
from twoscale.train.run import find_data


def measure_run(
    run: Path,
    *,
    checkpoint: str | None = None,
    all: bool = False,
    loops: int | None = None,
    limit_loops: int = 64,
    sequences: int | None = None,
    data_dir: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    """Measure the newest checkpoint (or the one named, or all), and write one held-out sequence in full; returns the lines of
    RUN/geometry.jsonl that were written.

    `loops` steps are traced on `sequences` held-out windows, by default as training measured; a state after `limit_loops` steps is taken
    for its limit.
    """
    numbers = [n for n in (loops, limit_loops) if n is not None]
    if min(numbers) < 1 or max(numbers) > MAX_LOOPS or (sequences is not None and sequences < 1):
        raise UserError(f"--loops and --limit-loops lie between 1 and {MAX_LOOPS}, --sequences is at least 1")
    folders = list_checkpoints(RunFolder(run).checkpoints) if all else []
    folders = folders or [find_checkpoint(run, checkpoint)]
    task = load_task(run)
    if task is not None and data_dir is not None:
        raise UserError(f"--data-dir {data_dir}: {run} was trained on the task {task.name}, which makes its own samples; omit it")
    data, records = task or find_data(run, data_dir), []
    with lock(run, "trace"):
        for i, folder in enumerate(folders, start=1):
            record = measure_checkpoint(run, folder, data, loops, sequences, limit_loops)
            records.append(record)
            if progress is not None:
                shares = ", ".join(f"{group_label(n, g['name'])} {g['verdict']}" for n, g in enumerate(record["groups"]))
                kind = "text" if task is None else "samples"
                tokens = f"{plural(record['tokens'], 'token')} of held-out {kind} of {record['source']}"
                progress(f"{i}/{len(folders)} {folder.name}: {tokens} in {record['seconds']:.1f} s; most tokens: {shares}")
        trace_sequence(run, folders[-1], data, loops)
    return records
