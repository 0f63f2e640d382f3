"""The explorer on tasks: what it draws is what the engine and the task say; the page works in a real browser."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

import twoscale
from browsing import check_console_and_network, leaving, until
from conftest import CommandLine
from twoscale import exits
from twoscale.cli.explore import open_session
from twoscale.config import UserError
from twoscale.config.task import CarryConfig, HopsConfig
from twoscale.interop.load import IN_THE_PACKAGE
from twoscale.model import LoopedGPT
from twoscale.report.style import step_colour, step_share
from twoscale.tasks import Carry, Hops
from twoscale.tasks.file import load_task
from twoscale.tasks.measure import predictions
from twoscale.tasks.task import HELD_OUT
from twoscale.train.run import start_run

gradio = pytest.importorskip("gradio", reason="gradio is not installed (the extra twoscale[explore])")

from twoscale.explore import task_figures, task_page  # noqa: E402
from twoscale.explore.answers import Problem, ReadOut, Solved, draw, solve  # noqa: E402
from twoscale.explore.app import build  # noqa: E402
from twoscale.explore.hops import edited, permutation, query, true_path, walk  # noqa: E402
from twoscale.explore.layout import NODE, lay_out  # noqa: E402
from twoscale.explore.session import Session  # noqa: E402

RULE = exits.KL(1e-2)


@pytest.fixture(scope="module")
def session() -> Session:
    return open_session("hops")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def task(session: Session) -> Hops:
    assert isinstance(session.task, Hops)
    return session.task


@pytest.mark.parametrize("sample", [3, 7])
def test_answers(session: Session, task: Hops, sample: int) -> None:
    """Answers and steps of leaving are the engine's, targets and true depths the task's, and every answer has one read-out a step."""
    solved = solve(session, draw(task, sample, 5), RULE, 16)
    batch = task.batch([HELD_OUT + sample], 5)
    out = twoscale.forward(session.model, batch.ids, exit=RULE, loops=16)
    assert list(solved.steps) == [tuple(row) for row in out.steps[0].tolist()]
    assert [a.place for a in solved.answers] == (batch.targets[0] >= 0).nonzero().flatten().tolist()
    for answer in solved.answers:
        t = answer.place
        assert (answer.target, answer.depth) == (int(batch.targets[0, t]), int(batch.depth[0, t]))
        assert answer.taken == tuple(out.steps[0, t].tolist()) and len(answer.read_outs) == answer.steps == answer.taken[-1]
        assert answer.id == int(out.logits[0, t].argmax()) and answer.right == (answer.id == answer.target)
        assert query(task, solved.problem, t) == (answer.depth, int(batch.ids[0, t]))
    assert len({a.steps for a in solved.answers}) > 2


def test_read_outs(session: Session, task: Hops) -> None:
    """Read-outs are those of the pass: without exits the full run's after each step, with exits what a limit of k steps gives."""
    problem = draw(task, 2, 0)
    full = solve(session, problem, exits.StepNorm(1e-9), 14)
    want = predictions(session.model, torch.tensor([problem.ids]), torch.tensor(problem.places), 14)  # (K, A)
    assert [[said.id for said in a.read_outs] for a in full.answers] == want.T.tolist()
    some = solve(session, problem, RULE, 14)
    for k in (1, 3, 6):
        out = twoscale.forward(session.model, [list(problem.ids)], exit=RULE, loops=k)
        for answer in some.answers:
            assert int(out.steps[0, answer.place, -1]) == min(k, answer.steps)
            said = answer.read_outs[min(k, answer.steps) - 1]
            shares = torch.softmax(out.logits[0, answer.place], dim=-1)
            assert said.id == int(shares.argmax()) and said.share == pytest.approx(float(shares.max()), rel=1e-4)


def test_last_of_several_groups() -> None:
    """With several groups the steps that are read are the last group's, after all steps of those before it; layers behind are passed."""
    task = Hops(nodes=5, hops=3, queries=2)
    config = twoscale.ModelConfig(
        vocab_size=task.vocab_size, block_size=task.length, n_layer=4, n_head=2, n_embd=16, groups=((0,), (1, 2)), mean_loops=3
    )
    session = Session(LoopedGPT(config, seed=0).eval(), task.tokenizer(), "two", task=task)
    solved = solve(session, draw(task, 0, 0), exits.StepNorm(1e-9), 4)
    for k in (1, 2, 4):
        out = twoscale.forward(session.model, [list(solved.problem.ids)], exit=exits.StepNorm(1e-9), loops=(4, k))
        for answer in solved.answers:
            assert answer.taken == (4, 4) and answer.read_outs[k - 1].id == int(out.logits[0, answer.place].argmax())


