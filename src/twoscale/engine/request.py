"""A request: a prompt, how its tokens are sampled (`SamplingParams`) and how many loop steps they take (`LoopParams`).

    params = loop_params(model, exit=exits.Acceleration(1e-2), loops=30)
    request = Request([5, 7, 9], SamplingParams(temperature=0.8, max_new_tokens=64), params)

Everything that differs between requests is stored here and not in the engine, so requests with different settings share a batch.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from twoscale.config import UserError
from twoscale.config.dtypes import KVDtype, check_kv_dtype
from twoscale.config.show import ShortRepr
from twoscale.engine.cache import Cache, parse_kv
from twoscale.engine.speculation import NO_SPECULATION_STATS, OFF, Speculation, SpeculationStats
from twoscale.exits import Exit, Gate, Rule, rules_per_group
from twoscale.model import LoopedGPT
from twoscale.model.noise import fold


def _is_int(value: object, minimum: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled and when generation stops. Python, the command line and HTTP use the same parameters."""

    temperature: float = 0.0
    """0: the most likely token; top_k and top_p are then ignored."""
    top_k: int | None = None
    """Sample from the k most likely tokens."""
    top_p: float | None = None
    """Sample from the most likely tokens whose cumulative probability reaches this value."""
    seed: int = 0
    """Seed of the sampling."""
    max_new_tokens: int = 64
    stop_token_ids: frozenset[int] = frozenset()
    """Generation stops after any of these tokens; it is the last token of the result."""
    stop: tuple[str, ...] = ()
    """Generation stops at any of these strings, which is not part of the text; needs a tokenizer."""
    logprobs: int | None = None
    """Return the log-probability of each new token and of this many most likely tokens."""

    def __post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature <= 1000:
            raise UserError(f"temperature = {self.temperature!r}: a number from 0 (the most likely token) to 1000")
        if self.top_k is not None and not _is_int(self.top_k, 1):
            raise UserError(f"top_k = {self.top_k!r}: an integer of at least 1, or None")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise UserError(f"top_p = {self.top_p!r}: a probability above 0 and up to 1, or None")
        if not _is_int(self.seed, -math.inf):  # type: ignore[arg-type]
            raise UserError(f"seed = {self.seed!r}: an integer")
        if not _is_int(self.max_new_tokens, 1):
            raise UserError(f"max_new_tokens = {self.max_new_tokens!r}: an integer of at least 1")
        if self.logprobs is not None and not _is_int(self.logprobs, 0):
            raise UserError(f"logprobs = {self.logprobs!r}: an integer of at least 0, or None")
        if not all(_is_int(token, 0) for token in self.stop_token_ids):
            raise UserError(f"stop_token_ids = {sorted(map(str, self.stop_token_ids))}: token ids are integers of at least 0")
        if isinstance(self.stop, str) or not all(isinstance(string, str) and string for string in self.stop):
            raise UserError(f"stop = {self.stop!r}: strings that are not empty")


def split_stop(stop: str | int | Iterable[str | int]) -> tuple[frozenset[int], tuple[str, ...]]:
    """Split `stop` (one or several token ids and strings) into ids and strings."""
    stops = [stop] if isinstance(stop, str | int) else list(stop)
    return frozenset(s for s in stops if not isinstance(s, str)), tuple(s for s in stops if isinstance(s, str))


@dataclass(frozen=True)
class LoopParams:
    """How many loop steps the tokens of a request take, and which keys and values are cached."""

    rules: tuple[Rule | None, ...]
    """The exit rule of each group."""
    loops: tuple[int, ...]
    """The maximum number of loop steps in each group."""
    kv: str = "exact"
    """Which steps' keys and values are cached: `exact`, `last` or `ring:n` (see `cache`)."""
    seed: int = 0
    """Seed of the start states."""
    kv_dtype: KVDtype = "auto"
    """The dtype of cached keys and values: `fp32` or `bf16`; `auto` is the one in which the model computes."""

    @property
    def token_by_token(self) -> bool:
        """Whether a rule needs the tokens of a sequence one at a time, in prefill too."""
        return any(rule is not None and rule.token_by_token for rule in self.rules)


def loop_params(
    model: LoopedGPT,
    *,
    exit: Exit | None = None,
    loops: int | Sequence[int] | None = None,
    kv: str = "exact",
    kv_dtype: KVDtype = "auto",
    seed: int = 0,
) -> LoopParams:
    """Validated parameters for a model. exit="auto" uses the rules of the model's calibration, and its loops unless they are given."""
    config = model.config
    if isinstance(exit, str) and exit == "auto":
        if model.exit_calibration is None:
            hint = "run `twoscale calibrate RUN`, then twoscale.load(RUN)"
            raise UserError(f'this model was not calibrated, so exit="auto" has no rule: {hint}')
        exit, calibrated_loops = model.exit_calibration()
        loops = calibrated_loops if loops is None else loops
    rules = rules_per_group(exit, config.n_groups)
    if any(isinstance(rule, Gate) for rule in rules) and not config.exit_gate:
        raise UserError("exits.Gate needs a model with a learned gate (exit_gate), and this one has none")
    if any(isinstance(rule, Gate) for rule in rules[:-1]):
        raise UserError(f"exits.Gate: only the last group has a gate, use {{{config.n_groups - 1}: Gate(...)}}")
    parse_kv(kv)
    check_kv_dtype(kv_dtype)
    return LoopParams(rules, config.loops_for(loops), kv, seed, kv_dtype)


