"""What is said of a task's sweep, from constructed numbers: every sentence on both sides of its interval."""

from typing import Any

import pytest

from twoscale.report.depth_words import depth_sentences, headline, task_calibration_sentences, task_table, time_words
from twoscale.tradeoff.depth_summary import TimeSaved, depth_rows, family_label, time_saved
from twoscale.tradeoff.summary import Sweep

HEADER = {
    "kind": "sweep", "task": "hops", "task_version": 1, "checkpoint": "step-9", "loops": 16, "tokens": 1024, "clusters": 128,
    "max_accuracy_drop": 0.005, "delta": 0.05,
}  # fmt: skip


def a_point(id: str, family: str, steps: float, width: float = 0.2, rank: tuple[float, float, float] | None = None, **more: Any) -> Any:
    rank3: Any = rank or (None, None, None)
    return {
        "kind": "point", "id": id, "family": family, "accuracy": 0.998, "accuracy_low": 0.995, "accuracy_high": 1.0, "drop": 0.001,
        "drop_low": 0.0, "drop_high": 0.003, "mean_steps": steps, "mean_steps_low": steps - width, "mean_steps_high": steps + width,
        "spearman": rank3[0], "spearman_low": rank3[1], "spearman_high": rank3[2], "all_steps": steps, "by_depth": [], **more,
    }  # fmt: skip


def a_choice(family: str, id: str | None, scope: str = "all") -> dict[str, Any]:
    return {"kind": "choice", "family": family, "scope": scope, "id": id, "bound": 0.004, "tested": 3, "settings": 6}


def a_sweep(*rules: tuple[str, float | None, float, Any], comparisons: Any = (), alone: Any = (), rounds: int = 8) -> Sweep:
    """Rules as (family, steps or None, half width, correlation); the full run takes 16 steps, the best fixed depth 12, true depths 6.5."""
    points = [
        a_point("full", "full", 16.0, 0.0),
        a_point("fixed:12", "fixed", 12.0, 0.0),
        a_point("true-depth", "true-depth", 6.5, 0.1, (1.0, 1.0, 1.0)),
    ]
    choices = [a_choice("fixed", "fixed:12")]
    choices += [a_choice(family, None, "answers") for family, *_ in rules if family not in [other for other, *_ in alone]]
    for scope, found in (("all", rules), ("answers", alone)):
        for family, steps, width, rank in found:
            id = None if steps is None else f"{family}!"
            choices.append(a_choice(family, id, scope))
            if steps is not None:
                points.append(a_point(f"{id}{'@answers' if scope == 'answers' else ''}", family, steps, width, rank))
    differences = [{"id": f"{a} - {b}", "a": a, "b": b, "steps": d, "low": d - w, "high": d + w} for a, b, d, w in comparisons]
    return Sweep(HEADER, points, rounds, choices, differences)


def said(sweep: Sweep) -> str:
    return "\n".join(depth_sentences(sweep))


HIGH, LOW = (0.9, 0.85, 0.95), (0.85, 0.75, 0.95)


@pytest.mark.parametrize(
    ("rule", "verdict", "words"),
    [
        (("cosine", 7.0, 0.3, HIGH), "finds", "These rules find the depth"),
        (("cosine", 7.0, 0.3, LOW), "saves", "their steps are not shown to follow the true depth"),
        (("cosine", 7.0, 0.3, None), "saves", "their steps are not shown to follow the true depth"),
        (("cosine", 11.9, 0.3, HIGH), "no saving", "not shown to take fewer steps"),
        (("cosine", 14.0, 0.3, HIGH), "no saving", "not shown to take fewer steps"),
        (("cosine", None, 0.0, None), "not certified", "no setting that was tested keeps the accuracy"),
    ],
    ids=["finds", "correlation too low", "no correlation", "interval reaches the fixed depth", "more steps", "not certified"],
)
def test_verdicts(rule: Any, verdict: str, words: str) -> None:
    """A rule finds the depth only where both intervals lie wholly on that side; each other case has its own sentence."""
    sweep = a_sweep(rule)
    [row] = [row for row in depth_rows(sweep) if row.family == "cosine" and row.scope == "all"]
    paragraph = next(p for p in depth_sentences(sweep) if words in p)
    assert row.verdict == verdict and "cosine" in paragraph
    others = ("These rules find the depth", "These rules take fewer", "These rules keep the accuracy", "Of these rules no setting")
    assert sum(lead in said(sweep) for lead in others) == 1


