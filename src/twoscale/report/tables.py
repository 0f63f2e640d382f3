"""Tables of the page."""

import html
import math
import re
from typing import Any

from twoscale.config.words import all_loops, plural
from twoscale.report.advice import sample_words
from twoscale.report.claims import boundary_label
from twoscale.report.load import RunFiles
from twoscale.report.style import family_look, step_colour, visible
from twoscale.report.tradeoff_figures import short_name
from twoscale.report.words import evaluation_text, signed, sweep_text, timed_text, unit_words
from twoscale.tradeoff.choice import Choice, name_of
from twoscale.tradeoff.summary import Sweep


def group_table(run: RunFiles) -> str:
    head = ["group", "verdict", "step norm k = 0", "k = 1", "k = 5", "k = 10", "last", "cosine k = 1", "k = 5", "k = 10"]
    head += ["contraction rate (mean)", "spectral radius (largest)"]
    rows = []
    for label, g in zip(run.labels, run.last["groups"], strict=True):
        norms, cosines = g["step_norm"]["mean"], g.get("step_cosine", {"mean": []})["mean"]
        numbers = [*(_at(norms, k) for k in (0, 1, 5, 10)), norms[-1], *(_at(cosines, k - 1) for k in (1, 5, 10))]
        limit = g.get("limit")
        numbers += [limit["contraction_rate"]["mean"], limit["spectral_radius"]["max"]] if limit else [None, None]
        cells = "".join(f"<td class='n'>{_number(v)}</td>" for v in numbers)
        rows.append(f"<tr><td>{html.escape(label)}</td><td>{html.escape(str(g['verdict']))}</td>{cells}</tr>")
    where = plural(int(run.last["tokens"]), "token")
    return table(f"Loop steps at the last checkpoint (training step {run.last['step']}), mean over {where}", head, rows)


def drift_table(run: RunFiles) -> str:
    if not run.last["boundaries"]:
        return ""
    variants = [v for v in run.last["boundaries"][0]["dlr"] if v.endswith("_k1")]
    head = [
        "boundary",
        "training step",
        *(f"{v.removesuffix('_k1')}, k ≥ 1" for v in variants),
        *(f"{v.removesuffix('_k1')}, all k" for v in variants),
    ]
    rows = []
    for b, boundary in enumerate(run.last["boundaries"]):
        for record in (run.geometry[0], run.last) if len(run.geometry) > 1 else (run.last,):
            dlr = record["boundaries"][b]["dlr"]
            cells = "".join(
                f"<td class='n'>{_number(dlr[v]['mean'])}</td>" for v in [*variants, *(v.removesuffix("_k1") for v in variants)]
            )
            where = html.escape(boundary_label(b, boundary))
            rows.append(f"<tr><td>{where}</td><td class='n'>{int(record['step'])}</td>{cells}</tr>")
    return table(f"Drift-to-Loop Ratio (DLR), mean over tokens{_control(run)}", head, rows)


def _control(run: RunFiles) -> str:
    """What the first row of a boundary is."""
    if len(run.geometry) < 2:
        return ""
    if run.geometry[0]["step"] == 0:
        return "; training step 0 is the control: what an untrained model gives"
    return f"; training step {run.geometry[0]['step']} is the first that was measured"


def evaluation_table(evaluation: dict[str, Any]) -> str:
    """Loss at several depths, in nats a token and, where the bytes were counted, in bits per byte."""
    losses = {plural(int(k), "loop"): ce for k, ce in evaluation["cross_entropy_by_loops"].items()}
    if evaluation["bigram_cross_entropy"] is not None:
        losses["bigram"] = evaluation["bigram_cross_entropy"]
    units = {"nats a token": 1.0}
    if evaluation.get("bytes"):
        units["bits per byte"] = evaluation["tokens"] / evaluation["bytes"] / math.log(2)
    rows = []
    for unit, scale in units.items():
        cells = "".join(f"<td class='n'>{scale * ce:.4f}</td>" for ce in losses.values())
        rows.append(f"<tr><td>{unit}</td>{cells}</tr>")
    return table(f"Cross-entropy on {evaluation_text(evaluation)}", ["", *losses], rows)


def table(caption: str, head: list[str], rows: list[str]) -> str:
    cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    title = f"<h3>{html.escape(caption)}</h3>" if caption else ""
    return f"{title}<div class='scroll'><table><tr>{cells}</tr>{''.join(rows)}</table></div>"


