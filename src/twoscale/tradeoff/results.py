"""What the commands find, as values: held-out loss, a calibration, tasks of the lm-evaluation-harness. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from twoscale.config.show import data_frame


@dataclass(frozen=True, repr=False)
class HeldOutLoss:
    """`twoscale.evaluate`: what a model loses on held-out text, at fixed loops or with an exit rule."""

    checkpoint: str
    tokens: int
    bytes: int
    """Bytes of text that the tokens stand for."""
    windows: int
    source: str
    """Where the text came from."""
    exit: str | None
    """The exit rule as the command line writes it; None: all loops."""
    loops: list[int]
    """The most steps, for each group."""
    ce: float
    """Mean cross-entropy, nats a token."""
    ce_low: float
    ce_high: float
    """A 95 % interval of `ce`."""
    ppl: float
    bits_per_byte: float
    steps: list[float]
    """Mean steps, for each group."""

    def __repr__(self) -> str:
        steps = ", ".join(f"{mean:.2f} of {limit}" for mean, limit in zip(self.steps, self.loops, strict=True))
        return (
            f"HeldOutLoss({self.checkpoint}, exit {self.exit or 'none'}: "
            f"{self.ce:.4f} nats a token [{self.ce_low:.4f}, {self.ce_high:.4f}], "
            f"{self.bits_per_byte:.4f} bits per byte, steps {steps}; {self.tokens:,} tokens of {self.source})"
        )


@dataclass(frozen=True, repr=False)
class Calibration:
    """`twoscale.calibrate`: a threshold for each group, and what it costs."""

    record: dict[str, Any]
    """All that calibration.json holds (docs/formats.md)."""
    exit: Mapping[int, Any]
    """The rules, group by group, for `generate(exit=...)`; a group without one takes all its loops."""

    @property
    def loops(self) -> int:
        """The most steps, for `generate(loops=...)`."""
        return int(self.record["loops"])

    @property
    def rules(self) -> list[str | None]:
        """The rule of each group as the command line writes it; None: all loops."""
        return list(self.record["rules"])

    @property
    def bound(self) -> float:
        """The loss rises by no more than this many nats a token (on a task: the accuracy drops by no more than this), but with
        a chance of `record["delta"]`."""
        return float(self.record["bound"])

    @property
    def mean_steps(self) -> float:
        """Steps a group on text that was neither fitted nor certified on."""
        return float(self.record["report"]["calibrated"]["mean_steps"])

    def to_pandas(self) -> Any:
        """A row for each setting that was compared on unseen text: the calibrated one, one threshold for all groups, a fixed depth, and the
        default depth."""
        settings = {name: values for name, values in self.record["report"].items() if name != "differences"}
        return data_frame([{"setting": name} | by_group(values) for name, values in settings.items()])

    def __repr__(self) -> str:
        rules = ", ".join(rule or "all loops" for rule in self.rules)
        if self.record.get("task") is not None:
            return (
                f"Calibration({self.record['checkpoint']}, at most {self.loops} loops: {rules}; {self.mean_steps:.2f} steps an answer, "
                f"accuracy drops by at most {100 * self.bound:.2f} points)"
            )
        return (
            f"Calibration({self.record['checkpoint']}, at most {self.loops} loops: {rules}; {self.mean_steps:.2f} steps a group, "
            f"CE rises by at most {self.bound:.4f} nats)"
        )


@dataclass(frozen=True, repr=False)
class TaskScores:
    """`twoscale.evaluate_tasks`: what tasks of the lm-evaluation-harness report."""

    model: str
    exit: str | None
    loops: list[int]
    num_fewshot: int | None
    batch_size: int
    limit: int | None
    results: dict[str, dict[str, float]]
    """For each task its numbers by name; NAME_stderr is the standard error of NAME."""
    tokens: int
    mean_steps: list[float]
    """Steps in each group, over all tokens that were read."""

    def to_pandas(self) -> Any:
        """A row for each number that a task reports."""
        rows = [
            {"task": task, "metric": name, "value": value, "stderr": numbers.get(f"{name}_stderr")}
            for task, numbers in self.results.items()
            for name, value in numbers.items()
            if not name.endswith("_stderr")
        ]
        return data_frame(rows)

    def __repr__(self) -> str:
        steps = ", ".join(f"{mean:.2f} of {limit}" for mean, limit in zip(self.mean_steps, self.loops, strict=True))
        return f"TaskScores({self.model}, exit {self.exit or 'none'}: {', '.join(self.results)}; steps {steps})"


def by_group(values: Mapping[str, Any]) -> dict[str, Any]:
    """A record as a row: its steps become a column for each group, other lists and tables are left out."""
    row: dict[str, Any] = {}
    for name, value in values.items():
        if name == "steps":
            row |= {f"steps_{g + 1}": steps["mean"] if isinstance(steps, dict) else steps for g, steps in enumerate(value)}
        elif not isinstance(value, list | dict):
            row[name] = value
    return row


def settings_tested(calibration: Mapping[str, Any], path: str) -> list[dict[str, Any]] | None:
    """The settings of a path (`calibrated`, `single` or `fixed`) that a calibration tested, in order, each with its bound and whether it
    passed; None where the file does not say: earlier versions have the first path alone."""
    tested = calibration.get("tested")
    if isinstance(tested, Mapping):
        return tested.get(path)
    return tested if path == "calibrated" else None
