"""`auto`: whether a request guesses ahead, how, and how far, from what was measured of its passes.

A cycle is m guesses and the pass that verifies them. It costs m drafts and one pass of m + 1 rows, c(m + 1). With the acceptance rate a it
gives (1 - a^(m + 1)) / (1 - a) tokens on average. The cycle with most tokens for its time is chosen; decoding without guesses is the cycle
of one token at cost 1. All costs are relative to a pass of one row, the baseline; a is kept for each kind of guess. Guesses are made only
while no other request is running.
"""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import product
from weakref import WeakKeyDictionary

from twoscale.config import ModelConfig
from twoscale.engine.request import Request
from twoscale.engine.speculation import OFF, Draft, Lookup, Speculation
from twoscale.model import LoopedGPT

LENGTHS = (1, 2, 3, 4, 6, 8, 11, 15)  # guesses of a cycle
STEPS = (1, 2, 3, 4)  # loop steps of a draft
NGRAM = 3  # tokens that a lookup compares
MIN_GAIN = 1.08  # a cycle of guesses is chosen if its predicted speed is above this multiple of decoding without guesses
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 3.0  # the acceptance rate starts at PRIOR_ACCEPTANCE, which counts like PRIOR_WEIGHT measured guesses
MAX_ACCEPTANCE = 0.995
PRIOR_SLOPE = 0.2  # before it was measured: c(W) = 1 + 0.2 (W - 1)
DECAY = 0.9  # the counts of a kind of guess are multiplied by this after each of its cycles
DECAY_UNGUESSED = 0.99  # the counts of all kinds are multiplied by this after a cycle without guesses: every kind is tried again some time
RELAX = 0.997  # after a cycle without guesses, costs above those assumed before the first measurement keep this share of the excess
SMOOTHING = 0.25  # weight of the newest time in the running mean
UNGUESSED_EVERY = 24  # every UNGUESSED_EVERY-th cycle is without guesses, to measure what that costs
MAX_BACKOFF = 7  # cycles without guesses before the next choice, if guesses did not pay
MAX_OUTLIER = 1.3  # times above MAX_OUTLIER x the running mean are clipped


class Estimates:
    """Measured costs and acceptance rates of one model; shared by its requests with the same loops, rules and temperature."""

    def __init__(self) -> None:
        self.baseline_seconds: float | None = None
        """Seconds of a pass of one row with all its loop steps, as in decoding without guesses."""
        self.slope = PRIOR_SLOPE
        """c(W) = 1 + slope (W - 1), relative to the baseline."""
        self.draft_cost: dict[int, float] = {}
        """Cost of drafting one token by its loop steps, relative to the baseline."""
        self.accepted: dict[str, float] = {}
        self.compared: dict[str, float] = {}
        """Guesses of each kind that were accepted, and that were compared with the true token; old ones count less (DECAY)."""
        self.cycles = 0

    def acceptance(self, kind: str) -> float:
        """The estimated share of accepted guesses of a kind."""
        rate = (self.accepted.get(kind, 0.0) + PRIOR_ACCEPTANCE * PRIOR_WEIGHT) / (self.compared.get(kind, 0.0) + PRIOR_WEIGHT)
        return min(rate, MAX_ACCEPTANCE)

    def count(self, kind: str, accepted: int, compared: int) -> None:
        """Count the guesses of a cycle: `compared` of them were compared with the true token, in order up to the first wrong one, and
        `accepted` of these were right."""
        self.accepted[kind] = DECAY * self.accepted.get(kind, 0.0) + accepted
        self.compared[kind] = DECAY * self.compared.get(kind, 0.0) + compared

    def time_pass(self, seconds: float, rows: int, draft_steps: int | None) -> None:
        """Update the costs with the time of a pass, measured while no other request was running. `draft_steps` is None if it was not a
        draft."""
        if draft_steps is None and rows == 1:
            self.baseline_seconds = _smooth(self.baseline_seconds, seconds)
        elif self.baseline_seconds is not None and draft_steps is not None:
            self.draft_cost[draft_steps] = _smooth(self.draft_cost.get(draft_steps), seconds / self.baseline_seconds)
        elif self.baseline_seconds is not None:
            self.slope = _smooth(self.slope, max(0.0, seconds / self.baseline_seconds - 1) / (rows - 1))

    def decay_after_unguessed(self, draft_prior: Mapping[int, float]) -> None:
        """After a cycle without guesses, decay the counts of all kinds, and costs above those assumed before the first measurement.

        Such costs may come from a moment when another program was running, and without guesses they are not measured again."""
        for counts in (self.accepted, self.compared):
            for kind in counts:
                counts[kind] *= DECAY_UNGUESSED
        self.slope = _relax(self.slope, PRIOR_SLOPE)
        for steps, cost in self.draft.items():
            self.draft[steps] = _relax(cost, draft_prior[steps])


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (min(new, MAX_OUTLIER * old) - old)


