"""The HTML of a report: one self-contained page, with figures/*.png and *.pdf beside it.

The page opens from disk and asks the network for nothing: plotly's script is inside it, once.
"""

import html
import json
import platform
from importlib.metadata import version

from plotly.offline import get_plotlyjs

from twoscale.config.run_folder import RunFolder
from twoscale.config.serial import to_dict
from twoscale.config.words import group_list, plural
from twoscale.report.advice import recommend
from twoscale.report.claims import Claim, judge
from twoscale.report.content import DEPTH_GLOSSARY, GLOSSARY, PAPER, SWEPT_GLOSSARY, draw_script, style_sheet
from twoscale.report.depth_panels import depth_section
from twoscale.report.depth_words import headline
from twoscale.report.exit_claims import judge_exits
from twoscale.report.interactive import Panel
from twoscale.report.load import RunFiles
from twoscale.report.registry import FigureEntry, figures_of
from twoscale.report.tables import drift_table, evaluation_table, group_table, prose, samples_section, sweep_table, token_table
from twoscale.report.tradeoff_figures import PAPER as PAPER_RULES, rules_of, slowest_of
from twoscale.report.words import losses_note, sweep_text
from twoscale.tradeoff.choice import choose

TAUS = [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0]  # what `twoscale sweep` takes by default
MARKS = {"confirmed": "✓", "refuted": "✗", "undecided": "?"}


def claims_of(run: RunFiles) -> list[Claim]:
    """The paper's claims, judged on what was measured of a run."""
    return judge(run.geometry) + (judge_exits(run.sweep) if run.sweep is not None else [])


def page_html(runs: list[RunFiles], parts: list[str], dark: bool | None = None) -> str:
    """Everything in one file: style, plotly's script, the runs one after the other; `dark` None follows the reader's system."""
    names = ", ".join(names_of(runs))
    title = html.escape(f"{names}: {'loops and exits' if any(run.sweep for run in runs) else 'loop geometry'}")
    head = _overview(runs) + glossary(any(run.sweep for run in runs), any(run.depth for run in runs)) if len(runs) > 1 else ""
    scheme = "light dark" if dark is None else "dark" if dark else "light"
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<meta name='color-scheme' content='{scheme}'><title>{title}</title><style>{style_sheet(dark)}</style>"
        f"<script>{get_plotlyjs()}</script></head><body><main>{head}{''.join(parts)}</main><script>{draw_script(dark)}</script></body></html>"
    )


