"""Requests: one set of sampling parameters for Python, the command line and HTTP; stop strings; settings that travel with rows."""

import dataclasses
import gc
import inspect
import weakref

import pytest
import torch

import twoscale
from conftest import CommandLine, small_model
from models import loud
from scheduling import check, finish, model_of, request_of
from twoscale import UserError, exits
from twoscale.data.tokenizer import byte_tokenizer
from twoscale.engine import Engine, SamplingParams, Scheduler, loop_params
from twoscale.engine.text import TextStream

ELSEWHERE = {"max_new_tokens": {"max_tokens"}, "stop_token_ids": {"stop", "stop_token_ids"}}  # where a field has another name


def test_one_vocabulary() -> None:
    """Every field of SamplingParams can be given in Python, on the command line and over HTTP."""
    from twoscale.cli.generate import GenerateArgs
    from twoscale.serve.api import CompletionRequest

    python = set(inspect.signature(twoscale.generate).parameters)
    command_line = {f.name for f in dataclasses.fields(GenerateArgs)}
    for field in dataclasses.fields(SamplingParams):
        names = {field.name} | ELSEWHERE.get(field.name, set())
        for known in (python, command_line, set(CompletionRequest.model_fields)):
            assert names & known, f"{field.name} is missing among {sorted(known)}"


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": -1},
        {"temperature": True},
        {"top_k": 0},
        {"top_p": 0.0},
        {"seed": 1.5},
        {"max_new_tokens": 0},
        {"logprobs": -1},
        {"stop": "word"},
        {"stop": ("",)},
        {"stop_token_ids": frozenset({-1})},
    ],
    ids=str,
)
def test_bad_parameters(changes: dict[str, object]) -> None:
    """A value that makes no sense is refused by its name."""
    with pytest.raises(UserError, match=next(iter(changes))):
        SamplingParams(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "stop", "text", "n"),
    [
        ("one two three", ("two",), "one ", 7),
        ("one two three", ("zwei",), "one two three", 13),
        ("aab", ("ab",), "a", 3),
        ("abab", ("abc", "ba"), "a", 3),
        ("one tw", ("two",), "one tw", 6),
        ("xyz", ("x",), "", 1),
    ],
)
def test_text_stream(tokens: str, stop: tuple[str, ...], text: str, n: int) -> None:
    """Text ends before the first stop string; what might be the beginning of one is held back until it is not."""
    stream, shown = TextStream(byte_tokenizer(), [], stop), ""
    for token in tokens.encode():
        shown += stream.add(token)
        assert not any(word in shown for word in stop)
    shown += stream.finish()
    assert shown == stream.text == text and len(stream.offsets) == n


def test_stop_strings() -> None:
    """A stop string ends its text before it begins and no more tokens are computed; the other texts of the batch go on."""
    model, tokenizer = twoscale.load("bundled")
    assert tokenizer is not None
    free = twoscale.generate(model, ["The old man", "Once"], 12, tokenizer=tokenizer, loops=2)
    assert free.texts is not None
    word = tokenizer.decode(free.tokens[0][4:6])
    assert word not in tokenizer.decode(free.tokens[0][:5])
    cut = twoscale.generate(model, ["The old man", "Once"], 12, tokenizer=tokenizer, loops=2, stop=(word,))
    assert cut.tokens[0] == free.tokens[0][:6] and cut.finish_reasons[0] == "stop" and cut.texts is not None
    assert cut.texts[0] == free.texts[0][: free.texts[0].index(word)]
    assert cut.tokens[1] == free.tokens[1] or word in free.texts[1]
    with pytest.raises(UserError, match="tokenizer"):
        twoscale.generate(model, [[1]], 3, stop="word")
    with pytest.raises(UserError, match="tokenizer"):
        twoscale.generate(model, "text", 3)


def test_stop_on_the_command_line(cli: CommandLine) -> None:
    """--stop ends the text where Python's `stop` does, and --logprobs lists every token."""
    words = ("generate", "bundled", "The old man", "--max-new-tokens", "8", "--temperature", "0", "--loops", "2")
    _, out, _ = cli(*words)
    word = next(f" {word}" for word in out.split()[4:] if f" {word}" not in "The old man")
    code, cut, err = cli(*words, "--stop", word, "--logprobs", "1")
    assert code == 0 and cut.rstrip("\n") == out[: out.index(word)] and len(err.splitlines()) >= 3


