"""Words that commands, pages and messages share: counts, loop groups, and which text was measured."""

from collections.abc import Sequence

PARTS = {  # part of the held-out text -> words
    "fit": "from the fit part of the held-out text",
    "certify": "from the certify part of the held-out text",
    "report": "from the report part of the held-out text",
    "all": "spread over all held-out text",
}
MARGIN = 0.05  # counted FLOPs are called fewer from this share on
UNITS = {"documents": "document", "pieces": "piece of a document", "windows": "window", "samples": "sample"}
IRREGULAR_PLURALS = {"piece of a document": "pieces of documents", "guess": "guesses"}


def plural(n: int, noun: str) -> str:
    """A count with its noun: `1 loop`, `30 loops`, `1,024 tokens`."""
    return f"{n:,} {noun if n == 1 else IRREGULAR_PLURALS.get(noun, noun + 's')}"


def all_loops(n: int) -> str:
    """The full run in words: `all 30 loops`, `its 1 loop`."""
    return f"all {plural(n, 'loop')}" if n != 1 else "its 1 loop"


def group_label(g: int, layers: str | Sequence[int] | None = None) -> str:
    """Loop group number g (from 0) with its layers: `group 2 (layers 5-6)`. Files of older versions may not name the layers."""
    return f"group {group_number(g, layers)}"


def group_number(g: int, layers: str | Sequence[int] | None = None) -> str:
    """The same without the noun: `2 (layers 5-6)`. Groups are counted from 1 in words and from 0 in Python."""
    if layers is None:
        return str(g + 1)
    name = layers if isinstance(layers, str) else "-".join(dict.fromkeys((str(layers[0]), str(layers[-1]))))
    return f"{g + 1} ({'layers' if '-' in name else 'layer'} {name})"


def group_list(groups: Sequence[str | Sequence[int]]) -> str:
    """All loop groups of a model: `1 (layer 4), 2 (layers 5-6), 3 (layer 7)`; `none` without any."""
    return ", ".join(group_number(g, layers) for g, layers in enumerate(groups)) or "none"


def text_words(part: str, tokens: int, clusters: int | None = None, by: str | None = None, source: str | None = None) -> str:
    """Which text a loss was measured on: how many tokens, of how many documents, of which part of which source.

    Files of older versions name no source.
    """
    counted = f" ({plural(clusters, UNITS[by])})" if clusters is not None and by is not None else ""
    return f"{plural(tokens, 'token')}{counted} {PARTS[part]}" + (f" of {source}" if source else "")
