"""What a report is made of: the files of a run folder, read into one value. No torch here, and nothing is computed."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoscale.config import RunConfig, UserError
from twoscale.config.run_file import load_config
from twoscale.config.run_folder import RunFolder
from twoscale.config.serial import read_json, read_jsonl, read_steps
from twoscale.config.words import group_label, plural
from twoscale.tasks.staircase import Staircase, load_staircase
from twoscale.tradeoff.summary import Sweep, came_with_model, read_calibration_of, read_evaluation, read_sweep

OPTIMIZERS = {"muon": "Muon", "adamw": "AdamW"}
BUILTIN = "the language reference and the docstrings that ship with Python"  # what `builtin` stands for


@dataclass(frozen=True)
class RunFiles:
    """One run, as its files say."""

    folder: Path
    config: RunConfig
    metrics: list[dict[str, Any]]
    """Lines of metrics.jsonl."""
    geometry: list[dict[str, Any]]
    """Lines of geometry.jsonl, by step; never empty."""
    sequence: dict[str, Any] | None
    """trace/sequence.json: one sequence in full, where it was traced."""
    evaluation: dict[str, Any] | None
    """evaluation.json: held-out loss at several depths, where it was measured."""
    sweep: Sweep | None = None
    """sweep.jsonl, where there is one."""
    calibration: dict[str, Any] | None = None
    """calibration.json, where there is one."""
    samples: dict[str, Any] | None = None
    """samples.json: texts that the model wrote with a rule, where they are of the checkpoint that was swept."""
    recipe: bool = True
    """Whether the config tells how the model was trained; a converted one's may not."""
    converted: bool = False
    """Whether the model was trained elsewhere, on other text than it is measured on."""
    trained_on: str | None = None
    """What a converted model was trained on, where that is known."""
    same_kind: bool = False
    """Whether it is measured on text of the kind that it was trained on, which it did not see."""
    staircase: Staircase | None = None
    """staircase.json: accuracy by true depth and steps, in a run on a task."""
    shipped: bool = False
    """Whether its sweep came with the model and was not made in this folder."""
    depth: Sweep | None = None
    """sweep.jsonl of a run on a task; `sweep` is then None."""

    @property
    def last(self) -> dict[str, Any]:
        return self.geometry[-1]

    @property
    def names(self) -> list[str]:
        """The groups' layers: `5-6`."""
        return [g["name"] for g in self.last["groups"]]

    @property
    def labels(self) -> list[str]:
        """What the page and the figures call the groups: `group 2 (layers 5-6)`."""
        return [group_label(g, name) for g, name in enumerate(self.names)]

    @property
    def trained_by(self) -> str:
        """How the model was trained; every figure says it."""
        return f"{self.config.name}, {self.made_with}, step {self.last['step']}"

    @property
    def made_with(self) -> str:
        """The optimizer, where it is known."""
        return OPTIMIZERS[self.config.train.optimizer] if self.recipe else "made elsewhere"

    def loops_in_training(self, step: int) -> float | None:
        """The mean number of loops that training drew at a step; None where the training is not known."""
        return self.config.train.mean_loops(step, self.config.model.mean_loops) if self.recipe else None

    @property
    def text(self) -> str:
        """What the held-out text is of; with a word on the one in the package where `training` has none."""
        return self._source(self.last, explained=self.converted)

    def _source(self, record: dict[str, Any], explained: bool = True) -> str:
        """The text that a record was measured on."""
        if self.config.task != "none":
            return f"the task {self.config.task}"
        name = str(record.get("source") or Path(self.config.data.source).name)
        return f"builtin ({BUILTIN})" if name == "builtin" and explained else name

    @property
    def tokens(self) -> str:
        """What a token is."""
        if self.config.task != "none":
            return f"task {self.config.task}, vocabulary of {plural(self.config.model.vocab_size, 'token')}"
        return (
            "a token is a byte"
            if self.config.data.tokenizer == "bytes"
            else f"vocabulary of {plural(self.config.model.vocab_size, 'token')}"
        )

    @property
    def in_stages(self) -> bool:
        """Whether a model that was made elsewhere has seen more or fewer tokens than its steps of its batch have."""
        batch = self.config.train.batch_size * self.config.model.block_size
        return self.converted and bool(self.recipe) and self.last["trained_tokens"] != self.last["step"] * batch

    @property
    def training(self) -> str:
        """How the model was trained, in a sentence: optimizer, steps, tokens, and on which text."""
        if not self.recipe:
            return "made elsewhere (its training is not known here)"
        tokens = plural(self.last["trained_tokens"], "token")
        stages = ", in stages whose batches differed" if self.in_stages else ""
        words = f"trained with {self.made_with} for {plural(self.last['step'], 'step')} ({tokens}{stages})"
        if not self.converted or self.config.task != "none":
            return f"{words} on {self._source(self.geometry[0])}"
        where = f"on {self.trained_on}" if self.trained_on else "elsewhere"
        if self.same_kind:
            return f"{words} {where}, and measured on text of that kind that it has not seen"
        return f"{words} {where}, not on the text that it is measured on here"


