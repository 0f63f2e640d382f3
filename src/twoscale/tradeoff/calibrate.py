"""`twoscale calibrate`: a threshold for each group, with a bound on what it costs.

Fit. On one part of the held-out text, one pass tells which thresholds make a group's tokens take about so many steps, and one pass for
each of them what leaving that group costs while the others run in full. Taking costs as additive, the best settings for
every price of a step form a path from the full run to the boldest (`path`).

Certify. On documents that fitting has not seen, the settings of the path are tested in that order, each by a one-sided bound on the
rise of the loss, until one fails (learn-then-test by a fixed sequence): the chance that the last one to pass costs more than
was asked is delta at most, however long the path. There are three paths (a threshold for each group, one for all groups, fixed depths), and
who uses the result picks from more than one of them: each is tested at delta divided by their number (Bonferroni), so with a chance of
1 - delta all that was certified holds at once.

On a task the loss is the share of wrong answers. With one group (and for the single threshold) the path then lies around the place at which
the fit part begins to lose accuracy, by real exits: the same settings in the same order as in a sweep.

Report. On documents that neither has seen, the result is compared with a single threshold for all groups and with a fixed depth, both
found and certified in the same way, and with the default depth: differences of steps and of CE, paired, with intervals over documents.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twoscale import exits
from twoscale.config import UserError
from twoscale.config.groups import format_groups
from twoscale.config.words import group_label, plural
from twoscale.exits.choose import main_setting
from twoscale.model import LoopedGPT
from twoscale.model.flops import step_flops
from twoscale.tradeoff.depth import accuracy_drop, depth_record, drop_bound
from twoscale.tradeoff.evaluate import Evaluation, describe, evaluate
from twoscale.tradeoff.heldout import HeldOut
from twoscale.tradeoff.latency import REFERENCE, LatencyTimer
from twoscale.tradeoff.signals import at_threshold, exit_steps, record_signals, thresholds
from twoscale.tradeoff.stats import interval, upper_bound
from twoscale.tradeoff.summary import CALIBRATION_VERSION
from twoscale.tradeoff.task_points import boundary, curve, fixed_settings, path_around, rule_settings

STEPS = (2, 3, 4, 5, 6, 8, 11, 16, 24, 40)  # mean steps that thresholds are tried for
LONGEST = 10  # settings on a path
DEPTHS = (24, 16, 12, 8, 6, 5, 4, 3, 2, 1)  # fixed depths that are tested, in this order

Setting = Mapping[int, exits.Rule]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Texts:
    """Parts of the held-out text that share no document."""

    fit: HeldOut
    certify: HeldOut
    report: HeldOut


@dataclass(frozen=True)
class Goal:
    """What is asked for: exactly one of the four."""

    max_dce: float | None = None
    """The loss may rise by so many nats a token at most."""
    mean_steps: float | None = None
    """So many steps a group on average."""
    ms: float | None = None
    """So many milliseconds a token."""
    max_accuracy_drop: float | None = None
    """On a task: the share of right answers may drop by so much at most."""

    def __post_init__(self) -> None:
        asked = [value for value in vars(self).values() if value is not None]
        if len(asked) != 1 or not 0 < asked[0] < 1e6:
            raise UserError("ask for one thing, above zero: --max-dce (on a task --max-accuracy-drop), --mean-steps or --ms")

    @property
    def limit(self) -> float | None:
        """The limit on the rise of the loss, or on the drop of accuracy; None where speed is asked for."""
        return self.max_dce if self.max_accuracy_drop is None else self.max_accuracy_drop


@dataclass(frozen=True)
class Certified:
    """A setting that was tested, with its bound."""

    setting: Setting
    bound: float
    passed: bool


def fixed_sequence(path: Sequence[Setting], bound: Callable[[Setting], float], limit: float) -> list[Certified]:
    """Test the settings in order until one fails; all that were tested."""
    tested = []
    for setting in path:
        value = bound(setting)
        tested.append(Certified(setting, value, value <= limit))
        if value > limit:
            break
    return tested


def best_path(costs: Sequence[Sequence[tuple[float, float]]], weights: Sequence[float], longest: int = LONGEST) -> list[tuple[int, ...]]:
    """For each group its options (mean steps, cost), option 0 being the full run. For every price of a step the choice that minimises
    cost + price x weighted steps, as option numbers, from the full run (left out) to the boldest.

    Costs are first made to rise with every step that is saved: what falls below is noise.
    """
    rising = []
    for options in costs:
        floor, kept = 0.0, []
        for _, cost in options:
            floor = max(floor, cost)
            kept.append(floor)
        rising.append(kept)
    path: list[tuple[int, ...]] = []
    for price in np.geomspace(1e-7, 10, 241):
        chosen = tuple(
            min(range(len(options)), key=lambda j: rising[g][j] + price * weights[g] * options[j][0]) for g, options in enumerate(costs)
        )
        if any(chosen) and (not path or chosen != path[-1]):
            path.append(chosen)
    if path:  # where leaving seems free on little text the first choice may be bold: milder ones come before it
        first, deepest = path[0], max(path[0])
        steps = sorted({max(1, deepest // 3), max(1, 2 * deepest // 3)} - {deepest})
        path = [tuple(min(j, step) for j in first) for step in steps] + path
    if len(path) > longest:
        path = [path[i] for i in sorted({round(i * (len(path) - 1) / (longest - 1)) for i in range(longest)})]
    return path


def certified_words(passed: int, settings: int, limit: float, task: bool = False) -> str:
    """How far a fixed sequence of settings was tested: it stops at the first one that fails."""
    left = settings - passed - 1
    untested = f"{left} {'was' if left == 1 else 'were'} not tested"
    among, kept = plural(settings, "setting"), f"the drop of accuracy below {limit:g}" if task else f"the rise below {limit:g} nats"
    if passed == 0:
        return f"the first of {among} does not keep {kept}" + (f", {untested}" if left > 0 else "")
    rest = f"; the next one does not, and {untested}" if left > 0 else "; the last one does not" if left == 0 else ""
    return f"the first {passed} of {among} keep {kept}{rest}" if passed > 1 else f"the first of {among} keeps {kept}{rest}"


class Calibrator:
    """One rule, one model, three parts of text."""

    def __init__(self, model: LoopedGPT, rule: exits.Rule, texts: Texts, loops: int, delta: float, say: Say = lambda text: None) -> None:
        self.task = texts.fit.depth is not None
        if main_setting(type(rule)) not in (("tau", "q", "hits") if self.task else ("tau",)) or isinstance(rule, exits.RandomExit):
            raise UserError(f"{type(rule).__name__} has no threshold to calibrate")
        if rule.token_by_token:
            raise UserError("a rule that reads through the coda cannot be calibrated: read by the lens")
        if not 0 < delta < 0.5:
            raise UserError(f"delta = {delta}: the chance of being wrong lies between 0 and 0.5")
        self.model, self.rule, self.texts, self.loops, self.delta, self.say = model, rule, texts, loops, delta, say
        self.delta_each = delta
        """The chance of error of one path; all of delta where one bound is given and nothing is picked by it."""
        self.groups = range(model.config.n_groups)
        asked = texts.fit.asked.flatten()
        self.seen = [x[:, asked] for x in record_signals(model, texts.fit, rule, loops)]  # (K, n, 1) for each group: what the rule sees
        self.full = {name: evaluate(model, text, None, loops) for name, text in vars(texts).items()}

    def run(self, goal: Goal) -> dict[str, Any]:
        """Everything that calibration.json holds of the result."""
        started = time.perf_counter()
        path, everywhere = self._paths(goal)
        fixed = self._everywhere_of(fixed_settings(self.loops) if self.task else [exits.Fixed(k) for k in DEPTHS if k < self.loops])
        if (limit := goal.limit) is not None:
            self.delta_each = self.delta / (2 if path is everywhere else 3)  # a path that stands for two is tested once
            paths = ((path, "a threshold for each group"), (everywhere, "one threshold for all groups"), (fixed, "fixed depths"))
            own, *others = (self._certify(p, limit, words) for p, words in paths)
        else:
            own, *others = (self._meets(p, goal, must=p is path) for p in (path, everywhere, fixed))
        chosen, single, depth = (next((c for c in reversed(found) if c.passed), None) for found in (own, *others))
        tested = dict(zip(("calibrated", "single", "fixed"), (own, *others), strict=True))
        result: dict[str, Any] = {
            "version": CALIBRATION_VERSION,
            "rule": exits.name_of(self.rule),
            "rules": [self._word(chosen, g) for g in self.groups],
            "loops": self.loops,
            "mean_loops": self.model.config.mean_loops,
            "groups": [format_groups((layers,)) for layers in self.model.config.groups],
            "goal": {key: value for key, value in vars(goal).items() if value is not None},
            "delta": self.delta,
            "delta_each": self.delta_each,
            "bound": chosen.bound if chosen is not None else 0.0,
            "tested": {name: [self._tested(c, name) for c in found] for name, found in tested.items()},
            "tokens": {name: text.n_asked for name, text in vars(self.texts).items()},
            "clusters": {name: text.n_clusters for name, text in vars(self.texts).items()},
            "by": {name: text.by for name, text in vars(self.texts).items()},
            "window_fingerprints": {name: text.window_fingerprints for name, text in vars(self.texts).items()},
        }
        if isinstance(self.rule, exits.Learned):
            result["heads"] = [list(head) for head in self.rule.heads]  # certified with these, whatever controller.json becomes
        return result | self._compare(chosen, single, depth) | {"seconds": round(time.perf_counter() - started, 1)}

    def _tested(self, found: Certified, path: str) -> dict[str, Any]:
        """One setting of a path as calibration.json has it: `rules`, one for each group, or the one `rule` of all."""
        words = [self._word(found, g) for g in self.groups]
        named = {"rules": words} if path == "calibrated" else {"rule": words[0]}
        return named | {"bound": found.bound, "passed": found.passed}

    def _word(self, certified: Certified | None, group: int) -> str | None:
        """A group's rule as the command line writes it; the weights of a learned one are under `heads`."""
        rule = None if certified is None else certified.setting.get(group)
        return None if rule is None else exits.spell(rule)

    def _at(self, tau: float) -> exits.Rule:
        return at_threshold(self.rule, tau)

    def _costs(self, part: str, found: Evaluation) -> np.ndarray:
        """Of every token that is asked: the rise of its loss, or on a task the drop of accuracy."""
        text, full = getattr(self.texts, part), self.full[part]
        return accuracy_drop(text, found, full) if self.task else (found.losses - full.losses)[text.asked].numpy()

    # -- fit -----------------------------------------------------------------------------------------------------

    def _paths(self, goal: Goal) -> tuple[list[Setting], list[Setting]]:
        """The settings to test: a threshold for each group, and one for all; most steps first."""
        if not self.task:
            grids = self._grids()
            return self._path(grids), self._everywhere(grids)
        settings, limit = rule_settings(self.model, self.texts.fit, self.rule, self.loops), goal.limit
        if limit is None:
            everywhere = self._everywhere_of(curve(settings))
        else:
            place = boundary(settings, lambda rule: float(self._costs("fit", self._evaluate("fit", rule)).mean()) <= limit)
            everywhere = self._everywhere_of(path_around(settings, place))
        several = len(self.groups) > 1 and main_setting(type(self.rule)) != "hits"
        return self._path(self._grids()) if several else everywhere, everywhere

    def _evaluate(self, part: str, exit: exits.Exit) -> Evaluation:
        return evaluate(self.model, getattr(self.texts, part), exit, self.loops)

    def _everywhere_of(self, rules: Sequence[exits.Rule]) -> list[Setting]:
        return [dict.fromkeys(self.groups, rule) for rule in rules]

    def _grids(self) -> list[list[float]]:
        """For each group the thresholds worth trying, most steps first."""
        targets = tuple(float(s) for s in STEPS if s < self.loops)
        grids = [[tau for tau, _ in thresholds(self.rule, values[..., 0], targets)] for values in self.seen]
        if not all(grids):
            raise UserError(f"{type(self.rule).__name__} has nothing to compare in a group: give it more loops")
        return grids

    def _path(self, grids: list[list[float]]) -> list[Setting]:
        """The settings for each price, from what each group costs alone."""
        costs = []
        for g, grid in enumerate(grids):
            options = [(float(self.loops), 0.0)]
            for tau in grid:
                found = evaluate(self.model, self.texts.fit, {g: self._at(tau)}, self.loops)
                steps = found.steps[self.texts.fit.asked][..., g].double().mean()
                options.append((float(steps), float(self._costs("fit", found).mean())))
            order = sorted(range(len(options)), key=lambda j: -options[j][0])
            costs.append([options[j] for j in order])
            grids[g] = [grid[j - 1] for j in order if j]
            self.say(f"fit: {group_label(g, self.model.config.groups[g])}, {plural(len(grid), 'threshold')} tried")
        c = self.model.config
        work = [step_flops(c, g, self.texts.fit.ids.shape[1] // 2) for g in self.groups]
        return [
            {g: self._at(grids[g][j - 1]) for g, j in enumerate(choice) if j}
            for choice in best_path(costs, [w / sum(work) * len(work) for w in work])
        ]

    def _everywhere(self, grids: list[list[float]]) -> list[Setting]:
        """The same threshold for all groups, most steps first."""
        taus = sorted({tau for grid in grids for tau in grid})
        if len(taus) > LONGEST:
            taus = [taus[round(i * (len(taus) - 1) / (LONGEST - 1))] for i in range(LONGEST)]
        steps = {tau: sum(float(exit_steps(self._at(tau), v[..., 0]).double().mean()) for v in self.seen) for tau in taus}
        return [dict.fromkeys(self.groups, self._at(tau)) for tau in sorted(taus, key=lambda tau: -steps[tau])]

    # -- certify -------------------------------------------------------------------------------------------------

    def _bound(self, setting: Setting) -> float:
        found, text = self._evaluate("certify", dict(setting)), self.texts.certify
        if self.task:
            return drop_bound(text, found, self.full["certify"], self.delta_each)
        return upper_bound(self._costs("certify", found), text.clusters[text.asked].numpy(), self.delta_each)

    def _certify(self, path: list[Setting], limit: float, words: str) -> list[Certified]:
        tested = fixed_sequence(path, self._bound, limit)
        passed = sum(c.passed for c in tested)
        self.say(f"certify, {words}: {certified_words(passed, len(path), limit, self.task)}")
        return tested

    def _meets(self, path: list[Setting], goal: Goal, must: bool) -> list[Certified]:
        """The first setting of the path that is as quick as asked, with the bound that holds for it. Where none is: an error, or an empty
        list if there need not be one."""
        if goal.ms is not None:
            timer = LatencyTimer(self.model, {REFERENCE: None, **{str(i): dict(s) for i, s in enumerate(path)}}, self.loops, self.texts.fit)
            rounds = [timer.round(r, list(timer.params)) for r in range(4)][1:]
            costs = [float(np.median([r[str(i)] for r in rounds])) for i in range(len(path))]
            limit, unit = goal.ms, "ms a token"
        else:
            assert goal.mean_steps is not None
            costs = [float(self._evaluate("fit", dict(s)).steps[self.texts.fit.asked].double().mean()) for s in path]
            limit, unit = goal.mean_steps, "steps"
        for setting, cost in zip(path, costs, strict=True):
            if cost <= limit:
                self.say(f"{cost:.3g} {unit} on the text that was fitted on")
                return [Certified(setting, self._bound(setting), True)]
        if not must:
            return []
        raise UserError(f"no setting of the rule gets below {limit:g} {unit}: the quickest takes {min(costs):.3g}")

    # -- report --------------------------------------------------------------------------------------------------

    def _compare(self, chosen: Certified | None, single: Certified | None, fixed: Certified | None) -> dict[str, Any]:
        """On documents that neither fitting nor certifying has seen: the result, the single threshold and the fixed depth that were
        certified in the same way, and the default depth; and how many steps and nats the result takes more than each of them."""
        text, full, default = self.texts.report, self.full["report"], self.model.config.mean_loops
        settings: dict[str, Setting | None] = {
            name: None if c is None else c.setting for name, c in (("calibrated", chosen), ("single", single), ("fixed", fixed))
        }
        if default <= self.loops:
            settings["default"] = dict.fromkeys(self.groups, exits.Fixed(default))
        found = {name: full if s is None else evaluate(self.model, text, dict(s), self.loops) for name, s in settings.items()}
        records: dict[str, Any] = {}
        for name, setting in settings.items():
            record = describe(self.model.config, text, found[name], full, None if setting is None else dict(setting))
            keys: tuple[str, ...] = ("ce", "dce", "dce_low", "dce_high", "agree", "mean_steps", "flops")
            if self.task:
                record |= depth_record(text, found[name], full)
                keys += ("accuracy", "accuracy_low", "accuracy_high", "drop", "drop_low", "drop_high", "spearman", "all_steps")
            records[name] = {key: record[key] for key in keys} | {"steps": [g["mean"] for g in record["steps"]]}
            if name != "calibrated":
                records[name]["rule"] = None if setting is None else self._word(Certified(setting, 0.0, True), 0)
        mine = found.pop("calibrated")
        records["differences"] = {name: self._difference(mine, other) for name, other in found.items()}
        if "default" in found:
            records["fixed"]["against_default"] = self._difference(found["fixed"], found["default"])
        return {"report": records}

    def _difference(self, mine: Evaluation, other: Evaluation) -> dict[str, float]:
        """Steps (mean over groups) and CE, on a task the accuracy, of one setting minus another's, token by token, with 95 % intervals over
        documents."""
        text, asked = self.texts.report, self.texts.report.asked
        clusters = text.clusters[asked].numpy()
        differences: dict[str, float] = {}
        pairs = [("steps", mine.steps.double().mean(dim=-1), other.steps.double().mean(dim=-1)), ("ce", mine.losses, other.losses)]
        if self.task:
            right = [(e.choices == text.targets).double() for e in (mine, other)]
            pairs.append(("accuracy", right[0], right[1]))
        for key, a, b in pairs:
            difference = (a - b)[asked].numpy()
            low, high = interval(difference, clusters)
            differences |= {key: float(difference.mean()), f"{key}_low": low, f"{key}_high": high}
        return differences
