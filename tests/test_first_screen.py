"""The first screen of a page: what is missing and in which order to make it, which text its picture is of, what came with the model."""

from dataclasses import replace

from constructed import a_calibration, a_point, a_record, a_run, a_sweep
from twoscale.report.overview import LOOPS, advice_of, card, missing, missing_html, picture, shipped_words, why_not_of
from twoscale.report.page import claims_of, figure_html
from twoscale.report.registry import FIGURES
from twoscale.tradeoff.task_commands import TEXT_LOOPS

FIGURE = {entry.name: entry for entry in FIGURES}


def test_what_is_missing_and_how_to_make_it() -> None:
    """The page names what was not measured with the command that measures it, and nothing that was."""
    assert [command for _, command in missing(a_run())] == [
        "twoscale trace runs/one", "twoscale calibrate runs/one", "twoscale sweep runs/one",
    ]  # fmt: skip
    page = missing_html(a_run())
    assert "run these in this order, then <code>twoscale report runs/one</code>:</p><ol><li>" in page and page.endswith("</ol></div>")
    assert "`twoscale sweep runs/one` measures what every exit rule saves" in advice_of(a_run()) and picture(a_run()) is None
    whole = a_run(sweep=a_sweep(), calibration=a_calibration())
    assert [command for _, command in missing(whole)] == ["twoscale trace runs/one"] and advice_of(whole).startswith("Use ")
    assert "run this, then " in missing_html(whole) and "<ul><li>trajectories and limits: <code>twoscale trace" in missing_html(whole)
    assert "twoscale sweep" not in missing_html(whole) and LOOPS == TEXT_LOOPS
    rows = [{"kind": kind, "tokens": 40, "steps": 3.0, "low": 3.0, "high": 3.0} for kind in ("name", "space")]
    for hard, command in (
        ({}, "mv runs/one/sweep.jsonl runs/one/sweep-old.jsonl; twoscale sweep runs/one"),
        ({"kinds": rows[:1]}, "twoscale sweep runs/one --windows 80"),
        ({"kinds": rows}, None),
    ):
        swept = a_sweep(a_point("kl:1", (3.0, 3.1, 3.2), 3.0, hard=hard), asked_windows=20)
        run = a_run(sweep=swept, calibration=a_calibration())
        found = dict(missing(run)).get("which kinds of tokens take longest")
        assert found == command, "a file of an earlier version, too few tokens, and all there"
        alone = [words for _, words in missing(replace(run, calibration=None))]
        sweep = command or "twoscale sweep runs/one --rules kl --taus 0 --loops 30 --windows 20 --rounds 3 --no-controller"
        assert alone[1:] == ["twoscale calibrate runs/one", sweep], "a calibration is followed by one sweep"


def test_a_calibration_is_followed_by_its_sweep() -> None:
    """Where there is a sweep and no calibration, the thresholds are calibrated at the sweep's loops and then swept with its settings, so
    that the file goes on; where both are there, neither is asked for."""
    told = replace(a_sweep(), commands=("--loops 30 --windows 3 --rounds 3 --few", "--rules cosine --loops 30 --windows 3 --rounds 3"))
    assert missing(a_run(sweep=told))[1:] == [
        ("certified thresholds", "twoscale calibrate runs/one"),
        (
            "the same thresholds in the sweep, which measures only what is new",
            "twoscale sweep runs/one --loops 30 --windows 3 --rounds 3 --few",
        ),
    ]
    other = replace(told, header=told.header | {"loops": 20})
    assert missing(a_run(sweep=other))[1][1] == "twoscale calibrate runs/one --loops 20"
    assert len(missing(a_run(sweep=told, calibration=a_calibration()))) == 1


def test_the_loops_of_training() -> None:
    """The page's claim (c) knows the run's schedule of loops, unless its training is not known."""
    run = a_run()
    run.geometry[:] = [a_record(step=10), a_record()]
    grown = replace(run, config=replace(run.config, train=replace(run.config.train, loops_ramp=50)))
    assert "the mean number of loops in training differed" in claims_of(grown)[2].text
    assert "differed" not in claims_of(run)[2].text and "differed" not in claims_of(replace(grown, recipe=False))[2].text
    run.last["trained_tokens"] = 1
    staged = claims_of(replace(grown, converted=True))[2]
    assert "; trained in stages)." in staged.text and "the number of loops is recorded for one stage only" in staged.measured
    assert "mean number of loops" not in staged.text + staged.measured and "stages" not in claims_of(grown)[2].text


