"""`twoscale calibrate RUN --max-dce 0.005`: a threshold for each group, with a bound on what it costs.

twoscale calibrate runs/tiny --max-dce 0.01 --rule step-norm
twoscale generate runs/tiny "The loop" --exit auto
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from twoscale.cli.parse import parse, say
from twoscale.cli.runs import on_run
from twoscale.config import UserError
from twoscale.config.lock import lock
from twoscale.config.words import group_label, plural
from twoscale.report.words import calibration_sentences


@dataclass(frozen=True)
class CalibrateArgs:
    """Find thresholds for each group separately on one part of the held-out text and certify them on another; RUN/calibration.json."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run, or `bundled`."""
    max_dce: float | None = None
    """The loss may rise by so many nats a token at most (0.005 if nothing is asked for)."""
    mean_steps: float | None = None
    """Instead: so many steps a group on average."""
    ms: float | None = None
    """Instead: so many milliseconds a token, one sequence, on this machine."""
    rule: str = "acceleration"
    """The rule: its name, or NAME:VALUE,setting=value, of which the threshold is replaced; `learned` trains a controller first."""
    delta: float = 0.05
    """The chance that the bound does not hold."""
    loops: int = 30
    """The most steps that a group may take."""
    windows: int = 48
    """Held-out windows to certify on and to report on; a third as many are fitted on."""
    checkpoint: str | None = None
    """Which checkpoint (for example step-000120); the newest by default."""
    data_dir: Path | None = None
    """Shards to take the held-out text from; by default the run's own."""


def run(args: list[str]) -> int:
    result = calibrate_run(on_run(parse(CalibrateArgs, args, "twoscale calibrate")))
    print(describe(result))
    return 0


def calibrate_run(args: CalibrateArgs) -> dict[str, Any]:
    """Calibrate and write RUN/calibration.json."""
    from twoscale import exits
    from twoscale.config.files import write_json
    from twoscale.tradeoff.calibrate import Calibration, Goal, Texts
    from twoscale.tradeoff.controller import controller
    from twoscale.tradeoff.load_run import load_run
    from twoscale.tradeoff.summary import CALIBRATION

    asked = (args.max_dce, args.mean_steps, args.ms)
    goal = Goal(*asked) if any(value is not None for value in asked) else Goal(max_dce=0.005)
    if args.windows < 2 or args.loops < 2:
        raise UserError("--windows and --loops are at least 2")
    kind = exits.NAMES.get(args.rule.split(":")[0])
    if kind is not exits.Learned:
        needs_value = kind is not None and ":" not in args.rule and "tau" in kind.__dataclass_fields__
        rule = exits.parse(f"{args.rule}:0.01" if needs_value else args.rule)
    opened = load_run(args.run, args.checkpoint, args.data_dir)
    texts = Texts(opened.text("fit", max(1, args.windows // 3)), opened.text("certify", args.windows), opened.text("report", args.windows))
    with lock(args.run, "calibrate"):
        if kind is exits.Learned:
            say("the controller is read or trained")
            rule = controller(args.run, opened, args.loops)
        known = opened.about | {"windows": args.windows, "source": opened.source}
        result = known | Calibration(opened.model, rule, texts, args.loops, args.delta, say).run(goal)
        write_json(args.run / CALIBRATION, result)
    return result


def describe(result: dict[str, Any]) -> str:
    """The result in a few lines."""
    mine = result["report"]["calibrated"]
    goal = ", ".join(f"{key.replace('_', '-')} {value:g}" for key, value in result["goal"].items())
    lines = [f"{result['checkpoint']}, {result['rule']}, at most {plural(result['loops'], 'loop')}, asked: {goal}"]
    names = result.get("groups") or [None] * len(result["rules"])  # older versions did not name the layers
    for g, (rule, layers) in enumerate(zip(result["rules"], names, strict=True)):
        lines.append(f"  {group_label(g, layers)}: {rule or 'all loops'}, {mine['steps'][g]:.2f} steps on average")
    return "\n".join([*lines, *calibration_sentences(result, result.get("mean_loops"))])
