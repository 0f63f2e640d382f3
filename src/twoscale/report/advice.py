"""What to use for a model, in plain words: one recommendation, from a sweep and, where there is one, a calibration. Pure functions.

Where a calibration certified a fixed depth or thresholds to a limit on the loss, the choice is among these. Otherwise it is among the
settings whose CE rises by no more than FLAT on the sweep's own text. Fixed depths are compared by counted FLOPs, which are exact: fewer
loops are a part of the work of more, however times vary. A rule is recommended only where it costs less than the fixed depth, by whole
intervals, and the default depth is kept where nothing costs less than it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twoscale.config.words import UNITS, all_loops, plural
from twoscale.report.words import (
    MARGIN,
    calibration_sentences,
    calibration_text,
    change,
    confidence,
    default_depth,
    rise,
    sweep_text,
)
from twoscale.tradeoff.summary import ORACLES, Sweep

FLAT = 0.01  # nats: a rise of CE that is called none
ROUGH = 8  # documents (or pieces, or windows), or rounds of timing; an interval over fewer is called rough
ROUNDS = 3  # of timing; fewer tell nothing on how much times vary
FIXED = ("full", "fixed", "fixed-one")
BASELINES = (*FIXED, "random")
Point = dict[str, Any]


# -- costs -------------------------------------------------------------------------------------------------------


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
    """The point with the fewest FLOPs whose CE rises by no more than the limit, by its whole interval; by default among the rules."""
    chosen = [
        p
        for p in sweep.points
        if (p["family"] in families if families else p["family"] not in (*BASELINES, *ORACLES)) and p["dce_high"] <= limit
    ]
    return min(chosen, key=lambda p: p["flops"], default=None)


def name_of(point: Point, loops: int) -> str:
    """A point in words."""
    if point["family"] == "full":
        return all_loops(loops)
    if point["family"] == "fixed-one":
        return f"{point['label']} and all {loops} in the others"
    if point["family"] == "calibrated":
        return f"the calibrated thresholds ({point['label'].removeprefix('calibrated: ')})"
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
        return full, all_loops(loops)
    point = full if default == loops else sweep.point(f"fixed:{default}")
    if point is None:
        return full, f"{all_loops(loops)} ({default_depth(default)} was not swept)"
    return point, default_depth(default)


def saving(point: Point, base: Point, against: str, cost: str) -> str:
    """What a point costs, beside the default depth: less, more, or no difference."""
    told = f"{cost_words(point, cost)}, {point['mean_steps']:.1f} steps"
    if point is base:
        return f"{told} ({against})"
    less, more = below(point, base, cost), below(base, point, cost)
    words, what = change(point[cost], base[cost]) if less or more else "", "time" if cost == "ms" else "FLOPs"
    if words:
        return f"{told} ({words} {what} than {against}: {cost_words(base, cost)})"
    counted = cost == "ms" and (below(point, base, "flops") or below(base, point, "flops"))
    work = f"; {change(point['flops'], base['flops'], 'fewer')} FLOPs" if counted else ""
    return f"{told} (no measurable difference in {what} from {against}: {cost_words(base, cost)}{work})"


# -- the choice --------------------------------------------------------------------------------------------------


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


def choose(sweep: Sweep, calibration: Mapping[str, Any] | None = None) -> Choice | None:
    """The setting that is recommended; None while the sweep has no full run."""
    if sweep.point("full") is None or best(sweep, FIXED) is None:
        return None
    return _certified(sweep, calibration) or _swept(sweep)


def _swept(sweep: Sweep) -> Choice:
    """The choice on the sweep's text: the cheapest fixed depth that keeps CE (a tie goes to the default), or a rule that costs less."""
    fixed, cost = best(sweep, FIXED), cost_of(sweep)
    assert fixed is not None
    base, rule = baseline(sweep)[0], _best_rule(sweep, fixed, cost)
    if base["dce_high"] <= FLAT and not below(fixed, base, "flops") and not (rule is not None and below(rule, base, cost)):
        fixed = base
    return _chosen(fixed, rule, cost, certified=False)


