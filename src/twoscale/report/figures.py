"""The paper's figures in matplotlib, for print. A figure draws numbers from the run's files and computes nothing."""

import math
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from twoscale.config.words import group_number
from twoscale.report.claims import boundary_label
from twoscale.report.load import RunFiles
from twoscale.report.style import GROUP_COLOURS, VARIANTS, VERDICT_COLOURS, chosen, ordered_colours, visible

STYLE: dict[str, Any] = {
    "font.size": 10, "axes.titlesize": 10.5, "axes.labelsize": 10, "legend.fontsize": 9, "xtick.labelsize": 9, "ytick.labelsize": 9,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25, "figure.constrained_layout.use": True,
    "pdf.fonttype": 42, "font.family": "DejaVu Sans",
}  # fmt: skip

MAP_TOKENS = 32


def _label(token: str) -> str:
    """A token as matplotlib may print it: a dollar sign would begin a formula."""
    return visible(token).replace("$", r"\$")


def _panels(run: RunFiles, rows: int = 1, height: float = 2.9) -> tuple[Figure, list[list[Axes]]]:
    n = len(run.names)
    figure, axes = plt.subplots(rows, n, figsize=(max(3.4, 2.7 * n), height * rows), sharey="row", squeeze=False)
    figure.suptitle(run.trained_by.replace("$", r"\$"), fontsize=9, color="#555555")
    return figure, [list(row) for row in axes]


def _line(ax: Axes, k: list[int], values: dict[str, Any], colour: str, log: bool = False) -> None:
    """A mean with its one-sigma band; where the band leaves the positive numbers on a log axis it ends at the mean's tenth."""
    points = [(i, m, s) for i, m, s in zip(k, values["mean"], values["std"], strict=True) if m is not None]
    x, mean = [p[0] for p in points], [p[1] for p in points]
    low = [max(m - s, m / 10) if log else m - s for _, m, s in points]
    ax.plot(x, mean, color=colour, linewidth=1.6)
    ax.fill_between(x, low, [m + s for _, m, s in points], color=colour, alpha=0.13, linewidth=0)


def _checkpoint_legend(figure: Figure, records: list[dict[str, Any]], colours: list[str]) -> None:
    lines = [Line2D([], [], color=c, linewidth=2) for c in colours]
    names, columns = [str(r["step"]) for r in records], min(6, len(records))
    figure.legend(lines, names, title="training step", loc="outside lower center", ncols=columns, frameon=False)


def step_norms(run: RunFiles) -> Figure:
    """One panel a group, one line a checkpoint."""
    figure, [axes] = _panels(run)
    records = chosen(run.geometry)
    colours = ordered_colours(len(records))
    for g, ax in enumerate(axes):
        for record, colour in zip(records, colours, strict=True):
            values = record["groups"][g]["step_norm"]
            _line(ax, list(range(len(values["mean"]))), values, colour, log=True)
        ax.set(yscale="log", title=run.labels[g], xlabel="loop step k")
    axes[0].set_ylabel("step norm ‖D⁽ᵏ⁾‖")
    _checkpoint_legend(figure, records, colours)
    return figure


def step_cosines(run: RunFiles) -> Figure:
    """The first eight steps above, all steps below."""
    figure, axes = _panels(run, rows=2, height=2.5)
    records = chosen(run.geometry)
    colours = ordered_colours(len(records))
    for row, last in enumerate((8, None)):
        for g, ax in enumerate(axes[row]):
            for record, colour in zip(records, colours, strict=True):
                values = {key: v[:last] for key, v in record["groups"][g].get("step_cosine", {"mean": [], "std": []}).items()}
                _line(ax, list(range(1, 1 + len(values["mean"]))), values, colour)
            ax.axhline(0, color="#888888", linewidth=0.8)
            ax.set(ylim=(-1.05, 1.05), xlabel="loop step k")
            if row == 0:
                ax.set_title(run.labels[g])
        axes[row][0].set_ylabel("cos(D⁽ᵏ⁾, D⁽ᵏ⁻¹⁾)\n" + ("first steps" if last else "all steps"))
    _checkpoint_legend(figure, records, colours)
    return figure


