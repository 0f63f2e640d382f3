"""The explorer: what it computes equals the engine and the geometry; the page works in a real browser."""

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import twoscale
from browsing import check_console_and_network
from conftest import CommandLine
from twoscale import exits
from twoscale.config import UserError
from twoscale.explore.session import Session

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


def test_inspection(session: Session) -> None:
    """The pass that chose a token: its geometry is the trace's, and after the last step the lens of the last group speaks."""
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
        assert found.said[g][3].shares[0] == pytest.approx(float(shares.max()), rel=1e-4)
        assert found.said[g][3].tokens[0] == session.tokenizer.decode([int(shares.argmax())])
        assert found.said[g][3].chosen == pytest.approx(float(shares[lane.ids[index]]), rel=1e-4)
    assert found.taken == lane.steps[index] and found.path.shape == (len(session.groups), 7, 3)
    with pytest.raises(UserError, match="first token"):
        session.inspect(lane, 0, 6)


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
    shown = figures.tokens_html(lane, race.loops)
    assert "<script" not in shown and "&lt;script&gt;" in shown
    found = session.inspect(lane, 5, 6)
    said = [[dataclasses.replace(s, tokens=[evil] * len(s.tokens)) for s in group] for group in found.said]
    found = dataclasses.replace(found, said=said)
    table, words = figures.said_html(found), figures.inspection_words(found)
    assert "<script" not in table + words and "&lt;script&gt;" in table and "&lt;script&gt;" in words and "**" not in words
    assert "▲" in threshold_words(session, "acceleration", 0.0) and "▲" not in threshold_words(session, "kl", 0.0)


@pytest.mark.parametrize("changes", [{}, {"block_size": 16, "mean_loops": 1}], ids=["as trained", "tiny context"])
def test_defaults_fit(session: Session, changes: dict[str, int]) -> None:
    """What the page offers at first can be generated, on small contexts and shallow loops too."""
    from twoscale.explore.page import PROMPT, build

    config = dataclasses.replace(session.model.config, **changes)  # type: ignore[arg-type]
    model = twoscale.LoopedGPT(config)
    small = Session(model, session.tokenizer, "small")
    sliders = {b.elem_id: b for b in build(small).blocks.values() if getattr(b, "elem_id", None) in ("new", "loops")}
    for slider in sliders.values():
        assert slider.minimum <= slider.value <= slider.maximum
    if len(small.tokenizer.encode(PROMPT)) < small.room:
        assert len(small.prompt(PROMPT, int(sliders["new"].value))) > 0


def test_bad_input(tmp_path: Path, cli: CommandLine, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder, no tokenizer, no such port, no Gradio: one line."""
    for words, says in (
        ((tmp_path / "nothing",), "no folder"),
        ((trained, "--port", "99999"), "--port"),
    ):
        code, _, err = cli("explore", *words)
        assert code == 2 and says in err and err.count("\n") == 1, err
    monkeypatch.setitem(sys.modules, "twoscale.explore.page", None)
    code, _, err = cli("explore", trained)
    assert code == 2 and "pip install -c constraints.txt -e '.[explore]'" in err


def test_in_a_browser(trained: Path, browser) -> None:  # type: ignore[no-untyped-def]
    """Type, Enter, text streams; click a token, figures and table appear; nothing on the console, nothing asked of the network."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
    from selenium.webdriver.support.ui import WebDriverWait

    command = [sys.executable, "-m", "twoscale", "explore", str(trained), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        timer = threading.Timer(120, server.kill)
        timer.start()
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:"), server.stderr.read() if server.stderr else ""

            def wait(selector: str) -> list[object]:
                return WebDriverWait(browser, 60, 0.1).until(lambda b: b.find_elements(By.CSS_SELECTOR, selector))

            browser.get(address)
            (box,) = wait("#prompt textarea")
            assert "Watch" in browser.find_element(By.TAG_NAME, "h2").text
            box.clear()
            box.send_keys("the loop turns", Keys.ENTER)
            wait("#quick .tok:not(.given)")
            wait("#full .tok:not(.given)")
            WebDriverWait(browser, 60, 0.1).until(lambda b: not b.find_elements(By.CSS_SELECTOR, ".caret"))
            assert "the default of 3 loops" in browser.find_element(By.ID, "summary").text
            WebDriverWait(browser, 20, 0.2).until(lambda b: "ms a token" in b.find_element(By.ID, "quick-words").text.replace("*", ""))
            wait("#quick .tok:not(.given)")[3].click()
            wait("#said tr.left")
            box = wait("#prompt textarea")[0]
            browser.execute_script(
                "window.carets = 0;"
                "new MutationObserver(() => { window.carets += document.querySelectorAll('.caret').length; })"
                ".observe(document.body, {childList: true, subtree: true});"
            )  # a short text may be complete before the next look from here
            box.send_keys(" again", Keys.ENTER)
            WebDriverWait(browser, 60, 0.1).until(lambda b: b.execute_script("return window.carets"))
            browser.find_element(By.ID, "stop").click()

            def again(b) -> bool:  # type: ignore[no-untyped-def]
                return "again" in "".join(t.text for t in b.find_elements(By.CSS_SELECTOR, "#quick .given"))

            WebDriverWait(browser, 60, 0.1).until(again)
            wait("#quick .given")[-1].click()
            wait("#quick .given.on")
            for selector in ("#path .js-plotly-plot .trace", "#curve-0 .js-plotly-plot .trace", "#curve-2 .js-plotly-plot .trace"):
                wait(selector)
            assert len(wait("#said tr.left")) == 2 and "was chosen" in browser.find_element(By.ID, "about").text
            wait("#kind input")[1].click()
            wait("#path .js-plotly-plot canvas, #path .js-plotly-plot .gl-container")
            check_console_and_network(browser, address)
        finally:
            timer.cancel()
            server.terminate()
