"""The paper's claims on exits, (e) to (g), and a recommendation in plain words: pure functions of a sweep."""

from typing import Any

from twoscale.report.claims import Claim, Outcome
from twoscale.tradeoff.summary import ORACLES, Sweep

FLAT = 0.01  # nats: a rise of CE that is called none
ROUNDS = 3  # of timing; fewer tell nothing on how much times vary
BASELINES = ("full", "fixed", "fixed-one", "random")
Point = dict[str, Any]


def judge_exits(sweep: Sweep) -> list[Claim]:
    """Claims (e), (f) and (g)."""
    return [_faster(sweep), _kl(sweep), _step_norm(sweep)]


def _at(sweep: Sweep, family: str, tau: float) -> Point | None:
    return next((p for p in sweep.family(family) if p["setting"] == tau), None)


def signed(x: float) -> str:
    """Four digits with their sign; what rounds to nothing has none."""
    return f"{x:+.4f}" if abs(x) >= 5e-5 else "0.0000"


def rise(p: Point) -> str:
    """The rise of CE with its interval."""
    return f"{signed(p['dce'])} [{signed(p['dce_low'])}, {signed(p['dce_high'])}]"


def _faster(sweep: Sweep) -> Claim:
    text = "Raising tau from 1e-5 to 1e-2 makes acceleration much faster at flat CE."
    rule = (
        f"ms a token at 1e-2 over that at 1e-5, and the rise of CE at 1e-2 against the full run, with 95 % intervals. Confirmed when the "
        f"ratio is 0.80 at most and the rise {FLAT} nats at most, refuted when the ratio is above 0.95 or the rise above {2 * FLAT}, "
        "whole intervals each."
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
        "when a rise is, by its whole interval, or KL takes less than 1.02 times as long."
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
        f"({there['flops_looks'] / there['flops']:.0%} of its FLOPs are looks); largest dCE {rise(worst)} at tau = {worst['setting']:g}"
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
    """What is saved: `ms` where times were taken, else `flops`."""
    return "ms" if all(p.get("ms") is not None for p in sweep.points) else "flops"


def best(sweep: Sweep, families: tuple[str, ...] | None = None, limit: float = FLAT) -> Point | None:
    """The cheapest point whose CE rises by no more than the limit, by its whole interval; by default among the rules."""
    cost = cost_of(sweep)
    chosen = [
        p
        for p in sweep.points
        if (p["family"] in families if families else p["family"] not in (*BASELINES, *ORACLES)) and p["dce_high"] <= limit
    ]
    return min(chosen, key=lambda p: p[cost], default=None)


def name_of(point: Point) -> str:
    return str(point.get("label") or point["id"])


def recommend(sweep: Sweep, calibration: dict[str, Any] | None = None) -> tuple[str, str]:
    """A headline and a paragraph: which rule to use for this model, at which setting, what it saves and what it costs."""
    cost, full = cost_of(sweep), sweep.point("full")
    rule, fixed = best(sweep), best(sweep, ("fixed", "fixed-one", "full"))
    if full is None or fixed is None:
        return "The sweep is not finished.", "The full run has not been measured yet."
    unit = "ms a token" if cost == "ms" else "MFLOP a token"
    shown = {id(p): p[cost] if cost == "ms" else p[cost] / 1e6 for p in sweep.points}

    def saving(p: Point) -> str:
        return (
            f"{shown[id(p)]:.1f} instead of {shown[id(full)]:.1f} {unit} ({1 - p[cost] / full[cost]:.0%} less), {p['mean_steps']:.1f} steps"
        )

    words = []
    if rule is None:
        head = f"No rule that was tried keeps CE within {FLAT} nats; use a fixed depth: {name_of(fixed)}."
        words.append(f"Use {name_of(fixed)}: {saving(fixed)}, dCE {rise(fixed)} nats.")
    else:
        pick, other = (rule, fixed) if rule[cost] <= fixed[cost] else (fixed, rule)
        apart = cost != "ms" or pick["ms_high"] < other["ms_low"]
        head = f"Use {name_of(pick)}: {saving(pick)}, CE {signed(pick['dce'])}, against all {sweep.header['loops']} loops."
        words.append(
            f"For this model use {name_of(pick)}: {saving(pick)}, dCE {rise(pick)} nats against all {sweep.header['loops']} loops."
        )
        kind = "the best rule" if pick is fixed else "the best fixed depth"
        verdict = f"{name_of(pick)} is quicker" if apart else "in time the two cannot be told apart"
        words.append(f"Next to it, {kind} at the same quality is {name_of(other)}: {saving(other)}, dCE {rise(other)}; {verdict}.")
        if pick is fixed and apart:
            words.append("So for this model a token's own geometry does not pay: depth needs do not differ enough between its tokens.")
    oracle = [p for p in sweep.points if p["family"] == "oracle-stay" and p["dce_high"] <= FLAT]
    if oracle:
        low = min(oracle, key=lambda p: p["mean_steps"])
        words.append(
            f"An oracle that keeps every token's loss within {low['setting']:g} nats would need {low['mean_steps']:.1f} steps (dCE "
            f"{rise(low)})."
        )
    words.append(
        "The choice was made on the text that it is reported on, among many settings, so expect a little less; `twoscale calibrate` "
        "certifies a setting on text of its own."
    )
    if calibration is not None:
        words.append(_calibrated(calibration))
    return head, " ".join(words)


def _calibrated(found: dict[str, Any]) -> str:
    r, goal = found["report"], ", ".join(f"{k.replace('_', '-')} {v:g}" for k, v in found["goal"].items())
    mine, equal = r["calibrated"], r["equal"]
    beats = "fewer than" if r["beats_single"] else "not fewer than"
    return (
        f"Calibrated thresholds of {found['rule']} ({goal}): {mine['mean_steps']:.2f} steps, dCE {rise(mine)} on unseen text, certified "
        f"to rise by no more than {found['bound']:.4f} nats with {100 * (1 - found['delta']):.4g} % confidence "
        f"({found['clusters']['certify']} {found['by']}). That is {beats} the best single threshold for all groups takes at the same "
        f"loss or less ({equal['mean_steps']:.2f} steps, dCE {signed(equal['dce'])})."
    )
