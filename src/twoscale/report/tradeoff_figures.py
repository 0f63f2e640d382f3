"""Figures of a sweep in matplotlib: the paper's three panels, and the ones that decide."""

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from twoscale.config.words import group_label
from twoscale.report.load import RunFiles
from twoscale.report.style import family_look, visible
from twoscale.tradeoff.choice import BASELINES, FLAT
from twoscale.tradeoff.summary import ORACLES, Sweep

PAPER = ("step-norm", "kl", "acceleration")
CURVES = ("fixed-one", "fixed", "random", "oracle-stay", "oracle-lagrange")


def rules_of(sweep: Sweep) -> list[str]:
    """Families of rules, as they come in the sweep."""
    return [f for f in dict.fromkeys(p["family"] for p in sweep.points) if f not in (*BASELINES, *ORACLES)]


def shown_points(sweep: Sweep) -> list[dict[str, Any]]:
    """One setting of each rule to look at closely: the cheapest that keeps CE, or the one that rises least."""
    found = []
    for family in rules_of(sweep):
        points = [p for p in sweep.family(family) if "hard" in p]
        if points:
            found.append(sweep.cheapest((family,), FLAT) or min(points, key=lambda p: p["dce"]))
    return found


def _title(figure: Figure, run: RunFiles) -> None:
    assert run.sweep is not None
    figure.suptitle(f"{run.config.name}, {run.sweep.header['checkpoint']}".replace("$", r"\$"), fontsize=9, color="#555555")


