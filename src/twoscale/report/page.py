"""`twoscale report RUN`: one self-contained page, report/index.html, with figures/*.png and *.pdf beside it.

The page opens from disk and asks the network for nothing: plotly's script is inside it, once.
"""

import html
import json
import platform
from collections.abc import Callable
from pathlib import Path

from plotly.offline import get_plotlyjs

from twoscale.config.files import atomic_write, make_folder
from twoscale.config.serial import to_dict
from twoscale.report import interactive, tradeoff_panels
from twoscale.report.claims import Claim, judge
from twoscale.report.content import CAPTIONS, DRAW, STYLE
from twoscale.report.figures import draw_all
from twoscale.report.load import RunFiles, load_run
from twoscale.report.tables import drift_table, evaluation_table, group_table, prose, sweep_table
from twoscale.report.verdict import judge_exits, recommend

PANELS: dict[str, Callable[[RunFiles], list[interactive.Panel]]] = {
    "step_norms": interactive.step_norms,
    "step_cosines": interactive.step_cosines,
    "accelerations": interactive.accelerations,
    "drift_to_loop": interactive.drift_to_loop,
    "limit": interactive.limit,
    "trajectories": interactive.trajectories,
    "verdict_map": interactive.verdict_map,
    "against_tau": tradeoff_panels.against_tau,
    "tradeoff": tradeoff_panels.tradeoff,
    "steps_taken": tradeoff_panels.steps_taken,
    "hard_tokens": tradeoff_panels.hard_tokens,
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
    claims = judge(run.geometry) + (judge_exits(run.sweep) if run.sweep is not None else [])
    head, words = recommend(run.sweep, run.calibration) if run.sweep is not None else ("", "")
    body = [_headline(run, claims, head)]
    for name in names:
        heading, caption = CAPTIONS[name]
        links = f'<a href="figures/{name}.png">PNG</a>, <a href="figures/{name}.pdf">PDF</a>'
        body.append(f"<section id='{name}'><h2>{heading}</h2><p>{prose(caption)} <span class='soft'>For print: {links}.</span></p>")
        body.append(_panels(name, PANELS[name](run)) + "</section>")
    body += ["<h2>Numbers</h2>", group_table(run), drift_table(run)]
    if run.evaluation is not None:
        body.append(evaluation_table(run.evaluation))
    if run.sweep is not None:
        body.append(sweep_table(run.sweep))
    body += ["<h2>The paper's claims on this run</h2>", _claims(claims)]
    if words:
        body.append(f"<h2>What to use</h2><p id='recommendation'>{prose(words)}</p>")
    body += ["<h2>Set-up</h2>", _setup(run)]
    title = html.escape(f"{run.config.name}: {'loops and exits' if run.sweep is not None else 'loop geometry'}")
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{title}</title><style>{STYLE}</style><script>{get_plotlyjs()}</script></head><body><main>{''.join(body)}</main>"
        f"<script>{DRAW}</script></body></html>"
    )


def _headline(run: RunFiles, claims: list[Claim], recommendation: str) -> str:
    m, last = run.config.model, run.last
    verdicts = ", ".join(f"group {g['name']} is {g['verdict']} ({g['verdict_shares'][g['verdict']]:.0%} of tokens)" for g in last["groups"])
    found = "; ".join(f"({c.letter}) <span class='{c.outcome}'>{c.outcome}</span>" for c in claims)
    advice = f"<p class='advice'>{html.escape(recommendation)}</p>" if recommendation else ""
    return (
        f"<h1>{'Loops and exits' if run.sweep is not None else 'Loop geometry'} of {html.escape(run.config.name)}</h1>"
        f"<p class='soft'>{m.n_layer} layers of width {m.n_embd}, loop groups {html.escape(', '.join(run.names))}, r = {m.mean_loops}, "
        f"trained with {run.config.train.optimizer} for {last['step']} steps ({last['trained_tokens']:,} tokens); "
        f"measured on {last['tokens']:,} held-out tokens, {last['groups'][0]['loops']} loop steps.</p>"
        f"{advice}<p>At the last checkpoint {html.escape(verdicts)}. The paper's claims: {found}.</p>"
    )


def _claims(claims: list[Claim]) -> str:
    rows = "".join(
        f"<tr><td>({c.letter}) {html.escape(c.text)}</td><td class='outcome {c.outcome}'>{c.outcome}</td><td>{html.escape(c.measured)}</td>"
        f"<td class='soft'>{prose(c.rule)}</td></tr>"
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


def _setup(run: RunFiles) -> str:
    seconds = sum(r.get("geometry_s", 0.0) for r in run.metrics)
    tokens = run.config.train.batch_size * run.config.model.block_size
    training = sum(tokens / r["tokens_per_s"] for r in run.metrics if r.get("tokens_per_s"))
    cost = (
        f"<p>Measuring geometry took {seconds:.1f} s beside {training:.0f} s of training ({seconds / training:.1%}).</p>"
        if training
        else ""
    )
    swept = ", <code>twoscale calibrate RUN</code>" * (run.calibration is not None) + ", <code>twoscale sweep RUN</code>" * (
        run.sweep is not None
    )
    config = html.escape(json.dumps(to_dict(run.config), indent=1))
    name = html.escape(str(run.config.name))
    return (
        f"{cost}<p>Made with <code>twoscale trace RUN</code>{swept} and <code>twoscale report RUN</code>; seed {run.config.train.seed}; "
        f"Python {platform.python_version()}, {html.escape(platform.machine())}.</p>"
        f"<details><summary>The full config of {name}</summary><pre>{config}</pre></details>"
    )
