"""What the report and the commands say follows from the numbers: every sentence on both sides of its interval, and with values missing."""

import json
from pathlib import Path
from typing import Any

import pytest

from twoscale.cli.calibrate import describe
from twoscale.config.words import all_loops, group_label, group_list, plural, text_words
from twoscale.report.advice import below, choose, cost_of, recommend, sample_words, saving
from twoscale.report.words import (
    against_default,
    calibration_sentences,
    change,
    losses_note,
    mean_steps,
    side,
    signed,
    sweep_text,
)
from twoscale.tradeoff.calibrate import certified_words
from twoscale.tradeoff.summary import Sweep, read_calibration, read_sweep

HEADER = {"loops": 30, "mean_loops": 12, "checkpoint": "step-1", "groups": 1, "tokens": 6144, "clusters": 23, "by": "pieces"}


def a_point(id: str, ms: tuple[float, float, float] | None, steps: float, dce: float = 0.0, **changes: Any) -> dict[str, Any]:
    """A point with (low, middle, high) ms a token; CE rises by `dce` +- 0.001; a step is a MFLOP, +- 1 %."""
    family = "full" if id == "full" else id.partition(":")[0]
    times = {} if ms is None else {"ms_low": ms[0], "ms": ms[1], "ms_high": ms[2]}
    return {
        "id": id, "family": family, "label": "", "setting": 0.0, "ce": 2 + dce, "ppl": 7.0, "dce": dce, "dce_low": dce - 0.001,
        "dce_high": dce + 0.001, "mean_steps": steps, "flops": 1e6 * steps, "flops_low": 0.99e6 * steps, "flops_high": 1.01e6 * steps,
        "flops_looks": 0.0, "agree": 1.0, "steps": [{"mean": steps, "std": 0.0, "histogram": [0, 1]}], **times, **changes,
    }  # fmt: skip


FULL, DEFAULT = a_point("full", (29.0, 30.0, 31.0), 30.0), a_point("fixed:12", (11.9, 12.0, 12.1), 12.0)


def a_sweep(*points: dict[str, Any], rounds: int = 3, **header: Any) -> Sweep:
    return Sweep(HEADER | header, [FULL, DEFAULT, *points], rounds)


# -- the recommendation ------------------------------------------------------------------------------------------


def test_ties_go_to_the_fixed_depth() -> None:
    """A rule is recommended only where its whole interval of cost lies below the best fixed depth's; a tie goes to the fixed depth."""
    fixed = a_point("fixed:4", (3.8, 4.0, 4.2), 4.0, 0.002)
    tie = a_point("step-norm:1.0", (3.7, 3.9, 4.1), 4.7, 0.003)
    head, words = recommend(a_sweep(fixed, tie))
    assert head.startswith(
        "Use fixed:4: 4.00 [3.80, 4.20] ms a token, 4.0 steps (67 % less time than the default of 12 loops: 12.0 [11.9, 12.1]"
    )
    assert head.endswith(" nats against all 30 loops on 6,144 tokens; chosen on these tokens, not certified.")
    assert "settings whose CE rises by no more than 0.01 nats on the sweep's text" in words
    assert "The best rule of the same quality is step-norm:1.0: 3.90 [3.70, 4.10] ms" in words and "cannot be told apart" in words
    quicker = a_point("step-norm:1.0", (3.5, 3.6, 3.79), 4.7, 0.003)
    head, words = recommend(a_sweep(fixed, quicker))
    assert head.startswith("Use step-norm:1.0: 3.60 [3.50, 3.79] ms a token") and "; it costs more, by whole intervals." in words
    assert "The best fixed depth of the same quality is fixed:4" in words and "told apart" not in words
    slower = a_point("step-norm:1.0", (4.3, 4.5, 4.7), 4.7, 0.003)
    head, words = recommend(a_sweep(fixed, slower))
    assert head.startswith("Use fixed:4") and "costs more than fixed:4" in words and "told apart" not in words


def test_a_rule_that_wins_is_found_behind_one_that_does_not() -> None:
    """The cheapest rule may have a wide interval; a dearer one that lies wholly below the fixed depth is the one that is recommended."""
    fixed = a_point("fixed:4", (3.8, 4.0, 4.2), 4.0)
    head, _ = recommend(a_sweep(fixed, a_point("kl:0.1", (2.0, 3.0, 4.0), 3.0), a_point("kl:0.01", (3.1, 3.2, 3.3), 3.2)))
    assert head.startswith("Use kl:0.01")


