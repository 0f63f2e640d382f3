"""The paper's claims: text, rule, numbers and verdict say the same, on both sides of every threshold and with values missing."""

import copy
from typing import Any

import pytest

from constructed import HEADER, a_point, a_record
from twoscale.config import TrainConfig
from twoscale.report.claims import Claim, judge
from twoscale.report.exit_claims import beside, judge_exits
from twoscale.tradeoff.summary import Sweep

# -- claims (a) to (d) -------------------------------------------------------------------------------------------


def claim(letter: str, *records: dict[str, Any]) -> Claim:
    return next(c for c in judge(records) if c.letter == letter)


@pytest.mark.parametrize(
    "decay,outcome,words",
    [
        ((0.25, 0.1), "confirmed", "group 1 (layer 4): 25 %; group 2 (layers 5-6): 10 %"),
        ((0.26, 0.1), "undecided", "group 1 (layer 4): 26 %; group 2 (layers 5-6): 10 %"),
        ((0.5, 0.1), "undecided", "group 1 (layer 4): 50 %"),
        ((0.51, 0.1), "refuted", "group 1 (layer 4): 51 %"),
        ((None, 0.1), "undecided", "group 1 (layer 4): not measured; group 2 (layers 5-6): 10 %"),
        ((None, 0.6), "refuted", "group 1 (layer 4): not measured; group 2 (layers 5-6): 60 %"),
        ((0.0, 0.004), "confirmed", "group 1 (layer 4): 0 %; group 2 (layers 5-6): 0.4 %"),
        ((0.0254, 0.094), "confirmed", "group 1 (layer 4): 2.5 %; group 2 (layers 5-6): 9.4 %"),
        ((0.0998, 0.1049), "confirmed", "group 1 (layer 4): 10 %; group 2 (layers 5-6): 10 %"),
    ],
)
def test_claim_a(decay: tuple[float | None, ...], outcome: str, words: str) -> None:
    """Step norms decay: 25 % or less in every group, refuted above 50 % in any, undecided between and where a group is not measured."""
    found = claim("a", a_record(decay=decay))
    assert found.outcome == outcome and words in found.measured, found


@pytest.mark.parametrize(
    "cosines,outcome,words",
    [
        ((0.09, -0.09), "confirmed", "group 1 (layer 4): +0.30, at most 0.09 away from it over k = 11 to 20; group 2 (layers 5-6): +0.30"),
        ((0.11, 0.0), "undecided", "at most 0.11 away"),
        ((0.29, 0.0), "undecided", "at most 0.29 away"),
        ((-0.31, 0.0), "refuted", "at most 0.31 away"),
        ((None, 0.0), "undecided", "group 1 (layer 4): too few steps above rounding; group 2 (layers 5-6): +0.30, at most 0.00 away"),
        ((None, 0.5), "refuted", "group 1 (layer 4): too few steps above rounding"),
    ],
)
def test_claim_b(cosines: tuple[float | None, ...], outcome: str, words: str) -> None:
    """Cosines come to a steady value: over the last ten steps none lies more than 0.10 from the last five's mean, refuted beyond 0.30."""
    found = claim("b", a_record(cosines=cosines))
    assert found.outcome == outcome and words in found.measured, found


def test_claim_b_is_of_the_end_of_the_loop() -> None:
    """Text, rule and verdict of (b) say the same: a cosine that moves first and levels off late is steady, one that still drifts is not."""
    late = claim("b", a_record(steady=10))
    assert late.text == "The cosines of consecutive steps come to a steady value." and late.outcome == "confirmed"
    assert "over the last 10 of them" in late.rule and "How soon the value is reached is not part of the rule." in late.rule
    drifting = a_record()
    for group in drifting["groups"]:
        group["step_cosine"]["mean"] = [0.9 - 0.05 * k for k in range(20)]
    assert claim("b", drifting).outcome == "refuted"


