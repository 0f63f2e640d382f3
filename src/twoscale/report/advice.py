"""What to use for a model, in plain words: one recommendation, from a sweep and, where there is one, a calibration. Pure functions.

`tradeoff/choice.py` chooses; here the choice, what it saves and what it costs become sentences.
"""

from collections.abc import Mapping
from typing import Any

from twoscale.config.words import MARGIN, UNITS, all_loops, plural
from twoscale.report.why_not import alone_words, beside_the_pick, fewer_loops, single_words, tied_with_a_rule
from twoscale.report.words import (
    beside_default,
    beside_limit,
    between,
    calibration_sentences,
    change,
    change_between,
    confidence,
    confidence_level,
    cost_words,
    default_depth,
    measured_words,
    other_text,
    part_words,
    rise,
)
from twoscale.tradeoff.choice import (
    FIXED,
    FLAT,
    Choice,
    Point,
    below,
    choose,
    choose_swept,
    default_point,
    fixed_within,
    name_of,
    why_not_certified,
)
from twoscale.tradeoff.summary import ROUNDS, Sweep

ROUGH = 8  # documents (or pieces, or windows), or rounds of timing; an interval over fewer is called rough
EXTREMES = 3  # a bootstrap over so few takes the lowest or the highest alone more often than in 2.5 % of its draws


# -- costs -------------------------------------------------------------------------------------------------------


def baseline(sweep: Sweep) -> tuple[Point, str]:
    """The point that savings are quoted against, and its name: the default depth, or the full run where the sweep has no point there."""
    point, loops, default = default_point(sweep), sweep.header["loops"], sweep.header.get("mean_loops")
    if default is None:
        return point, all_loops(loops)
    if point["id"] == "full" and default != loops:
        return point, f"{all_loops(loops)} ({default_depth(default)} was not swept)"
    return point, default_depth(default)


def saving(point: Point, base: Point, against: str, cost: str) -> str:
    """What a point costs, beside the default depth: less, more, or no difference."""
    described = f"{cost_words(point, cost)}, {point['mean_steps']:.1f} steps"
    if point is base:
        return f"{described} ({against})"
    less, more = below(point, base, cost), below(base, point, cost)
    words, what = change_between(point, base, cost) if less or more else "", "time" if cost == "ms" else "FLOPs"
    if words:
        return f"{described} ({words} than {against}: {cost_words(base, cost)})"
    counted = cost == "ms" and (below(point, base, "flops") or below(base, point, "flops"))
    work = f"; {change(point['flops'], base['flops'], 'fewer')} FLOPs" if counted else ""
    return f"{described} (no measurable difference in {what} from {against}: {cost_words(base, cost)}{work})"


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
        passed = single_words(calibration, choice)
        sentences = [about, *calibration_sentences(calibration, sweep.header.get("mean_loops")), passed]
        paragraphs.append(" ".join(filter(None, sentences)))
    paragraphs.append(_use(choice.pick, sweep.header["loops"], calibration))
    return head, "\n\n".join(filter(None, paragraphs))


def in_a_sentence(sweep: Sweep, calibration: Mapping[str, Any] | None = None) -> str:
    """The recommendation for the top of a page: what to ask for, what it saves beside the default depth, what it costs in loss."""
    choice = choose(sweep, calibration)
    if choice is None:
        return "The sweep is not finished: run it again, and it goes on where it stopped."
    pick, (base, against) = choice.pick, baseline(sweep)
    loops, cost = sweep.header["loops"], sweep.cost
    what = "time" if cost == "ms" else "FLOPs"
    if pick is base:
        kept = "was certified to the same limit" if choice.certified else f"keeps CE within {FLAT} nats by its whole interval"
        saved = f"it is {against}, and nothing that {kept} costs {'less time' if cost == 'ms' else 'fewer FLOPs'}"
    elif (below(pick, base, cost) or below(base, pick, cost)) and (words := change_between(pick, base, cost)):
        saved = f"{words} than {against} ({cost_words(pick, cost)} against {cost_words(base, cost)})"
    else:
        saved = f"no measurable difference in {what} from {against}"
        if cost == "ms" and (below(pick, base, "flops") or below(base, pick, "flops")):
            saved += f", {change(pick['flops'], base['flops'], 'fewer')} FLOPs"
    return f"Use {_asked(pick, loops)}: {saved}{_cost_in_loss(sweep, choice, calibration)}."


