"""`auto`: whether a request guesses ahead, how, and how far, from what was measured of its passes.

A cycle of m guesses costs m drafts and one pass of m + 1 rows, c(m + 1). With a_i the share of right guesses in place i among those whose
predecessors were right, it gives 1 + a_1 + a_1 a_2 + ... + a_1 ... a_m tokens on average. The shares are kept for each kind of guess and
each place: a lookup is mostly right throughout or wrong at once. The cycle with most tokens for its time is chosen; decoding without
guesses is the cycle of one token at cost 1. All costs are relative to a pass of one row, the baseline. Guesses are made only while no
other request is running.
"""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from weakref import WeakKeyDictionary

from twoscale.config import ModelConfig
from twoscale.engine.request import Request
from twoscale.engine.speculation import OFF, Draft, Lookup, Speculation
from twoscale.model import LoopedGPT

LENGTHS = (1, 2, 3, 4, 6, 8, 11, 15)  # guesses of a cycle
MAX_GUESSES = max(LENGTHS)
STEPS = (1, 2, 3, 4)  # loop steps of a draft
LOOKUP = 0  # the kind of lookups; the kind of a draft is its loop steps
NGRAM = 3  # tokens that a lookup compares
MIN_GAIN = 1.08  # a cycle of guesses is chosen if its predicted speed is above this multiple of decoding without guesses
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.7, 3.0  # the acceptance rate starts at PRIOR_ACCEPTANCE, which counts like PRIOR_WEIGHT measured guesses
PRIOR_WRONG = 0.6  # that of drafts with one more loop step starts where the share of wrong guesses is PRIOR_WRONG times as large
PLACE_WEIGHT = 3.0  # the share in all places counts like this many guesses in each place
MAX_ACCEPTANCE = 0.995
PRIOR_SLOPE = 0.2  # before it was measured: c(W) = 1 + 0.2 (W - 1)
DECAY = 0.9  # the counts of a kind of guess are multiplied by this after each of its cycles
DECAY_UNGUESSED = 0.997  # the counts of all kinds are multiplied by this after a cycle without guesses: every kind is tried again some time
RELAX = 0.997  # after a cycle without guesses, costs above those assumed before the first measurement keep this share of the excess
SMOOTHING = 0.25  # weight of the newest time in the running mean
UNGUESSED_EVERY = 24  # every UNGUESSED_EVERY-th cycle is without guesses, to measure what that costs
MAX_BACKOFF = 31  # cycles without guesses before the next choice, if guesses did not pay
MAX_OUTLIER = 1.3  # times above MAX_OUTLIER x the running mean are clipped


_NOTHING = (0.0,) * MAX_GUESSES


class Estimates:
    """Measured costs and acceptance rates of one model; shared by its requests with the same loops, rules and temperature."""

    def __init__(self) -> None:
        self.baseline_seconds: float | None = None
        """Seconds of a pass of one row with all its loop steps, as in decoding without guesses."""
        self.slope = PRIOR_SLOPE
        """c(W) = 1 + slope (W - 1), relative to the baseline."""
        self.draft_cost: dict[int, float] = {}
        """Cost of drafting one token by its loop steps, relative to the baseline."""
        self.accepted: dict[int, list[float]] = {}
        self.compared: dict[int, list[float]] = {}
        """Guesses of each kind that were accepted, and that were compared with the true token, by their place in the cycle; old ones count
        less (DECAY)."""
        self.cycles = 0
        self.backoff = 0
        """Cycles without guesses after the newest choice: exponential backoff, since choosing takes time too. The next request begins with
        it."""

    def acceptance(self, kind: int) -> float:
        """The estimated share of accepted guesses of a kind, in all places. Before a draft with so many loop steps was tried, it is derived
        from that of drafts with one step less, so that more steps are tried where more guesses would be right."""
        accepted, compared = (sum(counts.get(kind, ())) for counts in (self.accepted, self.compared))
        prior = 1 - PRIOR_WRONG * (1 - self.acceptance(kind - 1)) if kind > 1 else PRIOR_ACCEPTANCE
        return min((accepted + prior * PRIOR_WEIGHT) / (compared + PRIOR_WEIGHT), MAX_ACCEPTANCE)

    def tokens(self, kind: int) -> list[float]:
        """The expected tokens of a cycle by its number of guesses, 0 to MAX_GUESSES: the right guesses before the first wrong one, and the
        true token after them. Where a place was seldom reached, the share in all places counts instead."""
        everywhere, reached, tokens = self.acceptance(kind), 1.0, [1.0]
        for accepted, compared in zip(self.accepted.get(kind, _NOTHING), self.compared.get(kind, _NOTHING), strict=True):
            reached *= min((accepted + everywhere * PLACE_WEIGHT) / (compared + PLACE_WEIGHT), MAX_ACCEPTANCE)
            tokens.append(tokens[-1] + reached)
        return tokens

    def count(self, kind: int, accepted: int, compared: int) -> None:
        """Count the guesses of a cycle: `compared` with the true token, all `accepted` or the last of them wrong."""
        for counts, n in ((self.accepted, accepted), (self.compared, compared)):
            counts[kind] = [DECAY * old + (i < n) for i, old in enumerate(counts.get(kind, _NOTHING))]

    def time_pass(self, seconds: float, rows: int, draft_steps: int | None) -> None:
        """Update the costs with the time of a pass, measured while no other request was running. `draft_steps` is None if it was not a
        draft."""
        if draft_steps is None and rows == 1:
            self.baseline_seconds = _smooth(self.baseline_seconds, seconds)
        elif self.baseline_seconds is not None and draft_steps is not None:
            self.draft_cost[draft_steps] = _smooth(self.draft_cost.get(draft_steps), seconds / self.baseline_seconds)
        elif self.baseline_seconds is not None:
            self.slope = _smooth(self.slope, max(0.0, seconds / self.baseline_seconds - 1) / (rows - 1))

    def decay_after_unguessed(self, cycles: int, draft_prior: Mapping[int, float]) -> None:
        """After cycles without guesses, decay the counts of all kinds, and costs above those assumed before the first measurement.

        Such costs may come from a moment when another program was running, and without guesses they are not measured again."""
        for counts in (self.accepted, self.compared):
            for kind, by_place in counts.items():
                counts[kind] = [DECAY_UNGUESSED**cycles * n for n in by_place]
        self.slope = _relax(self.slope, PRIOR_SLOPE, cycles)
        for steps, cost in self.draft_cost.items():
            self.draft_cost[steps] = _relax(cost, draft_prior[steps], cycles)


