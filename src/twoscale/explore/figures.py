"""Figures and tables of the explorer: plotly figures and HTML, from what `session` computed."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from torch import Tensor

from twoscale.config.words import all_loops, group_label, plural
from twoscale.explore.session import Inspection, Lane, Race, Said
from twoscale.report.style import GROUP_COLOURS, step_colour, visible
from twoscale.report.words import against_default

BEHIND = 4  # steps that a table shows behind the one after which the token left, besides the last
GREY = "#8a94a0"  # axes and grids that can be read on white and on black


def tokens_html(
    lane: Lane,
    scale: tuple[float, float] | None,
    selected: int | None = None,
    differs: Mapping[int, str] | None = None,
) -> str:
    """The text, one span a token; each can be clicked.

    New tokens are coloured by their steps from the fewest to the most of `scale`; None leaves them without colour. `differs` frames
    tokens, with words for each.
    """
    spans, marked = [], differs or {}
    for i, (piece, steps) in enumerate(zip(lane.pieces, lane.steps, strict=True)):
        if not piece:
            continue
        kind = "tok" + " given" * (i < len(lane.prompt)) + " on" * (i == selected) + " differs" * (i in marked)
        tooltip = "nothing chose it" if steps is None else f"{' / '.join(map(str, steps))} steps"
        if guessed_together(lane, i - len(lane.prompt)):
            kind, tooltip = f"{kind} wave", f"{tooltip}; guessed, and verified in the pass of the token before it"
        tooltip = html.escape(f"{tooltip}; {marked[i]}" if marked.get(i) else tooltip)
        colour = ""
        if steps and i >= len(lane.prompt) and scale is not None:
            colour = f" style='background:{step_colour(scaled(sum(steps) / len(steps), scale))}'"
        spans.append(f'<span class="{kind}" data-i="{i}" role="button" tabindex="0" title="{tooltip}"{colour}>{html.escape(piece)}</span>')
    return f"<div class='text'>{''.join(spans)}{'' if lane.done else '<span class=caret>▏</span>'}</div>"


def guessed_together(lane: Lane, new: int) -> bool:
    """Whether a new token came out of the same pass as the one before it."""
    return 0 < new < len(lane.passes) and lane.passes[new] == lane.passes[new - 1]


def scaled(steps: float, scale: tuple[float, float]) -> float:
    """Where a number of steps lies between the fewest (0) and the most (1) that occur; 0 where all are equal."""
    low, high = scale
    return (steps - low) / (high - low) if high > low else 0.0


def other_words(race: Race) -> dict[int, str]:
    """For each token where the full run on the same text would have chosen otherwise: what, and both probabilities."""
    return {
        i: f"all loops, on this text, would have chosen “{visible(o.token)}” ({_percent(o.share)}; this one has {_percent(o.kept)} there, "
        f"{_percent(o.mine)} with exits)"
        for i, o in (race.others or {}).items()
    }


def others_html(race: Race) -> str:
    """The same as a table, for those who cannot hover; folded."""
    quick = race.quick
    if race.others is None:
        return ""
    if not race.others:
        return f"<div class='note'>On this text all loops would have chosen every one of the {plural(quick.new, 'token')}.</div>"
    rows = "".join(
        f"<tr><td>{i - len(quick.prompt) + 1}</td><td><code>{html.escape(visible(quick.pieces[i]))}</code></td><td>{_percent(o.mine)}</td>"
        f"<td>{_percent(o.kept)}</td><td><code>{html.escape(visible(o.token))}</code></td><td>{_percent(o.share)}</td></tr>"
        for i, o in sorted(race.others.items())
    )
    head = (
        "<tr><th>new token</th><th>in this text</th><th>with exits</th><th>all loops</th><th>all loops would choose</th>"
        "<th>all loops</th></tr>"
    )
    return (
        f"<details><summary>At {len(race.others)} of {plural(quick.new, 'token')} all loops, reading the same text, would have chosen "
        f"otherwise (dashed)</summary><div class='scroll'><table class='said'>{head}{rows}</table></div></details>"
    )


def lane_words(lane: Lane, layers: list[int]) -> str:
    if not lane.new:
        return "reading the prompt …"
    guessed, right = lane.guesses
    waves = f" · {right} of {plural(guessed, 'guess')} right, {lane.new / (lane.passes[-1] + 1):.1f} tokens a pass" if guessed else ""
    return (
        f"**{lane.new}** token{'s' * (lane.new != 1)} · **{lane.ms:.1f} ms** a token · first after {lane.first:.2f} s · "
        f"mean steps **{lane.mean_steps(layers):.1f}**{waves}"
    )


def race_words(race: Race) -> str:
    """Loop work beside the default depth's, speed beside the other text's, and whether the two texts differ."""
    quick, full = race.quick, race.full
    if not quick.new or not full.new:
        return ""
    where = race.first_difference
    both = min(len(quick.ids), len(full.ids)) - len(quick.prompt)
    same = (
        f"the same text so far ({plural(both, 'token')})"
        if where is None
        else f"the texts part at new token {where - len(quick.prompt) + 1}"
    )
    work = against_default(quick.mean_steps(race.layers), race.mean_loops)
    return f"{work} · **{full.ms / quick.ms:.2f}x** as fast as {_all(race.loops)} · {same}"


def _all(loops: Sequence[int]) -> str:
    """All loops of the groups: one number where they agree."""
    return all_loops(loops[0]) if len(set(loops)) == 1 else f"all {' / '.join(map(str, loops))} loops"


def legend(low: float, high: float, words: str = "") -> str:
    """The colours in words; `words` come behind them."""
    if high <= low:
        return f"<div class='legend'><span>{_steps(low)} for every token{words}</span></div>"
    stops = ", ".join(step_colour(i / 10) for i in range(11))
    return (
        f"<div class='legend'><span>{_steps(low)}</span><span class='ramp' style='background:linear-gradient(to right, {stops})'></span>"
        f"<span>{_steps(high)}{words}</span></div>"
    )


def race_legend(race: Race) -> str:
    """The colours of the text with exits: from the fewest to the most steps that occur in it."""
    mean = ", mean over groups" if len(race.loops) > 1 else ""
    waves = any(guessed_together(lane, i) for lane in (race.quick, race.full) for i in range(lane.new))
    underlined = "; underlined: guessed, and verified in the pass of the token before" if waves else ""
    return legend(*race.scale, f"{mean}; dashed: all loops, on the same text, would have chosen otherwise{underlined}")


def _steps(n: float) -> str:
    return "1 step" if n == 1 else f"{n:g} steps" if n == int(n) else f"{n:.1f} steps"


def calibrated_mark(name: str, values: Sequence[float | None], low: float, high: float, groups: Sequence[str]) -> str:
    """Where on the logarithmic slider the calibrated thresholds of a rule lie; None stands for a group that runs all its loops."""
    marks = ""
    for g, value in enumerate(values):
        if value is not None and value > 0 and low <= (at := math.log10(value)) <= high:
            colour = GROUP_COLOURS[g % len(GROUP_COLOURS)]
            place, title = f"left:{100 * (at - low) / (high - low):.1f}%", f"{group_label(g, groups[g])}: {value:.3g}"
            marks += f"<span style='{place};color:{colour}' title='{title}'>▲</span>"
    if not marks:
        return ""
    shown = ", ".join("all loops" if value is None else f"{value:.3g}" for value in values)
    return f"<div class='marks'>{marks}</div><div class='note'>▲ {html.escape(name)}, calibrated: {shown} (group by group)</div>"


def path_figure(found: Inspection, three: bool) -> go.Figure:
    """States from step to step, through all groups; a star where the token left."""
    figure = go.Figure()
    for g, points in enumerate(found.path.tolist()):
        colour, left = GROUP_COLOURS[g % len(GROUP_COLOURS)], found.taken[g]
        axes = dict(zip("xyz" if three else "xy", zip(*points, strict=True), strict=False))
        sizes = [4 if three else 7] * len(points)
        symbols = ["circle"] * len(points)
        if left < len(points):
            sizes[left], symbols[left] = (9, "diamond") if three else (16, "star")
        shades = [0.35 + 0.65 * k / max(1, len(points) - 1) for k in range(len(points))]
        common: dict[str, Any] = {
            "mode": "lines+markers", "name": group_label(g, found.groups[g]), "line": {"color": colour, "width": 3 if three else 1.5},
            "marker": {"size": sizes, "symbol": symbols, "color": colour if three else [_faded(colour, s) for s in shades]},
            "text": [f"step {k}" + ", left here" * (k == left) for k in range(len(points))],
            "hovertemplate": f"{group_label(g, found.groups[g])}, %{{text}}<extra></extra>",
        }  # fmt: skip
        figure.add_trace(go.Scatter3d(**axes, **common) if three else go.Scatter(**axes, **common))
    words = [f"PC {i + 1} ({share:.0%})" for i, share in enumerate(found.explained)]
    if three:
        figure.update_layout(scene={f"{a}axis": {"title": w} for a, w in zip("xyz", words, strict=True)})
    else:
        figure.update_xaxes(title=words[0])
        figure.update_yaxes(title=words[1])
    return _plain(figure, 400)


def curve_figures(found: Inspection) -> list[go.Figure]:
    """Step norms, cosines and accelerations over the loop steps; stars where the token left."""
    return [
        _curve(found, found.norms, 1, "step norm", log=True),
        _curve(found, found.cosines, 2, "cosine with the step before"),
        _curve(found, found.accelerations, 2, "acceleration", log=True),
    ]


def _curve(found: Inspection, values: Tensor, first: int, title: str, log: bool = False) -> go.Figure:
    figure = go.Figure()
    for g, line in enumerate(values.tolist()):
        steps, colour = list(range(first, first + len(line))), GROUP_COLOURS[g % len(GROUP_COLOURS)]
        name, left = group_label(g, found.groups[g]), found.taken[g]
        sizes = [16 if k == left else 5 for k in steps]
        figure.add_scatter(
            x=steps, y=line, name=name, mode="lines+markers", line={"color": colour, "width": 1.6},
            marker={"size": sizes, "symbol": ["star" if k == left else "circle" for k in steps]},
            text=[", left here" if k == left else "" for k in steps],
            hovertemplate=f"{name}, step %{{x}}%{{text}}: %{{y:.3g}}<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title="loop step")
    figure.update_yaxes(title=title, **({"type": "log", "dtick": 1, "exponentformat": "power"} if log else {"range": [-1.05, 1.05]}))
    return _plain(figure, 340)


def said_html(found: Inspection) -> str:
    """The likeliest tokens after each loop step, group by group, and what the model said in the end; the step at which the token left is
    marked, and so is what was chosen. The reading by the head alone is folded below."""
    parts = [_group_table(found, g, found.said[g], g == len(found.said) - 1) for g in reversed(range(len(found.said)))]
    lens = "".join(_group_table(found, g, found.lens[g], False) for g in reversed(range(len(found.lens))))
    extra = (
        "<details class='lens'><summary>The same by the lens: the head on the state itself</summary><div class='note'>The layers behind "
        f"the groups are left out, so the lens may say something that the model never would.</div>{lens}</details>"
        if lens
        else ""
    )
    return f"<div class='note'>{_reading(found)}</div>{''.join(parts)}{extra}"


def _reading(found: Inspection) -> str:
    """How the table is read."""
    later = " (groups behind it are skipped)" if len(found.said) > 1 else ""
    return (
        f"Steps are those of a run with all loops over the same text, each read through the plain layers behind the last group{later}; "
        "★ the step after which the token left. The last row is what the model said when it wrote the token."
    )


def _group_table(found: Inspection, g: int, steps: Sequence[Said], last: bool) -> str:
    rows = []
    for k, said in enumerate(steps, start=1):
        left, behind = k == found.taken[g], k - found.taken[g]
        if behind == BEHIND + 1 and k < len(steps):
            rows.append(f"<tr class='note'><th>…</th><td colspan='{len(said.tokens) + 1}'>steps {k} to {len(steps) - 1}</td></tr>")
        if behind <= BEHIND or k == len(steps):
            rows.append(_said_row(found, said, f"{k}{' ★' if left else ''}", "left" if left else ""))
    if last and found.answer is not None:
        rows.append(_said_row(found, found.answer, "the model", "answer"))
    return (
        f"<details{' open' if last else ''}><summary>after each step of {html.escape(group_label(g, found.groups[g]))}</summary>"
        f"<div class='scroll'><table class='said'>"
        f"<tr><th>step</th><th colspan='{len(steps[0].tokens)}'>likeliest tokens</th><th>the chosen one</th></tr>"
        f"{''.join(rows)}</table></div></details>"
    )


def _said_row(found: Inspection, said: Said, name: str, kind: str) -> str:
    cells = "".join(
        f"<td class='{'hit' if number == found.id else ''}'><code>{html.escape(visible(token))}</code> {_percent(share)}</td>"
        for number, token, share in zip(said.ids, said.tokens, said.shares, strict=True)
    )
    return f"<tr class='{kind}'><th>{name}</th>{cells}<td>{_percent(said.chosen)}</td></tr>"


def inspection_words(found: Inspection) -> str:
    taken = ", ".join(f"{k} in {group_label(g, name)}" for g, (k, name) in enumerate(zip(found.taken, found.groups, strict=True)))
    return f"### How “{_plain_text(found.token)}” was chosen\nafter “…{_plain_text(found.context)}” · steps taken: {taken}"


def _plain_text(text: str) -> str:
    """Text without what Markdown or HTML would make of it."""
    return html.escape("".join(c if c not in "\\`*_{}[]()#+!|~$\n" else " " for c in visible(text).replace("␣", " ").replace("⏎", " ")))


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def _faded(colour: str, alpha: float) -> str:
    r, g, b = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({r}, {g}, {b}, {alpha:.2f})"


def _plain(figure: go.Figure, height: int) -> go.Figure:
    """Looks that work on a light and on a dark page."""
    axis = {"gridcolor": "rgba(138, 148, 160, 0.3)", "zerolinecolor": "rgba(138, 148, 160, 0.6)", "linecolor": GREY}
    figure.update_layout(
        height=height, paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font={"color": GREY},
        margin={"l": 50, "r": 10, "t": 64, "b": 40}, legend={"orientation": "h", "y": -0.3}, modebar={"bgcolor": "rgba(0,0,0,0)"},
    )  # fmt: skip
    figure.update_xaxes(**axis)
    figure.update_yaxes(**axis)
    return figure