def test_ties_with_the_default() -> None:
    """Where neither a fixed depth nor a rule costs less than the default depth, by whole intervals, the default is recommended."""
    near, rule = a_point("fixed:10", (10.5, 11.5, 12.0), 10.0), a_point("kl:1", (11.0, 11.6, 12.0), 11.0)
    head, words = recommend(a_sweep(near, rule))
    assert head.startswith("Use fixed:12: 12.0 [11.9, 12.1] ms a token, 12.0 steps (the default of 12 loops)") and "told apart" in words
    assert recommend(a_sweep(near | {"ms_high": 11.8}, rule))[0].startswith("Use fixed:10")
    head, words = recommend(a_sweep(near, rule | {"ms_high": 11.8}))
    assert (
        head.startswith("Use fixed:10")
        and "(no measurable difference in time from the default" in head
        and "in time fixed:10 and the rule cannot be told apart" in words
    )


def test_rules_that_lose_quality_are_not_recommended() -> None:
    """Where CE may rise by more than 0.01 nats a rule is not considered, however quick; a paragraph says so."""
    lossy = a_point("kl:0.1", (1.0, 1.0, 1.0), 1.0, 0.0095)
    head, words = recommend(a_sweep(lossy))
    assert head.startswith("Use fixed:12") and "No rule that was tried keeps CE within 0.01 nats by its whole interval." in words
    head, words = recommend(a_sweep(a_point("kl:0.1", (1.0, 1.0, 1.0), 1.0, 0.0089)))
    assert head.startswith("Use kl:0.1") and "No rule" not in words


def test_flops_decide_without_times() -> None:
    """Without three rounds of timing FLOPs decide: by 5 % at least, and by whole intervals where there are any; the paragraph says so."""
    fixed = a_point("fixed:4", None, 4.0)
    for steps, changes, wins in (
        (3.9, {}, False),  # 2.5 % fewer
        (3.7, {}, True),
        (3.7, {"flops_high": 4.0e6}, False),
        (3.7, {"flops_low": None, "flops_high": None}, True),  # an older file
    ):
        sweep = a_sweep(fixed, a_point("step-norm:1.0", None, steps, **changes))
        head, words = recommend(sweep)
        assert head.startswith("Use step-norm:1.0" if wins else "Use fixed:4"), (steps, changes)
        assert "Not every point was timed, so counted FLOPs decide; they count as fewer from 5 % on." in words and "MFLOP a token" in head
        assert ("in FLOPs fixed:4 and the rule cannot be told apart" in words) != wins
    timed = a_sweep(a_point("fixed:4", (3.9, 4.0, 4.1), 4.0), rounds=1)
    assert (
        cost_of(timed) == "flops" and cost_of(a_sweep()) == "ms" and "Times need 3 rounds and this sweep has 1, so" in recommend(timed)[1]
    )
    assert "counted FLOPs decide" not in recommend(a_sweep())[1]


def test_savings_name_the_default() -> None:
    """A saving is quoted against mean_loops, by whole intervals: less, more or no difference; without such a point the full run is."""

    def told(ms: tuple[float, float, float]) -> str:
        return saving(a_point("kl:1", ms, 8.0), DEFAULT, "the default of 12 loops", "ms")

    assert "(50 % less time than the default of 12 loops: 12.0 [11.9, 12.1] ms a token)" in told((5.9, 6.0, 6.1))
    assert "(25 % more time than the default of 12 loops: " in told((14.0, 15.0, 16.0))
    assert "(no measurable difference in time from the default of 12 loops: " in told((10.0, 11.0, 11.95))
    assert saving(DEFAULT, DEFAULT, "the default of 12 loops", "ms") == "12.0 [11.9, 12.1] ms a token, 12.0 steps (the default of 12 loops)"
    assert below(FULL, DEFAULT, "ms") is False and below(DEFAULT, FULL, "ms") is True
    assert recommend(a_sweep())[0].startswith("Use fixed:12: 12.0 [11.9, 12.1] ms a token, 12.0 steps (the default of 12 loops), dCE")
    fixed = a_point("fixed:4", (3.8, 4.0, 4.2), 4.0)
    assert "87 % less time than all 30 loops (the default of 7 loops was not swept)" in recommend(a_sweep(fixed, mean_loops=7))[0]
    assert "87 % less time than all 30 loops: " in recommend(a_sweep(fixed, mean_loops=None))[0]
    assert "87 % less time than the default of 30 loops: " in recommend(a_sweep(fixed, mean_loops=30))[0]
    slow = Sweep(HEADER, [FULL, a_point("fixed:12", (3.0, 3.1, 3.2), 12.0, 0.3), a_point("kl:1", (14.0, 15.0, 16.0), 20.0)], 3)
    assert "(384 % more time than the default of 12 loops: " in recommend(slow)[0], "a quick default that loses quality"
    assert "On the sweep's text the default of 12 loops may cost more than 0.01 nats: dCE +0.3000 [+0.2990, +0.3010]." in recommend(slow)[1]
    assert "may cost more" not in recommend(a_sweep(fixed))[1]


