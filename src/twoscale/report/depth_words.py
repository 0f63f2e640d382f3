"""Which rules find the depth of a task's answers, in sentences. Pure functions of a task's sweep, no torch.

Every sentence follows from intervals: a rule is said to save steps only where its whole interval lies below the best fixed depth, and a
difference between two rules is called one only where its whole interval lies on one side of zero.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from twoscale.config.words import all_loops, plural
from twoscale.report.words import confidence, side
from twoscale.tradeoff.depth_summary import (
    FOLLOWS,
    RuleDepth,
    TimeSaved,
    Verdict,
    best_fixed,
    depth_rows,
    family_label,
    is_finished,
    is_geometry,
    rules_alone,
    time_saved,
)
from twoscale.tradeoff.summary import ROUNDS, Sweep

UNFINISHED = "The sweep is not finished: run it again, and it goes on where it stopped."
VERDICTS: dict[Verdict, str] = {
    "finds": "finds the depth",
    "saves": "saves steps, not shown to follow the depth",
    "no saving": "not shown to save over a fixed depth",
    "not certified": "no setting keeps the accuracy",
}


def percent(x: float) -> str:
    return f"{100 * x:.1f} %"


def points(x: float) -> str:
    """A drop of accuracy in points."""
    return f"{100 * x:g} {'point' if x == 0.01 else 'points'}"


def share_words(row: RuleDepth) -> str:
    """`0.62 [0.59, 0.65]`: steps beside the best fixed depth's."""
    return "{:.2f} [{:.2f}, {:.2f}]".format(*row.ratio)


def rank_words(row: RuleDepth) -> str:
    return "-" if row.spearman is None else "{:.2f} [{:.2f}, {:.2f}]".format(*row.spearman)


def rule_words(row: RuleDepth) -> str:
    """A rule with its steps."""
    return f"{row.label} ({row.id}: {row.steps:.2f} steps, {share_words(row)} of the best fixed depth's)"


def task_text(sweep: Sweep) -> str:
    """What was measured."""
    head = sweep.header
    return f"{plural(head['tokens'], 'answer')} ({plural(head['clusters'], 'held-out sample')}) of the task {head['task']}"


def limit_words(sweep: Sweep) -> str:
    """The certificate."""
    head = sweep.header
    level = f"confidence {100 * (1 - head['delta']):.4g} % for each rule by itself"
    drop = points(head["max_accuracy_drop"])
    return f"certified, on samples that nothing else uses, to lie at most {drop} below the full run's ({level})"


def headline(sweep: Sweep) -> str:
    """One sentence on what was found."""
    if not is_finished(sweep):
        return UNFINISHED
    rules, fixed = rules_alone(depth_rows(sweep)), best_fixed(sweep)
    if found := [row for row in rules if row.verdict == "finds"]:
        name = f"{found[0].label[0].upper()}{found[0].label[1:]}"
        return f"{name} finds the depth: {found[0].steps:.2f} steps an answer where the best fixed depth takes {fixed:g}."
    if saved := [row for row in rules if row.verdict == "saves"]:
        best = f"{saved[0].label} saves most: {saved[0].steps:.2f} steps, the best fixed depth takes {fixed:g}"
        return f"No rule is shown to follow the depth; {best}."
    return f"No rule is shown to take fewer steps than the best fixed depth of {plural(int(fixed), 'step')}."


def depth_sentences(sweep: Sweep) -> list[str]:
    """Paragraphs: baselines, which rules find the depth, why others do not, the second hit, the paper's claim, time."""
    if not is_finished(sweep):
        return [UNFINISHED]
    rows = depth_rows(sweep)
    words = [
        _baselines(sweep, rows),
        *_verdicts(sweep, rows),
        _geometry(rows),
        _others(rows),
        _second_hit(sweep),
        _claim(sweep),
        _times(sweep),
    ]
    return [paragraph for paragraph in words if paragraph]


def _baselines(sweep: Sweep, rows: Sequence[RuleDepth]) -> str:
    full, fixed = sweep.point("full"), next((row for row in rows if row.family == "fixed"), None)
    assert full is not None
    words = [
        f"Measured on {task_text(sweep)}. With {all_loops(sweep.header['loops'])} {percent(full['accuracy'])} of the answers are right."
    ]
    if fixed is not None and fixed.id is not None:
        smaller = ", and that of the next smaller one is not" if fixed.steps > 1 else ""
        words.append(f"The best fixed depth takes {fixed.steps:g} steps: its accuracy is {limit_words(sweep)}{smaller}.")
    elif fixed is not None:
        words.append("No fixed depth below all loops could be certified to keep the accuracy.")
    oracle = next((row for row in rows if row.family == "true-depth"), None)
    if oracle is not None:
        words.append(
            f"With the true depths, which no rule is told, the answers take {oracle.steps:.2f} steps ({share_words(oracle)} of the best "
            f"fixed depth's) and {percent(oracle.accuracy)} are right."
        )
    later = next((row for row in rows if row.family == "true-depth+1"), None)
    if oracle is not None and later is not None and oracle.drop_low > sweep.header["max_accuracy_drop"]:
        words.append(
            f"So an answer that is there must go on: others read it. With one step more {percent(later.accuracy)} are right, at "
            f"{later.steps:.2f} steps."
        )
    return " ".join(words)


