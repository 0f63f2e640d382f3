"""What the task page shows, as HTML: the answers of a sequence, and one of them step by step."""

import html
from collections.abc import Sequence

from twoscale.config.words import group_label, plural
from twoscale.explore.answers import Answer, Solved
from twoscale.explore.graph import graph_svg
from twoscale.explore.hops import permutation, query, walk
from twoscale.explore.session import Inspection
from twoscale.report.style import step_colour, step_share
from twoscale.tasks.carry import Carry
from twoscale.tasks.hops import Hops
from twoscale.tasks.task import Task

RIGHT, WRONG, LEAVES, DEPTH = "✓", "✗", "★", "▲"


def background(steps: int, loops: Sequence[int]) -> str:
    """The colour of a token that took so many steps in the last group."""
    return f"background:{step_colour(step_share((steps,), loops[-1:]))}"


def words_of(task: Task) -> list[str]:
    """The vocabulary as it is shown."""
    return [*task.words(), "end of text"]


def _mark(answer: Answer) -> str:
    return f"<span class='right'>{RIGHT}</span>" if answer.right else f"<span class='wrong'>{WRONG}</span>"


def _cells(answer: Answer, loops: Sequence[int]) -> str:
    """One cell a loop step, coloured where it was taken, with a mark at the true depth."""
    most = loops[-1]
    taken = "".join(f"<span style='{background(k, loops)}'></span>" for k in range(1, answer.steps + 1))
    cells = taken + "<span class='idle'></span>" * (most - answer.steps)
    at = 100 * (min(answer.depth, most) - 0.5) / most
    return f"<span class='pips'>{cells}<i class='depth' style='left:{at:.2f}%'>{DEPTH}</i></span>"


def hops_answers_html(task: Hops, solved: Solved, selected: int) -> str:
    """All queries of a sequence: what was asked, the answer in the colour of its steps, steps beside the true depth."""
    words = words_of(task)
    rows = []
    for i, answer in enumerate(solved.answers):
        p, x = query(task, solved.problem, answer.place)
        missed = "" if answer.right else f" title='the true answer is {words[answer.target]}'"
        said = f"<span class='said tok' style='{background(answer.steps, solved.loops)}'{missed}>{html.escape(words[answer.id])}</span>"
        rows.append(
            f"<div class='answer{' on' * (i == selected)}' data-i='{i}' data-steps='{answer.steps}' data-depth='{answer.depth}' "
            f"role='button' tabindex='0'>"
            f"<span class='asked'><code class='count'>&lt;{p}&gt;</code> <code class='from'>{x}</code> → {said} {_mark(answer)}</span>"
            f"{_cells(answer, solved.loops)}<span class='numbers'><b>{plural(answer.steps, 'step')}</b> · depth {answer.depth}</span></div>"
        )
    head = (
        f"<div class='answer head-row'><span>query → answer</span><span class='pips-head'>steps · {DEPTH} true depth</span>"
        f"<span class='numbers'>steps · true depth</span></div>"
    )
    return f"<div class='answers'>{head}{''.join(rows)}</div>"


def summary_words(solved: Solved) -> str:
    """The sequence in one line."""
    n = len(solved.answers)
    return (
        f"**{solved.right} of {n}** answers right · mean steps **{solved.mean_steps:.1f}** of {solved.loops[-1]} · mean true depth "
        f"**{solved.mean_depth:.1f}**"
    )


def hops_walk_html(task: Hops, solved: Solved, answer: Answer) -> str:
    """The graph with the walk of one query, and what was read after each loop step."""
    problem = solved.problem
    p, x = query(task, problem, answer.place)
    moves = walk(task, problem, answer)
    asked = (
        f"<div class='ask'><code>&lt;{p}&gt; {x}</code>: begin at node <b>{x}</b> and follow <b>{plural(p, 'edge')}</b>. "
        f"The lit path is what the model reads after each loop step.</div>"
    )
    drawn = graph_svg(permutation(task, problem), x, answer.target, moves, solved.loops)
    about = f"data-last='{answer.steps}' data-depth='{answer.depth}' data-query='{p} {x}' data-right='{int(answer.right)}'"
    key = "<div class='note'>dashed ring: start · double ring: true answer · numbers: loop steps · ★ the token leaves the loop</div>"
    return f"<div class='walk' {about}>{asked}{drawn}{key}{steps_html(task, solved, answer)}</div>"


