# mypy: disable-error-code="no-untyped-call, attr-defined"
"""The page itself, in Gradio: what is on it, and what happens when something is typed, moved or clicked."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from twoscale.config import UserError
from twoscale.config.words import group_list, plural
from twoscale.explore import assets, figures, task_page
from twoscale.explore.controls import exit_controls, loops_control, size_words
from twoscale.explore.session import MAX_LOOPS, Inspection, Lane, Race, Session

PROMPT = "The old man looked at the sea and"
UPDATE = 0.05  # seconds between two looks at the texts
FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]  # nothing is fetched from anywhere

CSS = """
.text { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.9; font-size: 1.02rem; min-height: 7.5em; padding: 4px 2px; }
.tok { border-radius: 3px; padding: 2px 0; cursor: pointer; } .tok:hover, .tok:focus { outline: 2px solid #0072B2; }
.given { opacity: .65; } .on { outline: 2px solid currentColor; } .differs { outline: 2px dashed #D55E00; }
.caret { opacity: .5; } .legend { display: flex; gap: 8px; align-items: center; font-size: .85rem; opacity: .85; flex-wrap: wrap; }
.ramp { width: 140px; height: 12px; border-radius: 3px; display: inline-block; }
.marks { position: relative; height: 14px; margin: 0 8px; }
.marks span { position: absolute; transform: translateX(-50%); font-size: 12px; }
.note { font-size: .8rem; opacity: .8; } .scroll { overflow-x: auto; }
.said { border-collapse: collapse; font-size: .85rem; width: 100%; }
.said td, .said th { padding: 2px 8px; text-align: left; white-space: nowrap; }
.said .hit { font-weight: 700; } .said .left { background: rgba(213, 94, 0, .18); } summary { cursor: pointer; margin: 8px 0 4px; }
"""


@dataclass
class Visit:
    """What one visitor has in front of them."""

    race: Race | None = None
    seed: int = 0
    selected: int | None = None
    lane: str = "quick"
    found: Inspection | None = None

    def lane_of(self, name: str) -> Lane:
        assert self.race is not None
        return self.race.quick if name == "quick" else self.race.full


def build(session: Session) -> gr.Blocks:
    """The page of one model: its text, or the samples of its task."""
    return _text_page(session) if session.task is None else task_page.build(session)


def _text_page(session: Session) -> gr.Blocks:
    c = session.model.config
    default_loops = session.calibrated[1] if session.calibrated is not None else c.mean_loops
    answer = max(1, min(100, session.room - len(session.tokenizer.encode(PROMPT))))
    with gr.Blocks(title=f"{session.name} · twoscale", analytics_enabled=False) as page:
        gr.Markdown(
            f"## Watch **{session.name}** think\n{size_words(session)} parameters · loop groups {group_list(session.groups)} · "
            f"default depth {plural(c.mean_loops, 'loop')} · context {plural(c.block_size, 'token')}. "
            f"Colours show how many loop steps each token took; click one to see why."
        )
        visit = gr.State(Visit())
        with gr.Row():
            prompt = gr.Textbox(
                PROMPT,
                label="Prompt (Enter generates)",
                lines=1,
                max_lines=6,
                scale=6,
                min_width=260,
                elem_id="prompt",
                submit_btn=False,
            )
            with gr.Column(scale=1, min_width=120):
                go = gr.Button("Generate", variant="primary", elem_id="go")
                stop = gr.Button("Stop", elem_id="stop")
        with gr.Accordion("Settings", open=True), gr.Row():
            with gr.Column(min_width=260):
                rule, power = exit_controls(session, "acceleration", -1.0)
            with gr.Column(min_width=200):
                loops = loops_control(default_loops)
                kv = gr.Dropdown(["exact", "last", "ring:4"], value="exact", label="Keys and values kept", elem_id="kv")
            with gr.Column(min_width=200):
                new = gr.Slider(1, max(2, session.room - 1), value=answer, step=1, label="New tokens", elem_id="new")
                temperature = gr.Slider(0, 1.5, value=0.7, step=0.05, label="Temperature (0: the likeliest token)")
                seed = gr.Number(0, precision=0, minimum=0, maximum=2**31 - 1, label="Seed (the same for both texts)")
        summary = gr.Markdown("", elem_id="summary")
        lanes: dict[str, tuple[gr.HTML, gr.Markdown]] = {}
        with gr.Row():
            for name, title in (("quick", "With exits"), ("full", "All loops")):
                with gr.Column(min_width=300):
                    gr.Markdown(f"#### {title}")
                    box = gr.HTML("<div class='text'></div>", js_on_load=assets.CLICK, elem_id=name, apply_default_css=False)
                    lanes[name] = box, gr.Markdown("", elem_id=f"{name}-words")
        legend = gr.HTML(figures.legend(c.loops_for(min(default_loops, MAX_LOOPS))))
        about = gr.Markdown("### Click a token to see how it was chosen", elem_id="about")
        with gr.Row():
            with gr.Column(min_width=300):
                kind = gr.Radio(["2-D", "3-D"], value="2-D", label="Principal components", elem_id="kind")
                path = gr.Plot(label="Its states, step by step (★ where it left)", elem_id="path")
            with gr.Column(min_width=300):
                said = gr.HTML("", elem_id="said", apply_default_css=False, max_height=520)
        with gr.Row():
            curves = [gr.Plot(label="", show_label=False, min_width=280, elem_id=f"curve-{i}") for i in range(3)]

        shown = [visit, lanes["quick"][0], lanes["quick"][1], lanes["full"][0], lanes["full"][1], summary, legend]
        settings = [prompt, rule, power, loops, kv, new, temperature, seed]

        def generate(*inputs: Any) -> Iterator[list[Any]]:
            yield from _generate(session, *inputs)

        running = gr.on([prompt.submit, go.click], generate, settings, shown, concurrency_limit=1, show_progress="hidden")
        stop.click(None, None, None, cancels=[running], queue=False)
        looked = [visit, about, path, *curves, said, lanes["quick"][0], lanes["full"][0]]
        for name, (box, _) in lanes.items():

            def clicked(v: Visit, three: str, event: gr.EventData, name: str = name) -> list[Any]:
                return _inspect(session, v, name, int(event.index), three == "3-D")

            box.click(clicked, [visit, kind], looked, concurrency_limit=1)
        kind.change(lambda v, k: gr.skip() if v.found is None else figures.path_figure(v.found, k == "3-D"), [visit, kind], path)
    return page


def _generate(
    session: Session, prompt: str, rule: str, power: float, loops: float, kv: str, new: float, temperature: float, seed: float | None
) -> Iterator[list[Any]]:
    """Both texts as they come."""
    try:
        exit = session.rule(rule, 10.0**power)
        number = int(seed or 0)
        visit, last = Visit(seed=number), 0.0
        for race in session.race(prompt, exit, int(loops), kv=kv, new=int(new), temperature=temperature, seed=number):
            visit.race = race
            now = time.monotonic()
            if now - last >= UPDATE or race.quick.new + race.full.new <= 2:
                last = now
                yield _shown(visit)
        yield _shown(visit)
    except UserError as error:
        raise gr.Error(str(error), print_exception=False) from None


def _shown(visit: Visit) -> list[Any]:
    race = visit.race
    assert race is not None
    words = [figures.lane_words(lane, race.layers) for lane in (race.quick, race.full)]
    texts = _texts(visit)
    return [visit, texts[0], words[0], texts[1], words[1], figures.race_words(race), figures.legend(race.loops)]


def _texts(visit: Visit) -> list[str]:
    race = visit.race
    assert race is not None
    return [
        figures.tokens_html(visit.lane_of(name), race.loops, visit.selected if visit.lane == name else None, race.first_difference)
        for name in ("quick", "full")
    ]


def _inspect(session: Session, visit: Visit, name: str, index: int, three: bool) -> list[Any]:
    if visit.race is None:
        raise gr.Error("generate a text first", print_exception=False)
    try:
        found = session.inspect(visit.lane_of(name), index, max(visit.race.loops), visit.seed)
    except UserError as error:
        raise gr.Error(str(error), print_exception=False) from None
    visit = Visit(visit.race, visit.seed, index, name, found)
    curves = figures.curve_figures(found)
    return [visit, figures.inspection_words(found), figures.path_figure(found, three), *curves, figures.said_html(found), *_texts(visit)]


def launch(session: Session, host: str, port: int | None, block: bool = True) -> tuple[gr.Blocks, str]:
    """Serve the page; returns it and its address."""
    page = build(session)
    page.queue(default_concurrency_limit=1, max_size=32)
    theme = gr.themes.Default(font=FONTS, font_mono=["ui-monospace", "Consolas", "monospace"])
    _, address, _ = page.launch(
        server_name=host, server_port=port, prevent_thread_lock=not block, quiet=True, css=CSS + assets.TASK_CSS, theme=theme,
        share=False, footer_links=[], max_file_size="1mb", ssr_mode=False,
    )  # fmt: skip
    return page, address
