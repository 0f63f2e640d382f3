"""Which run a user means: a folder, or a model in the package, of which a run is made when it is first asked for."""

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar, cast

from twoscale.config import UserError
from twoscale.config.run_folder import BUNDLED, IN_THE_PACKAGE, check_run
from twoscale.interop.convert import convert, converted_from

P = ParamSpec("P")
R = TypeVar("R")


def as_run(path: str | Path, progress: Callable[[str], None] | None = None) -> Path:
    """The folder itself; for `bundled` runs/bundled and for `hops` runs/bundled-hops, made once. A model that is no run is refused with a
    word on how to make one of it."""
    folder, name = Path(path).expanduser(), str(path)
    if name not in IN_THE_PACKAGE or folder.is_dir():
        return check_run(folder)
    run = Path("runs") / IN_THE_PACKAGE[name]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not run.is_dir():
        raise UserError(f"there is no {run} yet: make it first, with `twoscale convert {name} --out {run}`")
    if run.is_dir() and any(run.iterdir()):
        if not converted_from(run, name):
            raise UserError(f"{run} is not of the bundled model of this version: move it away")
        return run
    if progress is not None:
        progress(f"the {name if name != BUNDLED else 'bundled'} model becomes a run: {run}")
    return convert(name, run)


def on_run(work: Callable[Concatenate[Path, P], R]) -> Callable[Concatenate[str | Path, P], R]:
    """A function of a run's folder as one that takes what `as_run` takes."""

    @functools.wraps(work)
    def called(run: str | Path, *args: P.args, **kwargs: P.kwargs) -> R:
        return work(as_run(run, kwargs.get("progress")), *args, **kwargs)  # type: ignore[arg-type]

    return cast(Callable[Concatenate[str | Path, P], R], called)