def steps_html(task: Task, solved: Solved, answer: Answer) -> str:
    """What was read after each loop step, with a slider; the step at which the token left, and the true depth."""
    words, most = words_of(task), solved.loops[-1]
    chips = []
    for k in range(1, max(most, answer.depth) + 1):
        marks = LEAVES * (k == answer.steps) + DEPTH * (k == answer.depth)
        if k <= answer.steps:
            said = answer.read_outs[k - 1]
            shown, about = html.escape(words[said.id]), f"after step {k}: {words[said.id]} ({said.share:.0%})"
            chips.append(
                f"<div class='chip' role='button' tabindex='0' data-step='{k}' data-k='{k}' data-said='{shown}' "
                f"title='{html.escape(about)}'><i>{k}</i><b style='{background(k, solved.loops)}'>{shown}</b><em>{marks}</em></div>"
            )
        else:
            chips.append(f"<div class='chip idle' title='not taken'><i>{k}</i><b>·</b><em>{marks}</em></div>")
    player = (
        f"<div class='player'><button class='play' type='button'>▶ Play</button>"
        f"<input type='range' min='0' max='{answer.steps}' value='{answer.steps}' step='1' aria-label='loop step'></div>"
    )
    return f"{player}<div class='chips'>{''.join(chips)}</div><div class='verdict'>{verdict(task, solved, answer)}</div>"


def verdict(task: Task, solved: Solved, answer: Answer) -> str:
    """One sentence on one answer."""
    words, limit = words_of(task), answer.steps == solved.loops[-1]
    left = f"{LEAVES} leaves after <b>{plural(answer.steps, 'step')}</b>" + (", the most allowed" if limit else "")
    truth = "right" if answer.right else f"wrong: the true answer is {words[answer.target]}"
    return f"{left} · {DEPTH} true depth <b>{answer.depth}</b> · answer <b>{html.escape(words[answer.id])}</b>, {truth} {_mark(answer)}"


def geometry_words(task: Task, answer: Answer, found: Inspection) -> str:
    """What the curves below are of."""
    taken = ", ".join(f"{k} in {group_label(g, name)}" for g, (k, name) in enumerate(zip(found.taken, found.groups, strict=True)))
    token = html.escape(words_of(task)[answer.id])
    return f"### How “{token}” was chosen\nsteps taken: {taken} · {LEAVES} where it left; the curves are those of a run without exits"


def read_html(task: Task, solved: Solved) -> str:
    """The whole sequence as the model reads it, each token in the colour of its own steps."""
    words, last = words_of(task), [s[-1] for s in solved.steps]
    spans = "".join(
        f"<span style='{background(k, solved.loops)}' title='{plural(k, 'step')}'>{html.escape(words[t])}</span>"
        for t, k in zip(solved.problem.ids, last, strict=True)
    )
    about = f"{plural(len(last), 'token')}, mean {sum(last) / len(last):.1f} steps"
    return f"<details><summary>The sequence as the model reads it ({about})</summary><div class='read'>{spans}</div></details>"


def carry_answers_html(task: Carry, solved: Solved, selected: int) -> str:
    """The sum as on paper, the highest digit first: the digits of the sum in the colour of their steps, steps and true depth below."""
    D, ids = task.digits, solved.problem.ids
    order = range(D - 1, -1, -1)
    chosen = solved.answers[selected]
    chain = range(selected - chosen.depth + 1, selected)  # the places from which its carry came

    def row(name: str, cells: list[str]) -> str:
        return f"<tr><th>{name}</th>{''.join(cells)}</tr>"

    def digit(t: int, i: int) -> str:
        return f"<td{' class=chain' if i in chain else ''}>{ids[t]}</td>"

    words = words_of(task)
    sums = [
        f"<td class='{'on' * (i == selected)}' data-i='{i}' data-steps='{a.steps}' data-depth='{a.depth}' role='button' tabindex='0' "
        f"style='{background(a.steps, solved.loops)}'>{html.escape(words[a.id])}</td>"
        for i in order
        for a in (solved.answers[i],)
    ]
    small = "<td class='small'>{}</td>"
    return (
        "<div class='scroll'><table class='sum'>"
        + row("first", [digit(i, i) for i in order])
        + row("second", [digit(D + i, i) for i in order])
        + row("sum", sums)
        + row("right", [small.format(_mark(solved.answers[i])) for i in order])
        + row("steps", [small.format(f"<b>{solved.answers[i].steps}</b>") for i in order])
        + row("depth", [small.format(solved.answers[i].depth) for i in order])
        + "</table></div>"
    )


def carry_walk_html(task: Carry, solved: Solved, answer: Answer) -> str:
    """One digit of the sum, step by step."""
    place = answer.place - 2 * task.digits
    chain = answer.depth - 1
    came = f"a carry that was made {plural(chain, 'place')} below (underlined)" if chain else "no carry comes in"
    asked = f"<div class='ask'>Digit {place + 1} from the right: {came}. What the model reads after each loop step:</div>"
    about = f"data-last='{answer.steps}' data-depth='{answer.depth}' data-query='{place}' data-right='{int(answer.right)}'"
    return f"<div class='walk' {about}>{asked}{steps_html(task, solved, answer)}</div>"
