"""`twoscale eval RUN`: held-out loss, perplexity and bits per byte, at fixed loops or with an exit rule.

twoscale eval runs/tiny --exit acceleration:1.0 --loops 30
twoscale eval runs/tiny --tasks my_task --include my/tasks
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from twoscale.cli.parse import parse
from twoscale.cli.runs import on_run
from twoscale.config import UserError
from twoscale.report.words import evaluation_text


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


def run(args: list[str]) -> int:
    given = parse(EvalArgs, args, "twoscale eval")
    print(tasks_table(given) if given.tasks else table(eval_run(on_run(given))))
    return 0


def eval_run(args: EvalArgs) -> dict[str, Any]:
    from twoscale.tradeoff.answers import answers
    from twoscale.tradeoff.open import chosen_exit, open_run
    from twoscale.tradeoff.stats import interval
    from twoscale.tradeoff.text import spread
    from twoscale.train.checkpoint import find_checkpoint

    if args.windows < 2:
        raise UserError("--windows is at least 2")
    opened = open_run(args.run, args.checkpoint, args.data_dir)
    exit, loops = chosen_exit(find_checkpoint(args.run, args.checkpoint), args.exit, args.loops)
    counts = opened.model.config.loops_for(loops)
    text = spread(opened.data, opened.model.config.block_size, args.windows)
    found = answers(opened.model, text, exit, counts)
    ce, size = float(found.losses.mean()), opened.tokenizer.byte_lengths()[text.targets].sum()
    low, high = interval(found.losses.numpy(), text.clusters.numpy())
    return {
        "checkpoint": opened.about["checkpoint"], "tokens": text.targets.numel(), "bytes": int(size), "windows": len(text.ids),
        "source": opened.source, "exit": args.exit,
        "loops": list(counts), "ce": ce, "ce_low": low, "ce_high": high, "ppl": math.exp(ce),
        "bits_per_byte": float(found.losses.sum()) / math.log(2) / int(size), "steps": found.steps.double().mean(dim=(0, 1)).tolist(),
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    steps = ", ".join(f"{mean:.2f} of {most}" for mean, most in zip(found["steps"], found["loops"], strict=True))
    return (
        f"{found['checkpoint']}, exit {found['exit'] or 'none'}\n"
        f"text            {evaluation_text(found)} ({found['bytes']:,} bytes)\n"
        f"cross-entropy   {found['ce']:.4f} nats a token [{found['ce_low']:.4f}, {found['ce_high']:.4f}]\n"
        f"perplexity      {found['ppl']:.3f}\n"
        f"bits per byte   {found['bits_per_byte']:.4f}\n"
        f"mean steps      {steps}"
    )


def tasks_table(args: EvalArgs) -> str:
    """Accuracy, or what else a task reports, beside mean steps."""
    try:
        from twoscale.interop.harness import HarnessModel, evaluate
    except ModuleNotFoundError:
        raise UserError("--tasks needs the lm-evaluation-harness: pip install 'twoscale[eval]'") from None
    from twoscale.interop import find, load
    from twoscale.tradeoff.open import chosen_exit
    from twoscale.train.checkpoint import find_checkpoint

    if args.limit is not None and args.limit < 1:
        raise UserError("--limit is at least 1")
    folder = find(args.run) if args.checkpoint is None else find_checkpoint(args.run, args.checkpoint)
    exit, loops = chosen_exit(folder, args.exit, args.loops)
    model, tokenizer = load(folder)
    if tokenizer is None:
        raise UserError(f"{args.run} has no tokenizer.json, which the harness needs")
    counts = model.config.loops_for(loops)
    lm = HarnessModel(model, tokenizer, loops, exit)
    found = evaluate(lm, list(args.tasks), args.include, args.limit)
    lines = [f"{args.run}, exit {args.exit or 'none'}"]
    for task, numbers in found.items():
        lines.append(
            f"{task:<24}{', '.join(_number(key, numbers) for key in numbers if 'stderr' not in key and not key.startswith('sample'))}"
        )
    steps = ", ".join(f"{mean:.2f} of {most}" for mean, most in zip(lm.mean_steps, counts, strict=True))
    lines.append(f"mean steps              {steps}")
    return "\n".join(lines)


def _number(key: str, numbers: dict[str, float]) -> str:
    """A figure of a task with its standard error."""
    value, error = numbers[key], numbers.get(f"{key}_stderr", math.nan)
    shown = f"{key} {value:.4f}" if abs(value) < 1e4 else f"{key} {value:.4g}"
    return shown if math.isnan(error) else f"{shown} +- {error:.2g}"
