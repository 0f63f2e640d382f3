"""Sentences of the claims, the tables, the commands and the explorer, each on both sides of its rule and with values missing."""

import copy
import html
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from test_words import HEADER, a_calibration, a_point, a_sweep
from twoscale.cli.calibrate import CalibrateArgs
from twoscale.cli.eval import table as eval_table
from twoscale.cli.generate import summary
from twoscale.cli.parse import parse
from twoscale.cli.sweep import SweepArgs, table as sweep_lines
from twoscale.config import presets
from twoscale.report.claims import Claim, judge
from twoscale.report.exit_claims import judge_exits
from twoscale.report.load import RunFiles
from twoscale.report.page import TAUS, about_run, commands, glossary
from twoscale.report.registry import FIGURES
from twoscale.report.tables import evaluation_table, samples_section, sweep_table
from twoscale.tradeoff.points import TAUS as POINT_TAUS
from twoscale.tradeoff.summary import Sweep

# -- claims (a) to (d) -------------------------------------------------------------------------------------------


def a_record(
    decay: Sequence[float | None] = (0.2, 0.2),
    cosines: Sequence[float | None] = (0.05, 0.05),
    drift: Sequence[float | None] = (5.0,),
    step: int = 100,
    steady: int = 5,
    **changes: Any,
) -> dict[str, Any]:
    """Two groups whose step norm at k = 10 is `decay` of that at k = 1, and whose cosines are +0.30 from k = `steady` to 20, except at
    k = 11, the tenth step from the end, where they lie `cosines` away; None: not measurable."""
    groups = []
    for name, share, move in zip(("4", "5-6"), decay, cosines, strict=True):
        norms = [9.0, 1.0, *[0.5] * 8, share] if share is not None else [9.0, 1.0]
        means = [0.8 if k < steady else 0.3 + (move or 0.0) * (k == 11) for k in range(1, 21)]
        counts = [100] * 20 if move is not None else [100] * 9 + [1] * 11
        groups.append({"name": name, "step_norm": {"mean": norms}, "step_cosine": {"mean": means, "count": counts}})
    boundaries = [{"from": "4", "to": "5-6", "dlr": {"settled_k1": {"mean": d}}} for d in drift]
    return {"step": step, "groups": groups, "boundaries": boundaries, **changes}


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


@pytest.mark.parametrize(
    "after,outcome",
    [
        (a_record((0.1, 0.1), steady=3), "confirmed"),
        (a_record((0.1, 0.3), steady=3), "undecided"),
        (a_record((0.3, 0.3), steady=3), "refuted"),
        (a_record((0.1, 0.1), steady=7), "refuted"),
        (a_record((0.1, 0.1)), "undecided"),  # as soon as before
        (a_record(), "undecided"),  # nothing has changed
        (a_record((None, 0.1), steady=3), "undecided"),
        (a_record((0.1, 0.1), (None, 0.01), steady=3), "undecided"),
    ],
)
def test_claim_c(after: dict[str, Any], outcome: str) -> None:
    """Both strengthen: both fall in every group; refuted when either rises in every group; equal values and missing ones decide nothing."""
    found = claim("c", a_record(step=10), after)
    lead = "training step 10, then 100: group 1 (layer 4): share 20 %, then "
    assert found.outcome == outcome and found.measured.startswith(lead), found
    assert claim("c", a_record(step=0), after).measured.startswith("only one measurement")


def test_claim_c_names_different_texts() -> None:
    """Measurements on different held-out text are not compared in silence; files of older versions name none."""
    early = a_record(step=10, source="text of its own")
    assert "; k 5, then 3. group 2 (layers 5-6): " in claim("c", early, a_record(steady=3)).measured
    assert claim("c", early, a_record(source="builtin")).measured.endswith(
        ". The two were measured on different held-out text (text of its own; builtin)"
    )
    assert "different" not in claim("c", early, a_record(source="text of its own")).measured
    assert "different" not in claim("c", a_record(step=10), a_record(source="builtin")).measured


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
        found.outcome == "confirmed" and "580.0 to 360.0 ms a token (0.62 [0.59, 0.65]; paper 0.62), 28.0 to 16.0 steps" in found.measured
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


