"""Sentences of the page, its tables and glossary, of the commands and of the explorer."""

import html
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from constructed import a_calibration, a_point, a_run, a_sweep
from twoscale.cli.calibrate import CalibrateArgs
from twoscale.cli.eval import table as eval_table
from twoscale.cli.generate import summary
from twoscale.cli.parse import parse
from twoscale.cli.sweep import SweepArgs, table as sweep_lines
from twoscale.report.overview import TAUS
from twoscale.report.page import about_run, commands, comparison_words, glossary, measured_with, setup_section, units_of
from twoscale.report.registry import FIGURES
from twoscale.report.tables import evaluation_table, samples_section, sweep_table, token_table
from twoscale.tradeoff.commands import sweep_settings
from twoscale.tradeoff.latency import parties
from twoscale.tradeoff.points import RULES, TAUS as POINT_TAUS
from twoscale.train.trainer import progress_summary

FIGURE = {entry.name: entry for entry in FIGURES}

# -- tables and commands -----------------------------------------------------------------------------------------


def test_tables_name_their_text() -> None:
    """Captions of losses say on which text they were measured, and dCE against which depth."""
    page = sweep_table(a_sweep(source="<b>"))
    assert "step-1, 6,144 tokens (23 pieces of documents) from the report part of the held-out text of &lt;b&gt;; at most 30 loops" in page
    assert "dCE against all 30 loops (the full run), intervals over pieces of documents. ms a token is relative to the full run: " in page
    row = page.partition("<td>full run</td>")[2].partition("</tr>")[0]
    assert row.count("<td class='n'>reference</td>") == 2 and "…" not in row, (
        "the full run, which others are compared with, has no interval"
    )
    assert "median over 3 rounds of timing" in page and "median over 1 round of timing" in sweep_table(a_sweep(rounds=1))
    few = "on those tokens a rule may take fewer or more steps than its mean in this table, which is of all tokens"
    assert f"over rounds. Times are of a few tokens of each of 3 windows; {few}</h3>" in page and few not in sweep_table(a_sweep(rounds=0))
    assert f"over rounds. Times are of 8 tokens of each of 3 windows; {few}" in sweep_table(a_sweep(timed_tokens=8))
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


def test_tokens_are_ranked_without_intervals() -> None:
    """The list of single tokens says that its ranks have no intervals; without tokens there is no list."""
    entry = {"token": "a", "count": 7, "steps": 3.0, "loss": 1.0}
    page = token_table(a_point("kl:1", None, 3.0, hard={"tokens": [entry]}))
    assert "<h3>Single tokens, ranked by their mean steps without intervals: " in page and "<code>a</code>" in page
    assert token_table(a_point("kl:1", None, 3.0, hard={"tokens": []})) == ""
    assert "single tokens, ranked by their mean steps without intervals." in FIGURE["hard_tokens"].caption


def test_sweep_lines() -> None:
    """The command's table names its text and the default depth, and rules whose thresholds tell nothing."""
    printed = sweep_lines(a_sweep())
    assert printed.startswith(
        "step-1, 6,144 tokens (23 pieces of documents) from the report part of the held-out text; dCE against all 30 loops"
    )
    assert "; the default of 12 loops is the point fixed:12\n" in printed
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
    printed = summary([(3, 6), (5, 6)], (30, 30), groups, 12, 2.0, 1_000_000)
    assert printed.startswith("2 tokens in 2.00 s, prompt included (1000.0 ms a token); ")
    assert "; mean steps 4.0 of 30 in group 1 (layer 4), 6.0 of 30 in group 2 (layers 5-6); " in printed
    assert "; 56 % less loop work than the default of 12 loops; keys and values held 1.0 MB" in printed  # (4 + 2 x 6) / 36
    assert "; 150 % more loop work than the default of 12 loops;" in summary([(30, 30)], (30, 30), groups, 12, 1.0, 0)
    assert "; as much loop work as the default of 12 loops;" in summary([(12, 12)], (12, 12), groups, 12, 1.0, 0)
    assert "loop work" not in summary([()], (), [], 12, 1.0, 0) and summary([()], (), [], 12, 1.0, 0).startswith("1 token in")


def test_training_lines() -> None:
    """The progress line of training says at which step its validation loss was measured."""
    record = {"loss": 2.5, "tokens_per_s": 310.4, "loops": [4, 6]}
    assert progress_summary(record, None, 0) == "loss 2.5000  310 tok/s  loops 4/6"
    assert progress_summary(record, 2.6329, 40) == "loss 2.5000  val 2.6329 (step 40)  310 tok/s  loops 4/6"


