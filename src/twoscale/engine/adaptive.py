"""`auto`: whether a request guesses ahead, how, and how far, from what was measured of its passes.

A cycle of m guesses costs m drafts and one pass of m + 1 rows, c(m + 1). With the share a of right guesses it gives
(1 - a^(m + 1)) / (1 - a) tokens on average. The cycle with most tokens for its time is chosen; plain decoding is the cycle of one token at
cost 1. All costs are relative to a plain pass; a is kept for each kind of guess. Guesses are made only where no other request is running.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from itertools import product
from weakref import WeakKeyDictionary

from twoscale.config import ModelConfig
from twoscale.engine.request import Request
from twoscale.engine.speculation import OFF, Draft, Lookup, Speculation
from twoscale.model import LoopedGPT

LENGTHS = (1, 2, 3, 4, 6, 8, 11, 15)  # guesses of a cycle
STEPS = (1, 2, 3, 4)  # loop steps of a draft
NGRAM = 3  # tokens that a lookup compares
MIN_GAIN = 1.08  # the predicted ratio from which on a cycle of guesses is chosen
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 3.0  # before anything was measured: this share of right guesses, counted as so many guesses
MAX_ACCEPTANCE = 0.995
PRIOR_SLOPE = 0.2  # before it was measured: c(W) = 1 + 0.2 (W - 1)
FORGET = 0.9  # what is known of a kind counts for this much after each of its cycles,
FORGET_UNUSED = 0.985  # and for this much after each cycle that was plain, so that a kind is tried again some time
SMOOTHING = 0.25  # weight of the newest time
PLAIN_EVERY = 24  # one cycle in so many is plain, to know what it costs
MAX_WAIT = 7  # plain cycles before the next choice, where guesses did not pay
MAX_OUTLIER = 2.0  # a time beyond so many times the known one counts as that


class Estimates:
    """What was measured of one model at the same depth; shared by its requests."""

    def __init__(self) -> None:
        self.plain: float | None = None
        """Seconds of a plain pass of one row."""
        self.slope = PRIOR_SLOPE
        """c(W) = 1 + slope (W - 1), relative to a plain pass."""
        self.draft: dict[int, float] = {}
        """Cost of a draft by its steps, relative to a plain pass."""
        self.right: dict[str, float] = {}
        self.tried: dict[str, float] = {}
        """Guesses of each kind that were right, and that were compared; old ones count less."""
        self.cycles = 0

    def acceptance(self, kind: str) -> float:
        """The share of right guesses of a kind."""
        share = (self.right.get(kind, 0.0) + PRIOR_ACCEPTANCE * PRIOR_WEIGHT) / (self.tried.get(kind, 0.0) + PRIOR_WEIGHT)
        return min(share, MAX_ACCEPTANCE)

    def count(self, kind: str, right: int, compared: int) -> None:
        """A cycle has ended in which so many guesses were compared, the last of them wrong or all of them right."""
        self.right[kind] = FORGET * self.right.get(kind, 0.0) + right
        self.tried[kind] = FORGET * self.tried.get(kind, 0.0) + compared

    def time_pass(self, seconds: float, rows: int, draft_steps: int | None) -> None:
        """A pass of the only running request took so long."""
        if draft_steps is None and rows == 1:
            self.plain = _smooth(self.plain, seconds)
        elif self.plain is not None and draft_steps is not None:
            self.draft[draft_steps] = _smooth(self.draft.get(draft_steps), seconds / self.plain)
        elif self.plain is not None:
            self.slope = _smooth(self.slope, max(0.0, seconds / self.plain - 1) / (rows - 1))

    def forget(self) -> None:
        """A cycle was plain."""
        for known in (self.right, self.tried):
            for kind in known:
                known[kind] *= FORGET_UNUSED


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (min(new, MAX_OUTLIER * old) - old)


_ESTIMATES: WeakKeyDictionary[LoopedGPT, dict[Hashable, Estimates]] = WeakKeyDictionary()
_LOCK = threading.Lock()


def estimates_of(model: LoopedGPT, request: Request) -> Estimates:
    """The estimates for requests of a model with the same loops and rules, and sampled alike or greedy."""
    key = (request.params.loops, repr(request.params.rules), request.sampling.temperature)
    with _LOCK:
        return _ESTIMATES.setdefault(model, {}).setdefault(key, Estimates())


def tokens_per_cycle(acceptance: float, guesses: int) -> float:
    """Mean number of tokens of a cycle: the right guesses before the first wrong one, and the true token after them."""
    return (1 - acceptance ** (guesses + 1)) / (1 - acceptance)


class Chooser:
    """Chooses the cycles of one request."""

    def __init__(self, request: Request, config: ModelConfig, estimates: Estimates) -> None:
        self.request, self.estimates = request, estimates
        sizes = [len(layers) for layers in config.groups]
        plain = config.n_layer - sum(sizes)
        steps = [sum(s) / len(request.prompt_steps) for s in zip(*request.prompt_steps, strict=True)]
        full = plain + sum(n * k for n, k in zip(sizes, steps, strict=True))
        self.draft_prior = {d: (plain + sum(min(d, k) * n for n, k in zip(sizes, steps, strict=True))) / full for d in STEPS}
        """Cost of a draft relative to a plain pass, by the layers that the prompt's tokens have run through."""
        self.plans: list[tuple[Speculation, str, int]] = [(Lookup(NGRAM, m), "lookup", m) for m in LENGTHS]
        if sizes:
            self.plans += [(Draft(m, d), f"draft at {d}", m) for m, d in product(LENGTHS, STEPS)]
        self._wait = self._waited = 0
        """Plain cycles until the next choice, and how many there were last time: choosing takes time too."""

    def cost(self, plan: Speculation, guesses: int) -> float:
        """Cost of a cycle, relative to a plain pass."""
        known = self.estimates
        drafts = guesses * known.draft.get(plan.steps, self.draft_prior[plan.steps]) if isinstance(plan, Draft) else 0.0
        return drafts + 1 + known.slope * guesses

    def choose(self, most: int, look_up: Callable[[int, int], Sequence[int]]) -> Speculation:
        """The next cycle, if at most `most` guesses are of use; `look_up(ngram, n)` gives those of a lookup."""
        known, gain = self.estimates, MIN_GAIN
        best: Speculation = OFF
        known.cycles += 1
        if known.plain is None or known.cycles % PLAIN_EVERY == 0 or len(self.request.tokens) < 2:
            return OFF
        if self._wait:
            self._wait -= 1
            known.forget()
            return OFF
        found = len(look_up(NGRAM, min(most, max(LENGTHS))))
        acceptance = {kind: known.acceptance(kind) for kind in dict.fromkeys(kind for _, kind, _ in self.plans)}
        for plan, kind, m in self.plans:
            if m <= (found if kind == "lookup" else most):
                ratio = tokens_per_cycle(acceptance[kind], m) / self.cost(plan, m)
                if ratio > gain:
                    best, gain = plan, ratio
        if best == OFF:
            known.forget()
        self._wait = self._waited = min(MAX_WAIT, 2 * self._waited + 1) if best == OFF else 0
        return best


def kind_of(plan: Speculation) -> str:
    """The kind of a guess whose right ones are counted together."""
    return f"draft at {plan.steps}" if isinstance(plan, Draft) else "lookup"
