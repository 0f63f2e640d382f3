"""Steps by kind of token, one rule each at its shown setting: for print (matplotlib), for the page (plotly), and in a sentence."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import plotly.graph_objects as go
from matplotlib.figure import Figure

from twoscale.config.words import plural
from twoscale.report.interactive import Panel, layout
from twoscale.report.load import RunFiles
from twoscale.report.style import family_look
from twoscale.report.tradeoff_figures import short_name, shown_points
from twoscale.tradeoff.summary import FEWEST_OF_A_KIND, Sweep


def points_with_kinds(sweep: Sweep) -> list[dict[str, Any]]:
    """The shown setting of each rule, where its tokens were told apart by kind; files of older versions have none."""
    return [p for p in shown_points(sweep) if len(p["hard"].get("kinds", [])) > 1]


def _main_point(sweep: Sweep) -> dict[str, Any]:
    """The rule that orders the kinds and that the sentence is about: the calibrated one, or the first."""
    points = points_with_kinds(sweep)
    return next((p for p in points if p["family"] == "calibrated"), points[0])


def token_kinds(run: RunFiles) -> Figure:
    """Mean steps of each kind of token with 95 % intervals, one colour a rule."""
    assert run.sweep is not None
    points, order = points_with_kinds(run.sweep), _order(run.sweep)
    figure, ax = plt.subplots(figsize=(7.2, 0.42 * len(order) + 1.9))
    figure.suptitle(f"{run.config.name}, {run.sweep.header['checkpoint']}".replace("$", r"\$"), fontsize=9, color="#555555")
    for i, p in enumerate(points):
        rows = {row["kind"]: row for row in p["hard"]["kinds"]}
        at = [order.index(kind) + 0.6 * ((i + 0.5) / len(points) - 0.5) for kind in rows]
        steps = [row["steps"] for row in rows.values()]
        errors = [[row["steps"] - row["low"] for row in rows.values()], [row["high"] - row["steps"] for row in rows.values()]]
        _, colour, marker, _ = family_look(p["family"])
        ax.errorbar(steps, at, xerr=errors, color=colour, marker=marker, markersize=4.5, linestyle="", linewidth=1.2, label=short_name(p))
    ax.set_yticks(range(len(order)), order)
    ax.set(xlabel="mean steps (over groups)")
    figure.legend(loc="outside lower center", ncols=min(3, len(points)), frameon=False)
    return figure


def token_kinds_page(run: RunFiles) -> list[Panel]:
    assert run.sweep is not None
    points, order, figure = points_with_kinds(run.sweep), _order(run.sweep), go.Figure()
    for p in points:
        rows = p["hard"]["kinds"]
        _, colour, _, symbol = family_look(p["family"])
        above, below = [row["high"] - row["steps"] for row in rows], [row["steps"] - row["low"] for row in rows]
        figure.add_scatter(
            x=[row["steps"] for row in rows], y=[row["kind"] for row in rows], name=short_name(p), mode="markers",
            marker={"color": colour, "symbol": symbol, "size": 8}, error_x={"array": above, "arrayminus": below, "color": colour},
            customdata=[row["tokens"] for row in rows], hovertemplate="%{y}: %{x:.2f} steps, %{customdata} tokens",
        )  # fmt: skip
    layout(figure, "mean steps (over groups)", "")
    figure.update_layout(height=120 + 46 * len(order), margin={"l": 130})
    figure.update_yaxes(type="category", categoryorder="array", categoryarray=order)
    return [("mean steps by kind of token", figure)]


def _order(sweep: Sweep) -> list[str]:
    """Kinds from the bottom to the top of the figure: fewest steps first, by the rule that orders them."""
    order = [row["kind"] for row in reversed(_main_point(sweep)["hard"]["kinds"])]
    return [
        *dict.fromkeys([*(row["kind"] for p in points_with_kinds(sweep) for row in p["hard"]["kinds"] if row["kind"] not in order), *order])
    ]


def kind_sentences(sweep: Sweep) -> str:
    """A sentence for each rule, and which tokens are in no kind that is shown."""
    points = points_with_kinds(sweep)
    sentences = [f"{kind_words(p['hard']['kinds'], short_name(p))}." for p in points]
    left_out = sweep.header["tokens"] - sum(row["tokens"] for row in points[0]["hard"]["kinds"])  # kinds are the same for all rules
    if left_out:
        sentences.append(f"Kinds with fewer than {FEWEST_OF_A_KIND} tokens are left out ({plural(left_out, 'token')}).")
    return " ".join(sentences)


def kind_words(rows: Sequence[dict[str, Any]], rule: str) -> str:
    """Whether kinds differ under a rule, in a sentence that follows from the intervals; `rows` come with the most steps first. A kind has
    the most (fewest) steps only if its interval lies above (below) that of every other kind. Where the two ends cannot be told apart, the
    two kinds whose intervals lie farthest apart are named, if any do. Intervals are compared as they are printed."""
    rows = [row | {end: round(row[end], 2) for end in ("steps", "low", "high")} for row in rows]
    most, fewest = max(((a, b) for a in rows for b in rows if a is not b), key=lambda pair: pair[0]["low"] - pair[1]["high"])
    if rows[0]["low"] > rows[-1]["high"]:
        most, fewest = rows[0], rows[-1]
    elif most["low"] <= fewest["high"]:
        return f"{rule}: no kind of token is shown to take more steps than another"
    name, other = (f"{row['kind']} ({row['steps']:.2f} [{row['low']:.2f}, {row['high']:.2f}])" for row in (most, fewest))
    above_all = all(most["low"] > row["high"] for row in rows if row is not most)
    below_all = all(fewest["high"] < row["low"] for row in rows if row is not fewest)
    if above_all and below_all:
        return f"{rule}: most steps {name}, fewest {other}"
    if above_all:
        return f"{rule}: most steps {name}; which kind takes fewest is not told apart"
    if below_all:
        return f"{rule}: fewest steps {other}; which kind takes most is not told apart"
    return f"{rule}: {name} takes more steps than {other}"
