"""What a sweep compares: every rule at every threshold, beside the baselines that could embarrass it.

A point's exit may need what was measured before it: random exits copy another point's mean steps, oracles choose from the
table of losses after every number of steps.

Shapes: K the most steps, N windows, T tokens, G groups.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twoscale import exits
from twoscale.config import ModelConfig, UserError
from twoscale.config.words import group_label, plural
from twoscale.exits import Exit
from twoscale.exits.choose import main_setting

TAUS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # the paper's four, and two beyond, where models with larger states begin to leave
RULES = ("step-norm", "kl", "acceleration")
ALWAYS = (exits.Fixed, exits.RandomExit, exits.Learned)  # in every sweep, with settings of their own
CHANCES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)  # thresholds of the learned controller
NEAR = (0.003, 0.01, 0.03, 0.1)  # nats within which the first oracle stays
PRICES = (0.001, 0.003, 0.01, 0.03)  # nats a step that the second one pays
DEPTHS = (1, 2, 4)  # of one group, the others at full depth
MIXED = 27  # combinations of depths in different groups that the second oracle may choose from as well
SHOWN = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)  # fixed depths of which a point is made
FEW = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)  # of them, in a short sweep: those that a calibration tests


@dataclass(frozen=True)
class Seen:
    """What has been measured so far."""

    records: Mapping[str, dict[str, Any]]
    table: Callable[[], "Table"]
    """Every token's loss at many depths; made when first asked for."""


@dataclass(frozen=True)
class Table:
    """Losses of every token at many depths of the groups, for the oracles to choose from."""

    depths: Tensor
    """int64 (K, G): first those with the same depth in all groups, rising to the full run, then mixed ones."""
    same: int
    """How many have the same depth in all groups."""
    losses: Tensor
    """(K, N, T)."""

    def at(self, depths: Tensor) -> Tensor:
        """What the table says of each token at its depths (N, T, G), which must be in it: (N, T). What a run of those depths gives
        differs a little, since tokens also see each other's states at other depths."""
        place = (self.depths[:, None, None] == depths).all(dim=-1).long().argmax(dim=0)
        return torch.gather(self.losses, 0, place[None])[0]


def same_depths(loops: int) -> list[int]:
    """Depths of all groups together that are tried: every one up to 12, fewer beyond, and the full run."""
    return [k for k in range(1, loops + 1) if k <= 12 or k == 14 or k in SHOWN or k == loops]


def mixed_depths(groups: int, enough: int) -> list[tuple[int, ...]]:
    """Other depths that are tried: 1, 2 or enough steps in each group, in all combinations while they are few."""
    levels = sorted({1, min(2, enough), enough})
    if len(levels) ** groups <= MIXED:
        found = list(itertools.product(levels, repeat=groups))
    else:
        found = [tuple(k if i == g else enough for i in range(groups)) for g in range(groups) for k in levels]
    return [depths for depths in dict.fromkeys(found) if len(set(depths)) > 1]


@dataclass(frozen=True)
class Point:
    """One setting to measure."""

    id: str
    family: str
    """Which curve it belongs to: a rule's name, fixed, fixed-one, random, oracle-stay, oracle-lagrange, learned, calibrated, full."""
    setting: float | None
    """Its place on that curve."""
    exit: Callable[[Seen], Exit | None]
    label: str = ""


def grid(
    config: ModelConfig,
    loops: int,
    rules: Sequence[str] = RULES,
    taus: Sequence[float] = TAUS,
    learned: exits.Learned | None = None,
    calibrated: Mapping[int, exits.Rule] | None = None,
    few: bool = False,
) -> list[list[Point]]:
    """All points, in rounds: a round needs only what earlier ones have measured. `few`: fewer baselines."""
    first = [Point("full", "full", float(loops), lambda seen: None)]
    depths = sorted({*(FEW if few else SHOWN), config.mean_loops})  # savings are quoted against the default depth
    first += [Point(f"fixed:{k}", "fixed", float(k), _same(exits.Fixed(k))) for k in depths if k < loops]
    if config.n_groups > 1 and not few:
        first += [
            Point(f"fixed:{k}@{g}", "fixed-one", float(k), _same({g: exits.Fixed(k)}), f"{plural(k, 'step')} in {group_label(g, layers)}")
            for g, layers in enumerate(config.groups)
            for k in DEPTHS
            if k < loops
        ]
    ruled: list[Point] = []
    for name in rules:
        for rule in settings(name, taus):
            word = exits.spell(rule)
            ruled.append(Point(word, name.split(":")[0], float(getattr(rule, main_setting(type(rule)))), _same(rule)))
    if learned is not None:
        for tau in CHANCES:
            rule = exits.Learned(tau, weights=learned.heads)
            ruled.append(Point(f"learned:{tau!r}", "learned", tau, _same(rule)))
    if calibrated is not None:
        words = [_short(calibrated.get(g)) for g in range(config.n_groups)]
        ruled.append(Point(f"calibrated {' '.join(words)}", "calibrated", None, _same(dict(calibrated)), f"calibrated: {', '.join(words)}"))
    leading = [p for p in ruled if p.family in ("acceleration", "calibrated")] or ruled
    after = [Point(f"random~{p.id}", "random", p.setting, as_random(p.id, loops)) for p in (leading[-3:] if few else leading)]
    after += [Point(f"oracle-stay:{eps!r}", "oracle-stay", eps, _stay(eps)) for eps in (NEAR[1::2] if few else NEAR)]
    after += [Point(f"oracle-lagrange:{price!r}", "oracle-lagrange", price, _lagrange(price)) for price in (PRICES[::2] if few else PRICES)]
    return [first, ruled, after]


def settings(name: str, taus: Sequence[float]) -> list[exits.Rule]:
    """A rule at every threshold; a rule that is named with its setting stands for itself."""
    if ":" in name:
        return [exits.parse(name)]
    kind = exits.NAMES.get(name)
    if kind is None or kind in ALWAYS:
        known = ", ".join(n for n, k in exits.NAMES.items() if k not in ALWAYS)
        raise UserError(f"--rules {name}: choose among {known} (fixed depths and random exits are always there), or NAME:VALUE")
    if main_setting(kind) == "tau":
        return [exits.parse(f"{name}:{tau!r}") for tau in taus]
    return [exits.parse(name)]


def _short(rule: exits.Rule | None) -> str:
    """A group's calibrated rule in a word."""
    if rule is None:
        return "all"
    return exits.spell(rule)


def _same(exit: Exit) -> Callable[[Seen], Exit]:
    return lambda seen: exit


def as_random(other: str, loops: int) -> Callable[[Seen], Exit]:
    """Depths at random, with the mean steps that another point took in each group, and none above the most that is allowed."""

    def draw(mean: float) -> exits.Rule:
        return exits.RandomExit(max(1.0, mean), least=min(int(mean), max(1, math.ceil(2 * mean - loops))))

    return lambda seen: {g: draw(s["mean"]) for g, s in enumerate(seen.records[other]["steps"])}


def _stay(eps: float) -> Callable[[Seen], Exit]:
    return lambda seen: _stay_within(seen.table(), eps)


def _lagrange(price: float) -> Callable[[Seen], Exit]:
    return lambda seen: exits.Oracle.lagrange(seen.table().losses, price, seen.table().depths)


def _stay_within(table: Table, eps: float) -> exits.Oracle:
    return exits.Oracle.stay(table.losses[: table.same], eps, table.depths[: table.same, 0])
