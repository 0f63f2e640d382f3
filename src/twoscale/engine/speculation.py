"""Speculation: how a request guesses tokens ahead. The result is bit-equal to decoding without guesses (docs/speculation.md says why).

    parse_speculation("draft:4")      # Draft(4)
    parse_speculation("lookup:3")     # Lookup(3)

    off          one token after the other
    draft:m      m tokens are guessed with few loop steps, then verified in one pass with the request's own loops and rules
    lookup:n     where the last n tokens have occurred before, the tokens that followed them there are the guess
    wavefront    one loop group: the next position enters the loop on a guess while those before it are still inside
    auto         draft, lookup or off, chosen for every cycle from measured acceptance and costs; never wavefront

A value of this module is part of a request. What it does while decoding is in `speculator` and `wavefront`.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from twoscale.config import ModelConfig, UserError

if TYPE_CHECKING:
    from twoscale.engine.request import LoopParams

DRAFT_STEPS = 2  # loop steps of a drafted token in each group
WAVE_STEPS = 4  # loop steps after which the wavefront guesses
LOOKUP_TOKENS = 8  # a lookup guesses at most this many tokens
CHOICES = "off, auto, wavefront, draft:m or lookup:n"


@dataclass(frozen=True)
class Speculation:
    """How tokens are guessed; the base of all kinds."""

    def problem(self, config: ModelConfig, params: "LoopParams") -> str | None:
        """Why this cannot be used with a model and loop parameters, in words for the user; None if it can."""
        if params.kv != "exact":
            return f"speculation is exact with kv=exact only, not with kv={params.kv}: omit kv, or use speculate=off"
        if params.token_by_token:
            return "this exit rule runs the coda for one token at a time (read=coda): use read=lens, or speculate=off"
        return None


@dataclass(frozen=True)
class Off(Speculation):
    """No speculation."""

    def __str__(self) -> str:
        return "off"

    def problem(self, config: ModelConfig, params: "LoopParams") -> str | None:
        return None


@dataclass(frozen=True)
class Auto(Speculation):
    """Draft or lookup where it is measured to pay, otherwise off; never an error."""

    def __str__(self) -> str:
        return "auto"


@dataclass(frozen=True)
class Draft(Speculation):
    """`tokens` guesses by passes with few loop steps, then one pass with the request's own loops and rules over all of them."""

    tokens: int
    steps: int = DRAFT_STEPS
    """Loop steps of a drafted token in each group."""

    def __post_init__(self) -> None:
        _at_least_one(str(self), self.tokens, "tokens to draft")
        _at_least_one(str(self), self.steps, "loop steps of a draft")

    def __str__(self) -> str:
        return f"draft:{self.tokens}"

    def problem(self, config: ModelConfig, params: "LoopParams") -> str | None:
        if self.tokens >= config.block_size:
            return f"speculate = {self}: the context has {config.block_size} tokens, draft fewer than that"
        if not config.n_groups:
            return f"speculate = {self}: this model has no loops to shorten for a draft, use lookup:n or off"
        return super().problem(config, params)


@dataclass(frozen=True)
class Lookup(Speculation):
    """The guess is what followed the last `ngram` tokens where they occurred before, at most `tokens` of it."""

    ngram: int
    tokens: int = LOOKUP_TOKENS

    def __post_init__(self) -> None:
        _at_least_one(str(self), self.ngram, "tokens to look up")
        _at_least_one(str(self), self.tokens, "tokens to guess")

    def __str__(self) -> str:
        return f"lookup:{self.ngram}"

    def problem(self, config: ModelConfig, params: "LoopParams") -> str | None:
        if self.ngram >= config.block_size:
            return f"speculate = {self}: the context has {config.block_size} tokens, look up fewer than that"
        return super().problem(config, params)


@dataclass(frozen=True)
class Wavefront(Speculation):
    """The next position enters the loop on a guess, sampled from the state of the one before after `steps` loop steps."""

    steps: int = WAVE_STEPS
    max_positions: int = 8
    """Positions in the loop at a time."""

    def __post_init__(self) -> None:
        _at_least_one(str(self), self.steps, "loop steps before a guess")
        _at_least_one(str(self), self.max_positions, "positions in the loop")

    def __str__(self) -> str:
        return "wavefront"

    def problem(self, config: ModelConfig, params: "LoopParams") -> str | None:
        if config.n_groups != 1:
            return f"speculate = wavefront needs a model with one loop group, this one has {config.n_groups}: use draft:m"
        return super().problem(config, params)


OFF = Off()


def parse_speculation(value: "str | Speculation") -> Speculation:
    """The value that a user has written; UserError with the choices if it is not one of them."""
    if isinstance(value, Speculation):
        return value
    named: dict[str, Speculation] = {"off": OFF, "auto": Auto(), "wavefront": Wavefront()}
    if value in named:
        return named[value]
    match = re.fullmatch(r"(draft|lookup):(\d{1,9})", value) if isinstance(value, str) else None
    if match is None:
        raise UserError(f"speculate = {value!r}: choose {CHOICES}")
    return Draft(int(match[2])) if match[1] == "draft" else Lookup(int(match[2]))


def check_speculation(value: "str | Speculation", config: ModelConfig, params: "LoopParams") -> Speculation:
    """The parsed value if it can be used with a model and loop parameters; UserError if not. `auto` can always be used: it is then off."""
    speculation = parse_speculation(value)
    problem = None if isinstance(speculation, Auto) else speculation.problem(config, params)
    if problem is not None:
        raise UserError(problem)
    return speculation


@dataclass(frozen=True)
class SpeculationStats:
    """Counts of guesses, for one request or several (they can be added)."""

    drafted: int = 0
    """Guesses submitted for verification: they entered a pass with the request's own loops and rules. Some are dropped before their
    verification ends."""
    accepted: int = 0
    """Guesses that were right: what decoding without guesses would have drawn."""
    rewound: int = 0
    """Positions computed on a wrong guess, or dropped with it, and removed from the cache."""
    calls: int = 0
    """Stage passes after the prompt: loop steps, and passes through plain layers, drafts included. A pass counts once, whatever its number
    of rows.

    0 for a request that never speculates. A pass that fails and is abandoned is not counted."""

    @property
    def acceptance(self) -> float:
        """Share of the guesses that were right; 0 if there were none."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def __add__(self, other: "SpeculationStats") -> "SpeculationStats":
        return SpeculationStats(
            self.drafted + other.drafted, self.accepted + other.accepted, self.rewound + other.rewound, self.calls + other.calls
        )


NO_SPECULATION_STATS = SpeculationStats()


def _at_least_one(text: str, value: object, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"speculate = {text}: {what}, an integer of at least 1")