def test_names_of_points() -> None:
    """The full run and a depth of one group are spelt out."""
    one = a_point("fixed:2@1", (2.0, 2.1, 2.2), 5.0, family="fixed-one", label="2 steps in group 2")
    assert recommend(a_sweep(one))[0].startswith("Use 2 steps in group 2 and all 30 in the others: 2.10 [2.00, 2.20]")
    assert recommend(Sweep(HEADER, [FULL], 3))[0].startswith("Use all 30 loops: 30.0")
    assert recommend(Sweep(HEADER, [DEFAULT], 3)) == ("The sweep is not finished.", "The full run has not been measured yet.")


def test_both_oracles_are_told_where_they_keep_quality() -> None:
    """Each oracle is named with its setting, at the fewest steps that keep CE within 0.01 nats; one that loses quality is left out."""
    stay = [
        a_point(f"oracle-stay:{eps}", (9.0, 9.0, 9.0), steps, dce, setting=eps)
        for eps, steps, dce in ((0.003, 11.4, 0.0), (0.01, 7.3, 0.002))
    ]
    lagrange = a_point("oracle-lagrange:0.03", (2.0, 2.0, 2.0), 2.0, -0.16, setting=0.03)
    words = recommend(a_sweep(*stay, lagrange))[1]
    assert (
        "the first (one depth for all groups, the fewest steps after which the token's loss stays within eps of the full run's) takes"
        in words
    )
    assert "7.3 steps at eps = 0.01, the eps with the fewest steps among those tried that keep CE within 0.01 nats (dCE +0.0020 [" in words
    assert (
        "the second (any of some forty combinations" in words and "takes 2.0 steps at a price of 0.03 nats a step (dCE -0.1600 [" in words
    )
    assert "11.4 steps at eps = 0.003" in recommend(a_sweep(stay[0], stay[1] | {"dce_high": 0.011}, lagrange))[1]
    assert "the second" not in recommend(a_sweep(*stay))[1] and "the one (any of" in recommend(a_sweep(lagrange))[1]
    assert "racle" not in recommend(a_sweep(stay[1] | {"dce_high": 0.011}))[1]


def test_numbers() -> None:
    """What rounds to nothing has no sign and is no change; an interval that touches zero decides nothing."""
    assert [signed(x) for x in (-0.00001, 0.0123, -0.5)] == ["0.0000", "+0.0123", "-0.5000"]
    assert [side(*between) for between in ((-2, -1), (-1, 0), (-1, 1), (0, 0), (0, 1), (1, 2))] == [-1, 0, 0, 0, 0, 1]
    assert [change(x, 10) for x in (5.0, 10.04, 15.0)] == ["50 % less", "", "50 % more"]
    assert mean_steps((2.0, 5.0), (1, 2)) == 4.0


@pytest.mark.parametrize(
    "steps,words",
    [
        (6.0, "50 % less loop work than"),
        (12.0, "as much loop work as"),
        (12.01, "as much loop work as"),
        (30.0, "150 % more loop work than"),
    ],
)
def test_loop_work(steps: float, words: str) -> None:
    """Loop work is less, as much or more than the default's, which is named."""
    assert against_default(steps, 12) == f"{words} the default of 12 loops"
    assert against_default(1.0, 1) == "as much loop work as the default of 1 loop"


# -- texts -------------------------------------------------------------------------------------------------------


def test_texts_are_named() -> None:
    """A loss says how many tokens of how many documents, of which part, of which source; an older file names no source."""
    assert (
        text_words("report", 6144, 23, "pieces", "builtin")
        == "6,144 tokens (23 pieces of documents) from the report part of the held-out text of builtin"
    )
    assert text_words("all", 512, 8, "windows", "a.txt") == "512 tokens (8 windows) spread over all held-out text of a.txt"
    assert text_words("certify", 99, 1, "documents") == "99 tokens (1 document) from the certify part of the held-out text"
    assert text_words("fit", 1) == "1 token from the fit part of the held-out text"
    assert f"Measured on {sweep_text(HEADER)}." in recommend(a_sweep())[1]


