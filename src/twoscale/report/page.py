"""The HTML of a report: one self-contained page, with figures/*.png and *.pdf beside it.

The page opens from disk and asks the network for nothing: plotly's script is inside it, once.
"""

import html
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from twoscale.config.run_folder import RunFolder
from twoscale.config.serial import to_dict
from twoscale.config.words import group_list, plural
from twoscale.report.advice import recommend
from twoscale.report.claims import Claim, judge
from twoscale.report.content import DEPTH_GLOSSARY, GLOSSARY, PAPER, SWEPT_GLOSSARY, draw_script, style_sheet
from twoscale.report.depth_panels import depth_section
from twoscale.report.exit_claims import judge_exits
from twoscale.report.interactive import Panel
from twoscale.report.load import RunFiles
from twoscale.report.overview import card, picture, sweep_commands
from twoscale.report.registry import FigureEntry, figures_of
from twoscale.report.tables import drift_table, evaluation_table, group_table, prose, samples_section, sweep_table, token_table
from twoscale.report.tradeoff_figures import slowest_of
from twoscale.report.words import evaluation_text, losses_note, measured_words, unit_of, unit_words
from twoscale.tradeoff.choice import choose

OPEN = ("recommendation", "tradeoff", "depth", "staircase")  # sections that are not folded at first


def claims_of(run: RunFiles) -> list[Claim]:
    """The paper's claims, judged on what was measured of a run."""
    return judge(run.geometry, run.loops_in_training, run.in_stages) + (judge_exits(run.sweep) if run.sweep is not None else [])


def page_html(runs: list[RunFiles], parts: "list[RunParts]", dark: bool | None = None) -> str:
    """Everything in one file: style, plotly's script, the first screen, contents, and the runs one after the other; `dark` None follows the
    reader's system."""
    names = [html.escape(name) for name in names_of(runs)]
    swept = any(run.sweep or run.depth for run in runs)
    what = "Loops and exits" if swept else "Loop geometry"
    title = f"{', '.join(names)}: {what.lower()}"
    scheme = "light dark" if dark is None else "dark" if dark else "light"
    several = len(runs) > 1
    firsts = "".join(
        f"<div class='run'>{f'<h2 id={part.prefix}top>{name}</h2>' if several else ''}{part.first}</div>"
        for part, name in zip(parts, names, strict=True)
    )
    contents = "".join(_contents(part, name if several else "") for part, name in zip(parts, names, strict=True))
    words = glossary(any(run.sweep for run in runs), any(run.depth for run in runs), units_of(runs))
    bodies = "".join(f"{f'<h1>{name}</h1>' if several else ''}{part.about}{part.body}" for part, name in zip(parts, names, strict=True))
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<meta name='color-scheme' content='{scheme}'><title>{title}</title><style>{style_sheet(dark)}</style>"
        f"<script>{get_plotlyjs()}</script></head><body><main>"
        f"<h1 id='top'>{what} of {' and '.join(names)}</h1>"
        f"<p class='soft'>{html.escape(comparison_words(runs))} The paper: {html.escape(PAPER)}.</p>{firsts}"
        f"<nav id='contents'><h2>Contents</h2>{contents}<p><a href='#all'>open all sections</a></p></nav>{words}{bodies}"
        f"</main><script>{draw_script(dark)}</script></body></html>"
    )


def _contents(part: "RunParts", name: str) -> str:
    """Links to the sections of one run."""
    links = " · ".join(f"<a href='#{anchor}'>{html.escape(heading)}</a>" for anchor, heading in part.sections)
    return f"<p>{f'<b>{name}</b>: ' if name else ''}{links}</p>"


