"""A rule that lets nobody leave and notes what another one would have looked at: one pass then tells, for any threshold, when each
token would have left.

Shapes: K steps, n tokens, F numbers for each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from twoscale.exits import Rule, StepView
from twoscale.exits.choose import main_setting
from twoscale.exits.rule import Numbers, RuleState, Threshold
from twoscale.model import LoopedGPT
from twoscale.tradeoff.evaluate import evaluate
from twoscale.tradeoff.heldout import HeldOut


@dataclass(frozen=True, eq=False)
class Noted(Rule):
    """Looks as `rule` does, and never lets go."""

    rule: Rule
    read: Callable[[StepView], list[Numbers]]
    notes: dict[int, list[Tensor]] = field(default_factory=dict)
    """For each group, one (n, F) for each step of each batch."""

    @property
    def needs_previous_update(self) -> bool:  # type: ignore[override]
        return self.rule.needs_previous_update

    def remember(self, view: StepView) -> Tensor | None:
        return self.rule.remember(view)

    def measure(self, view: StepView) -> Numbers:
        n = len(view.rows.positions)
        found = [torch.as_tensor(value, dtype=torch.float32).cpu().expand(n) for value in self.read(view)]
        self.notes.setdefault(view.group, []).append(torch.stack(found, dim=1))
        return 0.0

    def passes(self, value: Numbers) -> Tensor | bool:
        return False


def record_signals(
    model: LoopedGPT, text: HeldOut, rule: Rule, loops: int, read: Callable[[StepView], list[Numbers]] | None = None
) -> list[Tensor]:
    """What the rule sees of every token at every step of a full run: (K, n, F) for each group; by default its own number."""
    watched = Noted(rule, read or (lambda view: [rule.measure(view)]))
    evaluate(model, text, watched, loops)
    groups = []
    for g in range(model.config.n_groups):
        batches = [torch.stack(watched.notes[g][i : i + loops]) for i in range(0, len(watched.notes[g]), loops)]
        groups.append(torch.cat(batches, dim=1))
    return groups


def exit_steps(rule: Rule, values: Tensor) -> Tensor:
    """After how many steps each token would leave, from the rule's numbers (K, n): int64 (n,)."""
    passed, rule_state = torch.as_tensor(rule.passes(values)), RuleState(rule)
    steps = torch.full(values.shape[1:], len(values))
    inside = torch.ones_like(steps, dtype=torch.bool)
    for k in range(1, len(values) + 1):
        leave = torch.as_tensor(rule_state.count(passed[k - 1], k))
        steps[inside & leave] = k
        inside &= ~leave
    return steps


def thresholds(rule: Rule, values: Tensor, targets: Sequence[float]) -> list[tuple[float, float]]:
    """Thresholds at which a group's tokens would take about so many steps on average: (threshold, mean steps), most steps first."""
    finite = values[values.isfinite()].double()
    if not len(finite):
        return []
    tries = torch.quantile(finite[:: max(1, len(finite) // 100_000)], torch.linspace(0, 1, 97, dtype=torch.float64)).tolist()
    digits = 4 if isinstance(rule, Threshold) else 8  # probabilities lie close to 1
    found: dict[float, float] = {}
    for value in sorted(set(tries)):
        value = float(f"{max(0.0, value):.{digits}g}")
        found[value] = float(exit_steps(at_threshold(rule, value), values).double().mean())
    chosen = {min(found, key=lambda value: abs(found[value] - target)) for target in targets}
    return sorted(((value, found[value]) for value in chosen), key=lambda pair: -pair[1])


def at_threshold(rule: Any, value: float) -> Rule:
    """The rule with another threshold."""
    return replace(rule, **{main_setting(type(rule)): value})  # type: ignore[no-any-return]
