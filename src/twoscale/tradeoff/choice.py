"""Which setting of a sweep to use: a fixed depth or an exit rule. Pure functions of the numbers, no torch; report/advice.py has the words.

Where a calibration certified a fixed depth or thresholds to a limit on the loss, the choice is among these. Otherwise it is among the
settings whose CE rises by no more than FLAT on the sweep's own text. Fixed depths are compared by counted FLOPs, which are exact: fewer
loops are a part of the work of more, however times vary. A rule is recommended only where it costs less than that fixed depth and than
those of less work within the limit, by whole intervals; otherwise the one that ties with it is. The default depth is kept where nothing
costs less than it, and where fewer loops have a higher loss and no shorter time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from twoscale.config.words import MARGIN, all_loops, plural
from twoscale.tradeoff.summary import ORACLES, PRINTED, Sweep

FLAT = 0.01  # nats: a rise of CE that is called none
FIXED = ("full", "fixed", "fixed-one")
BASELINES = (*FIXED, "random")
Point = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """What is recommended, and what it was chosen among."""

    pick: Point
    fixed: Point
    """The best fixed depth."""
    rule: Point | None
    """The best exit rule of the same quality."""
    certified: bool
    """Whether the limit on the loss was certified by a calibration; otherwise it is FLAT on the sweep's text."""
    undercut: tuple[Point, Point] | None = None
    """A rule and the fixed depth that it costs less than, where `fixed` is another one because it ties with that rule."""


def choose(sweep: Sweep, calibration: Mapping[str, Any] | None = None) -> Choice | None:
    """The setting that is recommended; None while the sweep has no full run."""
    if sweep.point("full") is None or sweep.cheapest(FIXED, FLAT) is None:
        return None
    return _certified(sweep, calibration) or choose_swept(sweep)


def choose_swept(sweep: Sweep) -> Choice:
    """The choice on the sweep's text: the cheapest fixed depth that keeps CE and is better than the default depth, which is kept
    otherwise; or a rule that costs less; or a fixed depth of less work that ties with such a rule."""
    base, within, cost = default_point(sweep), fixed_within(sweep), sweep.cost
    kept = [p for p in within if p is base or base["dce_high"] > FLAT or better_than_default(p, base, cost)]
    fixed, undercut = min(kept, key=lambda p: float(p["flops"])), None
    while (rule := _best_rule(sweep, fixed)) is not None and below(rule, fixed, cost):
        tied = [p for p in within if p["flops"] < fixed["flops"] and not below(rule, p, cost)]
        if not tied:
            break
        fixed, undercut = min(tied, key=lambda p: float(p["flops"])), (rule, fixed)
    return replace(_chosen(fixed, rule, cost, certified=False), undercut=undercut)


def fixed_within(sweep: Sweep) -> list[Point]:
    """Fixed depths that keep CE on the sweep's text."""
    return [p for p in sweep.points if p["family"] in FIXED and p["dce_high"] <= FLAT]


def better_than_default(point: Point, base: Point, cost: str) -> bool:
    """Whether a fixed depth is worth leaving the default one for: it costs less, or it takes fewer FLOPs and its loss, paired with the
    default depth's, is not shown to be higher."""
    return below(point, base, cost) or (below(point, base, "flops") and not shown_higher(point))


def shown_higher(point: Point) -> bool:
    """Whether the loss of a point is higher than the default depth's by the whole paired interval."""
    return bool(point.get("default_dce_low", 0.0) > 0)


def below(a: Point, b: Point, cost: str) -> bool:
    """Whether `a` costs less than `b`: by whole intervals, and where FLOPs decide by MARGIN at least. Two points of one sweep were measured
    on the same text; a fixed depth's FLOPs hardly vary, so the rule's own interval is that of the paired difference."""
    low, high = b.get(f"{cost}_low"), a.get(f"{cost}_high")
    apart = low is None or high is None or high < low
    return bool(apart and (cost == "ms" or a[cost] < (1 - MARGIN) * b[cost]))


