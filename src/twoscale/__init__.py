"""twoscale: looped (recurrent-depth) language models, the geometry of their loops, and early exit that saves time."""

import importlib
from typing import TYPE_CHECKING, Any

from twoscale.config.cpu import set_openmp_defaults
from twoscale.config.version import VERSION

if TYPE_CHECKING:
    from twoscale import exits, geometry
    from twoscale.api import calibrate, evaluate, evaluate_tasks, sweep
    from twoscale.config import DataConfig, ModelConfig, RunConfig, TrainConfig, UserError, presets
    from twoscale.engine import forward, generate
    from twoscale.interop.load import load
    from twoscale.model import LoopedGPT
    from twoscale.report import report
    from twoscale.tracing import trace

__version__ = VERSION

set_openmp_defaults()

# Public names and where they live; imported when first used, so that `twoscale --help` is quick.
_HOMES = {
    "DataConfig": "twoscale.config",
    "ModelConfig": "twoscale.config",
    "RunConfig": "twoscale.config",
    "TrainConfig": "twoscale.config",
    "UserError": "twoscale.config",
    "presets": "twoscale.config",
    "LoopedGPT": "twoscale.model",
    "calibrate": "twoscale.api",
    "evaluate": "twoscale.api",
    "evaluate_tasks": "twoscale.api",
    "sweep": "twoscale.api",
    "forward": "twoscale.engine",
    "generate": "twoscale.engine",
    "load": "twoscale.interop",
    "trace": "twoscale.tracing",
}

_PACKAGES = ("exits", "geometry", "report")  # `report` can be called

__all__ = [
    "DataConfig",
    "LoopedGPT",
    "ModelConfig",
    "RunConfig",
    "TrainConfig",
    "UserError",
    "calibrate",
    "evaluate",
    "evaluate_tasks",
    "exits",
    "forward",
    "generate",
    "geometry",
    "load",
    "presets",
    "report",
    "sweep",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES and name not in _PACKAGES:
        raise AttributeError(f"module 'twoscale' has no attribute {name!r}")
    if name == "presets":
        return importlib.import_module("twoscale.config.presets")
    if name in _PACKAGES:
        return importlib.import_module(f"twoscale.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
