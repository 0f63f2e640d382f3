"""Sentences made of numbers: counts, savings, texts and calibrations, on both sides of every interval, and with values missing."""

import json
from pathlib import Path
from typing import Any

import pytest

from constructed import HEADER, a_calibration, a_setting, a_sweep, an_old_calibration, apart
from twoscale.cli.calibrate import describe
from twoscale.config import UserError
from twoscale.config.words import all_loops, group_label, group_list, plural, text_words
from twoscale.report.advice import recommend
from twoscale.report.words import (
    against_default,
    calibration_sentences,
    change,
    confidence,
    losses_note,
    mean_steps,
    measured_words,
    other_text,
    part_words,
    side,
    signed,
    sweep_text,
    timed_text,
)
from twoscale.tradeoff.calibrate import certified_words
from twoscale.tradeoff.latency import timed_tokens
from twoscale.tradeoff.results import settings_tested
from twoscale.tradeoff.summary import CALIBRATION_VERSION, read_calibration, read_sweep

# -- numbers ----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("rounds", "header", "words"),
    [
        (6, {"timed_tokens": 8, "windows": 20}, "8 tokens of each of 6 windows"),
        (3, {"timed_tokens": 8, "windows": 3}, "8 tokens of each of 3 windows"),
        (6, {"timed_tokens": 8, "windows": 3}, "8 tokens of each of 3 windows, in 6 rounds"),
        (1, {"timed_tokens": 1, "windows": 3}, "1 token of 1 window"),
        (6, {"windows": 20}, "a few tokens of each of 6 windows"),
        (3, {}, "a few tokens of each of 3 windows"),
    ],
)
def test_times_are_of_few_tokens(rounds: int, header: dict[str, int], words: str) -> None:
    """Losses and steps are of the sweep's tokens, times of a few in each round: as many as the file records, or "a few"."""
    assert timed_text(HEADER | header, rounds) == words
    sentence = f"Losses and steps are measured on {sweep_text(HEADER)}; times are of cached decoding of {words} of that text."
    assert measured_words(HEADER | header, rounds) == sentence
    assert (sentence in recommend(a_sweep(rounds=rounds, **header))[1]) == (rounds >= 3), "where times decide"
    assert (f"Measured on {sweep_text(HEADER)}." in recommend(a_sweep(rounds=rounds, **header))[1]) == (rounds < 3)
    assert measured_words(HEADER | header, 0) == f"Measured on {sweep_text(HEADER)}."


def test_timed_tokens_of_a_window() -> None:
    """A round reads 32 tokens of a window and decodes 8; of a short window what there is."""
    assert [timed_tokens(window) for window in (256, 40, 36, 8)] == [(32, 8), (32, 8), (32, 4), (6, 2)]


def test_losses_of_different_text() -> None:
    """Where a page shows losses of several texts it says which are of which; with one there is nothing to say."""
    evaluation = {"tokens": 8192, "windows": 64}
    note = losses_note(evaluation, HEADER | {"source": "builtin"}, a_calibration())
    assert note.startswith(
        "Losses are to be compared only where they are of the same tokens. Here the loss by loops is of 8,192 tokens (64 "
    )
    assert "6,144 tokens (23 pieces of documents) from the report part of the held-out text of builtin" in note and "900 tokens (11" in note
    assert note.endswith("The loss by loops is of windows spread over all documents, so it may share text with the others.")
    assert "calibration" not in losses_note(evaluation, HEADER, None) and "spread over" not in losses_note(None, HEADER, a_calibration())
    assert losses_note(evaluation, None, None) == "" == losses_note(None, None, None)


@pytest.mark.parametrize(
    ("swept", "calibrated", "words"),
    [
        ("ae", "abcde", "The sweep's 2 windows are all among the 5 windows of the report part that the calibration reads."),
        ("a", "ab", "The sweep's 1 window is among the 2 windows of the report part that the calibration reads."),
        ("abc", "bc", "The 2 windows of the report part that the calibration reads are all among the sweep's 3 windows."),
        ("ab", "ba", "The sweep and the calibration read the same 2 windows of the report part."),
        ("abc", "cd", "Of the sweep's 3 windows of the report part 1 is among the 2 windows that the calibration reads."),
        ("ab", "cd", "Of the report part the sweep reads 2 windows and the calibration 2 windows; they share none."),
        ("ab", None, "whether they share windows is not recorded (a file is of an earlier version)."),
        (None, "ab", "whether they share windows is not recorded"),
    ],
)
def test_which_text_is_a_part_of_which(swept: str | None, calibrated: str | None, words: str) -> None:
    """Whether the sweep's windows are among the calibration's follows from the windows' fingerprints, and is open where a file has none."""
    header = HEADER if swept is None else HEADER | {"window_fingerprints": list(swept)}
    found = a_calibration() if calibrated is None else a_calibration(window_fingerprints={"report": list(calibrated)})
    assert words in losses_note(None, header, found)


