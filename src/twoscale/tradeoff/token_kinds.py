"""Which kinds of tokens take more steps: mean steps of names, numbers, first tokens of words and so on, with intervals over documents."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from twoscale.tradeoff.evaluate import Evaluation
from twoscale.tradeoff.heldout import HeldOut
from twoscale.tradeoff.stats import interval
from twoscale.tradeoff.summary import FEWEST_OF_A_KIND

KINDS = ("first of a sentence", "name", "first of a word", "inside a word", "number", "punctuation", "space or line break")
SENTENCE_ENDS, CLOSING = ".!?", "\"')]”’"


def kinds_of(texts: Iterable[str]) -> list[str]:
    """The kind of each token of one text, given as their spellings in order: the first that fits, in the words of KINDS.

    A name is a word with a capital letter that does not begin a sentence. A token that joins several kinds (`."`, ` 3rd`) is told by its
    first character that is no space. The start of a text is neither the start of a sentence nor the inside of a word.
    """
    found, before = [], " "
    for text in texts:
        core = text.lstrip()
        found.append(_kind(core[:1], joined=core == text and before[-1:].isalnum(), before=before.rstrip().rstrip(CLOSING)))
        before = (before + text)[-16:]
    return found


def _kind(first: str, joined: bool, before: str) -> str:
    if not first:
        return "space or line break"
    if first.isdigit():
        return "number"
    if not first.isalpha():
        return "punctuation"
    if joined:
        return "inside a word"
    if before.endswith(tuple(SENTENCE_ENDS)):
        return "first of a sentence"
    return "name" if first.isupper() else "first of a word"


def steps_by_kind(text: HeldOut, evaluation: Evaluation, spell: Callable[[int], str]) -> list[dict[str, Any]]:
    """Mean steps (over groups) of the tokens of each kind that occurs often enough, most steps first, with 95 % intervals."""
    spelling = {i: spell(i) for i in np.unique(text.ids.numpy()).tolist()}
    kinds = np.array([kinds_of(spelling[i] for i in row) for row in text.ids.tolist()])  # (N, T)
    steps, clusters = evaluation.steps.double().mean(dim=-1).numpy(), text.clusters.numpy()
    rows = [_row(kind, steps[kinds == kind], clusters[kinds == kind]) for kind in KINDS if (kinds == kind).sum() >= FEWEST_OF_A_KIND]
    return sorted(rows, key=lambda row: -float(row["steps"]))


def _row(kind: str, steps: np.ndarray, clusters: np.ndarray) -> dict[str, Any]:
    low, high = interval(steps, clusters)
    return {"kind": kind, "tokens": len(steps), "steps": float(steps.mean()), "low": low, "high": high}
