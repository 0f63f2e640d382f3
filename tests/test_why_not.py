"""A setting that looks better than the recommended one in the picture is named, and the reason given follows from the numbers."""

from typing import Any

import pytest

from constructed import DEFAULT, FULL, HEADER, a_calibration, a_point, a_setting, a_sweep, apart
from twoscale.report.advice import in_a_sentence, recommend, why_not_others
from twoscale.tradeoff.choice import lower_and_left, overlap
from twoscale.tradeoff.summary import Sweep


def certified_sweep(*points: dict[str, Any], **header: Any) -> Sweep:
    """fixed:5 and the thresholds that `a_calibration` certified, 5 and 6 ms, dCE +0.002; and other points."""
    fixed = a_point("fixed:5", (4.9, 5.0, 5.1), 5.0, 0.002, setting=5.0)
    rule = a_point("calibrated acceleration:2.0", (5.9, 6.0, 6.1), 5.41, 0.002, family="calibrated", label="calibrated: acceleration:2.0")
    return a_sweep(fixed, rule, *points, **header)


def left(id: str, dce: float = 0.001, **changes: Any) -> dict[str, Any]:
    """A point lower and further left than fixed:5."""
    return a_point(id, (3.0, 4.0, 4.95), 4.0, dce, **changes)


def test_what_lies_lower_and_further_left() -> None:
    """Both measured means must lie below, the loss by what is printed; oracles and random exits are no settings; cheapest first."""
    pick = a_point("fixed:5", (4.9, 5.0, 5.1), 5.0, 0.002)
    others = [
        a_point("kl:1", (3.9, 4.5, 4.8), 4.0, 0.0), a_point("fixed:4", (3.0, 4.0, 5.0), 4.0, 0.001),
        a_point("fixed:3", (2.0, 3.0, 3.1), 3.0, 0.002),
        a_point("fixed:6", (4.0, 4.9, 6.0), 6.0, 0.002 - 4e-5), a_point("random~kl:1", (1.0, 2.0, 3.0), 4.0, 0.0, family="random"),
        a_point("oracle-stay:1", (1.0, 2.0, 3.0), 2.0, 0.0), a_point("fixed:8", (5.0, 5.1, 5.2), 8.0, 0.0),
    ]  # fmt: skip
    assert [p["id"] for p in lower_and_left(a_sweep(pick, *others), pick)] == ["fixed:4", "kl:1"]
    assert overlap(pick, others[1], "ms") and not overlap(pick, others[2], "ms") and overlap(pick, others[1], "dce")


def test_a_point_that_failed_the_test() -> None:
    """The first screen says that the point was tested on other text and with which bound, not that its limit was another one."""
    words = why_not_others(certified_sweep(left("fixed:4", setting=4.0)), a_calibration())
    assert words == (
        "In the picture fixed:4 (4.00 [3.00, 4.95] ms a token, dCE +0.0010 [0.0000, +0.0020] on the sweep's 6,144 tokens; the intervals of "
        "time overlap, and so do those of the loss) lies lower and further left than fixed:5 (5.00 [4.90, 5.10] ms a token, dCE +0.0020 "
        "[+0.0010, +0.0030] there). It is not recommended: it was tested on "
        "the certify part and not certified to 0.005 nats: there its upper bound, at 98.33 %, is 0.0062."
    )
    two = why_not_others(certified_sweep(left("fixed:4", setting=4.0), left("step-norm:1.0") | {"ms": 4.5}), a_calibration())
    assert two.startswith(words) and " step-norm:1.0 (4.50" in two
    assert two.endswith(
        ") lies there too, and is not recommended: the calibration, which tests fixed depths and thresholds of acceleration, did not test "
        "it."
    )
    more = why_not_others(certified_sweep(*(left(f"kl:{tau}") for tau in range(5))), a_calibration())
    assert more.count("not recommended") == 3 and more.endswith(" 2 other settings lie there too.")
    fixed, rule = certified_sweep().points[2:]
    paired = [
        left("fixed:4", setting=4.0, default_dce_low=-0.003, default_dce_high=-0.002),
        fixed | {"default_dce_low": 0.001, "default_dce_high": 0.002},
    ]
    sweep = Sweep(HEADER, [FULL, DEFAULT, *paired, rule], 3)
    assert "; the intervals of time overlap) lies" in why_not_others(sweep, a_calibration()), "the paired losses lie apart"
    apart_ = a_point("fixed:4", (3.9, 4.0, 4.1), 4.0, -0.02, setting=4.0)
    assert "; the intervals lie apart) lies" in why_not_others(certified_sweep(apart_), a_calibration())
    assert why_not_others(certified_sweep(), a_calibration()) == "" == why_not_others(Sweep(HEADER, [], 0))