def test_losses_of_different_text() -> None:
    """Where a page shows losses of several texts it says which are of which; with one there is nothing to say."""
    evaluation = {"tokens": 8192, "windows": 64}
    note = losses_note(evaluation, HEADER | {"source": "builtin"}, a_calibration())
    assert note.startswith("These losses are of different tokens and are not to be compared") and "8,192 tokens (64 windows) spread" in note
    assert "6,144 tokens (23 pieces of documents) from the report part of the held-out text of builtin" in note and "900 tokens (11" in note
    assert note.endswith("The report part is one set of documents: the sweep reads 6,144 tokens of it, the calibration 800 tokens.")
    assert "one set of documents" not in losses_note(evaluation, HEADER, None)
    assert losses_note(evaluation, None, None) == "" == losses_note(None, None, None)


# -- counts and groups -------------------------------------------------------------------------------------------


def test_counts_and_groups() -> None:
    """One is singular and more are plural, everywhere by one helper; a loop group has one name: its number from 1, and its layers."""
    assert [plural(n, "loop") for n in (0, 1, 2, 1024)] == ["0 loops", "1 loop", "2 loops", "1,024 loops"]
    assert plural(1, "piece of a document") == "1 piece of a document" and plural(2, "piece of a document") == "2 pieces of documents"
    assert (all_loops(30), all_loops(1)) == ("all 30 loops", "its 1 loop")
    assert [group_label(g, layers) for g, layers in enumerate(("4", (5, 6), [7]))] == [
        "group 1 (layer 4)", "group 2 (layers 5-6)", "group 3 (layer 7)"
    ]  # fmt: skip
    assert group_label(1) == "group 2" and group_list(((4,), (5, 6))) == "1 (layer 4), 2 (layers 5-6)" and group_list(()) == "none"
    found = a_calibration(rules=["acceleration:2.0", None], groups=["4", "5-6"])
    found["report"]["calibrated"]["steps"] = [5.0, 30.0]
    lines = describe(found).splitlines()
    assert lines[1:3] == [
        "  group 1 (layer 4): acceleration:2.0, 5.00 steps on average",
        "  group 2 (layers 5-6): all loops, 30.00 steps on average",
    ]


# -- one recommendation ------------------------------------------------------------------------------------------


def certified_sweep(*points: dict[str, Any], **header: Any) -> Sweep:
    """A sweep with fixed:4, fixed:5 and the thresholds that `a_calibration` certified, 4, 5 and 6 ms +- 0.1."""
    fixed = [a_point(f"fixed:{k}", (k - 0.1, float(k), k + 0.1), float(k), 0.002, setting=float(k)) for k in (4, 5)]
    rule = a_point("calibrated acceleration:2.0", (5.9, 6.0, 6.1), 5.41, family="calibrated", label="calibrated: acceleration:2.0")
    return a_sweep(*fixed, *(points or (rule,)), **header)


def test_a_certified_setting_is_the_recommendation() -> None:
    """Where a calibration certified settings, the cheapest of them is the one recommendation; what the sweep alone would choose stands
    beside it with its limit, its tokens and why it is less strict."""
    head, words = recommend(certified_sweep(), a_calibration())
    assert head.startswith("Use fixed:5: 5.00 [4.90, 5.10] ms a token, 5.0 steps (58 % less time than the default of 12 loops")
    assert "dCE +0.0010 [0.0000, +0.0020] nats against all 30 loops on 800 tokens; certified: the loss lies no more than 0.005 nats" in head
    assert head.endswith("a token above the loss at 30 loops (confidence 95 %).") and "not certified" not in words
    assert (
        words.startswith("For this model use fixed:5: ") and "It is certified on 900 tokens (11 documents) from the certify part" in words
    )
    assert (
        "The sweep alone would choose fixed:4: 4.00 [3.90, 4.10] ms a token" in words
        and "That is no second recommendation: its limit is 0.01" in words
    )
    assert (
        "on 6,144 tokens on which it was also chosen among many settings; fixed:5 is held to 0.005 nats, on 900 tokens of other documents"
        in words
    )
    assert (
        words.count("For this model use") == 1
        and "they cost more than fixed:5, so on this model these thresholds save nothing over a" in words
    )
    assert "In use: `--loops 5`. `--exit auto` takes the calibrated thresholds instead." in words
    same = certified_sweep()
    same.points[:] = [p for p in same.points if p["id"] != "fixed:4"]
    assert "The sweep alone, with a limit of 0.01 nats on 6,144 tokens, would choose the same." in recommend(same, a_calibration())[1]