def default_point(sweep: Sweep) -> Point:
    """The point at the model's default depth; the full run where the sweep has no point there."""
    full, default = sweep.point("full"), sweep.header.get("mean_loops")
    assert full is not None
    return sweep.point(f"fixed:{default}") or full if default != sweep.header["loops"] else full


def lower_and_left(sweep: Sweep, pick: Point) -> list[Point]:
    """Settings whose measured loss and cost both lie below a point's, by as much as is printed, cheapest first. Oracles and random exits
    are no settings to use and are left out."""
    known = [p for p in sweep.points if p["family"] not in ("random", *ORACLES) and p is not pick]
    found = [p for p in known if p[sweep.cost] < pick[sweep.cost] and p["ce"] < pick["ce"] - PRINTED]
    return sorted(found, key=lambda p: float(p[sweep.cost]))


def overlap(a: Point, b: Point, name: str) -> bool:
    """Whether the intervals of two points overlap: of `ms`, `flops` or `dce`. Without an interval a value stands for itself."""
    (a_low, a_high), (b_low, b_high) = ([p[key] if (key := f"{name}_{end}") in p else p[name] for end in ("low", "high")] for p in (a, b))
    return bool(a_low <= b_high and b_low <= a_high)


def name_of(point: Point, loops: int) -> str:
    """A point in words."""
    if point["family"] == "full":
        return all_loops(loops)
    if point["family"] == "fixed-one":
        return f"{point['label']} and all {loops} in the others"
    if point["family"] == "calibrated":
        return f"the calibrated thresholds ({point['label'].removeprefix('calibrated: ')})"
    return str(point.get("label") or point["id"])


def why_not_certified(sweep: Sweep, calibration: Mapping[str, Any]) -> str:
    """Why a calibration does not decide what is recommended; empty where it does."""
    limit, fixed = calibration["goal"].get("max_dce"), calibration["report"].get("fixed")
    if limit is None:
        return "the calibration was asked for a speed, not for a limit on the loss"
    if fixed is None:
        return "the calibration is of an older version, which tested no fixed depth: calibrate again"
    if calibration["loops"] != sweep.header["loops"]:
        return f"the calibration is of at most {plural(calibration['loops'], 'loop')}, the sweep of {sweep.header['loops']}"
    if fixed["rule"] is None and not any(calibration["rules"]):
        return f"the calibration could certify no setting to its limit of {limit:g} nats"
    if fixed["rule"] is not None and sweep.point(fixed["rule"]) is None:
        return f"{fixed['rule']}, which the calibration certified, was not swept"
    if any(calibration["rules"]) and sweep.point(_calibrated_id(calibration)) is None:
        return "the sweep was made before the calibration: sweep again"
    return ""


def _certified(sweep: Sweep, calibration: Mapping[str, Any] | None) -> Choice | None:
    """The choice among what a calibration certified; None where it certified nothing, or cannot be compared with the sweep."""
    if calibration is None or why_not_certified(sweep, calibration):
        return None
    known = calibration["report"]["fixed"]["rule"]
    fixed = sweep.point("full" if known is None else known)
    rule = sweep.point(_calibrated_id(calibration)) if any(calibration["rules"]) else None
    assert fixed is not None
    return _chosen(fixed, rule, sweep.cost, certified=True)


def _chosen(fixed: Point, rule: Point | None, cost: str, certified: bool) -> Choice:
    """A tie goes to the fixed depth."""
    pick = rule if rule is not None and below(rule, fixed, cost) else fixed
    return Choice(pick, fixed, rule, certified)


def _best_rule(sweep: Sweep, fixed: Point) -> Point | None:
    """The cheapest rule that keeps CE; one that costs less than the fixed depth by its whole interval comes first."""
    kept = [p for p in sweep.points if p["family"] not in (*BASELINES, *ORACLES) and p["dce_high"] <= FLAT]
    return min(kept, key=lambda p: (not below(p, fixed, sweep.cost), p[sweep.cost]), default=None)


def _calibrated_id(calibration: Mapping[str, Any]) -> str:
    """The point of a sweep that has the calibrated thresholds."""
    return f"calibrated {' '.join(rule or 'all' for rule in calibration['rules'])}"
