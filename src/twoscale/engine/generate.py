"""`twoscale.generate`: cached decoding of ragged batches, with a separate exit for every token and loop group.

gen = twoscale.generate(model, [[1, 2, 3], [4, 5]], max_new_tokens=64, exit=exits.Acceleration(1e-2), loops=30)
gen.tokens[1]    # the new tokens of the second prompt; they do not depend on the other prompts
gen.steps[1]     # for each of them, the loop steps in each group of the forward pass that produced its logits

With a tokenizer prompts may be strings: twoscale.generate(model, "Once upon a time", tokenizer=tokenizer).texts[0]
"""

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from twoscale.config import UserError
from twoscale.config.dtypes import KVDtype
from twoscale.config.show import ShortRepr
from twoscale.data import Tokenizer
from twoscale.data.text import Tokens, as_token_ids
from twoscale.engine.kernels import KernelName
from twoscale.engine.request import LoopParams, Request, RequestGroup, SamplingParams, loop_params, split_stop
from twoscale.engine.scheduler import Scheduler, run_until_done
from twoscale.engine.speculation import NO_SPECULATION_STATS, OFF, Auto, Speculation, SpeculationStats, check_speculation
from twoscale.engine.text import TextStream
from twoscale.exits import Exit
from twoscale.model import LoopedGPT
from twoscale.model.input import as_batch

Callback = Callable[[int, int, tuple[int, ...]], object]

OFFLINE_PREFILL_CHUNK = 2048  # prompt tokens that a sequence runs at a time (see `Scheduler`)
OFFLINE_MAX_NUM_SEQS = 256  # sequences that are decoded at a time


@dataclass(frozen=True, repr=False)
class Generation(ShortRepr):
    """The result of `generate`, one entry for each prompt."""

    tokens: list[list[int]]
    """The new tokens, including the stop token if there was one."""
    steps: list[list[tuple[int, ...]]]
    """For each new token, the loop steps in each group of the forward pass that produced its logits."""
    prompt_steps: list[list[tuple[int, ...]]]
    """For each prompt token, its loop steps; the last entry is also the first of `steps`."""
    finish_reasons: list[str]
    """Of each sequence: `stop` or `length`."""
    work: list[int]
    """Work done: for each group, the loop steps of all rows together. Without speculation that is the sum over prompt and new tokens; with
    it drafts and rejected guesses are included."""
    cache_bytes: int
    """Peak memory of keys and values of all sequences."""
    logprobs: list[list[list[tuple[int, float]]]] | None = None
    """For each new token: (token, log-probability) of itself, then of the most likely tokens; None unless requested."""
    texts: list[str] | None = None
    """The generated text, cut before a stop string; None without a tokenizer."""
    speculation: SpeculationStats = NO_SPECULATION_STATS
    """Counts of the guesses, for all sequences together."""

    def __post_init__(self) -> None:
        assert all(len(t) == len(s) for t, s in zip(self.tokens, self.steps, strict=True))


def generate(
    model: LoopedGPT,
    ids: Tokens,
    max_new_tokens: int = 64,
    *,
    exit: Exit | None = None,
    loops: int | Sequence[int] | None = None,
    kv: str = "exact",
    kv_dtype: KVDtype = "auto",
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: str | int | Iterable[str | int] = (),
    logprobs: int | None = None,
    tokenizer: Tokenizer | None = None,
    callback: Callback | None = None,
    kernels: KernelName = "auto",
    speculate: str | Speculation = "off",
) -> Generation:
    """Continue every prompt by at most `max_new_tokens` tokens.

    `exit` and `loops` are as in `forward`; `kv` says which keys and values are cached (`exact`, `last`, `ring:n`), `kv_dtype` as what
    (`fp32`, `bf16`; `auto` is the one in which the model computes). Generation of a sequence stops at any token or string of `stop`.
    `callback(prompt_index, token, steps)` is called for every new token. `seed` is the seed of the start states and of the sampling; equal
    prompts in one batch draw different tokens. With a `tokenizer` prompts and stops may be strings.
    `speculate` (`off`, `auto`, `wavefront`, `draft:m`, `lookup:n`) guesses tokens ahead; tokens, steps and logits are the same to the bit.
    """
    stop_token_ids, stop_strings = split_stop(stop)
    sampling = SamplingParams(temperature, top_k, top_p, seed, max_new_tokens, stop_token_ids, stop_strings, logprobs)
    params = loop_params(model, exit=exit, loops=loops, kv=kv, kv_dtype=kv_dtype, seed=seed)
    scheduler = offline_scheduler(model, kernels)
    requests = make_requests(model, ids, sampling, params, tokenizer, speculate)
    if requests[0].speculate not in (OFF, Auto()) and not scheduler.engine.kernels.batch_invariant:
        warnings.warn(f"speculate = {requests[0].speculate} is off: without the C kernels it could change the result", stacklevel=2)
    streams = [track_tokens(request, tokenizer, callback) for request in requests]
    run_until_done(scheduler, requests)
    return Generation(
        [r.tokens for r in requests],
        [r.steps for r in requests],
        [r.prompt_steps for r in requests],
        [r.finish_reason for r in requests],
        list(scheduler.engine.loop_steps),
        scheduler.peak_cache_bytes,
        None if logprobs is None else [r.logprobs for r in requests],
        None if tokenizer is None else [s.text for s in streams if s is not None],
        sum((r.speculation_stats for r in requests), NO_SPECULATION_STATS),
    )