def _relax(cost: float, prior: float) -> float:
    return prior + RELAX * (cost - prior) if cost > prior else cost


_ESTIMATES: WeakKeyDictionary[LoopedGPT, dict[Hashable, Estimates]] = WeakKeyDictionary()
_LOCK = threading.Lock()


def estimates_of(model: LoopedGPT, request: Request) -> Estimates:
    """The estimates for requests of a model with the same loops, rules and temperature."""
    key = (request.loop_params.loops, repr(request.loop_params.rules), request.sampling.temperature)
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
        plain_layers = config.n_layer - sum(sizes)
        steps = [sum(s) / len(request.prompt_steps) for s in zip(*request.prompt_steps, strict=True)]
        full = plain_layers + sum(n * k for n, k in zip(sizes, steps, strict=True))
        self.draft_prior = {d: (plain_layers + sum(min(d, k) * n for n, k in zip(sizes, steps, strict=True))) / full for d in STEPS}
        """Cost of a draft relative to the baseline before it is measured: the ratio of layer applications, with the prompt's mean steps."""
        self.methods: list[tuple[Speculation, str, int]] = [(Lookup(NGRAM, m), "lookup", m) for m in LENGTHS]
        if sizes:
            self.methods += [(Draft(m, d), f"draft at {d}", m) for m, d in product(LENGTHS, STEPS)]
        self._backoff_left = self._backoff = 0
        """Cycles without guesses until the next choice, and their number at the last choice: exponential backoff, since choosing takes
        time too."""

    def cost(self, method: Speculation, guesses: int) -> float:
        """Cost of a cycle, relative to the baseline."""
        estimates = self.estimates
        drafts = guesses * estimates.draft_cost.get(method.steps, self.draft_prior[method.steps]) if isinstance(method, Draft) else 0.0
        return drafts + 1 + estimates.slope * guesses

    def choose(self, max_guesses: int, look_up: Callable[[int, int], Sequence[int]]) -> Speculation:
        """The method of the next cycle, with at most `max_guesses` guesses; `look_up(ngram, n)` gives those of a lookup."""
        estimates, best_gain = self.estimates, MIN_GAIN
        best: Speculation = OFF
        estimates.cycles += 1
        if estimates.baseline_seconds is None or estimates.cycles % UNGUESSED_EVERY == 0 or len(self.request.tokens) < 2:
            return OFF
        if self._backoff_left:
            self._backoff_left -= 1
            estimates.decay_after_unguessed(self.draft_prior)
            return OFF
        n_lookup = len(look_up(NGRAM, min(max_guesses, max(LENGTHS))))
        acceptance = {kind: estimates.acceptance(kind) for kind in dict.fromkeys(kind for _, kind, _ in self.methods)}
        for method, kind, m in self.methods:
            if m <= (n_lookup if kind == "lookup" else max_guesses):
                gain = tokens_per_cycle(acceptance[kind], m) / self.cost(method, m)
                if gain > best_gain:
                    best, best_gain = method, gain
        if best == OFF:
            estimates.decay_after_unguessed(self.draft_prior)
        self._backoff_left = self._backoff = min(MAX_BACKOFF, 2 * self._backoff + 1) if best == OFF else 0
        return best


def guess_kind(method: Speculation) -> str:
    """The name under which acceptances of a method are counted: drafts with the same number of loop steps, or lookups."""
    return f"draft at {method.steps}" if isinstance(method, Draft) else "lookup"
