"""Timing for benches: every figure is a ratio of medians, measured in one run, interleaved."""

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch


def timed(work: Callable[[], object], device: torch.device | None = None) -> float:
    """Seconds of one call; other devices than the CPU are waited for."""
    wait = device is not None and device.type != "cpu"
    if wait:
        torch.accelerator.synchronize(device)
    started = time.perf_counter()
    work()
    if wait:
        torch.accelerator.synchronize(device)
    return time.perf_counter() - started


def interleaved(
    works: Mapping[str, Callable[[], object]], repeats: int, warm: int = 2, device: torch.device | None = None
) -> dict[str, float]:
    """Median seconds of each, all of them called in turn so that a slow moment of the machine meets them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for i in range(warm + repeats):
        for name, work in works.items():
            spent = timed(work, device)
            if i >= warm:
                seconds[name].append(spent)
    return {name: median(values) for name, values in seconds.items()}