def _verdicts(sweep: Sweep, rows: Sequence[RuleDepth]) -> list[str]:
    """One paragraph for each verdict that occurs."""
    leads = {
        "finds": f"These rules find the depth: their accuracy is {limit_words(sweep)}, they take fewer steps than the best fixed "
        f"depth, and the rank correlation of steps and true depth is {FOLLOWS} or more, both by whole intervals. "
        "Their steps as a share of the best fixed depth's:",
        "saves": "These rules take fewer steps than the best fixed depth, certified likewise, but their steps are not shown to follow the "
        f"true depth (the interval of the rank correlation begins below {FOLLOWS}). Shares:",
        "no saving": "These rules keep the accuracy but are not shown to take fewer steps than the best fixed depth. Shares:",
        "not certified": "Of these rules no setting that was tested keeps the accuracy, so they take all loops:",
    }
    found = []
    for verdict, lead in leads.items():
        mine = [row for row in rules_alone(list(rows)) if row.verdict == verdict]
        if mine:
            listed = "; ".join(row.label if row.id is None else f"{row.label} {share_words(row)}" for row in mine)
            found.append(f"{lead} {listed}.")
    return found


def _geometry(rows: Sequence[RuleDepth]) -> str:
    """The best rule on states alone, which needs no head and no training."""
    best = next((row for row in rules_alone(list(rows)) if row.id is not None and is_geometry(row.family)), None)
    if best is None:
        return "No rule on the states alone could be certified."
    return f"The best rule on the states alone is {rule_words(best)}, correlation {rank_words(best)}."


def _others(rows: Sequence[RuleDepth]) -> str:
    """What stopping the other tokens costs, from the runs in which the answers alone leave."""
    alone = {row.family: row for row in rules_alone(list(rows), "answers")}
    pairs = [(row, alone[row.family]) for row in rules_alone(list(rows)) if row.family in alone]
    dear = [(a, b) for a, b in pairs if b.id is not None and b.steps_high < a.steps_low]
    blind = [a for a, b in pairs if (b.id is None or b.ratio[2] >= 1) and a.verdict in ("no saving", "not certified")]
    words = []
    if dear:
        listed = "; ".join(f"{a.label} {b.steps:.2f} instead of {a.steps:.2f}" for a, b in dear)
        words.append(
            "Answers read other tokens at every step, and a rule stops those, too. Where the answers alone leave and all other tokens take "
            f"all loops, some rules need fewer steps for the same certificate: {listed}. There the sign at the answer is right, and the "
            "price is that of stopping a token that others still need."
        )
    if blind:
        names = "; ".join(row.label for row in blind)
        words.append(
            "These are not shown to save steps even where the answers alone leave, so what they look at does not tell soon enough that an "
            f"answer is there: {names}."
        )
    return " ".join(words)


def _difference(c: dict[str, float]) -> str:
    return f"{c['steps']:+.2f} [{c['low']:+.2f}, {c['high']:+.2f}] steps"


def _certified(sweep: Sweep, family: str) -> bool:
    return any(c["family"] == family and c["scope"] == "all" and c["id"] is not None for c in sweep.choices)


def _second_hit(sweep: Sweep) -> str:
    """Whether two hits of acceleration take fewer steps than one at the same certified accuracy."""
    words = []
    for c in sweep.comparisons:
        if c["b"] != f"{c['a']}{',' if ':' in c['a'] else ':'}hits=1":
            continue
        name = family_label(c["b"]).removesuffix(", one hit")
        one, two = _certified(sweep, c["b"]), _certified(sweep, c["a"])
        if not (one and two):
            which = "neither one hit nor two hits" if not one and not two else "one hit, not two," if one else "two hits, not one,"
            words.append(f"of {name}, {which} could be certified")
            continue
        where = side(c["low"], c["high"])
        verdict = {-1: "it pays", 0: "no difference", 1: "it does not pay"}[where]
        words.append(f"{name} {_difference(c)}: {verdict}")
    return f"The second hit of acceleration, at the same certified accuracy: {'; '.join(words)}." if words else ""


