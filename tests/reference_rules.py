"""The exit rules in the plainest words: one token, its list of states, one number after another. For `Reference.leaving`."""

import torch
from torch import Tensor

from reference import Leaves, Reference
from twoscale import exits


def probabilities(logits: Tensor) -> list[float]:
    return torch.softmax(logits, dim=-1).tolist()


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * (torch.tensor(a).log() - torch.tensor(b).log()).item() for a, b in zip(p, q, strict=True))


def min_p(p: list[float], share: float) -> list[float]:
    kept = [1 / len(p) if a < share * max(p) else a for a in p]
    return [a / sum(kept) for a in kept]


def entropy(p: list[float]) -> float:
    return -sum(a * torch.tensor(a, dtype=torch.float64).log().item() for a in p if a > 0)


def passes(rule: exits.Rule, states: list[Tensor], read: list[list[float]]) -> bool:
    """Whether the rule passes after the last of the states; `read` are p^(1), p^(2), ... of those after the first."""
    k = len(states) - 1
    step = states[-1] - states[-2]
    if isinstance(rule, exits.StepNorm):
        return bool(step.norm() / (states[-2].norm() if rule.relative else 1) < rule.tau)
    if isinstance(rule, exits.Cosine):
        return bool(1 - torch.dot(states[-1], states[-2]) / (states[-1].norm() * states[-2].norm()) < rule.tau)
    if isinstance(rule, exits.Fixed):
        return k >= rule.k
    if isinstance(rule, exits.Confidence):
        best = sorted(read[-1])
        return best[-1] - best[-2] > rule.tau
    if k < 2:
        return False
    if isinstance(rule, exits.Acceleration):
        last = states[-2] - states[-3]
        below = {None: 1, "steps": step.norm() + last.norm(), "state": states[-2].norm()}[rule.normalize]
        return bool((step - last).norm() / below < rule.tau)
    now, before = read[-1], read[-2]
    if isinstance(rule, exits.KL):
        return (kl(before, now) if rule.reverse else kl(now, before)) < rule.tau
    if isinstance(rule, exits.MinPKL):
        return kl(min_p(before, rule.min_p), min_p(now, rule.min_p)) < rule.tau
    if isinstance(rule, exits.Entropy):
        return abs(entropy(now) - entropy(before)) < rule.tau
    if isinstance(rule, exits.ArgmaxStable):
        return now.index(max(now)) == before.index(max(before))
    raise AssertionError(rule)


def leaves(rule: exits.Rule, reference: Reference) -> Leaves:
    """The rule for `Reference.leaving`: passes `hits` times in a row, not before `min_steps`."""
    reading = getattr(rule, "read", None)

    def leave(g: int, t: int, states: list[Tensor]) -> Tensor | None:
        k = len(states) - 1
        if k < max(rule.hits, rule.min_steps):
            return None
        read = []
        if reading is not None:
            logits = [reference.head(x) if reading == "lens" else reference.coda(x, g, t) for x in states[1:]]
            read = [probabilities(x) for x in logits]
        for j in range(k - rule.hits + 1, k + 1):
            if not passes(rule, states[: j + 1], read[:j]):
                return None
        return states[-2] if rule.keep == "previous" else states[-1]

    return leave