def names_of(runs: list[RunFiles]) -> list[str]:
    """What each run is called; where two have one name, their folders tell them apart."""
    names = [str(run.config.name) for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({run.folder.name})" for name, run in zip(names, runs, strict=True)]


def _overview(runs: list[RunFiles]) -> str:
    """Several runs at a glance."""
    rows, names = [], [html.escape(name) for name in names_of(runs)]
    for i, run in enumerate(runs):
        found = " ".join(_mark(c) for c in claims_of(run))
        advice = recommend(run.sweep, run.calibration)[0] if run.sweep is not None else "not swept"
        advice = advice if run.depth is None else headline(run.depth)
        rows.append(f"<tr><td><a href='#r{i}-top'>{names[i]}</a></td><td>{html.escape(advice)}</td><td>{found}</td></tr>")
    head = "<tr><th>model</th><th>what to use, and what it saves</th><th>the paper's claims</th></tr>"
    return (
        f"<h1>Loops and exits of {' and '.join(names)}</h1>"
        f"<div class='scroll'><table class='claims'>{head}{''.join(rows)}</table></div>"
        f"<p class='soft'>{', '.join(f'{mark} {word}' for word, mark in MARKS.items())}; each claim and its rule below. "
        f"{_tokenizers(runs)}The paper: {html.escape(PAPER)}.</p>"
    )


def _tokenizers(runs: list[RunFiles]) -> str:
    """A warning where the models' tokens are not the same."""
    files = [RunFolder(run.folder).tokenizer for run in runs]
    if len({file.read_bytes() if file.exists() else b"" for file in files}) == 1:
        return ""
    return "The models have different tokenizers: losses and times a token are not to be compared between them; bits per byte are. "


def glossary(swept: bool, depth: bool = False) -> str:
    """The words of the page, folded; `depth` adds those of a task's sweep."""
    words = (*(DEPTH_GLOSSARY if depth else ()), *GLOSSARY, *(SWEPT_GLOSSARY if swept else ()))
    rows = "".join(f"<dt>{prose(word)}</dt><dd>{prose(meaning)}</dd>" for word, meaning in words)
    first = (
        "true depth, D@-0.5, rank correlation …"
        if depth and not swept
        else "the paper, CE, dCE, tau, r, nats, fixed:4, ms a token …"
        if swept
        else "the paper, loop group, r, CE, nats, DLR …"
    )
    return f"<details id='glossary'><summary>Words on this page: {first}</summary><dl>{rows}</dl></details>"


def _mark(claim: Claim) -> str:
    return f"<span class='{claim.outcome}' title='{html.escape(claim.text)}'>{claim.letter}&nbsp;{MARKS[claim.outcome]}</span>"


def run_html(run: RunFiles, figures: str, prefix: str = "") -> str:
    """All of one run; `figures` is the folder of its files, `prefix` marks its anchors where there are several runs."""
    claims, entries = claims_of(run), figures_of(run)
    head, words = recommend(run.sweep, run.calibration) if run.sweep is not None else ("", "")
    head = head if run.depth is None else headline(run.depth)
    body = [_headline(run, claims, head, prefix), "" if prefix else glossary(run.sweep is not None, run.depth is not None)]
    body += [depth_section(run.depth, prefix)] if run.depth is not None else []
    body += [_section(entry, run, claims, figures, prefix) for entry in entries]
    if run.samples is not None:
        body.append(samples_section(run.samples, choose(run.sweep, run.calibration) if run.sweep is not None else None))
    swept = run.sweep.header if run.sweep is not None else None
    note = losses_note(run.evaluation, swept, run.calibration)
    body += ["<h2>Numbers</h2>", f"<p>{html.escape(note)}</p>" if note else "", group_table(run), drift_table(run)]
    if run.evaluation is not None:
        body.append(evaluation_table(run.evaluation))
    if run.sweep is not None:
        body += [sweep_table(run.sweep), token_table(slowest_of(run.sweep)) if any(e.name == "hard_tokens" for e in entries) else ""]
    body += ["<h2>The paper's claims on this run</h2>", _claims(claims)]
    if words:
        paragraphs = "".join(f"<p>{prose(paragraph)}</p>" for paragraph in words.split("\n\n"))
        body.append(f"<h2>What to use</h2><div id='{prefix}recommendation'>{paragraphs}</div>")
    return "".join(body) + "<h2>Set-up</h2>" + _setup(run)


def _section(entry: FigureEntry, run: RunFiles, claims: list[Claim], figures: str, prefix: str) -> str:
    """One figure: heading, caption, verdicts of its claims, links to the files, and the figure itself."""
    name = f"{prefix}{entry.name}"
    text = html.escape(f"Measured on {sweep_text(run.sweep.header)}. ") if run.sweep is not None and entry.swept else ""
    verdicts = "".join(
        f"Claim ({c.letter}): {html.escape(c.text)} <span class='outcome {c.outcome}'>{c.outcome}</span>. "
        for c in claims
        if c.letter in entry.claims
    )
    links = f'<a href="{figures}/{entry.name}.png">PNG</a>, <a href="{figures}/{entry.name}.pdf">PDF</a>'
    drawn = f"<img src='{figures}/{entry.name}.png' alt='{html.escape(entry.heading)}'>"
    return (
        f"<section id='{name}'><h2>{html.escape(entry.heading)}</h2><p>{prose(entry.caption)} {text}{verdicts}"
        f"<span class='soft'>For print: {links}.</span></p>{drawn if entry.page is None else _panels(name, entry.page(run))}</section>"
    )


def about_run(run: RunFiles) -> str:
    """Shape, training and measured text of a run."""
    m, last = run.config.model, run.last
    where = "spread over all held-out text" if run.config.task == "none" else "of held-out samples"
    return (
        f"{m.n_layer} layers of width {m.n_embd}, loop groups {group_list(run.names)}; default depth {plural(m.mean_loops, 'loop')} (r); "
        f"{run.tokens}; {run.training}. Geometry measured on {plural(int(last['tokens']), 'token')} {where} of "
        f"{run.text}, {plural(int(last['groups'][0]['loops']), 'loop step')}{_earlier(run)}."
    )


def _earlier(run: RunFiles) -> str:
    """A remark where the measurements over training are of another text than the last one."""
    others = [r for r in run.geometry if r.get("source") not in (None, run.last.get("source"))]
    if not others:
        return ""
    return f" (those of training step {others[0]['step']} to {others[-1]['step']}: on {others[0]['source']})"


def _headline(run: RunFiles, claims: list[Claim], recommendation: str, prefix: str) -> str:
    last = run.last
    verdicts = ", ".join(
        f"{label} is {g['verdict']} ({100 * g['verdict_shares'][g['verdict']]:.0f} % of tokens)"
        for label, g in zip(run.labels, last["groups"], strict=True)
    )
    paper = "" if prefix else f" The paper: {html.escape(PAPER)}."
    found = "; ".join(f"({c.letter}) <span class='{c.outcome}'>{c.outcome}</span>" for c in claims)
    advice = f"<p class='advice'>{html.escape(recommendation)}</p>" if recommendation else ""
    swept = run.sweep is not None or run.depth is not None
    return (
        f"<h1 id='{prefix}top'>{'Loops and exits' if swept else 'Loop geometry'} of {html.escape(run.config.name)}</h1>"
        f"<p class='soft'>{html.escape(about_run(run))}{paper}</p>"
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


def _panels(name: str, panels: list[Panel]) -> str:
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


def commands(run: RunFiles) -> list[str]:
    """The commands that measure what the page shows, with the settings that were used."""
    folder, found = run.folder.as_posix(), [f"twoscale trace {run.folder.as_posix()}"]
    if (c := run.calibration) is not None:
        goal = " ".join(f"--{key.replace('_', '-')} {value:g}" for key, value in c["goal"].items())
        windows = f" --{'windows' if run.config.task == 'none' else 'samples'} {c['windows']}" if "windows" in c else ""
        found.append(f"twoscale calibrate {folder} {goal} --rule {c['rule']} --delta {c['delta']:g} --loops {c['loops']}{windows}")
    if (s := run.sweep) is not None:
        rules = [family for family in rules_of(s) if family not in ("learned", "calibrated")]
        taus = sorted({p["setting"] for p in s.points if p["family"] in rules and p["setting"] is not None})
        named = f" --rules {' '.join(rules)}" if set(rules) != set(PAPER_RULES) else ""
        named += f" --taus {' '.join(f'{tau:g}' for tau in taus)}" if taus != TAUS else ""
        learned = "" if s.family("learned") else " --no-controller"
        asked = s.header.get("asked_windows", s.header.get("windows"))
        found.append(f"twoscale sweep {folder}{named} --loops {s.header['loops']} --windows {asked} --rounds {s.rounds}{learned}")
    if (d := run.depth) is not None:
        drop, asked = d.header["max_accuracy_drop"], d.header.get("asked_windows")
        learned = "" if any(c["family"] == "learned" for c in d.choices) else " --no-controller"
        asked_for = f"--loops {d.header['loops']} --samples {asked} --max-accuracy-drop {drop:g} --rounds {d.rounds}"
        found.append(f"twoscale sweep {folder} {asked_for}{learned}")
    return found


def _setup(run: RunFiles) -> str:
    seconds = sum(r.get("geometry_s", 0.0) for r in run.metrics)
    tokens = run.config.train.batch_size * run.config.model.block_size
    training = sum(tokens / r["tokens_per_s"] for r in run.metrics if r.get("tokens_per_s"))
    cost = (
        f"<p>Measuring geometry took {seconds:.1f} s beside {training:.0f} s of training ({100 * seconds / training:.1f} %).</p>"
        if training
        else ""
    )
    words = commands(run)
    head = next((sweep.header for sweep in (run.sweep, run.depth) if sweep is not None), {})
    machine = f", torch {head['torch']}, {plural(head['threads'], 'thread')}" if {"torch", "threads"} <= head.keys() else ""
    cpu = f" ({head['cpu']})" if head.get("cpu") else ""
    config = html.escape(json.dumps(to_dict(run.config), indent=1))
    name = html.escape(str(run.config.name))
    return (
        f"{cost}<p>Measured as by {', '.join(f'<code>{html.escape(w)}</code>' for w in words)}; training seed "
        f"{run.config.train.seed}. "
        f"twoscale {version('twoscale')}, Python {platform.python_version()}{html.escape(machine)}, "
        f"{html.escape(platform.machine() + cpu)}.</p>"
        f"<details><summary>The full config of {name}</summary><pre>{config}</pre></details>"
    )
