"""The recommendation follows from the numbers: one setting, certified where it can be, on both sides of every interval."""

from typing import Any

import pytest

from constructed import DEFAULT, FULL, HEADER, a_calibration, a_point, a_setting, a_sweep, an_old_calibration
from twoscale.report.advice import in_a_sentence, recommend, sample_words, saving, why_not_others
from twoscale.report.words import calibration_sentences
from twoscale.tradeoff.choice import below, choose
from twoscale.tradeoff.summary import Sweep

# -- on the sweep's text ----------------------------------------------------------------------------------------------


def test_ties_go_to_the_fixed_depth() -> None:
    """A rule is recommended only where its whole interval of cost lies below the best fixed depth's; a tie goes to the fixed depth."""
    fixed = a_point("fixed:4", (3.8, 4.0, 4.2), 4.0, 0.002)
    tie = a_point("step-norm:1.0", (3.7, 3.9, 4.1), 4.7, 0.003)
    head, words = recommend(a_sweep(fixed, tie))
    assert head.startswith(
        "Use fixed:4: 4.00 [3.80, 4.20] ms a token, 4.0 steps (67 % less time (65 to 69 %) than the default of 12 loops: 12.0 [11.9, 12.1]"
    )
    assert head.endswith(
        "; on the sweep's 6,144 tokens dCE +0.0020 [+0.0010, +0.0030] nats against all 30 loops; chosen on these tokens, not certified."
    )
    assert "settings whose CE rises by no more than 0.01 nats on the sweep's text" in words
    assert "The best rule within the same limit of loss is step-norm:1.0: 3.90 [3.70, 4.10] ms" in words and "cannot be told apart" in words
    quicker = a_point("step-norm:1.0", (3.5, 3.6, 3.79), 4.7, 0.003)
    head, words = recommend(a_sweep(fixed, quicker))
    assert head.startswith("Use step-norm:1.0: 3.60 [3.50, 3.79] ms a token") and "; it costs more, by whole intervals." in words
    assert "The best fixed depth within the same limit of loss is fixed:4" in words and "told apart" not in words
    slower = a_point("step-norm:1.0", (4.3, 4.5, 4.7), 4.7, 0.003)
    head, words = recommend(a_sweep(fixed, slower))
    assert head.startswith("Use fixed:4") and "costs more than fixed:4" in words and "told apart" not in words


def test_a_rule_that_wins_is_found_behind_one_that_does_not() -> None:
    """The cheapest rule may have a wide interval; a dearer one that lies wholly below the fixed depth is the one that is recommended."""
    fixed = a_point("fixed:4", (3.8, 4.0, 4.2), 4.0)
    head, _ = recommend(a_sweep(fixed, a_point("kl:0.1", (2.0, 3.0, 4.0), 3.0), a_point("kl:0.01", (3.1, 3.2, 3.3), 3.2)))
    assert head.startswith("Use kl:0.01")


def test_fixed_depths_are_compared_by_their_work() -> None:
    """Of two fixed depths the one with fewer loops does a part of the other's work, so noisy times do not make a deeper one the choice; the
    sentence says where the time does not show it."""
    near, rule = a_point("fixed:10", (10.5, 11.5, 12.0), 10.0), a_point("kl:1", (11.0, 11.6, 12.0), 11.0)
    head, words = recommend(a_sweep(near, rule))
    assert head.startswith(
        "Use fixed:10: 11.5 [10.5, 12.0] ms a token, 10.0 steps (no measurable difference in time from the default of 12 loops: "
        "12.0 [11.9, 12.1] ms a token; 17 % fewer FLOPs)"
    )
    assert "in time fixed:10 and the rule cannot be told apart" in words
    noisy = [a_point("fixed:4", (7.2, 8.4, 8.8), 4.0), a_point("fixed:6", (6.9, 7.5, 7.8), 6.0)]
    assert recommend(a_sweep(*noisy))[0].startswith("Use fixed:4: 8.40 [7.20, 8.80]")