def test_claim_f() -> None:
    """KL keeps CE but is slower: 1.1 times the fixed depths' line or more at flat CE confirms, below 1.02 or a rise refutes."""
    name, line = "kl:0.001", 100 + 500 * 14 / 29  # what 15 steps take without a rule
    slow = {share: ((share * line, 1.2 * line, 1.3 * line), 15.0, 0.001) for share in (1.11, 1.09)}
    assert exit_claim("f").outcome == "confirmed" and "times what 15.0 steps take without a rule" in exit_claim("f").measured
    assert "that cause is not tested here" in exit_claim("f").text and exit_claim("f").rule.endswith("is not part of the rule.")
    looks = exit_claim("f", looks=0.1).measured
    assert "(its looks, which read the head after each step, are 10 % of its FLOPs)" in looks
    assert exit_claim("f", **{name: slow[1.11]}).outcome == "confirmed" and exit_claim("f", **{name: slow[1.09]}).outcome == "undecided"
    for high, outcome in ((1.01, "refuted"), (1.03, "undecided")):
        assert exit_claim("f", **{name: ((0.9 * line, 0.95 * line, high * line), 15.0, 0.001)}).outcome == outcome
    for dce, outcome in ((0.0089, "confirmed"), (0.0095, "undecided"), (0.0105, "undecided"), (0.0115, "refuted")):
        found = exit_claim("f", **{"kl:0.01": ((490.0, 500.0, 510.0), 12.0, dce)})
        assert found.outcome == outcome and "at tau = 0.01" in found.measured, dce
    assert exit_claim("f", rounds=2).outcome == "undecided"
    assert exit_claim("f", **{"kl:0.01": None}).measured.startswith("not measured")


def test_claim_g() -> None:
    """Step norm loses quality at 1e-2: above 0.01 nats by its whole interval and above the rise at 1e-3 confirms, below 0.01 refutes."""
    for dce, outcome in ((0.3, "confirmed"), (0.0115, "confirmed"), (0.0105, "undecided"), (0.0095, "undecided"), (0.0089, "refuted")):
        found = exit_claim("g", **{"step-norm:0.01": ((290.0, 300.0, 310.0), 12.0, dce)})
        assert found.outcome == outcome, dce
        assert found.measured.endswith(f"the largest threshold tried that keeps CE is {'0.01' if dce < 0.0095 else '0.001'}"), (
            found.measured
        )
    assert exit_claim("g", **{"step-norm:0.001": ((390.0, 400.0, 410.0), 18.0, 0.5)}).outcome == "undecided"
    assert "keeps CE" not in exit_claim("g", **{"step-norm:0.001": ((390.0, 400.0, 410.0), 18.0, 0.5)}).measured
    assert exit_claim("g", **{"step-norm:0.001": None}).measured.startswith("not measured")


# -- tables and commands -----------------------------------------------------------------------------------------


def test_tables_name_their_text() -> None:
    """Captions of losses say on which text they were measured, and dCE against which depth."""
    page = sweep_table(a_sweep(source="<b>"))
    assert "step-1, 6,144 tokens (23 pieces of documents) from the report part of the held-out text of &lt;b&gt;; at most 30 loops" in page
    assert "dCE against all 30 loops (the full run). ms a token: time divided by the full run&#x27;s in the same rounds, times the" in page
    assert "median over 3 rounds of timing" in page and "median over 1 round of timing" in sweep_table(a_sweep(rounds=1))
    assert "<td>full run</td><td>all 30 loops</td>" in page and "<td>fixed:12 (the default depth)</td>" in page
    assert "+-0" not in page and "-0.0000" not in sweep_table(a_sweep(a_point("kl:1", None, 3.0, -1e-6)))
    found = {
        "tokens": 8192,
        "windows": 64,
        "cross_entropy_by_loops": {"1": 2.0, "12": 1.9},
        "bigram_cross_entropy": None,
        "source": "a.txt",
    }
    page = evaluation_table(found)
    assert "Cross-entropy on 8,192 tokens (64 windows) spread over all held-out text of a.txt" in page and "bits per byte" not in page
    assert "<th>1 loop</th><th>12 loops</th>" in page and "<td>nats a token</td><td class='n'>2.0000</td>" in page and "bigram" not in page
    page = evaluation_table(found | {"bigram_cross_entropy": 2.5, "bytes": 16384})
    assert "bigram" in page and "<td>bits per byte</td><td class='n'>1.4427</td>" in page, "two nats a token of two bytes"


def test_sweep_lines() -> None:
    """The command's table names its text and the default depth, and rules whose thresholds tell nothing."""
    told = sweep_lines(a_sweep())
    assert told.startswith(
        "step-1, 6,144 tokens (23 pieces of documents) from the report part of the held-out text; dCE against all 30 loops"
    )
    assert "; the default of 12 loops is the point fixed:12\n" in told
    assert "; the default of 7 loops was not swept\n" in sweep_lines(a_sweep(mean_loops=7))
    assert "; the default of 30 loops is the point full\n" in sweep_lines(a_sweep(mean_loops=30)) and "default" not in sweep_lines(
        a_sweep(mean_loops=None)
    )
    for steps, words in (((30.0, 30.0), "kl: no token left"), ((3.0, 3.0), "kl: every threshold gave the same steps"), ((3.0, 4.0), "")):
        lines = sweep_lines(a_sweep(*(a_point(f"kl:{i}", None, k, hard={}) for i, k in enumerate(steps))))
        assert words in lines and ("kl: " in lines) == bool(words)
    one = a_point("fixed:1@0", None, 20.0, family="fixed-one", label="1 step in group 1 (layer 4)")
    assert "\n1 step in group 1 (layer 4) " in sweep_lines(a_sweep(one)) and "@0" not in sweep_lines(a_sweep(one))