def test_walk(session: Session, task: Hops) -> None:
    """Where the read-outs are the task's own, the walk goes along edges of the permutation for p steps and then stays; so it is drawn."""
    walked = 0
    for sample in range(6):
        problem = draw(task, sample, 1)
        f, solved = permutation(task, problem), solve(session, problem, RULE, 16)
        assert sorted(f) == list(range(task.nodes))
        for answer in solved.answers:
            p, x = query(task, problem, answer.place)
            path, moves = true_path(f, p, x), walk(task, problem, answer)
            assert path[-1] == answer.target and len(moves) == answer.steps and moves[0].start == x
            assert [m.end for m in moves] == [path[min(k, p)] for k in range(1, answer.steps + 1)]
            for move in moves:
                assert move.end is not None and move.start is not None
                assert move.kind == ("hop" if move.k <= p or f[move.start] == move.start else "stay")
            shown = task_figures.hops_walk_html(task, solved, answer)
            drawn = [(int(a), int(b)) for a, b in re.findall(r"class='hop' data-k='\d+' data-from='(\d+)' data-to='(\d+)'", shown)]
            assert drawn == [(m.start, m.end) for m in moves if m.kind == "hop"] and all(f[a] == b for a, b in drawn)
            assert f"data-last='{answer.steps}' data-depth='{p}'" in shown and "class='jump'" not in shown
            walked += len(drawn)
    assert walked > 100


def test_other_moves(session: Session, task: Hops) -> None:
    """A read-out that no edge leads to is drawn as a jump, one that is no node is not drawn, and a wrong answer is marked."""
    solved = solve(session, draw(task, 7, 0), RULE, 16)
    answer = solved.answers[0]
    f, (_, x) = permutation(task, solved.problem), query(task, solved.problem, answer.place)
    two, edge_token = f[f[x]], task.nodes + task.hops
    said = (ReadOut(two, 1.0), ReadOut(two, 1.0), ReadOut(edge_token, 1.0), ReadOut(f[two], 1.0))
    odd = dataclasses.replace(answer, read_outs=said, taken=(4,))
    moves = walk(task, solved.problem, odd)
    assert [m.kind for m in moves] == ["jump", "stay", "none", "jump"] and moves[2].end is None and moves[3].start is None
    shown = task_figures.hops_walk_html(task, solved, odd)
    assert shown.count("class='jump'") == 1 and "class='hop'" not in shown and "0&gt;0" in shown
    assert not odd.right and f"wrong: the true answer is {odd.target}" in shown and task_figures.WRONG in shown


def test_answers_html(session: Session, task: Hops) -> None:
    """Each answer stands in the colour of its steps, by the report's own scale, with its steps and its true depth."""
    solved = solve(session, draw(task, 7, 0), RULE, 16)
    shown = task_figures.hops_answers_html(task, solved, 2)
    rows = re.findall(r"<div class='answer( on)?' data-i='(\d+)' data-steps='(\d+)' data-depth='(\d+)'", shown)
    assert rows == [(" on" * (i == 2), str(i), str(a.steps), str(a.depth)) for i, a in enumerate(solved.answers)]
    colours = re.findall(r"class='said tok' style='background:(#\w+)'", shown)
    assert colours == [step_colour(step_share(a.taken, solved.loops)) for a in solved.answers] and len(set(colours)) > 2
    assert task_figures.summary_words(solved).startswith(f"**{sum(a.right for a in solved.answers)} of 8**")


@settings(deadline=None, max_examples=40)
@given(st.permutations(range(12)) | st.permutations(range(30)) | st.just(list(range(20))))
def test_layout(f: list[int]) -> None:
    """Every node has a place inside the frame, no two nodes touch, and the edges of a cycle join neighbours on its circle."""
    layout = lay_out(f)
    places = torch.tensor([layout.place(node) for node in range(len(f))], dtype=torch.float64)
    apart = torch.cdist(places, places) + 1e9 * torch.eye(len(f), dtype=torch.float64)
    assert float(apart.min()) > 2.5 * NODE
    assert bool((places >= NODE).all()) and float(places[:, 0].max()) <= layout.width - NODE
    assert float(places[:, 1].max()) <= layout.height - NODE
    for cycle in layout.cycles:
        n = len(cycle.nodes)
        assert all(f[cycle.nodes[i]] == cycle.nodes[(i + 1) % n] for i in range(n))


