"""The figures of the page, in plotly: each a list of panels (title, figure), one panel a group so that a phone can stack them."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from twoscale.report.claims import boundary_label
from twoscale.report.load import RunFiles
from twoscale.report.style import GROUP_COLOURS, VARIANTS, VERDICT_COLOURS, chosen, ordered_colours, visible

Panel = tuple[str, go.Figure]
HEIGHT = 330
EARLY = 10  # loop steps that the shades of a trajectory tell apart: later ones lie at one place where a loop settles


def step_norms(run: RunFiles) -> list[Panel]:
    return _over_training(run, "step_norm", "step norm", first_k=0, log=True)


def step_cosines(run: RunFiles) -> list[Panel]:
    panels = _over_training(run, "step_cosine", "cosine of consecutive steps", first_k=1)
    for _, figure in panels:
        figure.update_yaxes(range=[-1.05, 1.05])
    return panels


def accelerations(run: RunFiles) -> list[Panel]:
    forms = {
        "acceleration": "plain",
        "acceleration_state": "divided by the norm of the state",
        "acceleration_steps": "divided by the norms of both steps, in [0, 1]",
    }
    panels = []
    for form, title in forms.items():
        figure = go.Figure()
        for g, group in enumerate(run.last["groups"]):
            if form in group:
                _band(figure, group[form], 1, GROUP_COLOURS[g % len(GROUP_COLOURS)], run.labels[g])
        log = form != "acceleration_steps"
        panels.append((title, layout(figure, "loop step k", "acceleration", log)))
    return panels


def drift_to_loop(run: RunFiles) -> list[Panel]:
    panels = []
    steps = [r["step"] for r in run.geometry]
    for b, boundary in enumerate(run.last["boundaries"]):
        figure = go.Figure()
        for name in reversed([v for v in VARIANTS if v in boundary["dlr"]]):  # the leading one on top
            colour, _, symbol = VARIANTS[name]
            for suffix, dash, words in (("_k1", "solid", "k ≥ 1"), ("", "dash", "all k")):
                y = [r["boundaries"][b]["dlr"][name + suffix]["mean"] for r in run.geometry]
                figure.add_scatter(
                    x=steps, y=y, name=f"{name}, {words}", mode="lines+markers", line={"color": colour, "dash": dash, "width": 1.6},
                    marker={"symbol": f"{symbol}-open", "size": 12 if name == "settled" else 7},
                    visible=True if suffix else "legendonly",
                )  # fmt: skip
        figure.add_hline(y=1, line_color="#888888", line_width=1)
        panels.append((boundary_label(b, boundary), layout(figure, "training step", "Drift-to-Loop Ratio")))
    return panels


def limit(run: RunFiles) -> list[Panel]:
    figure = go.Figure()
    for g, group in enumerate(run.last["groups"]):
        if "limit" in group:
            _band(figure, group["limit"]["distance"], 0, GROUP_COLOURS[g % len(GROUP_COLOURS)], run.labels[g])
    steps = next(g["limit"]["loops"] for g in run.last["groups"] if "limit" in g)
    return [("all groups", layout(figure, "loop step k", f"distance to the state at step {steps}", log=True))]


def trajectories(run: RunFiles) -> list[Panel]:
    """The plane of all tokens, and for each group the loop of one token magnified, from the first step on."""
    assert run.sequence is not None
    sequence, figure = run.sequence, go.Figure()
    paths = sequence["pca"]["paths"]
    for path in paths:
        token = f"token {path['token']} “{visible(sequence['tokens'][path['token']])}”"
        figure.add_scatter(
            x=[p[0] for p in path["stages"]], y=[p[1] for p in path["stages"]], mode="lines", hoverinfo="skip", showlegend=False,
            line={"color": "#999999", "width": 1},
        )  # fmt: skip
        for g, points in enumerate(path["groups"]):
            _steps(figure, points, 0, GROUP_COLOURS[g % len(GROUP_COLOURS)], run.labels[g], token, path is paths[0])
    share = sequence["pca"]["explained"]
    axes = f"PC 1 ({share[0]:.0%} of variance)", f"PC 2 ({share[1]:.0%})"
    panels = [(f"{len(paths)} tokens through the whole network (grey: from stage to stage)", layout(figure, *axes))]
    path = paths[-1]
    token = f"token {path['token']} “{visible(sequence['tokens'][path['token']])}”"
    for g, points in enumerate(path["groups"]):
        zoom = go.Figure()
        _steps(zoom, points[1:], 1, GROUP_COLOURS[g % len(GROUP_COLOURS)], run.labels[g], token, legend=True)
        panels.append((f"zoom: {token} in {run.labels[g]}, k ≥ 1", layout(zoom, "PC 1", "PC 2")))
    for _, drawn in panels:
        drawn.update_layout(height=360)
    return panels


def _steps(figure: go.Figure, points: Sequence[Sequence[float]], first: int, colour: str, name: str, token: str, legend: bool) -> None:
    """States from loop step to loop step, paler for earlier ones; the last one is larger."""
    n = len(points)
    figure.add_scatter(
        x=[p[0] for p in points], y=[p[1] for p in points], mode="lines+markers", name=name, legendgroup=name, showlegend=legend,
        line={"color": colour, "width": 1},
        marker={"color": colour, "size": [5] * (n - 1) + [10], "opacity": [min(1.0, 0.35 + 0.65 * k / EARLY) for k in range(n)]},
        text=[str(first + k) for k in range(n)], hovertemplate=f"{token}, {name}, step %{{text}}<extra></extra>",
    )  # fmt: skip


def verdict_map(run: RunFiles) -> list[Panel]:
    assert run.sequence is not None
    sequence = run.sequence
    names = sequence["verdict_names"]
    scale = []
    for i, name in enumerate(names):
        scale += [[i / len(names), VERDICT_COLOURS[name]], [(i + 1) / len(names), VERDICT_COLOURS[name]]]
    labels = [f"{t} {visible(token)}" for t, token in enumerate(sequence["tokens"])]
    figure = go.Figure(
        go.Heatmap(
            z=sequence["verdicts"], x=labels, y=run.labels, zmin=-0.5, zmax=len(names) - 0.5,
            colorscale=scale, xgap=1, ygap=3, hovertemplate="%{y}, token %{x}<extra></extra>",
            colorbar={"tickvals": list(range(len(names))), "ticktext": names, "thickness": 12},
        )
    )  # fmt: skip
    figure = layout(figure, "token", "")
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(tickangle=90, tickfont={"size": 9})
    return [("tokens of one held-out sequence", figure)]


def _over_training(run: RunFiles, statistic: str, label: str, first_k: int, log: bool = False) -> list[Panel]:
    records = chosen(run.geometry)
    panels = []
    for g, label_of in enumerate(run.labels):
        figure = go.Figure()
        for record, colour in zip(records, ordered_colours(len(records)), strict=True):
            if statistic in record["groups"][g]:
                _band(figure, record["groups"][g][statistic], first_k, colour, str(record["step"]))
        title = {"text": "training step", "side": "top", "font": {"size": 11}}
        panels.append((label_of, layout(figure, "loop step k", label, log).update_layout(legend_title=title)))
    return panels


def _band(figure: go.Figure, values: dict[str, Any], first_k: int, colour: str, name: str) -> None:
    """A mean with its one-sigma band; hovering over the line tells both."""
    points = [(k, m, s) for k, (m, s) in enumerate(zip(values["mean"], values["std"], strict=True), start=first_k) if m is not None]
    k = [p[0] for p in points]
    upper, lower = [m + s for _, m, s in points], [max(m - s, m / 10) if m > 0 else m - s for _, m, s in points]
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    figure.add_scatter(
        x=[*k, *k[::-1]], y=[*upper, *lower[::-1]], fill="toself", fillcolor=f"rgba({red},{green},{blue},0.13)", line={"width": 0},
        hoverinfo="skip", showlegend=False, legendgroup=name,
    )  # fmt: skip
    figure.add_scatter(
        x=k, y=[p[1] for p in points], customdata=[p[2] for p in points], mode="lines", name=name, legendgroup=name,
        line={"color": colour, "width": 2}, hovertemplate="k = %{x}: %{y:.3g} ± %{customdata:.2g}",
    )  # fmt: skip


def layout(figure: go.Figure, x: str, y: str, log: bool = False) -> go.Figure:
    figure.update_layout(
        template="plotly_white", height=HEIGHT, margin={"l": 58, "r": 8, "t": 6, "b": 44}, hovermode="closest",
        legend={"orientation": "h", "y": -0.25, "font": {"size": 11}},
    )  # fmt: skip
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y, exponentformat="power", **({"type": "log"} if log else {}))
    return figure
