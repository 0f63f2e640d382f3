"""The first screen of a page: for each run one sentence of what to use, one picture that shows why, and the verdicts with a line each."""

import html
from typing import Any

import plotly.graph_objects as go

from twoscale.config.words import plural
from twoscale.report.advice import in_a_sentence, why_not_others
from twoscale.report.claims import Claim
from twoscale.report.depth_words import headline
from twoscale.report.interactive import Panel, layout
from twoscale.report.kind_figures import points_with_kinds
from twoscale.report.load import RunFiles
from twoscale.report.style import family_look
from twoscale.report.tables import prose
from twoscale.report.tradeoff_figures import PAPER as PAPER_RULES, rules_of, shown_points
from twoscale.report.tradeoff_panels import cost_axis, curve, rise_axis, squeezed
from twoscale.report.words import evaluation_text, sweep_text, timed_text
from twoscale.tradeoff.choice import choose, name_of
from twoscale.tradeoff.depth_summary import BASE, depth_rows
from twoscale.tradeoff.summary import ORACLES, Sweep

MARKS = {"confirmed": "✓", "refuted": "✗", "undecided": "?"}
SHOWN = ("fixed", *ORACLES)  # beside the rules
HEIGHT = 380
TAUS, LOOPS = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0], 30  # what `twoscale sweep` takes by default, the second `calibrate` too


def advice_of(run: RunFiles) -> str:
    """What to use, in a sentence; without a sweep what to run for it."""
    if run.depth is not None:
        return headline(run.depth)
    if run.sweep is None:
        return f"What to use is not known yet: `twoscale sweep {run.folder.as_posix()}` measures what every exit rule saves and costs."
    return in_a_sentence(run.sweep, run.calibration)


def why_not_of(run: RunFiles) -> str:
    """Why a setting that looks better in the picture than the recommended one is not recommended; empty where none does."""
    return "" if run.sweep is None else why_not_others(run.sweep, run.calibration)


def picture(run: RunFiles) -> Panel | None:
    """Loss, or accuracy, against what it costs; without a sweep the loss by loops, where it was measured."""
    if run.depth is not None:
        return _accuracy_against_steps(run)
    if run.sweep is not None and run.sweep.point("full") is not None:
        return _loss_against_cost(run)
    return _loss_by_loops(run) if run.evaluation is not None else None


def _loss_against_cost(run: RunFiles) -> Panel:
    """Fixed depths, rules and oracles; the recommended setting in a ring."""
    sweep = run.sweep
    assert sweep is not None
    cost, figure = sweep.cost, go.Figure()
    for family in ("full", *(f for f in SHOWN if sweep.family(f)), *rules_of(sweep)):
        curve(figure, sweep, family, cost)
    choice = choose(sweep, run.calibration)
    assert choice is not None
    pick, scale = choice.pick, 1e-6 if cost == "flops" else 1.0
    figure.add_scatter(
        x=[pick[cost] * scale], y=[squeezed(pick["dce"])], name=f"recommended: {name_of(pick, sweep.header['loops'])}", mode="markers",
        hoverinfo="skip", marker={"symbol": "circle-open", "size": 22, "color": "#C2185B", "line": {"width": 3}},
    )  # fmt: skip
    layout(figure, "ms a token" if cost == "ms" else "MFLOP a token", "CE above the full run (nats)")
    cost_axis(figure, sweep, cost)
    rise_axis(figure)
    figure.update_layout(height=HEIGHT)
    return picture_title(sweep), figure


def picture_title(sweep: Sweep) -> str:
    """What the picture of loss against cost shows, and of which tokens."""
    better = "Lower and further left is better; oracles see the labels."
    if sweep.cost != "ms":
        return f"Loss against counted FLOPs, measured on {sweep_text(sweep.header)}. {better}"
    slow = (
        " They are decoded step by step through Python and not in the C loop, so on small models their times are several times too long."
        if any(sweep.family(oracle) for oracle in ORACLES)
        else ""
    )
    return (
        f"Loss on {sweep_text(sweep.header)} against the time of cached decoding of {timed_text(sweep.header, sweep.rounds)} of that text. "
        f"{better}{slow}"
    )


