"""`twoscale sweep RUN`: what every exit rule saves and costs, beside fixed depths, random exits and two oracles.

twoscale sweep runs/tiny
torchrun --nproc-per-node 8 -m twoscale sweep runs/paper --rules step-norm kl acceleration entropy
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from twoscale.cli.parse import parse, say
from twoscale.cli.runs import on_run
from twoscale.config import UserError
from twoscale.config.lock import lock
from twoscale.config.words import all_loops
from twoscale.report.words import default_depth, signed, sweep_text

if TYPE_CHECKING:
    from twoscale.tradeoff.load_run import LoadedRun
    from twoscale.tradeoff.points import Point, Table
    from twoscale.tradeoff.summary import Sweep


@dataclass(frozen=True)
class SweepArgs:
    """Measure rules x thresholds and all baselines on held-out text; written to RUN/sweep.jsonl line by line, resumed after a kill."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run, or `bundled`."""
    rules: tuple[str, ...] = ("step-norm", "kl", "acceleration")
    """Rules to sweep over the thresholds; NAME:VALUE takes one setting as it is."""
    taus: tuple[float, ...] = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    """Thresholds; the first four are the paper's."""
    loops: int = 30
    """The most steps that a group may take: the full run."""
    windows: int = 20
    """Held-out windows to measure on."""
    rounds: int = 6
    """How often times are taken."""
    controller: bool = True
    """Train (once) and compare a learned controller, on documents that are not measured on."""
    checkpoint: str | None = None
    """Which checkpoint (for example step-000120); the newest by default."""
    data_dir: Path | None = None
    """Shards to take the held-out text from; by default the run's own."""


def run(args: list[str]) -> int:
    given = on_run(parse(SweepArgs, args, "twoscale sweep"))
    found = sweep_run(given)
    if found is not None:
        print(table(found))
    return 0


def sweep_run(args: SweepArgs) -> "Sweep | None":
    """The sweep; None in all processes but the first."""
    from twoscale.tradeoff.controller import controller
    from twoscale.tradeoff.load_run import calibrated_exit, load_run
    from twoscale.tradeoff.points import grid, settings
    from twoscale.tradeoff.sweep import Sweeper
    from twoscale.train.parallel import open_world

    if args.windows < 2 or args.rounds < 1 or args.loops < 2:
        raise UserError("--windows and --loops are at least 2, --rounds at least 1")
    if not args.taus or not all(0 <= tau < float("inf") for tau in args.taus):
        raise UserError("--taus are numbers of at least 0")
    for name in args.rules:
        settings(name, args.taus)
    with open_world() as world, contextlib.ExitStack() as held:
        opened = load_run(args.run, args.checkpoint, args.data_dir, world.device)
        problem = None
        if world.main:
            try:
                held.enter_context(lock(args.run, "sweep"))
            except UserError as error:
                problem = str(error)
        world.agree(problem)
        text = opened.text("report", args.windows)
        calibrated = calibrated_exit(args.run, opened.about, must=False)
        learned = None
        if args.controller:
            if world.main:
                try:
                    say("the controller is read or trained")
                    controller(args.run, opened, args.loops)
                except UserError as error:
                    problem = str(error)
            world.agree(problem)
            learned = controller(args.run, opened, args.loops)
        points = grid(opened.model.config, args.loops, args.rules, args.taus, learned, calibrated)
        sweeper = Sweeper(
            opened.model, text, args.loops, args.run / "sweep.jsonl", opened.about, world, args.rounds, args.windows,
            lambda token: opened.tokenizer.decode([token]), opened.source,
        )  # fmt: skip
        found = sweeper.run(points, say)
        if world.main:
            _samples(args.run, opened, found, {p.id: p for stage in points for p in stage})
        return found if world.main else None


def _samples(run: Path, opened: "LoadedRun", found: "Sweep", points: Mapping[str, "Point"]) -> None:
    """Three texts with the recommended rule; where a fixed depth is recommended, with the best rule, so that there are steps to show."""
    from twoscale.config.serial import read_json
    from twoscale.report.advice import choose, name_of
    from twoscale.tradeoff.points import Seen
    from twoscale.tradeoff.samples import write_samples
    from twoscale.tradeoff.summary import SAMPLES, read_calibration_of

    loops = found.header["loops"]
    choice = choose(found, read_calibration_of(run, found))
    assert choice is not None
    point = next(p for p in (choice.rule, choice.pick, found.point("full")) if p is not None and p["id"] in points)
    exit, words = points[point["id"]].exit(Seen({}, _no_table)), name_of(point, loops)
    old = read_json(run / SAMPLES) if (run / SAMPLES).exists() else {}
    if not isinstance(old, dict) or any(old.get(key) != value for key, value in {**opened.about, "rule": words, "loops": loops}.items()):
        write_samples(run, opened, exit, words, loops)


def _no_table() -> "Table":
    raise AssertionError("oracles write no samples")


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
        between = f"{signed(p['dce_low'])} {signed(p['dce_high'])}"
        cost = f"{p['agree']:6.1%}{p['flops'] / 1e6:8.2f}{ms:>8}"
        lines.append(f"{(p['label'] or p['id'])[:33]:<34}{p['mean_steps']:7.2f}{p['ce']:9.4f}{signed(p['dce']):>9}  {between:<19}{cost}")
    for family in dict.fromkeys(p["family"] for p in sweep.points if "hard" in p):
        steps = [p["mean_steps"] for p in sweep.family(family)]
        if len(steps) > 1 and min(steps) >= head["loops"] - 1e-9:
            lines.append(f"{family}: no token left before the last step at any threshold; give larger ones with --taus")
        elif len(steps) > 1 and max(steps) - min(steps) < 1e-9:
            lines.append(f"{family}: every threshold gave the same steps; give others with --taus")
    return "\n".join(lines)