def test_fewer_loops_must_win_something() -> None:
    """Fewer loops whose time is not shown to be shorter are recommended only if their loss is not shown to be higher than that of the
    default depth, by the paired interval; the page says why they are not."""
    near = a_point("fixed:10", (10.5, 11.5, 12.0), 10.0, 0.004, default_dce=0.003, default_dce_low=-0.001, default_dce_high=0.006)
    worse = near | {"default_dce_low": 0.001}
    faster = worse | {"ms": 11.0, "ms_high": 11.8}
    assert [choose(a_sweep(p)).pick["id"] for p in (near, worse, faster)] == ["fixed:10", "fixed:12", "fixed:10"]
    assert "it is the default of 12 loops, and nothing that keeps CE" in in_a_sentence(a_sweep(worse))
    passed = (
        "fixed:10 keeps CE within 0.01 nats with 17 % fewer FLOPs, but against the default depth its loss is higher, by +0.0030 [+0.0010, "
    )
    assert passed in why_not_others(a_sweep(worse)) and passed in recommend(a_sweep(worse))[1]
    assert "keeps CE within 0.01 nats with" not in why_not_others(a_sweep(near)) + why_not_others(a_sweep(faster))
    why = why_not_others(a_sweep(worse | {"ce": 1.9}))
    assert "It is not recommended: against the default depth its loss is higher, by +0.0030 [+0.0010, +0.0060] nats, and its time" in why
    much = a_point("fixed:4", (3.8, 4.0, 4.2), 4.0, 0.004, default_dce=0.003, default_dce_low=0.001, default_dce_high=0.006)
    assert choose(a_sweep(worse, much)).pick is much, "less time is worth a loss within the limit"
    lost = DEFAULT | {"dce_high": 0.02}
    assert choose(Sweep(HEADER, [FULL, lost, worse], 3)).pick is worse, "a default that does not keep CE is no measure"


def test_a_rule_must_cost_less_than_every_fixed_depth_of_less_work() -> None:
    """A rule that costs less than the default depth but ties with fewer loops within the limit is not recommended, they are, and the page
    says why; one that costs less than these too is."""
    higher = {"default_dce": 0.003, "default_dce_low": 0.001, "default_dce_high": 0.006}
    near = a_point("fixed:10", (9.0, 11.0, 12.0), 10.0, 0.004, **higher)
    rule = a_point("kl:1", (9.8, 10.0, 10.2), 10.0)
    sweep = a_sweep(near, rule)
    assert choose(sweep).pick["id"] == "fixed:10" and choose(a_sweep(near)).pick["id"] == "fixed:12"
    why = (
        "fixed:10 takes the place of fixed:12 (the default) because kl:1, which keeps CE within 0.01 nats too, costs less time than "
        "fixed:12 by whole intervals (10.0 [9.8, 10.2] ms a token against 12.0 [11.9, 12.1] ms a token), and because in time fixed:10 "
        "and kl:1 cannot be told apart."
    )
    assert why in why_not_others(sweep) and why in recommend(sweep)[1]
    assert "in time fixed:10 and the rule cannot be told apart, and a tie goes to the fixed depth" in recommend(sweep)[1]
    quick = a_point("kl:1", (7.0, 8.0, 8.9), 10.0)
    assert choose(a_sweep(near, quick)).pick is quick and "takes the place" not in recommend(a_sweep(near, quick))[1]
    assert (
        "it costs more, by whole intervals. So does fixed:10, which is not shown to be better than the default depth."
        in (recommend(a_sweep(near, quick))[1])
    )
    deeper = a_point("fixed:16", (7.0, 15.0, 17.0), 16.0)
    assert choose(a_sweep(deeper, rule)).pick is rule, "more work than the default is no rival, however times vary"
    assert choose(a_sweep(near, rule, a_point("kl:2", (7.0, 8.0, 8.9), 10.0))).pick["id"] == "kl:2", "another rule costs less than both"


def test_ties_with_the_default() -> None:
    """Where no fixed depth has 5 % fewer FLOPs than the default depth and no rule costs less, by whole intervals, the default is it."""
    same = a_point("fixed:1@0", (11.0, 11.5, 12.0), 11.5, family="fixed-one", label="1 step in group 1")
    rule = a_point("kl:1", (11.0, 11.6, 12.0), 11.0)
    head, words = recommend(a_sweep(same, rule))
    assert head.startswith("Use fixed:12: 12.0 [11.9, 12.1] ms a token, 12.0 steps (the default of 12 loops)") and "told apart" in words
    assert recommend(a_sweep(same | {"flops": 11.3e6, "flops_high": 11.4e6}, rule))[0].startswith("Use 1 step in group 1")
    assert recommend(a_sweep(rule | {"ms_high": 11.8}))[0].startswith("Use kl:1: 11.6")


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
    assert timed.cost == "flops" and a_sweep().cost == "ms" and "Times need 3 rounds and this sweep has 1, so" in recommend(timed)[1]
    assert "counted FLOPs decide" not in recommend(a_sweep())[1]