def test_captions() -> None:
    """A caption that states a rule states it as the figure is drawn: fallbacks, cosines, both means of the ratio, ratios of times."""
    words = {entry.name: entry.caption for entry in FIGURES}
    assert "by its whole interval; where none does, at the one with the smallest rise" in words["steps_taken"]
    assert words["step_cosines"].startswith("The cosine of the angle between a step and the one before.")
    assert (
        "over the traced steps from k = 1 on (`k ≥ 1`" in words["drift_to_loop"] and "over all of them (`all k`" in words["drift_to_loop"]
    )
    timed = words["against_tau"]
    assert "Settings are timed in sets of up to 23, one set after the other; those of a set take turns with each other and" in timed
    assert "Times are relative to the full run: ms a token is a setting's time divided by the full run's in its own set and the" in timed
    through = "Random exits and oracles are decoded step by step through Python, not in the C loop that decodes fixed depths and the usual"
    assert through in words["tradeoff"] and "drawing its depths" not in words["tradeoff"]
    assert [len(party) for party in parties([str(i) for i in range(50)])] == [24, 24, 5], "with the full run in each"
    assert not any("over documents" in caption for caption in words.values()), "the unit is the run's own"


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
    for word in ("a logistic one on the lengths of steps", "`learned`", "bigram A model that knows only the token before"):
        assert word.replace("`", "") in " ".join(page.split()), word
    assert "the others compare states" not in page and "learned computes its own small head" in " ".join(page.split())
    for word in ("builtin", "fixed:4 takes 4 loops", "certified", "times the full run's median", "loop group", "Pareto front"):
        assert word in " ".join(page.split()), word
    assert "its 95 % interval over pieces of documents or windows, as the text beside it says." in glossary(
        True, units=["pieces of documents", "windows"]
    ) and "its 95 % interval over windows." in glossary(True, units=["windows"])
    plain = glossary(swept=False)
    assert "dCE" not in plain and "controller" not in plain and "bigram" in plain and "loop group" in plain and "nats" in plain


def test_training_names_its_text() -> None:
    """The page says what a model was trained on, and for one that was trained elsewhere that it is measured on other text."""
    assert a_run().training == "trained with Muon for 4,300 steps (1,000 tokens) on text of its own"
    assert a_run(converted=True).training.endswith("elsewhere, not on the text that it is measured on here")
    known = a_run(converted=True, trained_on="web pages").training
    assert known == (
        "trained with Muon for 4,300 steps (1,000 tokens, in stages whose batches differed) on web pages, not on the text that it is "
        "measured on here"
    )
    assert "<code>train</code> has the settings of one stage" in setup_section(a_run(converted=True))
    one = a_run(converted=True)
    one.last["trained_tokens"] = 4300 * one.config.train.batch_size * one.config.model.block_size
    assert "in stages" not in one.training and "one stage" not in setup_section(one)
    same = a_run(converted=True, trained_on="simple stories", same_kind=True).training
    assert same.endswith("on simple stories, and measured on text of that kind that it has not seen")
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
    told = replace(swept, commands=("--loops 30 --windows 3 --rounds 3 --few", "--rules cosine --loops 30 --windows 3 --rounds 3"))
    assert commands(a_run(sweep=told))[1:] == [f"twoscale sweep runs/one {settings}" for settings in told.commands], "as recorded"
    assert sweep_settings(RULES, POINT_TAUS, 30, 3, 3, False, True) == "--loops 30 --windows 3 --rounds 3 --no-controller --few"
    assert sweep_settings(("kl",), (0.5,), 30, 3, 3, True, False) == "--rules kl --taus 0.5 --loops 30 --windows 3 --rounds 3"
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


def test_what_it_was_measured_with() -> None:
    """The set-up tells the points, versions and machine that the file records apart from what the page was made with."""
    head = {"machine": "x86_64", "torch": "2.0", "threads": 2, "cpu": "A CPU"}
    old = measured_with(a_run(sweep=a_sweep(**head)))
    assert old == (
        "The sweep has 2 points, measured with torch 2.0, 2 threads, x86_64 (A CPU); the version of twoscale was not recorded; the command "
        "of the sweep is read from its points, this version may measure others."
    )
    new = measured_with(a_run(sweep=replace(a_sweep(**head, twoscale="0.1", python="3.11"), commands=("--loops 30",))))
    assert new == "The sweep has 2 points, measured with twoscale 0.1, Python 3.11, torch 2.0, 2 threads, x86_64 (A CPU)."
    page = setup_section(a_run(sweep=a_sweep(**head)))
    assert "This page was made with twoscale " in page and "not what it was trained on" not in page and measured_with(a_run()) == ""
    assert "<code>data</code> is the text that it is measured on, not what it was trained on" in setup_section(a_run(converted=True))


# -- several models ----------------------------------------------------------------------------------------------


def evaluated(text: str | None, size: int = 900) -> dict[str, Any]:
    known = {} if text is None else {"text": text}
    return {"tokens": 400, "windows": 4, "bytes": size, "source": "builtin", **known}