@pytest.mark.parametrize("letter,passes", [("a", {}), ("b", {}), ("d", {})])
def test_controls(letter: str, passes: dict[str, Any]) -> None:
    """Where the model was measured before training, a claim says whether the untrained one passes the same rule."""
    untrained = {"a": {"decay": (0.9, 0.2)}, "b": {"cosines": (0.5, 0.0)}, "d": {"drift": (0.4,)}}[letter]
    same = claim(letter, a_record(step=0, **passes), a_record())
    assert same.outcome == "confirmed" and same.measured.endswith(
        ". Control: before training the rule says confirmed, so passing the rule is no effect of training"
    )
    other = claim(letter, a_record(step=0, **untrained), a_record())
    assert other.outcome == "confirmed" and other.measured.endswith(". Control: before training the rule says refuted")
    worse = claim(letter, a_record(step=0), a_record(**untrained))
    assert worse.outcome == "refuted" and worse.measured.endswith(". Control: before training the rule says confirmed")
    assert "Control" not in claim(letter, a_record(step=10), a_record()).measured, "not measured before training"
    elsewhere = claim(letter, a_record(step=0, source="text of its own"), a_record(source="builtin")).measured
    assert elsewhere.endswith(". The two were measured on different held-out text (text of its own; builtin)"), "a control says so, too"


@pytest.mark.parametrize(
    "after,outcome",
    [
        (a_record((0.1, 0.1), steady=3), "confirmed"),
        (a_record((0.1, 0.3), steady=3), "undecided"),
        (a_record((0.3, 0.3), steady=3), "refuted"),
        (a_record((0.3, 0.2004), steady=3), "undecided"),  # group 2 prints 20 % both times
        (a_record((0.1, 0.1996), steady=3), "undecided"),
        (a_record((0.1, 0.1), steady=7), "refuted"),
        (a_record((0.1, 0.1)), "undecided"),  # as soon as before
        (a_record(), "undecided"),  # nothing has changed
        (a_record((None, 0.1), steady=3), "undecided"),
        (a_record((0.1, 0.1), (None, 0.01), steady=3), "undecided"),
        (a_record((0.1, 0.1), (0.2, 0.05), steady=3), "undecided"),  # in one group the cosine has lost its steady value
        (a_record((0.1, 0.1), (0.2, 0.2), steady=3), "refuted"),  # in both
    ],
)
def test_claim_c(after: dict[str, Any], outcome: str) -> None:
    """Both strengthen: both fall in every group; refuted when either rises in every group; equal values and missing ones decide nothing."""
    found = claim("c", a_record(step=10), after)
    lead = "training step 10, then 100: group 1 (layer 4): share 20 %, then "
    assert found.outcome == outcome and found.measured.startswith(lead), found
    assert (". In every group " in found.measured) == (outcome == "refuted"), "says by which of the two"
    assert claim("c", a_record(step=0), after).measured.startswith("only one measurement")


def test_claim_c_says_where_k_is_not_defined() -> None:
    """Where claim (b) finds no steady value there is no loop step from which on it is kept; without one both times nothing is compared."""
    moving, better = {"cosines": (0.2, 0.2)}, {"decay": (0.1, 0.1)}
    lost = claim("c", a_record(step=10), a_record(**moving, **better))
    assert "; k 5, then none (by the rule of (b) not shown to be steady)" in lost.measured and lost.outcome == "refuted"
    assert lost.measured.endswith(". In every group the loop step k rises")
    both = claim("c", a_record(step=10), a_record((0.3, 0.3), steady=7))
    assert both.measured.endswith(". In every group the share and the loop step k rise")
    found = claim("c", a_record(step=10, **moving), a_record(**better))
    assert "; k none (by the rule of (b) not shown to be steady), then 5" in found.measured and found.outcome == "confirmed"
    never = claim("c", a_record(step=10, **moving), a_record(**moving, **better))
    assert "; k not defined (by the rule of (b) not shown to be steady at either time)" in never.measured and never.outcome == "undecided"


