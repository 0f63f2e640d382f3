"""What is asked of the engine: a prompt, how its next tokens are chosen, and how deep they go.

    params = loop_params(model, exit=exits.Acceleration(1e-2), loops=30)
    request = Request([5, 7, 9], SamplingParams(temperature=0.8, max_new_tokens=64), params)

All that differs between requests is here and travels with their rows; the engine itself belongs to a model alone.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from twoscale.config import UserError
from twoscale.config.show import OneLine
from twoscale.engine.cache import Cache, parse_kv
from twoscale.exits import Exit, Gate, Rule, plan
from twoscale.model import LoopedGPT
from twoscale.model.noise import fold


def _is_int(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """How the next tokens are chosen and when a text ends: the same for Python, the command line and HTTP."""

    temperature: float = 0.0
    """0 takes the most likely token and ignores top_k and top_p."""
    top_k: int | None = None
    """Draw among the k most likely tokens."""
    top_p: float | None = None
    """Draw among the most likely tokens that together reach this probability."""
    seed: int = 0
    """Of the draws."""
    max_new_tokens: int = 64
    stop_token_ids: frozenset[int] = frozenset()
    """Each of these ends the text, and is its last token."""
    stop: tuple[str, ...] = ()
    """Each of these strings ends the text before it begins; needs a tokenizer."""
    logprobs: int | None = None
    """Record the log-probability of each new token, and of this many of the likeliest ones."""

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature <= 1000:
            raise UserError(f"temperature = {self.temperature!r}: a number from 0 (the most likely token) to 1000")
        if self.top_k is not None and not _is_int(self.top_k, 1):
            raise UserError(f"top_k = {self.top_k!r}: a whole number of at least 1, or None")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise UserError(f"top_p = {self.top_p!r}: a probability above 0 and up to 1, or None")
        if not _is_int(self.seed, -math.inf):  # type: ignore[arg-type]
            raise UserError(f"seed = {self.seed!r}: a whole number")
        if not _is_int(self.max_new_tokens, 1):
            raise UserError(f"max_new_tokens = {self.max_new_tokens!r}: a whole number of at least 1")
        if self.logprobs is not None and not _is_int(self.logprobs, 0):
            raise UserError(f"logprobs = {self.logprobs!r}: a whole number of at least 0, or None")
        if not all(_is_int(token, 0) for token in self.stop_token_ids):
            raise UserError(f"stop_token_ids = {sorted(map(str, self.stop_token_ids))}: token ids are whole numbers of at least 0")
        if isinstance(self.stop, str) or not all(isinstance(word, str) and word for word in self.stop):
            raise UserError(f"stop = {self.stop!r}: strings that are not empty")


def split_stop(stop: str | int | Iterable[str | int]) -> tuple[frozenset[int], tuple[str, ...]]:
    """`stop` as users give it, one or several token ids and strings: the ids, and the strings."""
    stops = [stop] if isinstance(stop, str | int) else list(stop)
    return frozenset(s for s in stops if not isinstance(s, str)), tuple(s for s in stops if isinstance(s, str))


@dataclass(frozen=True)
class LoopParams:
    """How deep the tokens of a request go, and which keys and values are kept."""

    rules: tuple[Rule | None, ...]
    """The exit rule of each group."""
    loops: tuple[int, ...]
    """The most steps that a token may take in each group."""
    kv: str = "exact"
    seed: int = 0
    """Of the start states."""

    @property
    def token_by_token(self) -> bool:
        """Whether a rule needs the tokens of a sequence one after the other."""
        return any(rule is not None and rule.token_by_token for rule in self.rules)


def loop_params(
    model: LoopedGPT, *, exit: Exit | None = None, loops: int | Sequence[int] | None = None, kv: str = "exact", seed: int = 0
) -> LoopParams:
    """Checked parameters for a model. exit="auto" takes the rules of the model's calibration, and its loops where none are given."""
    config = model.config
    if isinstance(exit, str) and exit == "auto":
        if model.calibration is None:
            hint = "run `twoscale calibrate RUN`, then twoscale.load(RUN)"
            raise UserError(f'this model was not calibrated, so exit="auto" has no rule: {hint}')
        exit, calibrated = model.calibration()
        loops = calibrated if loops is None else loops
    rules = plan(exit, config.n_groups)
    if any(isinstance(rule, Gate) for rule in rules) and not config.exit_gate:
        raise UserError("exits.Gate needs a model with a learned gate (exit_gate), and this one has none")
    if any(isinstance(rule, Gate) for rule in rules[:-1]):
        raise UserError(f"exits.Gate: only the last group has a gate, use {{{config.n_groups - 1}: Gate(...)}}")
    parse_kv(kv)
    return LoopParams(rules, config.loops_for(loops), kv, seed)


