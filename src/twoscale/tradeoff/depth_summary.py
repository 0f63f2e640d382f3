"""Which rules find the depth, from a task's sweep: pure functions of the numbers, no torch; report/depth_words.py has the sentences.

D@-0.5 of a rule is the mean steps of the answers at its certified setting: the one with the fewest steps that passed the test on the
certify part (accuracy lower by half a point at most), measured on the report part. Where no setting passed it is the full run's.
"""

from dataclasses import dataclass
from typing import Any, Literal

from twoscale.config.words import plural
from twoscale.tradeoff.choice import below
from twoscale.tradeoff.summary import Sweep

GEOMETRY = ("step-norm", "acceleration", "cosine")  # rules on states alone, without a head and without training
FOLLOWS = 0.8  # rank correlation from which on steps are said to follow the true depth
ORACLES = ("true-depth", "true-depth+1")
BASE = ("full", "fixed", "random", *ORACLES)
# Comparisons that are made: the second hit, and the paper's claim, in the absolute form that it prints and relative to the state.
PAIRS = (
    ("acceleration", "acceleration:hits=1"),
    ("acceleration:normalize=state", "acceleration:normalize=state,hits=1"),
    ("acceleration:normalize=steps", "acceleration:normalize=steps,hits=1"),
    ("acceleration", "step-norm"),
    ("acceleration:normalize=state", "step-norm:relative=true"),
    ("acceleration", "kl"),
    ("acceleration:normalize=state", "kl"),
)
Verdict = Literal["finds", "saves", "no saving", "not certified"]


@dataclass(frozen=True)
class RuleDepth:
    """One rule at its certified setting."""

    family: str
    scope: str
    """`all`: every token leaves by the rule; `answers`: the answers alone, the other tokens take all loops."""
    id: str | None
    """The setting as the command line writes it; None where none was certified: all loops."""
    bound: float | None
    """Certified bound on the drop of accuracy."""
    steps: float
    steps_low: float
    steps_high: float
    """D@-0.5 with its 95 % interval over samples."""
    fixed: float
    """Steps of the best fixed depth, certified likewise."""
    accuracy: float
    drop: float
    drop_low: float
    drop_high: float
    """Accuracy on the report part, and how far it lies below the full run's, with an interval."""
    spearman: tuple[float, float, float] | None
    """Rank correlation of steps and true depth with its interval; None where all answers take the same steps."""
    all_steps: float
    """Mean steps of all tokens, whether asked or not."""
    random: float | None = None
    """Accuracy of random exits with the same mean steps."""

    @property
    def ratio(self) -> tuple[float, float, float]:
        """Steps beside the best fixed depth's, with the interval."""
        return self.steps / self.fixed, self.steps_low / self.fixed, self.steps_high / self.fixed

    @property
    def label(self) -> str:
        return family_label(self.family)

    @property
    def verdict(self) -> Verdict:
        """`finds`: fewer steps than the best fixed depth and a rank correlation of at least FOLLOWS, both by whole intervals; `saves`:
        fewer steps alone."""
        if self.id is None:
            return "not certified"
        if self.ratio[2] >= 1:
            return "no saving"
        return "finds" if self.spearman is not None and self.spearman[1] >= FOLLOWS else "saves"


def is_geometry(family: str) -> bool:
    return family.partition(":")[0] in GEOMETRY


def family_label(family: str) -> str:
    """A rule in words: `acceleration, relative to the state, one hit`."""
    name, _, rest = family.partition(":")
    names = {
        "kl": "KL",
        "min-p-kl": "min-p KL",
        "confidence": "margin",
        "learned": "learned controller",
        "true-depth": "true depths",
        "true-depth+1": "true depths and one step more",
    }
    words = [names.get(name, name.replace("-", " "))]
    settings = dict(part.split("=", 1) for part in rest.split(",") if "=" in part)
    if settings.pop("relative", "") == "true" or settings.get("normalize") == "state":
        settings.pop("normalize", None)
        words.append("relative to the state")
    if settings.pop("normalize", "") == "steps":
        words.append("relative to the steps")
    if name == "acceleration" or "hits" in settings:
        words.append({"1": "one hit", "2": "two hits"}.get(hits := settings.pop("hits", "2"), f"{hits} hits"))
    return ", ".join([*words, *(f"{key} = {value}" for key, value in settings.items())])