def test_the_first_screen_names_its_text() -> None:
    """The picture names the sweep's text, the sentence the calibration's: the same name may have two values, of two texts."""
    run = a_run(sweep=a_sweep(a_point("fixed:5", (4.9, 5.0, 5.1), 5.0, setting=5.0)), calibration=a_calibration(rules=[None]))
    title, figure = picture(run)  # type: ignore[misc]
    assert title == (
        "Loss on 6,144 tokens (23 pieces of documents) from the report part of the held-out text against the time of cached decoding of a "
        "few tokens of each of 3 windows of that text. Lower and further left is better; oracles see the labels."
    )
    sight = a_point("oracle-stay:0.01", (9.0, 9.0, 9.0), 9.0, setting=0.01)
    seen = picture(a_run(sweep=a_sweep(sight)))[0]  # type: ignore[index]
    assert seen.endswith(
        "see the labels. They are decoded step by step through Python and not in the C loop, so on small models their times are several "
        "times too long."
    )
    counted = picture(a_run(sweep=a_sweep(sight, rounds=2)))[0]  # type: ignore[index]
    assert counted == (
        "Loss against counted FLOPs, measured on 6,144 tokens (23 pieces of documents) from the report part of the held-out text. Lower "
        "and further left is better; oracles see the labels."
    )
    assert "on other documents (800 tokens of the report part) the difference was +0.0010" in advice_of(run)
    (reference,) = (text for trace in figure.data if trace.name == "full run" for text in trace.text)
    assert reference == "all 30 loops: 30.00 steps, dCE 0 (the reference)"
    better = a_run(
        sweep=a_sweep(a_point("fixed:4", (3.0, 4.0, 5.0), 4.0, -0.01, setting=4.0), *run.sweep.points[2:]), calibration=run.calibration
    )  # type: ignore[union-attr]
    assert "lies lower and further left than fixed:5 (" in card(better, [], "", "") and why_not_of(run) == ""


def test_captions_say_what_times_are_of() -> None:
    """A figure that shows times says of which tokens they are; one of losses and steps alone, or of a sweep without times, does not."""
    for name, rounds, timed in (("tradeoff", 3, True), ("against_tau", 3, True), ("steps_taken", 3, False), ("tradeoff", 0, False)):
        page = figure_html(FIGURE[name], a_run(sweep=a_sweep(rounds=rounds, timed_tokens=8)), [], "figures", "")
        assert ("; times are of cached decoding of 8 tokens of each of 3 windows of that text. Intervals of losses" in page) == timed
        assert ("Measured on 6,144 tokens (23 pieces of documents) from the report part of the held-out text. " in page) != timed


def test_measurements_that_came_along() -> None:
    """Where a sweep came with the model the page says so and names the machine of its times; otherwise it says nothing."""
    assert shipped_words(a_run(sweep=a_sweep())) == "" and shipped_words(a_run(shipped=True)) == ""
    words = shipped_words(a_run(sweep=a_sweep(cpu="A CPU", threads=2), shipped=True))
    assert words.startswith("These measurements came with the model and were not made here: times are of A CPU, 2 threads.")


def test_one_colour_is_a_sentence() -> None:
    """A map of one colour is a sentence instead; with two verdicts it is drawn."""
    entry = next(e for e in FIGURES if e.name == "verdict_map")
    one = {"verdicts": [[0, 0], [0, 0]], "verdict_names": ["settling", "drifting"], "tokens": ["a", "b"]}
    run = a_run()
    assert "All 2 tokens of the sequence are settling in every group" in entry.instead(replace(run, sequence=one))
    page = figure_html(entry, replace(run, sequence=one), [], "figures", "")
    assert "no map to draw." in page and "href" not in page and "print" not in page, "and there is no file to link"
    assert entry.instead(replace(run, sequence=one | {"verdicts": [[0, 0], [0, 1]]})) == ""


def test_no_circle_without_a_point() -> None:
    """Every point of the Pareto front and the recommended one is drawn as a point of its own family, on the page's figures."""
    sweep = a_sweep(a_point("fixed:4", (3.9, 4.0, 4.1), 4.0, setting=4.0), a_point("kl:0.1", (5.0, 5.1, 5.2), 5.0, 0.002, setting=0.1))
    run = a_run(sweep=sweep)
    for title, figure in [*FIGURE["tradeoff"].page(run), picture(run)]:  # type: ignore[misc]
        circles = [t for t in figure.data if t.marker.symbol == "circle-open"]
        points = {(x, y) for t in figure.data if t not in circles for x, y in zip(t.x, t.y, strict=True)}
        assert circles and all((x, y) in points for t in circles for x, y in zip(t.x, t.y, strict=True)), title