def test_certified_thresholds_win_by_their_whole_interval() -> None:
    """Certified thresholds are recommended only where they cost less than the certified fixed depth; a tie goes to the fixed depth, and
    one with the default to the default."""
    rule = a_point("calibrated acceleration:2.0", (4.7, 4.8, 4.89), 4.4, family="calibrated", label="calibrated: acceleration:2.0")
    head, words = recommend(certified_sweep(rule), a_calibration())
    assert head.startswith("Use the calibrated thresholds (acceleration:2.0): 4.80 [4.70, 4.89]") and "In use: `--exit auto`." in words
    assert "The best fixed depth certified to the same limit is fixed:5: " in words
    head, words = recommend(certified_sweep(rule | {"ms_high": 4.95}), a_calibration())
    assert head.startswith("Use fixed:5") and "in time fixed:5 and the thresholds cannot be told apart" in words
    slow = [a_point(f"fixed:{k}", (11.0, 11.5, 12.0), float(k), setting=float(k)) for k in (4, 5)]
    dear = Sweep(HEADER, [FULL, DEFAULT, *slow, rule | {"ms_low": 11.0, "ms": 11.5, "ms_high": 12.0}], 3)
    assert recommend(dear, a_calibration())[0].startswith("Use fixed:12: 12.0")
    assert recommend(dear, a_calibration(depths=[6, 5]))[0].startswith("Use fixed:5: 11.5"), "the default was not certified"
    shallow = a_sweep(*slow, rule, mean_loops=4)  # the default is shallower than what was certified
    assert recommend(shallow, a_calibration(mean_loops=4))[0].startswith("Use the calibrated thresholds")


def test_why_a_calibration_does_not_decide() -> None:
    """Where nothing comparable was certified the sweep decides, and the paragraph says why; there is still one recommendation."""
    cases = {
        "the calibration was asked for a speed, not for a limit on the loss": a_calibration(goal={"mean_steps": 6.0}),
        "which tested no fixed depth: calibrate again": an_old_calibration(None),
        "the calibration is of at most 20 loops, the sweep of 30": a_calibration(loops=20),
        "could certify no setting to its limit of 0.005 nats, which is stricter": a_calibration(rules=[None], fixed=a_setting(30.0, None)),
        "fixed:3, which the calibration certified, was not swept": a_calibration(fixed=a_setting(3.0, "fixed:3")),
        "the sweep was made before the calibration: sweep again": a_calibration(rules=["acceleration:9.9"]),
    }
    for why, found in cases.items():
        head, words = recommend(certified_sweep(), found)
        assert head.startswith("Use fixed:4: ") and head.endswith("chosen on these tokens, not certified.")
        assert f"It is not certified: {why}" in words or f"{why}." in words, (why, words)
        assert words.count("For this model use") == 1 and "The sweep alone would choose" not in words
    assert "It is not certified: `twoscale calibrate` certifies a setting on text of its own." in recommend(certified_sweep())[1]
    none = a_calibration(fixed=a_setting(30.0, None))  # thresholds were certified, a fixed depth was not
    assert recommend(certified_sweep(), none)[0].startswith("Use the calibrated thresholds (acceleration:2.0): 6.00")
    only = a_calibration(rules=[None], bound=0.0)  # a fixed depth was certified, thresholds were not
    head, words = recommend(certified_sweep(), only)
    assert head.startswith("Use fixed:5") and "No thresholds of an exit rule could be certified to this limit." in words
    assert "--exit auto" not in words


def test_rough_intervals() -> None:
    """Intervals over few documents or few rounds of timing are called rough, each by its number."""
    assert (
        "Intervals are rough: those of losses over 4 pieces of documents, those of times over 3 rounds."
        in recommend(a_sweep(clusters=4))[1]
    )
    assert "Intervals are rough: those of times over 7 rounds." in recommend(a_sweep(rounds=7))[1]
    assert "rough" not in recommend(a_sweep(rounds=8))[1] and "rough" not in recommend(a_sweep(rounds=2))[1], "times do not count there"