def test_savings_name_the_default() -> None:
    """A saving is quoted against mean_loops, by whole intervals: less, more or no difference; without such a point the full run is."""

    def printed(ms: tuple[float, float, float]) -> str:
        return saving(a_point("kl:1", ms, 8.0), DEFAULT, "the default of 12 loops", "ms")

    assert "(50 % less time (49 to 51 %) than the default of 12 loops: 12.0 [11.9, 12.1] ms a token)" in printed((5.9, 6.0, 6.1))
    assert "(25 % more time (16 to 34 %) than the default of 12 loops: " in printed((14.0, 15.0, 16.0))
    assert "(no measurable difference in time from the default of 12 loops: " in printed((10.0, 11.0, 11.95))
    assert saving(DEFAULT, DEFAULT, "the default of 12 loops", "ms") == "12.0 [11.9, 12.1] ms a token, 12.0 steps (the default of 12 loops)"
    assert below(FULL, DEFAULT, "ms") is False and below(DEFAULT, FULL, "ms") is True
    assert recommend(a_sweep())[0].startswith("Use fixed:12: 12.0 [11.9, 12.1] ms a token, 12.0 steps (the default of 12 loops); on the")
    fixed = a_point("fixed:4", (3.8, 4.0, 4.2), 4.0)
    assert (
        "87 % less time (86 to 88 %) than all 30 loops (the default of 7 loops was not swept)" in recommend(a_sweep(fixed, mean_loops=7))[0]
    )
    assert "87 % less time (86 to 88 %) than all 30 loops: 30.0 ms a token)" in recommend(a_sweep(fixed, mean_loops=None))[0]
    assert "87 % less time (86 to 88 %) than the default of 30 loops: 30.0 ms a token)" in recommend(a_sweep(fixed, mean_loops=30))[0]
    slow = Sweep(HEADER, [FULL, a_point("fixed:12", (3.0, 3.1, 3.2), 12.0, 0.3), a_point("kl:1", (14.0, 15.0, 16.0), 20.0)], 3)
    assert "(384 % more time (338 to 433 %) than the default of 12 loops: " in recommend(slow)[0], "a quick default that loses quality"
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
        "Oracles choose depths with the labels in hand, and are no settings to use. The oracle that stays within eps gives every" in words
    )
    assert (
        "At eps = 0.01 it takes 7.3 steps, the fewest among the eps tried that keep CE within 0.01 nats (dCE +0.0020 [+0.0010, +0.0030]; "
        in words
    )
    weighs = "The oracle that weighs loss against steps gives every token, among some forty combinations of depths, the one with the least "
    assert f"{weighs}loss + price x steps. At a price of 0.03 nats a step it takes 2.0 steps (dCE -0.1600 [" in words
    assert "At eps = 0.003 it takes 11.4 steps" in recommend(a_sweep(stay[0], stay[1] | {"dce_high": 0.011}, lagrange))[1]
    assert "weighs loss" not in recommend(a_sweep(*stay))[1] and f"no settings to use. {weighs}" in recommend(a_sweep(lagrange))[1]
    assert "racle" not in recommend(a_sweep(stay[1] | {"dce_high": 0.011}))[1]


# -- beside a calibration ---------------------------------------------------------------------------------------------


def certified_sweep(*points: dict[str, Any], **header: Any) -> Sweep:
    """A sweep with fixed:4, fixed:5 and the thresholds that `a_calibration` certified, 4, 5 and 6 ms +- 0.1."""
    fixed = [a_point(f"fixed:{k}", (k - 0.1, float(k), k + 0.1), float(k), 0.002, setting=float(k)) for k in (4, 5)]
    rule = a_point("calibrated acceleration:2.0", (5.9, 6.0, 6.1), 5.41, family="calibrated", label="calibrated: acceleration:2.0")
    return a_sweep(*fixed, *(points or (rule,)), **header)


