"""Figures of a task in matplotlib: the staircase, and steps against the true depth."""

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from twoscale.report.load import RunFiles
from twoscale.report.style import GROUP_COLOURS
from twoscale.tradeoff.depth_summary import BASE, RuleDepth, best_fixed, depth_rows
from twoscale.tradeoff.summary import Sweep

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
KINDS = (("step norm and cosine", ("step-norm", "cosine")), ("acceleration", ("acceleration",)), ("output, gate and learned", ()))


def staircase(run: RunFiles) -> Figure:
    """Accuracy by true depth and steps, with the numbers in the cells."""
    found = run.staircase
    assert found is not None
    rows, loops = len(found.depths), found.loops
    figure, ax = plt.subplots(figsize=(max(4.0, 0.46 * loops + 1.4), max(2.4, 0.34 * rows + 1.2)))
    figure.suptitle(run.trained_by.replace("$", r"\$"), fontsize=9, color="#555555")
    shown = ax.imshow(found.accuracy, aspect="auto", cmap="viridis", vmin=0, vmax=1, extent=(0.5, loops + 0.5, rows - 0.5, -0.5))
    for i, row in enumerate(found.accuracy):
        for k, value in enumerate(row, start=1):
            ax.text(k, i, f"{100 * value:.0f}", ha="center", va="center", fontsize=7, color="#000000" if value > 0.6 else "#FFFFFF")
    ax.set_yticks(range(rows), [str(d) for d in found.depths])
    ax.set_xticks(range(1, loops + 1))
    ax.grid(visible=False)
    ax.set(xlabel="steps of every token", ylabel=f"true depth of the answer ({found.task})")
    figure.colorbar(shown, ax=ax, label="share of right answers", format=lambda x, _: f"{100 * x:.0f} %")
    return figure


def shown_rules(sweep: Sweep) -> list[tuple[str, list[RuleDepth]]]:
    """Rules at their certified settings, in panels by kind; rules without a certified setting are left out."""
    rows = [row for row in depth_rows(sweep) if row.scope == "all" and row.id is not None and row.family not in BASE]
    panels, named = [], [name for _, names in KINDS for name in names]
    for title, names in KINDS:
        mine = [row for row in rows if (row.family.partition(":")[0] in names if names else row.family.partition(":")[0] not in named)]
        if mine:
            panels.append((title, sorted(mine, key=lambda row: row.family)))
    return panels


def by_depth(sweep: Sweep, id: str) -> tuple[list[int], list[float]]:
    """Mean steps of the answers of each true depth under one setting."""
    point = sweep.point(id)
    assert point is not None
    return [row["depth"] for row in point["by_depth"]], [row["steps"] for row in point["by_depth"]]


def steps_by_depth(run: RunFiles) -> Figure:
    """Mean steps against the true depth, a panel for each kind of rule."""
    sweep = run.depth
    assert sweep is not None
    panels = shown_rules(sweep)
    figure, axes = plt.subplots(1, len(panels), figsize=(3.5 * len(panels), 4.6), sharey=True, squeeze=False)
    figure.suptitle(f"{run.config.name}, {sweep.header['checkpoint']}".replace("$", r"\$"), fontsize=9, color="#555555")
    for ax, (title, rows) in zip(axes[0], panels, strict=True):
        depths, _ = by_depth(sweep, "full")
        ax.plot(depths, depths, color="#888888", linewidth=1, linestyle=":", label="true depth")
        ax.axhline(best_fixed(sweep), color="#666666", linewidth=1, linestyle="--", label="best fixed depth")
        for i, row in enumerate(rows):
            x, y = by_depth(sweep, str(row.id))
            label = row.label.replace(f"{title}, ", "")
            ax.plot(
                x,
                y,
                color=GROUP_COLOURS[i % len(GROUP_COLOURS)],
                marker=MARKERS[i % len(MARKERS)],
                markersize=4,
                linewidth=1.4,
                label=label,
            )
        ax.set(title=title, xlabel="true depth")
        ax.set_ylim(0, sweep.header["loops"] + 0.5)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False, fontsize=8)
    axes[0][0].set_ylabel("mean steps of the answers")
    return figure
