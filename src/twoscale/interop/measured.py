"""Measurements that come with a model: made once, kept beside its weights in FOLDER/measured, and taken up by every run that is made of it.
The calibration among them is also FOLDER/calibration.json, which `exit="auto"` of the model itself takes.

They belong to weights, not to a name: about.json holds the fingerprint of the model's file and of the checkpoint that was measured, and
what does not fit is not taken. Times in them are of the machine that is named in the sweep's first line.
"""

import shutil
from pathlib import Path
from typing import Any

from twoscale.config import UserError
from twoscale.config.files import fingerprint, make_folder, write_json
from twoscale.config.run_folder import MODEL, RunFolder
from twoscale.config.serial import read_json, read_jsonl, read_steps
from twoscale.geometry.probe import write_record
from twoscale.tradeoff.load_run import name_checkpoint
from twoscale.tradeoff.summary import read_calibration, read_evaluation
from twoscale.train.checkpoint import find_checkpoint, read_progress

COMMAND = "twoscale reproduce --bundled-only"  # measures all of it


def pack(run: Path, folder: Path) -> Path:
    """Put what was measured of a run beside the weights of the model that the run was made of; returns the folder of the copies. The run's
    calibration also becomes the model's own."""
    checkpoint = find_checkpoint(run, None)
    about, mine = name_checkpoint(checkpoint), RunFolder(run)
    for path, weights in _weights(mine).items():
        if weights is None:
            raise UserError(f"{path} is missing: measure everything first, with `{COMMAND}`")
        if weights != about["weights"]:
            raise UserError(f"{path} is of other weights than {checkpoint}: measure again")
    step = read_progress(checkpoint).step
    record = next((r for r in read_steps(mine.geometry) if r["step"] == step and "limit" in r["groups"][0]), None)
    if record is None or not mine.sequence.exists():
        raise UserError(f"{run} was not traced: measure everything first, with `{COMMAND}`")
    place = make_folder(_place(folder).path)
    for source, copy in _pairs(mine, _place(folder)):
        make_folder(copy.parent)
        shutil.copyfile(source, copy)
    _place(folder).geometry.unlink(missing_ok=True)
    write_record(place, record)
    write_json(_about(folder), {"model": fingerprint(folder / MODEL), **about})
    write_calibration(mine, folder)
    return place


def write_calibration(run: RunFolder, folder: Path) -> None:
    """The calibration of a run as that of the model's own folder, by the fingerprint of its file there: `exit="auto"` of the model is then
    what the measurements say of it."""
    found = read_calibration(run.calibration)
    assert found is not None
    write_json(RunFolder(folder).calibration, found | name_checkpoint(folder))


def unpack(folder: Path, run: Path) -> bool:
    """Take the measurements of a model into a run that was made of it; False where there are none, or they are of other weights."""
    about = comes_with(folder)
    if about is None or about["weights"] != name_checkpoint(find_checkpoint(run, None))["weights"]:
        return False
    for copy, source in _pairs(RunFolder(run), _place(folder)):
        make_folder(copy.parent)
        shutil.copyfile(source, copy)
    for record in read_steps(_place(folder).geometry):
        write_record(run, record)
    return True


def comes_with(folder: Path) -> dict[str, Any] | None:
    """What about.json says, where a model's measurements are there and of its weights; else None."""
    if not _about(folder).exists() or not (folder / MODEL).exists():
        return None
    about = read_json(_about(folder))
    return about if isinstance(about, dict) and about.get("model") == fingerprint(folder / MODEL) else None


def _place(folder: Path) -> RunFolder:
    return RunFolder(folder / "measured")


def _about(folder: Path) -> Path:
    return _place(folder).path / "about.json"


def _pairs(run: RunFolder, place: RunFolder) -> list[tuple[Path, Path]]:
    """The files that are copied: in the run, and beside the weights."""
    files = [(f.evaluation, f.calibration, f.sweep, f.samples, f.sequence) for f in (run, place)]
    return list(zip(*files, strict=True))


def _weights(run: RunFolder) -> dict[Path, str | None]:
    """Of which weights each file of a run is; None of one that is missing."""
    sweep, samples = read_jsonl(run.sweep), read_json(run.samples) if run.samples.exists() else {}
    records = {
        run.evaluation: read_evaluation(run.evaluation),
        run.calibration: read_calibration(run.calibration),
        run.sweep: sweep[0] if sweep else None,
        run.samples: samples if isinstance(samples, dict) else None,
    }
    return {path: None if record is None else record.get("weights") for path, record in records.items()}