@dataclass(frozen=True)
class Draw:
    """Settings and key of one draw."""

    params: SamplingParams
    sample_index: int = 0
    """Tells texts apart that share a seed."""
    token_index: int = 0
    """Number of the token in its text."""

    @property
    def uniform(self) -> float:
        """A number in (0, 1) with 53 random bits."""
        return ((fold(self.params.seed, self.sample_index, self.token_index) >> 11) + 0.5) * 2.0**-53


@dataclass(eq=False)
class Client:
    """What a client has had of the engine; all texts of one HTTP request have the same share. See `fair`."""

    virtual_time: float = 0.0
    """Layer applications to one row, counted from the virtual time at which it began."""


@dataclass(eq=False, repr=False)
class Request(OneLine):
    """A prompt to be continued, and what has come of it."""

    prompt: list[int]
    sampling: SamplingParams
    params: LoopParams
    sample_index: int = 0
    """Tells texts apart that share a prompt and a seed."""
    batch_index: int = 0
    """Place in the caller's batch, for rules that draw by it."""
    on_token: Callable[["Request"], Any] | None = None
    """Called in the scheduler's thread after every new token and at the end. It may end the request by setting `finish`."""
    client: Client = field(default_factory=Client)

    tokens: list[int] = field(default_factory=list)
    steps: list[tuple[int, ...]] = field(default_factory=list)
    """For each new token, the steps in each group of the pass that chose it."""
    prompt_steps: list[tuple[int, ...]] = field(default_factory=list)
    """The same for each token of the prompt; the last entry is also the first of `steps`."""
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each new token: itself and the likeliest ones, with their log-probabilities."""
    finish: str = ""
    """Why it ended: `stop`, `length`, `cancelled` or `error`."""
    error: Exception | None = None
    cancelled: bool = False
    """Set by whoever no longer wants it; the scheduler drops it at its next step."""
    cache: Cache | None = None
    n_computed: int = 0
    """Tokens of prompt and answer that have gone through the network."""
    submitted: float = field(default_factory=time.perf_counter)
    first_token: float = 0.0
    ended: float = 0.0

    @property
    def capacity(self) -> int:
        """Tokens that its cache must hold; the last new one is never read."""
        return len(self.prompt) + self.sampling.max_new_tokens - 1

    @property
    def in_prefill(self) -> bool:
        return self.n_computed < len(self.prompt)

    def next_tokens(self, chunk: int) -> list[int]:
        """What goes through the network next: a chunk of the prompt, or the newest token.

        Chunks begin at whole multiples of their size, whatever other requests do. Where the keys and values of earlier steps are not all
        kept (kv is not `exact`) a prompt goes through whole: its tokens would see other keys if it were cut.
        """
        if not self.in_prefill:
            return self.tokens[-1:]
        if self.params.token_by_token:
            return self.prompt[self.n_computed : self.n_computed + 1]
        return self.prompt[self.n_computed : (self.n_computed // chunk + 1) * chunk if self.params.kv == "exact" else None]

    @property
    def draw(self) -> Draw:
        """Settings and key of its next token."""
        return Draw(self.sampling, self.sample_index, len(self.tokens))

    def append(self, token: int, logits: Tensor, steps: tuple[int, ...]) -> None:
        """One more token, sampled from logits (V,)."""
        if self.sampling.logprobs is not None:
            every = logits.log_softmax(dim=-1)
            best = every.topk(min(self.sampling.logprobs, len(every)))
            pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            self.logprobs.append([(token, float(every[token])), *pairs])
        self.first_token = self.first_token or time.perf_counter()
        self.steps.append(steps)
        self.tokens.append(token)  # last: a reader in another thread finds all that belongs to it
        if token in self.sampling.stop_token_ids:
            self.finish = "stop"
        elif len(self.tokens) == self.sampling.max_new_tokens:
            self.finish = "length"
