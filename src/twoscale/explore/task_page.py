# mypy: disable-error-code="no-untyped-call, attr-defined"
"""The page of a model that was trained on a task: a sample, its answers by steps and true depth, and one answer step by step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr

from twoscale.config import UserError
from twoscale.config.words import group_list, plural
from twoscale.explore import assets, figures, task_figures
from twoscale.explore.answers import Problem, Solved, draw, inspect, solve
from twoscale.explore.controls import HIGH, LOW, exit_controls, loops_control, size_words, within
from twoscale.explore.hops import edited, permutation, query, true_path
from twoscale.explore.session import MAX_LOOPS, Session
from twoscale.tasks.carry import Carry
from twoscale.tasks.hops import Hops

RULE, POWER = "kl", -2.0  # at first: leaves at the first step that no longer changes the read-out, whatever the size of the states
SPARE = 4  # loops at first, beyond the largest true depth
SAMPLE = 7  # shown at first
MAX_SAMPLE = 2**31 - 1


@dataclass(frozen=True)
class Visit:
    """What one visitor has in front of them."""

    solved: Solved
    selected: int = 0

    @property
    def problem(self) -> Problem:
        return self.solved.problem


def task_page(session: Session, page: gr.Blocks) -> None:
    """Put the page of a task model into Blocks that are open."""
    task = session.task
    assert isinstance(task, Hops | Carry)
    chosen, default_loops = first_settings(session)
    gr.Markdown(_title(session))
    first = _visit(session, draw(task, SAMPLE, 0), chosen, POWER, default_loops)
    shown = _shown(session, first)
    visit = gr.State(first)
    with gr.Row():
        with gr.Column(scale=6, min_width=320):
            walk = gr.HTML(shown[1], js_on_load=assets.WALK_JS, elem_id="walk", apply_default_css=False)
        with gr.Column(scale=6, min_width=320):
            answers = gr.HTML(shown[2], js_on_load=assets.CLICK, elem_id="answers", apply_default_css=False)
            legend = gr.HTML(shown[3], elem_id="legend", apply_default_css=False)
            summary = gr.Markdown(shown[4], elem_id="summary")
            p, x = _query_controls(session, first)
            read = gr.HTML(shown[5], elem_id="read", apply_default_css=False)
    with gr.Row():
        with gr.Column(min_width=260):
            rule, power = exit_controls(session, RULE, POWER)
        with gr.Column(min_width=200):
            loops = loops_control(default_loops)
        with gr.Column(min_width=200):
            with gr.Row():
                sample = gr.Number(SAMPLE, precision=0, minimum=0, maximum=MAX_SAMPLE, label="Sample", elem_id="sample", min_width=90)
                seed = gr.Number(0, precision=0, minimum=0, maximum=MAX_SAMPLE, label="Seed", elem_id="seed", min_width=90)
            another = gr.Button("Another sample", variant="primary", elem_id="another")
    about = gr.Markdown(shown[6], elem_id="about")
    with gr.Row():
        curves = [gr.Plot(f, label="", show_label=False, min_width=280, elem_id=f"curve-{i}") for i, f in enumerate(shown[7:10])]

    parts = [visit, walk, answers, legend, summary, read, about, *curves, p, x]
    settings = [rule, power, loops]
    once: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "solve", "trigger_mode": "always_last", "show_progress": "hidden"}

    def pick(v: Visit, event: gr.EventData) -> list[Any]:
        return _said(lambda: _shown(session, replace(v, selected=_index(v, event.index))))

    def again(v: Visit, r: str, power: float, most: float) -> list[Any]:
        return _said(lambda: _shown(session, _visit(session, v.problem, r, power, most, v.selected)))

    def take(n: float | None, key: float | None, r: str, power: float, most: float) -> list[Any]:
        return _said(lambda: _shown(session, _visit(session, draw(task, number("sample", n), number("seed", key)), r, power, most)))

    def ask(v: Visit, hops: float, node: float, r: str, power: float, most: float) -> list[Any]:
        assert isinstance(task, Hops)
        place = v.solved.answers[v.selected].place
        return _said(lambda: _shown(session, _visit(session, edited(task, v.problem, place, hops, node), r, power, most, v.selected)))

    answers.click(pick, [visit], parts, **once)
    gr.on([rule.change, power.change, loops.change], again, [visit, *settings], parts, **once)
    gr.on([sample.change, seed.change], take, [sample, seed, *settings], parts, **once)
    another.click(lambda n: 0 if n is None else min(int(n) + 1, MAX_SAMPLE), sample, sample, queue=False)
    if isinstance(task, Hops):
        gr.on([p.input, x.input], ask, [visit, p, x, *settings], parts, **once)
    controls = [sample, seed, *settings]
    first_values = [SAMPLE, 0, chosen, POWER, default_loops]

    def opened(request: gr.Request) -> list[Any]:
        """What the address asks for, if it asks for anything; what the page opens with stays otherwise."""
        asked = _asked_for(session, first_values, request.query_params)
        if asked == first_values:
            return [gr.skip()] * (len(controls) + len(parts))
        n, key, r, power, most = asked
        return [*asked, *_said(lambda: _shown(session, _visit(session, draw(task, n, key), r, power, most)))]

    page.load(opened, None, [*controls, *parts], **once)
    gr.on([c.change for c in controls], None, controls, None, js=assets.TASK_ADDRESS)


def _asked_for(session: Session, values: Sequence[Any], query: Mapping[str, str]) -> list[Any]:
    """Sample, seed, rule, power and loops, by what the address says; what does not fit is left as it is."""
    found = list(values)
    for i, (name, (low, high)) in enumerate(
        {"sample": (0, MAX_SAMPLE), "seed": (0, MAX_SAMPLE), "rule": (0, 0), "power": (LOW, HIGH), "loops": (2, MAX_LOOPS)}.items()
    ):
        if name == "rule":
            found[i] = query[name] if query.get(name) in session.rules() else found[i]
        else:
            found[i] = within(query.get(name), low, high, found[i])
    return found


def first_settings(session: Session) -> tuple[str, int]:
    """Rule and most loops at first: the calibrated ones, where the model has them."""
    assert session.task is not None
    rule, loops = ("calibrated", session.calibrated[1]) if session.calibrated is not None else (RULE, session.task.max_depth + SPARE)
    return rule, max(2, min(loops, MAX_LOOPS))


def _title(session: Session) -> str:
    c, task = session.model.config, session.task
    about = f"{size_words(session)} parameters · loop groups {group_list(session.groups)} · default depth {plural(c.mean_loops, 'loop')}."
    if isinstance(task, Hops):
        asks = (
            f"A sequence lists a random permutation of {plural(task.nodes, 'node')}, edge by edge; then `<p> x` asks where p hops lead "
            f"from node x: the answer's true depth is p. Colours show how many loop steps each answer took; click one to see its walk."
        )
    else:
        asks = (
            "All digits of a sum at once. A digit needs as many steps as the carry chain that ends there is long, plus one. "
            "Colours show how many loop steps each digit took; click one to see what was read after each."
        )
    return f"## Watch **{session.name}** think\n{about} {asks}"


def _query_controls(session: Session, visit: Visit) -> tuple[gr.Slider, gr.Slider]:
    """Hops and node of the selected query; hidden for other tasks."""
    task, hops = session.task, isinstance(session.task, Hops)
    p, x = _asked(session, visit)
    most, nodes = (task.hops, task.nodes) if isinstance(task, Hops) else (1, 1)
    with gr.Row(visible=hops):
        return (
            gr.Slider(1, max(2, most), value=p, step=1, label="Edit: hops p", elem_id="hops", min_width=220),
            gr.Slider(0, max(1, nodes - 1), value=x, step=1, label="Edit: node x", elem_id="node", min_width=220),
        )


def _asked(session: Session, visit: Visit) -> tuple[int, int]:
    if not isinstance(session.task, Hops):
        return 1, 0
    return query(session.task, visit.problem, visit.solved.answers[visit.selected].place)


def _visit(session: Session, problem: Problem, rule: str, power: float, loops: float, selected: int | None = None) -> Visit:
    """The answers to a problem under a visitor's settings."""
    solved = solve(session, problem, session.rule(rule, 10.0**power), int(loops))
    return Visit(solved, _most_telling(session, solved) if selected is None else selected)


