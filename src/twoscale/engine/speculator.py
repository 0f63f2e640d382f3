"""The speculation of a request while it decodes: draft and verify, prompt lookup, and the start of a wavefront.

A cycle: the guesses are made (`Draft`: one pass with few loop steps for each, in the request's own cache; `Lookup`: for free), then one
pass with the request's own loops and rules over the newest token and all guesses. It gives the true token after each of them. The longest
right prefix stays, and the cache is rewound to it.

    cache, tokens = speculator.next_pass(alone)  # a draft, or the verification
    speculator.add_draft(token, steps)           # the token that was sampled from a draft pass
    speculator.on_verified(kept, steps)          # the first `kept` rows of a verification are right
"""

import time
from collections.abc import Sequence
from dataclasses import replace

from twoscale.engine.adaptive import Chooser, estimates_of, guess_kind
from twoscale.engine.cache import Cache
from twoscale.engine.counters import Counters
from twoscale.engine.engine import Engine
from twoscale.engine.kernels.base import Interrupt
from twoscale.engine.request import LoopParams, Request, SamplingKey
from twoscale.engine.sample import sequence_sampling, uniform_number
from twoscale.engine.speculation import OFF, Auto, Draft, Lookup, Speculation, SpeculationStats, Wavefront
from twoscale.engine.wavefront import Wave


def draft_params(params: LoopParams, steps: int) -> LoopParams:
    """Loop parameters of a draft: at most `steps` loop steps in each group, without exit rules."""
    return replace(params, rules=(None,) * len(params.rules), loops=tuple(min(steps, loops) for loops in params.loops))


def look_up(tokens: Sequence[int], ngram: int, n: int) -> list[int]:
    """At most n tokens that followed the last `ngram` tokens where these occurred last before; empty if they did not."""
    last = list(tokens[-ngram:])
    for end in range(len(tokens) - 1, ngram - 1, -1):
        if tokens[end - 1] == last[-1] and list(tokens[end - ngram : end]) == last:
            return list(tokens[end : end + n])
    return []