def test_samples_say_why_their_rule() -> None:
    """The texts are written with the recommended rule; where that is a fixed depth, with the best rule, and the page says why."""
    fixed = choose(certified_sweep(), a_calibration())
    assert sample_words("the calibrated thresholds (acceleration:2.0)", fixed, 30) == (
        "exit rule: the calibrated thresholds (acceleration:2.0), which are certified to the same limit, so that the colours show "
        "how steps differ (with the recommended fixed:5 every token takes the same steps)"
    )
    assert sample_words("fixed:5", fixed, 30) == "exit rule: fixed:5, the recommended setting"
    assert (
        sample_words("kl:9", fixed, 30) == "exit rule: kl:9 (recommended is fixed:5)"
        and sample_words("kl:9", None, 30) == "exit rule: kl:9"
    )
    swept = choose(certified_sweep(a_point("kl:1", (3.0, 3.1, 3.2), 3.0)))
    assert sample_words("kl:1", swept, 30) == "exit rule: kl:1, the recommended setting"


# -- calibration -------------------------------------------------------------------------------------------------


def a_setting(steps: float, rule: str | None = "", dce: float = 0.001, flops: float = 5e6) -> dict[str, Any]:
    record = {
        "ce": 2.0 + dce,
        "dce": dce,
        "dce_low": dce - 0.001,
        "dce_high": dce + 0.001,
        "mean_steps": steps,
        "steps": [steps],
        "flops": flops,
    }
    return record if rule == "" else record | {"rule": rule}


def apart(value: float, width: float, key: str = "steps") -> dict[str, float]:
    return {key: value, f"{key}_low": value - width, f"{key}_high": value + width}


def a_calibration(**changes: Any) -> dict[str, Any]:
    """A calibration that takes 5.41 steps where a single threshold takes 5.47, fixed:5 takes 5 and the default 12."""
    report = {
        "calibrated": a_setting(5.41), "single": a_setting(5.47, "acceleration:3.0"), "fixed": a_setting(5.0, "fixed:5"),
        "default": a_setting(12.0, "fixed:12", 0.0),
        "differences": {
            "single": apart(-0.06, 0.1) | apart(0.0, 0.001, "ce"), "fixed": apart(0.41, 0.1) | apart(0.0, 0.001, "ce"),
            "default": apart(-6.59, 0.1) | apart(0.0, 0.001, "ce"),
        },
    }  # fmt: skip
    found = {
        "checkpoint": "step-9", "rule": "acceleration", "rules": ["acceleration:2.0"], "loops": 30, "mean_loops": 12,
        "depths": [24, 16, 12, 8, 6, 5], "goal": {"max_dce": 0.005}, "delta": 0.05, "bound": 0.0031,
        "tokens": {"fit": 300, "certify": 900, "report": 800},
        "clusters": {"fit": 4, "certify": 11, "report": 10}, "by": "documents", "source": "builtin", "report": report,
    }  # fmt: skip
    for key, value in changes.items():
        if key in ("single", "fixed", "default", "calibrated"):
            report[key] = value
        elif key.startswith("d_"):
            report["differences"][key.removeprefix("d_")] = value  # type: ignore[index]
        else:
            found[key] = value
    return found


def told(**changes: Any) -> str:
    return " ".join(calibration_sentences(a_calibration(**changes), None))


