"""The figures of the page, in plotly: each a list of panels (title, figure), one panel a group so that a phone can stack them."""

from typing import Any

import plotly.graph_objects as go

from twoscale.report.claims import boundary_label
from twoscale.report.load import RunFiles
from twoscale.report.style import GROUP_COLOURS, VARIANTS, VERDICT_COLOURS, chosen, ordered_colours, visible

Panel = tuple[str, go.Figure]
HEIGHT = 330
EARLY = 10  # loop steps that colours of a trajectory tell apart: later ones lie at one place where a loop settles


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
    """Three-dimensional, to be turned by hand."""
    assert run.sequence is not None
    sequence = run.sequence
    figure = go.Figure()
    for path in sequence["pca"]["paths"]:
        token = f"token {path['token']} “{visible(sequence['tokens'][path['token']])}”"
        for g, points in enumerate(path["groups"]):
            x, y, z = (list(axis) for axis in zip(*points, strict=True))
            figure.add_scatter3d(
                x=x, y=y, z=z, mode="lines+markers", name=run.labels[g], legendgroup=str(g),
                showlegend=path is sequence["pca"]["paths"][0], line={"color": GROUP_COLOURS[g % len(GROUP_COLOURS)], "width": 2},
                marker={"size": 3, "color": list(range(len(points))), "colorscale": "Viridis", "cmin": 0, "cmax": EARLY},
                hovertemplate=f"{token}, {run.labels[g]}, step %{{marker.color}}<extra></extra>",
            )  # fmt: skip
    share = sequence["pca"]["explained"]
    figure.update_layout(
        scene={
            "camera": {"eye": {"x": 1.5, "y": 1.5, "z": 0.9}},
            **{a: {"title": f"PC {i + 1} ({share[i]:.0%})", "showbackground": False} for i, a in enumerate(("xaxis", "yaxis", "zaxis"))},
        },
        margin={"l": 0, "r": 0, "t": 6, "b": 0}, height=460, legend={"orientation": "h"}, template="plotly_white",
    )  # fmt: skip
    return [(f"all groups; markers go from violet (step 0) to yellow (step {EARLY} and later)", figure)]


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
                _band(figure, record["groups"][g][statistic], first_k, colour, f"training step {record['step']}")
        panels.append((label_of, layout(figure, "loop step k", label, log)))
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
