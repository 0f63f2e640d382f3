"""The paper's claims on exits, (e) to (g): pure functions of a sweep, each judged by a rule that is stated beside the verdict."""

from collections.abc import Sequence

from twoscale.report.claims import Claim, Outcome
from twoscale.report.words import signed
from twoscale.tradeoff.choice import FLAT, Point, name_of
from twoscale.tradeoff.summary import ROUNDS, Sweep


def judge_exits(sweep: Sweep) -> list[Claim]:
    """Claims (e), (f) and (g)."""
    return [_faster(sweep), _kl(sweep), _step_norm(sweep)]


def _at(sweep: Sweep, family: str, tau: float) -> Point | None:
    return next((p for p in sweep.family(family) if p["setting"] == tau), None)


def beside(x: float, *limits: float, digits: int = 2) -> str:
    """A number with as many digits as it takes to see on which side of the limits it lies, so that a verdict never contradicts it."""
    while digits < 9 and any((round(x, digits) > limit) != (x > limit) or (round(x, digits) < limit) != (x < limit) for limit in limits):
        digits += 1
    return f"{x:.{digits}f}"


def _signed(x: float, *limits: float) -> str:
    """A rise of CE with its sign, beside limits."""
    return signed(x) if len(shown := beside(x, *limits, digits=4)) <= len(f"{x:.4f}") else f"{'+' if x > 0 else ''}{shown}"


def _rise(point: Point, *limits: float) -> str:
    return f"{signed(point['dce'])} [{_signed(point['dce_low'], *limits)}, {_signed(point['dce_high'], *limits)}]"


def _faster(sweep: Sweep) -> Claim:
    text = "Raising tau from 1e-5 to 1e-2 makes decoding with the acceleration rule much faster at flat CE."
    rule = (
        f"ms a token at 1e-2 over that at 1e-5, and the rise of CE at 1e-2 against the full run, with 95 % intervals. Confirmed when the "
        f"ratio is 0.80 at most and the rise {FLAT} nats at most, refuted when the ratio is above 0.95 or the rise above {2 * FLAT}, "
        f"whole intervals each; times count from {ROUNDS} rounds on."
    )
    a, b = _at(sweep, "acceleration", 1e-5), _at(sweep, "acceleration", 1e-2)
    if a is None or b is None or a.get("ms") is None or b.get("ms") is None:
        return Claim("e", text, rule, "not measured: sweep acceleration at 1e-5 and 1e-2", "undecided")
    low, high = b["ms_low"] / a["ms_high"], b["ms_high"] / a["ms_low"]
    outcome: Outcome = "undecided"
    if high <= 0.8 and b["dce_high"] <= FLAT and sweep.rounds >= ROUNDS:
        outcome = "confirmed"
    elif (low > 0.95 and sweep.rounds >= ROUNDS) or b["dce_low"] > 2 * FLAT:
        outcome = "refuted"
    measured = (
        f"{a['ms']:.2f} to {b['ms']:.2f} ms a token ({b['ms'] / a['ms']:.2f} [{beside(low, 0.95)}, {beside(high, 0.8)}]; paper 0.62), "
        f"{a['mean_steps']:.1f} to {b['mean_steps']:.1f} steps, dCE {_rise(b, FLAT, 2 * FLAT)}"
    )
    return Claim("e", text, rule, measured, outcome)