def test_units_of_each_part() -> None:
    """A part is counted in its own unit, documents or what takes their place; earlier versions have one unit for all parts."""
    mixed = a_calibration(by={"fit": "windows", "certify": "documents", "report": "pieces"})
    assert "900 tokens (11 documents) from the certify part" in calibration_sentences(mixed, 12)[0]
    assert "800 tokens (10 pieces of documents) from the report part" in calibration_sentences(mixed, 12)[1]
    assert part_words(mixed, "fit") == "the fit part (300 tokens, 4 windows)" and part_words(an_old_calibration(None), "report").endswith(
        "10 documents)"
    )
    assert (other_text(mixed), other_text(a_calibration(by="windows"))) == ("other documents", "other text")


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


# -- calibration ------------------------------------------------------------------------------------------------------


def printed(**changes: Any) -> str:
    return " ".join(calibration_sentences(a_calibration(**changes), None))


def test_calibration_compares_what_was_certified_alike() -> None:
    """The result stands beside a single threshold and a fixed depth certified to the same limit: fewer, more, or no difference, by the
    paired interval; of two equals the fixed depth is the simpler choice."""
    limit = "certified to the same limit of 0.005 nats"
    lead = f"A single threshold for all groups {limit} (acceleration:3.0; upper bound 0.0020) takes 5.47 steps, dCE +0.0010: "
    assert f"{lead}no difference in steps (-0.060 [-0.160, +0.040] steps)." in printed()
    assert f"{lead}the calibrated thresholds take fewer (-0.060 [-0.070, -0.050] steps)." in printed(d_single=apart(-0.06, 0.01))
    assert f"{lead}the calibrated thresholds take more (+0.060 [+0.050, +0.070] steps)." in printed(d_single=apart(0.06, 0.01))
    assert "30.00 steps" not in printed() and "all loops" not in printed()
    lead = f"A fixed depth for all tokens {limit} (fixed:5; upper bound 0.0040) takes 5.00 steps, dCE +0.0010: "
    assert (
        f"{lead}the calibrated thresholds take more (+0.410 [+0.310, +0.510] steps); by steps the fixed depth is the better choice."
        in printed()
    )
    assert f"{lead}no difference in steps (+0.010 [-0.090, +0.110] steps); the fixed depth is the simpler choice." in printed(
        d_fixed=apart(0.01, 0.1)
    )
    assert f"{lead}the calibrated thresholds take fewer (-0.500 [-0.600, -0.400] steps)." in printed(d_fixed=apart(-0.5, 0.1))
    for value, loss in ((-0.002, "; their loss is lower (-0.0020 [-0.0030, -0.0010] nats)"), (-0.0009, "")):
        words = printed(d_fixed=apart(0.41, 0.1) | apart(value, 0.001, "ce"))
        assert f"steps); by steps the fixed depth is the better choice{loss}." in words
    assert "; their loss is higher (+0.0020 [+0.0010, +0.0030] nats)." in printed(d_single=apart(0.06, 0.01) | apart(0.002, 0.001, "ce"))
    assert "no difference in steps (+0.000 [+0.000, +0.001] steps)" in printed(
        d_single={"steps": 0.0004, "steps_low": 1e-5, "steps_high": 0.001}
    )
    assert "no difference in steps (+0.000 [+0.000, +0.000] steps)" in printed(d_single=apart(-0.0, 0.0)), "zero has no minus"
    dear = printed(d_fixed=apart(-0.5, 0.1), calibrated=a_setting(4.5, flops=9e6))
    assert "take fewer (-0.500 [-0.600, -0.400] steps), but 80 % more FLOPs with the rule's own work." in dear
    few = printed(clusters={"fit": 1, "certify": 5, "report": 3}, d_single=apart(-0.06, 0.01))
    assert (
        "too little text to tell a difference (-0.060 [-0.070, -0.050] steps)." in few
        and "Too little text to tell a difference in steps from the default of 12 loops." in few
        and "No difference" not in few
    )


def test_calibration_beside_the_default() -> None:
    """Steps are quoted against the default depth, which is named: fewer, more or no difference."""
    assert "That is 55 % fewer steps than the default of 12 loops." in printed()
    assert "That is 17 % more steps than the default of 12 loops." in printed(calibrated=a_setting(14.0), d_default=apart(2.0, 0.1))
    assert "No difference in steps from the default of 12 loops." in printed(calibrated=a_setting(11.5), d_default=apart(-0.5, 0.6))
    assert "The default of 40 loops takes 40 steps." in printed(mean_loops=40, d_default=None), "beyond the loops that were measured"