def test_headline() -> None:
    """The headline names the best rule that finds the depth, else the one that saves most, else that none does."""
    assert headline(a_sweep(("kl", 7.5, 0.1, HIGH), ("cosine", 7.0, 0.1, LOW))) == (
        "KL finds the depth: 7.50 steps an answer where the best fixed depth takes 12."
    )
    assert headline(a_sweep(("cosine", 7.0, 0.1, LOW))).startswith("No rule is shown to follow the depth; cosine saves most: 7.00")
    assert headline(a_sweep(("cosine", 11.95, 0.1, HIGH))) == "No rule is shown to take fewer steps than the best fixed depth of 12 steps."


def test_baselines() -> None:
    """The full run, the best fixed depth with its certificate and the true depths are named with their numbers."""
    words = depth_sentences(a_sweep())[0]
    assert "1,024 answers (128 held-out samples) of the task hops" in words and "With all 16 loops 99.8 %" in words
    assert (
        "The best fixed depth takes 12 steps" in words
        and "at most 0.5 points below the full run's (confidence 95 % for each rule by itself)" in words
    )
    assert "the answers take 6.50 steps (0.54 [0.53, 0.55] of the best fixed depth's)" in words
    assert "must go on" not in words
    early = a_sweep()
    early.points[2] |= {"accuracy": 0.7, "drop": 0.3, "drop_low": 0.25, "drop_high": 0.35}
    early.points.append(a_point("true-depth+1", "true-depth+1", 7.5, 0.1, (1.0, 1.0, 1.0)))
    assert "So an answer that is there must go on: others read it. With one step more 99.8 % are right, at 7.50 steps." in said(early)
    early.points[2] |= {"drop": 0.006, "drop_low": 0.001, "drop_high": 0.011}
    assert "must go on" not in said(early), "half a point lies inside the interval"
    none = a_sweep()
    none.choices[0]["id"] = None
    assert "No fixed depth below all loops could be certified" in depth_sentences(none)[0]


@pytest.mark.parametrize(
    ("difference", "words"),
    [((-0.5, 0.2), "it pays"), ((0.5, 0.2), "it does not pay"), ((0.1, 0.2), "no difference"), ((-0.1, 0.2), "no difference")],
)
def test_second_hit(difference: tuple[float, float], words: str) -> None:
    """The second hit pays only where its whole interval lies below zero."""
    rules = (("acceleration", 8.0, 0.1, HIGH), ("acceleration:hits=1", 8.5, 0.1, HIGH))
    sweep = a_sweep(*rules, comparisons=[("acceleration", "acceleration:hits=1", *difference)])
    [paragraph] = [p for p in depth_sentences(sweep) if "second hit" in p]
    assert paragraph.endswith(f"steps: {words}.") and f"{difference[0]:+.2f} [" in paragraph


@pytest.mark.parametrize(
    ("difference", "words"), [((-0.5, 0.2), "it holds"), ((0.5, 0.2), "it does not hold"), ((0.1, 0.2), "it is open: no difference")]
)
@pytest.mark.parametrize("other", ["step-norm", "kl"])
def test_claim(difference: tuple[float, float], words: str, other: str) -> None:
    """Acceleration beats step norm or KL only where the whole interval of the difference lies below zero."""
    rules = (("acceleration", 8.0, 0.1, HIGH), (other, 8.5, 0.1, HIGH))
    sweep = a_sweep(*rules, comparisons=[("acceleration", other, *difference)])
    [paragraph] = [p for p in depth_sentences(sweep) if "The paper's claim" in p]
    assert paragraph.endswith(f"steps: {words}.")


