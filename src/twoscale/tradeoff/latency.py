"""Milliseconds a token: one sequence (or a batch of them), cached decoding, warm, the same held-out tokens for every point.

Points take turns token by token, in an order drawn anew for every token, so a slow moment of the machine meets them alike; what counts
is each point's time beside the full run's in the same round. Tokens are given, not drawn: every point decodes the same text, and an
oracle can take part.
"""

import random
import time
from collections.abc import Mapping, Sequence
from statistics import mean, median

import torch

from twoscale.engine import Engine, SamplingParams, loop_params
from twoscale.engine.cache import Cache
from twoscale.engine.kernels.base import NO_INTERRUPT
from twoscale.engine.kernels.native_decode import NativeSequence
from twoscale.engine.sample import sequence_sampling
from twoscale.exits import Exit, Fixed
from twoscale.model import LoopedGPT
from twoscale.tradeoff.heldout import HeldOut
from twoscale.tradeoff.summary import TOGETHER

REFERENCE = "full"
REPEATS = 3  # of one token, whose median counts
PROMPT, TOKENS = 32, 8  # of a window, before the tokens that are timed and as such


def parties(names: Sequence[str]) -> list[list[str]]:
    """The points in groups of at most TOGETHER that take turns, the full run in each; every point holds a cache meanwhile."""
    others = [name for name in names if name != REFERENCE]
    if not others:
        return [[REFERENCE]] if names else []
    return [[REFERENCE, *others[i : i + TOGETHER - 1]] for i in range(0, len(others), TOGETHER - 1)]


def timed_tokens(window: int, prompt: int = PROMPT, tokens: int = TOKENS) -> tuple[int, int]:
    """How many tokens of a window are read before the timed ones, and how many are timed."""
    prompt = max(1, min(prompt, window - 2))
    return prompt, min(tokens, window - prompt)


class LatencyTimer:
    """An engine and the parameters of all points; `round` measures some of them."""

    def __init__(
        self,
        model: LoopedGPT,
        exits: Mapping[str, Exit | None],
        loops: int,
        text: HeldOut,
        prompt: int = PROMPT,
        tokens: int = TOKENS,
        rows: int = 1,
    ) -> None:
        self.rows = rows
        self.prompt, self.tokens = timed_tokens(text.ids.shape[1], prompt, tokens)
        self.text = text
        self.engine = Engine(model)
        self.params = {
            name: loop_params(model, loops=exit.k) if isinstance(exit, Fixed) else loop_params(model, loops=loops, exit=exit)
            for name, exit in exits.items()
        }  # a fixed depth is timed as it is used: so many loops, and no rule
        self.steps: dict[str, float] = {}
        """Mean steps of the tokens of the last round, over groups."""

    def round(self, number: int, names: Sequence[str]) -> dict[str, float]:
        """Mean ms that some points take for a token of every row; a row decodes one window."""
        windows = [(number * self.rows + row) % len(self.text.ids) for row in range(self.rows)]
        ids = self.text.ids[windows].tolist()
        caches = {name: self._prefill(name, windows, [row[: self.prompt] for row in ids]) for name in names}
        sequences = {name: self._sequence(caches[name]) for name in names}
        seconds, steps = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        order = random.Random(number)
        for place in range(self.prompt, self.prompt + self.tokens):
            tokens = [row[place] for row in ids]
            tries: dict[str, list[float]] = {name: [] for name in names}
            for repeat in range(REPEATS):
                for name in order.sample(names, len(names)):
                    started = time.perf_counter()
                    taken = self._one(windows, caches[name], sequences[name], tokens)
                    tries[name].append(time.perf_counter() - started)
                    if repeat < REPEATS - 1:
                        for cache in caches[name]:
                            cache.rewind(cache.length - 1)  # the token is forgotten, and written again
                    else:
                        steps[name] += mean(map(mean, taken))
            for name in names:
                seconds[name] += median(tries[name])
        self.steps = {name: total / self.tokens for name, total in steps.items()}
        return {name: 1e3 * s / self.tokens for name, s in seconds.items()}

    @torch.inference_mode()
    def _one(
        self, windows: Sequence[int], caches: Sequence[Cache], sequence: NativeSequence | None, tokens: Sequence[int]
    ) -> Sequence[Sequence[int]]:
        """Decode one token of every row, as the scheduler does; their steps in each group."""
        if sequence is not None and (decoded := sequence.decode(tokens[0], [0.5], NO_INTERRUPT)).tokens:
            caches[0].extend(1)
            return decoded.steps
        x, steps = self.engine.run([(w, cache, [token]) for w, cache, token in zip(windows, caches, tokens, strict=True)])
        self.engine.model.head(x).argmax(dim=-1).tolist()
        return steps.tolist()  # type: ignore[no-any-return]

    def _sequence(self, caches: Sequence[Cache]) -> NativeSequence | None:
        """A single row as the kernel takes it that decodes without Python; None for several rows, or if there is no such kernel."""
        decoder = self.engine.decoder
        if decoder is None or len(caches) > 1:
            return None
        return decoder.sequence(caches[0], sequence_sampling(SamplingParams(), self.engine.config.vocab_size))

    def _prefill(self, name: str, windows: Sequence[int], prompts: Sequence[list[int]]) -> list[Cache]:
        caches = [self.engine.new_cache(self.prompt + self.tokens, self.params[name]) for _ in windows]
        self.engine.run(list(zip(windows, caches, prompts, strict=True)))
        return caches
