"""Figures of a task for the page, in plotly, and its table of rules."""

import html

import plotly.graph_objects as go

from twoscale.report.depth_figures import by_depth, shown_rules
from twoscale.report.depth_words import VERDICTS, depth_sentences, limit_words, percent, rank_words, share_words, task_text
from twoscale.report.interactive import Panel, layout
from twoscale.report.load import RunFiles
from twoscale.report.style import GROUP_COLOURS
from twoscale.report.tables import prose, table
from twoscale.tradeoff.depth_summary import BASE, best_fixed, depth_rows
from twoscale.tradeoff.summary import Sweep

# Viridis, written so that the script of the page leaves it alone: that lightens dark colours on a dark page, and an order must stay.
VIRIDIS = ((0.0, "rgb(68,1,84)"), (0.25, "rgb(59,82,139)"), (0.5, "rgb(33,145,140)"), (0.75, "rgb(94,201,98)"), (1.0, "rgb(253,231,37)"))
SYMBOLS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x")


def staircase(run: RunFiles) -> list[Panel]:
    found = run.staircase
    assert found is not None
    figure = go.Figure(
        go.Heatmap(
            z=found.accuracy, x=list(range(1, found.loops + 1)), y=[str(d) for d in found.depths], zmin=0, zmax=1, colorscale=VIRIDIS,
            text=[[f"{100 * v:.0f}" for v in row] for row in found.accuracy], texttemplate="%{text}", textfont={"size": 9},
            customdata=[[n] * found.loops for n in found.count],
            hovertemplate="depth %{y}, %{x} steps: %{z:.1%} of %{customdata} answers<extra></extra>",
            colorbar={"thickness": 10, "tickformat": ".0%"},
        )
    )  # fmt: skip
    layout(figure, "steps of every token", "true depth")
    figure.update_layout(height=120 + 26 * max(5, len(found.depths)), margin={"l": 44})
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_xaxes(dtick=1, tickfont={"size": 10})
    return [("percent of right answers by true depth and steps", figure)]


def steps_by_depth(run: RunFiles) -> list[Panel]:
    sweep = run.depth
    assert sweep is not None
    panels, fixed = [], best_fixed(sweep)
    for title, rows in shown_rules(sweep):
        figure = go.Figure()
        depths, _ = by_depth(sweep, "full")
        figure.add_scatter(x=depths, y=depths, name="true depth", mode="lines", line={"color": "#888888", "width": 1, "dash": "dot"})
        figure.add_scatter(
            x=depths, y=[fixed] * len(depths), name="best fixed depth", mode="lines", line={"color": "#666666", "width": 1, "dash": "dash"}
        )
        for i, row in enumerate(rows):
            x, y = by_depth(sweep, str(row.id))
            figure.add_scatter(
                x=x, y=y, name=row.label.replace(f"{title}, ", ""), mode="lines+markers", text=[str(row.id)] * len(x),
                line={"color": GROUP_COLOURS[i % len(GROUP_COLOURS)], "width": 2},
                marker={"symbol": SYMBOLS[i % len(SYMBOLS)], "size": 7},
                hovertemplate="%{text}<br>depth %{x}: %{y:.2f} steps<extra></extra>",
            )  # fmt: skip
        layout(figure, "true depth", "mean steps of the answers")
        figure.update_layout(height=440, legend={"y": -0.16})
        figure.update_yaxes(range=[0, sweep.header["loops"] + 0.5])
        panels.append((title, figure))
    return panels


def depth_section(sweep: Sweep) -> str:
    """Which rules find the depth: sentences and the table."""
    paragraphs = "".join(f"<p>{prose(paragraph)}</p>" for paragraph in depth_sentences(sweep))
    return f"{paragraphs}{depth_table(sweep)}"


def depth_table(sweep: Sweep) -> str:
    """Every rule at its certified setting."""
    head = [
        "rule",
        "steps (D@-0.5)",
        "of the best fixed depth's",
        "right",
        "drop (points)",
        "rank correlation",
    ]
    head += ["random exits: right", "all tokens: steps", "verdict", "setting"]
    rows = []
    for scope, words in (("all", ""), ("answers", ", answers alone")):
        for row in (row for row in depth_rows(sweep) if row.scope == scope):
            name, setting = row.label if row.family in BASE else f"{row.label}{words}", row.id or "none certified: all loops"
            numbers = [
                f"{row.steps:.2f} [{row.steps_low:.2f}, {row.steps_high:.2f}]", share_words(row), percent(row.accuracy),
                f"{100 * row.drop:.2f} [{100 * row.drop_low:.2f}, {100 * row.drop_high:.2f}]", rank_words(row),
                "–" if row.random is None else percent(row.random), f"{row.all_steps:.2f}",
            ]  # fmt: skip
            cells = "".join(f"<td class='n'>{n.replace(' ', '&nbsp;')}</td>" for n in numbers)
            verdict = "" if row.family in BASE else VERDICTS[row.verdict].replace(" ", "&nbsp;")
            rows.append(f"<tr><td>{html.escape(name)}</td>{cells}<td>{verdict}</td><td>{html.escape(setting)}</td></tr>")
    return table(f"{sweep.header['checkpoint']}, {task_text(sweep)}; settings {limit_words(sweep)}", head, rows)