def _claim(sweep: Sweep) -> str:
    """The paper's claim that acceleration beats step norm and KL, by steps at the same certified accuracy."""
    words = []
    for c in sweep.comparisons:
        if c["b"].startswith("acceleration"):
            continue
        a, b = family_label(c["a"]), family_label(c["b"])
        mine, other = _certified(sweep, c["a"]), _certified(sweep, c["b"])
        if not mine or not other:
            which = f"{a} could not be certified" if not mine else f"{b} could not be certified, {a} could"
            words.append(f"{which if mine or other else f'neither {a} nor {b} could be certified'}")
            continue
        verdict = {-1: "holds", 0: "is open: no difference", 1: "does not hold"}[side(c["low"], c["high"])]
        words.append(f"{a} against {b} {_difference(c)}: it {verdict}")
    if not words:
        return ""
    return f"The paper's claim that acceleration beats step norm and KL, here by steps at the same certified accuracy: {'; '.join(words)}."


def _times(sweep: Sweep) -> str:
    found = time_saved(sweep)
    if not found:
        return ""
    few = f" Times of {plural(sweep.rounds, 'round')} alone tell little." if sweep.rounds < ROUNDS else ""
    return f"Cached decoding, token by token, of all that follows the first question: {'; '.join(map(time_words, found))}.{few}"


def time_words(t: TimeSaved) -> str:
    """Time and steps that a rule saves beside the best fixed depth."""
    if t.steps <= 0:
        return f"{t.id} takes no fewer steps than {t.fixed} on these tokens"
    if not t.measured:
        return f"{t.id} takes {percent(t.steps)} fewer steps than {t.fixed}, with no measurable difference in time"
    if t.time <= 0:
        return f"{t.id} takes {percent(t.steps)} fewer steps and {percent(-t.time)} more time than {t.fixed}"
    saved = f"{percent(t.steps)} fewer steps and {percent(t.time)} less time"
    return f"{t.id} takes {saved} than {t.fixed}: {t.share:.2f} of the work saved is saved in time"


def task_table(sweep: Sweep) -> str:
    """Every rule on one line, as text: `twoscale sweep`."""
    head = sweep.header
    lines = [
        f"{head['checkpoint']}, {task_text(sweep)}; settings {limit_words(sweep)}",
        f"{'rule':<46}{'setting':<44}{'steps':>6}  {'of the best fixed depth':<24}{'right':>8}{'drop':>8}  "
        f"{'rank correlation':<19}{'random':>8}",
    ]
    rows = depth_rows(sweep)
    for scope, title in (("all", ""), ("answers", "only the answers leave; other tokens take all loops")):
        lines += [title] if title else []
        for row in (row for row in rows if row.scope == scope):
            beside = "" if row.random is None else percent(row.random)
            lines.append(
                f"{row.label[:45]:<46}{(row.id or 'none certified: all loops')[:43]:<44}{row.steps:6.2f}  {share_words(row):<24}"
                f"{percent(row.accuracy):>8}{100 * row.drop:8.2f}  {rank_words(row):<19}{beside:>8}"
            )
    return "\n".join([*lines, "", *depth_sentences(sweep)])


# -- calibration -------------------------------------------------------------------------------------------------


def task_calibration_sentences(found: Mapping[str, Any]) -> list[str]:
    """What a calibration of a task found: its bound, its steps and accuracy on unseen samples, and the best fixed depth beside it."""
    mine, fixed = found["report"]["calibrated"], found["report"]["fixed"]
    answers = {part: f"{plural(found['tokens'][part], 'answer')} of other samples" for part in ("certify", "report")}
    if not any(found["rules"]):
        first = "No setting could be certified, so every group runs all its loops: allow a larger drop, or give more --samples."
    else:
        first = (
            f"Certified on {answers['certify']}: the share of right answers lies no more than {points(round(found['bound'], 5))} below "
            f"that at {plural(found['loops'], 'loop')} ({confidence(found)})."
        )
    second = (
        f"On {answers['report']}: {mine['mean_steps']:.2f} steps an answer, {percent(mine['accuracy'])} right, a drop of "
        f"{100 * mine['drop']:.2f} [{100 * mine['drop_low']:.2f}, {100 * mine['drop_high']:.2f}] points."
    )
    if fixed["rule"] is None:
        return [
            first,
            second,
            "No fixed depth below all loops could be certified to the same limit." if "max_accuracy_drop" in found["goal"] else "",
        ]
    d = found["report"]["differences"]["fixed"]
    between = f"{d['steps']:+.2f} [{d['steps_low']:+.2f}, {d['steps_high']:+.2f}] steps"
    verdict = {-1: "the calibrated thresholds take fewer", 0: "no difference", 1: "the calibrated thresholds take more"}
    way = "certified to the same limit" if "max_accuracy_drop" in found["goal"] else "chosen for the same goal"
    beside = f"{mine['mean_steps'] / fixed['mean_steps']:.2f} of its steps"
    return [
        first, second,
        f"A fixed depth {way} ({fixed['rule']}) takes {fixed['mean_steps']:.2f} steps, {percent(fixed['accuracy'])} right: "
        f"{verdict[side(d['steps_low'], d['steps_high'])]} ({between}; {beside}).",
    ]  # fmt: skip