def _accuracy_against_steps(run: RunFiles) -> Panel:
    """Every rule at its certified setting, on a task."""
    sweep = run.depth
    assert sweep is not None
    figure = go.Figure()
    rows = [row for row in depth_rows(sweep) if row.scope == "all" and (row.id is not None or row.family in BASE)]
    for kind, colour, symbol in (("baselines", "#666666", "x"), ("exit rules", "#0072B2", "circle")):
        mine = [row for row in rows if (row.family in BASE) == (kind == "baselines")]
        figure.add_scatter(
            x=[row.steps for row in mine], y=[100 * row.accuracy for row in mine], name=kind, mode="markers",
            text=[row.label for row in mine], marker={"color": colour, "symbol": symbol, "size": 10},
            error_x={
                "type": "data", "array": [row.steps_high - row.steps for row in mine],
                "arrayminus": [row.steps - row.steps_low for row in mine], "thickness": 1, "width": 2,
            },
            hovertemplate="%{text}<br>%{x:.2f} steps, %{y:.1f} % right<extra></extra>",
        )  # fmt: skip
    layout(figure, "mean steps of the answers", "right answers (%)").update_layout(height=HEIGHT)
    return "Accuracy against steps, every rule at its certified setting", figure


def _loss_by_loops(run: RunFiles) -> Panel:
    found = run.evaluation
    assert found is not None
    losses = {int(k): ce for k, ce in found["cross_entropy_by_loops"].items()}
    figure = go.Figure()
    _, colour, _, symbol = family_look("fixed")
    figure.add_scatter(
        x=list(losses), y=list(losses.values()), name="loss", mode="lines+markers", line={"color": colour, "width": 2},
        marker={"symbol": symbol, "size": 8}, hovertemplate="%{x} loops: %{y:.4f} nats<extra></extra>",
    )  # fmt: skip
    layout(figure, "loops", "CE (nats a token)").update_layout(height=HEIGHT)
    return f"Loss by loops, on {evaluation_text(found)}", figure


def verdict_list(claims: list[Claim], prefix: str) -> str:
    """The paper's claims with a line each."""
    lines = "".join(
        f"<li><span class='mark {c.outcome}' title='{c.outcome}'>{MARKS[c.outcome]}</span> ({c.letter}) {html.escape(c.text)} "
        f"<span class='outcome {c.outcome}'>{c.outcome}</span></li>"
        for c in claims
    )
    return f"<ul class='verdicts'>{lines}</ul><p class='soft'><a href='#{prefix}claims'>Numbers and rules behind each verdict</a></p>"


def missing(run: RunFiles) -> list[tuple[str, str]]:
    """What the page could show and the run's files do not have, with the commands that measure it, in the order to run them. Thresholds
    are swept after they are calibrated: a sweep that is older knows nothing of them."""
    folder = run.folder.as_posix()
    kinds = run.sweep is not None and not points_with_kinds(run.sweep) and bool(shown_points(run.sweep))
    known: list[tuple[bool, str, str]] = [
        (run.sequence is not None and "limit" in run.last["groups"][0], "trajectories and limits", f"twoscale trace {folder}"),
    ]
    if run.config.task == "none":
        known += [
            (run.calibration is not None, "certified thresholds", f"twoscale calibrate {folder}{_loops_asked(run.sweep)}"),
            (run.sweep is not None, "the trade-off, texts and what to use", f"twoscale sweep {folder}"),
        ]
        if run.sweep is not None and kinds:  # sweeps all settings anew, the calibrated thresholds among them
            known.append((False, "which kinds of tokens take longest", _kinds_command(folder, run.sweep)))
        elif run.sweep is not None:
            again = sweep_commands(folder, run.sweep)[0]
            known.append((run.calibration is not None, "the same thresholds in the sweep, which measures only what is new", again))
    else:
        known.append((run.depth is not None, "which rules find the depth", f"twoscale sweep {folder}"))
    return [(what, command) for there, what, command in known if not there]


