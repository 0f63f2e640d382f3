"""`auto`: what it chooses follows from what was measured."""

import functools

import pytest

from models import loud, small_model
from twoscale.engine.adaptive import LOOKUP, MAX_BACKOFF, Chooser, Estimates
from twoscale.engine.request import Request, SamplingParams, loop_params
from twoscale.engine.speculation import OFF, Draft, Lookup

MODEL = loud(small_model())


def a_request() -> Request:
    """A request of 20 loops that has two tokens already."""
    return Request([1, 2, 3], SamplingParams(max_new_tokens=30), loop_params(MODEL, loops=20), prompt_steps=[(20, 20)] * 3, tokens=[1, 2])


def no_lookup(ngram: int, n: int) -> list[int]:
    return []


def test_auto_follows_what_is_measured() -> None:
    """`auto` drafts where drafts are cheap and right, stops after wrong guesses or where drafts are dear, and tries again some time."""
    known = Estimates()
    chooser = Chooser(a_request(), MODEL.config, known)
    choose = functools.partial(chooser.choose, 20, no_lookup)
    assert choose() == OFF  # nothing is known of a plain pass
    known.time_pass(1.0, 1, None)
    assert isinstance(choose(), Draft)
    for steps in range(1, 5):
        known.count(steps, 0, 9)
    assert choose() == OFF
    assert any(isinstance(choose(), Draft) for _ in range(600))
    for steps in range(1, 5):
        known.draft_cost[steps] = 0.9
        known.count(steps, 50, 50)
    assert all(choose() == OFF for _ in range(50))
    chooser.choose(20, lambda ngram, n: [4] * n)
    assert any(isinstance(chooser.choose(20, lambda ngram, n: [4] * n), Lookup) for _ in range(MAX_BACKOFF + 1))


def test_auto_remembers_that_guesses_did_not_pay() -> None:
    """A request begins with the backoff at which the one before it ended; each choice against guesses doubles it, up to its limit."""
    known, request = (
        Estimates(),
        Request([1, 2, 3], SamplingParams(), loop_params(MODEL, loops=2), prompt_steps=[(2, 2)] * 3, tokens=[1, 2]),
    )
    known.time_pass(1.0, 1, None)
    for steps in range(1, 5):
        known.draft_cost[steps] = 0.9
    looked = 0

    def look_up(ngram: int, n: int) -> list[int]:
        nonlocal looked
        looked += 1
        return []

    gaps = []
    for _ in range(7):
        chooser, looked, before, known.cycles = Chooser(request, MODEL.config, known), 0, 0, 0  # cycles: no plain one to measure
        while not looked:
            assert chooser.choose(20, look_up) == OFF
            before += 1
        gaps.append(before)
    assert gaps == [1, 2, 4, 8, 16, 33, 33]  # every 24th cycle is plain to measure it, and does not count


def test_expected_tokens_by_place() -> None:
    """Guesses that are right throughout or wrong at once: the expected tokens are those of such cycles, not of a mean share."""
    known = Estimates()
    for i in range(400):
        known.count(LOOKUP, 8 * (i % 2), 8 if i % 2 else 1)
    tokens = known.tokens(LOOKUP)
    assert tokens[0] == 1 and tokens[8] == pytest.approx(1 + 8 / 2, rel=0.1)
    assert Estimates().tokens(LOOKUP) == pytest.approx([sum(0.7**i for i in range(m + 1)) for m in range(16)])


def test_auto_tries_more_steps() -> None:
    """Where one step is often wrong and drafts are cheap, drafts of more steps are tried, and kept if they are right more often."""
    known = Estimates()
    known.time_pass(1.0, 1, None)
    chooser = Chooser(a_request(), MODEL.config, known)
    known.time_pass(0.3 * chooser.draft_prior[1], 1, 1)
    assert chooser.draft_cost(3) == pytest.approx(0.3 * chooser.draft_prior[3])
    chosen = []
    for _ in range(60):
        method = chooser.choose(20, no_lookup)
        if isinstance(method, Draft):
            right = 1 if method.steps == 1 else method.tokens
            known.count(method.steps, right, min(right + 1, method.tokens))
            chosen.append(method)
    assert known.acceptance(1) < known.acceptance(2) and all(m.steps > 1 for m in chosen[-20:])
    assert chosen[-1].tokens == 15


def test_auto_recovers_from_a_slow_moment() -> None:
    """Costs that were measured while another program was running do not keep `auto` from guessing for ever."""
    known = Estimates()
    known.time_pass(1.0, 1, None)
    known.slope = 5.0
    chooser = Chooser(a_request(), MODEL.config, known)
    assert all(chooser.choose(20, no_lookup) == OFF for _ in range(50))
    assert any(isinstance(chooser.choose(20, no_lookup), Draft) for _ in range(3000))
