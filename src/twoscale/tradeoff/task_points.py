"""What a sweep of a task compares: every exit rule over thresholds that the fit part suggests, fixed depths, and the true depths.

Shapes: K steps, A answers.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from twoscale import exits
from twoscale.config import ModelConfig, UserError
from twoscale.exits.choose import kind_of, main_setting
from twoscale.model import LoopedGPT
from twoscale.tradeoff.depth import true_depths
from twoscale.tradeoff.heldout import HeldOut
from twoscale.tradeoff.points import ALWAYS, Point
from twoscale.tradeoff.signals import at_threshold, exit_steps, record_signals, thresholds

TASK_RULES = (
    "step-norm", "step-norm:relative=true", "acceleration:hits=1", "acceleration", "acceleration:normalize=state,hits=1",
    "acceleration:normalize=state", "acceleration:normalize=steps,hits=1", "acceleration:normalize=steps", "cosine", "kl", "min-p-kl",
    "entropy", "argmax-stable", "confidence", "gate",
)  # fmt: skip
SETTINGS = 16  # thresholds of a rule, at most

Path = list[exits.Rule]  # settings of one rule, most steps first


def rule_family(word: str) -> exits.Rule:
    """A rule whose threshold is to be replaced: NAME, or NAME:setting=value,... without its threshold."""
    kind, (name, _, rest) = kind_of(word), word.partition(":")
    if kind in ALWAYS:
        raise UserError(f"--rules {word}: fixed depths, random exits and the learned controller are always there")
    main = main_setting(kind)
    given = [part.partition("=")[0].strip() for part in rest.split(",") if part.strip()]
    if main in given and main != "hits" or any("=" not in part for part in rest.split(",") if part.strip()):
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


def rule_path(model: LoopedGPT, fit: HeldOut, rule: exits.Rule, loops: int) -> Path:
    """Settings of a rule from most steps to fewest, by what it sees at the answers of the fit part in a full run."""
    if main_setting(type(rule)) == "hits":
        return [at_threshold(rule, hits) for hits in range(loops - 1, 0, -1)]
    asked = fit.asked.flatten()
    seen = [values[:, asked, 0] for values in record_signals(model, fit, rule, loops)]  # (K, A) for each group
    targets = np.linspace(1, loops, SETTINGS + 2)[1:-1].tolist()
    values = sorted({value for group in seen for value, _ in thresholds(rule, group, targets)})
    if len(values) > SETTINGS:
        values = [values[round(i * (len(values) - 1) / (SETTINGS - 1))] for i in range(SETTINGS)]
    settings = [at_threshold(rule, value) for value in values]
    steps = {id(s): sum(float(exit_steps(s, group).double().mean()) for group in seen) for s in settings}
    return sorted(settings, key=lambda s: -steps[id(s)])


def fixed_path(loops: int) -> Path:
    return [exits.Fixed(k) for k in range(loops - 1, 0, -1)]


def task_points(text: HeldOut, loops: int, paths: Mapping[str, Path]) -> list[Point]:
    """The full run, every setting of every rule (fixed depths are one of them), and the true depths."""
    points = [Point("full", "full", float(loops), lambda seen: None)]
    points += [setting_point(family, rule) for family, path in paths.items() for rule in path]
    return [*points, Point("true-depth", "true-depth", None, lambda seen: true_depths(text, loops), "true depths (oracle)")]


def setting_point(family: str, rule: exits.Rule) -> Point:
    return Point(exits.spell(rule), family, float(getattr(rule, main_setting(type(rule)))), lambda seen: rule)


def answers_only(family: str, rule: exits.Rule, text: HeldOut) -> Point:
    """The same setting for the answers alone."""
    exit = exits.AnswersOnly.of(rule, text.asked)
    return Point(f"{exits.spell(rule)}@answers", f"{family}@answers", None, lambda seen: exit)