def test_logprobs() -> None:
    """Log-probabilities are those of the logits that the tokens were sampled from."""
    model = loud(small_model(), scale=0.1)
    gen = twoscale.generate(model, [[1, 2, 3]], 5, logprobs=3)
    logits = twoscale.forward(model, [[1, 2, 3, *gen.tokens[0][:-1]]]).logits[0, 2:]
    assert gen.logprobs is not None
    for token, entries, row in zip(gen.tokens[0], gen.logprobs[0], logits.log_softmax(-1), strict=True):
        assert entries[0][0] == token and len(entries) == 4
        assert all(abs(value - float(row[t])) < 1e-4 for t, value in entries)
        assert [t for t, _ in entries[1:]] == row.topk(3).indices.tolist()


def test_rewind() -> None:
    """After a rewind the same tokens give the same states to the bit, and other tokens what they give in a new cache."""
    model = loud(small_model(), scale=0.1)
    engine, params = Engine(model), loop_params(model, exit=exits.Acceleration(1.0, normalize="steps"), loops=6)
    cache, fresh = engine.new_cache(12, params), engine.new_cache(12, params)
    engine.run([(0, cache, [1, 2, 3])])
    first, _ = engine.run([(0, cache, [4, 5])])
    cache.rewind(3)
    again, _ = engine.run([(0, cache, [4, 5])])
    assert torch.equal(first, again)
    cache.rewind(2)
    other, _ = engine.run([(0, cache, [9, 8, 7])])
    engine.run([(0, fresh, [1, 2])])
    assert torch.equal(other, engine.run([(0, fresh, [9, 8, 7])])[0]) and cache.length == 5
    with pytest.raises(ValueError, match="rewound"):
        cache.rewind(6)


def test_deep_request_beside_shallow_ones() -> None:
    """Shallow requests do not wait for all steps of a deep one, which becomes a round of its own. Each gets what it gets alone."""
    model = model_of()
    deep = request_of(model, 1, None, loops=200, new=6, temperature=0.0)
    shallow = [request_of(model, i, exits.Fixed(2), new=6, temperature=0.0) for i in range(2, 6)]
    scheduler = Scheduler(model)
    for request in (deep, *shallow):
        scheduler.add(request)
    rounds = 0
    while not all(request.finish_reason for request in shallow):
        assert scheduler.step()
        rounds = max(rounds, len(scheduler.batches))
    assert rounds > 1 and not deep.finish_reason
    finish(scheduler)
    for request in (deep, *shallow):
        check(model, request)


def test_seeds_share_calls() -> None:
    """Requests with different seeds of their start states share stage passes, and each has its own seed's states."""
    model = model_of()
    requests = [request_of(model, 7, temperature=0.0, new=6) for _ in range(6)]
    for seed, request in enumerate(requests):
        request.loop_params = dataclasses.replace(request.loop_params, seed=seed)
        request.sampling = dataclasses.replace(request.sampling, seed=seed)
    scheduler = Scheduler(model)
    for request in requests:
        scheduler.add(request)
    finish(scheduler)
    for request in requests:
        check(model, request)
    assert len({tuple(request.steps[0]) for request in requests} | {tuple(request.tokens) for request in requests}) > 2


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("cancel", [False, True], ids=["done", "cancelled"])
def test_caches_are_freed(kernels: str, cancel: bool) -> None:
    """The memory of a request is given back when it ends, without help of the garbage collector."""
    model = model_of()
    scheduler, request = Scheduler(model, kernels=kernels), request_of(model, 1, new=6)  # type: ignore[arg-type]
    others = [request_of(model, i, exits.Fixed(2), new=8) for i in (2, 3)]
    for one in (request, *others):
        scheduler.add(one)
    gc.collect()
    gc.disable()
    try:
        while len(request.tokens) < 3:
            scheduler.step()
        cache = weakref.ref(request.cache)
        assert cache() is not None
        request.cancelled = cancel
        while not request.finish_reason:
            scheduler.step()
        scheduler.step()
        assert cache() is None
    finally:
        gc.enable()
