"""Saved numbers become figures, verdicts and a page. Pure functions of the files; no torch.

The package can be called: `twoscale.report("runs/tiny")` writes the report, whether or not one of its modules was imported before.
"""

import importlib
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from twoscale.config import UserError
from twoscale.config.run_folder import BUNDLED, check_run


@dataclass(frozen=True)
class Report:
    """A page that was written."""

    path: Path
    """The page, index.html."""


def report(runs: str | Path | Sequence[str | Path], out: str | Path | None = None, progress: Callable[[str], None] | None = None) -> Report:
    """Figures, tables, the paper's claims and their verdicts on one page: in RUN/report, and for several runs in `report` beside the first.

    A run is its folder, or `bundled`. The page opens from disk and needs no network. `progress` is called with a line before each figure.
    """
    from twoscale.report.page import write_report  # with it come matplotlib and plotly

    named = [runs] if isinstance(runs, str | Path) else list(runs)
    if not named:
        raise UserError("name at least one run")
    folders = [_folder(run, progress) for run in named]
    return Report(write_report(*folders, out=None if out is None else Path(out), progress=progress or (lambda line: None)))


def _folder(run: str | Path, progress: Callable[[str], None] | None) -> Path:
    """The folder of a run; of the bundled model one is made, which takes torch and is done a layer above."""
    if str(run) == BUNDLED:
        return importlib.import_module("twoscale.interop.runs").as_run(run, progress)  # type: ignore[no-any-return]
    return check_run(Path(run))


class _CallablePackage(types.ModuleType):
    """`twoscale.report` is this package and the function of that name."""

    __call__ = staticmethod(report)


sys.modules[__name__].__class__ = _CallablePackage
