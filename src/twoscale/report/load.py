"""What a report is made of: the files of a run folder, read into one value. No torch here, and nothing is computed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twoscale.config import RunConfig, UserError
from twoscale.config.run_file import load_config
from twoscale.config.serial import read_json, read_jsonl
from twoscale.tradeoff.summary import CALIBRATION, SAMPLES, SWEEP, Sweep, read_calibration, read_sweep


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
    recipe: bool = True
    """Whether the config tells how the model was trained; a converted one's may not."""
    samples: dict[str, Any] | None = None
    """samples.json: texts that the model wrote with a rule, where they are of the checkpoint that was swept."""

    @property
    def last(self) -> dict[str, Any]:
        return self.geometry[-1]

    @property
    def names(self) -> list[str]:
        """The groups' names."""
        return [g["name"] for g in self.last["groups"]]

    @property
    def trained_by(self) -> str:
        """How the model was trained; every figure says it."""
        return f"{self.config.name}, {self.config.train.optimizer if self.recipe else 'made elsewhere'}, step {self.last['step']}"

    @property
    def training(self) -> str:
        """The same in a sentence."""
        if not self.recipe:
            return "made elsewhere (its training is not known here)"
        return f"trained with {self.config.train.optimizer} for {self.last['step']} steps ({self.last['trained_tokens']:,} tokens)"


def load_run(folder: Path) -> RunFiles:
    """Read a run folder; a clear word on what is missing and how to make it."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: give a run")
    config = load_config(folder)
    geometry = _lines(folder / "geometry.jsonl")
    if any(not {"step", "groups", "boundaries", "tokens"} <= set(record) for record in geometry):
        raise UserError(f"{folder / 'geometry.jsonl'} holds lines that are no measurements: remove them or measure again")
    for record in geometry:
        if not all(isinstance(value, int) for value in (record["step"], record["tokens"], *(g.get("loops") for g in record["groups"]))):
            raise UserError(f"{folder / 'geometry.jsonl'} holds lines that are no measurements: remove them or measure again")
    if not geometry:
        raise UserError(f"{folder} has no geometry.jsonl: run `twoscale trace {folder}` first")
    sweep, calibration = read_sweep(folder / SWEEP, config.model.mean_loops), read_calibration(folder / CALIBRATION)
    if sweep is not None and calibration is not None and calibration.get("weights") != sweep.header.get("weights"):
        calibration = None  # of another checkpoint than what the page shows
    return RunFiles(
        folder,
        config,
        read_jsonl(folder / "metrics.jsonl"),
        sorted(geometry, key=lambda r: r["step"]),
        _optional(folder / "trace" / "sequence.json"),
        _optional(folder / "evaluation.json"),
        sweep,
        calibration,
        (_optional(folder / "source.json") or {}).get("recipe", True) is True,
        _samples(folder, sweep),
    )


def _samples(folder: Path, sweep: Sweep | None) -> dict[str, Any] | None:
    found = _optional(folder / SAMPLES)
    fits = isinstance(found, dict) and sweep is not None and found.get("weights") == sweep.header.get("weights")
    return found if fits else None


def _optional(path: Path) -> dict[str, Any] | None:
    return read_json(path) if path.exists() else None


def _lines(path: Path) -> list[dict[str, Any]]:
    """Every line of a file that is only ever written whole: a bad one is no cut, but damage."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else [], start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            raise UserError(f"{path}, line {number} is not JSON: remove the line or measure again") from None
    return records
