"""The explorer: what it computes equals the engine and the geometry; the page works in a real browser."""

import dataclasses
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import twoscale
from browsing import check_console_and_network, leaving, until
from conftest import CommandLine
from twoscale import exits
from twoscale.config import UserError
from twoscale.engine import SamplingParams
from twoscale.engine.request import SamplingKey
from twoscale.engine.sample import sample
from twoscale.explore.session import PROMPT, Other, Session, load_prompts

gradio = pytest.importorskip("gradio", reason="gradio is not installed (the extra twoscale[explore])")

HOW = {"kv": "exact", "new": 12, "temperature": 0.7, "seed": 3}


@pytest.fixture(scope="module")
def session(loaded) -> Session:  # type: ignore[no-untyped-def]
    model, tokenizer = loaded
    return Session(model, tokenizer, "nano", ({0: exits.Acceleration(2.0)}, 8))


def test_race(session: Session) -> None:
    """Both texts are what `generate` writes, with its steps; the first difference and the mean steps follow from them."""
    rule = exits.StepNorm(2.0)
    for race in session.race("the loop", rule, 6, **HOW):  # type: ignore[arg-type]
        assert race.quick.new + race.full.new > 0
    ids = session.tokenizer.encode("the loop")
    for lane, exit in ((race.quick, rule), (race.full, None)):
        want = twoscale.generate(session.model, [ids], 12, exit=exit, loops=6, temperature=0.7, seed=3, stop=(session.tokenizer.eot,))
        assert lane.done and lane.ids == ids + want.tokens[0]
        assert lane.steps == [None, *want.prompt_steps[0][:-1], *want.steps[0]]
        assert "".join(lane.pieces) == session.tokenizer.decode(lane.ids)
    taken = torch.tensor([s for s in race.quick.steps[len(ids) :] if s is not None], dtype=torch.float64)
    layers = torch.tensor(session.layers, dtype=torch.float64)
    assert race.quick.mean_steps(race.layers) == pytest.approx(float((taken * layers).sum() / (len(taken) * layers.sum())))
    assert race.mean_loops == session.model.config.mean_loops and race.loops == (6, 6)
    differs = [i for i, (a, b) in enumerate(zip(race.quick.ids, race.full.ids, strict=False)) if a != b]
    assert race.first_difference == (differs[0] if differs else None)
    means = [sum(s) / len(s) for s in race.quick.steps[len(ids) :] if s is not None]
    assert race.scale == (min(means), max(means))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_full_run_on_the_same_text(session: Session, temperature: float) -> None:
    """Marked are the tokens that the full run, given the same text before them and the same random number, would not have chosen."""
    rule, how = exits.StepNorm(6.0), HOW | {"temperature": temperature}
    *_, race = session.race("the loop", rule, 6, **how)  # type: ignore[arg-type]
    lane, first, want = race.quick, len(race.quick.prompt), {}
    for i in range(first, len(lane.ids)):
        with_exits = twoscale.forward(session.model, [lane.ids[:i]], exit=rule, loops=6, seed=3).logits[0, -1].softmax(dim=-1)
        assert lane.answers[i - first].chosen == pytest.approx(float(with_exits[lane.ids[i]]), abs=1e-4)
        one = twoscale.forward(session.model, [lane.ids[:i]], loops=6, seed=3).logits[0, -1]
        key = SamplingKey(SamplingParams(temperature, seed=3), token_index=i - first)
        (token,) = sample(one[None], [key]).tokens
        if token != lane.ids[i]:
            shares = one.softmax(dim=-1)
            want[i] = (session.tokenizer.decode([token]), float(shares[token]), float(shares[lane.ids[i]]))
    assert race.others is not None and list(race.others) == list(want)
    for i, other in race.others.items():
        assert other.token == want[i][0] and (other.share, other.kept) == pytest.approx(want[i][1:], abs=1e-4)
    if race.first_difference is not None:
        assert race.first_difference in race.others, "up to the first difference the text is the same"


