"""The figures of a report, one entry each, in the order of the page. A new figure is one more entry and the function that draws it."""

from collections.abc import Callable
from dataclasses import dataclass

from matplotlib.figure import Figure

from twoscale.config.words import plural
from twoscale.report import depth_figures, depth_panels, figures, interactive, kind_figures, tradeoff_figures, tradeoff_panels
from twoscale.report.interactive import Panel
from twoscale.report.load import RunFiles
from twoscale.tradeoff.summary import PRINTED, TOGETHER


@dataclass(frozen=True)
class FigureEntry:
    """One figure: what it is called, what it says, how it is drawn, and when there is something to draw."""

    name: str
    """File name of the figure, and its anchor on the page."""
    heading: str
    caption: str
    """Text above the figure; `names` in backquotes are set as code."""
    print: Callable[[RunFiles], Figure]
    """Draws it with matplotlib, for NAME.png and NAME.pdf."""
    page: Callable[[RunFiles], list[Panel]] | None = None
    """Draws it with plotly, one panel or several; None shows the PNG on the page."""
    claims: str = ""
    """Letters of the paper's claims that it shows; their verdicts stand in the caption."""
    available: Callable[[RunFiles], bool] = lambda run: True
    """Whether the run's files hold what it draws."""
    instead: Callable[[RunFiles], str] = lambda run: ""
    """A sentence that says all that the figure would show, and is shown on the page in its place; empty where the figure shows more."""
    swept: bool = False
    """Whether it is of the sweep's text, which the caption then names."""
    timed: bool = False
    """Whether it shows times, which are of a few tokens of that text; the caption then says of which."""
    remark: Callable[[RunFiles], str] = lambda run: ""
    """Sentences behind the caption that follow from the run's numbers."""


def _has_boundaries(run: RunFiles) -> bool:
    return bool(run.last["boundaries"])


def _has_limit(run: RunFiles) -> bool:
    return any("limit" in group for group in run.last["groups"])


def _has_sequence(run: RunFiles) -> bool:
    return run.sequence is not None


def _one_verdict(run: RunFiles) -> str:
    """Where all tokens do the same in all groups."""
    assert run.sequence is not None
    found = {code for row in run.sequence["verdicts"] for code in row}
    if len(found) > 1:
        return ""
    verdict = run.sequence["verdict_names"][found.pop()]
    return f"All {plural(len(run.sequence['tokens']), 'token')} of the sequence are {verdict} in every group, so there is no map to draw."


def _is_swept(run: RunFiles) -> bool:
    return run.sweep is not None and run.sweep.point("full") is not None


def _has_steps(run: RunFiles) -> bool:
    return run.sweep is not None and _is_swept(run) and bool(tradeoff_figures.shown_points(run.sweep))


def _has_kinds(run: RunFiles) -> bool:
    return run.sweep is not None and _is_swept(run) and bool(kind_figures.points_with_kinds(run.sweep))


def _kind_remark(run: RunFiles) -> str:
    assert run.sweep is not None
    return kind_figures.kind_sentences(run.sweep)


def _has_staircase(run: RunFiles) -> bool:
    return run.staircase is not None


def _has_rules(run: RunFiles) -> bool:
    return run.depth is not None and run.depth.point("full") is not None and bool(depth_figures.shown_rules(run.depth))