def test_a_certified_setting_is_the_recommendation() -> None:
    """Where a calibration certified settings, the cheapest of them is the one recommendation; what the sweep alone would choose stands
    beside it with its limit, its tokens and why it is less strict."""
    head, words = recommend(certified_sweep(), a_calibration())
    assert head.startswith("Use fixed:5: 5.00 [4.90, 5.10] ms a token, 5.0 steps (58 % less time (57 to 60 %) than the default of 12")
    assert "; on the report part (800 tokens, 10 documents) dCE +0.0010 [0.0000, +0.0020] nats against all 30 loops; certified: " in head
    assert head.endswith("than 0.005 nats a token above the loss at 30 loops (confidence 95 % for all that was certified together).")
    assert words.startswith("For this model use fixed:5: ") and "It is not certified" not in words
    assert "It is certified on the certify part (900 tokens, 11 documents) of the held-out text of builtin: the loss lies no more" in words
    assert "The sweep alone would choose fixed:4: 4.00 [3.90, 4.10] ms a token" in words and (
        "That is no second recommendation: it was chosen among many settings on the 6,144 tokens that it is measured on, by a limit of "
        "0.01 nats; it was tested on the certify part and not certified to 0.005 nats: there its upper bound, at 98.33 %, is 0.0062."
        in words
    )
    assert (
        words.count("For this model use") == 1
        and "they cost more than fixed:5, so within this limit these thresholds save nothing over it." in words
    )
    assert "In use: `twoscale generate` and `eval` with `--loops 5`. `--exit auto` takes the calibrated thresholds instead." in words
    same = certified_sweep()
    same.points[:] = [p for p in same.points if p["id"] != "fixed:4"]
    assert "The sweep alone, with a limit of 0.01 nats on its 6,144 tokens, would choose the same." in recommend(same, a_calibration())[1]


def test_certified_thresholds_win_by_their_whole_interval() -> None:
    """Certified thresholds are recommended only where they cost less than the certified fixed depth; a tie goes to the fixed depth,
    however noisy its times."""
    rule = a_point("calibrated acceleration:2.0", (4.7, 4.8, 4.89), 4.4, family="calibrated", label="calibrated: acceleration:2.0")
    head, words = recommend(certified_sweep(rule), a_calibration())
    assert (
        head.startswith("Use the calibrated thresholds (acceleration:2.0): 4.80 [4.70, 4.89]")
        and "In use: `twoscale generate` and `eval` with `--exit auto`." in words
    )
    assert "The best fixed depth certified to the same limit is fixed:5: " in words
    head, words = recommend(certified_sweep(rule | {"ms_high": 4.95}), a_calibration())
    assert head.startswith("Use fixed:5") and "in time fixed:5 and the thresholds cannot be told apart" in words
    noisy = [a_point(f"fixed:{k}", (3.0, 9.0, 12.0), float(k), setting=float(k)) for k in (4, 5)]
    dear = rule | {"ms_low": 3.0, "ms": 9.0, "ms_high": 12.0}
    assert recommend(Sweep(HEADER, [FULL, DEFAULT, *noisy, dear], 3), a_calibration())[0].startswith("Use fixed:5: 9.00")
    twelve = a_calibration(fixed=a_setting(12.0, "fixed:12"))
    assert recommend(Sweep(HEADER, [FULL, DEFAULT, *noisy, dear], 3), twelve)[0].startswith("Use fixed:12: 12.0 [11.9, 12.1] ms a token")
    quick = rule | {"ms_low": 2.0, "ms": 2.1, "ms_high": 2.2}
    shallow = a_sweep(*noisy, quick, mean_loops=4)  # the default is shallower than what was certified
    assert recommend(shallow, a_calibration(mean_loops=4))[0].startswith("Use the calibrated thresholds")