def test_sentences_on_the_same_text(session: Session) -> None:
    """No difference is claimed before both texts are written; then the marked tokens are counted, or said to be none."""
    from twoscale.explore import figures

    races = list(session.race("the loop", exits.StepNorm(6.0), 6, **HOW))  # type: ignore[arg-type]
    race = races[-1]
    assert dataclasses.replace(race, others=None).others is None and figures.others_html(dataclasses.replace(race, others=None)) == ""
    assert "would have chosen every one of the 12 tokens" in figures.others_html(dataclasses.replace(race, others={}))
    one = dataclasses.replace(race, others={len(race.quick.prompt): Other("<b>", 0.5, 0.25, 0.125)})
    page, words = figures.others_html(one), figures.other_words(one)[len(race.quick.prompt)]
    assert "At 1 of 12 tokens all loops" in page and "&lt;b&gt;" in page and "<b>" not in page
    assert words == "all loops, on this text, would have chosen “<b>” (50%; this one has 25% there, 12% with exits)"
    assert "&lt;b&gt;" in figures.tokens_html(race.quick, race.scale, differs=figures.other_words(one))


def test_inspection(session: Session) -> None:
    """The pass that chose a token: its geometry is the trace's, the lens is the head on the state, the last row the engine's answer."""
    *_, race = session.race("the loop", exits.StepNorm(2.0), 6, **HOW)  # type: ignore[arg-type]
    lane, index = race.quick, len(race.quick.prompt) + 2
    found = session.inspect(lane, index, 6, seed=3)
    traced = twoscale.trace(session.model, [lane.ids[:index]], loops=6, seed=3)
    for g, states in enumerate(traced.states):
        mine = states[:, :, -1:]
        assert torch.allclose(found.norms[g], twoscale.geometry.step_norms(mine).flatten())
        assert torch.allclose(found.cosines[g], twoscale.geometry.step_cosines(mine).flatten())
        assert torch.allclose(found.accelerations[g], twoscale.geometry.accelerations(mine).flatten())
        with torch.no_grad():
            shares = torch.softmax(session.model.head(session.model.groups[g].output(states[4, 0, -1])), dim=-1)
        assert found.lens[g][3].shares[0] == pytest.approx(float(shares.max()), rel=1e-4)
        assert found.lens[g][3].tokens[0] == session.tokenizer.decode([int(shares.argmax())])
        assert found.lens[g][3].chosen == pytest.approx(float(shares[lane.ids[index]]), rel=1e-4)
    shares = twoscale.forward(session.model, [lane.ids[:index]], exit=exits.StepNorm(2.0), loops=6, seed=3).logits[0, -1].softmax(dim=-1)
    assert found.answer is not None and found.answer.chosen == pytest.approx(float(shares[lane.ids[index]]), abs=1e-4)
    assert found.answer.ids == shares.topk(5).indices.tolist()
    assert session.inspect(lane, 2, 6).answer is None, "nobody wrote a token of the prompt"
    assert found.taken == lane.steps[index] and found.path.shape == (len(session.groups), 7, 3)
    with pytest.raises(UserError, match="first token"):
        session.inspect(lane, 0, 6)


def test_read_through_the_layers_behind(session: Session) -> None:
    """What is read after step k of the last group is the model's answer where this token leaves after k steps and the others after all."""
    *_, race = session.race("the loop", None, 6, **HOW)  # type: ignore[arg-type]
    lane, index = race.full, len(race.full.prompt) + 2
    found = session.inspect(lane, index, 6, seed=3)
    depths = torch.full((1, index, len(session.groups)), 6)
    for k in range(1, 7):
        depths[0, -1, -1] = k
        out = twoscale.forward(session.model, [lane.ids[:index]], exit=exits.Oracle(depths.clone()), loops=6, seed=3)
        shares = out.logits[0, -1].softmax(dim=-1)
        assert found.said[-1][k - 1].shares == pytest.approx(shares.topk(5).values.tolist(), abs=1e-4)
        assert found.said[-1][k - 1].chosen == pytest.approx(float(shares[lane.ids[index]]), abs=1e-4)
    assert found.answer is not None and found.said[-1][-1].shares == pytest.approx(found.answer.shares, abs=1e-4)


def test_bounds(session: Session) -> None:
    """Rules by name, the calibrated one, and what is too long or empty."""
    assert session.rules()[0] == "calibrated" and "gate" not in session.rules()
    assert session.rule("calibrated", 1.0) == {0: exits.Acceleration(2.0)}
    for name in session.rules()[1:]:
        assert session.rule(name, 0.25) == exits.parse(f"{name}:0.25")
    for text, word in (("", "empty"), ("the loop " * 500, "shorten")):
        with pytest.raises(UserError, match=word):
            list(session.race(text, None, 6, **HOW))  # type: ignore[arg-type]


