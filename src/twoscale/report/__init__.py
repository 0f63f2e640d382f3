"""Saved numbers become figures, verdicts and a page. Pure functions of the files; no torch.

The package can be called: `twoscale.report("runs/tiny")` is `report` of build.py, whether or not one of its modules was imported before.
"""

import importlib
import inspect
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twoscale.report.build import Report, RunReport, report

__all__ = ["Report", "RunReport", "report"]


def __getattr__(name: str) -> Any:
    """The public names, imported when first used: with them come matplotlib and plotly."""
    if name == "__signature__":  # of a call of the package
        return inspect.signature(_build().report)
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_build(), name)


def _build() -> Any:
    return importlib.import_module("twoscale.report.build")


class _CallablePackage(types.ModuleType):
    """`twoscale.report` is this package and the function of that name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _build().report(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