def test_what_may_be_compared_between_models(tmp_path: Path) -> None:
    """Losses of two models are comparable only on the same text, a token only with the same tokenizer, times never."""

    def words(a: dict[str, Any] | None, b: dict[str, Any] | None, tokenizers: tuple[str, str] = ("x", "x"), swept: bool = True) -> str:
        runs = []
        for name, evaluation, tokenizer in (("one", a, tokenizers[0]), ("two", b, tokenizers[1])):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "tokenizer.json").write_text(tokenizer)
            run = a_run(sweep=a_sweep() if swept else None)
            runs.append(replace(run, folder=tmp_path / name, evaluation=evaluation, config=replace(run.config, name=name)))
        return comparison_words(runs)

    different = words(evaluated("p", 900), evaluated("q", 200), ("x", "y"))
    assert different == (
        "Nothing is to be compared between the models: they were measured on different text (one on 400 tokens (4 windows) spread over all "
        "held-out text of builtin, two on 400 tokens (4 windows) spread over all held-out text of builtin), and their tokenizers differ, "
        "and each model was timed in a session of its own."
    )
    assert "bits per byte" not in different and "tokenizers" not in words(evaluated("p"), evaluated("q"))
    assert words(evaluated(None), evaluated(None)).startswith(
        "Nothing is to be compared between the models: it is not recorded that they were measured on the same text (one on"
    )
    assert words(None, None, swept=False).endswith("it is not recorded that they were measured on the same text.")
    same = words(evaluated("p"), evaluated("p"))
    assert same == (
        "The loss by loops of the models is of the same text (900 bytes of builtin) and may be compared between them. Nothing else may: "
        "other losses are of other tokens, and each model was timed in a session of its own."
    )
    assert "between them in bits per byte (not a token: the tokenizers differ). Nothing else" in words(
        evaluated("p"), evaluated("p"), ("x", "y")
    )
    assert "session" not in words(evaluated("p"), evaluated("p"), swept=False) and comparison_words([a_run()]) == ""


def test_units_of_a_page() -> None:
    """The glossary names the units of all intervals on the page, of sweeps and calibrations."""
    runs = [a_run(sweep=a_sweep(), calibration=a_calibration()), a_run(sweep=a_sweep(by="windows")), a_run()]
    assert units_of(runs) == ["pieces of documents", "windows", "documents"]


# -- the explorer ------------------------------------------------------------------------------------------------


def test_explorer_words() -> None:
    """The race tells loop work against the default depth, speed against the named full run, and where the texts differ."""
    pytest.importorskip("plotly")
    from twoscale.explore.figures import calibrated_mark, inspection_words, lane_words, legend, race_legend, race_words
    from twoscale.explore.session import Inspection, Lane, Race

    def lane(ids: list[int], steps: tuple[int, ...], ms: float) -> Lane:
        n = len(ids) - 1
        return Lane([1], ids, ["x"] * len(ids), [None, *[steps] * n], seconds=1.0 + ms * (n - 1) / 1e3, first=1.0)

    quick, full = lane([1, 2, 3, 4], (6, 3), 10.0), lane([1, 2, 3, 4], (30, 30), 25.0)
    words = race_words(Race(quick, full, (30, 30), [1, 2], 12))
    assert words == "67 % less loop work than the default of 12 loops · **2.50x** as fast as all 30 loops · the same text so far (3 tokens)"
    words = race_words(Race(lane([1, 2, 9], (24, 24), 30.0), full, (30, 40), [1, 2], 12))
    assert (
        words
        == "100 % more loop work than the default of 12 loops · **0.83x** as fast as all 30 / 40 loops · the texts part at new token 2"
    )
    assert race_words(Race(lane([1], (), 0.0), full, (30, 30), [1, 2], 12)) == ""
    assert lane_words(quick, [1, 2]) == "**3** tokens · **10.0 ms** a token · first after 1.00 s · mean steps **4.0**"
    assert lane_words(lane([1], (), 0.0), [1, 2]) == "reading the prompt …" and "<span>30 steps</span>" in legend(1, 30)
    assert "<span>1 step</span>" in legend(1, 30) and "ramp" not in legend(4.0, 4.0) and "4 steps for every token" in legend(4.0, 4.0)
    assert "3.7 steps" in legend(3.667, 4.333, "; more") and "4.3 steps; more" in legend(3.667, 4.333, "; more")
    race = Race(lane([1, 2, 3], (6, 3), 1.0), full, (30, 30), [1, 2], 12)
    assert race.scale == (4.5, 4.5) and "4.5 steps for every token, mean over groups; dashed" in race_legend(race)
    mark = calibrated_mark("kl", [0.1, None, 1e-9], -6.0, 2.0, ["4", "5-6", "7"])
    assert "title='group 1 (layer 4): 0.1'" in mark
    assert mark.count("▲") == 2 and "kl, calibrated: 0.1, all loops, 1e-09 (group by group)" in mark
    assert calibrated_mark("kl", [None, 1e9], -6.0, 2.0, ["4", "5-6"]) == ""
    none = torch.zeros(0)
    found = Inspection(1, "x", "y", ["4", "5-6"], (3, 1), none, [], none, none, none, [])
    assert inspection_words(found).endswith("steps taken: 3 in group 1 (layer 4), 1 in group 2 (layers 5-6)")
    one = Race(lane([1, 2], (6, 3), 10.0), lane([1, 2], (1, 1), 25.0), (1, 1), [1, 2], 12)
    assert race_words(one).endswith("as fast as its 1 loop · the same text so far (1 token)")
