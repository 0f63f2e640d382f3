# mypy: disable-error-code="no-untyped-call, attr-defined"
"""The explorer's page for text, in Gradio: what is on it, and what happens when something is typed, moved or clicked."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gradio as gr

from twoscale.config import UserError
from twoscale.config.words import group_list, plural
from twoscale.explore import assets, figures
from twoscale.explore.controls import HIGH, LOW, exit_controls, loops_control, size_words, within
from twoscale.explore.session import MAX_LOOPS, Inspection, Lane, Race, Session

NEW = 60  # tokens of the example
UPDATE = 0.05  # seconds between two looks at the texts
CLICK_ONE = "### Click a token to see how it was chosen"


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


@dataclass(frozen=True)
class Settings:
    """Everything that decides what is on the page, in the order of its controls; the address of the page holds it."""

    prompt: str
    rule: str
    power: float
    loops: int
    kv: str
    new: int
    temperature: float
    seed: int
    speculate: str

    @classmethod
    def first(cls, session: Session) -> "Settings":
        """What a page opens with."""
        c = session.model.config
        loops = session.calibrated[1] if session.calibrated is not None else c.mean_loops
        prompt = session.tokenizer.decode(session.tokenizer.encode(session.prompts[0])[: max(1, session.room - 1)])
        new = max(1, min(NEW, session.room - len(session.tokenizer.encode(prompt))))
        rule = "calibrated" if session.calibrated is not None else "acceleration"
        return cls(prompt, rule, -1.0, max(2, min(loops, MAX_LOOPS)), "exact", new, 0.7, 0, "off")

    def asked(self, query: Mapping[str, str], session: Session) -> "Settings | None":
        """These settings with what an address asks for; None where it asks for nothing. Unknown rules and numbers out of range are left."""
        found: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        asked = {name: query[name] for name in found if name in query}
        if not asked:
            return None
        ranges = {"power": (LOW, HIGH), "loops": (2, MAX_LOOPS), "new": (1, max(2, session.room - 1)), "temperature": (0, 1.5)}
        for name, value in asked.items():
            if isinstance(found[name], str):
                known = {"rule": session.rules(), "kv": KV, "speculate": session.speculations()}.get(name, (value,))
                found[name] = value if value in known else found[name]
            else:
                found[name] = within(value, *ranges.get(name, (0, 2**31 - 1)), found[name])
        return Settings(**found)

    @property
    def values(self) -> list[Any]:
        return [getattr(self, name) for name in self.__dataclass_fields__]


KV = ("exact", "last", "ring:4")


def text_page(session: Session, page: gr.Blocks) -> None:
    """Put the page for text into Blocks that are open."""
    c, first = session.model.config, Settings.first(session)
    example = _example(session, first)
    gr.Markdown(f"## Watch **{session.name}** think")
    gr.Markdown(
        f"{size_words(session)} parameters · loop groups {group_list(session.groups)} · "
        f"default depth {plural(c.mean_loops, 'loop')} · context {plural(c.block_size, 'token')}. "
        f"Colours show how many loop steps each token took; click one to see why.",
        elem_id="intro",
    )
    visit = gr.State(example)
    with gr.Row():
        prompt = gr.Textbox(
            first.prompt, label="Prompt (Enter generates)", lines=1, max_lines=6, scale=6, min_width=240, elem_id="prompt", submit_btn=False
        )
        with gr.Row(scale=1, elem_id="buttons"):
            go = gr.Button("Generate", variant="primary", elem_id="go", min_width=110)
            stop = gr.Button("Stop", elem_id="stop", min_width=60)
    examples = _examples(session)
    shown = _shown(example)
    summary = gr.Markdown(shown[5], elem_id="summary")
    lanes: dict[str, tuple[gr.HTML, gr.Markdown]] = {}
    with gr.Row():
        for i, (name, title) in enumerate((("quick", "With exits"), ("full", "All loops"))):
            with gr.Column(min_width=300):
                gr.Markdown(f"#### {title}")
                box = gr.HTML(shown[1 + 2 * i], js_on_load=assets.CLICK, elem_id=name, apply_default_css=False)
                lanes[name] = box, gr.Markdown(shown[2 + 2 * i], elem_id=f"{name}-words")
    legend = gr.HTML(shown[6], elem_id="legend", apply_default_css=False)
    others = gr.HTML(shown[7], elem_id="others", apply_default_css=False)
    with (
        gr.Accordion("Settings: exit rule, loops, speculation, length, temperature, seed", open=False, elem_id="settings"),
        gr.Row(),
    ):
        with gr.Column(min_width=260):
            rule, power = exit_controls(session, first.rule, first.power)
        with gr.Column(min_width=200):
            loops = loops_control(first.loops)
            kv = gr.Dropdown(list(KV), value=first.kv, label="Keys and values kept", elem_id="kv")
            speculate = gr.Dropdown(
                session.speculations(),
                value=first.speculate,
                label="Speculation (changes the time, not the text)",
                elem_id="speculate",
            )
        with gr.Column(min_width=200):
            new = gr.Slider(1, max(2, session.room - 1), value=first.new, step=1, label="New tokens", elem_id="new")
            temperature = gr.Slider(
                0, 1.5, value=first.temperature, step=0.05, label="Temperature (0: the likeliest token)", elem_id="temperature"
            )
            seed = gr.Number(first.seed, precision=0, minimum=0, maximum=2**31 - 1, label="Seed (the same for both texts)", elem_id="seed")
    looked_at = _looked(example)
    about = gr.Markdown(looked_at[0], elem_id="about")
    with gr.Column() as panels:
        with gr.Row():
            with gr.Column(min_width=300):
                said = gr.HTML(looked_at[5], elem_id="said", apply_default_css=False)
            with gr.Column(min_width=300):
                kind = gr.Radio(["2-D", "3-D"], value="2-D", label="Principal components", elem_id="kind")
                path = gr.Plot(looked_at[1], label="Its states, step by step (★ where it left)", elem_id="path")
        with gr.Row():
            curves = [gr.Plot(looked_at[2 + i], label="", show_label=False, min_width=280, elem_id=f"curve-{i}") for i in range(3)]

    texts = [lanes["quick"][0], lanes["quick"][1], lanes["full"][0], lanes["full"][1]]
    race_parts = [visit, *texts, summary, legend, others]
    token_parts = [about, path, *curves, said, panels]
    settings = [prompt, rule, power, loops, kv, new, temperature, seed, speculate]

    def generate(*inputs: Any) -> Iterator[list[Any]]:
        for i, parts in enumerate(_generate(session, Settings(*inputs))):
            yield [*parts, *(_looked(Visit()) if i == 0 else [gr.skip()] * len(token_parts))]

    def opened(request: gr.Request) -> Iterator[list[Any]]:
        """What the address asks for, if it asks for anything; the example stays otherwise."""
        asked = first.asked(request.query_params, session)
        if asked is None:
            yield [gr.skip()] * (len(settings) + len(race_parts) + len(token_parts))
            return
        for i, parts in enumerate(generate(*asked.values)):
            yield [*(asked.values if i == 0 else [gr.skip()] * len(settings)), *parts]

    queue: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "write", "show_progress": "hidden"}
    running = [
        gr.on([prompt.submit, go.click], generate, settings, [*race_parts, *token_parts], **queue),
        page.load(opened, None, [*settings, *race_parts, *token_parts], **queue),
    ]
    gr.on([prompt.submit, go.click], None, settings, None, js=assets.ADDRESS)
    for button in examples:  # the prompt is set, and then it is as if Generate was clicked
        chosen = button.click(lambda text=button.value: text, None, prompt, queue=False, show_progress="hidden")
        running.append(chosen.then(generate, settings, [*race_parts, *token_parts], **queue))
        chosen.then(None, settings, None, js=assets.ADDRESS)
    stop.click(None, None, None, cancels=running, queue=False)
    looked = [visit, *token_parts, lanes["quick"][0], lanes["full"][0]]
    for name, (box, _) in lanes.items():

        def clicked(v: Visit, three: str, event: gr.EventData, name: str = name) -> list[Any]:
            return _inspect(session, v, name, int(event.index), three == "3-D")

        box.click(clicked, [visit, kind], looked, concurrency_limit=1)
    kind.change(lambda v, k: gr.skip() if v.found is None else figures.path_figure(v.found, k == "3-D"), [visit, kind], path)


def _examples(session: Session) -> list[gr.Button]:
    """A button for each prompt that comes with the model."""
    if len(session.prompts) < 2:
        return []
    with gr.Row(elem_id="examples"):
        return [gr.Button(prompt, size="sm", min_width=40, elem_classes="example") for prompt in session.prompts]


def _example(session: Session, settings: Settings) -> Visit:
    """The page that a visitor opens: both texts, and the new token that took the most steps looked at closely."""
    *_, race = _race(session, settings)
    start = len(race.quick.prompt)
    index = max(range(start, len(race.quick.ids)), key=lambda i: sum(race.quick.steps[i] or ()))
    found = session.inspect(race.quick, index, max(race.loops), settings.seed)
    return Visit(race, settings.seed, index, "quick", found)


def _race(session: Session, s: Settings) -> Iterator[Race]:
    exit = session.rule(s.rule, 10.0 ** float(s.power))
    how: dict[str, Any] = {"kv": s.kv, "new": int(s.new), "temperature": float(s.temperature), "seed": int(s.seed or 0)}
    return session.race(s.prompt, exit, int(s.loops), **how, speculate=s.speculate)


def _generate(session: Session, settings: Settings) -> Iterator[list[Any]]:
    """Both texts as they come."""
    try:
        visit, last = Visit(seed=int(settings.seed or 0)), 0.0
        for race in _race(session, settings):
            visit.race = race
            now = time.monotonic()
            if now - last >= UPDATE or race.quick.new + race.full.new <= 2:
                last = now
                yield _shown(visit)
        yield _shown(visit)
    except UserError as error:
        raise gr.Error(str(error), print_exception=False) from None


def _shown(visit: Visit) -> list[Any]:
    """The state, both texts with their words, summary, legend, and where the full run would have chosen otherwise."""
    race = visit.race
    assert race is not None
    words = [figures.lane_words(lane, race.layers) for lane in (race.quick, race.full)]
    texts = _texts(visit)
    tail = [figures.race_words(race), figures.race_legend(race), figures.others_html(race)]
    return [visit, texts[0], words[0], texts[1], words[1], *tail]


def _texts(visit: Visit) -> list[str]:
    race = visit.race
    assert race is not None
    parts = {} if race.first_difference is None else {race.first_difference: "here the texts part"}
    selected = {visit.lane: visit.selected}
    return [
        figures.tokens_html(race.quick, race.scale, selected.get("quick"), figures.other_words(race) or parts),
        figures.tokens_html(race.full, None, selected.get("full"), parts),
    ]


def _looked(visit: Visit, three: bool = False) -> list[Any]:
    """What is shown of the selected token: words, path, three curves, table, and whether there is anything to show."""
    found = visit.found
    if found is None:
        return [CLICK_ONE, None, None, None, None, "", gr.update(visible=False)]
    return [
        figures.inspection_words(found), figures.path_figure(found, three), *figures.curve_figures(found), figures.said_html(found),
        gr.update(visible=True),
    ]  # fmt: skip


def _inspect(session: Session, visit: Visit, name: str, index: int, three: bool) -> list[Any]:
    if visit.race is None:
        raise gr.Error("generate a text first", print_exception=False)
    try:
        found = session.inspect(visit.lane_of(name), index, max(visit.race.loops), visit.seed)
    except UserError as error:
        raise gr.Error(str(error), print_exception=False) from None
    visit = Visit(visit.race, visit.seed, index, name, found)
    return [visit, *_looked(visit, three), *_texts(visit)]