def test_eval_lines() -> None:
    """`eval` says on which text."""
    found = {
        "checkpoint": "step-1", "tokens": 8192, "bytes": 9000, "windows": 64, "source": "builtin", "exit": None, "loops": [12],
        "steps": [12.0], "ce": 2.0, "ce_low": 1.9, "ce_high": 2.1, "ppl": 7.4, "bits_per_byte": 2.9,
    }  # fmt: skip
    lines = eval_table(found).splitlines()
    assert lines[0] == "step-1, exit none"
    assert lines[1] == "text            8,192 tokens (64 windows) spread over all held-out text of builtin (9,000 bytes)"


def test_generate_summary() -> None:
    """The closing line of `generate` quotes loop work against the default depth, layers counted, less, more or as much."""
    groups = [(4,), (5, 6)]
    told = summary([(3, 6), (5, 6)], (30, 30), groups, 12, 2.0, 1_000_000)
    assert told.startswith("2 tokens in 2.00 s, prompt included (1000.0 ms a token); ")
    assert "; mean steps 4.0 of 30 in group 1 (layer 4), 6.0 of 30 in group 2 (layers 5-6); " in told
    assert "; 56 % less loop work than the default of 12 loops; keys and values held 1.0 MB" in told  # (4 + 2 x 6) / 36
    assert "; 150 % more loop work than the default of 12 loops;" in summary([(30, 30)], (30, 30), groups, 12, 1.0, 0)
    assert "; as much loop work as the default of 12 loops;" in summary([(12, 12)], (12, 12), groups, 12, 1.0, 0)
    assert "loop work" not in summary([()], (), [], 12, 1.0, 0) and summary([()], (), [], 12, 1.0, 0).startswith("1 token in")


def test_captions() -> None:
    """A caption that states a rule states it as the figure is drawn: fallbacks, cosines, both means of the ratio, ratios of times."""
    words = {entry.name: entry.caption for entry in FIGURES}
    assert "by its whole interval; where none does, at the one with the smallest rise" in words["steps_taken"]
    assert words["step_cosines"].startswith("The cosine of the angle between a step and the one before.")
    assert (
        "over the traced steps from k = 1 on (`k ≥ 1`" in words["drift_to_loop"] and "over all of them (`all k`" in words["drift_to_loop"]
    )
    assert (
        "ms a token is a setting's time divided by the full run's in the same rounds, times the full run's median" in words["against_tau"]
    )


def test_glossary() -> None:
    """Every word that the page uses without an explanation in place is in the glossary; exits only where there is a sweep."""
    page = html.unescape(re.sub(r"<[^>]*>", " ", glossary(swept=True)))
    for word in (
        "Two-Scale Latent Dynamics for Recurrent-Depth Transformers",
        "dCE",
        "CE",
        "r, default depth",
        "tau",
        "looks",
        "nats",
        "Muon",
    ):
        assert word in page, word
    for word in ("builtin", "fixed:4 takes 4 loops", "certified", "times the full run's median", "loop group", "Pareto front"):
        assert word in " ".join(page.split()), word
    plain = glossary(swept=False)
    assert "dCE" not in plain and "loop group" in plain and "nats" in plain


def a_run(**changes: Any) -> RunFiles:
    """A run of which only what is asked for was measured."""
    record = a_record(step=4300, trained_tokens=1_000, tokens=1024, source="builtin")
    for group in record["groups"]:
        group |= {"verdict": "settling", "verdict_shares": {"settling": 0.995}, "loops": 30}
    geometry = [a_record(step=0, source="text of its own"), record]
    config = replace(presets.tiny(), name="one")
    return RunFiles(Path("runs/one"), config, [], geometry, None, None, **changes)


def test_training_names_its_text() -> None:
    """The page says what a model was trained on, and for one that was trained elsewhere that it is measured on other text."""
    assert a_run().training == "trained with Muon for 4,300 steps (1,000 tokens) on text of its own"
    assert a_run(converted=True).training.endswith("elsewhere, not on the text that it is measured on here")
    known = a_run(converted=True, trained_on="web pages").training
    assert known == "trained with Muon for 4,300 steps (1,000 tokens) on web pages, not on the text that it is measured on here"
    assert a_run(recipe=False, converted=True).training == "made elsewhere (its training is not known here)"
    assert a_run(converted=True).text.startswith("builtin (the language reference") and a_run().text == "builtin"
    assert a_run().labels == ["group 1 (layer 4)", "group 2 (layers 5-6)"] and a_run().tokens == "a token is a byte"
    page = about_run(a_run())
    assert "loop groups 1 (layer 4), 2 (layers 5-6); default depth 6 loops (r); a token is a byte; trained with Muon" in page
    assert "held-out text of builtin, 30 loop steps (those of training step 0 to 0: on text of its own)." in page