def accelerations(run: RunFiles) -> Figure:
    """The three forms of the acceleration at the last checkpoint, one line a group."""
    forms = {"acceleration": "‖D⁽ᵏ⁾ − D⁽ᵏ⁻¹⁾‖", "acceleration_state": "… / ‖x⁽ᵏ⁾‖", "acceleration_steps": "… / (‖D⁽ᵏ⁾‖ + ‖D⁽ᵏ⁻¹⁾‖)"}
    figure, axes = plt.subplots(1, 3, figsize=(8.1, 2.9))
    figure.suptitle(run.trained_by.replace("$", r"\$"), fontsize=9, color="#555555")
    for ax, (form, label) in zip(axes, forms.items(), strict=True):
        log = form != "acceleration_steps"
        for g, group in enumerate(run.last["groups"]):
            if form in group:
                _line(ax, list(range(1, 1 + len(group[form]["mean"]))), group[form], GROUP_COLOURS[g % len(GROUP_COLOURS)], log=log)
        ax.set(xlabel="loop step k", title=label, **({"yscale": "log"} if log else {"ylim": (0, 1.05)}))
    axes[0].set_ylabel("acceleration")
    lines = [Line2D([], [], color=GROUP_COLOURS[g % len(GROUP_COLOURS)], linewidth=2) for g in range(len(run.names))]
    figure.legend(lines, run.labels, loc="outside lower center", ncols=6, frameon=False)
    return figure


def drift_to_loop(run: RunFiles) -> Figure:
    """Every reading of the ratio at every boundary, over training; solid: mean step over k >= 1, dashed: over all steps."""
    n = len(run.last["boundaries"])
    figure, axes = plt.subplots(1, n, figsize=(max(4.2, 3.8 * n), 3.4), sharey=True, squeeze=False)
    figure.suptitle(run.trained_by.replace("$", r"\$"), fontsize=9, color="#555555")
    used = [v for v in VARIANTS if v in run.last["boundaries"][0]["dlr"]]
    steps = [r["step"] for r in run.geometry]
    for b, ax in enumerate(axes[0]):
        for name in reversed(used):  # the leading one on top, and larger, since others may lie right under it
            colour, marker, _ = VARIANTS[name]
            size = 8 if name == "settled" else 4
            for suffix, style in (("_k1", "-"), ("", "--")):
                values = [r["boundaries"][b]["dlr"][name + suffix]["mean"] for r in run.geometry]
                shown = [math.nan if v is None else v for v in values]
                ax.plot(steps, shown, style, color=colour, marker=marker, markersize=size, markerfacecolor="none", linewidth=1.4)
        ax.axhline(1, color="#444444", linewidth=0.9)
        ax.set(yscale="symlog", xlabel="training step", title=boundary_label(b, run.last["boundaries"][b]))
        ax.margins(y=0.12)
        ax.set_ylim(bottom=-0.15)
    axes[0][0].set_ylabel("Drift-to-Loop Ratio (line: 1)")
    keys = [Line2D([], [], color=VARIANTS[v][0], marker=VARIANTS[v][1], markersize=6, markerfacecolor="none") for v in used]
    keys += [Line2D([], [], color="#444444", linestyle=s) for s in ("-", "--")]
    figure.legend(keys, [*used, "mean over k ≥ 1", "over all k"], loc="outside lower center", ncols=4, frameon=False)
    return figure


def limit(run: RunFiles) -> Figure:
    """Distance to the limit state, one line a group."""
    figure, ax = plt.subplots(figsize=(4.6, 3.2))
    figure.suptitle(run.trained_by.replace("$", r"\$"), fontsize=9, color="#555555")
    for g, group in enumerate(run.last["groups"]):
        values = group["limit"]["distance"]
        colour = GROUP_COLOURS[g % len(GROUP_COLOURS)]
        _line(ax, list(range(len(values["mean"]))), values, colour, log=True)
        rate = group["limit"]["contraction_rate"]["mean"]
        shown = "no rate" if rate is None else f"{rate:.2f} a step"
        ax.plot([], [], color=colour, linewidth=2, label=f"{run.labels[g]}: {shown}")
    steps = run.last["groups"][0]["limit"]["loops"]
    ax.set(yscale="log", xlabel="loop step k", ylabel=f"distance to the state at step {steps}")
    ax.legend(frameon=False)
    return figure


