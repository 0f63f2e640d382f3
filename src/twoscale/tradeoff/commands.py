"""`twoscale sweep`, `calibrate` and `eval` on a run's folder, as functions that return values.

    found = sweep(Path("runs/tiny"), taus=(0.01, 0.1), progress=print)
    found.to_pandas()

`progress` is called with a line now and then; without it nothing is printed. `twoscale.sweep` and its like take `bundled` as well.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from twoscale import exits
from twoscale.config import UserError
from twoscale.config.dtypes import WEIGHT_DTYPES, WeightDtype
from twoscale.config.files import write_json
from twoscale.config.lock import lock
from twoscale.config.run_folder import RunFolder
from twoscale.config.serial import read_json
from twoscale.exits import Exit
from twoscale.tradeoff.calibrate import Calibrator, Goal, Texts
from twoscale.tradeoff.choice import choose, name_of
from twoscale.tradeoff.controller import controller as read_or_train_controller
from twoscale.tradeoff.evaluate import evaluate as evaluate_text
from twoscale.tradeoff.heldout import heldout_windows
from twoscale.tradeoff.load_run import LoadedRun, calibrated_exit, chosen_exit, load_run
from twoscale.tradeoff.points import RULES, TAUS, Point, Seen, Table, grid, settings
from twoscale.tradeoff.results import Calibration, HeldOutLoss
from twoscale.tradeoff.samples import write_samples
from twoscale.tradeoff.stats import interval
from twoscale.tradeoff.summary import Sweep, read_calibration_of
from twoscale.tradeoff.sweep import Sweeper
from twoscale.tradeoff.task_commands import (
    MAX_ACCURACY_DROP,
    check_drop,
    check_flags,
    check_samples,
    default_loops,
    fit_samples,
    sweep_task,
)
from twoscale.tradeoff.task_points import TASK_RULES
from twoscale.train.checkpoint import find_checkpoint

MAX_DCE = 0.005  # nats: what a calibration may cost if nothing is asked for
WINDOWS = 20  # held-out windows of a sweep
CERTIFY_WINDOWS = 48  # held-out windows that a calibration certifies on
Progress = Callable[[str], None]


def sweep(
    run: Path,
    *,
    rules: Sequence[str] = RULES,
    taus: Sequence[float] = TAUS,
    loops: int | None = None,
    windows: int = WINDOWS,
    rounds: int = 6,
    controller: bool = True,
    samples: int | None = None,
    max_accuracy_drop: float | None = None,
    few: bool = False,
    checkpoint: str | None = None,
    data_dir: Path | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """What every exit rule saves and costs, beside fixed depths, random exits and two oracles.

    Written to RUN/sweep.jsonl line by line; what the file has is not measured again. `rules` are swept over `taus` (NAME:VALUE takes one
    setting as it is), `loops` is the most steps that a group may take (30 by default), `windows` how many held-out windows are measured on,
    `rounds` how often times are taken, `few` asks for fewer baselines. With `controller` a learned controller is trained (once) and
    compared. By default it is the newest checkpoint, on the run's own held-out text. Where torchrun has started several processes they
    share the work, and each returns the whole sweep.

    On a model of a task (`hops`, `carry`) all rules are swept, over thresholds that held-out samples suggest: accuracy of the answers and
    their steps by true depth, and for each rule the setting with the fewest steps whose accuracy is certified to drop by no more than
    `max_accuracy_drop` (0.005). `samples` held-out samples are certified on and as many reported on; a quarter as many are fitted on.
    """
    from twoscale.train.world import open_world  # with it comes torch.distributed, which the others do not need

    say = progress or _quiet
    if windows < 2 or rounds < 1 or (loops is not None and loops < 2):
        raise UserError("--windows and --loops are at least 2, --rounds at least 1")
    if not taus or not all(0 <= tau < float("inf") for tau in taus):
        raise UserError("--taus are numbers of at least 0")
    with open_world() as world, contextlib.ExitStack() as held:
        opened = load_run(run, checkpoint, data_dir, world.device)
        of_tasks = {"--samples": samples, "--max-accuracy-drop": max_accuracy_drop}
        check_flags(opened, {"--taus": tuple(taus) != TAUS, "--windows": windows != WINDOWS}, of_tasks)
        if opened.task is None:
            for name in rules:
                settings(name, tuple(taus))
        problem = None
        if world.main:
            try:
                held.enter_context(lock(run, "sweep"))
            except UserError as error:
                problem = str(error)
        world.agree(problem)
        loops = loops or default_loops(opened)
        learned = None
        if controller:
            if world.main:
                try:
                    say("the controller is read or trained")
                    read_or_train_controller(run, opened, loops)
                except UserError as error:
                    problem = str(error)
            world.agree(problem)
            learned = read_or_train_controller(run, opened, loops)
        about = (RunFolder(run).sweep, opened.about, world, rounds)
        if opened.task is not None:
            words = TASK_RULES if tuple(rules) == RULES else tuple(rules)
            return sweep_task(opened, about, loops, words, learned, samples, max_accuracy_drop, say, quiet=progress is None)
        calibrated = calibrated_exit(run, opened.about, must=False)
        points = grid(opened.model.config, loops, tuple(rules), tuple(taus), learned, calibrated, few)
        sweeper = Sweeper(
            opened.model, opened.text("report", windows), loops, *about, windows,
            lambda token: opened.tokenizer.decode([token]), opened.source, quiet=progress is None,
        )  # fmt: skip
        sweeper.remarks |= {"few": True} if few else {}
        sweeper.asked = sweep_settings(rules, taus, loops, windows, rounds, controller, few)
        found = sweeper.run(points, say)
        if world.main:
            _write_samples(run, opened, found, {p.id: p for stage in points for p in stage})
        return found


def sweep_settings(rules: Sequence[str], taus: Sequence[float], loops: int, windows: int, rounds: int, controller: bool, few: bool) -> str:
    """The settings of a sweep of text as the command line writes them; rules and thresholds only where they are not the usual ones."""
    words = [] if tuple(rules) == RULES else ["--rules", *rules]
    words += [] if tuple(taus) == TAUS else ["--taus", *(f"{tau:g}" for tau in taus)]
    words += ["--loops", str(loops), "--windows", str(windows), "--rounds", str(rounds)]
    return " ".join([*words, *([] if controller else ["--no-controller"]), *(["--few"] if few else [])])


def _write_samples(run: Path, opened: LoadedRun, found: Sweep, points: Mapping[str, Point]) -> None:
    """Three texts with the recommended rule; where a fixed depth is recommended, with the best rule, so that there are steps to show.
    Kept where they are there already."""
    loops, choice = found.header["loops"], choose(found, read_calibration_of(run, found))
    assert choice is not None
    point = next(p for p in (choice.rule, choice.pick, found.point("full")) if p is not None and p["id"] in points)
    exit, words = points[point["id"]].exit(Seen({}, _no_table)), name_of(point, loops)
    path = RunFolder(run).samples
    old = read_json(path) if path.exists() else {}
    if not isinstance(old, dict) or any(old.get(key) != value for key, value in {**opened.about, "rule": words, "loops": loops}.items()):
        write_samples(run, opened, exit, words, loops)


def _no_table() -> Table:
    raise AssertionError("oracles write no samples")


def calibrate(
    run: Path,
    *,
    max_dce: float | None = None,
    mean_steps: float | None = None,
    ms: float | None = None,
    max_accuracy_drop: float | None = None,
    rule: str = "acceleration",
    delta: float = 0.05,
    loops: int | None = None,
    windows: int = CERTIFY_WINDOWS,
    samples: int | None = None,
    checkpoint: str | None = None,
    data_dir: Path | None = None,
    dtype: WeightDtype = "fp32",
    progress: Progress | None = None,
) -> Calibration:
    """Thresholds for each group, found on one part of the held-out text and certified on another; written to RUN/calibration.json.

    Asked for is one of three: the loss rises by at most `max_dce` nats a token (0.005 by default), so many `mean_steps` a group, or so
    many `ms` a token, one sequence, on this machine. `rule` is a rule's name, or NAME:VALUE,setting=value, of which the threshold is
    replaced; `learned` trains a controller first. `delta` is the chance that anything that is certified does not hold. `windows` held-out
    windows are certified on and as many reported on; a third as many are fitted on.

    On a model of a task `max_accuracy_drop` (0.005 by default) takes the place of `max_dce`, and `samples` (128) that of `windows`; a
    quarter as many are fitted on.

    The model is calibrated with its weights rounded to `dtype`, and exit="auto" is for a model loaded with the same one.
    """
    if dtype not in WEIGHT_DTYPES:
        raise UserError(f"dtype = {dtype!r}: choose the one that the calibration is for, {', '.join(WEIGHT_DTYPES)}")
    say, asked = progress or _quiet, (max_dce, mean_steps, ms, max_accuracy_drop)
    goal = Goal(*asked) if any(value is not None for value in asked) else None
    if windows < 2 or (loops is not None and loops < 2):
        raise UserError("--windows and --loops are at least 2")
    kind = exits.NAMES.get(rule.split(":")[0])
    if kind is not exits.Learned:
        needs_value = kind is not None and ":" not in rule and "tau" in kind.__dataclass_fields__
        parsed = exits.parse(f"{rule}:0.01" if needs_value else rule)
    opened = load_run(run, checkpoint, data_dir, dtype=dtype)
    check_flags(
        opened,
        {"--max-dce": max_dce is not None, "--windows": windows != CERTIFY_WINDOWS},
        {"--samples": samples, "--max-accuracy-drop": max_accuracy_drop},
    )
    loops = loops or default_loops(opened)
    if opened.task is not None:
        windows = check_samples(samples)
        goal = goal or Goal(max_accuracy_drop=MAX_ACCURACY_DROP)
        check_drop(goal.max_accuracy_drop)
    goal = goal or Goal(max_dce=MAX_DCE)
    fitted = max(1, windows // 3) if opened.task is None else fit_samples(windows)
    texts = Texts(opened.text("fit", fitted), opened.text("certify", windows), opened.text("report", windows))
    with lock(run, "calibrate"):
        if kind is exits.Learned:
            say("the controller is read or trained")
            parsed = read_or_train_controller(run, opened, loops)
        known = opened.about | {"dtype": dtype, "windows": windows, "source": opened.source}
        known |= {"task": opened.task.name} if opened.task is not None else {}
        record = known | Calibrator(opened.model, parsed, texts, loops, delta, say).run(goal)
        write_json(RunFolder(run).calibration, record)
    return Calibration(record, calibrated_exit(run, opened.about, dtype=dtype) or {})


def evaluate(
    run: Path,
    *,
    exit: Exit | None = None,
    loops: int | Sequence[int] | None = None,
    windows: int = 64,
    checkpoint: str | None = None,
    data_dir: Path | None = None,
) -> HeldOutLoss:
    """Held-out loss, perplexity and bits per byte, at fixed loops or with an exit rule (`auto`: as calibrated).

    `loops` is the most steps that a group may take; by default the model's mean_loops, or what was calibrated. `windows` held-out windows
    are spread evenly over the split.
    """
    if windows < 2:
        raise UserError("--windows is at least 2")
    opened = load_run(run, checkpoint, data_dir)
    rule, max_loops = chosen_exit(find_checkpoint(run, checkpoint), exit, loops)
    counts = opened.model.config.loops_for(max_loops)
    text = heldout_windows(opened.data, opened.model.config.block_size, windows)
    found = evaluate_text(opened.model, text, rule, counts)
    ce, size = float(found.losses.mean()), int(opened.tokenizer.byte_lengths()[text.targets].sum())
    low, high = interval(found.losses.numpy(), text.clusters.numpy())
    return HeldOutLoss(
        checkpoint=opened.about["checkpoint"], tokens=text.targets.numel(), bytes=size, windows=len(text.ids), source=opened.source,
        exit=spelt(exit), loops=list(counts), ce=ce, ce_low=low, ce_high=high, ppl=math.exp(ce),
        bits_per_byte=float(found.losses.sum()) / math.log(2) / size, steps=found.steps.double().mean(dim=(0, 1)).tolist(),
    )  # fmt: skip


def spelt(exit: Exit | None) -> str | None:
    """An exit as the command line writes it; the rules of several groups one after the other."""
    if exit is None or isinstance(exit, str):
        return exit
    if isinstance(exit, Mapping):
        return ", ".join(str(spelt(exit[g])) for g in sorted(exit))
    return exits.spell(exit)


def _quiet(line: str) -> Any:
    """No progress."""
