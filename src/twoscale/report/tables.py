"""Tables of the page."""

import html
import re
from typing import Any

from twoscale.report.load import RunFiles
from twoscale.report.style import family_look, step_colour, visible
from twoscale.report.words import evaluation_text, signed, sweep_text
from twoscale.tradeoff.summary import Sweep


def group_table(run: RunFiles) -> str:
    head = ["group", "verdict", "step norm k = 0", "k = 1", "k = 5", "k = 10", "last", "cosine k = 1", "k = 5", "k = 10"]
    head += ["contraction rate", "spectral radius (largest)"]
    rows = []
    for g in run.last["groups"]:
        norms, cosines = g["step_norm"]["mean"], g.get("step_cosine", {"mean": []})["mean"]
        numbers = [*(_at(norms, k) for k in (0, 1, 5, 10)), norms[-1], *(_at(cosines, k - 1) for k in (1, 5, 10))]
        limit = g.get("limit")
        numbers += [limit["contraction_rate"]["mean"], limit["spectral_radius"]["max"]] if limit else [None, None]
        cells = "".join(f"<td class='n'>{_number(v)}</td>" for v in numbers)
        rows.append(f"<tr><td>{html.escape(str(g['name']))}</td><td>{html.escape(str(g['verdict']))}</td>{cells}</tr>")
    return table(f"Steps at the last checkpoint (step {run.last['step']}), mean over tokens", head, rows)


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
            where = html.escape(f"{boundary['from']} → {boundary['to']}")
            rows.append(f"<tr><td>{where}</td><td class='n'>{int(record['step'])}</td>{cells}</tr>")
    note = "Drift-to-Loop Ratio, mean over tokens; the first row of a boundary is the control: what the ratio was at the first measurement"
    return table(note, head, rows)


def evaluation_table(evaluation: dict[str, Any]) -> str:
    loops = evaluation["cross_entropy_by_loops"]
    cells = "".join(f"<td class='n'>{v:.4f}</td>" for v in loops.values())
    head, bigram = [f"{k} loop{'s' if k != '1' else ''}" for k in loops], evaluation["bigram_cross_entropy"]
    if bigram is not None:
        head, cells = [*head, "bigram"], f"{cells}<td class='n'>{bigram:.4f}</td>"
    return table(f"Cross-entropy in nats a token on {evaluation_text(evaluation)}", head, [f"<tr>{cells}</tr>"])


def table(caption: str, head: list[str], rows: list[str]) -> str:
    cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    return f"<h3>{html.escape(caption)}</h3><div class='scroll'><table><tr>{cells}</tr>{''.join(rows)}</table></div>"


def prose(text: str) -> str:
    """Escaped text with `names` set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _at(values: list[float | None], k: int) -> float | None:
    return values[k] if len(values) > k else None


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def sweep_table(sweep: Sweep) -> str:
    """Every point of the sweep; folded, because there are many."""
    head = ["curve", "setting", "mean steps", "by group (spread)", "CE", "PPL", "dCE", "95 % interval", "agreement", "MFLOP a token"]
    head += ["ms a token", "interval", "Pareto front"]
    fronts = {cost: {p["id"] for p in sweep.front(cost)} for cost in ("flops", "ms")}
    rows = []
    for p in sweep.points:
        by_group = ", ".join(f"{g['mean']:.1f} ({g['std']:.1f})" for g in p["steps"])
        timed = p.get("ms") is not None
        numbers = [
            f"{p['mean_steps']:.2f}", by_group, f"{p['ce']:.4f}", f"{p['ppl']:.3f}", signed(p["dce"]),
            f"{signed(p['dce_low'])} … {signed(p['dce_high'])}",
            f"{p['agree']:.1%}", f"{p['flops'] / 1e6:.2f}", f"{p['ms']:.2f}" if timed else "–",
            f"{p['ms_low']:.2f} … {p['ms_high']:.2f}" if timed else "–", ", ".join(c for c in fronts if p["id"] in fronts[c]),
        ]  # fmt: skip
        cells = "".join(f"<td class='n'>{html.escape(n)}</td>" for n in numbers)
        rows.append(f"<tr><td>{html.escape(family_look(p['family'])[0])}</td><td>{html.escape(p['label'] or p['id'])}</td>{cells}</tr>")
    h = sweep.header
    note = (
        f"{h['checkpoint']}, {sweep_text(h)}; at most {h['loops']} loops, dCE against all {h['loops']} loops, {sweep.rounds} "
        f"round{'s' if sweep.rounds != 1 else ''} of timing"
    )
    return f"<details><summary>All {len(rows)} points of the sweep</summary>{table(note, head, rows)}</details>"


def samples_section(found: dict[str, Any]) -> str:
    """Texts that the model wrote, each token on the colour of its steps."""
    means = [sum(steps) / max(1, len(steps)) for sample in found["samples"] for _, steps in sample["tokens"]] or [0.0]
    low, high = min(means), max(means)
    texts = []
    for sample in found["samples"]:
        spans = []
        for piece, steps in sample["tokens"]:
            colour = step_colour((sum(steps) / max(1, len(steps)) - low) / max(1e-9, high - low))
            told = " / ".join(str(int(k)) for k in steps)
            spans.append(f"<span class='tok' style='background:{colour}' title='{told} steps'>{html.escape(str(piece))}</span>")
        texts.append(f"<div class='sample'><span class='given'>{html.escape(str(sample['prompt']))}</span>{''.join(spans)}</div>")
    stops = ", ".join(step_colour(i / 10) for i in range(11))
    return (
        f"<section class='samples'><h2>What it writes</h2><p>Beginnings of held-out documents (grey) and how the model goes on; exit rule: "
        f"{html.escape(str(found['rule']))}, at most {int(found['loops'])} steps; temperature {found['temperature']:g}, seed "
        f"{int(found['seed'])}. Colour: steps of a token, mean over groups, {low:.1f}<span class='ramp' "
        f"style='background:linear-gradient(to right, {stops})'></span>{high:.1f}.</p>{''.join(texts)}</section>"
    )


def token_table(point: dict[str, Any]) -> str:
    """The tokens that took the most and the fewest steps with one rule."""
    rows = []
    for entry in point["hard"]["tokens"]:
        cells = "".join(f"<td class='n'>{value}</td>" for value in (entry["count"], f"{entry['steps']:.2f}", f"{entry['loss']:.2f}"))
        rows.append(f"<tr><td><code>{html.escape(visible(str(entry['token'])))}</code></td>{cells}</tr>")
    inside = table("", ["token", "times", "mean steps", "mean loss (nats)"], rows)
    return (
        f"<details><summary>Tokens that take longest and shortest, {html.escape(point['id'])}</summary>{inside}</details>" if rows else ""
    )
