"""Rules to beat: depths drawn at random, and depths chosen with the labels in hand."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.exits.rule import MAX_COUNT, Numbers, Rule, StepView, check_number
from twoscale.model.noise import fold, keyed_uniform


@dataclass(frozen=True)
class RandomExit(Rule):
    """Depths drawn uniformly between `least` and 2 * mean - least (rounded at random), so that their mean is `mean`.

    A token's depth is a function of (seed, group, position, token): the same alone, in any batch and through the cache.
    """

    mean: float
    least: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "least", 1, MAX_COUNT)
        check_number(self, "mean", self.least, MAX_COUNT)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or abs(self.seed) >= 2**63:
            raise UserError(f"RandomExit: seed = {self.seed!r}, but it must be an integer")

    def remember(self, view: StepView) -> Tensor:
        return self._depth(view)

    def measure(self, view: StepView) -> Tensor:
        return self._depth(view) - view.k

    def passes(self, value: Numbers) -> Tensor | bool:
        return value <= 0

    def _depth(self, view: StepView) -> Tensor:
        known, k = view.last.dim() > 0, view.k
        if known and ((isinstance(k, int) and k > 1) or not view.last.isnan().any()):
            return view.last
        place = view.rows.positions * 1_000_003 + view.rows.tokens
        uniform = keyed_uniform(fold(self.seed, view.group), place, 2)
        depth = (self.least + 2 * (self.mean - self.least) * uniform[:, 0] + uniform[:, 1]).floor()
        return torch.where(view.last.isnan(), depth, view.last) if known else depth


@dataclass(frozen=True, eq=False)
class Oracle(Rule):
    """Each token's depth is given: chosen with the labels in hand, from its loss after every number of steps."""

    depths: Tensor = field(repr=False)
    """int64 (B, T), or (B, T, G) for one depth in each group."""

    @classmethod
    def stay(cls, losses: Tensor, eps: float, depths: Tensor | None = None) -> "Oracle":
        """The fewest steps after which a token's loss stays within eps of the full run's.

        losses (K, B, T) or (K, B, T, G): after 1 .. K steps, or after `depths` (K,), rising; the last entry is the full run's.
        """
        near = (losses - losses[-1]).abs() <= eps
        stays = near.flip(0).long().cumprod(dim=0).sum(dim=0)  # how many of the last entries are near, in one run
        return cls(_steps(losses, depths)[losses.shape[0] - stays])

    @classmethod
    def lagrange(cls, losses: Tensor, price: float, depths: Tensor | None = None) -> "Oracle":
        """The depth that minimises loss + price x steps; the first one of equals.

        `depths` (K,) or (K, G), in any order, says what the entries of the table stand for; a step in one of G groups costs
        price / G.
        """
        steps = _steps(losses, depths)
        cost = steps.double().mean(dim=1) if steps.dim() == 2 else steps.double()
        return cls(steps[(losses + price * cost.view(-1, *[1] * (losses.dim() - 1))).argmin(dim=0)])

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.depths.dim() not in (2, 3) or self.depths.is_floating_point() or int(self.depths.min()) < 1:
            raise UserError("Oracle: depths are integers of at least 1, of shape (B, T) or (B, T, G)")

    def of_rows(self, rows: slice) -> "Oracle":
        """The oracle of some sequences of the batch."""
        return Oracle(self.depths[rows])

    def measure(self, view: StepView) -> Tensor:
        b, t = view.rows.prompt_indices, view.rows.positions
        if int(b.max()) >= self.depths.shape[0] or int(t.max()) >= self.depths.shape[1]:
            shape = tuple(self.depths.shape[:2])
            raise UserError(f"Oracle: depths are known for {shape[0]} sequences of {shape[1]} tokens; it cannot go beyond its labels")
        depths = self.depths[b, t] if self.depths.dim() == 2 else self.depths[b, t, view.group]
        return depths - view.k

    def passes(self, value: Numbers) -> Tensor | bool:
        return value <= 0


@dataclass(frozen=True, eq=False)
class AnswersOnly(Rule):
    """Another rule for the answers of a task; every other token takes all its loops. It tells what a rule costs where it reads the answer
    from what it costs where it stops tokens that the answer depends on."""

    rule: Rule
    places: Tensor = field(repr=False)
    """bool (B, T): where the answers are."""

    @property
    def needs_previous_update(self) -> bool:  # type: ignore[override]
        return self.rule.needs_previous_update

    @classmethod
    def of(cls, rule: Rule, places: Tensor) -> "AnswersOnly":
        return cls(rule, places, hits=rule.hits, min_steps=rule.min_steps, keep=rule.keep)

    def of_rows(self, rows: slice) -> "AnswersOnly":
        """The same rule for some sequences of the batch."""
        return AnswersOnly.of(self.rule, self.places[rows])

    def remember(self, view: StepView) -> Tensor | None:
        return self.rule.remember(view)

    def measure(self, view: StepView) -> Numbers:
        places = self.places.to(view.rows.positions.device)[view.rows.prompt_indices, view.rows.positions]
        value = torch.as_tensor(self.rule.measure(view), device=places.device).expand(places.shape)
        return torch.where(places, value, torch.nan)

    def passes(self, value: Numbers) -> Tensor | bool:
        return self.rule.passes(value)


def _steps(losses: Tensor, depths: Tensor | None) -> Tensor:
    """How many steps each entry of a table stands for, int64 (K,) or (K, G)."""
    steps = torch.arange(1, losses.shape[0] + 1) if depths is None else depths
    if len(steps) != losses.shape[0]:
        raise UserError(f"Oracle: the table has {losses.shape[0]} entries, but {len(steps)} depths are named")
    return steps.to(losses.device)
