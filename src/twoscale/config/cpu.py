"""Cores that this process may use, and OpenMP's defaults for a machine that others use too. No torch here: it must not be loaded yet."""

import math
import os
import sys
from pathlib import Path

SPIN = "2000"  # turns that an OpenMP thread waits actively, some tens of microseconds; libgomp's own default is 300,000
_OMP_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "KMP_LIBRARY")


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup"), of_process: Path = Path("/proc/self/cgroup")) -> int:
    """Cores by affinity (taskset, cpusets), and no more than the CPU quota of the process's control groups, rounded up."""
    cores, quota = _affine_cores(), _quota(cgroup, of_process)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _affine_cores() -> int:
    """Cores by affinity alone, which is what OpenMP takes by itself: it knows no quotas."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def _quota(root: Path, of_process: Path) -> float | None:
    """The smallest quota among the process's control group and those above it, in cores; None where there is none."""
    try:
        lines = of_process.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "cpu" if controllers else root  # version 1 has a tree for each controller, version 2 one for all
        group = base / path.lstrip("/")
        # Inside a container the path may be the host's: then the root of what is mounted here is the container's own group.
        for folder in (group, *group.parents) if group.is_relative_to(base) else (base,):
            if not folder.is_relative_to(base):
                break
            quota = _read_quota(folder)
            if quota is not None:
                found.append(quota)
    return min(found, default=None)


def _read_quota(folder: Path) -> float | None:
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            words = " ".join((folder / name).read_text() for name in names).split()
            quota, period = float(words[0]), float(words[1])
        except (OSError, ValueError, IndexError):  # not there, or "max"
            continue
        if quota > 0 and period > 0:
            return quota / period
    return None


def set_openmp_defaults() -> None:
    """Let waiting OpenMP threads sleep soon, and start no more of them than there is CPU quota.

    They read these settings when torch is first loaded, so nothing is done after that. Settings of the user's own stay as they are.
    """
    if "torch" in sys.modules:
        return
    if not any(name in os.environ for name in _OMP_WAITING):
        os.environ["GOMP_SPINCOUNT"] = SPIN
    if "OMP_NUM_THREADS" not in os.environ and usable_cores() < _affine_cores():
        os.environ["OMP_NUM_THREADS"] = str(usable_cores())
