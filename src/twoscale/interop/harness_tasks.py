"""`twoscale eval --tasks`: tasks of the lm-evaluation-harness on a model, at fixed loops or with an exit rule."""

from collections.abc import Sequence
from pathlib import Path

from twoscale.config import UserError, missing_package
from twoscale.config.run_folder import TOKENIZER
from twoscale.exits import Exit
from twoscale.interop.load import find, load
from twoscale.tradeoff.commands import spelt
from twoscale.tradeoff.load_run import chosen_exit
from twoscale.tradeoff.results import TaskScores
from twoscale.train.checkpoint import find_checkpoint

BATCH = 16  # texts that share a pass


def evaluate_tasks(
    model: str | Path,
    tasks: Sequence[str],
    *,
    exit: Exit | None = None,
    loops: int | None = None,
    include: Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int | None = None,
    checkpoint: str | None = None,
) -> TaskScores:
    """What each task reports, and the mean steps. `model` is any folder that `twoscale.load` takes, or `bundled`.

    `include` is a folder with task files of your own. `limit` takes only so many examples of each task, `num_fewshot` puts so many solved
    examples before each question (by default as the task says), `batch_size` texts go through the model together (16; fewer where their
    logits would need much memory).
    """
    for name, value, least in (("limit", limit, 1), ("num-fewshot", num_fewshot, 0), ("batch-size", batch_size, 1)):
        if value is not None and value < least:
            raise UserError(f"--{name} {value}: at least {least}")
    try:
        from twoscale.interop.harness import HarnessModel, evaluate
    except ModuleNotFoundError:
        raise missing_package("--tasks needs the lm-evaluation-harness", "eval") from None
    folder = find(model) if checkpoint is None else find_checkpoint(Path(model), checkpoint)
    looped, tokenizer = load(folder)
    rule, max_loops = chosen_exit(folder, exit, loops, looped.weight_dtype)
    if tokenizer is None:
        raise UserError(f"{model} has no {TOKENIZER}, which the harness needs")
    lm = HarnessModel(looped, tokenizer, max_loops, rule, batch_size or BATCH)
    results = evaluate(lm, list(tasks), include, limit, num_fewshot)
    return TaskScores(
        str(model), spelt(exit), list(looped.config.loops_for(max_loops)), num_fewshot, lm.batch, limit, results, lm.tokens, lm.mean_steps
    )
