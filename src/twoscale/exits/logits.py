"""Rules that look at what the model would say after each step; every look costs a pass through the head."""

from dataclasses import dataclass

import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.exits import statistics
from twoscale.exits.rule import Numbers, Reading, Rule, StepView, Threshold, check_number
from twoscale.exits.statistics import Condition


@dataclass(frozen=True, kw_only=True)
class Reads(Rule):
    """A rule on p^(k), read by the `lens` (final norm and head on the state) or through the `coda` (the layers after
    the last group, then norm and head). Reading through the coda takes the tokens of a sequence one after the other."""

    read: Reading = "lens"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.read not in ("lens", "coda"):
            raise UserError(f"{type(self).__name__}: read = {self.read!r}, choose lens or coda")

    @property
    def token_by_token(self) -> bool:  # type: ignore[override]
        return self.read == "coda"

    def compared(self) -> Condition:
        """The condition of a rule that reads by the lens."""
        raise NotImplementedError

    def condition(self, group: int) -> Condition | None:
        own = "compared" in type(self).__dict__  # a subclass may read, measure or remember something else
        return self.compared() if self.read == "lens" and own else None

    def log_probs(self, view: StepView) -> Tensor:
        return view.log_probs if self.read == "lens" else view.coda_log_probs


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of log-probabilities (N, V): (N,)."""
    return (p.exp() * (p - q)).sum(dim=-1)


@dataclass(frozen=True)
class KL(Reads, Threshold):
    """KL(p^(k) || p^(k-1)) < tau; reverse: KL(p^(k-1) || p^(k)), as Huginn has it (with tau = 5e-4)."""

    reverse: bool = False

    def compared(self) -> Condition:
        return Condition(statistics.KL_REVERSE if self.reverse else statistics.KL_FORWARD, self.tau)

    def remember(self, view: StepView) -> Tensor:
        return self.log_probs(view)

    def measure(self, view: StepView) -> Tensor:
        now = self.log_probs(view)
        return divergence(view.last.expand_as(now), now) if self.reverse else divergence(now, view.last.expand_as(now))


@dataclass(frozen=True)
class MinPKL(Reads, Threshold):
    """Huginn's: KL(q^(k-1) || q^(k)) < tau, where q is p with all below min_p of its maximum set to 1/V, renormalised."""

    tau: float = 1e-5
    min_p: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "min_p", 0.0, 1.0)

    def compared(self) -> Condition:
        return Condition(statistics.KL_MIN_P, self.tau, parameters=(self.min_p,))

    def remember(self, view: StepView) -> Tensor:
        return self._filtered(view)

    def measure(self, view: StepView) -> Tensor:
        now = self._filtered(view)
        return divergence(view.last.expand_as(now), now)

    def _filtered(self, view: StepView) -> Tensor:
        p = self.log_probs(view).exp()
        p = torch.where(p < self.min_p * p.amax(dim=-1, keepdim=True), 1 / p.shape[-1], p)
        return (p / p.sum(dim=-1, keepdim=True)).log()


@dataclass(frozen=True)
class Entropy(Reads, Threshold):
    """Huginn's: |H_k - H_(k-1)| < tau."""

    tau: float = 1e-3

    def compared(self) -> Condition:
        return Condition(statistics.ENTROPY_CHANGE, self.tau)

    def remember(self, view: StepView) -> Tensor:
        return self._entropy(view)

    def measure(self, view: StepView) -> Tensor:
        return (self._entropy(view) - view.last).abs()

    def _entropy(self, view: StepView) -> Tensor:
        log_p = self.log_probs(view)
        return -(log_p.exp() * log_p).sum(dim=-1)


@dataclass(frozen=True)
class ArgmaxStable(Reads):
    """Huginn's: the most likely token has stayed the same, `hits` comparisons in a row."""

    hits: int = 5

    def compared(self) -> Condition:
        return Condition(statistics.ARGMAX_CHANGE, 0.5)

    def remember(self, view: StepView) -> Tensor:
        return self._argmax(view)

    def measure(self, view: StepView) -> Tensor:
        return (self._argmax(view) - view.last).abs()

    def passes(self, value: Numbers) -> Tensor | bool:
        return value == 0

    def _argmax(self, view: StepView) -> Tensor:
        return self.log_probs(view).argmax(dim=-1).double()  # exact for any vocabulary, and NaN for "nothing yet"


@dataclass(frozen=True)
class Confidence(Reads):
    """The most likely token leads the second by more than tau."""

    tau: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "tau", 0.0, 1.0)

    def compared(self) -> Condition:
        return Condition(statistics.CONFIDENCE, self.tau, above=True)

    def measure(self, view: StepView) -> Tensor:
        best = self.log_probs(view).topk(2, dim=-1).values.exp()
        return best[..., 0] - best[..., 1]

    def passes(self, value: Numbers) -> Tensor | bool:
        return value > self.tau
