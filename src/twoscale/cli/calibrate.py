"""`twoscale calibrate RUN --max-dce 0.005`: a threshold for each group, with a bound on what it costs.

twoscale calibrate runs/tiny --max-dce 0.01 --rule step-norm
twoscale calibrate hops --max-accuracy-drop 0.005 --rule cosine
twoscale generate runs/tiny "The loop" --exit auto
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from twoscale.cli.parse import options, parse, say
from twoscale.config.dtypes import WeightDtype
from twoscale.config.words import group_label, plural
from twoscale.report.words import calibration_sentences


@dataclass(frozen=True)
class CalibrateArgs:
    """Find thresholds for each group separately on one part of the held-out text and certify them on another; RUN/calibration.json."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run, or `bundled`, or `hops`."""
    max_dce: float | None = None
    """The loss may rise by so many nats a token at most (0.005 if nothing is asked for)."""
    mean_steps: float | None = None
    """Instead: so many steps a group on average."""
    ms: float | None = None
    """Instead: so many milliseconds a token, one sequence, on this machine."""
    max_accuracy_drop: float | None = None
    """On a task, instead of --max-dce: the share of right answers may drop by so much at most (0.005, half a point, by default)."""
    rule: str = "acceleration"
    """The rule: its name, or NAME:VALUE,setting=value, of which the threshold is replaced; `learned` trains a controller first."""
    delta: float = 0.05
    """The chance that anything that is certified does not hold; shared between the paths that are tested."""
    loops: int | None = None
    """The most steps that a group may take; by default 30, on a task as many as its staircase has (16)."""
    windows: int = 48
    """Held-out windows to certify on and to report on; a third as many are fitted on."""
    samples: int | None = None
    """On a task, instead of --windows: held-out samples to certify on and to report on (128); a quarter as many are fitted on."""
    checkpoint: str | None = None
    """Which checkpoint (for example step-000120); the newest by default."""
    data_dir: Path | None = None
    """Shards to take the held-out text from; by default the run's own."""
    dtype: WeightDtype = "fp32"
    """Calibrate with the weights rounded to this dtype; --exit auto is then for a model loaded with it."""


def run(args: list[str]) -> int:
    parsed = parse(CalibrateArgs, args, "twoscale calibrate")

    from twoscale.api import calibrate

    print(describe(calibrate(parsed.run, **options(parsed), progress=say).record))
    return 0


def describe(result: dict[str, Any]) -> str:
    """The result in a few lines."""
    mine = result["report"]["calibrated"]
    goal = ", ".join(f"{key.replace('_', '-')} {value:g}" for key, value in result["goal"].items())
    lines = [f"{result['checkpoint']}, {result['rule']}, at most {plural(result['loops'], 'loop')}, asked: {goal}"]
    names = result.get("groups") or [None] * len(result["rules"])  # older versions did not name the layers
    for g, (rule, layers) in enumerate(zip(result["rules"], names, strict=True)):
        lines.append(f"  {group_label(g, layers)}: {rule or 'all loops'}, {mine['steps'][g]:.2f} steps on average")
    if result.get("task") is not None:
        from twoscale.report.depth_words import task_calibration_sentences

        return "\n".join([*lines, *task_calibration_sentences(result)])
    return "\n".join([*lines, *calibration_sentences(result, result.get("mean_loops"))])