def test_page_words(session: Session) -> None:
    """What a model writes cannot become markup, and calibrated thresholds are marked on the slider."""
    from twoscale.explore import figures
    from twoscale.explore.controls import threshold_words

    evil = "<script>alert(1)</script>**bold**"
    *_, race = session.race("the loop", exits.StepNorm(2.0), 6, **HOW)  # type: ignore[arg-type]
    lane = dataclasses.replace(race.quick, pieces=[evil] * len(race.quick.pieces))
    shown = figures.tokens_html(lane, race.scale)
    assert "<script" not in shown and "&lt;script&gt;" in shown
    found = session.inspect(lane, 5, 6)
    said = [[dataclasses.replace(s, tokens=[evil] * len(s.tokens)) for s in group] for group in found.said]
    found = dataclasses.replace(found, said=said, lens=said, answer=said[0][0])
    table, words = figures.said_html(found), figures.inspection_words(found)
    assert "<script" not in table + words and "&lt;script&gt;" in table and "&lt;script&gt;" in words and "**" not in words
    assert "▲" in threshold_words(session, "acceleration", 0.0) and "▲" not in threshold_words(session, "kl", 0.0)


@pytest.mark.parametrize("changes", [{}, {"block_size": 16, "mean_loops": 1}], ids=["as trained", "tiny context"])
def test_defaults_fit(session: Session, changes: dict[str, int]) -> None:
    """What the page offers at first can be generated, on small contexts and shallow loops too."""
    from twoscale.explore.app import build
    from twoscale.explore.page import Settings

    config = dataclasses.replace(session.model.config, **changes)  # type: ignore[arg-type]
    model = twoscale.LoopedGPT(config)
    small = Session(model, session.tokenizer, "small")
    first = Settings.first(small)
    shown = {b.elem_id: b for b in build([small]).blocks.values() if getattr(b, "elem_id", None)}
    for name in ("new", "loops"):
        assert shown[name].minimum <= shown[name].value <= shown[name].maximum
    assert len(small.prompt(first.prompt, first.new)) > 0 and shown["new"].value == first.new
    assert "data-i" in shown["quick"].value and "<table" in shown["said"].value, "an example is there already"
    assert not shown["settings"].open


def test_addresses(session: Session) -> None:
    """An address sets what it names; what is unknown or out of range is left as it is; without a setting nothing is asked for."""
    from twoscale.explore.page import Settings

    first = Settings.first(session)
    assert first.asked({}, session) is None and first.asked({"__theme": "dark"}, session) is None
    asked = {"prompt": "a & b", "rule": "kl", "power": "-2.5", "loops": "9", "kv": "last", "new": "5", "temperature": "0", "seed": "7"}
    found = first.asked(asked | {"speculate": "draft:4"}, session)
    assert found is not None and [str(v) for v in found.values] == ["a & b", "kl", "-2.5", "9", "last", "5", "0.0", "7", "draft:4"]
    wrong = {"rule": "nothing", "power": "9", "loops": "1e9", "kv": "x", "new": "0", "temperature": "nan", "seed": "-1", "speculate": "x"}
    assert first.asked(wrong, session) == first


def test_speculation(session: Session) -> None:
    """Speculation changes neither text nor steps; tokens of one pass are marked, and the guesses are counted as the engine counts them."""
    from twoscale.explore import figures

    how, rule = HOW | {"temperature": 0.0}, exits.StepNorm(2.0)
    *_, plain = session.race("the loop", rule, 6, **how)  # type: ignore[arg-type]
    *_, race = session.race("the loop", rule, 6, **how, speculate="draft:4")  # type: ignore[arg-type]
    assert plain.others == race.others and "underlined" not in figures.race_legend(plain)
    want = twoscale.generate(session.model, [race.full.prompt], 12, loops=6, seed=3, speculate="draft:4", stop=(session.tokenizer.eot,))
    assert race.full.guesses == (want.speculation.drafted, want.speculation.accepted) and want.speculation.drafted > 0
    for a, b in ((plain.quick, race.quick), (plain.full, race.full)):
        assert (a.ids, a.steps, a.pieces) == (b.ids, b.steps, b.pieces) and a.passes == list(range(a.new)) and len(b.passes) == b.new
        together = sum(figures.guessed_together(b, i) for i in range(b.new))
        assert together == b.new - len(set(b.passes)) <= b.guesses[1]
        assert figures.tokens_html(b, None).count(" wave") == together and "guess" not in figures.lane_words(a, race.layers)
        assert f"{b.guesses[1]} of {b.guesses[0]:,} guess" in figures.lane_words(b, race.layers)
    assert "wavefront" not in session.speculations(), "it needs one loop group"