@pytest.mark.parametrize(
    ("point", "changes", "why"),
    [
        (
            left("fixed:3", setting=3.0) | {"mean_steps": 3.0},
            {},
            "it was not tested: the test stops at the first depth that fails, fixed:4.",
        ),
        (
            left("fixed:6", setting=6.0) | {"mean_steps": 6.0, "flops": 6e6},
            {},
            "it is certified to 0.005 nats as well, but fixed depths are",
        ),
        (
            left("fixed:7", setting=7.0) | {"mean_steps": 7.0},
            {},
            "the calibration, which tests fixed depths and thresholds of acceleration, did",
        ),
        (left("step-norm:1.0"), {}, "the calibration, which tests fixed depths and thresholds of acceleration, did not test it."),
        (
            left("acceleration:1.0"),
            {},
            "it was tested on the certify part and not certified to 0.005 nats: there its upper bound, at 98.33 %",
        ),
        (left("acceleration:3.0"), {}, "it is certified to 0.005 nats as well, but one threshold for all groups is only compared with"),
        (
            left("fixed:4"),
            {"tested": []},
            "it is not among what was certified to 0.005 nats (the calibration is of an earlier version, which",
        ),
    ],
)
def test_reasons_beside_a_certificate(point: dict[str, Any], changes: dict[str, Any], why: str) -> None:
    """Every way in which a certified choice passes a point over has its own reason."""
    assert f"It is not recommended: {why}" in why_not_others(certified_sweep(point), a_calibration(**changes))


def test_certified_thresholds_that_tie() -> None:
    """Thresholds that are certified and look cheaper lose a tie, and the page says so."""
    sweep = certified_sweep()
    sweep.points[-1] |= {"ms_low": 3.0, "ms": 4.0, "ms_high": 4.95, "ce": 2.001}
    words = why_not_others(sweep, a_calibration())
    assert words.endswith(
        "it is certified to 0.005 nats as well, but in time it cannot be told apart from fixed:5, and a tie goes to the fixed depth."
    )


@pytest.mark.parametrize(
    ("points", "why"),
    [
        ([a_point("fixed:3", (2.9, 3.0, 3.1), 3.0, 0.0, dce_high=0.02)], "the interval of its dCE reaches above 0.01 nats."),
        ([a_point("fixed:6", (3.0, 4.0, 5.2), 6.0, 0.0)], "fixed depths are compared by counted FLOPs, which do not vary from round to"),
        ([a_point("kl:1", (3.0, 4.0, 5.2), 4.8, 0.0)], "in time it cannot be told apart from fixed:5, and a tie goes to the fixed depth."),
        (
            [a_point("kl:1", (3.0, 3.9, 5.2), 4.8, 0.0), a_point("kl:2", (4.0, 4.1, 4.2), 4.8, 0.001)],
            "by whole intervals its time does not lie below that of fixed:5, as that of kl:2 does.",
        ),
    ],
)  # fmt: skip
def test_reasons_on_the_sweep_alone(points: list[dict[str, Any]], why: str) -> None:
    """Without a certificate the reasons are those of the sweep's own rule."""
    words = why_not_others(a_sweep(a_point("fixed:5", (4.9, 5.0, 5.1), 5.0, 0.002, setting=5.0), *points))
    assert f"It is not recommended: {why}" in words


def test_a_tie_with_the_default() -> None:
    """A depth that takes hardly fewer FLOPs than the default loses the tie."""
    near = a_point("fixed:11", (11.0, 11.5, 12.0), 11.6, -0.001, setting=11.0)
    words = why_not_others(Sweep(HEADER, [FULL, DEFAULT, near], 3))
    assert "it takes less than 5 % fewer than fixed:12, and a tie goes to the default depth." in words


def test_what_the_sweep_alone_would_choose() -> None:
    """That its limit is another one is said only where the point does not meet the certified one itself."""
    meets, misses = left("fixed:4", setting=4.0), left("fixed:4", 0.006, setting=4.0)
    assert "its interval reaches above" not in recommend(certified_sweep(meets), a_calibration())[1]
    words = recommend(certified_sweep(misses), a_calibration())[1]
    assert "by a limit of 0.01 nats, and there its interval reaches above 0.005 nats; it was tested on the certify part" in words
    assert "67 % less time (58 to 75 %) than the default of 12 loops" in words, "a saving has the ends of its interval"


# -- the loss against the default depth --------------------------------------------------------------------------