def why_not_others(sweep: Sweep, calibration: Mapping[str, Any] | None = None) -> str:
    """For the top of a page: the setting of the picture that looks better than the recommended one, and why it is not; or nothing."""
    choice = choose(sweep, calibration)
    if choice is None:
        return ""
    words = (
        beside_the_pick(sweep, calibration if choice.certified else None, choice),
        "" if choice.certified else fewer_loops(sweep, choice),
        tied_with_a_rule(sweep, choice),
    )
    return " ".join(filter(None, words))


def _cost_in_loss(sweep: Sweep, choice: Choice, calibration: Mapping[str, Any] | None) -> str:
    """What a setting costs in loss, against the full run and where it was measured against the default depth: certified, with what other
    documents say of it, or measured on the text it was chosen on."""
    pick, loops = choice.pick, sweep.header["loops"]
    if pick["family"] == "full":
        return ""
    if not choice.certified or calibration is None:
        where = f"on the {plural(sweep.header['tokens'], 'token')} that it was chosen on; not certified"
        level = ", no measurable change," if pick["dce_low"] <= 0 <= pick["dce_high"] else ""
        return f"; dCE {rise(pick)} nats{level} against {all_loops(loops)}{_beside_default(sweep, pick, None)} ({where})"
    limit, found = calibration["goal"]["max_dce"], _reported(pick, calibration)
    bound = f"; the loss is certified to lie no more than {limit:g} nats above that of {all_loops(loops)} ({confidence_level(calibration)})"
    if found is None:
        return bound
    default = _beside_default(sweep, pick, calibration, "; in loss ")
    measured = f"{between(found, 'dce')} nats, {beside_limit(found, limit, 'the limit')}{default}"
    where = f"{other_text(calibration)} ({plural(calibration['tokens']['report'], 'token')} of the report part)"
    return f"{bound}; on {where} the difference was {measured}"


def _beside_default(sweep: Sweep, pick: Point, calibration: Mapping[str, Any] | None, lead: str = ", and ") -> str:
    """The loss against the default depth, on the sweep's text or on a calibration's report part, behind `lead`; empty where it was not
    measured, or the default depth is the setting itself or the full run, which the loss is compared with anyway."""
    default = sweep.header.get("mean_loops")
    if default in (None, sweep.header["loops"]) or pick["id"] == f"fixed:{default}":
        return ""
    found, key = pick, "default_dce"
    if calibration is not None:
        part, name = ("differences", "default") if pick["family"] == "calibrated" else ("fixed", "against_default")
        found, key = calibration["report"].get(part, {}).get(name) or {}, "ce"
    return f"{lead}{beside_default(found, key, default)}" if key in found else ""


def _asked(point: Point, loops: int) -> str:
    """A setting as the command line asks for it, in words."""
    if point["family"] == "fixed":
        return f"{plural(int(point['setting']), 'loop')} for every token (`--loops {int(point['setting'])}`)"
    if point["family"] == "full":
        return f"{all_loops(loops)} for every token (`--loops {loops}`)"
    if point["family"] == "calibrated":
        return "the calibrated thresholds (`--exit auto`)"
    return name_of(point, loops) if point["family"] in ("fixed-one", "learned") else f"`--exit {point['id']} --loops {loops}`"


def _measured(sweep: Sweep) -> str:
    """What costs and qualities were measured on, and how well."""
    words = [measured_words(sweep.header, sweep.rounds if sweep.cost == "ms" else 0), _rough(sweep)]
    if sweep.cost == "flops":
        few = sweep.rounds < ROUNDS
        why = f"Times need {plural(ROUNDS, 'round')} and this sweep has {sweep.rounds}" if few else "Not every point was timed"
        words.append(f"{why}, so counted FLOPs decide; they count as fewer from {100 * MARGIN:.0f} % on.")
    base, against = baseline(sweep)
    if base["dce_high"] > FLAT:
        words.append(f"On the sweep's text {against} may cost more than {FLAT} nats: dCE {rise(base)}.")
    return " ".join(filter(None, words))


