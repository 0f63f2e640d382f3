"""`twoscale eval RUN`: held-out loss, perplexity and bits per byte, at fixed loops or with an exit rule.

twoscale eval runs/tiny --exit acceleration:1.0 --loops 30
twoscale eval runs/tiny --tasks my_task --include my/tasks --num-fewshot 2 --output found.json
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from twoscale.cli.parse import parse
from twoscale.cli.runs import as_run
from twoscale.config import UserError
from twoscale.config.files import make_folder, write_json
from twoscale.report.words import evaluation_text

TASK_OPTIONS = ("include", "limit", "num_fewshot", "batch_size")  # settings that go with --tasks


@dataclass(frozen=True)
class EvalArgs:
    """Measure a model on held-out text; bits per byte compares models with different tokenizers."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run, or `bundled`."""
    exit: str | None = None
    """Exit rule, as for `twoscale generate`; `auto` as calibrated."""
    loops: int | None = None
    """The most steps that a group may take; by default the model's mean_loops, or what was calibrated."""
    windows: int = 64
    """Held-out windows, spread evenly over the split."""
    checkpoint: str | None = None
    """Which checkpoint (for example step-000120); the newest by default."""
    data_dir: Path | None = None
    """Shards to take the held-out text from; by default the run's own."""
    tasks: tuple[str, ...] = ()
    """Instead: tasks of the lm-evaluation-harness (the extra twoscale[eval])."""
    include: Path | None = None
    """Folder with task files of your own."""
    limit: int | None = None
    """Only so many examples of each task."""
    num_fewshot: int | None = None
    """Solved examples before each question of a task; by default as the task says."""
    batch_size: int | None = None
    """Texts of a task that go through the model together (16; fewer where their logits would need much memory)."""
    output: Path | None = None
    """File for the figures, as JSON."""


def run(args: list[str]) -> int:
    parsed = parse(EvalArgs, args, "twoscale eval")
    for name in () if parsed.tasks else TASK_OPTIONS:
        if getattr(parsed, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} goes with --tasks")

    from twoscale.api import evaluate, evaluate_tasks

    common: dict[str, Any] = {"exit": parsed.exit, "loops": parsed.loops, "checkpoint": parsed.checkpoint}
    if parsed.tasks:
        common |= {name: getattr(parsed, name) for name in TASK_OPTIONS}
        found = asdict(evaluate_tasks(parsed.run, parsed.tasks, **common))
    else:
        found = asdict(evaluate(as_run(parsed.run), windows=parsed.windows, data_dir=parsed.data_dir, **common))
    if parsed.output is not None:
        write_json(make_folder(parsed.output.parent) / parsed.output.name, found)
    print(tasks_table(found) if parsed.tasks else table(found))
    return 0


def table(found: dict[str, Any]) -> str:
    steps = ", ".join(f"{mean:.2f} of {limit}" for mean, limit in zip(found["steps"], found["loops"], strict=True))
    return (
        f"{found['checkpoint']}, exit {found['exit'] or 'none'}\n"
        f"text            {evaluation_text(found)} ({found['bytes']:,} bytes)\n"
        f"cross-entropy   {found['ce']:.4f} nats a token [{found['ce_low']:.4f}, {found['ce_high']:.4f}]\n"
        f"perplexity      {found['ppl']:.3f}\n"
        f"bits per byte   {found['bits_per_byte']:.4f}\n"
        f"mean steps      {steps}"
    )


def tasks_table(found: dict[str, Any]) -> str:
    """Accuracy, or what else a task reports, beside mean steps."""
    lines = [f"{found['model']}, exit {found['exit'] or 'none'}"]
    for task, numbers in found["results"].items():
        shown = (_number(key, numbers) for key in numbers if "stderr" not in key and not key.startswith("sample"))
        lines.append(f"{task:<24}{', '.join(shown)}")
    steps = ", ".join(f"{mean:.2f} of {limit}" for mean, limit in zip(found["mean_steps"], found["loops"], strict=True))
    lines.append(f"mean steps              {steps}")
    return "\n".join(lines)


def _number(key: str, numbers: dict[str, float]) -> str:
    """A figure of a task with its standard error."""
    value, error = numbers[key], numbers.get(f"{key}_stderr", math.nan)
    shown = f"{key} {value:.4f}" if abs(value) < 1e4 else f"{key} {value:.4g}"
    return shown if math.isnan(error) else f"{shown} +- {error:.2g}"
