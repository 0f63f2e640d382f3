"""`twoscale sweep` on a run of a task, and what tells it from a run on text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from twoscale import exits
from twoscale.config import UserError
from twoscale.tradeoff.load_run import LoadedRun
from twoscale.tradeoff.summary import TASK_VERSION, Sweep
from twoscale.tradeoff.task_points import fixed_settings, rule_settings, usable_rules
from twoscale.tradeoff.task_sweep import TaskSweeper
from twoscale.train.world import World

SAMPLES = 128  # of a task, to certify on and to report on
MAX_ACCURACY_DROP = 0.005  # half a point
DELTA = 0.05
TEXT_LOOPS = 30  # the most steps in text, if nothing is asked


def check_flags(opened: LoadedRun, of_text: Mapping[str, bool], of_tasks: Mapping[str, Any]) -> None:
    """An error for a setting that this kind of run does not have."""
    if opened.task is not None:
        for name, given in of_text.items():
            if given:
                raise UserError(f"{name} goes with text: this run is of the task {opened.task.name}, omit it")
    else:
        for name, value in of_tasks.items():
            if value is not None:
                raise UserError(f"{name} {value} goes with a task: this run was trained on text, omit it")


def default_loops(opened: LoadedRun) -> int:
    """The most steps if nothing is asked: 30 in text, on a task as many as its staircase has."""
    return TEXT_LOOPS if opened.task is None else max(2, opened.config.train.staircase_loops)


def check_drop(drop: float | None) -> float:
    """The drop of accuracy that is allowed."""
    drop = MAX_ACCURACY_DROP if drop is None else drop
    if not 0 < drop < 1:
        raise UserError(f"--max-accuracy-drop {drop:g}: a share of the answers between 0 and 1, 0.005 is half a point")
    return drop


def check_samples(samples: int | None) -> int:
    if samples is not None and not 2 <= samples <= 100_000:
        raise UserError(f"--samples {samples}: give between 2 and 100000")
    return SAMPLES if samples is None else samples


def fit_samples(count: int) -> int:
    """How many samples are fitted on: they only tell where to look."""
    return max(2, count // 4)


def sweep_task(
    opened: LoadedRun,
    about: tuple[Path, dict[str, Any], World, int],
    loops: int,
    rules: Sequence[str],
    learned: exits.Learned | None,
    samples: int | None,
    max_accuracy_drop: float | None,
    say: Callable[[str], None],
    quiet: bool,
) -> Sweep:
    """Every rule on the task: thresholds from the fit part, certified on the certify part, measured on the report part."""
    task = opened.task
    assert task is not None
    drop, count = check_drop(max_accuracy_drop), check_samples(samples)
    families: dict[str, exits.Rule] = usable_rules(opened.model.config, rules)
    if learned is not None:
        families |= {"learned": learned} | {f"learned:hits={n}": replace(learned, hits=n) for n in (2, 3)}
    fit = opened.text("fit", fit_samples(count))
    say(f"thresholds of {len(families)} rules are looked for on {len(fit.ids)} samples")
    settings = {"fixed": fixed_settings(loops)} | {word: rule_settings(opened.model, fit, rule, loops) for word, rule in families.items()}
    path, named, world, rounds = about
    named = named | {"task": task.name, "task_version": TASK_VERSION, "settings": vars(task)}
    sweeper = TaskSweeper(
        opened.model, opened.text("report", count), loops, path, named, world, rounds, count, source=task.name, quiet=quiet
    )
    return sweeper.certify_on(fit, opened.text("certify", count), drop, DELTA).run_task(settings, say)