def _swept_words(sweep: Sweep, calibration: Mapping[str, Any] | None, choice: Choice) -> tuple[str, list[str]]:
    """The recommendation on the sweep's text alone."""
    described = {id(p): _on_the_sweep(sweep, p) for p in (choice.pick, choice.fixed, choice.rule) if p is not None}
    words = [
        f"For this model use {described[id(choice.pick)]}. Compared are settings whose CE rises by no more than {FLAT} nats on the sweep's "
        f"text, by the whole interval.",
        _rivals(sweep, choice, described),
        fewer_loops(sweep, choice),
        tied_with_a_rule(sweep, choice),
        "The choice was made among many settings on the text that it is reported on, which flatters it.",
    ]
    if calibration is None:
        words.append("It is not certified: `twoscale calibrate` certifies a setting on text of its own.")
    else:
        words.append(f"It is not certified: {why_not_certified(sweep, calibration)}.")
    return f"Use {described[id(choice.pick)]}; chosen on these tokens, not certified.", [words[0], " ".join(filter(None, words[1:]))]


def _certified_words(sweep: Sweep, calibration: Mapping[str, Any], choice: Choice) -> tuple[str, list[str]]:
    """The recommendation among what a calibration certified, and why the sweep alone may choose otherwise."""
    loops, limit = sweep.header["loops"], calibration["goal"]["max_dce"]
    described = {
        id(p): _described(sweep, p, _reported(p, calibration), part_words(calibration, "report"), _beside_default(sweep, p, calibration))
        for p in (choice.pick, choice.fixed, choice.rule)
        if p is not None
    }
    bound = (
        f"the loss lies no more than {limit:g} nats a token above the loss at {plural(loops, 'loop')} ({confidence(calibration)})"
        if choice.pick["family"] != "full"
        else "it is the full run itself"
    )
    found = _reported(choice.pick, calibration) if choice.pick["family"] != "full" else None
    check = (
        f" On the report part, which is {other_text(calibration)}, its dCE is {beside_limit(found, limit, 'that limit')}." if found else ""
    )
    source = f" of the held-out text of {calibration['source']}" if calibration.get("source") else ""
    certify = f"{part_words(calibration, 'certify')}{source}"
    words = [
        f"For this model use {described[id(choice.pick)]}. It is certified on {certify}: {bound}.{check}",
        _rivals(sweep, choice, described),
        _beside(sweep, calibration, choice),
    ]
    return f"Use {described[id(choice.pick)]}; certified: {bound}.", words