def _certified(sweep: Sweep, calibration: Mapping[str, Any] | None) -> Choice | None:
    """The choice among what a calibration certified; None where it certified nothing, or cannot be compared with the sweep (`_why_not`)."""
    if calibration is None or _why_not(sweep, calibration):
        return None
    known = calibration["report"]["fixed"]["rule"]
    fixed = sweep.point("full" if known is None else known)
    rule = sweep.point(_calibrated_id(calibration)) if any(calibration["rules"]) else None
    assert fixed is not None
    return _chosen(fixed, rule, cost_of(sweep), certified=True)


def _chosen(fixed: Point, rule: Point | None, cost: str, certified: bool) -> Choice:
    """A tie goes to the fixed depth."""
    pick = rule if rule is not None and below(rule, fixed, cost) else fixed
    return Choice(pick, fixed, rule, certified)


def _best_rule(sweep: Sweep, fixed: Point, cost: str) -> Point | None:
    """The cheapest rule that keeps CE; one that costs less than the fixed depth by its whole interval comes first."""
    kept = [p for p in sweep.points if p["family"] not in (*BASELINES, *ORACLES) and p["dce_high"] <= FLAT]
    return min(kept, key=lambda p: (not below(p, fixed, cost), p[cost]), default=None)


def _why_not(sweep: Sweep, calibration: Mapping[str, Any]) -> str:
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


def _calibrated_id(calibration: Mapping[str, Any]) -> str:
    """The point of a sweep that has the calibrated thresholds."""
    return f"calibrated {' '.join(rule or 'all' for rule in calibration['rules'])}"


# -- the words ---------------------------------------------------------------------------------------------------


def recommend(sweep: Sweep, calibration: Mapping[str, Any] | None = None) -> tuple[str, str]:
    """A headline and the paragraphs behind it: what to use for this model, what it saves and what it costs."""
    choice = choose(sweep, calibration)
    if choice is None:
        return "The sweep is not finished.", "The full run has not been measured yet."
    if choice.certified:
        assert calibration is not None
        head, paragraphs = _certified_words(sweep, calibration, choice)
    else:
        head, paragraphs = _swept_words(sweep, calibration, choice)
    paragraphs += [_measured(sweep), _oracles(sweep)]
    if calibration is not None:
        goal = ", ".join(f"{key.replace('_', '-')} {value:g}" for key, value in calibration["goal"].items())
        mine = "are the recommendation" if choice.pick["family"] == "calibrated" else "are not the recommendation"
        about = f"The calibrated thresholds of {calibration['rule']} (asked for: {goal}) {mine}."
        paragraphs.append(" ".join([about, *calibration_sentences(calibration, sweep.header.get("mean_loops"))]))
    paragraphs.append(_use(choice.pick, sweep.header["loops"], calibration))
    return head, "\n\n".join(filter(None, paragraphs))


def _measured(sweep: Sweep) -> str:
    """What costs and qualities were measured on, and how well."""
    words = [f"Measured on {sweep_text(sweep.header)}.", _rough(sweep)]
    if cost_of(sweep) == "flops":
        few = sweep.rounds < ROUNDS
        why = f"Times need {plural(ROUNDS, 'round')} and this sweep has {sweep.rounds}" if few else "Not every point was timed"
        words.append(f"{why}, so counted FLOPs decide; they count as fewer from {100 * MARGIN:.0f} % on.")
    base, against = baseline(sweep)
    if base["dce_high"] > FLAT:
        words.append(f"On the sweep's text {against} may cost more than {FLAT} nats: dCE {rise(base)}.")
    return " ".join(filter(None, words))