def against_tau(run: RunFiles) -> Figure:
    """ms a token, PPL and CE against tau."""
    assert run.sweep is not None
    figure, axes = plt.subplots(1, 3, figsize=(8.6, 3.0))
    _title(figure, run)
    full = run.sweep.point("full")
    for ax, (key, label) in zip(axes, (("ms", "ms a token"), ("ppl", "perplexity"), ("ce", "CE (nats a token)")), strict=True):
        for family in PAPER:
            points = [p for p in run.sweep.family(family) if p.get(key) is not None and p["setting"]]
            name, colour, marker, _ = family_look(family)
            x, y = [p["setting"] for p in points], [p[key] for p in points]
            ax.plot(x, y, color=colour, marker=marker, markersize=4.5, linewidth=1.5, label=name)
            if key != "ppl" and points:
                low, high = zip(*(_between(p, key, full) for p in points), strict=True)
                ax.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
        if full is not None and full.get(key) is not None:
            ax.axhline(full[key], color="#444444", linewidth=0.9, linestyle=":")
        ax.set(xscale="log", xlabel="threshold tau", title=label)
    axes[0].set_ylim(bottom=0)
    handles = [Line2D([], [], color=family_look(f)[1], marker=family_look(f)[2], label=family_look(f)[0]) for f in PAPER]
    handles.append(Line2D([], [], color="#444444", linestyle=":", label="full run"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _between(point: dict[str, Any], key: str, full: dict[str, Any] | None) -> tuple[float, float]:
    """The interval of a time, or of CE: that of its difference to the full run, since documents differ far more than settings."""
    if key == "ms":
        return point["ms_low"], point["ms_high"]
    base = point["ce"] - point["dce"] if full is None else full["ce"]
    return base + point["dce_low"], base + point["dce_high"]


def tradeoff(run: RunFiles) -> Figure:
    """CE above the full run against FLOPs and against ms, all rules, baselines and oracles; the front of what can be had marked."""
    sweep = run.sweep
    assert sweep is not None
    timed = any(p.get("ms") is not None for p in sweep.points)
    costs = [("flops", "MFLOP a token", 1e-6)] + ([("ms", "ms a token", 1.0)] if timed else [])
    figure, axes = plt.subplots(1, len(costs), figsize=(4.6 * len(costs), 4.2), sharey=True, squeeze=False)
    _title(figure, run)
    families = ["full", *(f for f in CURVES if sweep.family(f)), *rules_of(sweep)]
    for ax, (cost, label, scale) in zip(axes[0], costs, strict=True):
        for family in families:
            _curve(ax, sweep, family, cost, scale)
        front = sweep.front(cost)
        ax.scatter(
            [p[cost] * scale for p in front], [p["dce"] for p in front], s=95, facecolors="none", edgecolors="#000000", linewidths=0.8
        )
        ax.axhline(0, color="#444444", linewidth=0.8, linestyle=":")
        ax.set(xscale="log", xlabel=label)
        ax.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_yscale("symlog", linthresh=0.005)
    axes[0][0].set_ylabel("CE above the full run (nats a token)")
    handles = [
        Line2D([], [], color=family_look(f)[1], marker=family_look(f)[2], label=family_look(f)[0], linestyle=_style(f), markersize=5)
        for f in families
    ]
    handles.append(Line2D([], [], color="#000000", marker="o", markersize=8, markerfacecolor="none", linestyle="", label="Pareto front"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _style(family: str) -> Any:
    return "" if family in ("full", "fixed-one", "calibrated") else "--" if family in ORACLES else "-"


def _curve(ax: Axes, sweep: Sweep, family: str, cost: str, scale: float) -> None:
    points = sorted((p for p in sweep.family(family) if p.get(cost) is not None), key=lambda p: p[cost])
    _, colour, marker, _ = family_look(family)
    size = 11 if family == "calibrated" else 4.5
    ax.plot(
        [p[cost] * scale for p in points], [p["dce"] for p in points], color=colour, marker=marker, markersize=size, linewidth=1.3,
        linestyle=_style(family), zorder=5 if family == "calibrated" else 2,
    )  # fmt: skip


def steps_taken(run: RunFiles) -> Figure:
    """How many steps tokens take in each group, one line a rule at its shown setting."""
    assert run.sweep is not None
    n = run.sweep.header["groups"]
    figure, axes = plt.subplots(1, n, figsize=(max(3.6, 2.9 * n), 3.1), sharey=True, squeeze=False)
    _title(figure, run)
    shown = shown_points(run.sweep)
    for g, ax in enumerate(axes[0]):
        for p in shown:
            counts = p["steps"][g]["histogram"][1:]
            ax.plot(
                range(1, 1 + len(counts)),
                [c / sum(counts) for c in counts],
                drawstyle="steps-mid",
                color=family_look(p["family"])[1],
                linewidth=1.5,
            )
        ax.set(title=run.labels[g] if g < len(run.labels) else group_label(g), xlabel="steps taken")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axes[0][0].set_ylabel("share of tokens")
    handles = [Line2D([], [], color=family_look(p["family"])[1], label=short_name(p)) for p in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False)
    return figure


def hard_tokens(run: RunFiles) -> Figure:
    """Mean steps against the token's loss, and the tokens that take longest and shortest."""
    assert run.sweep is not None
    shown = shown_points(run.sweep)
    figure, (ax, bars) = plt.subplots(1, 2, figsize=(8.6, 4.2))
    _title(figure, run)
    for p in shown:
        x, y = [b["loss"] for b in p["hard"]["by_loss"]], [b["steps"] for b in p["hard"]["by_loss"]]
        ax.plot(
            x, y, color=family_look(p["family"])[1], marker=family_look(p["family"])[2], markersize=4.5, linewidth=1.4, label=short_name(p)
        )
    ax.set(xlabel="loss of the next token in the full run (nats), eighths", ylabel="mean steps")
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(5, max(1, len(labels))), frameon=False)
    p = slowest_of(run.sweep)
    tokens = p["hard"]["tokens"][::-1]
    bars.plot([t["steps"] for t in tokens], range(len(tokens)), "o", color=family_look(p["family"])[1], markersize=5)
    bars.set_yticks(range(len(tokens)), [visible(t["token"])[:12].replace("$", r"\$") for t in tokens], fontsize=7)
    bars.set(xlabel="mean steps", title=f"most and fewest steps, {short_name(p)}")
    return figure


def short_name(point: dict[str, Any]) -> str:
    return "calibrated" if point["family"] == "calibrated" else str(point["id"])


def slowest_of(sweep: Sweep) -> dict[str, Any]:
    """The rule whose tokens are listed: acceleration if it was swept."""
    shown = shown_points(sweep)
    return next((p for p in shown if p["family"] == "acceleration"), shown[0])
