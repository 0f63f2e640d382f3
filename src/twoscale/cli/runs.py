"""Which run a command means: a folder, or the bundled model, of which a run is made when it is first asked for."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from twoscale.cli.parse import say
from twoscale.config import UserError

BUNDLED = "bundled"
T = TypeVar("T")


def as_run(path: Path) -> Path:
    """The folder itself; for `bundled` runs/bundled, made once. A model that is no run is refused with a word on how to make one of it."""
    if str(path) != BUNDLED or path.is_dir():
        if (path / "config.json").exists() and not (path / "checkpoints").is_dir() and (path / "model.safetensors").exists():
            made = f"twoscale convert {path} --out runs/{path.resolve().name}"
            raise UserError(f"{path} is a model, not a run: make a run of it with `{made}`")
        return path
    from twoscale.interop.convert import convert, converted_from

    run = Path("runs") / BUNDLED
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not run.is_dir():
        raise UserError(f"there is no {run} yet: make it first, with `twoscale convert {BUNDLED} --out {run}`")
    if run.is_dir() and any(run.iterdir()):
        if not converted_from(run, BUNDLED):
            raise UserError(f"{run} is not of the bundled model of this version: move it away")
        return run
    say(f"the bundled model becomes a run: {run}")
    return convert(BUNDLED, run)


def on_run(args: T) -> T:
    """The arguments of a command with the run that they mean."""
    return replace(args, run=as_run(args.run))  # type: ignore[type-var, attr-defined]