def _swept_words(sweep: Sweep, calibration: Mapping[str, Any] | None, choice: Choice) -> tuple[str, list[str]]:
    """The recommendation on the sweep's text alone."""
    told = {id(p): _told(sweep, p, p, sweep.header["tokens"]) for p in (choice.pick, choice.fixed, choice.rule) if p is not None}
    words = [
        f"For this model use {told[id(choice.pick)]}. Compared are settings whose CE rises by no more than {FLAT} nats on the sweep's "
        f"text, by the whole interval.",
        _rivals(sweep, choice, told),
        "The choice was made among many settings on the text that it is reported on, which flatters it a little.",
    ]
    if calibration is None:
        words.append("It is not certified: `twoscale calibrate` certifies a setting on text of its own.")
    else:
        words.append(f"It is not certified: {_why_not(sweep, calibration)}.")
    return f"Use {told[id(choice.pick)]}; chosen on these tokens, not certified.", [words[0], " ".join(words[1:])]


def _certified_words(sweep: Sweep, calibration: Mapping[str, Any], choice: Choice) -> tuple[str, list[str]]:
    """The recommendation among what a calibration certified, and why the sweep alone may choose otherwise."""
    loops, tokens, limit = sweep.header["loops"], calibration["tokens"]["report"], calibration["goal"]["max_dce"]
    told = {id(p): _told(sweep, p, _reported(p, calibration), tokens) for p in (choice.pick, choice.fixed, choice.rule) if p is not None}
    bound = (
        f"the loss lies no more than {limit:g} nats a token above the loss at {plural(loops, 'loop')} ({confidence(calibration)})"
        if choice.pick["family"] != "full"
        else "it is the full run itself"
    )
    words = [
        f"For this model use {told[id(choice.pick)]}. It is certified on {calibration_text(calibration, 'certify')}: {bound}.",
        _rivals(sweep, choice, told),
        _beside(sweep, calibration, choice),
    ]
    return f"Use {told[id(choice.pick)]}; certified: {bound}.", words