class Speculator:
    """The speculation of one request while it decodes."""

    def __init__(self, request: Request, engine: Engine) -> None:
        config = engine.config
        self.request, self.engine = request, engine
        self.method = request.speculate
        """How the guesses of this cycle are made; with `auto` it is chosen anew for every cycle."""
        self.auto = isinstance(request.speculate, Auto)
        self._chooser: Chooser | None = None
        self._started: float | None = None
        """When the current pass began, if no other request was running."""
        self.guesses: list[int] = []
        """Guesses of this cycle that are not verified yet."""
        self._drafts_left: int | None = None
        """Draft passes until the verification; None: the cycle has not begun."""
        self._begun = 0
        """Cycles without guesses that `begin_unguessed` has begun and `end_unguessed` has not ended."""
        self._draft_cache: Cache | None = None
        self.wave: Wave | None = None
        self._deepest = [0] * config.n_groups
        """For each group, the most loop steps of a token whose keys and values are kept."""
        self._n_in_deepest = 0
        """Tokens of the request whose loop steps are in `_deepest` already."""
        self._plain_stages = sum(group is None for _, group in config.stages)

    @property
    def in_cycle(self) -> bool:
        """Whether a cycle has begun whose verification is not done. Until then the cache may have levels that only drafts have reached."""
        return self._drafts_left is not None

    def start_wave(self) -> Wave | None:
        """The positions of the request as a batch, if this cycle decodes by a wavefront."""
        if self.request.in_prefill or not isinstance(self.method, Wavefront):
            return None
        self.wave = Wave(self.engine, self.request, self.method)
        return self.wave

    # -- passes --------------------------------------------------------------------------------------------------

    def next_pass(self, alone: bool) -> tuple[Cache, list[int]]:
        """The cache and the tokens of the next pass: a draft's, or the verification's. `alone`: no other request is running."""
        request = self.request
        assert request.cache is not None
        if self._drafts_left is None:
            self._begin_cycle(alone)
        elif self.auto and not alone:  # another request is running, so extra rows would delay it: verify what we have
            self._drafts_left = 0
        self._started = None
        if alone:
            self.start_timer()
        if self._drafts_left:
            assert self._draft_cache is not None
            return self._draft_cache, self.guesses[-1:] or request.tokens[-1:]
        return request.cache, [request.tokens[-1], *self.guesses]

    def _begin_cycle(self, alone: bool) -> None:
        request = self.request
        # The last new token is never fed to the network, so a pass of n rows is useful while n more tokens are to be generated.
        max_guesses = request.sampling.max_new_tokens - len(request.tokens) - 1
        self.guesses, self._drafts_left = [], 0
        if self.auto:
            self.method = self._choose(max_guesses) if alone and max_guesses else OFF
        method = self.method
        if isinstance(method, Lookup) and max_guesses:
            self.guesses = self._look_up(method.ngram, min(method.tokens, max_guesses))
        elif isinstance(method, Draft) and max_guesses:
            assert request.cache is not None
            self._drafts_left = min(method.tokens, max_guesses)
            self._draft_cache = request.cache.view(draft_params(request.loop_params, method.steps))

    def _look_up(self, ngram: int, n: int) -> list[int]:
        """Guesses by `look_up`, cut before a stop token: nothing comes after it."""
        guesses, stops = look_up([*self.request.prompt, *self.request.tokens], ngram, n), self.request.sampling.stop_token_ids
        return guesses[: next((i for i, token in enumerate(guesses) if token in stops), None)]

    def _choose(self, max_guesses: int) -> Speculation:
        """The method of the next cycle of `auto`."""
        if self._chooser is None:
            self._chooser = Chooser(self.request, self.engine.config, estimates_of(self.engine.source_model, self.request))
        return self._chooser.choose(max_guesses, self._look_up)

    def draft(self, interrupt: Interrupt, counters: Counters) -> None:
        """Make the drafts of the next cycle in one call of a kernel, if it drafts. No other request may be running; `interrupt` ends them
        early. Where the kernels cannot, the drafts are passes of their own: see `next_pass`."""
        request, started = self.request, time.perf_counter()
        if self._drafts_left is None:
            self._begin_cycle(alone=True)
        cache, method = self._draft_cache, self.method
        if not self._drafts_left or cache is None or self.guesses or not isinstance(method, Draft):
            return
        decoder, vocab_size = self.engine.draft_decoder, self.engine.config.vocab_size
        if decoder is None or not cache.levels_filled():
            return
        sequence = decoder.sequence(cache, sequence_sampling(request.sampling, vocab_size), is_draft=True)
        assert sequence is not None, "drafts have no rules"
        uniform = [uniform_number(request.sampling_key(i)) for i in range(self._drafts_left)]
        tokens, steps = sequence.decode(request.tokens[-1], uniform, interrupt)
        if not tokens:
            return
        seconds, self._started = (time.perf_counter() - started) / len(tokens), None
        for token, of_token in zip(tokens, steps, strict=True):
            if self._chooser is not None:
                self._chooser.estimates.time_pass(seconds, 1, method.steps)
            self.add_draft(token, [[n] for n in of_token])
        self._drafts_left = 0
        self.engine.count_rows(steps, request.request_group, counters)
        counters.engine_seconds += time.perf_counter() - started

    def begin_unguessed(self, n: int) -> int:
        """How many of the next tokens, at most n, are decoded without guesses because no other request is running and guesses would not
        pay, or there are none; 0 if the next cycle has guesses. Their cycles have then begun."""
        if self._drafts_left is None:
            self._begin_cycle(alone=True)
        if self.guesses or self._drafts_left or isinstance(self.method, Wavefront):
            return 0
        self._begun = 1 if self._chooser is None else 1 + self._chooser.skip(n - 1)
        return self._begun

    @property
    def ready_to_verify(self) -> bool:
        """Whether the guesses of this cycle are made and not verified yet."""
        return bool(self.guesses) and not self._drafts_left

    def start_timer(self) -> None:
        """A pass begins while no other request is running."""
        self._started = time.perf_counter() if self.auto else None

    def stop_timer(self, rows: int, draft_steps: int | None = None) -> None:
        """A pass of so many rows has ended; its time counts if the timer was started."""
        if self._started is not None and self._chooser is not None:
            self._chooser.estimates.time_pass(time.perf_counter() - self._started, rows, draft_steps)
        self._started = None

    def end_unguessed(self, steps: Sequence[Sequence[int]], seconds: float | None) -> None:
        """Tokens were appended that were decoded without guesses, with these steps in each group and so many seconds each. There may be
        fewer than `begin_unguessed` said; without any, the cycle goes on."""
        unused, self._begun = max(0, self._begun - max(1, len(steps))), 0
        if self._chooser is not None:
            self._chooser.unskip(unused)
            if seconds is not None:
                self._chooser.estimates.time_pass(seconds, 1, None)
        if not steps:
            return
        calls = sum(self._plain_stages + sum(of_token) for of_token in steps)
        self.request.speculation_stats += SpeculationStats(calls=calls)
        self._drafts_left = None
        if self._draft_cache is not None:  # the first draft was a stop token: levels that only it has reached are dropped
            self._rewind()

    def is_draft(self, cache: Cache) -> bool:
        """Whether a pass with this cache was a draft."""
        return cache is self._draft_cache

    def sampling_keys(self, cache: Cache, n: int) -> list[SamplingKey]:
        """The sampling keys for the n rows of a pass with this cache: those of decoding without guesses at the same token indices."""
        first = len(self.guesses) if self.is_draft(cache) else 0
        return [self.request.sampling_key(first + i) for i in range(n)]

    def add_draft(self, token: int, steps: Sequence[Sequence[int]]) -> None:
        """Add the token sampled from a draft pass to the guesses; `steps` is [group][token]."""
        assert self._drafts_left and isinstance(self.method, Draft)
        self._pass_ended(steps, self.method.steps)
        self._drafts_left -= 1
        if token in self.request.sampling.stop_token_ids:
            self._drafts_left = 0
        else:
            self.guesses.append(token)

    def on_verified(self, kept: int, steps: Sequence[Sequence[int]]) -> None:
        """Rewind the cache to the first `kept` rows of a verification, which were right; the request has their tokens already."""
        if self.wave is not None:
            if self.wave.on_verified(self.request.tokens[-1]):
                self._rewind()
            return
        request, drafted = self.request, len(self.guesses)
        assert request.cache is not None and 1 <= kept <= drafted + 1
        self._pass_ended(steps, None)
        if not drafted and self._draft_cache is None:  # a pass without guesses: there is nothing to rewind
            self._drafts_left = None
            return
        if self._chooser is not None and drafted:
            self._chooser.estimates.count(guess_kind(self.method), kept - 1, min(kept, drafted))
        request.speculation_stats += SpeculationStats(drafted, kept - 1, drafted + 1 - kept)
        self._rewind()

    def abandon(self) -> bool:
        """Rewind a pass on guesses that has failed; the caller then decodes without guesses. False if there were no guesses."""
        if self.wave is not None:
            self.wave = None
        elif not (self.guesses or self._drafts_left):
            return False
        self.request.speculation_stats += SpeculationStats(len(self.guesses), 0, len(self.guesses))
        self._rewind()
        return True

    def _rewind(self) -> None:
        request = self.request
        assert request.cache is not None
        for steps in (*request.prompt_steps, *request.steps[1:])[self._n_in_deepest : request.n_computed]:
            self._deepest = [max(a, b) for a, b in zip(self._deepest, steps, strict=True)]
        self._n_in_deepest = request.n_computed
        request.cache.rewind(request.n_computed, self._deepest)
        self.guesses, self._drafts_left, self._draft_cache = [], None, None

    def _pass_ended(self, steps: Sequence[Sequence[int]], draft_steps: int | None) -> None:
        self.stop_timer(1 + len(self.guesses), draft_steps)
        self.request.speculation_stats += SpeculationStats(calls=self._plain_stages + sum(max(group) for group in steps))
