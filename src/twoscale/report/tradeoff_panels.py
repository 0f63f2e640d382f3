"""Figures of a sweep for the page, in plotly."""

import math

import plotly.graph_objects as go

from twoscale.config.words import group_label
from twoscale.report.interactive import Panel, layout
from twoscale.report.load import RunFiles
from twoscale.report.style import family_look, visible
from twoscale.report.tradeoff_figures import CURVES, PAPER, rules_of, short_name, shown_points, slowest_of
from twoscale.report.words import rise
from twoscale.tradeoff.choice import name_of
from twoscale.tradeoff.summary import ORACLES, Sweep

Hover = "%{text}<br>%{x:.3g}, %{y:.4f}<extra></extra>"


def against_tau(run: RunFiles) -> list[Panel]:
    assert run.sweep is not None
    panels = []
    full = run.sweep.point("full")
    for key, label in (("ms", "ms a token"), ("ppl", "perplexity"), ("ce", "CE (nats a token)")):
        figure = go.Figure()
        for family in PAPER:
            points = [p for p in run.sweep.family(family) if p.get(key) is not None and p["setting"]]
            name, colour, _, symbol = family_look(family)
            figure.add_scatter(
                x=[p["setting"] for p in points], y=[p[key] for p in points], text=[p["id"] for p in points], name=name,
                mode="lines+markers",
                line={"color": colour, "width": 2}, marker={"symbol": symbol, "size": 7}, hovertemplate=Hover,
            )  # fmt: skip
        if full is not None and full.get(key) is not None:
            figure.add_hline(y=full[key], line_color="#444444", line_width=1, line_dash="dot")
        layout(figure, "threshold tau (dotted: full run)", label)
        figure.update_xaxes(type="log", exponentformat="power", dtick=1)
        if key == "ms":
            figure.update_yaxes(rangemode="tozero")
        panels.append((label, figure))
    return panels


def tradeoff(run: RunFiles) -> list[Panel]:
    sweep = run.sweep
    assert sweep is not None
    panels = []
    for cost, label, scale in (("flops", "MFLOP a token", 1e-6), ("ms", "ms a token", 1.0)):
        if all(p.get(cost) is None for p in sweep.points):
            continue
        figure = go.Figure()
        for family in ["full", *(f for f in CURVES if sweep.family(f)), *rules_of(sweep)]:
            curve(figure, sweep, family, cost)
        front = sweep.front(cost)
        figure.add_scatter(
            x=[p[cost] * scale for p in front], y=[squeezed(p["dce"]) for p in front], name="Pareto front",
            mode="markers", hoverinfo="skip",
            marker={"symbol": "circle-open", "size": 14, "color": "#000000", "line": {"width": 1}},
        )  # fmt: skip
        layout(figure, label, "CE above the full run (nats)")
        figure.update_layout(height=440)
        cost_axis(figure, sweep, cost)
        rise_axis(figure)
        panels.append((f"CE against {'FLOPs' if cost == 'flops' else 'time'}", figure))
    return panels


def curve(figure: go.Figure, sweep: Sweep, family: str, cost: str) -> None:
    """One family of settings: CE above the full run against a cost (`ms` or `flops`)."""
    points = sorted((p for p in sweep.family(family) if p.get(cost) is not None), key=lambda p: p[cost])
    name, colour, _, symbol = family_look(family)
    lone, scale = family in ("full", "fixed-one", "calibrated"), 1e-6 if cost == "flops" else 1.0
    figure.add_scatter(
        x=[p[cost] * scale for p in points], y=[squeezed(p["dce"]) for p in points], name=name,
        mode="markers" if lone else "lines+markers",
        text=[f"{name_of(p, sweep.header['loops'])}: {p['mean_steps']:.2f} steps, dCE {rise(p)}" for p in points],
        line={"color": colour, "width": 1.8, "dash": "dash" if family in ORACLES else "solid"},
        marker={"symbol": symbol, "size": 13 if family == "calibrated" else 7, "color": colour},
        hovertemplate="%{text}<br>%{x:.3g}<extra></extra>",
    )  # fmt: skip


def cost_axis(figure: go.Figure, sweep: Sweep, cost: str) -> None:
    """A logarithmic axis of all costs of the sweep."""
    costs = [p[cost] * (1e-6 if cost == "flops" else 1.0) for p in sweep.points if p.get(cost) is not None]
    ticks = log_ticks(min(costs), max(costs))
    figure.update_xaxes(type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks])


def rise_axis(figure: go.Figure) -> None:
    """Rises of CE, by `squeezed`."""
    rises = [-0.1, -0.01, 0.0, 0.001, 0.01, 0.1, 1.0]
    figure.update_yaxes(tickvals=[squeezed(r) for r in rises], ticktext=[f"{r:+g}" if r else "0" for r in rises])


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from below `low` to above `high`; plotly's own ticks leave the power out."""
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    return [m * 10.0**d for d in decades for m in (1, 2, 5) if low / 2.5 <= m * 10.0**d <= high * 2.5]


def squeezed(rise: float) -> float:
    """A rise of CE on an axis that is even near zero and logarithmic far from it."""
    return math.copysign(math.log10(1 + abs(rise) / 0.001), rise)


def steps_taken(run: RunFiles) -> list[Panel]:
    assert run.sweep is not None
    panels = []
    for g in range(run.sweep.header["groups"]):
        figure = go.Figure()
        for p in shown_points(run.sweep):
            counts = p["steps"][g]["histogram"][1:]
            figure.add_scatter(
                x=list(range(1, 1 + len(counts))), y=[c / sum(counts) for c in counts], name=short_name(p), mode="lines",
                line={"color": family_look(p["family"])[1], "shape": "hvh", "width": 2}, hovertemplate="%{x} steps: %{y:.1%}",
            )  # fmt: skip
        layout(figure, "steps taken", "share of tokens")
        figure.update_yaxes(tickformat=".0%")
        panels.append((run.labels[g] if g < len(run.labels) else group_label(g), figure))
    return panels


def hard_tokens(run: RunFiles) -> list[Panel]:
    assert run.sweep is not None
    figure = go.Figure()
    for p in shown_points(run.sweep):
        _, colour, _, symbol = family_look(p["family"])
        figure.add_scatter(
            x=[b["loss"] for b in p["hard"]["by_loss"]], y=[b["steps"] for b in p["hard"]["by_loss"]], name=short_name(p),
            mode="lines+markers", line={"color": colour, "width": 2}, marker={"symbol": symbol, "size": 7},
            hovertemplate="loss %{x:.2f}: %{y:.2f} steps",
        )  # fmt: skip
    layout(figure, "loss of the next token, full run (nats), eighths", "mean steps")
    p = slowest_of(run.sweep)
    tokens = p["hard"]["tokens"][::-1]
    bars = go.Figure()
    bars.add_scatter(
        x=[t["steps"] for t in tokens], y=[visible(t["token"])[:14] for t in tokens], mode="markers",
        marker={"color": family_look(p["family"])[1], "size": 9}, customdata=[[t["count"], t["loss"]] for t in tokens],
        hovertemplate="%{y}: %{x:.2f} steps, %{customdata[0]} times, loss %{customdata[1]:.2f}<extra></extra>",
    )  # fmt: skip
    layout(bars, "mean steps", "")
    bars.update_layout(height=480, margin={"l": 90})
    bars.update_yaxes(tickfont={"size": 10}, type="category")
    return [("mean steps against the loss of the next token", figure), (f"tokens that take longest and shortest, {short_name(p)}", bars)]