def test_claim_c_names_different_texts() -> None:
    """Measurements on different held-out text are not compared in silence; files of older versions name none."""
    early = a_record(step=10, source="text of its own")
    assert "; k 5, then 3. group 2 (layers 5-6): " in claim("c", early, a_record(steady=3)).measured
    assert claim("c", early, a_record(source="builtin")).measured.endswith(
        ". The two were measured on different held-out text (text of its own; builtin)"
    )
    assert "different" not in claim("c", early, a_record(source="text of its own")).measured
    assert "different" not in claim("c", a_record(step=10), a_record(source="builtin")).measured


def test_claim_c_names_its_training_steps() -> None:
    """The claim says from which training step to which, and where training drew its loops about another mean, that it did and which."""
    both = "Both, the decay of (a) and the steadiness of (b), strengthen with training"
    assert claim("c", a_record(step=10), a_record()).text == f"{both} (here from training step 10 to 100)."
    assert claim("c", a_record()).text == f"{both}." and claim("c", a_record(step=0), a_record()).text == f"{both}."
    records = [a_record(step=10), a_record(step=50), a_record()]
    for ramp, text, measured in (
        (90, "; the mean number of loops in training differed).", "differed: 3.33 at step 10, 6 at step 100"),
        (5, "training step 10 to 100).", ""),
        (0, "training step 10 to 100).", ""),
    ):
        train = TrainConfig(loops_start=3, loops_ramp=ramp)
        found = judge(records, lambda step, train=train: train.mean_loops(step, 6))[2]
        assert found.text.endswith(text) and found.measured.endswith(measured), ramp
        assert ("mean number of loops" in found.measured) == bool(measured) and found.outcome == claim("c", *records).outcome
    early = [a_record(step=10, source="text of its own"), a_record(source="builtin")]
    found = judge(early, lambda step: float(step))[2]
    assert "10 at step 10, 100 at step 100. The two were measured on different held-out text" in found.measured
    assert "mean number" not in judge(early, lambda step: None)[2].text, "how it was trained is not known"


@pytest.mark.parametrize(
    "drift,outcome,words",
    [
        ((3.0,), "confirmed", "group 1 (layer 4) to 2 (layers 5-6): 3.0"),
        ((2.9,), "undecided", ": 2.9"),
        ((1.0,), "undecided", ": 1.0"),
        ((0.9,), "refuted", ": 0.9"),
        ((None,), "undecided", ": not defined (a group has no step after the first"),
        ((), "undecided", "there is one group only"),
    ],
)
def test_claim_d(drift: tuple[float | None, ...], outcome: str, words: str) -> None:
    """Drift: 3 or more at every boundary, refuted below 1 at any, undecided between and where it is not defined."""
    found = claim("d", a_record(drift=drift))
    assert found.outcome == outcome and words in found.measured, found
    if drift:
        assert "(before training: not defined)" in claim("d", a_record(drift=(None,), step=0), a_record(drift=drift)).measured


# -- claims (e) to (g) -------------------------------------------------------------------------------------------

PAPER = {
    "full": ((590.0, 600.0, 610.0), 30.0, 0.0), "fixed:1": ((98.0, 100.0, 102.0), 1.0, 0.5),
    "acceleration:1e-05": ((570.0, 580.0, 590.0), 28.0, 0.0), "acceleration:0.01": ((350.0, 360.0, 370.0), 16.0, 0.002),
    "kl:1e-05": ((690.0, 700.0, 710.0), 20.0, 0.0), "kl:0.0001": ((640.0, 650.0, 660.0), 18.0, 0.0),
    "kl:0.001": ((590.0, 600.0, 610.0), 15.0, 0.001), "kl:0.01": ((490.0, 500.0, 510.0), 12.0, 0.004),
    "step-norm:0.001": ((390.0, 400.0, 410.0), 18.0, 0.004), "step-norm:0.01": ((290.0, 300.0, 310.0), 12.0, 0.3),
}  # fmt: skip