def names_of(runs: list[RunFiles]) -> list[str]:
    """What each run is called; where two have one name, their folders tell them apart."""
    names = [str(run.config.name) for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({run.folder.name})" for name, run in zip(names, runs, strict=True)]


def comparison_words(runs: list[RunFiles]) -> str:
    """What may be compared between the models of a page: losses only of the same text, times never; empty for one model."""
    if len(runs) < 2:
        return ""
    sessions = ", and each model was timed in a session of its own" if sum(run.sweep is not None for run in runs) > 1 else ""
    files = [RunFolder(run.folder).tokenizer for run in runs]
    one_tokenizer = len({file.read_bytes() if file.exists() else b"" for file in files}) == 1
    texts = {(run.evaluation or {}).get("text") for run in runs}
    first = runs[0].evaluation
    if len(texts) == 1 and None not in texts and first is not None:
        what = "" if one_tokenizer else " in bits per byte (not a token: the tokenizers differ)"
        size = f"{plural(first['bytes'], 'byte')} of " if first.get("bytes") else ""
        same = f"The loss by loops of the models is of the same text ({size}{first.get('source')}) and may be compared between them{what}"
        return f"{same}. Nothing else may: other losses are of other tokens{sessions}."
    known = [(name, run.evaluation) for name, run in zip(names_of(runs), runs, strict=True) if run.evaluation is not None]
    measured = ", ".join(f"{name} on {evaluation_text(found)}" for name, found in known)
    why = "they were measured on different text" if None not in texts else "it is not recorded that they were measured on the same text"
    tokenizers = "" if one_tokenizer else ", and their tokenizers differ"
    return f"Nothing is to be compared between the models: {why}{f' ({measured})' if measured else ''}{tokenizers}{sessions}."


def units_of(runs: list[RunFiles]) -> list[str]:
    """What the intervals of losses on a page are over."""
    found = [str(run.sweep.header["by"]) for run in runs if run.sweep is not None and run.sweep.header.get("by")]
    found += [unit_of(run.calibration, "report") for run in runs if run.calibration is not None and run.sweep is not None]
    return [unit_words(by) for by in dict.fromkeys(found)]


def glossary(swept: bool, depth: bool = False, units: Sequence[str] = ()) -> str:
    """The words of the page, folded; `depth` adds those of a task's sweep; `units` is what intervals are over."""
    over = " or ".join(units) + (", as the text beside it says" if len(units) > 1 else "") if units else "documents"
    words = (*(DEPTH_GLOSSARY if depth else ()), *GLOSSARY, *(SWEPT_GLOSSARY if swept else ()))
    rows = "".join(f"<dt>{prose(word)}</dt><dd>{prose(meaning.replace('{units}', over))}</dd>" for word, meaning in words)
    first = (
        "true depth, D@-0.5, rank correlation …"
        if depth and not swept
        else "the paper, CE, dCE, tau, r, nats, fixed:4, ms a token …"
        if swept
        else "the paper, loop group, r, CE, nats, DLR …"
    )
    return f"<details id='glossary'><summary>Words on this page: {first}</summary><dl>{rows}</dl></details>"


@dataclass(frozen=True)
class RunParts:
    """One run on a page."""

    prefix: str
    """Marks its anchors where there are several runs."""
    first: str
    """Its first screen."""
    about: str
    """What it is and how it was measured."""
    sections: list[tuple[str, str]]
    """Anchor and heading of each section."""
    body: str
    """The sections, folded."""


def run_html(run: RunFiles, figures: str, prefix: str = "") -> RunParts:
    """All of one run; `figures` is the folder of its files, `prefix` marks its anchors where there are several runs."""
    claims, shown = claims_of(run), picture(run)
    first = card(run, claims, _panels(f"{prefix}first", [shown]) if shown is not None else "", prefix)
    sections = [s for s in _sections(run, claims, figures, prefix) if s[2]]
    body = "".join(
        f"<details class='part' id='{anchor}'{' open' if anchor.removeprefix(prefix) in OPEN else ''}>"
        f"<summary><h2>{html.escape(heading)}</h2></summary>{inside}</details>"
        for anchor, heading, inside in sections
    )
    return RunParts(prefix, first, _about(run), [(anchor, heading) for anchor, heading, _ in sections], body)


def _sections(run: RunFiles, claims: list[Claim], figures: str, prefix: str) -> list[tuple[str, str, str]]:
    """Anchor, heading and content of every section; the content of one that this run does not have is empty."""
    entries = figures_of(run)
    advice = recommend(run.sweep, run.calibration)[1] if run.sweep is not None else ""
    paragraphs = "".join(f"<p>{prose(paragraph)}</p>" for paragraph in advice.split("\n\n")) if advice else ""
    found = [
        (f"{prefix}recommendation", "What to use", paragraphs),
        (f"{prefix}depth", "Where do the steps go?", depth_section(run.depth) if run.depth is not None else ""),
        (f"{prefix}claims", "The paper's claims", _claims(claims)),
    ]
    found += [(f"{prefix}{e.name}", e.heading, figure_html(e, run, claims, figures, prefix)) for e in _ordered(entries)]
    if run.samples is not None:
        choice = choose(run.sweep, run.calibration) if run.sweep is not None else None
        found.append((f"{prefix}samples", "What it writes", samples_section(run.samples, choice)))
    found.append((f"{prefix}numbers", "Numbers", _numbers(run, any(e.name == "hard_tokens" for e in entries))))
    found.append((f"{prefix}setup", "Set-up", setup_section(run)))
    return found


def _ordered(entries: list[FigureEntry]) -> list[FigureEntry]:
    """Figures on exits before those on geometry."""
    return [e for e in entries if e.swept] + [e for e in entries if not e.swept]


def _numbers(run: RunFiles, hard: bool) -> str:
    note = losses_note(run.evaluation, run.sweep.header if run.sweep is not None else None, run.calibration)
    parts = [f"<p>{html.escape(note)}</p>" if note else "", group_table(run), drift_table(run)]
    if run.evaluation is not None:
        parts.append(evaluation_table(run.evaluation))
    if run.sweep is not None:
        parts += [sweep_table(run.sweep), token_table(slowest_of(run.sweep)) if hard else ""]
    return "".join(parts)


def figure_html(entry: FigureEntry, run: RunFiles, claims: list[Claim], figures: str, prefix: str) -> str:
    """One figure: caption, verdicts of its claims, links to the files, and the figure itself, or the sentence that says it all."""
    if sentence := entry.instead(run):
        return f"<p>{prose(entry.caption)} {html.escape(sentence)}</p>"
    text = f"{prose(entry.remark(run))} " if entry.remark(run) else ""
    if run.sweep is not None and entry.swept:
        head = run.sweep.header
        over = f" Intervals of losses and steps are over {unit_words(head['by'])}." if head.get("by") else ""
        text += html.escape(f"{measured_words(head, run.sweep.rounds if entry.timed else 0)}{over} ")
    verdicts = "".join(
        f"Claim ({c.letter}): {html.escape(c.text)} <span class='outcome {c.outcome}'>{c.outcome}</span>. "
        for c in claims
        if c.letter in entry.claims
    )
    links = f'<a href="{figures}/{entry.name}.png">PNG</a>, <a href="{figures}/{entry.name}.pdf">PDF</a>'
    drawn = f"<img src='{figures}/{entry.name}.png' alt='{html.escape(entry.heading)}'>"
    return (
        f"<p>{prose(entry.caption)} {text}{verdicts}<span class='soft'>For print: {links}.</span></p>"
        f"{drawn if entry.page is None else _panels(f'{prefix}{entry.name}', entry.page(run))}"
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


def _about(run: RunFiles) -> str:
    """What the run is, and what its tokens do at the last checkpoint."""
    verdicts = ", ".join(
        f"{label} is {g['verdict']} ({100 * g['verdict_shares'][g['verdict']]:.0f} % of tokens)"
        for label, g in zip(run.labels, run.last["groups"], strict=True)
    )
    return f"<p class='soft'>{html.escape(about_run(run))} At the last checkpoint {html.escape(verdicts)}.</p>"


def _claims(claims: list[Claim]) -> str:
    rows = "".join(
        f"<tr><td>({c.letter}) {html.escape(c.text)}</td><td class='outcome {c.outcome}'>{c.outcome}</td><td>{html.escape(c.measured)}</td>"
        f"<td class='soft'>{prose(c.rule)}</td></tr>"
        for c in claims
    )
    head = "<tr><th>claim</th><th>verdict</th><th>measured</th><th>by this rule</th></tr>"
    return f"<div class='scroll'><table class='claims'>{head}{rows}</table></div>"


def _panels(name: str, panels: list[Panel]) -> str:
    """Places for the plots, and their data. They are drawn once they can be seen, when every place has its width. The panels of a figure
    share one legend above them."""
    legends = [_legend(figure) for _, figure in panels]
    shared = {entry.name: entry for legend in legends for entry in legend}
    if len(shared) > 1:
        for _, figure in panels:
            figure.update_layout(showlegend=False)
    cards = []
    for i, (title, figure) in enumerate(panels):
        data = figure.to_json().replace("</", "<\\/")  # a token may hold anything, a closing script tag too
        height = figure.layout.height
        cards.append(
            f"<div class='card'><h3>{html.escape(title)}</h3><div class='plot' id='{name}-{i}' style='height:{height}px'></div>"
            f"<script type='application/json' data-for='{name}-{i}'>{data}</script></div>"
        )
    legend = _legend_html(list(shared.values()), panels[0][1].layout.legend.title.text) if len(shared) > 1 else ""
    return f"<div class='figure'>{legend}<div class='panels'>{''.join(cards)}</div></div>"


@dataclass(frozen=True)
class LegendEntry:
    """A curve in a legend."""

    name: str
    colour: str
    dash: str
    """`solid`, `dash`, `dot`, or `none` for points without a line."""
    symbol: str
    hidden: bool


def _legend(figure: go.Figure) -> list[LegendEntry]:
    """The curves of a figure that a legend names."""
    found = []
    for trace in figure.data:
        if trace.type == "scatter" and trace.name and trace.showlegend is not False:
            line, marker = trace.line.color, trace.marker.color
            colour = line if isinstance(line, str) else marker if isinstance(marker, str) else "#888888"
            dash = "none" if trace.mode == "markers" else trace.line.dash or "solid"
            found.append(LegendEntry(trace.name, colour, dash, trace.marker.symbol or "circle", trace.visible == "legendonly"))
    return found


MARKERS = {"star": "dot star", "circle-open": "dot ring"}
"""Markers that a legend draws otherwise than as a dot: classes in page.css."""


def _legend_html(entries: list[LegendEntry], title: str | None) -> str:
    """One legend for all panels of a figure; a click on a name shows or hides its curve in all of them."""
    lines = {"dash": "border-top: 3px dashed", "dot": "border-top: 3px dotted", "none": "border-color:"}
    items = "".join(
        f"<button type='button' class='key{' off' if e.hidden else ''}' data-name='{html.escape(e.name)}'>"
        f"<i class='{MARKERS.get(e.symbol, 'dot') if e.dash == 'none' else ''}' data-colour='{e.colour}' "
        f"style='{lines.get(e.dash, 'border-top: 3px solid')} {e.colour}'></i>{html.escape(e.name)}</button>"
        for e in entries
    )
    return f"<div class='keys'>{f'<span class=soft>{html.escape(title)}:</span>' if title else ''}{items}</div>"


def commands(run: RunFiles) -> list[str]:
    """The commands that measure what the page shows, with the settings that were used."""
    folder, found = run.folder.as_posix(), [f"twoscale trace {run.folder.as_posix()}"]
    if (c := run.calibration) is not None:
        goal = " ".join(f"--{key.replace('_', '-')} {value:g}" for key, value in c["goal"].items())
        windows = f" --{'windows' if run.config.task == 'none' else 'samples'} {c['windows']}" if "windows" in c else ""
        found.append(f"twoscale calibrate {folder} {goal} --rule {c['rule']} --delta {c['delta']:g} --loops {c['loops']}{windows}")
    if run.sweep is not None:
        found += sweep_commands(folder, run.sweep)
    if (d := run.depth) is not None:
        drop, asked = d.header["max_accuracy_drop"], d.header.get("asked_windows")
        learned = "" if any(c["family"] == "learned" for c in d.choices) else " --no-controller"
        asked_for = f"--loops {d.header['loops']} --samples {asked} --max-accuracy-drop {drop:g} --rounds {d.rounds}"
        found.append(f"twoscale sweep {folder} {asked_for}{learned}")
    return found


def setup_section(run: RunFiles) -> str:
    """How it was measured, with what, and the full config."""
    seconds = sum(r.get("geometry_s", 0.0) for r in run.metrics)
    tokens = run.config.train.batch_size * run.config.model.block_size
    training = sum(tokens / r["tokens_per_s"] for r in run.metrics if r.get("tokens_per_s"))
    cost = (
        f"<p>Measuring geometry took {seconds:.1f} s beside {training:.0f} s of training ({100 * seconds / training:.1f} %).</p>"
        if training
        else ""
    )
    config = html.escape(json.dumps(to_dict(run.config), indent=1))
    name = html.escape(str(run.config.name))
    data = "; <code>data</code> is the text that it is measured on, not what it was trained on" if run.converted else ""
    data += "; <code>train</code> has the settings of one stage of its training" if run.in_stages else ""
    return (
        f"{cost}<p>Measured as by {', '.join(f'<code>{html.escape(w)}</code>' for w in commands(run))}; training seed "
        f"{run.config.train.seed}. {html.escape(measured_with(run))} "
        f"This page was made with twoscale {version('twoscale')}, Python {platform.python_version()}.</p>"
        f"<details><summary>The full config of {name}{data}</summary><pre>{config}</pre></details>"
    )


def measured_with(run: RunFiles) -> str:
    """How many points a sweep has and on what it was measured, as its file records it; empty without a sweep."""
    sweep = run.sweep or run.depth
    if sweep is None:
        return ""
    head = sweep.header
    versions = [f"{name} {head[key]}" for name, key in (("twoscale", "twoscale"), ("Python", "python"), ("torch", "torch")) if key in head]
    machine = [plural(head["threads"], "thread")] if "threads" in head else []
    machine += [f"{head['machine']} ({head['cpu']})" if head.get("cpu") else str(head["machine"])] if head.get("machine") else []
    recorded = f", measured with {', '.join(versions + machine)}" if versions or machine else ""
    unknown = "" if "twoscale" in head else "; the version of twoscale was not recorded"
    anew = (
        "" if sweep.commands or run.sweep is None else "; the command of the sweep is read from its points, this version may measure others"
    )
    return f"The sweep has {plural(len(sweep.points), 'point')}{recorded}{unknown}{anew}."
