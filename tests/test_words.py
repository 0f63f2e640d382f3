"""What the report and the commands say follows from the numbers: every sentence on both sides of its interval, and with values missing."""

import json
from pathlib import Path
from typing import Any

import pytest

from sweeps import DEFAULT, FULL, HEADER, a_point, a_sweep
from twoscale.cli.calibrate import describe
from twoscale.report.verdict import below, cost_of, recommend, saving
from twoscale.report.words import (
    against_default,
    calibration_sentences,
    change,
    losses_note,
    mean_steps,
    side,
    signed,
    sweep_text,
    text_words,
)
from twoscale.tradeoff.calibrate import certified_words
from twoscale.tradeoff.summary import Sweep, read_calibration, read_sweep

# -- the recommendation ------------------------------------------------------------------------------------------


def test_ties_go_to_the_fixed_depth() -> None:
    """A rule is recommended only where its whole interval of cost lies below the best fixed depth's; a tie goes to the fixed depth."""
    fixed = a_point("fixed:4", (3.8, 4.0, 4.2), 4.0, 0.002)
    tie = a_point("step-norm:1.0", (3.7, 3.9, 4.1), 4.7, 0.003)
    head, words = recommend(a_sweep(fixed, tie))
    assert head.startswith(
        "Use fixed:4: 4.00 [3.80, 4.20] ms a token, 4.0 steps (67 % less time than the default of 12 loops: 12.0 [11.9, 12.1]"
    )
    assert head.endswith(" tokens.") and "settings whose CE rises by no more than 0.01 nats" in words
    assert "The best rule of the same quality is step-norm:1.0: 3.90 [3.70, 4.10] ms" in words and "cannot be told apart" in words
    quicker = a_point("step-norm:1.0", (3.5, 3.6, 3.79), 4.7, 0.003)
    head, words = recommend(a_sweep(fixed, quicker))
    assert head.startswith("Use step-norm:1.0: 3.60 [3.50, 3.79] ms a token") and "step-norm:1.0 costs less, by its whole interval" in words
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
        and "the two cannot be told apart" in words
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
        assert ("in FLOPs the two cannot be told apart" in words) != wins
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
    assert "The default of 12 loops may cost more than 0.01 nats: dCE +0.3000 [+0.2990, +0.3010]." in recommend(slow)[1]
    assert "may cost more" not in recommend(a_sweep(fixed))[1]


def test_names_of_points() -> None:
    """The full run and a depth of one group are spelt out."""
    one = a_point("fixed:2@1", (2.0, 2.1, 2.2), 5.0, family="fixed-one", label="2 steps in group 2")
    assert recommend(a_sweep(one))[0].startswith("Use 2 steps in group 2 and all 30 in the others: 2.10 [2.00, 2.20]")
    assert recommend(Sweep(HEADER, [FULL], 3))[0].startswith("Use all 30 loops: 30.0")
    assert recommend(Sweep(HEADER, [DEFAULT], 3)) == ("The sweep is not finished.", "The full run has not been measured yet.")


def test_the_oracle_is_told_where_it_keeps_quality() -> None:
    """The oracle with the fewest steps is told, with its dCE, if its CE stays within 0.01 nats; otherwise nothing is."""
    oracle = a_point("oracle-stay:0.01", (9.0, 9.0, 9.0), 7.3, 0.002, setting=0.01)
    words = recommend(a_sweep(oracle))[1]
    assert "stays within 0.01 nats of the full run's takes 7.3 steps (dCE +0.0020 [+0.0010, +0.0030])" in words
    assert "oracle" not in recommend(a_sweep(oracle | {"dce_high": 0.011}))[1]


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
        == "6,144 tokens of 23 pieces of documents, the report part of the held-out text of builtin"
    )
    assert text_words("all", 512, 8, "windows", "a.txt") == "512 tokens in 8 windows, spread over all held-out text of a.txt"
    assert text_words("certify", 99, 4, "documents") == "99 tokens of 4 documents, the certify part of the held-out text"
    assert text_words("fit", 99) == "99 tokens, the fit part of the held-out text"
    assert f"Measured on {sweep_text(HEADER)}." in recommend(a_sweep())[1]


def test_losses_of_different_text() -> None:
    """Where a page shows losses of several texts it says which are of which; with one there is nothing to say."""
    evaluation = {"tokens": 8192, "windows": 64}
    note = losses_note(evaluation, HEADER | {"source": "builtin"}, a_calibration())
    assert (
        note.startswith("These losses are of different parts of the held-out text")
        and "8,192 tokens in 64 windows, spread over all" in note
    )
    assert "6,144 tokens of 23 pieces of documents, the report part of the held-out text of builtin" in note and "900 tokens of 11" in note
    assert losses_note(evaluation, None, None) == "" == losses_note(None, None, None)


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
        "goal": {"max_dce": 0.005}, "delta": 0.05, "bound": 0.0031, "tokens": {"fit": 300, "certify": 900, "report": 800},
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
    assert f"{lead}the calibrated thresholds take more (+0.410 [+0.310, +0.510] steps); the fixed depth is the better choice." in told()
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
    assert told(bound=float("inf")).startswith("No bound can be given: 900 tokens of 11 documents, the certify part")
    assert told().startswith(
        "Certified on 900 tokens of 11 documents, the certify part of the held-out text of builtin: the loss rises by no more "
    )
    assert "than 0.0031 nats a token over all 30 loops (confidence 95 %)." in told()
    assert "On 800 tokens of 10 documents, the report part of the held-out text of builtin, which neither" in told()


def test_speed_goals_compare_losses() -> None:
    """Where steps or ms were asked for, settings chosen for the same goal are compared by their loss."""
    goal = {"goal": {"mean_steps": 6.0}}
    lead = "A single threshold for all groups chosen for the same goal (acceleration:3.0) takes 5.47 steps, dCE +0.0010: "
    assert f"{lead}no difference in loss (+0.0000 [-0.0010, +0.0010] nats)." in told(**goal)
    assert "have a lower loss (-0.0020 [-0.0030, -0.0010] nats)." in told(**goal, d_single=apart(-0.002, 0.001, "ce"))
    assert "have a higher loss (+0.0020 [+0.0010, +0.0030] nats); the fixed depth is the better" in told(
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
    assert "On 6,144 tokens of 23 pieces of documents, the report part of the held-out text, which neither" in words
    assert (
        "(acceleration:3.253) takes 5.52 steps, dCE +0.0002: the calibrated thresholds take fewer (-1.500 [-1.512, -1.489] steps)." in words
    )
    assert describe(found).startswith(
        "bundled, acceleration, at most 30 loops, asked: max-dce 0.005\n  group 1: acceleration:20.55, 3.00 steps on"
    )


def test_the_paragraph_holds_the_calibration() -> None:
    """The recommendation's paragraph ends with the calibration's sentences; an old sweep takes the default from the run."""
    words = recommend(a_sweep(), a_calibration())[1]
    assert "Calibrated thresholds of acceleration (max-dce 0.005). Certified on 900 tokens" in words and "no difference in steps" in words


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
    """All passed, all but the last, or stopped in between: each is said as it was."""
    lead = "settings keep the rise below 0.005 nats"
    assert certified_words(10, 10, 0.005) == f"the first 10 of 10 {lead}"
    assert certified_words(9, 10, 0.005) == f"the first 9 of 10 {lead}; the last one does not"
    assert certified_words(7, 10, 0.005) == f"the first 7 of 10 {lead}; the next one does not, and 2 were not tested"
