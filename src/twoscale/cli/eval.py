"""`twoscale eval RUN`: held-out loss, perplexity and bits per byte, at fixed loops or with an exit rule.

twoscale eval runs/tiny --exit acceleration:1.0 --loops 30
twoscale eval runs/tiny --tasks my_task --include my/tasks --num-fewshot 2 --output found.json
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from twoscale.cli.parse import parse
from twoscale.cli.runs import on_run
from twoscale.config import UserError, missing_package
from twoscale.config.files import make_folder, write_json
from twoscale.report.words import evaluation_text

BATCH = 16  # texts of a task that share a pass


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
    given = parse(EvalArgs, args, "twoscale eval")
    for name in () if given.tasks else ("include", "limit", "num_fewshot", "batch_size"):
        if getattr(given, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} goes with --tasks")
    found = eval_tasks(given) if given.tasks else eval_run(on_run(given))
    if given.output is not None:
        write_json(make_folder(given.output.parent) / given.output.name, found)
    print(tasks_table(found) if given.tasks else table(found))
    return 0


def eval_run(args: EvalArgs) -> dict[str, Any]:
    from twoscale.tradeoff.evaluate import evaluate
    from twoscale.tradeoff.heldout import heldout_windows
    from twoscale.tradeoff.load_run import chosen_exit, load_run
    from twoscale.tradeoff.stats import interval
    from twoscale.train.checkpoint import find_checkpoint

    if args.windows < 2:
        raise UserError("--windows is at least 2")
    opened = load_run(args.run, args.checkpoint, args.data_dir)
    exit, loops = chosen_exit(find_checkpoint(args.run, args.checkpoint), args.exit, args.loops)
    counts = opened.model.config.loops_for(loops)
    text = heldout_windows(opened.data, opened.model.config.block_size, args.windows)
    found = evaluate(opened.model, text, exit, counts)
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


def eval_tasks(args: EvalArgs) -> dict[str, Any]:
    """What each task of the lm-evaluation-harness reports, and the mean steps."""
    for name, least in (("limit", 1), ("num_fewshot", 0), ("batch_size", 1)):
        if (value := getattr(args, name)) is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value}: at least {least}")
    try:
        from twoscale.interop.harness import HarnessModel, evaluate
    except ModuleNotFoundError:
        raise missing_package("--tasks needs the lm-evaluation-harness", "eval") from None
    from twoscale.interop import find, load
    from twoscale.tradeoff.load_run import chosen_exit
    from twoscale.train.checkpoint import find_checkpoint

    folder = find(args.run) if args.checkpoint is None else find_checkpoint(args.run, args.checkpoint)
    exit, loops = chosen_exit(folder, args.exit, args.loops)
    model, tokenizer = load(folder)
    if tokenizer is None:
        raise UserError(f"{args.run} has no tokenizer.json, which the harness needs")
    lm = HarnessModel(model, tokenizer, loops, exit, args.batch_size or BATCH)
    results = evaluate(lm, list(args.tasks), args.include, args.limit, args.num_fewshot)
    return {
        "model": str(args.run), "exit": args.exit, "loops": list(model.config.loops_for(loops)), "num_fewshot": args.num_fewshot,
        "batch_size": lm.batch, "limit": args.limit, "results": results, "tokens": lm.tokens, "mean_steps": lm.mean_steps,
    }  # fmt: skip


def tasks_table(found: dict[str, Any]) -> str:
    """Accuracy, or what else a task reports, beside mean steps."""
    lines = [f"{found['model']}, exit {found['exit'] or 'none'}"]
    for task, numbers in found["results"].items():
        shown = (_number(key, numbers) for key in numbers if "stderr" not in key and not key.startswith("sample"))
        lines.append(f"{task:<24}{', '.join(shown)}")
    steps = ", ".join(f"{mean:.2f} of {most}" for mean, most in zip(found["mean_steps"], found["loops"], strict=True))
    lines.append(f"mean steps              {steps}")
    return "\n".join(lines)


def _number(key: str, numbers: dict[str, float]) -> str:
    """A figure of a task with its standard error."""
    value, error = numbers[key], numbers.get(f"{key}_stderr", math.nan)
    shown = f"{key} {value:.4f}" if abs(value) < 1e4 else f"{key} {value:.4g}"
    return shown if math.isnan(error) else f"{shown} +- {error:.2g}"
