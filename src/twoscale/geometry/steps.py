"""Statistics of the states of one group, as pure functions on tensors.

`states` is (K+1, ..., C): x^(0) .. x^(K) of any number of tokens. A step is D^(k) = x^(k+1) - x^(k), k = 0 .. K-1.
Everything is computed in fp32 (fp64 stays fp64). What is not defined (a cosine with a step of length zero) is NaN.
"""

import math
from functools import cached_property
from typing import Literal, TypeVar

import torch
from torch import Tensor

from twoscale.config import UserError

EPS = 1e-20

Verdict = Literal["settling", "circling", "drifting", "undecided"]
VERDICTS: tuple[Verdict, ...] = ("settling", "circling", "drifting", "undecided")

# The verdict's rule, in numbers; `verdicts` says how they are used.
STILL = 1e-4  # a step this small beside the state is rest
SHRINKING, GROWING = 0.99, 1.01  # a step this much shorter, or longer, than the one before
TURNED = math.pi / 2  # the direction of the steps has turned by this much in all


def _checked(states: Tensor, least: int = 1) -> Tensor:
    if states.dim() < 2 or states.shape[0] < least + 1:
        raise UserError(f"states of shape {tuple(states.shape)}: (K+1, ..., C) with at least {least} step(s) are needed")
    return states if states.dtype == torch.float64 else states.float()


def length(x: Tensor) -> Tensor:
    """The 2-norm over the width."""
    return torch.linalg.vector_norm(x, dim=-1)


N = TypeVar("N", Tensor, Tensor | float)


def ratio(norm: N, *others: N) -> N:
    """norm / (sum of the others + eps), for tensors or plain numbers."""
    return norm / (sum(others) + EPS)


def cosine_of(norm: N, previous: N, acceleration: N) -> N:
    """The cosine between a step and the previous one from their norms and that of their difference, for tensors or plain numbers."""
    return (norm * norm + previous * previous - acceleration * acceleration) / (2 * norm * previous + EPS)


def cosine_distance(difference: N, norm: N, other: N) -> N:
    """1 - cos of two vectors from the norm of their difference and their own norms; 1 if one of them is zero. For tensors or plain numbers.

    As (|a - b|^2 - (|a| - |b|)^2) / (2 |a| |b|): 1 - cos itself loses all digits where it is small."""
    return (difference * difference - (norm - other) * (norm - other) + EPS) / (2 * norm * other + EPS)