def test_calibration_compares_what_was_certified_alike() -> None:
    """The result stands beside a single threshold and a fixed depth certified to the same limit: fewer, more, or no difference, by the
    paired interval; of two equals the fixed depth is the simpler choice."""
    lead = "A single threshold for all groups certified to the same limit of 0.005 nats (acceleration:3.0) takes 5.47 steps, dCE +0.0010: "
    assert f"{lead}no difference in steps (-0.060 [-0.160, +0.040] steps)." in told()
    assert f"{lead}the calibrated thresholds take fewer (-0.060 [-0.070, -0.050] steps)." in told(d_single=apart(-0.06, 0.01))
    assert f"{lead}the calibrated thresholds take more (+0.060 [+0.050, +0.070] steps)." in told(d_single=apart(0.06, 0.01))
    assert "30.00 steps" not in told() and "all loops" not in told()
    lead = "A fixed depth for all tokens certified to the same limit of 0.005 nats (fixed:5) takes 5.00 steps, dCE +0.0010: "
    assert (
        f"{lead}the calibrated thresholds take more (+0.410 [+0.310, +0.510] steps); by steps the fixed depth is the better choice."
        in told()
    )
    assert f"{lead}no difference in steps (+0.010 [-0.090, +0.110] steps); the fixed depth is the simpler choice." in told(
        d_fixed=apart(0.01, 0.1)
    )
    assert f"{lead}the calibrated thresholds take fewer (-0.500 [-0.600, -0.400] steps)." in told(d_fixed=apart(-0.5, 0.1))
    assert "no difference in steps (+0.000 [+0.000, +0.001] steps)" in told(
        d_single={"steps": 0.0004, "steps_low": 1e-5, "steps_high": 0.001}
    )
    assert "no difference in steps (+0.000 [+0.000, +0.000] steps)" in told(d_single=apart(-0.0, 0.0)), "zero has no minus"
    dear = told(d_fixed=apart(-0.5, 0.1), calibrated=a_setting(4.5, flops=9e6))
    assert "take fewer (-0.500 [-0.600, -0.400] steps), but 80 % more FLOPs with the rule's own work." in dear
    few = told(clusters={"fit": 1, "certify": 5, "report": 3}, d_single=apart(-0.06, 0.01))
    assert (
        "too little text to tell a difference (-0.060 [-0.070, -0.050] steps)." in few
        and "Too little text to tell a difference in steps from the default of 12 loops." in few
        and "No difference" not in few
    )


def test_calibration_beside_the_default() -> None:
    """Steps are quoted against the default depth, which is named: fewer, more or no difference."""
    assert "That is 55 % fewer steps than the default of 12 loops." in told()
    assert "That is 17 % more steps than the default of 12 loops." in told(calibrated=a_setting(14.0), d_default=apart(2.0, 0.1))
    assert "No difference in steps from the default of 12 loops." in told(calibrated=a_setting(11.5), d_default=apart(-0.5, 0.6))
    assert "The default of 40 loops takes 40 steps." in told(mean_loops=40, d_default=None), "beyond the loops that were measured"


def test_calibration_says_what_it_could_not_certify() -> None:
    """Without a certified setting, single threshold or fixed depth the sentence says so; nothing is compared with all loops."""
    assert "No single threshold for all groups could be certified to the same limit of 0.005 nats." in told(single=a_setting(30.0, None))
    assert "No fixed depth for all tokens could be certified to the same limit of 0.005 nats." in told(fixed=a_setting(30.0, None))
    none = told(rules=[None], bound=0.0, calibrated=a_setting(30.0), single=a_setting(30.0, None), d_default=apart(18.0, 0.0))
    assert none.startswith("No setting could be certified, so every group runs all its loops") and "Certified on" not in none
    assert (
        "No single threshold" not in none
        and "all loops take more (+0.410" in none
        and "150 % more steps than the default of 12 loops" in none
    )
    assert told(bound=float("inf")).startswith("No bound can be given: 900 tokens (11 documents) from the certify part")
    assert told().startswith(
        "Certified on 900 tokens (11 documents) from the certify part of the held-out text of builtin: the loss lies no more than "
    )
    assert "than 0.0031 nats a token above the loss at 30 loops (confidence 95 %)." in told() and "over all" not in told()
    assert "On 800 tokens (10 documents) from the report part of the held-out text of builtin, which neither" in told()


def test_speed_goals_compare_losses() -> None:
    """Where steps or ms were asked for, settings chosen for the same goal are compared by their loss."""
    goal = {"goal": {"mean_steps": 6.0}}
    lead = "A single threshold for all groups chosen for the same goal (acceleration:3.0) takes 5.47 steps, dCE +0.0010: "
    assert f"{lead}no difference in loss (+0.0000 [-0.0010, +0.0010] nats)." in told(**goal)
    assert "have a lower loss (-0.0020 [-0.0030, -0.0010] nats)." in told(**goal, d_single=apart(-0.002, 0.001, "ce"))
    assert "have a higher loss (+0.0020 [+0.0010, +0.0030] nats); by loss the fixed depth is the better" in told(
        **goal, d_fixed=apart(0.002, 0.001, "ce")
    )
    assert "No fixed depth for all tokens could be chosen for the same goal." in told(**goal, fixed=a_setting(30.0, None))


