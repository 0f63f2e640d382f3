"""Statistics of the states of one group, as pure functions on tensors.

`states` is (K+1, ..., C): x^(0) .. x^(K) of any number of tokens. A step is D^(k) = x^(k+1) - x^(k), k = 0 .. K-1.
Everything is computed in fp32 (fp64 stays fp64). What is not defined (a cosine with a step of length zero) is NaN.
"""

import math
from typing import Literal

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


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and NaN where b is zero."""
    return torch.where(b > 0, a / b.clamp(min=torch.finfo(b.dtype).tiny), torch.full_like(a, math.nan))


def steps_of(states: Tensor) -> Tensor:
    """D^(0) .. D^(K-1): (K, ..., C)."""
    return _checked(states).diff(dim=0)


def step_norms(states: Tensor) -> Tensor:
    """||D^(k)||: (K, ...)."""
    return steps_of(states).norm(dim=-1)


def relative_step_norms(states: Tensor) -> Tensor:
    """||D^(k)|| / (||x^(k)|| + eps): (K, ...)."""
    return step_norms(states) / (_checked(states)[:-1].norm(dim=-1) + EPS)


def step_cosines(states: Tensor) -> Tensor:
    """cos(D^(k), D^(k-1)) for k = 1 .. K-1: (K-1, ...)."""
    steps = steps_of(states)
    norms = steps.norm(dim=-1)
    return _ratio((steps[1:] * steps[:-1]).sum(dim=-1), norms[1:] * norms[:-1]).clamp(-1, 1)


def accelerations(states: Tensor, normalize: Literal["steps", "state"] | None = None) -> Tensor:
    """a^(k) = ||D^(k) - D^(k-1)|| for k = 1 .. K-1: (K-1, ...).

    normalize="steps" divides by ||D^(k)|| + ||D^(k-1)|| + eps, which keeps it in [0, 1]; "state" by ||x^(k)|| + eps.
    """
    steps = steps_of(states)
    a = steps.diff(dim=0).norm(dim=-1)
    if normalize is None:
        return a
    if normalize == "steps":
        norms = steps.norm(dim=-1)
        return a / (norms[1:] + norms[:-1] + EPS)
    if normalize == "state":
        return a / (_checked(states)[1:-1].norm(dim=-1) + EPS)
    raise UserError(f"normalize = {normalize!r}: choose None, 'steps' or 'state'")


def radial_tangential(states: Tensor) -> tuple[Tensor, Tensor]:
    """The part of D^(k) along x^(k) (signed: outward is positive) and the length of the rest: two (K, ...)."""
    x, steps = _checked(states)[:-1], steps_of(states)
    unit = x / (x.norm(dim=-1, keepdim=True) + EPS)
    radial = (steps * unit).sum(dim=-1)
    return radial, (steps - radial.unsqueeze(-1) * unit).norm(dim=-1)


def distances(states: Tensor, limit: Tensor) -> Tensor:
    """||x^(k) - limit||: (K+1, ...)."""
    return (_checked(states, 0) - limit).norm(dim=-1)


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
    slope = _ratio((spread * log).sum(dim=0), (spread**2).sum(dim=0))
    return slope.exp()


def verdicts(states: Tensor) -> Tensor:
    """What each token does, as an index into VERDICTS: int64 (...).

    Judged on the steps after the first (which leaves the noise):
    1. *settling* when the last step is below 1e-4 of the state, or steps shrink by 1 % or more a step (fitted over the last half);
    2. *drifting* when they grow by 1 % or more a step;
    3. else, at constant length: *circling* when the steps' direction has turned by a right angle or more in all, and
       *drifting* when it has not.
    With fewer than four steps: undecided.
    """
    states = _checked(states)
    K = states.shape[0] - 1
    if K < 4:
        return torch.full(states.shape[1:-1], VERDICTS.index("undecided"), device=states.device)
    norms = step_norms(states)
    rest = norms[-1] <= STILL * states[-1].norm(dim=-1)
    rate = contraction_rate(norms[K // 2 - 1 :]).nan_to_num(1.0)
    turning = torch.arccos(step_cosines(states)[1:].nan_to_num(1.0)).sum(dim=0)
    result = torch.where(turning >= TURNED, VERDICTS.index("circling"), VERDICTS.index("drifting"))
    result = torch.where(rate >= GROWING, VERDICTS.index("drifting"), result)
    return torch.where(rest | (rate <= SHRINKING), VERDICTS.index("settling"), result)