def _kl(sweep: Sweep) -> Claim:
    text = "KL keeps CE but is slower than as many steps without it (the paper: because of the head; that cause is not tested here)."
    rule = (
        f"The rise of CE at the paper's four thresholds, and ms a token at 1e-3 beside what as many steps take without a rule "
        f"(interpolated between the two fixed depths next to it, both intervals included). Confirmed when no rise is above {FLAT} nats and "
        f"KL takes 1.1 times as long or more, refuted when a rise is, or KL takes less than 1.02 times as long, whole intervals each; "
        f"times count from {ROUNDS} rounds on. Why it is slower is not part of the rule."
    )
    points = [p for tau in (1e-5, 1e-4, 1e-3, 1e-2) if (p := _at(sweep, "kl", tau)) is not None]
    point, others = _at(sweep, "kl", 1e-3), [p for f in ("fixed", "full") for p in sweep.family(f) if p.get("ms") is not None]
    if len(points) < 4 or point is None or point.get("ms") is None:
        return Claim("f", text, rule, "not measured: sweep kl at the paper's thresholds", "undecided")
    if (pair := neighbours(others, point["mean_steps"])) is None:
        return Claim("f", text, rule, f"not measured: no fixed depths on both sides of {point['mean_steps']:.1f} steps", "undecided")
    plain = {key: _interpolated(*pair, point["mean_steps"], key) for key in ("ms", "ms_low", "ms_high")}
    ratio, low, high = point["ms"] / plain["ms"], point["ms_low"] / plain["ms_high"], point["ms_high"] / plain["ms_low"]
    loops = sweep.header["loops"]
    between = " and ".join(name_of(p, loops) for p in pair) if pair[0] is not pair[1] else ""
    worst = max(points, key=lambda p: p["dce_high"])
    outcome: Outcome = "undecided"
    if worst["dce_high"] <= FLAT and low >= 1.1 and sweep.rounds >= ROUNDS:
        outcome = "confirmed"
    elif max(p["dce_low"] for p in points) > FLAT or (high < 1.02 and sweep.rounds >= ROUNDS):
        outcome = "refuted"
    measured = (
        f"{ratio:.2f} [{beside(low, 1.1)}, {beside(high, 1.02)}] times what {point['mean_steps']:.1f} steps take without a rule, "
        f"{f'interpolated between {between}' if between else f'as {name_of(pair[0], loops)}'} "
        f"(its looks, which read the head after each step, are {100 * point['flops_looks'] / point['flops']:.0f} % of its FLOPs); "
        f"highest upper end of dCE {_signed(worst['dce_high'], FLAT)}, at tau = {worst['setting']:g}{_beside_acceleration(sweep, point)}"
    )
    return Claim("f", text, rule, measured, outcome)


def _beside_acceleration(sweep: Sweep, point: Point) -> str:
    """The time of KL beside that of acceleration at the same threshold, where a rule that looks longer may take fewer steps."""
    other = _at(sweep, "acceleration", point["setting"])
    if other is None or other.get("ms") is None:
        return ""
    ratio, low, high = point["ms"] / other["ms"], point["ms_low"] / other["ms_high"], point["ms_high"] / other["ms_low"]
    return (
        f". Beside acceleration at the same tau it takes {ratio:.2f} [{beside(low, 1.0)}, {beside(high, 1.0)}] of the time, with "
        f"{point['mean_steps']:.1f} steps against {other['mean_steps']:.1f}; that is not part of the rule"
    )


def _step_norm(sweep: Sweep) -> Claim:
    text = "Step norm loses quality beyond 1e-3, and sharply at 1e-2."
    rule = (
        f"The rise of CE at 1e-3 and at 1e-2. Confirmed when the second is above {FLAT} nats by its whole interval and above the first, "
        f"refuted when it is below {FLAT} by its whole interval."
    )
    a, b = _at(sweep, "step-norm", 1e-3), _at(sweep, "step-norm", 1e-2)
    if a is None or b is None:
        return Claim("g", text, rule, "not measured: sweep step-norm at 1e-3 and 1e-2", "undecided")
    outcome: Outcome = "undecided"
    if b["dce_low"] > FLAT and b["dce"] > a["dce"]:
        outcome = "confirmed"
    elif b["dce_high"] <= FLAT:
        outcome = "refuted"
    kept = [p["setting"] for p in sweep.family("step-norm") if p["dce_high"] <= FLAT]
    tried = max(p["setting"] for p in sweep.family("step-norm"))
    largest = f"; the largest threshold tried that keeps CE within {FLAT} nats by its whole interval is {max(kept):g}" if kept else ""
    largest += ", and no larger one was tried" if kept and max(kept) == tried else ""
    return Claim("g", text, rule, f"dCE {_rise(a)} at 1e-3, {_rise(b, FLAT)} at 1e-2{largest}", outcome)


def neighbours(points: Sequence[Point], steps: float) -> tuple[Point, Point] | None:
    """The points with the nearest mean steps at or below, and at or above; None where one side has none."""
    below = [p for p in points if p["mean_steps"] <= steps]
    above = [p for p in points if p["mean_steps"] >= steps]
    if not below or not above:
        return None
    return max(below, key=lambda p: float(p["mean_steps"])), min(above, key=lambda p: float(p["mean_steps"]))


def _interpolated(a: Point, b: Point, steps: float, key: str) -> float:
    """A number of two points on the straight line between them, at so many steps."""
    span = b["mean_steps"] - a["mean_steps"]
    share = (steps - a["mean_steps"]) / span if span else 0.0
    return float((1 - share) * a[key] + share * b[key])