def _reported(point: Point, calibration: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What the calibration measured of a point on its report part; None of one that it did not measure."""
    found: dict[str, Any] = calibration["report"]
    if point["family"] == "calibrated":
        return found["calibrated"]  # type: ignore[no-any-return]
    return next((found[name] for name in ("fixed", "default") if found.get(name, {}).get("rule") == point["id"]), None)


def _described(sweep: Sweep, point: Point, quality: Mapping[str, Any] | None, where: str, more: str) -> str:
    """A point with its cost, and its quality on some text; `more` is what else was measured there."""
    loops, (base, against) = sweep.header["loops"], baseline(sweep)
    words = f"{name_of(point, loops)}: {saving(point, base, against, sweep.cost)}"
    if quality is None or point["family"] == "full":
        return words
    return f"{words}; on {where} dCE {rise(quality)} nats against {all_loops(loops)}{more}"


def _on_the_sweep(sweep: Sweep, point: Point) -> str:
    """A point as the sweep measured it."""
    return _described(sweep, point, point, f"the sweep's {plural(sweep.header['tokens'], 'token')}", _beside_default(sweep, point, None))


def _rivals(sweep: Sweep, choice: Choice, described: Mapping[int, str]) -> str:
    """The best rule beside the best fixed depth."""
    rule, fixed, loops, cost = choice.rule, choice.fixed, sweep.header["loops"], sweep.cost
    if rule is None:
        if choice.certified:
            return "No thresholds of an exit rule could be certified to this limit."
        return f"No rule that was tried keeps CE within {FLAT} nats by its whole interval."
    what, other = "time" if cost == "ms" else "FLOPs", name_of(fixed, loops)
    if choice.certified:
        lead, they, none = (
            f"Certified to the same limit: {described[id(rule)]};",
            "they cost",
            "within this limit these thresholds save nothing",
        )
    else:
        lead, they, none = (
            f"The best rule within the same limit of loss is {described[id(rule)]};",
            "it costs",
            "within this limit no rule that was tried saves anything",
        )
    if choice.pick is rule:
        same = "certified to the same limit" if choice.certified else "within the same limit of loss"
        words = f"The best fixed depth {same} is {described[id(fixed)]}; it costs more, by whole intervals."
        less = [] if choice.certified else [name_of(p, loops) for p in fixed_within(sweep) if p["flops"] < fixed["flops"]]
        does, are = ("does", "is") if len(less) == 1 else ("do", "are")
        return words if not less else f"{words} So {does} {', '.join(less)}, which {are} not shown to be better than the default depth."
    if below(fixed, rule, cost):
        return f"{lead} {they} more than {other}, so {none} over it."
    which = "thresholds" if choice.certified else "rule"
    return f"{lead} in {what} {other} and the {which} cannot be told apart, and a tie goes to the fixed depth, which is simpler."


def _beside(sweep: Sweep, calibration: Mapping[str, Any], choice: Choice) -> str:
    """What the sweep alone would choose, and why it is not recommended."""
    alone = choose_swept(sweep).pick
    if alone is choice.pick:
        return f"The sweep alone, with a limit of {FLAT} nats on its {plural(sweep.header['tokens'], 'token')}, would choose the same."
    why = alone_words(sweep, calibration, choice, alone)
    return f"The sweep alone would choose {_on_the_sweep(sweep, alone)}. That is no second recommendation: {why}."


def _rough(sweep: Sweep) -> str:
    """Which intervals rest on few documents or few rounds."""
    words = []
    clusters, by = sweep.header.get("clusters", ROUGH), sweep.header.get("by")
    if clusters < ROUGH:
        words.append(f"those of losses over {plural(clusters, UNITS[by]) if by else clusters}")
    if sweep.cost == "ms" and sweep.rounds < ROUGH:
        words.append(f"those of times over {plural(sweep.rounds, 'round')}")
    few = min(clusters, sweep.rounds if sweep.cost == "ms" else ROUGH) <= EXTREMES
    ends = f" Over {EXTREMES} or fewer they are the lowest and the highest of these, and may cover less than 95 %." if few else ""
    return f"Intervals are rough: {', '.join(words)}.{ends}" if words else ""


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
            f"The oracle that stays within eps gives every token the fewest steps, the same in all groups, after which its loss stays "
            f"within eps of the full run's. At eps = {low['setting']:g} it takes {low['mean_steps']:.1f} steps, the fewest among the eps "
            f"tried that keep CE within {FLAT} nats (dCE {rise(low)}; as run, tokens also attend to others that left early, so that it may "
            "lie above eps). It promises this for every single token, so rules that promise it on average may take fewer steps."
        )
    if kept := [p for p in sweep.family("oracle-lagrange") if p["dce_high"] <= FLAT]:
        low = min(kept, key=lambda p: p["mean_steps"])
        words.append(
            f"The oracle that weighs loss against steps gives every token, among some forty combinations of depths, the one with the least "
            f"loss + price x steps. At a price of {low['setting']:g} nats a step it takes {low['mean_steps']:.1f} steps (dCE {rise(low)}); "
            f"it also picks depths at which the label happens to be likeliest, which no rule can know."
        )
    if not words:
        return ""
    return f"Oracles choose depths with the labels in hand, and are no settings to use. {' '.join(words)}"


def sample_words(rule: str, choice: Choice | None, loops: int) -> str:
    """Why the texts on the page were written with this rule."""
    if choice is None:
        return f"exit rule: {rule}"
    pick = name_of(choice.pick, loops)
    if rule == pick:
        return f"exit rule: {rule}, the recommended setting"
    if choice.rule is not None and rule == name_of(choice.rule, loops) and choice.pick["family"] in FIXED:
        best_rule = "which are certified to the same limit" if choice.certified else "the best rule within the same limit of loss"
        return (
            f"exit rule: {rule}, {best_rule}, so that the colours show how steps differ (with the recommended {pick} every token "
            "takes the same steps)"
        )
    return f"exit rule: {rule} (recommended is {pick})"
