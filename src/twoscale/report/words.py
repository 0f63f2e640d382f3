"""Sentences made of numbers, for the report, the commands and the explorer. Pure functions, no torch.

A difference is called one only where its whole 95 % interval lies on one side of zero; otherwise the sentence says "no difference".
Savings are quoted against the model's default depth, `mean_loops`, and name it.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from twoscale.config.words import MARGIN, UNITS, all_loops, plural, text_words
from twoscale.tradeoff.results import settings_tested

FEWEST = 4  # documents (or pieces, or windows); an interval over fewer is not used
DIGITS = {"steps": 3, "ce": 4}  # of a printed difference


# -- numbers -----------------------------------------------------------------------------------------------------


def signed(x: float) -> str:
    """Four digits with their sign; what rounds to nothing has none."""
    return f"{x:+.4f}" if abs(x) >= 5e-5 else "0.0000"


def rise(p: Mapping[str, Any]) -> str:
    """The rise of CE with its interval; the full run, which others are compared with, has none."""
    return "0 (the reference)" if p.get("family") == "full" else between(p, "dce")


def between(p: Mapping[str, Any], key: str) -> str:
    """A difference of CE with its interval."""
    return f"{signed(p[key])} [{signed(p[f'{key}_low'])}, {signed(p[f'{key}_high'])}]"


def side(low: float, high: float) -> int:
    """-1 for an interval wholly below zero, 1 for one wholly above, 0 for one that contains it."""
    return -1 if high < 0 else 1 if low > 0 else 0


def change(value: float, base: float, less: str = "less", more: str = "more") -> str:
    """`40 % less` or `40 % more` than the base; empty where the two are equal to the percent."""
    share = value / base - 1
    return "" if round(100 * abs(share)) == 0 else f"{100 * abs(share):.0f} % {less if share < 0 else more}"


def change_between(point: Mapping[str, Any], base: Mapping[str, Any], cost: str) -> str:
    """`40 % less time (35 to 44 %)`: a cost beside another's, for times with what follows from the ends of both intervals; `40 % fewer
    FLOPs`. Empty where the two are equal to the percent."""
    if not (words := change(point[cost], base[cost], "less" if cost == "ms" else "fewer")):
        return ""
    if cost != "ms":
        return f"{words} FLOPs"
    ends = sorted(abs(a / b - 1) for a, b in ((point["ms_high"], base["ms_low"]), (point["ms_low"], base["ms_high"])))
    return f"{words} time ({100 * ends[0]:.0f} to {100 * ends[1]:.0f} %)"


def cost_words(point: Mapping[str, Any], cost: str) -> str:
    """`3.10 [3.04, 3.17] ms a token` or `12.31 MFLOP a token`. Times are relative to the full run, which has no interval itself."""
    if cost != "ms":
        return f"{point['flops'] / 1e6:.2f} MFLOP a token"
    digits = 2 if point["ms"] < 10 else 1
    interval = "" if point["family"] == "full" else f" [{point['ms_low']:.{digits}f}, {point['ms_high']:.{digits}f}]"
    return f"{point['ms']:.{digits}f}{interval} ms a token"


def default_depth(mean_loops: int) -> str:
    return f"the default of {plural(mean_loops, 'loop')}"


def against_default(steps: float, mean_loops: int) -> str:
    """Loop work of one text, as mean steps of a looped layer, beside the default depth's."""
    sentences = change(steps, mean_loops)
    return f"{sentences} loop work than {default_depth(mean_loops)}" if sentences else f"as much loop work as {default_depth(mean_loops)}"


def mean_steps(steps: Sequence[float], layers: Sequence[int]) -> float:
    """Mean steps of a looped layer, from the mean steps of each group and its number of layers."""
    return sum(k * n for k, n in zip(steps, layers, strict=True)) / sum(layers)


# -- texts -------------------------------------------------------------------------------------------------------


def sweep_text(header: Mapping[str, Any]) -> str:
    """The text of a sweep, from the first line of sweep.jsonl."""
    return text_words("report", header["tokens"], header.get("clusters"), header.get("by"), header.get("source"))


def timed_text(header: Mapping[str, Any], rounds: int) -> str:
    """What the times of a sweep are of: `8 tokens of each of 6 windows`. Every round decodes the next window; files of earlier versions do
    not say how many tokens of it."""
    known = header.get("timed_tokens")
    windows = min(rounds, header.get("windows", rounds))
    tokens = "a few tokens" if known is None else plural(known, "token")
    again = f", in {plural(rounds, 'round')}" if windows < rounds else ""
    return f"{tokens} of {'each of ' if windows != 1 else ''}{plural(windows, 'window')}{again}"


def measured_words(header: Mapping[str, Any], rounds: int) -> str:
    """On what a sweep's losses, steps and times were measured, in a sentence; with 0 rounds there are no times to speak of."""
    if rounds == 0:
        return f"Measured on {sweep_text(header)}."
    return (
        f"Losses and steps are measured on {sweep_text(header)}; times are of cached decoding of {timed_text(header, rounds)} of that text."
    )


def beside_default(found: Mapping[str, Any], key: str, mean_loops: int) -> str:
    """A difference of CE from the default depth: more, less or no measurable change, by its whole interval as it is printed."""
    where = side(*(round(found[f"{key}_{end}"], DIGITS["ce"]) for end in ("low", "high")))
    if where == 0:
        return f"no measurable change against {default_depth(mean_loops)} ({between(found, key)})"
    return f"measurably {'more' if where > 0 else 'less'} than {default_depth(mean_loops)}, by {between(found, key)}"


def calibration_text(found: Mapping[str, Any], part: str) -> str:
    """The text of one part of a calibration, from calibration.json."""
    return text_words(part, found["tokens"][part], found["clusters"][part], unit_of(found, part), found.get("source"))


def unit_of(found: Mapping[str, Any], part: str) -> str:
    """What the intervals and bounds of a part are over: documents, pieces, windows or samples. Earlier versions have one unit for all."""
    by: Any = found["by"]
    return str(by[part] if isinstance(by, Mapping) else by)


def other_text(found: Mapping[str, Any]) -> str:
    """What the report part of a calibration is beside its certify part; a text of few documents is parted by windows."""
    return "other documents" if unit_of(found, "report") in ("documents", "pieces") else "other text"


def part_words(found: Mapping[str, Any], part: str) -> str:
    """A part of a calibration in short: `the report part (2,304 tokens, 9 documents)`."""
    counted = plural(found["clusters"][part], UNITS[unit_of(found, part)])
    return f"the {part} part ({plural(found['tokens'][part], 'token')}, {counted})"


def unit_words(by: str) -> str:
    """What intervals are over, in the plural: `pieces of documents`."""
    return plural(2, UNITS[by]).partition(" ")[2]


def evaluation_text(found: Mapping[str, Any]) -> str:
    """The text of evaluation.json or of `twoscale eval`."""
    return text_words("all", found["tokens"], found.get("clusters", found.get("windows")), "windows", found.get("source"))


def losses_note(evaluation: Mapping[str, Any] | None, sweep: Mapping[str, Any] | None, calibration: Mapping[str, Any] | None) -> str:
    """Which losses of a page belong to which tokens; empty where there is one text only."""
    sentences = []
    if evaluation is not None:
        sentences.append(f"the loss by loops is of {evaluation_text(evaluation)}")
    if sweep is not None:
        sentences.append(f"the sweep's losses are of {sweep_text(sweep)}")
    if calibration is not None:
        sentences.append(f"the calibration's bound is of {calibration_text(calibration, 'certify')}")
        sentences.append(f"its losses are of {calibration_text(calibration, 'report')}")
    if len(sentences) < 2:
        return ""
    note = f"Losses are to be compared only where they are of the same tokens. Here {'; '.join(sentences)}."
    if sweep is not None and calibration is not None:
        note += f" {shared_windows(sweep, calibration)}"
    if evaluation is not None:
        note += " The loss by loops is of windows spread over all documents, so it may share text with the others."
    return note


def shared_windows(sweep: Mapping[str, Any], calibration: Mapping[str, Any]) -> str:
    """Which of the two texts of the report part holds the other, by the fingerprints of their windows."""
    known = [sweep.get("window_fingerprints"), calibration.get("window_fingerprints", {}).get("report")]
    if not all(known):
        return (
            "The sweep and the calibration both read the report part; whether they share windows is not recorded "
            "(a file is of an earlier version)."
        )
    mine, theirs = (set(windows) for windows in known)
    n, m = plural(len(mine), "window"), plural(len(theirs), "window")
    both = len(mine & theirs)
    if mine == theirs:
        return f"The sweep and the calibration read the same {n} of the report part."
    if mine < theirs:
        return f"The sweep's {n} {'is' if len(mine) == 1 else 'are all'} among the {m} of the report part that the calibration reads."
    if theirs < mine:
        return f"The {m} of the report part that the calibration reads {'is' if len(theirs) == 1 else 'are all'} among the sweep's {n}."
    if both:
        return f"Of the sweep's {n} of the report part {both} {'is' if both == 1 else 'are'} among the {m} that the calibration reads."
    return f"Of the report part the sweep reads {n} and the calibration {m}; they share none."


# -- calibration -------------------------------------------------------------------------------------------------


def calibration_sentences(found: Mapping[str, Any], mean_loops: int | None) -> list[str]:
    """What a calibration found: its bound, its cost on unseen text, and how it compares with the default depth, with a single threshold
    and with a fixed depth that were certified in the same way. A file of an older version gets only what follows from it."""
    r = found["report"]
    mine = r["calibrated"]
    sentences = [_bound_words(found)]
    certified = any(found["rules"]) and math.isfinite(found["bound"])
    limit = found["goal"].get("max_dce")
    bound, name = (found["bound"], "the bound") if limit is None else (limit, "the limit")
    check = f", {beside_limit(mine, bound, name)}" if certified and "dce_low" in mine else ""
    risen = f", dCE {rise(mine)} nats against {all_loops(found['loops'])}" if any(found["rules"]) else ""
    sentences.append(
        f"On {calibration_text(found, 'report')}, which neither fitting nor certifying has seen: {mine['mean_steps']:.2f} steps, "
        f"CE {mine['ce']:.4f}{risen}{check}."
    )
    sentences.append(_default_words(found, found.get("mean_loops", mean_loops)))
    sentences.append(_rival_words(found, "single"))
    sentences.append(_rival_words(found, "fixed"))
    return [words for words in sentences if words]


def beside_limit(p: Mapping[str, Any], limit: float, name: str) -> str:
    """A measured rise of CE beside a limit that was certified on other text, by the whole interval."""
    if p["dce_high"] <= limit:
        return f"below {name} by its whole interval"
    if p["dce_low"] > limit:
        return f"above {name} by its whole interval: the certificate does not hold on this text"
    return f"not told apart from {name}, which lies in its interval"


def _bound_words(found: Mapping[str, Any]) -> str:
    if not any(found["rules"]):
        return "No setting could be certified, so every group runs all its loops: ask for less, or hold out more text."
    if not math.isfinite(found["bound"]):
        return f"No bound can be given: {calibration_text(found, 'certify')} is too little."
    limit, where = found["goal"].get("max_dce"), f"above the loss at {plural(found['loops'], 'loop')} ({confidence(found)})"
    lead = f"Certified on {calibration_text(found, 'certify')}: the loss lies no more than"
    if limit is None:
        return f"{lead} {found['bound']:.4f} nats a token {where}."
    return f"{lead} the limit of {limit:g} nats a token {where}; the test's upper bound was {found['bound']:.4f}."


def confidence_level(found: Mapping[str, Any]) -> str:
    """`confidence 95 %`, of a calibration."""
    return f"confidence {100 * (1 - found['delta']):.4g} %"


def confidence(found: Mapping[str, Any]) -> str:
    """`confidence 95 % for all that was certified together`, of a calibration; where a speed was asked for there is one bound only. Earlier
    versions tested every path at the whole delta, so that their confidence is that of each setting by itself."""
    level = confidence_level(found)
    if not {"max_dce", "max_accuracy_drop"} & set(found["goal"]):
        return level
    return f"{level} for {'all that was certified together' if 'delta_each' in found else 'each setting by itself'}"


def _difference(found: Mapping[str, Any], name: str) -> Mapping[str, float] | None:
    """The result's steps minus another setting's (and its CE minus the other's), with paired intervals; None where the file has none.

    Files of older versions compare with the cheapest single threshold of no higher loss (`equal`); only where that is the one that was
    certified does their interval apply.
    """
    r = found["report"]
    if "differences" in r:
        known: Mapping[str, float] | None = r["differences"].get(name)
        return known
    if name == "single" and r.get("equal", {}).get("rule") == r["single"]["rule"] is not None:
        return {"steps": -r["fewer_steps"], "steps_low": -r["fewer_high"], "steps_high": -r["fewer_low"]}
    return None


def _default_words(found: Mapping[str, Any], mean_loops: int | None) -> str:
    if mean_loops is None:
        return ""
    steps, difference = found["report"]["calibrated"]["mean_steps"], _difference(found, "default")
    if difference is None:
        return f"{default_depth(mean_loops).capitalize()} takes {plural(mean_loops, 'step')}."
    sentences = change(steps, mean_loops, "fewer", "more")
    if found["clusters"]["report"] < FEWEST:
        return f"Too little text to tell a difference in steps from {default_depth(mean_loops)}."
    if not sentences or _side(found, difference, "steps") == 0:
        return f"No difference in steps from {default_depth(mean_loops)}."
    return f"That is {sentences} steps than {default_depth(mean_loops)}."


def _side(found: Mapping[str, Any], difference: Mapping[str, float], key: str) -> int:
    """`side` of a difference as it is printed, so that a sentence never contradicts its numbers; 0 where there is too little text."""
    if found["clusters"]["report"] < FEWEST:
        return 0
    return side(*(round(difference[f"{key}_{end}"], DIGITS[key]) for end in ("low", "high")))


def _rival_words(found: Mapping[str, Any], name: str) -> str:
    """The result beside a setting that was found for the same goal in the same way."""
    kind = {"single": "single threshold for all groups", "fixed": "fixed depth for all tokens"}[name]
    other, mine = found["report"].get(name), found["report"]["calibrated"]
    limit = found["goal"].get("max_dce")
    way = f"certified to the same limit of {limit:g} nats" if limit is not None else "chosen for the same goal"
    if other is None:
        return f"No {kind} was {way}: this file is of an older version, calibrate again to compare."
    if other["rule"] is None:
        return f"No {kind} could be {way}." if any(found["rules"]) else ""
    test = next((t for t in settings_tested(found, name) or () if t["rule"] == other["rule"]), None)
    bound = f"; upper bound {test['bound']:.4f}" if test is not None and limit is not None else ""
    lead = f"A {kind} {way} ({other['rule']}{bound}) takes {other['mean_steps']:.2f} steps, dCE {signed(other['dce'])}:"
    difference, key = _difference(found, name), "steps" if limit is not None else "ce"
    if difference is None or key not in difference:
        return f"{lead} no paired interval was recorded, so which of the two is better is open."
    words, where = _verdict(found, difference, key), _side(found, difference, key)
    if where < 0 and key == "steps" and mine["flops"] > (1 + MARGIN) * other["flops"]:
        words += f", but {change(mine['flops'], other['flops'])} FLOPs with the rule's own work"
    elif name == "fixed" and where >= 0 and found["clusters"]["report"] >= FEWEST:
        by = f"by {'steps' if key == 'steps' else 'loss'} the fixed depth is the better choice"
        words += f"; {by if where else 'the fixed depth is the simpler choice'}"
    if key == "steps" and "ce" in difference and any(found["rules"]) and (lower := _side(found, difference, "ce")):
        words += f"; their loss is {'lower' if lower < 0 else 'higher'} ({between(difference, 'ce')} nats)"
    return f"{lead} {words}."


def _verdict(found: Mapping[str, Any], d: Mapping[str, float], key: str) -> str:
    """Fewer steps (or a lower loss), more, or no difference, by the paired interval."""
    noun, unit = ("steps", "steps") if key == "steps" else ("loss", "nats")
    value, low, high = (f"{round(d[name], DIGITS[key]) + 0.0:+.{DIGITS[key]}f}" for name in (key, f"{key}_low", f"{key}_high"))
    shown = f"{value} [{low}, {high}] {unit}"
    subject, where = "the calibrated thresholds" if any(found["rules"]) else "all loops", _side(found, d, key)
    if found["clusters"]["report"] < FEWEST:
        return f"too little text to tell a difference ({shown})"
    if where == 0:
        return f"no difference in {noun} ({shown})"
    if key == "steps":
        return f"{subject} take {'fewer' if where < 0 else 'more'} ({shown})"
    return f"{subject} have a {'lower' if where < 0 else 'higher'} loss ({shown})"
