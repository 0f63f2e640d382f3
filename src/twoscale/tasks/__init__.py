"""Tasks whose true depth is known: endless samples, each a pure function of (seed, sample number)."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twoscale.tasks.carry import Carry
    from twoscale.tasks.hops import Hops
    from twoscale.tasks.staircase import Staircase
    from twoscale.tasks.task import Batch, Task

_HOMES = {"Batch": "task", "Carry": "carry", "Hops": "hops", "Staircase": "staircase", "Task": "task"}
__all__ = ["Batch", "Carry", "Hops", "Staircase", "Task"]


def __getattr__(name: str) -> Any:
    """Imported when first used: reading a staircase needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'twoscale.tasks' has no attribute {name!r}")
    return getattr(importlib.import_module(f"twoscale.tasks.{_HOMES[name]}"), name)