def _smooth(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (min(new, MAX_OUTLIER * old) - old)


def _relax(cost: float, prior: float, cycles: int) -> float:
    return prior + RELAX**cycles * (cost - prior) if cost > prior else cost


_ESTIMATES: WeakKeyDictionary[LoopedGPT, dict[Hashable, Estimates]] = WeakKeyDictionary()
_LOCK = threading.Lock()


def estimates_of(model: LoopedGPT, request: Request) -> Estimates:
    """The estimates for requests of a model with the same loops, rules and temperature."""
    key = (request.loop_params.loops, repr(request.loop_params.rules), request.sampling.temperature)
    with _LOCK:
        return _ESTIMATES.setdefault(model, {}).setdefault(key, Estimates())


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
        self.draft_steps = STEPS if sizes else ()
        self._unguessed = 0
        """Cycles without guesses since the estimates were decayed."""
        self._backoff_left = estimates.backoff
        """Cycles without guesses until the next choice."""

    def draft_cost(self, steps: int) -> float:
        """Cost of drafting a token. Before it is measured for this number of steps, it is derived from those that are."""
        measured = self.estimates.draft_cost
        if steps in measured or not measured:
            return measured.get(steps, self.draft_prior[steps])
        nearest = min(measured, key=lambda other: abs(other - steps))
        return self.draft_prior[steps] * measured[nearest] / self.draft_prior[nearest]

    def choose(self, max_guesses: int, look_up: Callable[[int, int], Sequence[int]]) -> Speculation:
        """The method of the next cycle, with at most `max_guesses` guesses; `look_up(ngram, n)` gives those of a lookup."""
        estimates, best_gain = self.estimates, MIN_GAIN
        best: Speculation = OFF
        estimates.cycles += 1
        if estimates.baseline_seconds is None or estimates.cycles % UNGUESSED_EVERY == 0 or len(self.request.tokens) < 2:
            return OFF
        if self._backoff_left:
            self._backoff_left -= 1
            self._unguessed += 1
            return OFF
        if self._unguessed:
            estimates.decay_after_unguessed(self._unguessed, self.draft_prior)
            self._unguessed = 0
        kinds = [(steps, self.draft_cost(steps), max_guesses) for steps in self.draft_steps]
        for kind, draft_cost, limit in (*kinds, (LOOKUP, 0.0, len(look_up(NGRAM, min(max_guesses, MAX_GUESSES))))):
            tokens = estimates.tokens(kind) if limit else ()
            for m in (m for m in LENGTHS if m <= limit):
                gain = tokens[m] / (1 + m * (estimates.slope + draft_cost))
                if gain > best_gain:
                    best, best_gain = Lookup(NGRAM, m) if kind == LOOKUP else Draft(m, kind), gain
        self._unguessed += best == OFF
        self._backoff_left = estimates.backoff = min(MAX_BACKOFF, 2 * estimates.backoff + 1) if best == OFF else 0
        return best

    def skip(self, n: int) -> int:
        """How many of the next n cycles are without guesses in any case; they count as chosen."""
        skipped = min(n, self._backoff_left)
        self.estimates.cycles += skipped
        self._backoff_left -= skipped
        self._unguessed += skipped
        return skipped

    def unskip(self, n: int) -> None:
        """So many of the skipped cycles did not happen."""
        self.estimates.cycles -= n
        self._backoff_left += n
        self._unguessed -= n


def guess_kind(method: Speculation) -> int:
    """Under which kind acceptances of a method are counted: the loop steps of a draft, or LOOKUP."""
    return method.steps if isinstance(method, Draft) else LOOKUP
