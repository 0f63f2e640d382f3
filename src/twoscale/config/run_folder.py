"""The folders of a run and of a checkpoint. Their files are named here and nowhere else; docs/formats.md says what is in them."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from twoscale.config.errors import UserError

BUNDLED = "bundled"  # names the text model in the package
IN_THE_PACKAGE = {BUNDLED: "bundled", "stories": "bundled", "hops": "bundled-hops"}
"""Models in the package, and the folder in runs/ that is made of each."""

# A folder with weights: a checkpoint, an export, a published model.
MODEL = "model.safetensors"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_SETTINGS = "tokenizer_config.json"
CARD = "README.md"
# A checkpoint has these as well.
OPTIMIZER = "optimizer.safetensors"
SHARDS = "shards.json"  # of a sharded one, in place of the two files of tensors
STATE = "state.json"
UNFINISHED = ".step-*.tmp"  # pattern of the names that checkpoints have while they are written


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run's files. None of them need exist."""

    path: Path

    @classmethod
    def of(cls, path: Path) -> "RunFolder":
        """The run that a folder belongs to: its own, or for a checkpoint the run that holds it."""
        inside = path.parent.name == cls(path).checkpoints.name and not cls(path).checkpoints.is_dir()
        return cls(path.parent.parent if inside else path)

    @property
    def is_run(self) -> bool:
        """Whether the folder has checkpoints, as a run has and a model alone has not."""
        return self.checkpoints.is_dir()

    # -- settings and data -----------------------------------------------------------------------------------------

    @property
    def config(self) -> Path:
        return self.path / CONFIG

    @property
    def tokenizer(self) -> Path:
        return self.path / TOKENIZER

    @property
    def data(self) -> Path:
        """Its own shards."""
        return self.path / "data"

    @property
    def data_dir(self) -> Path:
        """Where other shards are, if it was trained on others."""
        return self.path / "data_dir.json"

    @property
    def heldout(self) -> Path:
        """Of a model by itself: text files of the kind that it was trained on, which it did not see."""
        return self.path / "heldout"

    @property
    def prompts(self) -> Path:
        """Of a model by itself: prompts that suit it, a list of strings. The explorer offers them."""
        return self.path / "prompts.json"

    @property
    def source(self) -> Path:
        """The model that the run was converted from."""
        return self.path / "source.json"

    @property
    def task(self) -> Path:
        """The task that it is trained on, in place of text."""
        return self.path / "task.json"

    # -- training --------------------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / checkpoint_name(step)

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    # -- measurements ----------------------------------------------------------------------------------------------

    @property
    def geometry(self) -> Path:
        return self.path / "geometry.jsonl"

    @property
    def sequence(self) -> Path:
        """One traced sequence as the report shows it."""
        return self.path / "trace" / "sequence.json"

    @property
    def sequence_states(self) -> Path:
        """The `Trace` of that sequence."""
        return self.path / "trace" / "sequence.safetensors"

    @property
    def staircase(self) -> Path:
        """Accuracy on its task by true depth and loop steps."""
        return self.path / "staircase.json"

    @property
    def evaluation(self) -> Path:
        return self.path / "evaluation.json"

    @property
    def calibration(self) -> Path:
        return self.path / "calibration.json"

    @property
    def controller(self) -> Path:
        return self.path / "controller.json"

    @property
    def sweep(self) -> Path:
        return self.path / "sweep.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.json"

    # -- what is made from them ------------------------------------------------------------------------------------

    @property
    def report(self) -> "ReportFolder":
        return ReportFolder(self.path / "report")

    @property
    def export(self) -> Path:
        return self.path / "export"


@dataclass(frozen=True)
class ReportFolder:
    """Paths of a report's files: in its run's folder, or for several runs in a folder beside them."""

    path: Path

    @classmethod
    def of(cls, *runs: Path) -> "ReportFolder":
        """Where the report of these runs is written by default."""
        return RunFolder(runs[0] if len(runs) == 1 else runs[0].parent).report

    @property
    def page(self) -> Path:
        return self.path / "index.html"

    @property
    def runs(self) -> Path:
        """Which runs the page shows."""
        return self.path / "runs.json"

    def figures(self, number: int | None = None) -> Path:
        """The figures of the only run, or of one of several (from 1)."""
        folder = self.path / "figures"
        return folder if number is None else folder / f"run-{number}"


def check_run(folder: Path) -> Path:
    """The folder, unless it holds a model by itself: that is refused with a word on how to make a run of it."""
    if (folder / CONFIG).exists() and (folder / MODEL).exists() and not RunFolder(folder).is_run:
        command = f"twoscale convert {folder} --out runs/{folder.resolve().name}"
        raise UserError(f"{folder} is a model, not a run: make a run of it with `{command}`")
    return folder


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def checkpoint_step(name: str) -> int | None:
    """The step in a checkpoint's name; None for other names, such as those of unfinished checkpoints and of ones that were set aside."""
    found = re.fullmatch("step-([0-9]+)", name)
    return int(found[1]) if found else None


def unfinished_checkpoint(folder: Path) -> Path:
    """What a checkpoint is called while this process writes it."""
    return folder.with_name(f".{folder.name}.{os.getpid()}.tmp")


def old_checkpoint(folder: Path) -> Path:
    """What a checkpoint is called once training has gone on from an older one."""
    return folder.with_name(f"old-{folder.name}")


def free_name(path: Path, label: str) -> Path:
    """A name beside a file that nothing has yet: sweep-LABEL.jsonl, then sweep-LABEL-2.jsonl, and so on."""
    number, free = 1, path.with_name(f"{path.stem}-{label}{path.suffix}")
    while free.exists():
        number += 1
        free = path.with_name(f"{path.stem}-{label}-{number}{path.suffix}")
    return free
