# mypy: disable-error-code="no-untyped-call, attr-defined"
"""Controls that the text page and the task page share."""

import math

import gradio as gr

from twoscale import exits
from twoscale.explore import figures
from twoscale.explore.session import MAX_LOOPS, Session

LOW, HIGH = -6.0, 2.0  # the threshold's slider, in powers of ten


def within(text: str | None, low: float, high: float, otherwise: float) -> float:
    """The number that an address gives, of the kind of `otherwise`, which stands where there is none or it is out of range."""
    try:
        number = float(text) if text is not None else math.nan
    except ValueError:
        return otherwise
    return type(otherwise)(number) if low <= number <= high else otherwise


def exit_controls(session: Session, rule: str, power: float) -> tuple[gr.Dropdown, gr.Slider]:
    """Rule and threshold, with the marks of the calibrated ones; `rule` is chosen at first where the model has no calibration."""
    names = session.rules()
    first = "calibrated" if "calibrated" in names else rule
    chosen = gr.Dropdown(names, value=first, label="Exit rule", elem_id="rule")
    slider = gr.Slider(LOW, HIGH, value=power, step=0.05, label="Threshold: power of ten", elem_id="power")
    mark = gr.HTML(threshold_words(session, first, power), elem_id="mark")
    gr.on([chosen.change, slider.change], lambda r, p: threshold_words(session, r, p), [chosen, slider], mark, show_progress="hidden")
    return chosen, slider


def loops_control(loops: int) -> gr.Slider:
    return gr.Slider(2, MAX_LOOPS, value=max(2, min(loops, MAX_LOOPS)), step=1, label="Most loops", elem_id="loops")


def threshold_words(session: Session, rule: str, power: float) -> str:
    """The threshold in figures, and where the calibrated ones are."""
    note = "" if rule == "calibrated" else f"<div class='note'>{rule}: threshold {10.0**power:.3g}</div>"
    if session.calibrated is None:
        return note
    rules = [session.calibrated[0].get(g) for g in range(session.model.config.n_groups)]
    kinds = {type(r) for r in rules if r is not None}
    if rule != "calibrated" and exits.NAMES[rule] not in kinds:
        return note
    name = next((n for n, kind in exits.NAMES.items() if kind in kinds), "")
    return figures.calibrated_mark(name, [getattr(r, "tau", None) for r in rules], LOW, HIGH, session.groups) + note


def size_words(session: Session) -> str:
    """Parameters of the model."""
    n = session.model.config.matrix_parameters
    return f"{n / 1e9:.1f}B" if n >= 1e9 else f"{n / 1e6:.1f}M" if n >= 1e6 else f"{n / 1e3:.0f}k"