def trajectories(run: RunFiles) -> Figure:
    """A few tokens through the whole network in one plane, and one loop of one token magnified."""
    assert run.sequence is not None
    sequence = run.sequence
    figure, (ax, zoom) = plt.subplots(1, 2, figsize=(8.4, 4.0), width_ratios=(1.25, 1))
    figure.suptitle(f"{_label(run.config.name)}, {run.made_with}, step {sequence['step']}", fontsize=9, color="#555555")
    loops = sequence["loops"]
    for path in sequence["pca"]["paths"]:
        ends = [path["stages"][i] for i in range(len(path["stages"]))]
        ax.plot([p[0] for p in ends], [p[1] for p in ends], color="#BBBBBB", linewidth=0.8, zorder=1)
        for g, points in enumerate(path["groups"]):
            ax.scatter(
                [p[0] for p in points], [p[1] for p in points], c=range(len(points)), cmap="viridis", vmin=0, vmax=loops, s=7, zorder=2
            )
            ax.plot(*points[-1][:2], marker="o", markersize=6, markerfacecolor="none", zorder=3,
                    markeredgecolor=GROUP_COLOURS[g % len(GROUP_COLOURS)], markeredgewidth=1.6)  # fmt: skip
    path, g = sequence["pca"]["paths"][-1], len(run.names) // 2
    points = path["groups"][g][1:]  # the start is noise, far off
    zoom.plot([p[0] for p in points], [p[1] for p in points], color="#BBBBBB", linewidth=0.8, zorder=1)
    shown = zoom.scatter(
        [p[0] for p in points], [p[1] for p in points], c=range(1, 1 + len(points)), cmap="viridis", vmin=0, vmax=loops, s=16, zorder=2
    )
    token = _label(sequence["tokens"][path["token"]])
    zoom.set(title=f"{run.labels[g]}, token {path['token']} “{token}”, k ≥ 1", xlabel="PC 1", ylabel="PC 2")
    share = sequence["pca"]["explained"]
    ax.set(title=f"{len(sequence['pca']['paths'])} tokens", xlabel=f"PC 1 ({share[0]:.0%} of variance)", ylabel=f"PC 2 ({share[1]:.0%})")
    figure.colorbar(shown, ax=zoom, label="loop step k")
    marks = [
        Line2D([], [], marker="o", linestyle="", markersize=7, markerfacecolor="none", markeredgecolor=GROUP_COLOURS[i % 7])
        for i in range(len(run.names))
    ]
    figure.legend(marks, [f"leaves {label}" for label in run.labels], loc="outside lower center", ncols=4, frameon=False)
    return figure


def verdict_map(run: RunFiles) -> Figure:
    """What each token does in each group, thirty-two tokens a line."""
    assert run.sequence is not None
    sequence = run.sequence
    names, rows, tokens = sequence["verdict_names"], sequence["verdicts"], sequence["tokens"]
    n_lines = -(-len(tokens) // MAP_TOKENS)
    figure, axes = plt.subplots(n_lines, 1, figsize=(7.6, n_lines * (0.3 * len(rows) + 0.75) + 0.7), squeeze=False)
    figure.suptitle(f"{_label(run.config.name)}, {run.made_with}, step {sequence['step']}", fontsize=9, color="#555555")
    turned = 90 if any(len(t) > 2 for t in tokens) else 0
    for line, ax in enumerate(axes[:, 0]):
        first = line * MAP_TOKENS
        shown = tokens[first : first + MAP_TOKENS]
        for g, row in enumerate(rows):
            for t, code in enumerate(row[first : first + MAP_TOKENS]):
                ax.add_patch(Rectangle((t, g), 0.94, 0.9, color=VERDICT_COLOURS[names[code]], linewidth=0))
        ax.set(xlim=(0, MAP_TOKENS), ylim=(len(rows), 0), ylabel="group")
        ax.set_xticks([t + 0.5 for t in range(len(shown))], [_label(t[:8]) for t in shown], rotation=turned)
        ax.set_yticks([g + 0.45 for g in range(len(rows))], [group_number(g, name) for g, name in enumerate(sequence["groups"])])
        ax.grid(False)
    axes[-1, 0].set_xlabel("token")
    used = sorted({code for row in rows for code in row})
    patches = [Patch(color=VERDICT_COLOURS[names[c]]) for c in used]
    figure.legend(patches, [names[c] for c in used], loc="outside lower center", ncols=4, frameon=False)
    return figure
