"""Figures and tables of the explorer: plotly figures and HTML, from what `session` computed."""

import html
import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from torch import Tensor

from twoscale.config.words import all_loops, group_label, plural
from twoscale.explore.session import Inspection, Lane, Race
from twoscale.report.style import GROUP_COLOURS, step_colour, step_share, visible
from twoscale.report.words import against_default

GREY = "#8a94a0"  # axes and grids that can be read on white and on black


def tokens_html(lane: Lane, loops: Sequence[int], selected: int | None = None, difference: int | None = None) -> str:
    """The text, one span a token, coloured by its steps; each can be clicked."""
    spans = []
    for i, (piece, steps) in enumerate(zip(lane.pieces, lane.steps, strict=True)):
        if not piece:
            continue
        kind = "tok" + " given" * (i < len(lane.prompt)) + " on" * (i == selected) + " differs" * (i == difference)
        tooltip = "nothing chose it" if steps is None else f"{' / '.join(map(str, steps))} steps"
        colour = "" if steps is None or i < len(lane.prompt) else f" style='background:{step_colour(step_share(steps, loops))}'"
        spans.append(f"<span class='{kind}' data-i='{i}' role='button' tabindex='0' title='{tooltip}'{colour}>{html.escape(piece)}</span>")
    return f"<div class='text'>{''.join(spans)}{'' if lane.done else '<span class=caret>▏</span>'}</div>"


def lane_words(lane: Lane, layers: list[int]) -> str:
    if not lane.new:
        return "reading the prompt …"
    return (
        f"**{lane.new}** token{'s' * (lane.new != 1)} · **{lane.ms:.1f} ms** a token · first after {lane.first:.2f} s · "
        f"mean steps **{lane.mean_steps(layers):.1f}**"
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
        else f"first difference at new token {where - len(quick.prompt) + 1}"
    )
    work = against_default(quick.mean_steps(race.layers), race.mean_loops)
    return f"{work} · **{full.ms / quick.ms:.2f}x** as fast as {_all(race.loops)} · {same}"


def _all(loops: Sequence[int]) -> str:
    """All loops of the groups: one number where they agree."""
    return all_loops(loops[0]) if len(set(loops)) == 1 else f"all {' / '.join(map(str, loops))} loops"


def legend(loops: Sequence[int], difference: bool = True) -> str:
    """The colours in words; `difference`: there is a second text to differ from."""
    mean = " (mean over groups)" if len(loops) > 1 or difference else ""
    frame = "; a dashed frame marks the first difference" if difference else ""
    stops = ", ".join(step_colour(i / 10) for i in range(11))
    return (
        f"<div class='legend'><span>1 step</span><span class='ramp' style='background:linear-gradient(to right, {stops})'></span>"
        f"<span>{max(loops)} steps{mean}{frame}</span></div>"
    )


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
    """The likeliest tokens after each loop step, group by group; the step at which the token left is marked, and so is what was chosen."""
    parts = []
    for g, steps in reversed(list(enumerate(found.said))):
        rows = []
        for k, said in enumerate(steps, start=1):
            cells = "".join(
                f"<td class='{'hit' if number == found.id else ''}'><code>{html.escape(visible(token))}</code> {_percent(share)}</td>"
                for number, token, share in zip(said.ids, said.tokens, said.shares, strict=True)
            )
            left = k == found.taken[g]
            rows.append(
                f"<tr class='{'left' if left else ''}'><th>{k}{' ★' if left else ''}</th>{cells}<td>{_percent(said.chosen)}</td></tr>"
            )
        last = g == len(found.said) - 1
        parts.append(
            f"<details{' open' if last else ''}><summary>after each step of {html.escape(group_label(g, found.groups[g]))}</summary>"
            f"<div class='scroll'><table class='said'>"
            f"<tr><th>step</th><th colspan='{len(steps[0].tokens)}'>likeliest tokens</th><th>the chosen one</th></tr>"
            f"{''.join(rows)}</table></div></details>"
        )
    return "".join(parts)


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