def exit_claim(letter: str, rounds: int = 3, looks: float = 0.0, **changes: Any) -> Claim:
    """A claim on the paper's numbers, of which some points are replaced (by their id) or left out (None); `looks`: share of the FLOPs."""
    given = copy.deepcopy(PAPER) | {name.replace("__", ":").replace("_", "-"): value for name, value in changes.items()}
    points = []
    for name, value in given.items():
        if value is not None:
            ms, steps, dce = value
            setting = float(name.partition(":")[2] or 30)
            points.append(a_point(name, ms, steps, dce, setting=setting, flops_looks=looks * 1e6 * steps))
    return next(c for c in judge_exits(Sweep(HEADER, points, rounds)) if c.letter == letter)


def fast(low: float, high: float, dce: float = 0.002) -> tuple[tuple[float, float, float], float, float]:
    return (low, (low + high) / 2, high), 16.0, dce


def test_claim_e() -> None:
    """Raising tau saves time at flat CE: ratio 0.80 at most and rise 0.01 at most confirm, above 0.95 or above 0.02 refutes; whole
    intervals, three rounds; what was not swept is undecided."""
    name = "acceleration:0.01"
    found = exit_claim("e")
    assert (
        found.outcome == "confirmed" and "580.00 to 360.00 ms a token (0.62 [0.59, 0.65]; paper 0.62), 28.0 to 16.0 steps" in found.measured
    )
    assert exit_claim("e", **{name: fast(440.0, 456.0)}).outcome == "confirmed"  # 456 / 570 = 0.80
    assert exit_claim("e", **{name: fast(440.0, 457.0)}).outcome == "undecided"
    assert exit_claim("e", **{name: fast(560.0, 580.0)}).outcome == "undecided"  # 560 / 590 = 0.949
    assert exit_claim("e", **{name: fast(561.0, 580.0)}).outcome == "refuted"
    assert exit_claim("e", **{name: fast(350.0, 370.0, 0.0095)}).outcome == "undecided"  # up to 0.0105
    assert exit_claim("e", **{name: fast(350.0, 370.0, 0.0205)}).outcome == "undecided"  # from 0.0195
    assert exit_claim("e", **{name: fast(350.0, 370.0, 0.0215)}).outcome == "refuted"
    assert exit_claim("e", rounds=2).outcome == "undecided" == exit_claim("e", 2, **{name: fast(561.0, 580.0)}).outcome
    missing = exit_claim("e", **{name: None})
    assert missing.outcome == "undecided" and missing.measured.startswith("not measured")


def test_verdicts_and_printed_numbers_agree() -> None:
    """A number beside a limit is printed with as many digits as it takes to see on which side it lies."""
    assert [beside(x, 0.8) for x in (0.8, 0.79, 0.8018, 0.80004, 0.7996)] == ["0.80", "0.79", "0.802", "0.80004", "0.7996"]
    undecided = exit_claim("e", **{"acceleration:0.01": fast(440.0, 457.0)})
    assert undecided.outcome == "undecided" and "[0.75, 0.802]" in undecided.measured
    near = exit_claim("e", **{"acceleration:0.01": fast(350.0, 370.0, 0.00903)})
    assert near.outcome == "undecided" and "dCE +0.0090 [+0.0080, +0.01003]" in near.measured
    low = exit_claim("g", **{"step-norm:0.01": ((290.0, 300.0, 310.0), 12.0, 0.01098)})
    assert low.outcome == "undecided" and "+0.0110 [+0.00998, +0.0120] at 1e-2" in low.measured


