"""`twoscale reproduce`: the main job in one folder, stage after stage; what is done is skipped.

twoscale reproduce --preset tiny
twoscale reproduce --preset tiny --quick        # with a short calibration and sweep
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twoscale.cli.parse import say
from twoscale.cli.train import TrainArgs, parse_train, train
from twoscale.config import RunConfig, UserError
from twoscale.config.serial import read_json
from twoscale.report.verdict import recommend
from twoscale.tradeoff.summary import SWEEP, read_sweep

EVALUATION = "evaluation.json"
REPORT = Path("report") / "index.html"
LOOPS = (1, 2, 4, 8, 12, 20, 30)


def run(args: list[str]) -> int:
    quick = "--quick" in args
    parsed = parse_train([word for word in args if word != "--quick"], "twoscale reproduce")
    if parsed.resume is not None or parsed.data_dir is not None:
        raise UserError("reproduce works in one folder: give --out alone, it goes on by itself")
    out = parsed.out or Path("runs") / parsed.config.name
    stages: dict[str, Callable[[], int]] = {
        "train": lambda: _train_stage(parsed, out),
        "evaluate": lambda: _evaluate_stage(parsed.config, out),
    }
    if parsed.config.model.n_groups:
        stages |= {
            "trace": lambda: _trace_stage(out),
            "calibrate": lambda: _calibrate_stage(out, quick),
            "sweep": lambda: _sweep_stage(out, quick),
            "report": lambda: _report_stage(out),
        }
    started = time.monotonic()
    for i, (name, stage) in enumerate(stages.items(), start=1):
        say(f"[{i}/{len(stages)}] {name}")
        if (code := stage()) != 0:
            return code
    _print_table(read_json(out / EVALUATION))
    if (swept := read_sweep(out / SWEEP)) is not None:
        print(recommend(swept)[0])
    if parsed.config.model.n_groups:
        print(f"report    {out / REPORT}")
    say(f"done in {time.monotonic() - started:.0f} s; the run is in {out}")
    return 0


def _train_stage(args: TrainArgs, out: Path) -> int:
    from twoscale.train.checkpoint import list_checkpoints, load_config
    from twoscale.train.run import differences

    newest = list_checkpoints(out / "checkpoints")[-1:]
    if newest and newest[0].name == f"step-{args.config.train.steps:06d}" and not differences(load_config(out), args.config):
        say(f"already trained: {newest[0]}")
        return 0
    return train(args)


def _evaluate_stage(config: RunConfig, out: Path) -> int:
    """Held-out loss at several depths, beside a bigram model on the same split."""
    from twoscale.config.files import write_json
    from twoscale.data import TokenData, held_out
    from twoscale.engine.evaluate import bigram_cross_entropy, cross_entropy
    from twoscale.interop import load
    from twoscale.train.checkpoint import newest_checkpoint

    newest = newest_checkpoint(out / "checkpoints")
    assert newest is not None
    if (out / EVALUATION).exists() and read_json(out / EVALUATION).get("checkpoint") == newest.name:
        say("already evaluated")
        return 0
    model, _ = load(newest)
    windows = held_out(TokenData(out / "data", "val"), config.model.block_size, config.train.eval_sequences)
    by_loops: dict[str, float] = {}
    for k in LOOPS:
        by_loops[str(k)] = cross_entropy(model, *windows, loops=k)
        say(f"  {k:>2} loops: {by_loops[str(k)]:.4f} nats a token")
    bigram = bigram_cross_entropy(TokenData(out / "data", "train"), *windows)
    result: dict[str, Any] = {
        "checkpoint": newest.name,
        "tokens": windows[1].numel(),
        "optimizer": config.train.optimizer,
        "cross_entropy_by_loops": by_loops,
        "bigram_cross_entropy": bigram,
    }
    write_json(out / EVALUATION, result)
    return 0


def _trace_stage(out: Path) -> int:
    """The last checkpoint in full; the ones before it were measured while training."""
    from twoscale.cli.trace import TraceArgs, trace_run
    from twoscale.config.serial import read_jsonl
    from twoscale.geometry.probe import GEOMETRY, SEQUENCE
    from twoscale.train.checkpoint import newest_checkpoint, read_progress

    newest = newest_checkpoint(out / "checkpoints")
    assert newest is not None
    records = [r for r in read_jsonl(out / GEOMETRY) if r["step"] == read_progress(newest).step]
    if (out / SEQUENCE).exists() and records and "limit" in records[0]["groups"][0]:
        say("already traced")
        return 0
    trace_run(TraceArgs(run=out))
    return 0


def _calibrate_stage(out: Path, quick: bool) -> int:
    """Thresholds for each group; before the sweep, which then shows them beside everything else."""
    from twoscale.cli.calibrate import CalibrateArgs, calibrate_run, describe
    from twoscale.tradeoff.open import calibrated_exit, name_checkpoint
    from twoscale.train.checkpoint import find_checkpoint

    if calibrated_exit(out, name_checkpoint(find_checkpoint(out, None)), must=False) is not None:
        say("already calibrated")
        return 0
    say(describe(calibrate_run(CalibrateArgs(out, max_dce=0.005, loops=8, windows=6) if quick else CalibrateArgs(out, max_dce=0.005))))
    return 0


def _sweep_stage(out: Path, quick: bool) -> int:
    """Everything that the file does not hold yet; a finished sweep is only read."""
    from twoscale.cli.sweep import SweepArgs, sweep_run

    sweep_run(SweepArgs(out, loops=8, windows=4, rounds=1) if quick else SweepArgs(out))
    return 0


def _report_stage(out: Path) -> int:
    from twoscale.report.page import write_report

    made_from = [out / name for name in ("geometry.jsonl", EVALUATION, "trace/sequence.json", "sweep.jsonl", "calibration.json")]
    page = out / REPORT
    if page.exists() and page.stat().st_mtime >= max(p.stat().st_mtime for p in made_from):
        say("already written")
        return 0
    write_report(out)
    return 0


def _print_table(result: dict[str, Any]) -> None:
    print(f"held-out cross-entropy, {result['tokens']:,} tokens, {result['checkpoint']}, trained with {result['optimizer']}")
    print(f"{'loops':>8}  nats a token")
    for k, ce in result["cross_entropy_by_loops"].items():
        print(f"{k:>8}  {ce:.4f}")
    print(f"{'bigram':>8}  {result['bigram_cross_entropy']:.4f}")
