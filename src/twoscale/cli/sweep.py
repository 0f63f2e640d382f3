"""`twoscale sweep RUN`: what every exit rule saves and costs, beside fixed depths, random exits and two oracles.

twoscale sweep runs/tiny
twoscale sweep hops
torchrun --nproc-per-node 8 -m twoscale sweep runs/paper --rules step-norm kl acceleration entropy
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from twoscale.cli.parse import is_main_process, options, parse, say
from twoscale.config.words import all_loops
from twoscale.report.words import default_depth, signed, sweep_text

if TYPE_CHECKING:
    from twoscale.tradeoff.summary import Sweep


@dataclass(frozen=True)
class SweepArgs:
    """Measure rules x thresholds and all baselines on held-out text; written to RUN/sweep.jsonl line by line, resumed after a kill.

    On a model of a task (hops, carry): all rules, by accuracy, steps and true depth of the answers."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run, or `bundled`, or `hops`."""
    rules: tuple[str, ...] = ("step-norm", "kl", "acceleration")
    """Rules to sweep over the thresholds; NAME:VALUE takes one setting as it is. On a task all rules, if nothing is named."""
    taus: tuple[float, ...] = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    """Thresholds; the first four are the paper's."""
    loops: int | None = None
    """The most steps that a group may take: the full run. By default 30, on a task as many as its staircase has (16)."""
    windows: int = 20
    """Held-out windows to measure on."""
    rounds: int = 6
    """How often times are taken."""
    controller: bool = True
    """Train (once) and compare a learned controller, on documents that are not measured on."""
    few: bool = False
    """On text: fewer baselines (fixed depths, random exits, oracles), in about half the time."""
    samples: int | None = None
    """On a task: held-out samples to certify on and to report on (128 by default); a quarter as many are fitted on."""
    max_accuracy_drop: float | None = None
    """On a task: the accuracy may drop by this share of the answers (0.005, half a point, by default)."""
    checkpoint: str | None = None
    """Which checkpoint (for example step-000120); the newest by default."""
    data_dir: Path | None = None
    """Shards to take the held-out text from; by default the run's own."""


def run(args: list[str]) -> int:
    parsed = parse(SweepArgs, args, "twoscale sweep")

    from twoscale.api import sweep
    from twoscale.report.depth_words import task_table

    found = sweep(parsed.run, **options(parsed), progress=say)
    if is_main_process():
        print(table(found) if found.task is None else task_table(found))
    return 0


def _default(sweep: "Sweep") -> str:
    """Which point is the model's default depth."""
    default, loops = sweep.header.get("mean_loops"), sweep.header["loops"]
    if default is None:
        return ""
    point = "full" if default == loops else f"fixed:{default}"
    return f"; {default_depth(default)} is the point {point}" if sweep.point(point) else f"; {default_depth(default)} was not swept"


def table(sweep: "Sweep") -> str:
    """Every point on one line, curve by curve."""
    head = sweep.header
    lines = [
        f"{head['checkpoint']}, {sweep_text(head)}; dCE against {all_loops(head['loops'])} with a 95 % interval{_default(sweep)}",
        f"{'point':<34}{'steps':>7}{'CE':>9}{'dCE':>9}  {'interval':<19}{'agree':>6}{'MFLOP':>8}{'ms':>8}",
    ]
    for p in sweep.points:
        ms = f"{p['ms']:.2f}" if p.get("ms") is not None else "-"
        between = f"{signed(p['dce_low'])} {signed(p['dce_high'])}" if p["family"] != "full" else "reference"
        cost = f"{p['agree']:6.1%}{p['flops'] / 1e6:8.2f}{ms:>8}"
        lines.append(f"{(p['label'] or p['id'])[:33]:<34}{p['mean_steps']:7.2f}{p['ce']:9.4f}{signed(p['dce']):>9}  {between:<19}{cost}")
    for family in dict.fromkeys(p["family"] for p in sweep.points if "hard" in p):
        steps = [p["mean_steps"] for p in sweep.family(family)]
        if len(steps) > 1 and min(steps) >= head["loops"] - 1e-9:
            lines.append(f"{family}: no token left before the last step at any threshold; give larger ones with --taus")
        elif len(steps) > 1 and max(steps) - min(steps) < 1e-9:
            lines.append(f"{family}: every threshold gave the same steps; give others with --taus")
    return "\n".join(lines)