def best_fixed(sweep: Sweep) -> float:
    """Steps of the certified fixed depth; the full run's where none was certified."""
    chosen = next((c["id"] for c in sweep.choices if c["family"] == "fixed"), None)
    point = sweep.point(chosen) if chosen is not None else None
    return float(point["mean_steps"] if point is not None else sweep.header["loops"])


def depth_rows(sweep: Sweep) -> list[RuleDepth]:
    """Every rule at its certified setting, and the true depths; fewest steps first, rules without a certified setting last."""
    rows, fixed = [], best_fixed(sweep)
    for choice in sweep.choices:
        suffix = "@answers" if choice["scope"] == "answers" else ""
        point = sweep.point("full" if choice["id"] is None else choice["id"] + suffix)
        if point is not None:
            beside = sweep.point(f"random~{choice['id']}") if choice["scope"] == "all" else None
            rows.append(_row(choice["family"], choice["scope"], choice["id"], choice["bound"], point, fixed, beside))
    oracles = {name: sweep.point(name) for name in ORACLES}
    rows += [_row(name, "answers", name, None, point, fixed, None) for name, point in oracles.items() if point is not None]
    return sorted(rows, key=lambda row: (row.id is None, row.steps))


def _row(
    family: str, scope: str, id: str | None, bound: float | None, p: dict[str, Any], fixed: float, random: dict[str, Any] | None
) -> RuleDepth:
    rank = None if p["spearman"] is None else (p["spearman"], p["spearman_low"], p["spearman_high"])
    return RuleDepth(
        family, scope, id, bound, p["mean_steps"], p["mean_steps_low"], p["mean_steps_high"], fixed, p["accuracy"], p["drop"],
        p["drop_low"], p["drop_high"], rank, p["all_steps"], None if random is None else random["accuracy"],
    )  # fmt: skip


def is_finished(sweep: Sweep) -> bool:
    """Whether every rule that was begun has its certified setting for all tokens and for the answers, and both were measured."""
    families = {p["family"] for p in sweep.points if not p["family"].endswith("@answers")} - {"full", "random", *ORACLES}
    wanted = {(family, scope) for family in families for scope in ("all", "answers")} - {("fixed", "answers")}
    chosen = {(c["family"], c["scope"]): c["id"] for c in sweep.choices}
    ids = {p["id"] for p in sweep.points}
    points = {id + ("@answers" if scope == "answers" else "") for (_, scope), id in chosen.items() if id is not None}
    return bool(families) and wanted <= set(chosen) and points <= ids and {"full", "true-depth"} <= ids


def rules_alone(rows: list[RuleDepth], scope: str = "all") -> list[RuleDepth]:
    """Without the baselines, of one scope."""
    return [row for row in rows if row.family not in BASE and row.scope == scope]


@dataclass(frozen=True)
class TimeSaved:
    """Cached decoding with a rule beside the best fixed depth, on the same tokens."""

    id: str
    fixed: str
    time: float
    """Share of the time that is saved; below 0 where it takes longer."""
    steps: float
    """Share of the steps that is saved."""
    measured: bool = True
    """Whether the times differ by whole intervals."""

    @property
    def share(self) -> float | None:
        """Time saved beside steps saved; None where no steps are saved."""
        return self.time / self.steps if self.steps > 0 else None


def time_saved(sweep: Sweep) -> list[TimeSaved]:
    """The rules that were timed, beside the best fixed depth."""
    timed = {p["id"]: p for p in sweep.points if p.get("timed_steps") is not None and p.get("ms") is not None}
    fixed = next((p for p in timed.values() if p["family"] == "fixed"), timed.get("full"))
    if fixed is None:
        return []
    return [
        TimeSaved(
            p["id"],
            fixed["id"],
            1 - p["ms"] / fixed["ms"],
            1 - p["timed_steps"] / fixed["timed_steps"],
            below(p, fixed, "ms") or below(fixed, p, "ms"),
        )
        for p in timed.values()
        if p["family"] not in BASE
    ]


def best_words(sweep: Sweep) -> str:
    """The best rule in half a sentence."""
    rules = [row for row in rules_alone(depth_rows(sweep)) if row.id is not None]
    if not rules:
        return "no rule was certified"
    best = rules[0]
    return (
        f"best rule {best.id}: {best.steps:.2f} steps beside {best.fixed:g} of the best fixed depth, {plural(len(rules), 'rule')} certified"
    )