def stream(
    model: LoopedGPT, prompt: Sequence[int], sampling: SamplingParams, params: LoopParams, speculate: str | Speculation = "off"
) -> Iterator[Request]:
    """Generate lazily: yields the request after each step that gave new tokens, and computes the next ones only when asked for them.

    A step gives one or several tokens. `speculate` is as in `generate`."""
    scheduler = offline_scheduler(model)
    (request,) = make_requests(model, [prompt], sampling, params, speculate=speculate)
    scheduler.add(request)

    def tokens() -> Iterator[Request]:
        n = 0
        while scheduler.step():
            if request.error is not None:
                raise request.error
            if len(request.tokens) > n:
                n = len(request.tokens)
                yield request

    return tokens()


def offline_scheduler(model: LoopedGPT, kernels: KernelName = "auto") -> Scheduler:
    """A scheduler for offline generation: large batches, no memory limit, errors are raised."""
    return Scheduler(
        model,
        max_num_seqs=OFFLINE_MAX_NUM_SEQS,
        cache_bytes=math.inf,
        prefill_chunk=OFFLINE_PREFILL_CHUNK,
        isolate_errors=False,
        kernels=kernels,
    )


def make_requests(
    model: LoopedGPT,
    ids: Tokens,
    sampling: SamplingParams,
    params: LoopParams,
    tokenizer: Tokenizer | None = None,
    speculate: str | Speculation = "off",
) -> list[Request]:
    """A request for every prompt; equal prompts draw different tokens."""
    speculation = check_speculation(speculate, model.config, params)
    if sampling.stop and tokenizer is None:
        raise UserError("a stop string needs the model's tokenizer: give tokenizer=, or stop at token ids")
    tokens, lengths = as_batch(as_token_ids(ids, tokenizer), model.config.vocab_size, model.config.block_size)
    prompts = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
    copies: Counter[tuple[int, ...]] = Counter()
    requests, request_group = [], RequestGroup()
    for i, prompt in enumerate(prompts):
        sample_index = copies[tuple(prompt)]
        requests.append(Request(prompt, sampling, params, sample_index, i, request_group=request_group, speculate=speculation))
        copies[tuple(prompt)] += 1
    return requests


def track_tokens(request: Request, tokenizer: Tokenizer | None, callback: Callback | None = None) -> TextStream | None:
    """Set `on_token` of a request: call the callback for every new token, and stop at stop strings; returns its text stream."""
    sampling = request.sampling
    text = None if tokenizer is None else TextStream(tokenizer, request.prompt, sampling.stop, sampling.stop_token_ids)
    if text is None and callback is None:
        return None
    n_seen = 0

    def on_token(request: Request) -> None:
        nonlocal n_seen
        for token, steps in zip(request.tokens[n_seen:], request.steps[n_seen:], strict=True):
            n_seen += 1
            if text is not None:
                text.add(token)
            if callback is not None:
                callback(request.prompt_index, token, steps)
        if text is not None and request.finish_reason:
            text.finish()
        if text is not None and text.stopped:
            request.finish_reason = "stop"

    request.on_token = on_token
    return text