def test_comparisons_without_a_certificate() -> None:
    """Where a rule could not be certified no difference is claimed."""
    pairs = [("acceleration", "acceleration:hits=1", 8.0, 0.1), ("acceleration", "kl", 8.0, 0.1), ("acceleration", "step-norm", -3.0, 0.1)]
    one = a_sweep(
        ("acceleration", None, 0, None),
        ("acceleration:hits=1", 8.0, 0.1, HIGH),
        ("kl", None, 0, None),
        ("step-norm", 9.0, 0.1, HIGH),
        comparisons=pairs,
    )
    assert "of acceleration, one hit, not two, could be certified" in said(one)
    assert "neither acceleration, two hits nor KL could be certified" in said(
        one
    ) and "acceleration, two hits could not be certified" in said(one)
    two = a_sweep(("acceleration", 8.0, 0.1, HIGH), ("acceleration:hits=1", None, 0, None), ("kl", None, 0, None), comparisons=pairs[:2])
    assert "two hits, not one, could be certified" in said(two) and "KL could not be certified, acceleration, two hits could" in said(two)
    for sweep in (one, two):
        assert not any(word in said(sweep) for word in ("it pays", "does not pay", "it holds", "does not hold", "no difference"))


def test_what_stopping_other_tokens_costs() -> None:
    """That other tokens are the price is said of rules that need fewer steps where the answers alone leave, by whole intervals."""
    rules = (("cosine", 9.0, 0.2, HIGH), ("kl", 7.2, 0.2, HIGH), ("entropy", None, 0, None))
    alone = (("cosine", 7.0, 0.2, HIGH), ("kl", 7.0, 0.2, HIGH), ("entropy", None, 0, None))
    [paragraph] = [p for p in depth_sentences(a_sweep(*rules, alone=alone)) if p.startswith("Answers read other tokens")]
    assert "cosine 7.00 instead of 9.00" in paragraph and "KL" not in paragraph and paragraph.endswith("an answer is there: entropy.")
    assert "Answers read other tokens" not in said(a_sweep(rules[1], alone=alone[1:2]))


def test_best_rule_on_states() -> None:
    """The best rule on the states alone is named whatever rules on the output do."""
    words = said(a_sweep(("kl", 7.0, 0.1, HIGH), ("step-norm:relative=true", 7.5, 0.1, HIGH), ("cosine", 8.0, 0.1, HIGH)))
    assert "The best rule on the states alone is step norm, relative to the state (step-norm:relative=true!: 7.50 steps" in words
    assert "No rule on the states alone could be certified." in said(a_sweep(("kl", 7.0, 0.1, HIGH), ("cosine", None, 0, None)))


@pytest.mark.parametrize(
    ("time", "steps", "words"),
    [
        (0.3, 0.4, "a takes 40.0 % fewer steps and 30.0 % less time than b: 0.75 of the work saved is saved in time"),
        (-0.1, 0.4, "a takes 40.0 % fewer steps and 10.0 % more time than b"),
        (0.1, -0.1, "a takes no fewer steps than b on these tokens"),
    ],
)
def test_time(time: float, steps: float, words: str) -> None:
    """Time saved is quoted beside the steps saved; where no steps are saved there is no share."""
    assert time_words(TimeSaved("a", "b", time, steps)) == words
    if steps > 0:
        assert (
            time_words(TimeSaved("a", "b", time, steps, False))
            == "a takes 40.0 % fewer steps than b, with no measurable difference in time"
        )