def _loops_asked(sweep: Sweep | None) -> str:
    """The loops to calibrate at, where a sweep has others than the usual ones: the two are compared only at the same loops."""
    return "" if sweep is None or sweep.header["loops"] == LOOPS else f" --loops {sweep.header['loops']}"


def sweep_commands(folder: str, sweep: Sweep) -> list[str]:
    """The commands that measured a sweep, with their settings; of a file that does not tell them, as its points suggest."""
    if sweep.commands:
        return [f"twoscale sweep {folder} {settings}" for settings in sweep.commands]
    head, rules = sweep.header, [family for family in rules_of(sweep) if family not in ("learned", "calibrated")]
    taus = sorted({p["setting"] for p in sweep.points if p["family"] in rules and p["setting"] is not None})
    named = f" --rules {' '.join(rules)}" if set(rules) != set(PAPER_RULES) else ""
    named += f" --taus {' '.join(f'{tau:g}' for tau in taus)}" if taus != TAUS else ""
    learned = "" if sweep.family("learned") else " --no-controller"
    learned += " --few" if head.get("few") and sweep.point("fixed:10") is None else ""
    asked = head.get("asked_windows", head.get("windows"))
    return [f"twoscale sweep {folder}{named} --loops {head['loops']} --windows {asked} --rounds {sweep.rounds}{learned}"]


def _kinds_command(folder: str, sweep: Sweep) -> str:
    """What measures steps by kind of token: on more text where too few tokens of each kind occurred, and anew where the file is of a
    version that did not tell kinds apart, since a sweep does not measure again what its file has."""
    if any("kinds" in p["hard"] for p in shown_points(sweep)):
        return f"twoscale sweep {folder} --windows {4 * int(sweep.header.get('asked_windows', 20))}"
    return _sweep_anew(folder)


def _sweep_anew(folder: str) -> str:
    """The command that measures again what a sweep's file has."""
    return f"mv {folder}/sweep.jsonl {folder}/sweep-old.jsonl; twoscale sweep {folder}"


def missing_html(run: RunFiles) -> str:
    """A box with the commands that measure what is missing, numbered where there are several; empty where nothing is."""
    found = missing(run)
    if not found:
        return ""
    again = f"twoscale report {run.folder.as_posix()}"
    items = "".join(f"<li>{html.escape(what)}: <code>{html.escape(command)}</code></li>" for what, command in found)
    these, kind = ("these in this order", "ol") if len(found) > 1 else ("this", "ul")
    lead = f"Not measured yet; run {these}, then <code>{html.escape(again)}</code>:"
    return f"<div class='missing'><p>{lead}</p><{kind}>{items}</{kind}></div>"


def shipped_words(run: RunFiles) -> str:
    """A remark where the measurements came with the model: which machine its times are of."""
    if not run.shipped or run.sweep is None:
        return ""
    head: dict[str, Any] = run.sweep.header
    machine = ", ".join(filter(None, (str(head.get("cpu") or ""), plural(int(head.get("threads") or 1), "thread"))))
    return (
        f"These measurements came with the model and were not made here: times are of {machine}. "
        f"To measure on this machine set them aside: `{_sweep_anew(run.folder.as_posix())}`."
    )


def card(run: RunFiles, claims: list[Claim], picture_html: str, prefix: str) -> str:
    """The first screen of one run."""
    notes = "".join(
        f"<p{kind}>{prose(words)}</p>" for kind, words in (("", why_not_of(run)), (" class='soft'", shipped_words(run))) if words
    )
    return (
        f"<p class='advice'>{prose(advice_of(run))}</p>{notes}{missing_html(run)}"
        f"<div class='first'>{picture_html}<div><h3>The paper's claims on this model</h3>{verdict_list(claims, prefix)}</div></div>"
    )