def _reported(point: Point, calibration: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What the calibration measured of a point on its report part; None of one that it did not measure."""
    found: dict[str, Any] = calibration["report"]
    if point["family"] == "calibrated":
        return found["calibrated"]  # type: ignore[no-any-return]
    return next((found[name] for name in ("fixed", "default") if found.get(name, {}).get("rule") == point["id"]), None)


def _told(sweep: Sweep, point: Point, quality: Mapping[str, Any] | None, tokens: int) -> str:
    """A point with its cost and its quality, on so many tokens."""
    loops, (base, against) = sweep.header["loops"], baseline(sweep)
    words = f"{name_of(point, loops)}: {saving(point, base, against, cost_of(sweep))}"
    if quality is None:
        return words
    return f"{words}, dCE {rise(quality)} nats against {all_loops(loops)} on {plural(tokens, 'token')}"


def _rivals(sweep: Sweep, choice: Choice, told: Mapping[int, str]) -> str:
    """The best rule beside the best fixed depth."""
    rule, fixed, loops, cost = choice.rule, choice.fixed, sweep.header["loops"], cost_of(sweep)
    if rule is None:
        if choice.certified:
            return "No thresholds of an exit rule could be certified to this limit."
        return f"No rule that was tried keeps CE within {FLAT} nats by its whole interval."
    what, other = "time" if cost == "ms" else "FLOPs", name_of(fixed, loops)
    if choice.certified:
        lead, they, none = f"Certified to the same limit: {told[id(rule)]};", "they cost", "these thresholds save nothing"
    else:
        lead, they, none = f"The best rule of the same quality is {told[id(rule)]};", "it costs", "no rule that was tried saves anything"
    if choice.pick is rule:
        same = "certified to the same limit" if choice.certified else "of the same quality"
        return f"The best fixed depth {same} is {told[id(fixed)]}; it costs more, by whole intervals."
    if below(fixed, rule, cost):
        return f"{lead} {they} more than {other}, so on this model {none} over a fixed depth."
    which = "thresholds" if choice.certified else "rule"
    return f"{lead} in {what} {other} and the {which} cannot be told apart, and a tie goes to the fixed depth, which is simpler."


def _beside(sweep: Sweep, calibration: Mapping[str, Any], choice: Choice) -> str:
    """What the sweep alone would choose, and why the certificate may be stricter."""
    alone, limit, loops = _swept(sweep).pick, calibration["goal"]["max_dce"], sweep.header["loops"]
    tokens = plural(sweep.header["tokens"], "token")
    if alone is choice.pick:
        return f"The sweep alone, with a limit of {FLAT} nats on {tokens}, would choose the same."
    mine, certify = name_of(choice.pick, loops), plural(calibration["tokens"]["certify"], "token")
    return (
        f"The sweep alone would choose {_told(sweep, alone, alone, sweep.header['tokens'])}. That is no second recommendation: its "
        f"limit is {FLAT} nats, on {tokens} on which it was also chosen among many settings; {mine} is held to {limit:g} nats, on "
        f"{certify} of other documents, by a test ({confidence(calibration)}) that allows for the number of settings that were tried."
    )


def _rough(sweep: Sweep) -> str:
    """Which intervals rest on few documents or few rounds."""
    words = []
    clusters, by = sweep.header.get("clusters", ROUGH), sweep.header.get("by")
    if clusters < ROUGH:
        words.append(f"those of losses over {plural(clusters, UNITS[by]) if by else clusters}")
    if cost_of(sweep) == "ms" and sweep.rounds < ROUGH:
        words.append(f"those of times over {plural(sweep.rounds, 'round')}")
    return f"Intervals are rough: {', '.join(words)}." if words else ""


def _use(point: Point, loops: int, calibration: Mapping[str, Any] | None) -> str:
    """How to ask for the recommended setting, and what `--exit auto` does."""
    family = point["family"]
    if family == "calibrated":
        return "In use: `twoscale generate` and `eval` with `--exit auto`."
    if family in ("full", "fixed"):
        asked = f"--loops {loops if family == 'full' else int(point['setting'])}"
    else:
        asked = f"--exit {point['id']} --loops {loops}" if family not in ("fixed-one", "learned") else ""
    auto = "`--exit auto` takes the calibrated thresholds instead." if calibration is not None and any(calibration["rules"]) else ""
    return " ".join(filter(None, (f"In use: `twoscale generate` and `eval` with `{asked}`." if asked else "", auto)))


def _oracles(sweep: Sweep) -> str:
    """How few steps would do if the labels were known, by each of the two oracles."""
    words = []
    if kept := [p for p in sweep.family("oracle-stay") if p["dce_high"] <= FLAT]:
        low = min(kept, key=lambda p: p["mean_steps"])
        words.append(
            f"the first (one depth for all groups, the fewest steps after which the token's loss stays within eps of the full run's) takes "
            f"{low['mean_steps']:.1f} steps at eps = {low['setting']:g}, the eps with the fewest steps among those tried that keep CE "
            f"within {FLAT} nats (dCE {rise(low)})"
        )
    if kept := [p for p in sweep.family("oracle-lagrange") if p["dce_high"] <= FLAT]:
        low = min(kept, key=lambda p: p["mean_steps"])
        words.append(
            f"the {'second' if words else 'one'} (any of some forty combinations of depths, the one with the least loss + price x steps) "
            f"takes {low['mean_steps']:.1f} steps at a price of {low['setting']:g} nats a step (dCE {rise(low)}: it also picks the depth "
            f"at which the label happens to be likeliest, which no rule can know)"
        )
    if not words:
        return ""
    return f"Oracles see the labels and are no settings to use: {'; '.join(words)}."


def sample_words(rule: str, choice: Choice | None, loops: int) -> str:
    """Why the texts on the page were written with this rule."""
    if choice is None:
        return f"exit rule: {rule}"
    pick = name_of(choice.pick, loops)
    if rule == pick:
        return f"exit rule: {rule}, the recommended setting"
    if choice.rule is not None and rule == name_of(choice.rule, loops) and choice.pick["family"] in FIXED:
        best_rule = "which are certified to the same limit" if choice.certified else "the best rule of the same quality"
        return (
            f"exit rule: {rule}, {best_rule}, so that the colours show how steps differ (with the recommended {pick} every token "
            "takes the same steps)"
        )
    return f"exit rule: {rule} (recommended is {pick})"