def test_times_of_a_sweep() -> None:
    """Time and steps are compared with the best fixed depth on the tokens that were timed."""
    sweep = a_sweep(("cosine", 7.0, 0.1, HIGH))
    for id, ms, steps in (("full", 16.0, 16.0), ("fixed:12", 12.0, 12.0), ("cosine!", 9.0, 8.0)):
        point = sweep.point(id)
        assert point is not None
        point |= {"ms": ms, "timed_steps": steps}
    [found] = time_saved(sweep)
    assert (found.id, found.fixed) == ("cosine!", "fixed:12") and (found.time, found.steps) == pytest.approx((0.25, 1 / 3))
    assert found.share == pytest.approx(0.75) and "0.75 of the work saved" in said(sweep)
    fixed, rule = sweep.point("fixed:12"), sweep.point("cosine!")
    assert fixed is not None and rule is not None
    fixed |= {"ms_low": 11.0, "ms_high": 13.0}
    for high, words in ((10.9, "0.75 of the work saved"), (11.1, "no measurable difference in time")):
        rule |= {"ms_low": 8.0, "ms_high": high}
        assert words in said(sweep)


def test_table() -> None:
    """Every rule and baseline has a line, failures included."""
    table = task_table(a_sweep(("cosine", 7.0, 0.1, HIGH), ("entropy", None, 0, None)))
    for words in ("cosine!", "none certified: all loops", "fixed:12", "true-depth", "0.58 [0.58, 0.59]", "0.90 [0.85, 0.95]"):
        assert words in table


def test_labels() -> None:
    """Rules are named in words."""
    assert family_label("acceleration:normalize=state,hits=1") == "acceleration, relative to the state, one hit"
    assert family_label("acceleration") == "acceleration, two hits" and family_label("confidence") == "margin"
    assert family_label("step-norm:relative=true") == "step norm, relative to the state"


def a_calibration(difference: float, width: float, rule: str | None = "cosine:0.1", fixed: str | None = "fixed:12") -> dict[str, Any]:
    mine = {"mean_steps": 7.0, "accuracy": 0.999, "drop": 0.001, "drop_low": 0.0, "drop_high": 0.002}
    between = {"steps": difference, "steps_low": difference - width, "steps_high": difference + width}
    return {
        "rules": [rule], "bound": 0.0031, "loops": 16, "delta": 0.05, "tokens": {"certify": 1024, "report": 1024},
        "goal": {"max_accuracy_drop": 0.005},
        "report": {"calibrated": mine, "fixed": mine | {"rule": fixed, "mean_steps": 12.0}, "differences": {"fixed": between}},
    }  # fmt: skip


def test_calibration() -> None:
    """A calibration is said to take fewer steps than the fixed depth only by its whole interval, and names its bound in points."""
    first, second, third = task_calibration_sentences(a_calibration(-5.0, 0.2))
    assert "no more than 0.31 points below that at 16 loops (confidence 95 %" in first and "7.00 steps an answer, 99.9 % right" in second
    assert "the calibrated thresholds take fewer (-5.00 [-5.20, -4.80] steps; 0.58 of its steps)" in third
    assert "no difference" in task_calibration_sentences(a_calibration(-0.1, 0.2))[2]
    assert "take more" in task_calibration_sentences(a_calibration(1.0, 0.2))[2]
    assert task_calibration_sentences(a_calibration(0, 0, None))[0].startswith("No setting could be certified")
    assert task_calibration_sentences(a_calibration(0, 0, fixed=None))[2].startswith("No fixed depth below all loops")


def test_unfinished() -> None:
    """Nothing is concluded from a sweep that lacks a rule's choice or its measurement."""
    rule = ("cosine", 7.0, 0.1, HIGH)
    for sweep in (a_sweep(rule), a_sweep(rule, alone=[("cosine", 7.0, 0.1, HIGH)])):
        del sweep.points[-1]
        assert depth_sentences(sweep) == [headline(sweep)] == ["The sweep is not finished: run it again, and it goes on where it stopped."]
