"""Sweeps, calibrations and measurements with constructed numbers, for tests of what is said about them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from twoscale.config import presets
from twoscale.report.load import RunFiles
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


def a_setting(steps: float, rule: str | None = "", dce: float = 0.001, flops: float = 5e6) -> dict[str, Any]:
    record = {
        "ce": 2.0 + dce,
        "dce": dce,
        "dce_low": dce - 0.001,
        "dce_high": dce + 0.001,
        "mean_steps": steps,
        "steps": [steps],
        "flops": flops,
    }
    return record if rule == "" else record | {"rule": rule}


def a_test(rule: str, bound: float, limit: float = 0.005) -> dict[str, Any]:
    """A setting of a path that was tested."""
    return {"rule": rule, "bound": bound, "passed": bound <= limit}


def apart(value: float, width: float, key: str = "steps") -> dict[str, float]:
    return {key: value, f"{key}_low": value - width, f"{key}_high": value + width}


def a_calibration(**changes: Any) -> dict[str, Any]:
    """A calibration that takes 5.41 steps where a single threshold takes 5.47, fixed:5 takes 5 and the default 12; fixed:4 was tested and
    failed."""
    report = {
        "calibrated": a_setting(5.41), "single": a_setting(5.47, "acceleration:3.0"), "fixed": a_setting(5.0, "fixed:5"),
        "default": a_setting(12.0, "fixed:12", 0.0),
        "differences": {
            "single": apart(-0.06, 0.1) | apart(0.0, 0.001, "ce"), "fixed": apart(0.41, 0.1) | apart(0.0, 0.001, "ce"),
            "default": apart(-6.59, 0.1) | apart(0.0, 0.001, "ce"),
        },
    }  # fmt: skip
    found = {
        "checkpoint": "step-9", "rule": "acceleration", "rules": ["acceleration:2.0"], "loops": 30, "mean_loops": 12,
        "version": 2, "goal": {"max_dce": 0.005}, "delta": 0.05, "delta_each": 0.05 / 3, "bound": 0.0031,
        "tested": {
            "calibrated": [{"rules": ["acceleration:2.0"], "bound": 0.0031, "passed": True}],
            "single": [a_test("acceleration:3.0", 0.002), a_test("acceleration:1.0", 0.009)],
            "fixed": [a_test(f"fixed:{k}", 0.02 / k) for k in (24, 16, 12, 8, 6, 5)] + [a_test("fixed:4", 0.0062)],
        },
        "tokens": {"fit": 300, "certify": 900, "report": 800},
        "clusters": {"fit": 4, "certify": 11, "report": 10}, "by": dict.fromkeys(("fit", "certify", "report"), "documents"),
        "source": "builtin", "report": report,
    }  # fmt: skip
    for key, value in changes.items():
        if key in ("single", "fixed", "default", "calibrated"):
            report[key] = value
        elif key.startswith("d_"):
            report["differences"][key.removeprefix("d_")] = value  # type: ignore[index]
        else:
            found[key] = value
    return found


def an_old_calibration(equal: str | None, fewer: float = 24.59) -> dict[str, Any]:
    """As older versions wrote it: compared with the cheapest single threshold of no higher loss, `equal`; no fixed depth, no default."""
    found = a_calibration()
    r = found["report"]
    for key in ("mean_loops", "source", "version", "delta_each"):
        found.pop(key)
    found |= {"by": "documents", "tested": found["tested"]["calibrated"]}
    report = {"calibrated": r["calibrated"], "single": r["single"], "equal": a_setting(30.0 if equal is None else 5.47, equal)}
    found["report"] = report | {"fewer_steps": fewer, "fewer_low": fewer - 0.1, "fewer_high": fewer + 0.1, "beats_single": True}
    return found


def a_record(
    decay: Sequence[float | None] = (0.2, 0.2),
    cosines: Sequence[float | None] = (0.05, 0.05),
    drift: Sequence[float | None] = (5.0,),
    step: int = 100,
    steady: int = 5,
    **changes: Any,
) -> dict[str, Any]:
    """Two groups whose step norm at k = 10 is `decay` of that at k = 1, and whose cosines are +0.30 from k = `steady` to 20, except at
    k = 11, the tenth step from the end, where they lie `cosines` away; None: not measurable."""
    groups = []
    for name, share, move in zip(("4", "5-6"), decay, cosines, strict=True):
        norms = [9.0, 1.0, *[0.5] * 8, share] if share is not None else [9.0, 1.0]
        means = [0.8 if k < steady else 0.3 + (move or 0.0) * (k == 11) for k in range(1, 21)]
        counts = [100] * 20 if move is not None else [100] * 9 + [1] * 11
        groups.append({"name": name, "step_norm": {"mean": norms}, "step_cosine": {"mean": means, "count": counts}})
    boundaries = [{"from": "4", "to": "5-6", "dlr": {"settled_k1": {"mean": d}}} for d in drift]
    return {"step": step, "groups": groups, "boundaries": boundaries, **changes}


def a_run(**changes: Any) -> RunFiles:
    """A run of which only what is asked for was measured."""
    record = a_record(step=4300, trained_tokens=1_000, tokens=1024, source="builtin")
    for group in record["groups"]:
        group |= {"verdict": "settling", "verdict_shares": {"settling": 0.995}, "loops": 30}
    geometry = [a_record(step=0, source="text of its own"), record]
    config = replace(presets.tiny(), name="one")
    return RunFiles(Path("runs/one"), config, [], geometry, None, None, **changes)
