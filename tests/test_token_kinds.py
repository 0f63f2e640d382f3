"""Kinds of tokens, and the steps that they take."""

import pytest
import torch

from constructed import a_point, a_sweep
from twoscale.report.kind_figures import kind_sentences, kind_words
from twoscale.tradeoff.evaluate import Evaluation
from twoscale.tradeoff.heldout import HeldOut
from twoscale.tradeoff.summary import FEWEST_OF_A_KIND
from twoscale.tradeoff.token_kinds import KINDS, kinds_of, steps_by_kind


@pytest.mark.parametrize(
    ("tokens", "kinds"),
    [
        (["The", " old", " man"], ["name", "first of a word", "first of a word"]),
        ([" went", ".", " Then", " Anna", " ran"], ["first of a word", "punctuation", "first of a sentence", "name", "first of a word"]),
        (['"', "No", '!"', " said", " he"], ["punctuation", "name", "punctuation", "first of a sentence", "first of a word"]),
        (
            [" in", " 19", "84", ",", "\n", "so"],
            ["first of a word", "number", "number", "punctuation", "space or line break", "first of a word"],
        ),
        (list("Hi. Go"), ["name", "inside a word", "punctuation", "space or line break", "first of a sentence", "inside a word"]),
        ([" un", "real", "-", "ly"], ["first of a word", "inside a word", "punctuation", "first of a word"]),
    ],
)
def test_kinds(tokens: list[str], kinds: list[str]) -> None:
    """Every token gets one kind, by its own spelling and by what stands before it, whatever the tokenizer."""
    assert kinds_of(tokens) == kinds and set(kinds) <= set(KINDS)


def test_steps_by_kind() -> None:
    """Means are those of the tokens of each kind over all groups; a kind with few tokens is left out; most steps come first."""
    words = [" a", ".", " B", "7"]
    ids = torch.tensor([[0, 2, 1, 0] * 20] * 3)
    ids[0, 5] = 3
    steps = torch.stack((1 + ids, 1 + 3 * ids), dim=-1)
    text = HeldOut(ids, ids, torch.arange(3)[:, None].expand_as(ids).contiguous(), "documents")
    found = {row["kind"]: row for row in steps_by_kind(text, Evaluation(torch.zeros(ids.shape), steps, ids), words.__getitem__)}
    assert "number" not in found and len(ids[ids == 3]) < FEWEST_OF_A_KIND  # type: ignore[arg-type]
    by_hand = {"name": 5.0, "punctuation": 3.0, "first of a sentence": 1.0, "first of a word": 1.0}
    assert {kind: row["steps"] for kind, row in found.items()} == by_hand
    assert sum(row["tokens"] for row in found.values()) == ids.numel() - 1
    assert all(row["low"] == row["steps"] == row["high"] for row in found.values())


def test_a_sentence_for_each_rule() -> None:
    """Every rule that is drawn has its sentence, and the tokens of kinds that are left out are counted."""
    rows = [
        {"kind": "name", "tokens": 4000, "steps": 5.0, "low": 4.5, "high": 5.5},
        {"kind": "space", "tokens": 2120, "steps": 4.0, "low": 3.6, "high": 4.4},
    ]
    steps = [a_point(f"{rule}:0.1", None, 4.0, hard={"kinds": kinds}) for rule, kinds in (("kl", rows), ("step-norm", rows[::-1]))]
    words = kind_sentences(a_sweep(*steps))
    assert words.startswith("kl:0.1: most steps name (5.00") and " step-norm:0.1: " in words
    assert words.endswith("Kinds with fewer than 30 tokens are left out (24 tokens).") and "left out" not in kind_sentences(
        a_sweep(*steps, tokens=6120)
    )


def test_words() -> None:
    """The sentence names two kinds only where their intervals lie apart, and any two that do, not the ends alone."""
    rows = [{"kind": "name", "steps": 5.0, "low": 4.5, "high": 5.5}, {"kind": "space", "steps": 4.0, "low": 3.6, "high": 4.4}]
    assert kind_words(rows, "kl:0.1") == "kl:0.1: most steps name (5.00 [4.50, 5.50]), fewest space (4.00 [3.60, 4.40])"
    third = {"kind": "number", "steps": 4.6, "low": 4.42, "high": 4.49}
    assert kind_words([rows[0], third, rows[1]], "a:1") == "a:1: most steps name (5.00 [4.50, 5.50]), fewest space (4.00 [3.60, 4.40])"
    near_top, near_end = third | {"high": 4.5}, third | {"low": 4.4}
    few = "a:1: fewest steps space (4.00 [3.60, 4.40]); which kind takes most is not told apart"
    most = "a:1: most steps name (5.00 [4.50, 5.50]); which kind takes fewest is not told apart"
    assert kind_words([rows[0], near_top, rows[1]], "a:1") == few and kind_words([rows[0], near_end, rows[1]], "a:1") == most
    both = kind_words([rows[0], third | {"low": 4.4, "high": 4.5}, rows[1]], "a:1")
    assert both == "a:1: name (5.00 [4.50, 5.50]) takes more steps than space (4.00 [3.60, 4.40])"
    wide = {"kind": "number", "steps": 5.2, "low": 3.0, "high": 7.0}
    assert kind_words([wide, *rows], "kl:0.1") == "kl:0.1: name (5.00 [4.50, 5.50]) takes more steps than space (4.00 [3.60, 4.40])"
    touching = [rows[0] | {"low": 4.4996}, rows[1] | {"high": 4.4951}]  # both ends are printed as 4.50
    assert kind_words(touching, "kl:0.1") == "kl:0.1: no kind of token is shown to take more steps than another"
    assert kind_words([rows[0], rows[1] | {"high": 4.5}], "kl:0.1") == "kl:0.1: no kind of token is shown to take more steps than another"
