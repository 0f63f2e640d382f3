"""Reads what sweeps and calibrations wrote. No torch here: the report is made from files alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from twoscale.config import UserError
from twoscale.config.files import fingerprint
from twoscale.config.run_folder import RunFolder
from twoscale.config.serial import read_json, read_jsonl
from twoscale.config.show import data_frame
from twoscale.tradeoff.results import by_group
from twoscale.tradeoff.stats import pareto, ratio_interval

ROUNDS = 3  # of timing; fewer tell nothing on how much times vary
TOGETHER = 24  # points that take turns in one group of timing, the full run among them
PRINTED = 5e-5  # nats: half of the last digit of a printed loss; a smaller difference is none
FEWEST_OF_A_KIND = 30  # tokens; a kind with fewer is not reported
ORACLES = ("oracle-stay", "oracle-lagrange")
CALIBRATION_VERSION = 2  # of calibration.json; a file without a version is of an earlier one


@dataclass(frozen=True, repr=False)
class Sweep:
    """One sweep: what it was measured on, and its points with their times merged in."""

    header: dict[str, Any]
    points: list[dict[str, Any]]
    rounds: int
    """How often times were taken."""
    choices: Sequence[dict[str, Any]] = ()
    """On a task: the setting of each rule that was certified to keep the accuracy."""
    comparisons: Sequence[dict[str, Any]] = ()
    """On a task: steps of one rule's choice minus another's."""
    commands: Sequence[str] = ()
    """The settings of the commands that measured it, as the command line writes them; earlier versions wrote none down."""

    @property
    def task(self) -> str | None:
        """The task that was swept; None for text."""
        return self.header.get("task")

    def __repr__(self) -> str:
        head = self.header
        timed = f"timed {self.rounds} times" if self.rounds else "not timed"
        if self.task is not None:
            from twoscale.tradeoff.depth_summary import best_words

            measured = f"{len(self.points)} points on {head['tokens']:,} answers"
            return f"Sweep({head['checkpoint']}, task {self.task}: {measured}, {best_words(self)})"
        return (
            f"Sweep({head['checkpoint']}: {len(self.points)} points on {head['tokens']:,} tokens, at most {head['loops']} loops, {timed})"
        )

    def to_pandas(self) -> Any:
        """A row for each point; `steps_1`, `steps_2`, ... are the mean steps of the groups."""
        return data_frame([by_group({name: value for name, value in p.items() if name != "kind"}) for p in self.points])

    def family(self, name: str) -> list[dict[str, Any]]:
        """The points of one curve, by their setting."""
        return sorted((p for p in self.points if p["family"] == name), key=lambda p: p["setting"] if p["setting"] is not None else 0.0)

    def point(self, id: str) -> dict[str, Any] | None:
        return next((p for p in self.points if p["id"] == id), None)

    @property
    def cost(self) -> str:
        """What a point costs is told by `ms` where times were taken often enough to have an interval, else by `flops`."""
        return "ms" if self.rounds >= ROUNDS and all(p.get("ms") is not None for p in self.points) else "flops"

    def cheapest(self, families: Sequence[str], limit: float) -> dict[str, Any] | None:
        """Of some curves the point with the fewest FLOPs among those whose CE rises by no more than `limit`, by its whole interval."""
        fit = [p for p in self.points if p["family"] in families and p["dce_high"] <= limit]
        return min(fit, key=lambda p: p["flops"], default=None)

    def front(self, cost: str) -> list[dict[str, Any]]:
        """Points that none beats in both cost (`flops` or `ms`) and CE; oracles, which see the labels, are left out. A CE that is lower by
        less than PRINTED is no lower one."""
        known = [p for p in self.points if p["family"] not in ORACLES and p.get(cost) is not None]
        return [known[i] for i in pareto([(p[cost], p["ce"]) for p in known], PRINTED)]


def read_sweep(path: Path, mean_loops: int | None = None) -> Sweep | None:
    """A sweep.jsonl, complete or not; None where there is none. `mean_loops`, the model's default depth, is put into the header of a
    file of an older version, which lacks it."""
    lines = read_jsonl(path)
    if not lines:
        return None
    if lines[0].get("kind") != "sweep":
        raise UserError(f"{path} does not begin as a sweep does: move it away and sweep again")
    if lines[0].get("task") is not None:
        check_task_lines(lines, path)
    points = {line["id"]: dict(line) for line in lines if line.get("kind") == "point"}
    rounds = [line["ms"] for line in lines if line.get("kind") == "round"]
    reference = [r["full"] for r in rounds if "full" in r]
    for name, point in points.items():
        pairs = [(r[name], r["full"]) for r in rounds if name in r]
        if pairs:
            # The rounds' texts are the same for all points, so times are added up; a median would jump between texts.
            scale = median(reference)
            ratio, low, high = ratio_interval(pairs)
            point |= {"ms": scale * ratio, "ms_low": scale * low, "ms_high": scale * high, "speed": ratio}
        taken = [line["steps"][name] for line in lines if line.get("kind") == "round" and name in line.get("steps", {})]
        point |= {"timed_steps": sum(taken) / len(taken)} if taken else {}
    header = lines[0] if mean_loops is None else {"mean_loops": mean_loops} | lines[0]
    choices, comparisons = ([line for line in lines if line.get("kind") == kind] for kind in ("choice", "comparison"))
    commands = tuple(dict.fromkeys(str(line["settings"]) for line in lines if line.get("kind") == "command"))
    counted = len({line.get("round") for line in lines if line.get("kind") == "round"})
    return Sweep(header, list(points.values()), counted, choices, comparisons, commands)


TASK_VERSION = 1
TASK_KEYS: dict[str, dict[str, Any]] = {  # kind of a line -> what it must hold
    "sweep": {"task": str, "loops": int, "tokens": int, "clusters": int, "max_accuracy_drop": float, "delta": float, "checkpoint": str},
    "point": {
        "id": str, "family": str, "accuracy": float, "accuracy_low": float, "accuracy_high": float, "drop": float, "drop_low": float,
        "drop_high": float, "mean_steps": float, "mean_steps_low": float, "mean_steps_high": float, "all_steps": float,
        "spearman": float | None, "spearman_low": float | None, "spearman_high": float | None, "by_depth": list,
    },
    "choice": {"family": str, "scope": str, "id": str | None, "bound": float | None, "tested": int, "settings": int},
    "comparison": {"id": str, "a": str, "b": str, "steps": float, "low": float, "high": float},
    "round": {"round": int, "ms": dict},
}  # fmt: skip


def check_task_lines(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """An error where a task's sweep.jsonl is of another version, or a line lacks what its kind has."""
    if lines[0].get("task_version") != TASK_VERSION:
        raise UserError(
            f"{path} is a task's sweep of version {lines[0].get('task_version')!r}, this program reads version {TASK_VERSION}: "
            "move it away and sweep again"
        )
    for number, line in enumerate(lines, start=1):
        wanted = TASK_KEYS.get(str(line.get("kind")))
        bad = [key for key, kind in (wanted or {"kind": str}).items() if not _is(line.get(key), kind)]
        bad += [] if wanted is None or _depths(line.get("by_depth", [])) else ["by_depth"]
        if wanted is None or bad:
            raise UserError(
                f"{path}, line {number} is no line of a task's sweep ({(bad or ['kind'])[0]}): move the file away and sweep again"
            )


