"""From what a caller says to one rule for each group.

exits.rules_per_group(Acceleration(1e-2), 3)                     # the same for all
exits.rules_per_group({0: StepNorm(1e-3), 2: Fixed(4)}, 3)       # group 1 runs all its loops
exits.parse("acceleration:0.01,normalize=steps")      # as the command line writes it
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from twoscale.config import UserError
from twoscale.exits.baselines import RandomExit
from twoscale.exits.learned import Learned
from twoscale.exits.logits import KL, ArgmaxStable, Confidence, Entropy, MinPKL
from twoscale.exits.rule import Rule
from twoscale.exits.states import Acceleration, Cosine, Fixed, Gate, StepNorm

NAMES: dict[str, type[Rule]] = {
    "step-norm": StepNorm,
    "kl": KL,
    "acceleration": Acceleration,
    "entropy": Entropy,
    "min-p-kl": MinPKL,
    "argmax-stable": ArgmaxStable,
    "cosine": Cosine,
    "confidence": Confidence,
    "gate": Gate,
    "learned": Learned,
    "fixed": Fixed,
    "random": RandomExit,
}

Exit = Rule | str | Mapping[int, Rule | str]


def rules_per_group(exit: Exit | None, n_groups: int) -> tuple[Rule | None, ...]:
    """One rule (or none) for each group."""
    if exit is None:
        return (None,) * n_groups
    if not isinstance(exit, Mapping):
        return (_rule(exit),) * n_groups
    for group in exit:
        if isinstance(group, bool) or not isinstance(group, int) or not 0 <= group < n_groups:
            known = f"groups run from 0 to {n_groups - 1}" if n_groups else "the model has no loop groups"
            raise UserError(f"exit has a rule for group {group!r}, but {known}")
    return tuple(_rule(exit[g]) if g in exit else None for g in range(n_groups))


def _rule(value: object) -> Rule:
    if isinstance(value, str):
        return parse(value)
    if isinstance(value, type) and issubclass(value, Rule):
        raise UserError(f"exit = {value.__name__}: give a rule with its settings, for example {value.__name__}(...)")
    if not isinstance(value, Rule):
        raise UserError(f"exit = {value!r}: give a rule of twoscale.exits, or {{group: rule}}")
    return value


def rule_class(text: str) -> type[Rule]:
    """Which rule a text names, whatever its settings."""
    name = text.strip().partition(":")[0]
    kind = NAMES.get(name.strip().lower().replace("_", "-"))
    if kind is None:
        raise UserError(f"there is no exit rule {name!r}: choose one of {', '.join(NAMES)}")
    return kind


def parse(text: str, **known: Any) -> Rule:
    """A rule from its name and settings: NAME, NAME:VALUE or NAME:VALUE,setting=value,...; `known` are settings that words do not hold."""
    kind, (name, _, rest) = rule_class(text), text.strip().partition(":")
    fields = {f.name: f for f in dataclasses.fields(kind)}
    settings: dict[str, Any] = {key: value for key, value in known.items() if key in fields}
    for i, part in enumerate(filter(None, (word.strip() for word in rest.split(",")))):
        key, equals, value = part.partition("=")
        if not equals:
            if i:
                raise UserError(f"exit rule {text!r}: write the settings after the first as setting=value")
            key, value = main_setting(kind), part
        key = key.strip().replace("-", "_")
        if key not in fields:
            raise UserError(f"exit rule {text!r}: {name} has no setting {key!r}, it has {', '.join(fields)}")
        settings[key] = _value(value.strip())
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in settings]
    if missing:
        raise UserError(f"exit rule {text!r}: {missing[0]} is missing, write for example {name}:{2 if kind is Fixed else 0.01}")
    return kind(**settings)


def name_of(rule: Rule) -> str:
    """What the command line calls this kind of rule."""
    kind = next((name for name, known in NAMES.items() if known is type(rule)), None)
    if kind is None:
        raise UserError(f"{type(rule).__name__} has no name on the command line")
    return kind


def spell(rule: Rule) -> str:
    """The words that `parse` makes this rule of; what its repr leaves out (weights) is left out here too."""
    main = main_setting(type(rule))
    words: list[str] = []
    for f in dataclasses.fields(rule):
        value = getattr(rule, f.name)
        if f.name == main:
            words.insert(0, _word(value))
        elif f.repr and value != f.default:
            words.append(f"{f.name}={_word(value)}")
    return f"{name_of(rule)}:{','.join(words)}"


def _word(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def main_setting(kind: type[Rule]) -> str:
    """The setting that a bare value stands for."""
    names = [f.name for f in dataclasses.fields(kind)]
    return next((n for n in ("tau", "q", "k", "mean") if n in names), "hits")


def _value(word: str) -> Any:
    if word.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[word.lower()]
    if re.fullmatch(r"[+-]?\d+", word):
        return int(word)
    try:
        return float(word)
    except ValueError:
        return word