def test_commands_on_the_page() -> None:
    """The commands that the page gives are those that measured it: the command line takes them, with the settings of the files."""
    points = [a_point(f"{rule}:{tau:g}", None, 3.0, setting=tau) for rule in ("step-norm", "kl", "acceleration") for tau in TAUS]
    swept = a_sweep(*points, asked_windows=3)
    trace, calibrate, sweep = commands(a_run(sweep=swept, calibration=a_calibration(windows=9)))
    assert trace == "twoscale trace runs/one"
    assert calibrate == "twoscale calibrate runs/one --max-dce 0.005 --rule acceleration --delta 0.05 --loops 30 --windows 9"
    assert sweep == "twoscale sweep runs/one --loops 30 --windows 3 --rounds 3 --no-controller"
    given = parse(SweepArgs, sweep.split()[2:], "twoscale sweep")
    assert (given.windows, given.rounds, given.controller) == (3, 3, False) and given.taus == tuple(TAUS) == POINT_TAUS
    assert parse(CalibrateArgs, calibrate.split()[2:], "twoscale calibrate").windows == 9
    learned = a_point("learned:0.1", None, 3.0, setting=0.1)
    other = commands(a_run(sweep=a_sweep(a_point("entropy:0.5", None, 3.0, setting=0.5), learned, asked_windows=20)))[-1]
    assert other == "twoscale sweep runs/one --rules entropy --taus 0.5 --loops 30 --windows 20 --rounds 3"
    assert parse(SweepArgs, other.split()[2:], "twoscale sweep").rules == ("entropy",)


def test_samples_section() -> None:
    """Texts say with which rule and why; where all tokens take the same steps there are no colours to explain."""
    found = {
        "rule": "kl:1",
        "loops": 30,
        "temperature": 0.7,
        "seed": 0,
        "samples": [{"prompt": "a", "tokens": [["b", [2, 3]], ["c", [4, 4]]]}],
    }
    page = samples_section(found, None)
    assert "exit rule: kl:1; at most 30 steps in each group" in page and "Colour: steps of a token, mean over groups, 2.5 <span" in page
    found["samples"][0]["tokens"].pop()  # type: ignore[index]
    assert "Every token took 2.5 steps" in samples_section(found, None) and "ramp" not in samples_section(found, None)


# -- the explorer ------------------------------------------------------------------------------------------------


def test_explorer_words() -> None:
    """The race tells loop work against the default depth, speed against the named full run, and where the texts differ."""
    pytest.importorskip("plotly")
    from twoscale.explore.figures import calibrated_mark, lane_words, legend, race_words
    from twoscale.explore.session import Lane, Race

    def lane(ids: list[int], steps: tuple[int, ...], ms: float) -> Lane:
        n = len(ids) - 1
        return Lane([1], ids, ["x"] * len(ids), [None, *[steps] * n], seconds=1.0 + ms * (n - 1) / 1e3, first=1.0)

    quick, full = lane([1, 2, 3, 4], (6, 3), 10.0), lane([1, 2, 3, 4], (30, 30), 25.0)
    words = race_words(Race(quick, full, (30, 30), [1, 2], 12))
    assert words == "67 % less loop work than the default of 12 loops · **2.50x** as fast as all 30 loops · the same text so far (3 tokens)"
    words = race_words(Race(lane([1, 2, 9], (24, 24), 30.0), full, (30, 40), [1, 2], 12))
    assert (
        words
        == "100 % more loop work than the default of 12 loops · **0.83x** as fast as all 30 / 40 loops · first difference at new token 2"
    )
    assert race_words(Race(lane([1], (), 0.0), full, (30, 30), [1, 2], 12)) == ""
    assert lane_words(quick, [1, 2]) == "**3** tokens · **10.0 ms** a token · first after 1.00 s · mean steps **4.0**"
    assert lane_words(lane([1], (), 0.0), [1, 2]) == "reading the prompt …" and "<span>30 steps" in legend((30, 12))
    mark = calibrated_mark("kl", [0.1, None, 1e-9], -6.0, 2.0)
    assert mark.count("▲") == 2 and "kl, calibrated: 0.1, all loops, 1e-09 (group by group)" in mark
    assert calibrated_mark("kl", [None, 1e9], -6.0, 2.0) == ""