FIGURES: tuple[FigureEntry, ...] = (
    FigureEntry(
        "staircase",
        "The staircase",
        "Percent of right answers on held-out samples, by their true depth and by the steps that every token takes. A model that does one "
        "part of the task in each step is right from the diagonal on.",
        print=depth_figures.staircase,
        page=depth_panels.staircase,
        available=_has_staircase,
    ),
    FigureEntry(
        "steps_by_depth",
        "Steps against the true depth",
        "Mean steps of the answers of each true depth, every rule at its certified setting, every token leaving by the rule. A rule that "
        "finds the depth runs along the dotted line and above it; a fixed depth is flat. Rules without a certified setting are not drawn.",
        print=depth_figures.steps_by_depth,
        page=depth_panels.steps_by_depth,
        available=_has_rules,
    ),
    FigureEntry(
        "step_norms",
        "Step norms",
        "How far the state moves at loop step k: mean over tokens with a one-sigma band, one line a checkpoint (six at most are shown).",
        print=figures.step_norms,
        page=interactive.step_norms,
        claims="a",
    ),
    FigureEntry(
        "step_cosines",
        "Step cosines",
        "The cosine of the angle between a step and the one before. +1: straight on; 0: at a right angle; −1: straight back. In between "
        "the steps are less collinear, not orthogonal. Steps below 1e-6 of the state are rounding and are not counted.",
        print=figures.step_cosines,
        page=interactive.step_cosines,
        claims="bc",
    ),
    FigureEntry(
        "accelerations",
        "Accelerations",
        "The norm of the difference between a step and the one before, in three forms; the exit rule `acceleration:tau` compares the first "
        "with tau. Where each step is c times the one before, the last form is the constant |1 − c| / (1 + |c|): it never falls, and for "
        "negative c (an alternating approach) it is stuck at 1.",
        print=figures.accelerations,
        page=interactive.accelerations,
    ),
    FigureEntry(
        "drift_to_loop",
        "Drift-to-Loop Ratio",
        "DLR: the distance from a group's last state to the next group, divided by the mean step inside the first. The paper's reading "
        "(`initial`) ends at the next group's start state, which is noise here, whatever the next group learned; where groups touch, "
        "the reading by the next group's input (`input`) is 0 by construction. `projected` ends at the start state after the input map, "
        "`first` after one step. `settled` ends at the next group's last state, which that group has learned, so this report leads "
        "with it. The mean step is that over the traced steps from k = 1 on (`k ≥ 1`: without the step that leaves the noise), or over "
        "all of them (`all k`, dashed; on this page a click on its name shows it). Trace longer and the mean shrinks, so compare ratios "
        "only at equal loop counts. Training step 0 is the control: what an untrained model gives.",
        print=figures.drift_to_loop,
        page=interactive.drift_to_loop,
        claims="d",
        available=_has_boundaries,
    ),
    FigureEntry(
        "limit",
        "Distance to the limit",
        "Distance of the state at loop step k to the state many steps later. A straight line is a steady contraction, a flat end rounding.",
        print=figures.limit,
        page=interactive.limit,
        available=_has_limit,
    ),
    FigureEntry(
        "trajectories",
        "Trajectories",
        "States of a few tokens in the first two principal components of one sequence, over depth and loop steps; and one token's loop in "
        "each group magnified, without the start, which is far off. Early steps are pale, the last state is the large point.",
        print=figures.trajectories,
        page=interactive.trajectories,
        available=_has_sequence,
    ),
    FigureEntry(
        "verdict_map",
        "What each token does",
        "Settling: the last step is below 1e-4 of the state, or steps shrink by 1 % a step or more. Drifting: they grow "
        "by 1 %, or keep length and direction. Circling: they keep their length and turn.",
        print=figures.verdict_map,
        page=interactive.verdict_map,
        available=_has_sequence,
        instead=_one_verdict,
    ),
    FigureEntry(
        "against_tau",
        "Time and quality against the threshold",
        "The paper's three panels, for its three exit rules at each threshold tau. Time: one sequence, cached decoding, the same text for "
        f"all settings. Settings are timed in sets of up to {TOGETHER - 1}, one set after the other; those of a set take turns with "
        "each other and with the full run, token by token. Times are relative to the full run: ms a token is a setting's time divided by "
        "the full run's in its own set and the same rounds, times the full run's median over all sets, so the full run itself has no "
        "interval. Shaded, in the figures for print: 95 % intervals, those of CE of its difference to the full run. A threshold is an "
        "absolute number, so where a curve bends depends on the size of a model's states.",
        print=tradeoff_figures.against_tau,
        page=tradeoff_panels.against_tau,
        claims="efg",
        available=_is_swept,
        swept=True,
        timed=True,
    ),
    FigureEntry(
        "tradeoff",
        "The trade-off",
        "Loss against cost, every rule beside fixed depths, random exits with the mean steps of a rule, and two oracles that see the "
        "labels: the first (stays within eps) with one depth for all groups, the second (loss + price x steps) with any of some forty "
        "combinations of depths. Both as run, where tokens also attend to others that left early: losses may lie above eps. "
        "Circled (Pareto front): no "
        "cheaper setting, oracles aside, has as low a loss; losses that differ by less than half of the last printed digit "
        f"({PRINTED:.5f} nats) count as equal. Times include a rule's own looks, FLOPs those that "
        "read the head or a controller (comparing states is not counted). Random exits and oracles are decoded step by step through "
        "Python, not in the C loop that decodes fixed depths and the usual rules, so on small models their times are several times too "
        "long: compare them by FLOPs.",
        print=tradeoff_figures.tradeoff,
        page=tradeoff_panels.tradeoff,
        available=_is_swept,
        swept=True,
        timed=True,
    ),
    FigureEntry(
        "steps_taken",
        "Steps taken",
        "How many steps the tokens take in each group, each rule at the threshold with the fewest FLOPs that keeps CE within 0.01 nats "
        "of the full run's by its whole interval; where none does, at the one with the smallest rise.",
        print=tradeoff_figures.steps_taken,
        page=tradeoff_panels.steps_taken,
        available=_has_steps,
        swept=True,
    ),
    FigureEntry(
        "hard_tokens",
        "Which tokens take longest",
        "Mean steps (over groups) of a token against the loss of the next token in the full run, in eighths of the tokens by loss; and the "
        "tokens with the most and the fewest steps among those that occur at least five times, and once in a thousand: single tokens, "
        "ranked by their mean steps without intervals. A flat line means that steps have nothing to do with how hard the next token is to "
        "predict.",
        print=tradeoff_figures.hard_tokens,
        page=tradeoff_panels.hard_tokens,
        available=_has_steps,
        swept=True,
    ),
    FigureEntry(
        "token_kinds",
        "Which kinds of tokens take longest",
        "Mean steps of a token by its own kind, each rule at the setting of the figures above, with 95 % intervals. A name is a word with "
        "a capital letter that does not begin a sentence.",
        print=kind_figures.token_kinds,
        page=kind_figures.token_kinds_page,
        available=_has_kinds,
        swept=True,
        remark=_kind_remark,
    ),
)


def figures_of(run: RunFiles) -> list[FigureEntry]:
    """The figures that a run's files allow."""
    return [entry for entry in FIGURES if entry.available(run)]
