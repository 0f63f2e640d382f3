"""One request on its way through the scheduler."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from twoscale.engine.cache import Cache
from twoscale.engine.sample import Draw, Sampling
from twoscale.exits import Rule


@dataclass(frozen=True)
class Settings:
    """What requests must have in common to share the engine's calls."""

    rules: tuple[Rule | None, ...]
    loops: tuple[int, ...]
    kv: str = "exact"
    seed: int = 0
    """Of the start states."""

    @property
    def exit(self) -> Mapping[int, Rule]:
        return {g: rule for g, rule in enumerate(self.rules) if rule is not None}


@dataclass(eq=False)
class Share:
    """What one request, with all its texts, has had of the engine: see `fair`."""

    work: float = 0.0
    """Layer applications to one row, counted from the virtual time at which it began."""


@dataclass(eq=False)
class Job:
    """A prompt to be continued. `told(job)` is called, in the scheduler's thread, after every new token and once at the end."""

    prompt: list[int]
    most: int
    settings: Settings
    sampling: Sampling = field(default_factory=Sampling)
    stop: frozenset[int] = frozenset()
    stream: int = 0
    """Tells texts apart that share a prompt and a seed."""
    told: Callable[["Job"], Any] | None = None
    logprobs: int | None = None
    """How many likely tokens to note beside each new one, whose own log-probability is then noted too."""
    share: Share = field(default_factory=Share)
    """Of the request that it belongs to."""

    tokens: list[int] = field(default_factory=list)
    steps: list[tuple[int, ...]] = field(default_factory=list)
    prompt_steps: list[tuple[int, ...]] = field(default_factory=list)
    likely: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each new token: itself and the likeliest ones, with their log-probabilities."""
    finish: str = ""
    """Why it ended: `stop`, `length`, `cancelled` or `error`."""
    error: str = ""
    cancelled: bool = False
    cache: Cache | None = None
    fed: int = 0
    """Tokens of prompt and answer that have gone through the network."""
    submitted: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    """When its first token came."""
    ended: float = 0.0

    @property
    def capacity(self) -> int:
        """Tokens that its cache must hold; the last new one is never read."""
        return len(self.prompt) + self.most - 1

    @property
    def reading(self) -> bool:
        return self.fed < len(self.prompt)

    def next_tokens(self, piece: int) -> list[int]:
        """What goes through next: a piece of the prompt, or the newest token.

        Pieces begin at whole multiples of their size, whatever others do. Where keys and values of earlier steps are not all kept a prompt
        is read whole, as `generate` does: cut elsewhere it would be read differently.
        """
        if not self.reading:
            return self.tokens[-1:]
        return self.prompt[self.fed : (self.fed // piece + 1) * piece if self.settings.kv == "exact" or piece == 1 else None]

    @property
    def draw(self) -> Draw:
        """Settings and key of its next token."""
        return Draw(self.sampling, self.stream, len(self.tokens))

    def take(self, logits: Tensor, token: int, finite: bool, steps: tuple[int, ...]) -> None:
        """One more token, sampled from logits (V,), all of which are finite or not."""
        if not finite:
            self.finish, self.error = "error", "the model gave logits that are not finite"
            return
        if self.logprobs is not None:
            told = logits.log_softmax(dim=-1)
            best = told.topk(min(self.logprobs, len(told)))
            pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            self.likely.append([(token, float(told[token])), *pairs])
        self.first = self.first or time.perf_counter()
        self.steps.append(steps)
        self.tokens.append(token)  # last: whoever reads meanwhile finds all that belongs to it
        if token in self.stop or len(self.tokens) == self.most:
            self.finish = "stop" if token in self.stop else "length"
