"""What a sweep of a task compares: every exit rule over thresholds that the fit part suggests, fixed depths, and the true depths."""

from collections.abc import Callable, Mapping, Sequence

import torch

from twoscale import exits
from twoscale.config import ModelConfig, UserError
from twoscale.config.words import plural
from twoscale.exits.choose import main_setting, rule_class
from twoscale.exits.rule import Threshold
from twoscale.model import LoopedGPT
from twoscale.tradeoff.depth import true_depths
from twoscale.tradeoff.heldout import HeldOut
from twoscale.tradeoff.points import ALWAYS, Point
from twoscale.tradeoff.signals import at_threshold, record_signals

TASK_RULES = (
    "step-norm", "step-norm:relative=true", "acceleration:hits=1", "acceleration", "acceleration:normalize=state,hits=1",
    "acceleration:normalize=state", "acceleration:normalize=steps,hits=1", "acceleration:normalize=steps", "cosine", "kl", "min-p-kl",
    "entropy", "argmax-stable", "confidence", "confidence:hits=2", "gate",
)  # fmt: skip
LEVELS = 256  # settings of a rule that can be chosen
CURVE = 8  # of them, spread evenly, that are measured whatever they cost
AROUND = (-48, -16, -6, -2, 0, 2)  # places beside the boundary that are certified, in this order

Settings = list[exits.Rule]  # of one rule, most steps first


def rule_family(word: str) -> exits.Rule:
    """A rule whose threshold is to be replaced: NAME, or NAME:setting=value,... without its threshold."""
    kind, (name, _, rest) = rule_class(word), word.partition(":")
    if kind in ALWAYS:
        raise UserError(f"--rules {word}: fixed depths, random exits and the learned controller are always there")
    main = main_setting(kind)
    given = [part.partition("=")[0].strip() for part in rest.split(",") if part.strip()]
    if (main in given and main != "hits") or any("=" not in part for part in rest.split(",") if part.strip()):
        raise UserError(f"--rules {word}: on a task thresholds are found on held-out samples, write {name} without one")
    start = {"tau": "tau=0.5,", "q": "q=0.5,"}.get(main, "")
    rule = exits.parse(f"{name}:{start}{rest}")
    if rule.token_by_token:
        raise UserError(f"--rules {word}: a rule that reads through the coda cannot be swept: read by the lens")
    return rule


def usable_rules(config: ModelConfig, words: Sequence[str]) -> dict[str, exits.Rule]:
    """The rules by name; a gate is left out where the model has none, or not in every group."""
    gated = config.exit_gate and config.n_groups == 1
    return {word: rule for word in words if not isinstance(rule := rule_family(word), exits.Gate) or gated}


def rule_settings(model: LoopedGPT, fit: HeldOut, rule: exits.Rule, loops: int) -> Settings:
    """Settings of a rule from most steps to fewest: thresholds are quantiles of what it sees of all tokens of a full run."""
    if main_setting(type(rule)) == "hits":
        return [at_threshold(rule, hits) for hits in range(loops - 1, 0, -1)]
    seen = torch.cat([values.flatten() for values in record_signals(model, fit, rule, loops)])
    seen = seen[seen.isfinite()].double()
    if not len(seen):
        raise UserError(f"{type(rule).__name__} has nothing to compare in {plural(loops, 'loop')}: give it more with --loops")
    levels = torch.quantile(seen[:: max(1, len(seen) // 1_000_000)], torch.linspace(0, 1, LEVELS, dtype=torch.float64))
    below = isinstance(rule, Threshold)
    values = sorted({float(f"{max(0.0, value):.{4 if below else 8}g}") for value in levels.tolist()}, reverse=not below)
    return [at_threshold(rule, value) for value in values]


def fixed_settings(loops: int) -> Settings:
    return [exits.Fixed(k) for k in range(loops - 1, 0, -1)]


def curve(settings: Settings) -> Settings:
    """A few settings spread over all of them; of fixed depths all."""
    if isinstance(settings[0], exits.Fixed) or len(settings) <= CURVE:
        return settings
    return [settings[round(i * (len(settings) - 1) / (CURVE - 1))] for i in range(CURVE)]


def boundary(settings: Settings, keeps: Callable[[exits.Rule], bool]) -> int:
    """The place of the last setting that keeps the accuracy, by bisection: exact where fewer steps never mean more right answers; -1 where
    the first one does not."""
    low, high = -1, len(settings)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(settings[middle]) else (low, middle)
    return low


def path_around(settings: Settings, place: int) -> Settings:
    """The settings to certify, most steps first: nearer and nearer to the boundary, and a little beyond. Fixed depths are all tested."""
    if isinstance(settings[0], exits.Fixed):
        return settings
    places = sorted({min(max(0, place + step), len(settings) - 1) for step in AROUND})
    return [settings[i] for i in places]


def task_points(text: HeldOut, loops: int, families: Mapping[str, Settings]) -> list[Point]:
    """The full run, a few settings of every rule, all fixed depths, and the true depths, also with one step more."""
    points = [Point("full", "full", float(loops), lambda seen: None)]
    points += [setting_point(family, rule) for family, found in families.items() for rule in curve(found)]
    points.append(Point("true-depth", "true-depth", 0.0, lambda seen: true_depths(text, loops), "true depths (oracle)"))
    return [*points, Point("true-depth+1", "true-depth+1", 1.0, lambda seen: true_depths(text, loops, 1), "true depths and one more")]


def setting_point(family: str, rule: exits.Rule) -> Point:
    return Point(exits.spell(rule), family, float(getattr(rule, main_setting(type(rule)))), lambda seen: rule)


def answers_only(family: str, rule: exits.Rule, text: HeldOut) -> Point:
    """The same setting for the answers alone."""
    exit = exits.AnswersOnly.of(rule, text.asked)
    return Point(f"{exits.spell(rule)}@answers", f"{family}@answers", None, lambda seen: exit)
