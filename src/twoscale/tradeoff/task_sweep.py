"""`twoscale sweep` on a task: every rule with real exits, thresholds certified on samples of their own, beside fixed and true depths.

sweep.jsonl gets lines of three more kinds: `choice` (the setting of a rule with the fewest steps that was certified to keep the accuracy),
`comparison` (steps of one rule's choice minus another's, answer by answer) and `round` with the steps of the tokens that were timed.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from twoscale import exits
from twoscale.tradeoff.calibrate import fixed_sequence
from twoscale.tradeoff.depth import accuracy_drop, answer_clusters, answer_steps, drop_bound
from twoscale.tradeoff.depth_summary import PAIRS, depth_rows, is_geometry
from twoscale.tradeoff.evaluate import Evaluation, evaluate
from twoscale.tradeoff.heldout import HeldOut
from twoscale.tradeoff.latency import REFERENCE, LatencyTimer
from twoscale.tradeoff.points import Point, Seen, Table, as_random
from twoscale.tradeoff.stats import interval
from twoscale.tradeoff.summary import Sweep
from twoscale.tradeoff.sweep import Sweeper
from twoscale.tradeoff.task_points import Settings, answers_only, boundary, path_around, setting_point, task_points
from twoscale.train.metrics import ProgressLine

Key = tuple[str, str]  # family and scope (`all`: every token leaves by the rule, `answers`: the answers alone)


class TaskSweeper(Sweeper):
    """One sweep of one model on one task."""

    def certify_on(self, fit: HeldOut, certify: HeldOut, limit: float, delta: float) -> "TaskSweeper":
        """Settings are looked for on `fit` and certified on `certify` to lose no more than `limit` of the accuracy."""
        self.fit, self.certify, self.limit, self.delta = fit, certify, limit, delta
        self.header |= {"max_accuracy_drop": limit, "delta": delta, "fit": fit.fingerprint, "certify": certify.fingerprint}
        return self

    def run_task(self, families: Mapping[str, Settings], say: Callable[[str], None] = lambda text: None) -> Sweep:
        """Measure what the file does not have yet; returns all of it. `families` has the settings of every rule, most steps first."""
        lines = self._start(say)
        self.choices = {(c["family"], c["scope"]): c for c in lines if c.get("kind") == "choice"}
        self.full = self._depth(self.loops)
        seen = Seen(self.records, _no_table)
        points = task_points(self.text, self.loops, families)
        keys = [(family, scope) for family in families for scope in ("all", "answers") if (family, scope) != ("fixed", "answers")]
        line = None if self.quiet or not self.world.main else ProgressLine(0, len(points) + 3 * len(keys), "sweep")
        done = self._points(points, seen, line, 0)
        done = self._choose(keys, families, line, done)
        chosen = self._chosen_points(families)
        done = self._points([p for p in chosen if p.family != "random"], seen, line, done)
        self._points(chosen, seen, line, done)
        if line is not None:
            line.close()
        if self.world.main:
            self._compare(families, {c["id"] for c in lines if c.get("kind") == "comparison"})
            timed = {r["round"] for r in lines if r.get("kind") == "round"}
            if len(timed) < self.rounds:
                say("times are taken")
                self._time_choices(families, timed)
        self.world.barrier()
        return self._read()

    @property
    def _parts(self) -> dict[str, HeldOut]:
        return {"fit": self.fit, "certify": self.certify}

    # -- choices -------------------------------------------------------------------------------------------------

    def _choose(self, keys: list[Key], families: Mapping[str, Settings], line: ProgressLine | None, done: int) -> int:
        """For every rule the setting with the fewest steps that is certified: the fit part tells where to look, and settings near that
        place are tested on the certify part from most steps to fewest until one fails."""
        missing = [key for key in keys if key not in self.choices]
        full = {name: evaluate(self.model, text, None, self.loops) for name, text in self._parts.items()} if missing else {}

        def found(part: str, scope: str, rule: exits.Rule) -> tuple[HeldOut, Evaluation, Evaluation]:
            text = self._parts[part]
            exit = rule if scope == "all" else exits.AnswersOnly.of(rule, text.asked)
            return text, evaluate(self.model, text, exit, self.loops), full[part]

        def choose(key: Key) -> dict[str, Any]:
            family, scope = key
            settings = families[family]
            fixed = isinstance(settings[0], exits.Fixed)  # few: all are tested
            place = 0 if fixed else boundary(settings, lambda rule: float(accuracy_drop(*found("fit", scope, rule)).mean()) <= self.limit)
            path = path_around(settings, place)
            tested = fixed_sequence(
                [{0: rule} for rule in path], lambda s: drop_bound(*found("certify", scope, s[0]), self.delta), self.limit
            )
            best = next((c for c in reversed(tested) if c.passed), None)
            return {
                "kind": "choice", "family": family, "scope": scope, "id": None if best is None else exits.spell(best.setting[0]),
                "bound": None if best is None else best.bound, "tested": len(tested), "settings": len(path),
            }  # fmt: skip

        for key, choice in self._spread(missing, choose):
            self.choices[key] = choice
            done += 1
            if self.world.main:
                self._write(choice)
            if line is not None:
                line.update(done, f"certify {key[0]}")
        return done

    def _chosen(self, family: str, scope: str, families: Mapping[str, Settings]) -> exits.Rule | None:
        """The rule of a choice; None: all loops."""
        id = self.choices[family, scope]["id"]
        return next((rule for rule in families[family] if exits.spell(rule) == id), None)

    def _chosen_points(self, families: Mapping[str, Settings]) -> list[Point]:
        """The choices, and random exits with the mean steps of each."""
        points = []
        for family, scope in self.choices:
            rule = self._chosen(family, scope, families) if family in families else None
            if rule is None or family == "fixed":
                continue
            if scope == "answers":
                points.append(answers_only(family, rule, self.text))
            else:
                word = exits.spell(rule)
                points.append(setting_point(family, rule))
                points.append(Point(f"random~{word}", "random", None, as_random(word, self.loops)))
        return points

    def _compare(self, families: Mapping[str, Settings], known: set[str]) -> None:
        """Steps of one choice minus another's, answer by answer, with an interval over samples."""

        @cache
        def steps(family: str) -> Any:
            rule = self._chosen(family, "all", families)
            return answer_steps(self.text, self.full if rule is None else evaluate(self.model, self.text, rule, self.loops))

        clusters = answer_clusters(self.text)
        for a, b in PAIRS:
            if a in families and b in families and f"{a} - {b}" not in known:
                difference = steps(a) - steps(b)
                low, high = interval(difference, clusters)
                self._write(
                    {"kind": "comparison", "id": f"{a} - {b}", "a": a, "b": b, "steps": float(difference.mean()), "low": low, "high": high}
                )

    # -- times ---------------------------------------------------------------------------------------------------

    def _time_choices(self, families: Mapping[str, Settings], timed: set[int]) -> None:
        """Cached decoding of everything behind the first question: the best fixed depth, the best rule and the best geometry rule."""
        rows = [row for row in depth_rows(self._read()) if row.scope == "all" and row.id is not None and row.family in families]
        rules = [row for row in rows if row.family != "fixed"]
        best = [*rules[:1], *[row for row in rules if is_geometry(row.family)][:1], *[row for row in rows if row.family == "fixed"]]
        wanted = {str(row.id): self._chosen(row.family, "all", families) for row in best}
        first = self.text.first_asked
        timer = LatencyTimer(
            self.model, {REFERENCE: None, **wanted}, self.loops, self.text, prompt=first, tokens=self.text.ids.shape[1] - first
        )
        names = [REFERENCE, *wanted]
        timer.round(self.rounds, names)
        for r in (r for r in range(self.rounds) if r not in timed):
            ms = timer.round(r, names)
            self._write({"kind": "round", "round": r, "ms": ms, "steps": timer.steps})


def _no_table() -> Table:
    raise AssertionError("a task needs no table of losses")
