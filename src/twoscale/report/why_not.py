"""Why a setting that looks better than the recommended one in the picture is not recommended, in words. Pure functions.

The picture shows measured means. The recommendation follows intervals and, where there is one, a certificate on other text; so a point may
lie lower and further left than the ring. The page then names it and says why.
"""

from collections.abc import Mapping
from typing import Any

from twoscale.config.words import MARGIN, plural
from twoscale.report.words import between, change, cost_words, rise
from twoscale.tradeoff.choice import (
    FIXED,
    FLAT,
    Choice,
    Point,
    below,
    default_point,
    fixed_within,
    lower_and_left,
    name_of,
    overlap,
    shown_higher,
)
from twoscale.tradeoff.results import settings_tested
from twoscale.tradeoff.summary import Sweep

NAMED = 3  # settings that are named with the reason; more are counted


def beside_the_pick(sweep: Sweep, calibration: Mapping[str, Any] | None, choice: Choice) -> str:
    """The settings of the picture that lie lower and further left than the recommended one, cheapest first, and why they are not
    recommended; empty where there is none."""
    found = lower_and_left(sweep, choice.pick)
    if not found:
        return ""
    loops, pick = sweep.header["loops"], name_of(choice.pick, sweep.header["loops"])
    sentences: list[str] = []
    for point in found[:NAMED]:
        where = f"{cost_words(point, sweep.cost)}, dCE {rise(point)} on the sweep's {plural(sweep.header['tokens'], 'token')}"
        name, why = name_of(point, loops), reason(sweep, calibration, choice, point)
        details = f"({where}; {_apart(sweep, point, choice.pick)})"
        if sentences:
            sentences.append(f"{name} {details} lies there too, and is not recommended: {why}.")
        else:
            mine = f"{cost_words(choice.pick, sweep.cost)}, dCE {rise(choice.pick)} there"
            sentences.append(
                f"In the picture {name} {details} lies lower and further left than {pick} ({mine}). It is not recommended: {why}."
            )
    if len(found) > NAMED:
        sentences.append(f"{plural(len(found) - NAMED, 'other setting')} {'lies' if len(found) == NAMED + 1 else 'lie'} there too.")
    return " ".join(sentences)


def fewer_loops(sweep: Sweep, choice: Choice) -> str:
    """Where the default depth is kept although a fixed depth keeps CE with fewer FLOPs: which, and why."""
    base, loops = default_point(sweep), sweep.header["loops"]
    if choice.pick is not base:
        return ""
    others = [p for p in fixed_within(sweep) if below(p, base, "flops") and shown_higher(p)]
    if not others or (best := min(others, key=lambda p: float(p["flops"]))) in lower_and_left(sweep, choice.pick)[:NAMED]:
        return ""
    fewer = change(best["flops"], base["flops"], "fewer")
    return f"{name_of(best, loops)} keeps CE within {FLAT} nats with {fewer} FLOPs, but {_by_flops(sweep, choice, best)}."


def tied_with_a_rule(sweep: Sweep, choice: Choice) -> str:
    """Where a fixed depth is recommended because it ties with a rule that costs less than another one: which rule, and which depth."""
    if choice.undercut is None or choice.pick is not choice.fixed:
        return ""
    rule, other = choice.undercut
    loops, what = sweep.header["loops"], "time" if sweep.cost == "ms" else "FLOPs"
    quick, beaten, pick = (name_of(p, loops) for p in (rule, other, choice.pick))
    default = " (the default)" if other is default_point(sweep) else ""
    costs = f"{cost_words(rule, sweep.cost)} against {cost_words(other, sweep.cost)}"
    return (
        f"{pick} takes the place of {beaten}{default} because {quick}, which keeps CE within {FLAT} nats too, costs less {what} than "
        f"{beaten} by whole intervals ({costs}), and because in {what} {pick} and {quick} cannot be told apart."
    )


def _apart(sweep: Sweep, point: Point, pick: Point) -> str:
    """Whether the intervals of loss and cost overlap. Losses against the full run and against the default depth are paired by document;
    where either tells two settings apart, they are apart."""
    what = "time" if sweep.cost == "ms" else "FLOPs"
    together = {what: overlap(point, pick, sweep.cost), "loss": overlap(point, pick, "dce") and not _apart_by_default(sweep, point, pick)}
    both = [name for name, overlaps in together.items() if overlaps]
    if len(both) == 2:
        return f"the intervals of {what} overlap, and so do those of the loss"
    return f"the intervals of {both[0]} overlap" if both else "the intervals lie apart"


def _apart_by_default(sweep: Sweep, a: Point, b: Point) -> bool:
    """Whether the losses of two points against the default depth lie apart; that of the default depth itself is zero."""
    base = default_point(sweep)
    ends = [(0.0, 0.0) if p is base else (p.get("default_dce_low"), p.get("default_dce_high")) for p in (a, b)]
    (a_low, a_high), (b_low, b_high) = ends
    if a_low is None or a_high is None or b_low is None or b_high is None:
        return False
    return bool(a_high < b_low or b_high < a_low)


def reason(sweep: Sweep, calibration: Mapping[str, Any] | None, choice: Choice, point: Point) -> str:
    """Why a point is not the recommended one, for every way in which the choice can pass it over."""
    if choice.certified and calibration is not None:
        return _not_certified(sweep, calibration, choice, point)
    return _not_chosen(sweep, choice, point)


