"""Decoding of a request while no other one is running: several tokens in one call of a kernel, without Python between them.

The tokens, steps and the cache are the same as by passes of one row, bit for bit. What a kernel cannot do (see `NativeSequence.decode`) is
done by a pass.
"""

import time

from twoscale.engine.engine import Engine
from twoscale.engine.kernels.base import Interrupt
from twoscale.engine.kernels.library import threads_to_use
from twoscale.engine.kernels.native_decode import Decoded, NativeSequence
from twoscale.engine.request import Request
from twoscale.engine.sample import sequence_sampling, uniform_number
from twoscale.engine.speculator import Speculator

CALL_SECONDS = 0.01  # a call is as long as this at most, so that tokens are shown and a request is cancelled in time
MAX_TOKENS = 16  # of a call
NOTHING = Decoded([], [])


class SingleRequest:
    """A request that decodes alone."""

    def __init__(self, engine: Engine, request: Request, speculator: Speculator | None) -> None:
        self.engine, self.request, self.speculator = engine, request, speculator
        self._sequence: NativeSequence | None = None
        self._seconds: float | None = None
        """Of a token, in the newest call."""
        self._cannot = engine.decoder is None or request.sampling.logprobs is not None  # log-probabilities need the logits

    def decode(self, interrupt: Interrupt) -> Decoded:
        """The next tokens of the request, and their steps; none if the next token must be a pass. `interrupt` ends the call early."""
        request, sequence = self.request, self._prepared()
        if sequence is None or request.cache is None:
            return NOTHING
        n = self._n_tokens()
        if self.speculator is not None:
            n = self.speculator.begin_unguessed(n)
        if not n:
            return NOTHING
        started = time.perf_counter()
        uniform = [uniform_number(request.sampling_key(i)) for i in range(n)]
        decoded = sequence.decode(request.tokens[-1], uniform, interrupt)
        if decoded.tokens:
            request.cache.extend(len(decoded.tokens))
            self._seconds = (time.perf_counter() - started) / len(decoded.tokens)
            if self.speculator is not None:
                self.speculator.end_unguessed(decoded.steps, self._seconds)
        return decoded

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
        self._sequence = engine.decoder.sequence(request.cache, sequence_sampling(request.sampling, engine.config.vocab_size))
        self._cannot = self._sequence is None
        return self._sequence