def test_why_a_calibration_does_not_decide() -> None:
    """Where nothing comparable was certified the sweep decides, and the paragraph says why; there is still one recommendation."""
    cases = {
        "the calibration was asked for a speed, not for a limit on the loss": a_calibration(goal={"mean_steps": 6.0}),
        "which tested no fixed depth: calibrate again": an_old_calibration(None),
        "the calibration is of at most 20 loops, the sweep of 30": a_calibration(loops=20),
        "could certify no setting to its limit of 0.005 nats": a_calibration(rules=[None], fixed=a_setting(30.0, None)),
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
        "Intervals are rough: those of losses over 4 pieces of documents, those of times over 3 rounds. Over 3 or fewer they are the "
        "lowest and the highest of these, and may cover less than 95 %." in recommend(a_sweep(clusters=4))[1]
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


def test_the_paragraph_holds_the_calibration() -> None:
    """The recommendation's paragraph ends with the calibration's sentences; an old sweep takes the default from the run."""
    words = recommend(a_sweep(), a_calibration())[1]
    assert (
        "The calibrated thresholds of acceleration (asked for: max-dce 0.005) are not the recommendation. Certified on 900 tokens" in words
    )
    assert "no difference in steps" in words


# -- the sentence at the top of a page ---------------------------------------------------------------------------


def test_one_sentence_says_what_is_saved() -> None:
    """Less, more or no difference, by whole intervals; the default itself is said to be it, and why."""
    four = a_point("fixed:4", (3.9, 4.0, 4.1), 4.0, setting=4.0)
    words = in_a_sentence(a_sweep(four))
    assert words == (
        "Use 4 loops for every token (`--loops 4`): 67 % less time (66 to 68 %) than the default of 12 loops (4.00 [3.90, 4.10] ms a token "
        "against "
        "12.0 [11.9, 12.1] ms a token); dCE 0.0000 [-0.0010, +0.0010] nats, no measurable change, against all 30 loops (on the 6,144 "
        "tokens that it was chosen on; not certified)."
    )
    noisy = four | {"ms_high": 12.0}
    tied = in_a_sentence(a_sweep(noisy))
    assert "(`--loops 4`): no measurable difference in time from the default of 12 loops, 67 % fewer FLOPs; dCE" in tied
    alone = in_a_sentence(Sweep(HEADER, [FULL, DEFAULT | {"setting": 12.0}], 3))
    assert (
        "(`--loops 12`): it is the default of 12 loops, and nothing that keeps CE within 0.01 nats by its whole interval costs less time;"
        in alone
    )
    assert in_a_sentence(Sweep(HEADER, [], 0)).startswith("The sweep is not finished")
    flops = in_a_sentence(a_sweep(four, rounds=1))
    assert "67 % fewer FLOPs than the default of 12 loops (4.00 MFLOP a token against 12.00 MFLOP a token)" in flops


@pytest.mark.parametrize(
    ("dce", "words"),
    [
        (0.001, "+0.0010 [0.0000, +0.0020] nats, below the limit by its whole interval."),
        (0.0045, "+0.0045 [+0.0035, +0.0055] nats, not told apart from the limit, which lies in its interval."),
        (0.0065, "+0.0065 [+0.0055, +0.0075] nats, above the limit by its whole interval: the certificate does not hold on this text."),
    ],
)
def test_a_certificate_beside_other_text(dce: float, words: str) -> None:
    """A certified limit never stands beside a measured rise without a word on which side of it the interval lies."""
    found = a_calibration(fixed=a_setting(5.0, "fixed:5", dce), calibrated=a_setting(5.41, dce=dce))
    sentence = in_a_sentence(certified_sweep(), found)
    assert sentence.endswith(
        "; the loss is certified to lie no more than 0.005 nats above that of all 30 loops (confidence 95 %); on other documents "
        f"(800 tokens of the report part) the difference was {words}"
    )
    side_of = words.partition("nats, ")[2][:-1]
    paragraph = recommend(certified_sweep(), found)[1]
    assert f"On the report part, which is other documents, its dCE is {side_of.replace('the limit', 'that limit')}." in paragraph
    assert side_of in calibration_sentences(a_calibration(calibrated=a_setting(5.41, dce=dce)), 12)[1], "the same limit again"
    fast = a_calibration(calibrated=a_setting(5.41, dce=dce)) | {"goal": {"min_speedup": 2.0}, "bound": 0.005}
    assert side_of.replace("the limit", "the bound") in calibration_sentences(fast, 12)[1], "a goal without a limit has a bound alone"