def test_edited_query(session: Session, task: Hops) -> None:
    """An edited query asks for f^p(x), which stands behind it; the rest of the sequence stays, and what is no query is one line."""
    problem = draw(task, 4, 0)
    place, f = problem.places[3], permutation(task, problem)
    new = edited(task, problem, place, 11, 2.0)
    assert query(task, new, place) == (11, 2) and permutation(task, new) == f
    assert new.depth[place] == 11 and new.targets[place] == new.ids[place + 1] == true_path(f, 11, 2)[-1]
    changed = {t for t in range(len(problem.ids)) if problem.ids[t] != new.ids[t]}
    assert changed <= {place - 1, place, place + 1} and problem.places == new.places
    assert solve(session, new, RULE, 16).answers[3].right
    bad = ((0, 1, "hops p = 0"), (13, 1, "between 1 and 12"), (3, 16, "between 0 and 15"), (2.5, 1, "2.5"), (None, 1, "p = None"))
    for p, x, says in (*bad, (3, None, "x = None"), (3, float("nan"), "x = nan")):
        with pytest.raises(UserError, match=re.escape(says)):
            edited(task, problem, place, p, x)


def test_edges_as_pairs() -> None:
    """The permutation is read from sequences that write two tokens an edge as well."""
    task = Hops(nodes=6, hops=4, queries=3, edges="pairs")
    problem = draw(task, 0, 0)
    f = permutation(task, problem)
    for place in problem.places:
        assert true_path(f, *query(task, problem, place))[-1] == problem.targets[place]


def test_carry() -> None:
    """A carry model gets its sum, highest digit first, with steps and true depth of every digit; no digit's page fails."""
    task = Carry(digits=6)
    config = twoscale.ModelConfig(
        vocab_size=task.vocab_size, block_size=task.length, n_layer=2, n_head=2, n_embd=16, groups=((1,),), mean_loops=3
    )
    session = Session(LoopedGPT(config, seed=0).eval(), task.tokenizer(), "sums", task=task)
    solved = solve(session, draw(task, 1, 0), exits.StepNorm(1.0), 5)
    batch = task.batch([HELD_OUT + 1], 0)
    for i in range(task.digits):
        shown = task_figures.carry_answers_html(task, solved, i)
        cells = re.findall(r"data-i='(\d+)' data-steps='(\d+)' data-depth='(\d+)'", shown)
        depths = batch.depth[0, 2 * task.digits :].tolist()
        assert [(int(n), int(d)) for n, _, d in cells] == [(n, depths[n]) for n in reversed(range(task.digits))]
        assert len(re.findall("class=chain", shown)) == 2 * (depths[i] - 1)
        assert f"data-depth='{depths[i]}'" in task_figures.carry_walk_html(task, solved, solved.answers[i])
    assert build([session]) is not None


def test_first_settings(session: Session, task: Hops) -> None:
    """At first the page has the calibrated rule and loops, or a rule and loops enough for the deepest answer; bad numbers are one line."""
    plain = Session(session.model, session.tokenizer, "hops", task=task)
    assert task_page.first_settings(plain) == ("kl", 16)
    fitted = Session(session.model, session.tokenizer, "hops", ({0: exits.StepNorm(8.0)}, 14), task)
    assert task_page.first_settings(fitted) == ("calibrated", 14)
    page = build([fitted])
    sliders = {b.elem_id: b for b in page.blocks.values() if getattr(b, "elem_id", None) in ("loops", "hops", "node", "power")}
    assert len(sliders) == 4 and all(s.minimum <= s.value <= s.maximum for s in sliders.values())
    assert sliders["loops"].value >= task.max_depth
    for number in (None, -1, 2**40):
        with pytest.raises(UserError, match="sample = "):
            task_page.number("sample", number)


def task_run(folder: Path, name: str) -> Path:
    """A run of two steps on a small task."""
    base = getattr(twoscale.presets, name)()
    small = {"hops": HopsConfig(nodes=5, hops=3, queries=2), "carry": CarryConfig(digits=4)}[name]
    model = dataclasses.replace(base.model, vocab_size=small.vocab_size, block_size=small.length, n_embd=16, n_head=2, mean_loops=2)
    train = dataclasses.replace(
        base.train, steps=2, warmup_steps=1, decay_steps=1, loops_ramp=0, batch_size=2, eval_sequences=2, staircase_samples=4,
        staircase_loops=2, geometry_interval=0,
    )  # fmt: skip
    start_run(dataclasses.replace(base, model=model, train=train, **{name: small}), folder)
    return folder


@pytest.mark.parametrize("name", ["hops", "carry"])
def test_run_folders(tmp_path: Path, name: str) -> None:
    """A run and its checkpoints get the page of the run's task, also while the model answers at random."""
    run = task_run(tmp_path / "run", name)
    for folder in (run, max((run / "checkpoints").iterdir())):
        opened = open_session(str(folder))
        assert opened.task == load_task(run) and opened.task is not None
        opened.warm_up()
        assert build([opened]) is not None
    assert open_session("bundled").task is None