def an_old_calibration(equal: str | None, fewer: float = 24.59) -> dict[str, Any]:
    """As older versions wrote it: compared with the cheapest single threshold of no higher loss, `equal`; no fixed depth, no default."""
    found = a_calibration()
    r = found["report"]
    for key in ("mean_loops", "source"):
        found.pop(key)
    report = {"calibrated": r["calibrated"], "single": r["single"], "equal": a_setting(30.0 if equal is None else 5.47, equal)}
    found["report"] = report | {"fewer_steps": fewer, "fewer_low": fewer - 0.1, "fewer_high": fewer + 0.1, "beats_single": True}
    return found


def test_older_calibrations() -> None:
    """Of an older file only what follows from it is said: its interval counts where it is of the threshold that was certified."""
    words = " ".join(calibration_sentences(an_old_calibration(None), 12))
    assert "takes 5.47 steps, dCE +0.0010: no paired interval was recorded, so which of the two is better is open." in words
    assert "24.59" not in words and "30.00" not in words and "The default of 12 loops takes 12 steps." in words
    assert "No fixed depth for all tokens was certified to the same limit of 0.005 nats: this file is of an older version" in words
    words = " ".join(calibration_sentences(an_old_calibration("acceleration:3.0", 0.5), None))
    assert "the calibrated thresholds take fewer (-0.500 [-0.600, -0.400] steps)." in words and "default" not in words
    old = an_old_calibration("acceleration:3.0", 0.5) | {"goal": {"ms": 2.0}}
    assert "no paired interval was recorded" in " ".join(calibration_sentences(old, None)), "older files have none of losses"


def test_the_bundled_calibration() -> None:
    """The file in the package is of an older version; it is read, and what is said of it follows from its own interval."""
    found = read_calibration(Path(__file__).parent.parent / "src" / "twoscale" / "bundled" / "calibration.json")
    assert found is not None
    words = " ".join(calibration_sentences(found, 12))
    assert "On 6,144 tokens (23 pieces of documents) from the report part of the held-out text, which neither" in words
    assert (
        "(acceleration:3.253) takes 5.52 steps, dCE +0.0002: the calibrated thresholds take fewer (-1.500 [-1.512, -1.489] steps)." in words
    )
    assert describe(found).startswith(
        "bundled, acceleration, at most 30 loops, asked: max-dce 0.005\n  group 1: acceleration:20.55, 3.00 steps on"
    )


def test_the_paragraph_holds_the_calibration() -> None:
    """The recommendation's paragraph ends with the calibration's sentences; an old sweep takes the default from the run."""
    words = recommend(a_sweep(), a_calibration())[1]
    assert "The calibrated thresholds of acceleration (asked for: max-dce 0.005), not the recommendation: Certified on 900 tokens" in words
    assert "no difference in steps" in words


def test_an_older_sweep(tmp_path: Path) -> None:
    """A sweep.jsonl without mean_loops takes it from the run; one that has it keeps its own."""
    header = {"kind": "sweep"} | {key: value for key, value in HEADER.items() if key != "mean_loops"}
    (tmp_path / "sweep.jsonl").write_text(json.dumps(header) + "\n")
    (tmp_path / "new.jsonl").write_text(json.dumps(header | {"mean_loops": 5}) + "\n")
    old, new = read_sweep(tmp_path / "sweep.jsonl", 12), read_sweep(tmp_path / "new.jsonl", 12)
    assert old is not None and new is not None and old.header["mean_loops"] == 12 and new.header["mean_loops"] == 5
    plain = read_sweep(tmp_path / "sweep.jsonl")
    assert plain is not None and "mean_loops" not in plain.header


def test_how_far_settings_were_certified() -> None:
    """All passed, all but the last, one, none, or stopped in between: each is said as it was."""
    lead = "settings keep the rise below 0.005 nats"
    assert certified_words(10, 10, 0.005) == f"the first 10 of 10 {lead}"
    assert certified_words(9, 10, 0.005) == f"the first 9 of 10 {lead}; the last one does not"
    assert certified_words(7, 10, 0.005) == f"the first 7 of 10 {lead}; the next one does not, and 2 were not tested"
    assert certified_words(8, 10, 0.005) == f"the first 8 of 10 {lead}; the next one does not, and 1 was not tested"
    assert (
        certified_words(1, 3, 0.1) == "the first of 3 settings keeps the rise below 0.1 nats; the next one does not, and 1 was not tested"
    )
    assert certified_words(0, 3, 0.1) == "the first of 3 settings does not keep the rise below 0.1 nats, 2 were not tested"
    assert certified_words(0, 1, 0.1) == "the first of 1 setting does not keep the rise below 0.1 nats"
