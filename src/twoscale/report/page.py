"""`twoscale report RUN`: one self-contained page, report/index.html, with figures/*.png and *.pdf beside it.

The page opens from disk and asks the network for nothing: plotly's script is inside it, once.
"""

import html
import json
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from twoscale.config.files import atomic_write, make_folder
from twoscale.config.serial import to_dict
from twoscale.report import interactive
from twoscale.report.claims import Claim, judge
from twoscale.report.content import CAPTIONS, DRAW, STYLE
from twoscale.report.figures import draw_all
from twoscale.report.load import RunFiles, load_run

PANELS: dict[str, Callable[[RunFiles], list[interactive.Panel]]] = {
    "step_norms": interactive.step_norms,
    "step_cosines": interactive.step_cosines,
    "accelerations": interactive.accelerations,
    "drift_to_loop": interactive.drift_to_loop,
    "limit": interactive.limit,
    "trajectories": interactive.trajectories,
    "verdict_map": interactive.verdict_map,
}


def write_report(folder: Path) -> Path:
    """Write RUN/report/index.html and its figures; returns the page."""
    run = load_run(folder)
    out = make_folder(folder / "report")
    names = draw_all(run, make_folder(out / "figures"))
    page = render(run, names)
    with atomic_write(out / "index.html") as f:
        f.write(page.encode())
    return out / "index.html"


def render(run: RunFiles, names: list[str]) -> str:
    claims = judge(run.geometry)
    body = [_headline(run, claims), "<h2>The paper's claims on this run</h2>", _claims(claims)]
    for name in names:
        heading, caption = CAPTIONS[name]
        links = f'<a href="figures/{name}.png">PNG</a>, <a href="figures/{name}.pdf">PDF</a>'
        body.append(f"<section id='{name}'><h2>{heading}</h2><p>{_prose(caption)} <span class='soft'>For print: {links}.</span></p>")
        body.append(_panels(name, PANELS[name](run)) + "</section>")
    body += ["<h2>Numbers</h2>", _group_table(run), _drift_table(run)]
    if run.evaluation is not None:
        body.append(_evaluation_table(run.evaluation))
    body += ["<h2>Set-up</h2>", _setup(run)]
    title = html.escape(f"{run.config.name}: loop geometry")
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{title}</title><style>{STYLE}</style><script>{get_plotlyjs()}</script></head><body><main>{''.join(body)}</main>"
        f"<script>{DRAW}</script></body></html>"
    )


def _headline(run: RunFiles, claims: list[Claim]) -> str:
    m, last = run.config.model, run.last
    verdicts = ", ".join(f"group {g['name']} is {g['verdict']} ({g['verdict_shares'][g['verdict']]:.0%} of tokens)" for g in last["groups"])
    found = "; ".join(f"({c.letter}) <span class='{c.outcome}'>{c.outcome}</span>" for c in claims)
    return (
        f"<h1>Loop geometry of {html.escape(run.config.name)}</h1>"
        f"<p class='soft'>{m.n_layer} layers of width {m.n_embd}, loop groups {html.escape(', '.join(run.names))}, r = {m.mean_loops}, "
        f"trained with {run.config.train.optimizer} for {last['step']} steps ({last['trained_tokens']:,} tokens); "
        f"measured on {last['tokens']:,} held-out tokens, {last['groups'][0]['loops']} loop steps.</p>"
        f"<p>At the last checkpoint {html.escape(verdicts)}. The paper's claims: {found}.</p>"
    )


def _claims(claims: list[Claim]) -> str:
    rows = "".join(
        f"<tr><td>({c.letter}) {html.escape(c.text)}</td><td class='outcome {c.outcome}'>{c.outcome}</td><td>{html.escape(c.measured)}</td>"
        f"<td class='soft'>{_prose(c.rule)}</td></tr>"
        for c in claims
    )
    head = "<tr><th>claim</th><th>verdict</th><th>measured</th><th>by this rule</th></tr>"
    return f"<div class='scroll'><table class='claims'>{head}{rows}</table></div>"


def _panels(name: str, panels: list[interactive.Panel]) -> str:
    """Places for the plots, and their data. They are drawn once the page is laid out, when every place has its width."""
    cards = []
    for i, (title, figure) in enumerate(panels):
        data = figure.to_json().replace("</", "<\\/")  # a token may hold anything, a closing script tag too
        height = figure.layout.height
        cards.append(
            f"<div class='card'><h3>{html.escape(title)}</h3><div class='plot' id='{name}-{i}' style='height:{height}px'></div>"
            f"<script type='application/json' data-for='{name}-{i}'>{data}</script></div>"
        )
    return f"<div class='panels'>{''.join(cards)}</div>"


def _group_table(run: RunFiles) -> str:
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
    return _table(f"Steps at the last checkpoint (step {run.last['step']}), mean over tokens", head, rows)


def _drift_table(run: RunFiles) -> str:
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
    return _table(note, head, rows)


def _evaluation_table(evaluation: dict[str, Any]) -> str:
    loops = evaluation["cross_entropy_by_loops"]
    cells = "".join(f"<td class='n'>{v:.4f}</td>" for v in loops.values())
    row = f"<tr>{cells}<td class='n'>{evaluation['bigram_cross_entropy']:.4f}</td></tr>"
    head = [*(f"{k} loop{'s' if k != '1' else ''}" for k in loops), "bigram"]
    return _table(f"Held-out cross-entropy in nats a token, {evaluation['tokens']:,} tokens", head, [row])


def _table(caption: str, head: list[str], rows: list[str]) -> str:
    cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    return f"<h3>{html.escape(caption)}</h3><div class='scroll'><table><tr>{cells}</tr>{''.join(rows)}</table></div>"


def _prose(text: str) -> str:
    """Escaped text with `names` set as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _at(values: list[float | None], k: int) -> float | None:
    return values[k] if len(values) > k else None


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _setup(run: RunFiles) -> str:
    seconds = sum(r.get("geometry_s", 0.0) for r in run.metrics)
    tokens = run.config.train.batch_size * run.config.model.block_size
    training = sum(tokens / r["tokens_per_s"] for r in run.metrics if r.get("tokens_per_s"))
    cost = (
        f"<p>Measuring geometry took {seconds:.1f} s beside {training:.0f} s of training ({seconds / training:.1%}).</p>"
        if training
        else ""
    )
    config = html.escape(json.dumps(to_dict(run.config), indent=1))
    name = html.escape(str(run.config.name))
    return (
        f"{cost}<p>Made with <code>twoscale trace RUN</code> and <code>twoscale report RUN</code>; seed {run.config.train.seed}; "
        f"Python {platform.python_version()}, {html.escape(platform.machine())}.</p>"
        f"<details><summary>The full config of {name}</summary><pre>{config}</pre></details>"
    )