def load_run(folder: Path) -> RunFiles:
    """Read a run folder; a clear word on what is missing and how to make it."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: give a run")
    config = load_config(folder)
    files = RunFolder(folder)
    geometry = read_geometry(files.geometry)
    if not geometry:
        raise UserError(f"{folder} has no {files.geometry.name}: run `twoscale trace {folder}` first")
    found = read_sweep(files.sweep, config.model.mean_loops)
    sweep, depth = (found, None) if found is None or found.task is None else (None, found)
    source = _optional(files.source) or {}
    return RunFiles(
        folder,
        config,
        _metrics(files.metrics),
        sorted(geometry, key=lambda r: r["step"]),
        _optional(files.sequence),
        read_evaluation(files.evaluation),
        sweep,
        read_calibration_of(folder, found),
        _samples(folder, sweep),
        recipe=source.get("recipe", True) is True,
        converted=bool(source),
        trained_on=on if isinstance(on := source.get("trained_on"), str) else None,
        same_kind=source.get("same_kind") is True,
        staircase=load_staircase(folder),
        shipped=came_with_model(folder),
        depth=depth,
    )


def _samples(folder: Path, sweep: Sweep | None) -> dict[str, Any] | None:
    found = _optional(RunFolder(folder).samples)
    fits = isinstance(found, dict) and sweep is not None and found.get("weights") == sweep.header.get("weights")
    return found if fits else None


def _optional(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    found = read_json(path)
    if not isinstance(found, dict):
        raise UserError(f"{path} holds {type(found).__name__}, not an object: remove it, and measure again")
    return found


def _metrics(path: Path) -> list[dict[str, Any]]:
    records = read_steps(path)
    for record in records:
        for key in ("loss", "val_loss", "tokens", "tokens_per_s", "geometry_s"):
            if not isinstance(record.get(key), int | float | None):
                raise UserError(f"{path}: step {record['step']} has {key} = {record[key]!r}, no number: remove the line")
    return records


def read_geometry(path: Path) -> list[dict[str, Any]]:
    """The measurements of a geometry.jsonl, a file that is only ever written whole."""
    records = read_jsonl(path)
    if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
        raise UserError(f"{path}: its last line is cut off: remove the line or measure again")
    if not all(_is_measurement(record) for record in records):
        raise UserError(f"{path} holds lines that are no measurements: remove them or measure again")
    return records


def _is_measurement(record: dict[str, Any]) -> bool:
    groups, boundaries = record.get("groups"), record.get("boundaries")
    return (
        all(type(record.get(key)) is int for key in ("step", "tokens"))
        and isinstance(groups, list)
        and isinstance(boundaries, list)
        and all(isinstance(group, dict) and _is_group(group) for group in groups)
        and all(isinstance(b, dict) and isinstance(b.get("dlr"), dict) and _numbers(b["dlr"]) for b in boundaries)
    )


def _is_group(group: dict[str, Any]) -> bool:
    words = {"name": str, "verdict": str, "layers": list, "loops": int}
    return all(isinstance(group.get(key), kind) for key, kind in words.items()) and all(
        isinstance(value, dict) and _numbers(value) for key, value in group.items() if key not in words
    )


def _numbers(value: Any) -> bool:
    """Whether all that a statistic holds are numbers, or None where nothing was counted."""
    if isinstance(value, dict):
        return all(_numbers(v) for v in value.values())
    return all(_numbers(v) for v in value) if isinstance(value, list) else isinstance(value, int | float | None)