@dataclass(frozen=True)
class SamplingKey:
    """What the sampling of one token depends on besides its logits: the parameters and the random key."""

    sampling: SamplingParams
    sample_index: int = 0
    """See `Request.sample_index`."""
    token_index: int = 0
    """Index of the token among the new tokens of its sequence."""

    @property
    def uniform(self) -> float:
        """A uniform number in (0, 1) with 53 random bits, a function of (seed, sample_index, token_index)."""
        return ((fold(self.sampling.seed, self.sample_index, self.token_index) >> 11) + 0.5) * 2.0**-53


@dataclass(eq=False)
class RequestGroup:
    """Requests that were submitted together, such as the sequences of one HTTP request: the unit of fair scheduling (see `fair`)."""

    virtual_time: float = 0.0
    """Service received so far, in layer applications to one row. A new group starts at the scheduler's current virtual time."""


@dataclass(eq=False, repr=False)
class Request(ShortRepr):
    """A prompt, its parameters, and the state and result of its generation. One request is one sequence."""

    prompt: list[int]
    sampling: SamplingParams
    loop_params: LoopParams
    sample_index: int = 0
    """Part of the random key: requests with the same prompt and seed but another index draw other tokens."""
    prompt_index: int = 0
    """Index among the caller's prompts, for exit rules that depend on it (`RandomExit`, `Oracle`)."""
    on_token: Callable[["Request"], Any] | None = None
    """Called after every new token and at the end; it may stop the request by setting `finish_reason`. It is called in the
    scheduler's thread, or in the submitting thread if the scheduler's has ended."""
    request_group: RequestGroup = field(default_factory=RequestGroup)
    """The requests that it was submitted with."""
    speculate: Speculation = OFF
    """How tokens are guessed ahead (see `speculation`); the result does not depend on it."""

    tokens: list[int] = field(default_factory=list)
    steps: list[tuple[int, ...]] = field(default_factory=list)
    """For each new token, the loop steps in each group of the forward pass that produced its logits."""
    prompt_steps: list[tuple[int, ...]] = field(default_factory=list)
    """For each prompt token, its loop steps in each group; the last entry is also the first of `steps`."""
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """For each new token: (token, log-probability) of itself, then of the most likely tokens."""
    speculation_stats: SpeculationStats = NO_SPECULATION_STATS
    """Counts of the guesses so far."""
    finish_reason: str = ""
    """`stop`, `length`, `cancelled` or `error`; empty until the request has ended."""
    error: Exception | None = None
    cancelled: bool = False
    """Set by the caller to cancel; the scheduler removes the request at its next step."""
    cache: Cache | None = None
    n_computed: int = 0
    """Tokens of the sequence whose forward pass is done."""
    submitted: float = field(default_factory=time.perf_counter)
    """Times of `time.perf_counter`; 0: not yet."""
    first_token: float = 0.0
    ended: float = 0.0

    @property
    def capacity(self) -> int:
        """Positions that its cache needs; the last new token never goes through the network."""
        return len(self.prompt) + self.sampling.max_new_tokens - 1

    @property
    def in_prefill(self) -> bool:
        return self.n_computed < len(self.prompt)

    def next_tokens(self, chunk_size: int) -> list[int]:
        """The tokens of the next forward pass: a chunk of the prompt, or the newest token.

        Chunks begin at multiples of `chunk_size`, independent of other requests. If kv is not `exact` the prompt is not chunked: in chunks
        its tokens would attend to other keys than in one pass.
        """
        if not self.in_prefill:
            return self.tokens[-1:]
        if self.loop_params.token_by_token:
            return self.prompt[self.n_computed : self.n_computed + 1]
        return self.prompt[self.n_computed : (self.n_computed // chunk_size + 1) * chunk_size if self.loop_params.kv == "exact" else None]

    def sampling_key(self, ahead: int = 0) -> SamplingKey:
        """Sampling parameters and random key of its next token, or of the one `ahead` places later."""
        return SamplingKey(self.sampling, self.sample_index, len(self.tokens) + ahead)

    def append(self, token: int, logits: Tensor | None, steps: tuple[int, ...]) -> None:
        """Append a token that was sampled from logits (V,), which may be None if no log-probabilities are requested."""
        if self.sampling.logprobs is not None:
            assert logits is not None
            log_probs = logits.log_softmax(dim=-1)
            best = log_probs.topk(min(self.sampling.logprobs, len(log_probs)))
            pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            self.logprobs.append([(token, float(log_probs[token])), *pairs])
        self.first_token = self.first_token or time.perf_counter()
        self.steps.append(steps)
        self.tokens.append(token)  # last: another thread that sees the token also finds its steps and logprobs
        if token in self.sampling.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.sampling.max_new_tokens:
            self.finish_reason = "length"