def test_bad_task_files(tmp_path: Path, cli: CommandLine) -> None:
    """A task file of another version, of no known task, or of another model is one line."""
    folder = tmp_path / "model"
    shutil.copytree(IN_THE_PACKAGE["hops"], folder)
    known = json.loads((folder / "task.json").read_text())
    for change, says in (
        ({"version": 99}, "version 99"),
        ({"task": "chess"}, "choose one of hops, carry"),
        ({"settings": {"nodes": 8, "hops": 6}}, "task.json names the task hops with 79 tokens, the model has 285"),
        ({"settings": {"queries": 9}}, "samples of 43 tokens, the model takes 40"),
        ({"settings": {"hops": 17}}, "hops.hops = 17 is above hops.nodes = 16"),
        ({"task": "carry", "settings": {}}, "the task carry with 12 tokens"),
    ):
        (folder / "task.json").write_text(json.dumps({**known, **change}))
        code, out, err = cli("explore", folder)
        assert code == 2 and says in err and err.count("\n") == 1 and not out, err


def test_in_a_browser(browser) -> None:  # type: ignore[no-untyped-def]
    """The hops page opens with a walk; a click on an answer shows its walk and its numbers; edits and samples change them."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    session = open_session("hops")
    rule, loops = task_page.first_settings(session)
    first = solve(session, draw(session.task, task_page.SAMPLE, 0), session.rule(rule, 10.0**task_page.POWER), loops)
    command = [sys.executable, "-m", "twoscale", "explore", "hops", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        timer = threading.Timer(120, server.kill)
        timer.start()
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:"), server.stderr.read() if server.stderr else ""

            def wait(selector: str) -> list:  # type: ignore[type-arg]
                return until(browser, lambda b: b.find_elements(By.CSS_SELECTOR, selector))

            def drawn() -> list[tuple[int, int]]:
                lines = browser.find_elements(By.CSS_SELECTOR, "#walk .graph .hop")
                return [(int(e.get_attribute("data-from")), int(e.get_attribute("data-to"))) for e in lines]

            browser.get(address)
            rows = wait("#answers .answer[data-i]")
            assert [(int(r.get_attribute("data-steps")), int(r.get_attribute("data-depth"))) for r in rows] == [
                (a.steps, a.depth) for a in first.answers
            ]
            _check_walk(session, first, wait, drawn, 0)
            for i in (3, 6):
                wait(f"#answers .answer[data-i='{i}']")[0].click()
                wait(f"#answers .answer.on[data-i='{i}']")
                _check_walk(session, first, wait, drawn, i)
            wait("#walk .chip[data-step='2']")[0].click()  # ends the animation at step 2
            wait("#walk .chip.off[data-k='3']")
            assert not browser.find_elements(By.CSS_SELECTOR, "#walk .chip.off[data-k='2'], #walk .hop.off[data-k='2']")
            assert browser.find_elements(By.CSS_SELECTOR, "#walk .hop.off[data-k='3']")
            box = wait("#hops input[type=number]")[0]
            box.send_keys(Keys.CONTROL, "a")
            box.send_keys("2", Keys.TAB)
            wait("#walk .walk[data-depth='2']")
            wait("#answers .answer.on[data-i='6'][data-depth='2']")
            before = browser.find_element(By.ID, "answers").get_attribute("innerHTML")
            wait("#another")[0].click()
            until(browser, lambda b: b.find_element(By.ID, "answers").get_attribute("innerHTML") != before)
            assert browser.find_element(By.CSS_SELECTOR, "#sample input").get_attribute("value") == str(task_page.SAMPLE + 1)
            wait("#curve-0 .js-plotly-plot .trace")
            until(browser, lambda b: f"sample={task_page.SAMPLE + 1}" in b.current_url and "rule=" in b.current_url)
            shown = [r.get_attribute("outerText") for r in wait("#answers .answer[data-i]")]
            with leaving(browser):
                browser.get(browser.current_url)
                until(
                    browser,
                    lambda b: [r.get_attribute("outerText") for r in b.find_elements(By.CSS_SELECTOR, "#answers .answer[data-i]")] == shown,
                )
            check_console_and_network(browser, address)
        finally:
            timer.cancel()
            server.terminate()


def _check_walk(session: Session, solved: Solved, wait, drawn, i: int) -> None:  # type: ignore[no-untyped-def]
    """The walk of answer i is on the page: its edges, its read-outs, the step of leaving and the true depth."""
    task, answer, problem = session.task, solved.answers[i], solved.problem
    assert isinstance(task, Hops) and isinstance(problem, Problem)
    p, x = query(task, problem, answer.place)
    wait(f"#walk .walk[data-query='{p} {x}'][data-last='{answer.steps}'][data-depth='{answer.depth}'][data-right='1']")
    assert drawn() == [(m.start, m.end) for m in walk(task, problem, answer) if m.kind == "hop"]
    assert [c.get_attribute("data-said") for c in wait("#walk .chip[data-k]")] == [str(said.id) for said in answer.read_outs]
