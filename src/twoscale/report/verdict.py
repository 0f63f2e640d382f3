"""The paper's claims on exits, (e) to (g), and a recommendation in plain words: pure functions of a sweep."""

from collections.abc import Callable
from typing import Any

from twoscale.report.claims import Claim, Outcome
from twoscale.report.words import MARGIN, calibration_sentences, change, default_depth, rise, signed, sweep_text
from twoscale.tradeoff.summary import ORACLES, Sweep

__all__ = ["BASELINES", "FLAT", "best", "judge_exits", "recommend", "rise", "signed"]

FLAT = 0.01  # nats: a rise of CE that is called none
ROUGH = 8  # documents (or pieces, or windows); an interval over fewer is called rough
ROUNDS = 3  # of timing; fewer tell nothing on how much times vary
FIXED = ("full", "fixed", "fixed-one")
BASELINES = (*FIXED, "random")
Point = dict[str, Any]


def judge_exits(sweep: Sweep) -> list[Claim]:
    """Claims (e), (f) and (g)."""
    return [_faster(sweep), _kl(sweep), _step_norm(sweep)]


def _at(sweep: Sweep, family: str, tau: float) -> Point | None:
    return next((p for p in sweep.family(family) if p["setting"] == tau), None)


def _faster(sweep: Sweep) -> Claim:
    text = "Raising tau from 1e-5 to 1e-2 makes acceleration much faster at flat CE."
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
        f"{a['ms']:.1f} to {b['ms']:.1f} ms a token ({b['ms'] / a['ms']:.2f} [{low:.2f}, {high:.2f}]; paper 0.62), "
        f"{a['mean_steps']:.1f} to {b['mean_steps']:.1f} steps, dCE {rise(b)}"
    )
    return Claim("e", text, rule, measured, outcome)


def _kl(sweep: Sweep) -> Claim:
    text = "KL keeps CE but is slower because of the head."
    rule = (
        f"The rise of CE at the paper's four thresholds, and ms a token at 1e-3 beside what as many steps take without a rule (straight "
        f"line through the fixed depths). Confirmed when no rise is above {FLAT} nats and KL takes 1.1 times as long or more, refuted "
        f"when a rise is, or KL takes less than 1.02 times as long, whole intervals each; times count from {ROUNDS} rounds on."
    )
    points = [p for tau in (1e-5, 1e-4, 1e-3, 1e-2) if (p := _at(sweep, "kl", tau)) is not None]
    there, others = _at(sweep, "kl", 1e-3), [p for f in ("fixed", "full") for p in sweep.family(f) if p.get("ms") is not None]
    if len(points) < 4 or there is None or there.get("ms") is None or len(others) < 2:
        return Claim("f", text, rule, "not measured: sweep kl at the paper's thresholds", "undecided")
    plain = _line([p["mean_steps"] for p in others], [p["ms"] for p in others], there["mean_steps"])
    ratio, low, high = (there[key] / plain for key in ("ms", "ms_low", "ms_high"))
    worst = max(points, key=lambda p: p["dce_high"])
    outcome: Outcome = "undecided"
    if worst["dce_high"] <= FLAT and low >= 1.1 and sweep.rounds >= ROUNDS:
        outcome = "confirmed"
    elif max(p["dce_low"] for p in points) > FLAT or (high < 1.02 and sweep.rounds >= ROUNDS):
        outcome = "refuted"
    measured = (
        f"{ratio:.2f} [{low:.2f}, {high:.2f}] times what {there['mean_steps']:.1f} steps take without a rule "
        f"({there['flops_looks'] / there['flops']:.0%} of its FLOPs are looks); "
        f"highest upper end of dCE {signed(worst['dce_high'])}, at tau = {worst['setting']:g}"
    )
    return Claim("f", text, rule, measured, outcome)


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
    largest = f"; the largest threshold tried that keeps CE is {max(kept):g}" if kept else ""
    return Claim("g", text, rule, f"dCE {rise(a)} at 1e-3, {rise(b)} at 1e-2{largest}", outcome)