def _ratio_or_nan(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and NaN where b is zero."""
    return torch.where(b > 0, a / b.clamp(min=torch.finfo(b.dtype).tiny), torch.full_like(a, math.nan))


class Steps:
    """The steps of states (K+1, ..., C) and what is measured on them, each computed once. The one definition of each statistic."""

    def __init__(self, states: Tensor) -> None:
        self.states = _checked(states)

    @cached_property
    def steps(self) -> Tensor:
        """D^(0) .. D^(K-1): (K, ..., C)."""
        return self.states.diff(dim=0)

    @cached_property
    def norms(self) -> Tensor:
        return length(self.steps)

    @cached_property
    def state_norms(self) -> Tensor:
        """||x^(0)|| .. ||x^(K)||."""
        return length(self.states)

    @cached_property
    def relative(self) -> Tensor:
        return ratio(self.norms, self.state_norms[:-1])

    @cached_property
    def cosines(self) -> Tensor:
        dots = (self.steps[1:] * self.steps[:-1]).sum(dim=-1)
        return _ratio_or_nan(dots, self.norms[1:] * self.norms[:-1]).clamp(-1, 1)

    @cached_property
    def accelerations(self) -> Tensor:
        return length(self.steps.diff(dim=0))

    def normalized_accelerations(self, normalize: str | None) -> Tensor:
        if normalize is None:
            return self.accelerations
        if normalize == "steps":
            return ratio(self.accelerations, self.norms[1:], self.norms[:-1])
        if normalize == "state":
            return ratio(self.accelerations, self.state_norms[1:-1])
        raise UserError(f"normalize = {normalize!r}: choose None, 'steps' or 'state'")

    @cached_property
    def radial_tangential(self) -> tuple[Tensor, Tensor]:
        x, lengths = self.states[:-1], self.state_norms[:-1] + EPS
        radial = (self.steps * x).sum(dim=-1) / lengths
        # The difference of squares would be quicker and lose half of the digits where a step is nearly radial.
        return radial, length(torch.addcmul(self.steps, x, (radial / lengths).unsqueeze(-1), value=-1))


def step_norms(states: Tensor) -> Tensor:
    """||D^(k)||: (K, ...)."""
    return Steps(states).norms


def relative_step_norms(states: Tensor) -> Tensor:
    """||D^(k)|| / (||x^(k)|| + eps): (K, ...)."""
    return Steps(states).relative


def step_cosines(states: Tensor) -> Tensor:
    """cos(D^(k), D^(k-1)) for k = 1 .. K-1: (K-1, ...)."""
    return Steps(states).cosines


def accelerations(states: Tensor, normalize: Literal["steps", "state"] | None = None) -> Tensor:
    """a^(k) = ||D^(k) - D^(k-1)|| for k = 1 .. K-1: (K-1, ...).

    normalize="steps" divides by ||D^(k)|| + ||D^(k-1)|| + eps, which keeps it in [0, 1]; "state" by ||x^(k)|| + eps.
    """
    return Steps(states).normalized_accelerations(normalize)


def radial_tangential(states: Tensor) -> tuple[Tensor, Tensor]:
    """The part of D^(k) along x^(k) (signed: outward is positive) and the length of the rest: two (K, ...)."""
    return Steps(states).radial_tangential


def distances(states: Tensor, limit: Tensor) -> Tensor:
    """||x^(k) - limit||: (K+1, ...)."""
    return length(_checked(states, 0) - limit)


def contraction_rate(gaps: Tensor, floor: Tensor | float = 0.0) -> Tensor:
    """c of the fit gap_k = gap_1 * c^(k-1) by least squares in the logarithm: (...) from gaps (K+1, ...).

    The first gap (to the noise) is left out, and so are gaps at or below `floor`, where rounding rules. With fewer
    than two gaps left there is nothing to fit: NaN.
    """
    gaps = gaps[1:]
    used = gaps > floor
    used = used.cumprod(dim=0).bool()  # what comes after the first sunken gap is rounding too
    k = torch.arange(gaps.shape[0], dtype=gaps.dtype, device=gaps.device).view(-1, *[1] * (gaps.dim() - 1)).expand_as(gaps)
    n = used.sum(dim=0)
    log = torch.where(used, gaps.clamp(min=torch.finfo(gaps.dtype).tiny).log(), torch.zeros_like(gaps))
    centre = torch.where(used, k, torch.zeros_like(k)).sum(dim=0) / n.clamp(min=1)
    spread = torch.where(used, k - centre, torch.zeros_like(k))
    slope = _ratio_or_nan((spread * log).sum(dim=0), (spread**2).sum(dim=0))
    return slope.exp()


def verdicts(states: Tensor | Steps) -> Tensor:
    """What each token does, as an index into VERDICTS: int64 (...).

    Judged on the steps after the first (which leaves the noise):
    1. *settling* when the last step is below 1e-4 of the state, or steps shrink by 1 % or more a step (fitted over the last half);
    2. *drifting* when they grow by 1 % or more a step;
    3. else, at constant length: *circling* when the steps' direction has turned by a right angle or more in all, and
       *drifting* when it has not.
    With fewer than four steps, or where a state is not finite: undecided.
    """
    of = states if isinstance(states, Steps) else Steps(states)
    K = of.states.shape[0] - 1
    if K < 4:
        return torch.full(of.states.shape[1:-1], VERDICTS.index("undecided"), device=of.states.device)
    rest = of.norms[-1] <= STILL * of.state_norms[-1]
    rate = contraction_rate(of.norms[K // 2 - 1 :]).nan_to_num(1.0)
    turning = torch.arccos(of.cosines[1:].nan_to_num(1.0)).sum(dim=0)
    known = of.states.isfinite().flatten(-1).all(dim=-1).all(dim=0)
    result = torch.where(turning >= TURNED, VERDICTS.index("circling"), VERDICTS.index("drifting"))
    result = torch.where(rate >= GROWING, VERDICTS.index("drifting"), result)
    result = torch.where(rest | (rate <= SHRINKING), VERDICTS.index("settling"), result)
    return torch.where(known, result, VERDICTS.index("undecided"))