def test_calibration_says_what_it_could_not_certify() -> None:
    """Without a certified setting, single threshold or fixed depth the sentence says so; nothing is compared with all loops."""
    assert "No single threshold for all groups could be certified to the same limit of 0.005 nats." in printed(single=a_setting(30.0, None))
    assert "No fixed depth for all tokens could be certified to the same limit of 0.005 nats." in printed(fixed=a_setting(30.0, None))
    none = printed(rules=[None], bound=0.0, calibrated=a_setting(30.0), single=a_setting(30.0, None), d_default=apart(18.0, 0.0))
    assert none.startswith("No setting could be certified, so every group runs all its loops") and "Certified on" not in none
    assert (
        "No single threshold" not in none
        and "all loops take more (+0.410" in none
        and "150 % more steps than the default of 12 loops" in none
    )
    assert "dCE" not in none.split("which neither")[1].split(".")[0], "all loops beside themselves"
    assert printed(bound=float("inf")).startswith("No bound can be given: 900 tokens (11 documents) from the certify part")
    assert printed().startswith(
        "Certified on 900 tokens (11 documents) from the certify part of the held-out text of builtin: the loss lies no more than "
    )
    assert (
        "than the limit of 0.005 nats a token above the loss at 30 loops (confidence 95 % for all that was certified together); the test's "
        "upper bound was 0.0031."
        in printed()
        and "over all" not in printed()
    )
    assert "On 800 tokens (10 documents) from the report part of the held-out text of builtin, which neither" in printed()


def test_speed_goals_compare_losses() -> None:
    """Where steps or ms were asked for, settings chosen for the same goal are compared by their loss."""
    goal = {"goal": {"mean_steps": 6.0}}
    lead = "A single threshold for all groups chosen for the same goal (acceleration:3.0) takes 5.47 steps, dCE +0.0010: "
    assert f"{lead}no difference in loss (+0.0000 [-0.0010, +0.0010] nats)." in printed(**goal)
    assert "have a lower loss (-0.0020 [-0.0030, -0.0010] nats)." in printed(**goal, d_single=apart(-0.002, 0.001, "ce"))
    assert "have a higher loss (+0.0020 [+0.0010, +0.0030] nats); by loss the fixed depth is the better" in printed(
        **goal, d_fixed=apart(0.002, 0.001, "ce")
    )
    assert "No fixed depth for all tokens could be chosen for the same goal." in printed(**goal, fixed=a_setting(30.0, None))


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


def test_a_confidence_says_of_what() -> None:
    """Where the chance of error was shared between the paths the confidence is that of all of them; before it was of each by itself; a
    bound of a speed is the only one."""
    assert confidence(a_calibration()) == "confidence 95 % for all that was certified together"
    assert confidence(an_old_calibration(None)) == "confidence 95 % for each setting by itself"
    assert confidence(a_calibration(goal={"ms": 2.0}, delta=0.1)) == "confidence 90 %"


def test_an_earlier_file() -> None:
    """A file of an earlier version is read, and what is said of it follows from its own interval; a newer one is refused in a line."""
    path = Path(__file__).parent / "golden" / "calibration-1.json"
    found = read_calibration(path)
    assert found is not None and "version" not in found
    assert len(settings_tested(found, "calibrated") or ()) == 9 and settings_tested(found, "fixed") is None
    assert settings_tested(a_calibration(), "fixed")[-1] == {"rule": "fixed:4", "bound": 0.0062, "passed": False}  # type: ignore[index]
    words = " ".join(calibration_sentences(found, 12))
    assert "On 6,144 tokens (23 pieces of documents) from the report part of the held-out text, which neither" in words
    assert (
        "(acceleration:3.253) takes 5.52 steps, dCE +0.0002: the calibrated thresholds take fewer (-1.500 [-1.512, -1.489] steps)." in words
    )
    assert describe(found).startswith(
        "bundled, acceleration, at most 30 loops, asked: max-dce 0.005\n  group 1: acceleration:20.55, 3.00 steps on"
    )


def test_a_newer_calibration(tmp_path: Path) -> None:
    """A calibration of a later version is refused in one line."""
    (tmp_path / "calibration.json").write_text(json.dumps(a_calibration(version=CALIBRATION_VERSION + 1)))
    with pytest.raises(UserError, match="is of version 3, this program reads up to 2"):
        read_calibration(tmp_path / "calibration.json")


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
