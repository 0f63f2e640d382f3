"""The staircase of a model on a task: its accuracy by true depth and by loop steps. A value and its file; nothing here needs torch."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from twoscale.config import UserError
from twoscale.config.files import write_json
from twoscale.config.run_folder import RunFolder
from twoscale.config.serial import from_dict, read_json, to_dict

VERSION = 1


@dataclass(frozen=True)
class Staircase:
    """Accuracy of answers by true depth and by steps; entry k - 1 of a list over steps is at k steps in every group."""

    task: str
    """Name of the task."""
    step: int
    """Training steps of the model that was measured."""
    samples: int
    """Held-out samples."""
    seed: int
    """Seed of the samples."""
    depths: tuple[int, ...]
    """True depths that occurred, ascending."""
    count: tuple[int, ...]
    """Answers of each depth."""
    accuracy: tuple[tuple[float, ...], ...]
    """For each depth, the share of right answers after 1, 2, ... steps."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the task."""

    def __post_init__(self) -> None:
        assert len(self.depths) == len(self.count) == len(self.accuracy)
        assert len({len(row) for row in self.accuracy}) == 1

    @property
    def loops(self) -> int:
        """The most steps that were measured."""
        return len(self.accuracy[0])

    @property
    def overall(self) -> tuple[float, ...]:
        """The share of right answers over all depths, after 1, 2, ... steps."""
        total = sum(self.count)
        return tuple(sum(n * row[k] for n, row in zip(self.count, self.accuracy, strict=True)) / total for k in range(self.loops))

    def needed(self, accuracy: float) -> tuple[int | None, ...]:
        """For each depth the fewest steps from which on this accuracy is held; None where the last step misses it."""
        found: list[int | None] = []
        for row in self.accuracy:
            below = [k for k, value in enumerate(row, start=1) if value < accuracy]
            first = max(below, default=0) + 1
            found.append(first if first <= len(row) else None)
        return tuple(found)

    def table(self) -> str:
        """Percent right, one line a true depth, one column a number of steps."""
        rows = [("all", sum(self.count), self.overall)]
        rows += [(str(d), n, row) for d, n, row in zip(self.depths, self.count, self.accuracy, strict=True)]
        head = "depth  answers" + "".join(f"{k:>6}" for k in range(1, self.loops + 1)) + "  steps"
        return "\n".join([head, *(f"{d:>5}{n:>9}" + "".join(f"{100 * v:6.1f}" for v in row) for d, n, row in rows)])

    def save(self, folder: Path) -> None:
        write_json(RunFolder(folder).staircase, {"version": VERSION, **to_dict(self)})


def load_staircase(folder: Path) -> Staircase | None:
    """The staircase of a run; None where it has none."""
    path = RunFolder(folder).staircase
    if not path.exists():
        return None
    found = read_json(path)
    if not isinstance(found, dict) or found.pop("version", None) != VERSION:
        raise UserError(
            f"{path} is not of version {VERSION}, the one that this program reads: measure it again with `twoscale train --resume`"
        )
    settings = found.pop("settings", None)
    if not isinstance(settings, dict):
        raise UserError(f"{path}: settings = {settings!r} is no object: measure it again with `twoscale train --resume`")
    return replace(from_dict(Staircase, found, str(path)), settings=settings)
