"""`twoscale reproduce`: the main job, stage after stage; what is done is skipped.

twoscale reproduce --preset tiny
twoscale reproduce --preset tiny --with-bundled --effort short      # what `make reproduce` does
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from twoscale.cli.parse import say
from twoscale.cli.runs import BUNDLED, as_run
from twoscale.cli.train import TrainArgs, parse_train, train
from twoscale.config import RunConfig, UserError
from twoscale.config.run_file import load_config
from twoscale.config.run_folder import ReportFolder, RunFolder
from twoscale.config.serial import read_json
from twoscale.config.words import plural

LOOPS = (1, 2, 4, 8, 12, 20, 30)


@dataclass(frozen=True)
class Effort:
    """How much is measured: windows and loops of a sweep, rounds of its timing, windows of a calibration and of the evaluation."""

    loops: int = 30
    windows: int = 20
    rounds: int = 6
    controller: bool = True
    calibration_windows: int = 48
    evaluation_windows: int = 64


EFFORTS = {
    "full": Effort(),
    "short": Effort(windows=3, rounds=3, controller=False, calibration_windows=9, evaluation_windows=16),
    "quick": Effort(loops=8, windows=3, rounds=1, controller=False, calibration_windows=4, evaluation_windows=32),
}


@dataclass(frozen=True)
class ReproduceArgs(TrainArgs):
    """Train, evaluate, trace, calibrate, sweep, report: all in one folder. The same command goes on where it stopped."""

    with_bundled: bool = False
    """Measure the bundled model too (in runs/bundled), and put both on one page; the one that is trained is then not calibrated."""
    effort: Literal["full", "short", "quick"] = "full"
    """How much is measured: as the commands do by default, in a few minutes, or hardly anything."""


def run(args: list[str]) -> int:
    parsed = parse_train(args, "twoscale reproduce", ReproduceArgs)
    if parsed.resume is not None or parsed.data_dir is not None:
        raise UserError("reproduce works in one folder: give --out alone, it goes on by itself")
    out = parsed.out or Path("runs") / parsed.config.name
    started = time.monotonic()
    stages, runs = _stages(parsed, out)
    for i, (name, stage) in enumerate(stages, start=1):
        say(f"[{i}/{len(stages)}] {name} ({_clock(time.monotonic() - started)} so far)")
        if (code := stage()) != 0:
            return code
    for folder in runs:
        _print_table(folder)
    if parsed.config.model.n_groups:
        print(f"report    {_page(runs)}")
    say(f"done in {_clock(time.monotonic() - started)}; the run is in {out}")
    return 0


def _stages(args: ReproduceArgs, out: Path) -> tuple[list[tuple[str, Callable[[], int]]], list[Path]]:
    """What is to be done, in order, and the runs that come of it."""
    effort = EFFORTS[args.effort]
    stages: list[tuple[str, Callable[[], int]]] = [
        ("train", lambda: _train_stage(args, out)),
        ("evaluate", lambda: _evaluate_stage(out, effort)),
    ]
    if not args.config.model.n_groups:
        return stages, [out]
    stages.append(("trace", lambda: _trace_stage(out)))
    runs = [out]
    if not args.with_bundled:
        stages.append(("calibrate", lambda: _calibrate_stage(out, effort)))
    stages.append(("sweep", lambda: _sweep_stage(out, effort)))
    if args.with_bundled:
        other = Path("runs") / BUNDLED
        runs = [other, out]
        stages += [
            (f"evaluate {BUNDLED}", lambda: _evaluate_stage(as_run(Path(BUNDLED)), effort)),
            (f"trace {BUNDLED}", lambda: _trace_stage(other)),
            (f"calibrate {BUNDLED}", lambda: _calibrate_stage(other, effort)),
            (f"sweep {BUNDLED}", lambda: _sweep_stage(other, effort)),
        ]
    stages.append(("report", lambda: _report_stage(runs)))
    return stages, runs


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _page(runs: list[Path]) -> Path:
    return ReportFolder.of(*reversed(runs)).page


def _train_stage(args: TrainArgs, out: Path) -> int:
    from twoscale.train.checkpoint import list_checkpoints, load_config
    from twoscale.train.run import differences

    newest = list_checkpoints(RunFolder(out).checkpoints)[-1:]
    if newest and newest[0] == RunFolder(out).checkpoint(args.config.train.steps) and not differences(load_config(out), args.config):
        say(f"already trained: {newest[0]}")
        return 0
    return train(args)


def _evaluate_stage(out: Path, effort: Effort) -> int:
    """Held-out loss at several depths, beside a bigram model where the run was trained on the same source."""
    from twoscale.config.files import write_json
    from twoscale.data import TokenData
    from twoscale.report.words import evaluation_text
    from twoscale.tradeoff.bigram import bigram_cross_entropy
    from twoscale.tradeoff.evaluate import evaluate
    from twoscale.tradeoff.heldout import heldout_windows
    from twoscale.tradeoff.load_run import load_run_model
    from twoscale.tradeoff.summary import read_evaluation

    opened = load_run_model(out)
    config: RunConfig = opened.config
    windows = min(effort.evaluation_windows, config.train.eval_sequences)
    asked = {**opened.about, "windows": windows}
    old = read_evaluation(RunFolder(out).evaluation)
    if old is not None and all(old.get(key) == value for key, value in asked.items()):
        say("already evaluated")
        return 0
    text = heldout_windows(opened.data, config.model.block_size, windows)
    by_loops: dict[str, float] = {}
    about = {**asked, "source": opened.source, "clusters": text.n_clusters, "tokens": text.targets.numel()}
    say(f"cross-entropy on {evaluation_text(about)}")
    for k in LOOPS if config.model.n_groups else (1,):
        by_loops[str(k)] = float(evaluate(opened.model, text, None, k if config.model.n_groups else ()).losses.mean())
        say(f"  {plural(k, 'loop'):>8}: {by_loops[str(k)]:.4f} nats a token")
    trained_here = not RunFolder(out).source.exists()
    result: dict[str, Any] = {
        **about,
        "bytes": int(opened.tokenizer.byte_lengths()[text.targets].sum()),
        "optimizer": config.train.optimizer,
        "cross_entropy_by_loops": by_loops,
        "bigram_cross_entropy": bigram_cross_entropy(TokenData(opened.data.folder, "train"), text) if trained_here else None,
    }
    write_json(RunFolder(out).evaluation, result)
    return 0


def _trace_stage(out: Path) -> int:
    """The last checkpoint in full; the ones before it were measured while training."""
    from twoscale.geometry.run import measure_run
    from twoscale.report.load import read_geometry
    from twoscale.train.checkpoint import find_checkpoint, read_progress

    records = [r for r in read_geometry(RunFolder(out).geometry) if r["step"] == read_progress(find_checkpoint(out, None)).step]
    if RunFolder(out).sequence.exists() and records and all("limit" in group for group in records[0]["groups"]):
        say("already traced")
        return 0
    measure_run(out, progress=say)
    return 0


def _calibrate_stage(out: Path, effort: Effort) -> int:
    """Thresholds for each group; before the sweep, which then shows them beside everything else."""
    from twoscale.cli.calibrate import describe
    from twoscale.tradeoff.commands import calibrate
    from twoscale.tradeoff.load_run import calibrated_exit, name_checkpoint
    from twoscale.tradeoff.summary import read_calibration
    from twoscale.train.checkpoint import find_checkpoint

    found = read_calibration(RunFolder(out).calibration)
    known = calibrated_exit(out, name_checkpoint(find_checkpoint(out, None)), must=False) is not None
    if known and found is not None and (found["loops"], found.get("windows")) == (effort.loops, effort.calibration_windows):
        say("already calibrated")
        return 0
    say(describe(calibrate(out, max_dce=0.005, loops=effort.loops, windows=effort.calibration_windows, progress=say).record))
    return 0


def _sweep_stage(out: Path, effort: Effort) -> int:
    """Everything that the file does not hold yet; a finished sweep is only read."""
    from twoscale.tradeoff.commands import sweep

    sweep(out, loops=effort.loops, windows=effort.windows, rounds=effort.rounds, controller=effort.controller, progress=say)
    return 0


def _report_stage(runs: list[Path]) -> int:
    from twoscale.config.files import write_json
    from twoscale.report.build import report

    folders = [RunFolder(run) for run in runs]
    files = [p for f in folders for p in (f.geometry, f.evaluation, f.sequence, f.sweep, f.calibration, f.samples)]
    made_from = [path for path in files if path.exists()]
    page, shown = _page(runs), [str(run.resolve()) for run in runs]
    runs_file = ReportFolder(page.parent).runs
    same = runs_file.exists() and read_json(runs_file) == shown
    if same and page.exists() and page.stat().st_mtime >= max(p.stat().st_mtime for p in made_from):
        say("already written")
        return 0
    report(runs, page.parent, progress=lambda line: say(f"  {line}"))
    write_json(runs_file, shown)
    return 0


def _print_table(run: Path) -> None:
    from twoscale.report.advice import recommend
    from twoscale.report.words import evaluation_text
    from twoscale.tradeoff.summary import read_calibration_of, read_evaluation, read_sweep

    result = read_evaluation(RunFolder(run).evaluation)
    assert result is not None
    print(f"{run.name}: cross-entropy on {evaluation_text(result)}; {result['checkpoint']}, trained with {result['optimizer']}")
    rows = [*result["cross_entropy_by_loops"].items(), *[("bigram", ce) for ce in [result["bigram_cross_entropy"]] if ce is not None]]
    bits = result["tokens"] / result["bytes"] / math.log(2) if result.get("bytes") else None  # per byte, of a nat a token
    print(f"{'loops':>8}  nats a token{'  bits per byte' if bits else ''}")
    for k, ce in rows:
        print(f"{k:>8}  {ce:<12.4f}{f'  {bits * ce:.4f}' if bits else ''}".rstrip())
    if (swept := read_sweep(RunFolder(run).sweep, load_config(run).model.mean_loops)) is not None:
        print(recommend(swept, read_calibration_of(run, swept))[0])
