"""`twoscale reproduce`: the main job, stage after stage; what is done is skipped.

twoscale reproduce --preset tiny
twoscale reproduce --preset tiny --with-bundled --effort short      # what `make reproduce` does
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from twoscale.cli.parse import say
from twoscale.cli.runs import BUNDLED, as_run
from twoscale.cli.status import StatusLine, clock
from twoscale.cli.train import TrainArgs, parse_train, train
from twoscale.config import RunConfig, UserError
from twoscale.config.progress import listening, progress_to
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
    few: bool = False
    """Fewer baselines in the sweep."""
    calibration_windows: int = 48
    evaluation_windows: int = 64


EFFORTS = {
    "full": Effort(),
    "short": Effort(windows=3, rounds=3, controller=False, few=True, calibration_windows=9, evaluation_windows=16),
    "quick": Effort(loops=8, windows=3, rounds=1, controller=False, few=True, calibration_windows=4, evaluation_windows=32),
}


@dataclass(frozen=True)
class ReproduceArgs(TrainArgs):
    """Train, evaluate, trace, calibrate, sweep, report: all in one folder. The same command goes on where it stopped."""

    with_bundled: bool = False
    """Put the bundled model (runs/bundled) on the same page, with the measurements that came with it, or measured here where none did; the
    one that is trained is then not calibrated."""
    bundled_only: bool = False
    """Train nothing: measure the bundled model and write its page."""
    effort: Literal["full", "short", "quick"] = "full"
    """How much is measured: as the commands do by default, in a few minutes, or hardly anything."""


@dataclass(frozen=True)
class Stage:
    """One part of the job."""

    name: str
    work: Callable[[], int]
    """Does it, unless it is done already; returns an exit code."""
    seconds: float
    """About how long it takes for `tiny` with little effort; only its share of the whole is used."""


def run(args: list[str]) -> int:
    parsed = parse_train(args, "twoscale reproduce", ReproduceArgs)
    if parsed.resume is not None or parsed.data_dir is not None:
        raise UserError("reproduce works in one folder: give --out alone, it goes on by itself")
    out = parsed.out or Path("runs") / parsed.config.name
    stages, runs = _stages(parsed, out)
    status = StatusLine([(stage.name, stage.seconds) for stage in stages])
    try:
        for i, stage in enumerate(stages):
            status.begin(i)
            with progress_to(status.hear):
                code = stage.work()
            if code != 0:
                status.close()
                say(status.remark)
                return code
            status.end()
    finally:
        status.close()
    for folder in runs:
        _print_table(folder)
    if parsed.bundled_only or parsed.config.model.n_groups:
        print(f"report    {_page(runs)}")
    say(f"done in {clock(status.elapsed)}; the run is in {runs[-1]}")
    return 0


def _stages(args: ReproduceArgs, out: Path) -> tuple[list[Stage], list[Path]]:
    """What is to be done, in order, and the runs that come of it."""
    effort = EFFORTS[args.effort]
    if args.bundled_only:
        if args.with_bundled:
            raise UserError("--bundled-only trains nothing: omit --with-bundled")
        run = Path("runs") / BUNDLED
        return [*_bundled_stages(effort), Stage("report", lambda: _report_stage([run]), 10)], [run]
    stages = [
        Stage("train", lambda: _train_stage(args, out), 170),
        Stage("evaluate", lambda: _evaluate_stage(out, effort), 3),
    ]
    if not args.config.model.n_groups:
        return stages, [out]
    stages.append(Stage("trace", lambda: _trace_stage(out), 5))
    runs = [out]
    if not args.with_bundled:
        stages.append(Stage("calibrate", lambda: _calibrate_stage(out, effort), 15))
    stages.append(Stage("sweep", lambda: _sweep_stage(out, effort), 15))
    if args.with_bundled:
        runs = [Path("runs") / BUNDLED, out]
        stages += [Stage(BUNDLED, _shipped_stage, 5)] if _shipped() else _bundled_stages(effort)
    stages.append(Stage("report", lambda: _report_stage(runs), 10 * len(runs)))
    return stages, runs


def _bundled_stages(effort: Effort) -> list[Stage]:
    """The bundled model measured here."""
    other = Path("runs") / BUNDLED
    return [
        Stage(f"evaluate {BUNDLED}", lambda: _evaluate_stage(as_run(Path(BUNDLED)), effort), 15),
        Stage(f"trace {BUNDLED}", lambda: _trace_stage(other), 12),
        Stage(f"calibrate {BUNDLED}", lambda: _calibrate_stage(other, effort), 30),
        Stage(f"sweep {BUNDLED}", lambda: _sweep_stage(other, effort), 30),
    ]


def _shipped() -> bool:
    """Whether the measurements that came with the bundled model can be shown: they are of its weights, and nothing was measured since."""
    from twoscale.interop import find
    from twoscale.interop.measured import comes_with
    from twoscale.tradeoff.summary import came_with_model

    run = Path("runs") / BUNDLED
    return came_with_model(run) if run.is_dir() and any(run.iterdir()) else comes_with(find(BUNDLED)) is not None


def _shipped_stage() -> int:
    from twoscale.tradeoff.summary import read_sweep

    swept = read_sweep(RunFolder(as_run(Path(BUNDLED))).sweep)
    assert swept is not None
    machine = ", ".join(filter(None, (swept.header.get("cpu"), plural(swept.header["threads"], "thread"))))
    points = plural(len(swept.points), "point")
    say(f"{points} and all else came with the model, times are of {machine}; the report says how to measure here")
    return 0


def _progress(words: str, share: float) -> None:
    """Progress within a stage."""
    if (listener := listening()) is not None:
        listener(words, share)


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
    from twoscale.tradeoff.heldout import heldout_windows, spelt_fingerprint
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
    depths = LOOPS if config.model.n_groups else (1,)
    for i, k in enumerate(depths):
        by_loops[str(k)] = float(evaluate(opened.model, text, None, k if config.model.n_groups else ()).losses.mean())
        _progress(f"{plural(k, 'loop')}: {by_loops[str(k)]:.4f} nats a token", (i + 1) / len(depths))
    say(f"cross-entropy at {plural(len(depths), 'depth')} on {evaluation_text(about)}")
    trained_here = not RunFolder(out).source.exists()
    result: dict[str, Any] = {
        **about,
        "bytes": int(opened.tokenizer.byte_lengths()[text.targets].sum()),
        "text": spelt_fingerprint(text, opened.tokenizer.decode),
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
    from twoscale.report.words import calibration_sentences
    from twoscale.tradeoff.commands import calibrate
    from twoscale.tradeoff.load_run import calibrated_exit, name_checkpoint
    from twoscale.tradeoff.summary import read_calibration
    from twoscale.train.checkpoint import find_checkpoint

    found = read_calibration(RunFolder(out).calibration)
    known = calibrated_exit(out, name_checkpoint(find_checkpoint(out, None)), must=False) is not None
    if known and found is not None and (found["loops"], found.get("windows")) == (effort.loops, effort.calibration_windows):
        say("already calibrated")
        return 0
    found = calibrate(out, max_dce=0.005, loops=effort.loops, windows=effort.calibration_windows, progress=say).record
    say(calibration_sentences(found, found["mean_loops"])[0])
    return 0


def _sweep_stage(out: Path, effort: Effort) -> int:
    """Everything that the file does not hold yet; a finished sweep is only read."""
    from twoscale.report.words import sweep_text
    from twoscale.tradeoff.commands import sweep

    found = sweep(
        out, loops=effort.loops, windows=effort.windows, rounds=effort.rounds, controller=effort.controller, few=effort.few, progress=say
    )
    say(f"{plural(len(found.points), 'point')} on {sweep_text(found.header)}, timed {plural(found.rounds, 'time')}")
    return 0


def _report_stage(runs: list[Path]) -> int:
    folders = [RunFolder(run) for run in runs]
    files = [p for f in folders for p in (f.geometry, f.evaluation, f.sequence, f.sweep, f.calibration, f.samples)]
    made_from = [path for path in files if path.exists()]
    page, shown = _page(runs), [str(run.resolve()) for run in runs]
    runs_file = ReportFolder(page.parent).runs
    same = runs_file.exists() and read_json(runs_file) == shown
    if same and page.exists() and page.stat().st_mtime >= max(p.stat().st_mtime for p in made_from):
        say("already written")
        return 0
    from twoscale.config.files import write_json
    from twoscale.report.build import report
    from twoscale.report.registry import FIGURES

    lines: list[str] = []

    def progress(line: str) -> None:
        lines.append(line)
        _progress(line, min(0.95, len(lines) / (len(FIGURES) * len(runs))))

    drawn = report(runs, page.parent, progress=progress)
    write_json(runs_file, shown)
    say(f"{plural(sum(len(run.figures) for run in drawn.runs), 'figure')}, one page: {page}")
    return 0


def _print_table(run: Path) -> None:
    from twoscale.report.advice import recommend
    from twoscale.report.words import evaluation_text
    from twoscale.tradeoff.summary import read_calibration_of, read_evaluation, read_sweep

    result = read_evaluation(RunFolder(run).evaluation)
    assert result is not None
    print(f"{run.name}: cross-entropy on {evaluation_text(result)}; {result['checkpoint']}, trained with {result['optimizer']}")
    losses = dict(result["cross_entropy_by_loops"])
    if result["bigram_cross_entropy"] is not None:
        losses["bigram"] = result["bigram_cross_entropy"]
    print("loops         " + "".join(f"{name:>8}" for name in losses))
    print("nats a token  " + "".join(f"{ce:8.4f}" for ce in losses.values()))
    if result.get("bytes"):
        bits = result["tokens"] / result["bytes"] / math.log(2)  # per byte, of a nat a token
        print("bits per byte " + "".join(f"{bits * ce:8.4f}" for ce in losses.values()))
    if (swept := read_sweep(RunFolder(run).sweep, load_config(run).model.mean_loops)) is not None:
        print(recommend(swept, read_calibration_of(run, swept))[0])