def _is(value: Any, kind: Any) -> bool:
    """Whether a value read from JSON is of a kind; an integer may stand for a float, a bool for neither."""
    if isinstance(value, bool):
        return False
    return isinstance(value, kind | int if kind in (float, float | None) else kind)


def _depths(rows: Any) -> bool:
    keys = ("depth", "answers", "accuracy", "steps", "std")
    return isinstance(rows, list) and all(isinstance(row, dict) and all(_is(row.get(key), float) for key in keys) for row in rows)


def read_calibration(path: Path) -> dict[str, Any] | None:
    """A calibration.json; None where there is none."""
    if not path.exists():
        return None
    found = read_json(path)
    if not isinstance(found, dict) or not {"checkpoint", "rules", "loops"} <= set(found) or not isinstance(found["rules"], list):
        raise UserError(f"{path} is no calibration: write it anew with `twoscale calibrate`")
    if not isinstance(version := found.get("version", 1), int) or version > CALIBRATION_VERSION:
        raise UserError(f"{path} is of version {version!r}, this program reads up to {CALIBRATION_VERSION}: calibrate again, or update")
    return found


def read_calibration_of(run: Path, sweep: Sweep | None) -> dict[str, Any] | None:
    """The calibration of a run; None where there is none, or it is of another checkpoint or dtype than the sweep."""
    found = read_calibration(RunFolder(run).calibration)
    if found is None or sweep is None:
        return found
    return found if found.get("weights") == sweep.header.get("weights") and found.get("dtype", "fp32") == "fp32" else None


def came_with_model(run: Path) -> bool:
    """Whether a run's sweep is the one that came with the model that the run was made of (see `interop.measured`)."""
    files = RunFolder(run)
    source = read_json(files.source) if files.source.exists() else {}
    came = source.get("measured") if isinstance(source, dict) else None
    return came is not None and files.sweep.exists() and came == fingerprint(files.sweep)


def read_evaluation(path: Path) -> dict[str, Any] | None:
    """An evaluation.json; None where there is none."""
    if not path.exists():
        return None
    found = read_json(path)
    wanted = {
        "checkpoint": str,
        "optimizer": str,
        "tokens": int,
        "cross_entropy_by_loops": dict,
        "bigram_cross_entropy": float | int | None,
    }
    fits = isinstance(found, dict) and all(key in found and isinstance(found[key], kind) for key, kind in wanted.items())
    if not fits or not all(isinstance(loss, float | int) for loss in found["cross_entropy_by_loops"].values()):
        raise UserError(f"{path} is no evaluation: remove it, and write it anew with `twoscale reproduce`")
    return found  # type: ignore[no-any-return]