def prose(text: str) -> str:
    """Escaped text with `names` set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _at(values: list[float | None], k: int) -> float | None:
    return values[k] if len(values) > k else None


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def sweep_table(sweep: Sweep) -> str:
    """Every point of the sweep; folded, because there are many."""
    head = ["curve", "setting", "mean steps", "in each group (standard deviation)", "CE", "PPL", "dCE", "95 % interval", "agreement"]
    head += ["MFLOP a token", "ms a token", "95 % interval", "Pareto front of"]
    fronts = {cost: {p["id"] for p in sweep.front(cost)} for cost in ("flops", "ms")}
    rows = []
    for p in sweep.points:
        by_group = ", ".join(f"{g['mean']:.1f} ({g['std']:.1f})" for g in p["steps"])
        timed, full = p.get("ms") is not None, p["family"] == "full"
        numbers = [
            f"{p['mean_steps']:.2f}", by_group, f"{p['ce']:.4f}", f"{p['ppl']:.3f}", signed(p["dce"]),
            "reference" if full else f"{signed(p['dce_low'])} … {signed(p['dce_high'])}",
            f"{100 * p['agree']:.1f} %", f"{p['flops'] / 1e6:.2f}", f"{p['ms']:.2f}" if timed else "–",
            "–" if not timed else "reference" if full else f"{p['ms_low']:.2f} … {p['ms_high']:.2f}",
            ", ".join(c for c in fronts if p["id"] in fronts[c]),
        ]  # fmt: skip
        cells = "".join(f"<td class='n'>{html.escape(n)}</td>" for n in numbers)
        rows.append(f"<tr><td>{html.escape(family_look(p['family'])[0])}</td><td>{html.escape(_setting(p, sweep))}</td>{cells}</tr>")
    h = sweep.header
    rounds, over = plural(sweep.rounds, "round"), f", intervals over {unit_words(h['by'])}" if h.get("by") else ""
    note = (
        f"{h['checkpoint']}, {sweep_text(h)}; at most {plural(h['loops'], 'loop')}, dCE against "
        f"{all_loops(h['loops'])} (the full run){over}. "
        f"ms a token is relative to the full run: time divided by the full run's among the settings that were timed together, in the same "
        f"rounds, times the full run's median over {rounds} of timing; intervals are over rounds{_timed_note(sweep)}"
    )
    return f"<details><summary>All {len(rows)} points of the sweep</summary>{table(note, head, rows)}</details>"


def _timed_note(sweep: Sweep) -> str:
    """Which tokens the times of a sweep are of, and what follows for the times of rules; empty where no times were taken."""
    if not sweep.rounds:
        return ""
    return (
        f". Times are of {timed_text(sweep.header, sweep.rounds)}; on those tokens a rule may take fewer or more steps than its mean in "
        "this table, which is of all tokens"
    )


def _setting(point: dict[str, Any], sweep: Sweep) -> str:
    """A point's name in the table, the default depth marked."""
    default = point["id"] == f"fixed:{sweep.header.get('mean_loops')}"
    return name_of(point, sweep.header["loops"]) + (" (the default depth)" if default else "")


def samples_section(found: dict[str, Any], choice: Choice | None) -> str:
    """Texts that the model wrote, each token on the colour of its steps."""
    means = [sum(steps) / max(1, len(steps)) for sample in found["samples"] for _, steps in sample["tokens"]] or [0.0]
    low, high = min(means), max(means)
    texts = []
    for sample in found["samples"]:
        spans = []
        for piece, steps in sample["tokens"]:
            colour = step_colour((sum(steps) / max(1, len(steps)) - low) / max(1e-9, high - low))
            steps_text = " / ".join(str(int(k)) for k in steps)
            spans.append(f"<span class='tok' style='background:{colour}' title='{steps_text} steps'>{html.escape(str(piece))}</span>")
        texts.append(f"<div class='sample'><span class='given'>{html.escape(str(sample['prompt']))}</span>{''.join(spans)}</div>")
    stops, loops = ", ".join(step_colour(i / 10) for i in range(11)), int(found["loops"])
    ramp = f"{low:.1f} <span class='ramp' style='background:linear-gradient(to right, {stops})'></span> {high:.1f}"
    colours = (
        f"Colour: steps of a token, mean over groups, {ramp}." if high > low else f"Every token took {low:.1f} steps, mean over groups."
    )
    return (
        f"<p>Beginnings of held-out documents (grey) and how the model goes on; "
        f"{html.escape(sample_words(str(found['rule']), choice, loops))}; at most {plural(loops, 'step')} in each group; temperature "
        f"{found['temperature']:g}, seed {int(found['seed'])}. {colours}</p>{''.join(texts)}"
    )


def token_table(point: dict[str, Any]) -> str:
    """The tokens that took the most and the fewest steps with one rule; empty where none occurs often enough."""
    rows = []
    for entry in point["hard"]["tokens"]:
        cells = "".join(f"<td class='n'>{value}</td>" for value in (entry["count"], f"{entry['steps']:.2f}", f"{entry['loss']:.2f}"))
        rows.append(f"<tr><td><code>{html.escape(visible(str(entry['token'])))}</code></td>{cells}</tr>")
    inside = table(
        "Single tokens, ranked by their mean steps without intervals: neighbours in the list need not differ on other text",
        ["token", "times", "mean steps", "mean loss of the next token (nats)"],
        rows,
    )
    title = f"Tokens that take longest and shortest, {html.escape(short_name(point))}"
    return f"<details><summary>{title}</summary>{inside}</details>" if rows else ""