def test_the_loss_against_the_default_depth() -> None:
    """Where time is quoted against the default depth, so is the loss, where it was measured; for a rule, a fixed depth and on the sweep."""
    fixed = a_setting(5.0, "fixed:5") | {"against_default": apart(-0.002, 0.001, "ce")}
    sentence = in_a_sentence(certified_sweep(), a_calibration(fixed=fixed))
    less = "measurably less than the default of 12 loops, by -0.0020 [-0.0030, -0.0010]"
    assert sentence.endswith(f"below the limit by its whole interval; in loss {less}.")
    words = recommend(certified_sweep(), a_calibration(fixed=fixed))[1]
    assert f"[0.0000, +0.0020] nats against all 30 loops, and {less}" in words
    assert in_a_sentence(certified_sweep(), a_calibration()).endswith("by its whole interval."), "an earlier file has none"
    quick = certified_sweep()
    quick.points[-1] |= {"ms_low": 3.0, "ms": 3.1, "ms_high": 3.2}
    assert in_a_sentence(quick, a_calibration()).endswith(
        "; in loss no measurable change against the default of 12 loops (0.0000 [-0.0010, +0.0010])."
    )
    swept = {"default_dce": -0.001, "default_dce_low": -0.002, "default_dce_high": 0.0}
    four = a_point("fixed:4", (3.9, 4.0, 4.1), 4.0, setting=4.0) | swept
    against = "against all 30 loops, and no measurable change against the default of 12 loops (-0.0010 [-0.0020, 0.0000]) (on the 6,144"
    assert against in in_a_sentence(a_sweep(four))
    assert "-0.0010 [-0.0020" not in in_a_sentence(a_sweep(four, mean_loops=30)), "the default is the full run"
    own = Sweep(HEADER, [FULL, DEFAULT | {"setting": 12.0} | swept], 3)
    assert "-0.0010 [-0.0020" not in in_a_sentence(own), "the default itself"


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.0019, 0.0069, "measurably more than the default of 12 loops, by +0.0038 [+0.0019, +0.0069]"),
        (0.00004, 0.0069, "no measurable change against the default of 12 loops (+0.0038 [0.0000, +0.0069])"),
        (-0.0019, 0.0069, "no measurable change against the default of 12 loops (+0.0038 [-0.0019, +0.0069])"),
    ],
)
def test_more_loss_than_the_default_is_said_in_words(low: float, high: float, words: str) -> None:
    """A loss that is higher than the default depth's by its whole interval, as it is printed, is called so beside 'no measurable change'
    against the full run."""
    four = a_point("fixed:4", (3.9, 4.0, 4.1), 4.0, setting=4.0, default_dce=0.0038, default_dce_low=low, default_dce_high=high)
    assert f"nats, no measurable change, against all 30 loops, and {words} (on the 6,144 tokens" in in_a_sentence(a_sweep(four))
    assert f"nats against all 30 loops, and {words}" in recommend(a_sweep(four))[1]


# -- a certified single threshold --------------------------------------------------------------------------------


def test_a_certified_single_threshold_is_passed_over() -> None:
    """A single threshold that is certified and takes fewer steps or FLOPs than the recommended fixed depth is named with the reason; one
    that takes more of both, or was not certified, is not."""

    def words(steps: float, flops: float, rule: str | None = "acceleration:3.0", sweep: Sweep | None = None) -> str:
        found = a_calibration(single=a_setting(steps, rule, flops=flops), fixed=a_setting(5.0, "fixed:5", flops=5e6))
        return recommend(sweep or certified_sweep(), found)[1]

    both = (
        "On the report part acceleration:3.0 takes fewer steps (4.97 against 5.00) and fewer FLOPs (4.90 against 5.00 MFLOP a token) than "
        "fixed:5. It is passed over: one threshold for all groups is only compared with, not chosen; by counted FLOPs it would tie with "
        "fixed:5 (less than 5 % fewer), and a tie goes to the fixed depth."
    )
    assert both in words(4.97, 4.9e6)
    assert (
        "acceleration:3.0 takes fewer steps (4.00 against 5.00) and fewer FLOPs (4.00 against 5.00 MFLOP a token) than fixed:5. It is "
        "passed over: one threshold for all groups is only compared with, not chosen.\n"
    ) in words(4.0, 4e6), "five percent are no tie"
    dear = words(4.97, 5e6)
    assert "takes fewer steps (4.97 against 5.00) than fixed:5. It is passed over: one threshold for all groups is only" in dear
    assert "not chosen; with its own work the rule takes no fewer FLOPs than fixed:5." in dear and "tie with" not in dear
    assert "acceleration:3.0 takes fewer FLOPs (4.90 against 5.00 MFLOP a token) than fixed:5." in words(5.0, 4.9e6)
    assert "passed over" not in words(5.0, 5e6) + words(5.47, 5.2e6) + words(4.97, 4.9e6, None)
    quick = certified_sweep()
    quick.points[-1] |= {"ms_low": 3.0, "ms": 3.1, "ms_high": 3.2}
    assert "passed over" not in words(4.97, 4.9e6, sweep=quick), "no fixed depth is recommended"
    assert "passed over" not in words(4.97, 4.9e6, sweep=a_sweep()), "nothing certified is recommended"