def test_prompts(tmp_path: Path, session: Session) -> None:
    """Prompts that come with a model are read within bounds; the page opens with the first. A file of something else is refused."""
    path = tmp_path / "prompts.json"
    assert load_prompts(path) == () and session.prompts == (PROMPT,)
    path.write_text(json.dumps(["Once upon a time", "x" * 500, *"abcdefgh"]))
    found = load_prompts(path)
    assert found[0] == "Once upon a time" and len(found) == 6 and len(found[1]) == 120
    offered = Session(session.model, session.tokenizer, "nano", prompts=found)
    from twoscale.explore.page import Settings

    assert Settings.first(offered).prompt == "Once upon a time"
    for wrong in ('{"a": 1}', "[1]", '[" "]'):
        path.write_text(wrong)
        with pytest.raises(UserError, match="list of strings"):
            load_prompts(path)


def test_bad_input(tmp_path: Path, cli: CommandLine, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder, no tokenizer, no such port, no Gradio: one line."""
    for words, says in (
        ((tmp_path / "nothing",), "no folder"),
        ((trained, "--port", "99999"), "--port"),
    ):
        code, _, err = cli("explore", *words)
        assert code == 2 and says in err and err.count("\n") == 1, err
    monkeypatch.setitem(sys.modules, "twoscale.explore.app", None)
    code, _, err = cli("explore", trained)
    assert code == 2 and "pip install -c constraints.txt -e '.[explore]'" in err


@pytest.mark.parametrize("model", [pytest.param("trained", marks=pytest.mark.long), "bundled"])
def test_in_a_browser(model: str, trained: Path, browser) -> None:  # type: ignore[no-untyped-def]
    """It opens with an example; type, Enter, text streams and older panels go; a click shows a token; the address brings it all back; light
    and dark, desktop and phone; nothing on the console, nothing asked of the network."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    command = [sys.executable, "-m", "twoscale", "explore", str(trained) if model == "trained" else model, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        timer = threading.Timer(240, server.kill)
        timer.start()
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:"), server.stderr.read() if server.stderr else ""

            def wait(selector: str) -> list:  # type: ignore[type-arg]
                return until(browser, lambda b: b.find_elements(By.CSS_SELECTOR, selector))

            def text(selector: str) -> str:
                return "".join(e.text for e in browser.find_elements(By.CSS_SELECTOR, selector))

            browser.get(address)
            wait("#quick .tok:not(.given)")
            wait("#said tr.left")
            wait("#said tr.answer")
            wait("#path .js-plotly-plot .trace")
            assert "was chosen" in text("#about") and not any(e.is_displayed() for e in browser.find_elements(By.ID, "rule")), "folded"
            (box,) = wait("#prompt textarea")
            box.clear()
            box.send_keys("the dog and the cat", Keys.ENTER)
            until(browser, lambda b: "Click a token" in text("#about") and not b.find_elements(By.ID, "said"))
            until(browser, lambda b: text("#quick .given") == "the dog and the cat" and wait("#full .tok:not(.given)"))
            until(browser, lambda b: not b.find_elements(By.CSS_SELECTOR, ".caret") and "all loops" in text("#others"))
            assert "loop work" in text("#summary") and "ms a token" in text("#quick-words").replace("*", "")
            written, marked = text("#quick .text"), text("#others")
            assert "prompt=the+dog+and+the+cat" in browser.current_url and "seed=0" in browser.current_url
            wait("#quick .tok:not(.given)")[3].click()
            wait("#quick .on")
            for selector in ("#said tr.left", "#path .js-plotly-plot .trace", "#curve-0 .js-plotly-plot .trace"):
                wait(selector)
            wait("#kind input")[1].click()
            wait("#path .js-plotly-plot canvas, #path .js-plotly-plot .gl-container")
            with leaving(browser):
                browser.get(browser.current_url)
                until(browser, lambda b: text("#quick .text") == written and text("#others") == marked)
            wait("#dark")[0].click()
            assert "dark" in browser.find_element(By.TAG_NAME, "body").get_attribute("class")
            browser.set_window_size(500, 900)
            width = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
            assert width[0] <= width[1], "nothing is wider than a phone"
            browser.set_window_size(1280, 1600)
            with leaving(browser):
                next(a for a in wait("a, nav button, .nav-holder button") if "Task: hops" in a.text).click()
                wait("#answers .answer[data-i]")
                wait("#walk .graph .hop")
            check_console_and_network(browser, address)
        finally:
            timer.cancel()
            server.terminate()