def _most_telling(session: Session, solved: Solved) -> int:
    """The answer that is shown at first: the longest walk over different nodes, or the deepest digit."""
    task = session.task

    def worth(i: int) -> int:
        answer = solved.answers[i]
        if isinstance(task, Hops):
            return len(set(true_path(permutation(task, solved.problem), *query(task, solved.problem, answer.place))))
        return answer.depth

    return max(range(len(solved.answers)), key=worth)


def _shown(session: Session, visit: Visit) -> list[Any]:
    """Everything on the page that depends on the visit: the state first, then the parts in their order."""
    task, solved = session.task, visit.solved
    answer = solved.answers[visit.selected]
    if isinstance(task, Hops):
        walk, answers = task_figures.hops_walk_html(task, solved, answer), task_figures.hops_answers_html(task, solved, visit.selected)
    else:
        assert isinstance(task, Carry)
        walk, answers = task_figures.carry_walk_html(task, solved, answer), task_figures.carry_answers_html(task, solved, visit.selected)
    found = inspect(session, solved, answer)
    return [
        visit, walk, answers, figures.legend(1, max(solved.loops)), task_figures.summary_words(solved),
        task_figures.read_html(task, solved), task_figures.geometry_words(task, answer, found),
        *figures.curve_figures(found), *_asked(session, visit),
    ]  # fmt: skip


def _index(visit: Visit, index: object) -> int:
    if not isinstance(index, int) or not 0 <= index < len(visit.solved.answers):
        raise UserError(f"answer {index!r}: the sequence has {plural(len(visit.solved.answers), 'answer')}")
    return index


def number(name: str, value: float | None) -> int:
    """A sample's number or a seed, as a visitor gave it."""
    if value is None or not 0 <= value <= MAX_SAMPLE:
        raise UserError(f"{name} = {value!r}: give an integer between 0 and {MAX_SAMPLE}")
    return int(value)


def _said(compute: Callable[[], list[Any]]) -> list[Any]:
    """Errors of a visitor's input become a line on the page."""
    try:
        return compute()
    except UserError as error:
        raise gr.Error(str(error), print_exception=False) from None
