"""Sweeps made of numbers alone, for the tests of what is said about them."""

from typing import Any

from twoscale.tradeoff.summary import Sweep

HEADER = {"loops": 30, "mean_loops": 12, "checkpoint": "step-1", "groups": 1, "tokens": 6144, "clusters": 23, "by": "pieces"}


def a_point(id: str, ms: tuple[float, float, float] | None, steps: float, dce: float = 0.0, **changes: Any) -> dict[str, Any]:
    """A point with (low, middle, high) ms a token; CE rises by `dce` +- 0.001; a step is a MFLOP, +- 1 %."""
    family = "full" if id == "full" else id.partition(":")[0]
    times = {} if ms is None else {"ms_low": ms[0], "ms": ms[1], "ms_high": ms[2]}
    return {
        "id": id, "family": family, "label": "", "setting": 0.0, "ce": 2 + dce, "ppl": 7.0, "dce": dce, "dce_low": dce - 0.001,
        "dce_high": dce + 0.001, "mean_steps": steps, "flops": 1e6 * steps, "flops_low": 0.99e6 * steps, "flops_high": 1.01e6 * steps,
        "flops_looks": 0.0, "agree": 1.0, "steps": [{"mean": steps, "std": 0.0, "histogram": [0, 1]}], **times, **changes,
    }  # fmt: skip


FULL, DEFAULT = a_point("full", (29.0, 30.0, 31.0), 30.0), a_point("fixed:12", (11.9, 12.0, 12.1), 12.0)


def a_sweep(*points: dict[str, Any], rounds: int = 3, **header: Any) -> Sweep:
    return Sweep(HEADER | header, [FULL, DEFAULT, *points], rounds)
