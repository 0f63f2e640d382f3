# mypy: disable-error-code="no-untyped-call, attr-defined"
"""The explorer as a whole: one page for each model, text and task, and the server that shows them."""

from collections.abc import Sequence

import gradio as gr

from twoscale.explore import assets
from twoscale.explore.page import text_page
from twoscale.explore.session import Session
from twoscale.explore.task_page import task_page

FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]  # nothing is fetched from anywhere


def build(sessions: Sequence[Session]) -> gr.Blocks:
    """The page of the first model; the other ones have pages of their own, named in a bar above."""
    first, *others = sessions
    with gr.Blocks(title=f"{first.name} · twoscale", analytics_enabled=False) as page:
        gr.Navbar(main_page_name=page_name(first), visible=bool(others))
        _fill(first, page)
    for session in others:
        with page.route(page_name(session), f"/{'text' if session.task is None else 'task'}"):
            _fill(session, page)
    return page


def page_name(session: Session) -> str:
    """A model's page as the bar names it."""
    return f"Text: {session.name}" if session.task is None else f"Task: {session.name}"


def _fill(session: Session, page: gr.Blocks) -> None:
    gr.Button("◐", elem_id="dark", min_width=40, size="sm").click(None, None, None, js=assets.DARK)
    if session.task is None:
        text_page(session, page)
    else:
        task_page(session, page)


def launch(sessions: Sequence[Session], host: str, port: int | None, block: bool = True) -> tuple[gr.Blocks, str]:
    """Serve the pages; returns them and the address of the first."""
    page = build(sessions)
    page.queue(default_concurrency_limit=1, max_size=32)
    theme = gr.themes.Default(font=FONTS, font_mono=["ui-monospace", "Consolas", "monospace"])
    _, address, _ = page.launch(
        server_name=host, server_port=port, prevent_thread_lock=not block, quiet=True, css=assets.CSS, theme=theme,
        share=False, footer_links=[], max_file_size="1mb", ssr_mode=False,
    )  # fmt: skip
    return page, address