def _by_flops(sweep: Sweep, choice: Choice, point: Point) -> str:
    """Why a fixed depth is passed over for another one."""
    fixed = name_of(choice.fixed, sweep.header["loops"])
    lead = "fixed depths are compared by counted FLOPs, which do not vary from round to round"
    if point["flops"] >= choice.fixed["flops"]:
        return f"{lead}, and {fixed} takes fewer"
    if not choice.certified and shown_higher(point):
        higher = between(point, "default_dce")
        return f"against the default depth its loss is higher, by {higher} nats, and its time is not shorter by whole intervals"
    return f"{lead}; it takes less than {100 * MARGIN:.0f} % fewer than {fixed}, and a tie goes to the default depth"


def _by_cost(sweep: Sweep, choice: Choice, point: Point) -> str:
    """Why a rule is passed over for a fixed depth, or for another rule."""
    what, loops = "time" if sweep.cost == "ms" else "FLOPs", sweep.header["loops"]
    fixed = name_of(choice.fixed, loops)
    if choice.pick is not choice.fixed:
        return f"by whole intervals its {what} does not lie below that of {fixed}, as that of {name_of(choice.pick, loops)} does"
    if below(choice.fixed, point, sweep.cost):
        return f"it costs more {what} than {fixed}, by whole intervals"
    return f"in {what} it cannot be told apart from {fixed}, and a tie goes to the fixed depth"


def _not_chosen(sweep: Sweep, choice: Choice, point: Point) -> str:
    """On the sweep's text alone."""
    if point["dce_high"] > FLAT:
        return f"the interval of its dCE reaches above {FLAT} nats"
    if point["family"] in FIXED:
        return _by_flops(sweep, choice, point)
    return _by_cost(sweep, choice, point)


def _not_certified(sweep: Sweep, calibration: Mapping[str, Any], choice: Choice, point: Point) -> str:
    """Among what a calibration certified."""
    limit, loops = calibration["goal"]["max_dce"], sweep.header["loops"]
    if point is choice.rule:
        return f"it is certified to {limit:g} nats as well, but {_by_cost(sweep, choice, point)}"
    if point is choice.fixed:  # the thresholds were picked, because they cost less by whole intervals
        return f"it is certified to {limit:g} nats as well, but {name_of(choice.pick, loops)} cost less, by whole intervals"
    if point["family"] == "full":
        return _by_flops(sweep, choice, point)
    path = "fixed" if point["family"] == "fixed" else "single"
    tested = settings_tested(calibration, path)
    if tested is None:
        return (
            f"it is not among what was certified to {limit:g} nats (the calibration is of an earlier version, which does not say what was "
            "tested: calibrate again)"
        )
    found = next((t for t in tested if t["rule"] == point["id"]), None)
    if found is not None and not found["passed"]:
        level = 100 * (1 - calibration.get("delta_each", calibration["delta"]))
        return (
            f"it was tested on the certify part and not certified to {limit:g} nats: there its upper bound, at {level:.4g} %, "
            f"is {found['bound']:.4f}"
        )
    if found is not None:
        if path == "fixed":
            return f"it is certified to {limit:g} nats as well, but {_by_flops(sweep, choice, point)}"
        return f"it is certified to {limit:g} nats as well, but one threshold for all groups is only compared with, not chosen"
    failed = next((t for t in tested if not t["passed"]), None)
    if path == "fixed" and failed is not None and point["mean_steps"] < float(failed["rule"].partition(":")[2]):
        return f"it was not tested: the test stops at the first depth that fails, {failed['rule']}"
    return f"the calibration, which tests fixed depths and thresholds of {calibration['rule']}, did not test it"


def single_words(calibration: Mapping[str, Any], choice: Choice) -> str:
    """Why a single threshold for all groups that is certified and takes fewer steps or FLOPs than the recommended fixed depth, by the
    measured means, is passed over; empty where there is none, or another setting is recommended."""
    report = calibration["report"]
    single, fixed = report.get("single", {}), report.get("fixed", {})
    if not choice.certified or choice.pick["id"] != fixed.get("rule") or single.get("rule") is None:
        return ""
    fewer = [
        f"fewer {name} ({single[key] * scale:.2f} against {fixed[key] * scale:.2f}{unit})"
        for key, name, scale, unit in (("mean_steps", "steps", 1.0, ""), ("flops", "FLOPs", 1e-6, " MFLOP a token"))
        if single[key] < fixed[key]
    ]
    if not fewer:
        return ""
    if single["flops"] >= fixed["flops"]:
        work = f"; with its own work the rule takes no fewer FLOPs than {fixed['rule']}"
    elif single["flops"] >= (1 - MARGIN) * fixed["flops"]:
        tie = f"less than {100 * MARGIN:.0f} % fewer"
        work = f"; by counted FLOPs it would tie with {fixed['rule']} ({tie}), and a tie goes to the fixed depth"
    else:
        work = ""
    return (
        f"On the report part {single['rule']} takes {' and '.join(fewer)} than {fixed['rule']}. It is passed over: one threshold for all "
        f"groups is only compared with, not chosen{work}."
    )


def alone_words(sweep: Sweep, calibration: Mapping[str, Any], choice: Choice, alone: Point) -> str:
    """Why what the sweep alone would choose is no second recommendation."""
    limit, tokens = calibration["goal"]["max_dce"], plural(sweep.header["tokens"], "token")
    chosen = f"it was chosen among many settings on the {tokens} that it is measured on, by a limit of {FLAT} nats"
    beyond = f", and there its interval reaches above {limit:g} nats" if alone["dce_high"] > limit else ""
    return f"{chosen}{beyond}; {reason(sweep, calibration, choice, alone)}"
