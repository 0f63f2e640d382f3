"""Decoding of a request while no other one is running: several tokens in one call of a kernel, without Python between them. With
speculation the drafts of a cycle are one call and its verification is another.

The tokens, steps and the cache are the same as by passes of a batch, bit for bit. What a kernel cannot do (see `native_decode`) is done by
such a pass.
"""

import time
from dataclasses import dataclass, field

from twoscale.engine.counters import Counters
from twoscale.engine.engine import Engine
from twoscale.engine.kernels.base import Interrupt
from twoscale.engine.kernels.library import threads_to_use
from twoscale.engine.kernels.native_decode import MAX_ROWS, NativeSequence
from twoscale.engine.request import Request
from twoscale.engine.sample import sequence_sampling, uniform_number
from twoscale.engine.speculator import Speculator

CALL_SECONDS = 0.01  # a call is as long as this at most, so that tokens are shown and a request is cancelled in time
MAX_TOKENS = 16  # of a call


@dataclass(frozen=True)
class Computed:
    """The result of a call."""

    tokens: list[int] = field(default_factory=list)
    """The next tokens of the request."""
    steps: list[tuple[int, ...]] = field(default_factory=list)
    """For each row that was computed, its loop steps in each group; rows beyond the tokens were computed on wrong guesses."""
    together: bool = False
    """Whether the rows shared one pass; otherwise each was a pass."""


class SingleRequest:
    """A request that decodes alone."""

    def __init__(self, engine: Engine, request: Request, speculator: Speculator | None, counters: Counters) -> None:
        self.engine, self.request, self.speculator, self.counters = engine, request, speculator, counters
        self._sequence: NativeSequence | None = None
        self._seconds: float | None = None
        """Of a token, in the newest call without guesses."""
        self._cannot = engine.decoder is None or request.sampling.logprobs is not None  # log-probabilities need the logits

    def decode(self, interrupt: Interrupt) -> Computed:
        """The next tokens of the request; none if its next pass must be one of a batch. `interrupt` ends the call early."""
        sequence = self._prepared()
        if sequence is None:
            return Computed()
        n = self._n_tokens()
        if self.speculator is not None:
            self.speculator.draft(interrupt, self.counters)
            n = self.speculator.begin_unguessed(n)
        with self.counters.timed():
            return self._decode(sequence, n, interrupt) if n else self._verify(sequence, interrupt)

    def appended(self, computed: Computed, n: int) -> None:
        """The first n tokens of a call were appended to the request: the cache is rewound to them, and what was computed is counted. Tokens
        that come after the end of the request do not count."""
        assert self.request.cache is not None
        steps = computed.steps if computed.together else computed.steps[:n]
        self.engine.count_rows(steps, self.request.request_group, self.counters, computed.together)
        if n < len(computed.tokens):
            self.request.cache.rewind(self.request.n_computed)
        if self.speculator is not None and computed.together:
            self.speculator.on_verified(n, list(zip(*steps, strict=True)))
        elif self.speculator is not None:
            self.speculator.end_unguessed(steps, self._seconds if steps else None)

    def _decode(self, sequence: NativeSequence, n: int, interrupt: Interrupt) -> Computed:
        """Tokens one after the other."""
        request, started = self.request, time.perf_counter()
        uniform = [uniform_number(request.sampling_key(i)) for i in range(n)]
        tokens, steps = sequence.decode(request.tokens[-1], uniform, interrupt)
        if tokens:
            sequence.cache.extend(len(tokens))
            self._seconds = (time.perf_counter() - started) / len(tokens)
        return Computed(tokens, steps)

    def _verify(self, sequence: NativeSequence, interrupt: Interrupt) -> Computed:
        """The tokens up to the first wrong guess of a cycle whose guesses are made, that one's true token included."""
        request, speculator = self.request, self.speculator
        assert speculator is not None
        if not speculator.ready_to_verify:
            return Computed()
        guesses = speculator.guesses
        speculator.start_timer()
        uniform = [uniform_number(request.sampling_key(i)) for i in range(len(guesses) + 1)]
        found = sequence.verify([request.tokens[-1], *guesses], uniform, interrupt)
        if found is None:
            return Computed()
        speculator.stop_timer(len(found.tokens))
        sequence.cache.extend(len(found.tokens))
        stops, kept = request.sampling.stop_token_ids, 1
        while kept <= len(guesses) and found.tokens[kept - 1] == guesses[kept - 1] and guesses[kept - 1] not in stops:
            kept += 1
        return Computed(found.tokens[:kept], found.steps, together=True)

    def _n_tokens(self) -> int:
        """Tokens of the next call."""
        left = self.request.sampling.max_new_tokens - len(self.request.tokens)
        if self._seconds is None or self.request.sampling.stop:  # a token after a stop string would be computed in vain
            return min(1, left)
        return max(1, min(left, MAX_TOKENS, int(CALL_SECONDS / self._seconds)))

    def _prepared(self) -> NativeSequence | None:
        """The sequence as the kernel takes it; None if the kernel cannot decode it."""
        if self._cannot or (self._sequence is not None and self._sequence.threads == threads_to_use()):
            return None if self._cannot else self._sequence
        engine, request = self.engine, self.request
        assert engine.decoder is not None and request.cache is not None
        sampling, max_rows = sequence_sampling(request.sampling, engine.config.vocab_size), 1 if self.speculator is None else MAX_ROWS
        self._sequence = engine.decoder.sequence(request.cache, sampling, max_rows=max_rows)
        self._cannot = self._sequence is None
        return self._sequence
