"""Exit rules: when a token may leave a loop group. All are frozen dataclasses; a rule of your own subclasses `Rule`."""

from twoscale.exits.baselines import AnswersOnly, Oracle, RandomExit
from twoscale.exits.choose import NAMES, Exit, name_of, parse, rule_class, rules_per_group, spell
from twoscale.exits.learned import Learned
from twoscale.exits.logits import KL, ArgmaxStable, Confidence, Entropy, MinPKL
from twoscale.exits.rule import Rule, RuleState, StepView, Threshold
from twoscale.exits.states import Acceleration, Cosine, Fixed, Gate, StepNorm

__all__ = [
    "KL",
    "NAMES",
    "Acceleration",
    "AnswersOnly",
    "ArgmaxStable",
    "Confidence",
    "Cosine",
    "Entropy",
    "Exit",
    "Fixed",
    "Gate",
    "Learned",
    "MinPKL",
    "Oracle",
    "RandomExit",
    "Rule",
    "RuleState",
    "StepNorm",
    "StepView",
    "Threshold",
    "name_of",
    "parse",
    "rule_class",
    "rules_per_group",
    "spell",
]