def _line(x: list[float], y: list[float], at: float) -> float:
    """The least-squares line through points, at one place."""
    mx, my = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mx) ** 2 for a in x)
    slope = sum((a - mx) * (b - my) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0
    return my + slope * (at - mx)


# -- the recommendation ------------------------------------------------------------------------------------------


def cost_of(sweep: Sweep) -> str:
    """What decides: `ms` where times were taken often enough to have an interval, else `flops`."""
    return "ms" if sweep.rounds >= ROUNDS and all(p.get("ms") is not None for p in sweep.points) else "flops"


def below(a: Point, b: Point, cost: str) -> bool:
    """Whether `a` costs less than `b`: by whole intervals, and where FLOPs decide by MARGIN at least. Two points of one sweep were measured
    on the same text; a fixed depth's FLOPs hardly vary, so the rule's own interval is that of the paired difference."""
    low, high = b.get(f"{cost}_low"), a.get(f"{cost}_high")
    apart = low is None or high is None or high < low
    return bool(apart and (cost == "ms" or a[cost] < (1 - MARGIN) * b[cost]))


def best(sweep: Sweep, families: tuple[str, ...] | None = None, limit: float = FLAT) -> Point | None:
    """The cheapest point whose CE rises by no more than the limit, by its whole interval; by default among the rules."""
    cost = cost_of(sweep)
    chosen = [
        p
        for p in sweep.points
        if (p["family"] in families if families else p["family"] not in (*BASELINES, *ORACLES)) and p["dce_high"] <= limit
    ]
    return min(chosen, key=lambda p: p[cost], default=None)


def name_of(point: Point, loops: int) -> str:
    """A point in words."""
    if point["family"] == "full":
        return f"all {loops} loops"
    if point["family"] == "fixed-one":
        return f"{point['label']} and all {loops} in the others"
    return str(point.get("label") or point["id"])


def cost_words(point: Point, cost: str) -> str:
    """`3.10 [3.04, 3.17] ms a token` or `12.31 MFLOP a token`."""
    if cost == "ms":
        digits = 2 if point["ms"] < 10 else 1
        return f"{point['ms']:.{digits}f} [{point['ms_low']:.{digits}f}, {point['ms_high']:.{digits}f}] ms a token"
    return f"{point['flops'] / 1e6:.2f} MFLOP a token"


def baseline(sweep: Sweep) -> tuple[Point, str]:
    """The point that savings are quoted against, and its name: the default depth, or the full run where the sweep has no point there."""
    full, loops, default = sweep.point("full"), sweep.header["loops"], sweep.header.get("mean_loops")
    assert full is not None
    if default is None:
        return full, f"all {loops} loops"
    point = full if default == loops else sweep.point(f"fixed:{default}")
    if point is None:
        return full, f"all {loops} loops ({default_depth(default)} was not swept)"
    return point, default_depth(default)


def saving(point: Point, base: Point, against: str, cost: str) -> str:
    """What a point costs, beside the default depth: less, more, or no difference."""
    told = f"{cost_words(point, cost)}, {point['mean_steps']:.1f} steps"
    if point is base:
        return f"{told} ({against})"
    less, more = below(point, base, cost), below(base, point, cost)
    words, what = change(point[cost], base[cost]) if less or more else "", "time" if cost == "ms" else "FLOPs"
    return (
        f"{told} ({words} {what} than {against}: {cost_words(base, cost)})"
        if words
        else f"{told} (no measurable difference in {what} from {against}: {cost_words(base, cost)})"
    )


def recommend(sweep: Sweep, calibration: dict[str, Any] | None = None) -> tuple[str, str]:
    """A headline and a paragraph: what to use for this model, what it saves and what it costs.

    A rule is recommended only where it costs less than the best fixed depth of the same quality, by `below`; a tie goes to the fixed depth,
    and of fixed depths to the default.
    """
    fixed = best(sweep, FIXED)
    if sweep.point("full") is None or fixed is None:
        return "The sweep is not finished.", "The full run has not been measured yet."
    cost, loops = cost_of(sweep), sweep.header["loops"]
    (base, against), rule = baseline(sweep), _best_rule(sweep, fixed, cost)
    if base["dce_high"] <= FLAT and not any(below(p, base, cost) for p in (rule, fixed) if p is not None):
        fixed = base
    pick = rule if rule is not None and below(rule, fixed, cost) else fixed

    def told(p: Point) -> str:
        return f"{name_of(p, loops)}: {saving(p, base, against, cost)}, dCE {rise(p)} nats against all {loops} loops"

    words = [
        f"For this model use {told(pick)}. Compared are settings whose CE rises by no more than {FLAT} nats, by the whole interval.",
        _rivals(sweep, pick, rule, fixed, cost, told),
    ]
    if cost == "flops":
        few = sweep.rounds < ROUNDS
        why = f"Times need {ROUNDS} rounds and this sweep has {sweep.rounds}" if few else "Not every point was timed"
        words.append(f"{why}, so counted FLOPs decide; they count as fewer from {100 * MARGIN:.0f} % on.")
    if base["dce_high"] > FLAT:
        words.append(f"{against[:1].upper()}{against[1:]} may cost more than {FLAT} nats: dCE {rise(base)}.")
    words += [_oracle(sweep), f"Measured on {sweep_text(sweep.header)}."]
    if (clusters := sweep.header.get("clusters", ROUGH)) < ROUGH:
        words.append(f"Intervals over {clusters} of them are rough.")
    words.append(
        "The choice was made on the text that it is reported on, among many settings, so expect a little less; `twoscale calibrate` "
        "certifies a setting on text of its own."
    )
    if calibration is not None:
        goal = ", ".join(f"{key.replace('_', '-')} {value:g}" for key, value in calibration["goal"].items())
        words.append(f"Calibrated thresholds of {calibration['rule']} ({goal}).")
        words += calibration_sentences(calibration, sweep.header.get("mean_loops"))
    return f"Use {told(pick)}, on {sweep.header['tokens']:,} tokens.", " ".join(filter(None, words))


def _best_rule(sweep: Sweep, fixed: Point, cost: str) -> Point | None:
    """The cheapest rule that keeps CE; one that costs less than the fixed depth by its whole interval comes first."""
    kept = [p for p in sweep.points if p["family"] not in (*BASELINES, *ORACLES) and p["dce_high"] <= FLAT]
    return min(kept, key=lambda p: (not below(p, fixed, cost), p[cost]), default=None)


def _rivals(sweep: Sweep, pick: Point, rule: Point | None, fixed: Point, cost: str, told: Callable[[Point], str]) -> str:
    """The best rule beside the best fixed depth."""
    if rule is None:
        return f"No rule that was tried keeps CE within {FLAT} nats by its whole interval."
    loops = sweep.header["loops"]
    if pick is rule:
        return f"The best fixed depth of the same quality is {told(fixed)}. {name_of(rule, loops)} costs less, by its whole interval."
    lead = f"The best rule of the same quality is {told(rule)};"
    if below(fixed, rule, cost):
        return (
            f"{lead} it costs more than {name_of(fixed, loops)}, so on this model no rule that was tried saves anything over a fixed depth."
        )
    what = "time" if cost == "ms" else "FLOPs"
    return f"{lead} in {what} the two cannot be told apart, and a tie goes to the fixed depth, which is simpler."


def _oracle(sweep: Sweep) -> str:
    """How few steps would do if the labels were known."""
    kept = [p for p in sweep.points if p["family"] == "oracle-stay" and p["dce_high"] <= FLAT]
    if not kept:
        return ""
    low = min(kept, key=lambda p: p["mean_steps"])
    return (
        f"An oracle that sees the labels and leaves each token where its loss stays within {low['setting']:g} nats of the full run's takes "
        f"{low['mean_steps']:.1f} steps (dCE {rise(low)})."
    )