def test_claim_f() -> None:
    """KL keeps CE but is slower: 1.1 times what the fixed depths beside it take or more at flat CE confirms, below 1.02 or a rise refutes;
    the intervals of all three points count."""
    name, share = "kl:0.001", 14 / 29  # what 15 steps take without a rule lies between 1 step and all 30
    line, least, most = (a + share * (b - a) for a, b in ((100.0, 600.0), (98.0, 590.0), (102.0, 610.0)))
    slow = {times: ((times * most, 1.2 * line, 1.3 * line), 15.0, 0.001) for times in (1.11, 1.09)}
    assert exit_claim("f").outcome == "confirmed"
    assert "times what 15.0 steps take without a rule, interpolated between fixed:1 and all 30 loops (its looks" in exit_claim("f").measured
    assert "that cause is not tested here" in exit_claim("f").text and exit_claim("f").rule.endswith("is not part of the rule.")
    looks = exit_claim("f", looks=0.1).measured
    assert "(its looks, which read the head after each step, are 10 % of its FLOPs)" in looks
    assert exit_claim("f", **{name: slow[1.11]}).outcome == "confirmed" and exit_claim("f", **{name: slow[1.09]}).outcome == "undecided"
    for high, outcome in ((1.01, "refuted"), (1.03, "undecided")):
        assert exit_claim("f", **{name: ((0.9 * line, 0.95 * line, high * least), 15.0, 0.001)}).outcome == outcome
    for dce, outcome in ((0.0089, "confirmed"), (0.0095, "undecided"), (0.0105, "undecided"), (0.0115, "refuted")):
        found = exit_claim("f", **{"kl:0.01": ((490.0, 500.0, 510.0), 12.0, dce)})
        assert found.outcome == outcome and "at tau = 0.01" in found.measured, dce
    for times, words in (((280.0, 300.0, 320.0), "0.75 [0.68, 0.82]"), ((390.0, 400.0, 410.0), "1.00 [0.95, 1.05]")):
        measured = exit_claim("f", **{name: (times, 15.0, 0.001), "acceleration:0.001": ((390.0, 400.0, 410.0), 20.0, 0.0)}).measured
        beside = (
            f". Beside acceleration at the same tau it takes {words} of the time, with 15.0 steps against 20.0; that is not part of the"
        )
        assert beside in measured
    assert "Beside acceleration" not in exit_claim("f").measured
    assert exit_claim("f", rounds=2).outcome == "undecided"
    assert exit_claim("f", **{"kl:0.01": None}).measured.startswith("not measured")


def test_claim_f_compares_with_the_neighbours() -> None:
    """What as many steps take is interpolated between the nearest fixed depths, not drawn from far ones, and their intervals widen the
    ratio's; where a side has none nothing is compared."""
    near = {"fixed:14": ((180.0, 200.0, 220.0), 14.0, 0.0), "fixed:16": ((230.0, 250.0, 270.0), 16.0, 0.0)}
    found = exit_claim("f", **near)
    assert found.measured.startswith(f"{600 / 225:.2f} [{590 / 245:.2f}, {610 / 205:.2f}] times what 15.0 steps take without a rule, ")
    assert "interpolated between fixed:14 and fixed:16" in found.measured and "both intervals included" in found.rule
    same = exit_claim("f", **near, **{"fixed:15": ((290.0, 300.0, 310.0), 15.0, 0.0)})
    assert same.measured.startswith("2.00 [1.90, 2.10] times what 15.0 steps take without a rule, as fixed:15 (")
    bare = exit_claim("f", **{"fixed:1": None})
    assert bare.outcome == "undecided" and bare.measured == "not measured: no fixed depths on both sides of 15.0 steps"


def test_claim_g() -> None:
    """Step norm loses quality at 1e-2: above 0.01 nats by its whole interval and above the rise at 1e-3 confirms, below 0.01 refutes."""
    for dce, outcome in ((0.3, "confirmed"), (0.0115, "confirmed"), (0.0105, "undecided"), (0.0095, "undecided"), (0.0089, "refuted")):
        found = exit_claim("g", **{"step-norm:0.01": ((290.0, 300.0, 310.0), 12.0, dce)})
        assert found.outcome == outcome, dce
        assert found.measured.endswith(
            "the largest threshold tried that keeps CE within 0.01 nats by its whole interval is "
            f"{'0.01, and no larger one was tried' if dce < 0.0095 else '0.001'}"
        ), found.measured
    assert exit_claim("g", **{"step-norm:0.001": ((390.0, 400.0, 410.0), 18.0, 0.5)}).outcome == "undecided"
    assert "keeps CE" not in exit_claim("g", **{"step-norm:0.001": ((390.0, 400.0, 410.0), 18.0, 0.5)}).measured
    assert exit_claim("g", **{"step-norm:0.001": None}).measured.startswith("not measured")
