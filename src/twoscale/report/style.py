"""Colours and words that all figures share. Colour-blind safe: Okabe and Ito's set, and viridis for what is ordered."""

from collections.abc import Sequence
from typing import Any

GROUP_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
VERDICT_COLOURS = {"settling": "#009E73", "circling": "#E69F00", "drifting": "#D55E00", "undecided": "#BBBBBB"}
VARIANTS = {
    "settled": ("#0072B2", "o", "circle"),
    "first": ("#009E73", "s", "square"),
    "projected": ("#E69F00", "^", "triangle-up"),
    "initial": ("#CC79A7", "D", "diamond"),
    "input": ("#666666", "x", "x"),
}
FAMILIES = {  # curve of a sweep -> (label, colour, matplotlib's marker, plotly's symbol); the paper's three rules in its colours
    "full": ("full run", "#444444", ".", "circle"),
    "step-norm": ("step norm", "#0072B2", "o", "circle"),
    "kl": ("KL", "#E69F00", "s", "square"),
    "acceleration": ("acceleration", "#009E73", "^", "triangle-up"),
    "learned": ("learned controller", "#CC79A7", "D", "diamond"),
    "calibrated": ("calibrated", "#000000", "*", "star"),
    "fixed": ("fixed depth", "#666666", "x", "x"),
    "fixed-one": ("fixed depth of one group", "#B8B8B8", "+", "cross"),
    "random": ("random exit", "#8B5A2B", "v", "triangle-down"),
    "oracle-stay": ("oracle, stays within eps", "#56B4E9", "h", "hexagon"),
    "oracle-lagrange": ("oracle, loss + price x steps", "#D55E00", "p", "pentagon"),
}
_OTHERS = ("#7F3C8D", "#A5AA99", "#4B4B8F", "#80BA5A")


def family_look(name: str) -> tuple[str, str, str, str]:
    """Label, colour and markers of a curve; a rule that is not in the paper gets a colour by its name."""
    if name in FAMILIES:
        return FAMILIES[name]
    return name, _OTHERS[sum(map(ord, name)) % len(_OTHERS)], "d", "diamond-tall"


_VIRIDIS = ("#440154", "#414487", "#2A788E", "#22A884", "#7AD151")  # without the yellow end, which is lost on white


def ordered_colours(n: int) -> list[str]:
    """n colours from early (dark) to late (light)."""
    if n == 1:
        return [_VIRIDIS[0]]
    return [_mix(i / (n - 1)) for i in range(n)]


def _mix(t: float, colours: Sequence[str] = _VIRIDIS) -> str:
    place = t * (len(colours) - 1)
    i = min(int(place), len(colours) - 2)
    a, b = ([int(c[j : j + 2], 16) for j in (1, 3, 5)] for c in colours[i : i + 2])
    return "#" + "".join(f"{round(x + (y - x) * (place - i)):02X}" for x, y in zip(a, b, strict=True))


def step_colour(share: float, alpha: str = "80") -> str:
    """The background of a token that took this share of the steps it might have taken: viridis, see-through for light and dark pages.

    `alpha` is two hex digits, or empty for an opaque line in the same colour.
    """
    return f"{_mix(min(1.0, max(0.0, share)), (*_VIRIDIS, '#FDE725'))}{alpha}"


def step_share(steps: Sequence[int], loops: Sequence[int]) -> float:
    """0 for a token that left every group at its first step, 1 for one that took all."""
    return sum((k - 1) / max(1, limit - 1) for k, limit in zip(steps, loops, strict=True)) / max(1, len(loops))


def chosen(records: Sequence[dict[str, Any]], limit: int = 6) -> list[dict[str, Any]]:
    """At most so many records, the first and the last among them: more lines than that cannot be told apart."""
    if len(records) <= limit:
        return list(records)
    places = sorted({round(i * (len(records) - 1) / (limit - 1)) for i in range(limit)})
    return [records[i] for i in places]


def visible(token: str) -> str:
    """A token as a label: white space and control characters can be seen."""
    shown = token.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")
    return "".join(c if c.isprintable() else "·" for c in shown) or "·"
