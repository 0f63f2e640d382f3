"""Processes and their listening sockets, from Linux's /proc."""

import time
from collections.abc import Iterable
from pathlib import Path

LISTEN = "0A"  # state of a socket in /proc/net/tcp


def descendants(pid: int) -> set[int]:
    """All processes below a process."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended
            continue
    found, new = set[int](), {pid}
    while new := {child for child, parent in parents.items() if parent in new} - found:
        found |= new
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_ended(pids: Iterable[int], seconds: float) -> list[int]:
    """Those that are still alive after so many seconds."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def listening_addresses(pids: Iterable[int]) -> set[str]:
    """IP addresses on which processes listen, in hexadecimal as in /proc/net/tcp."""
    inodes = {link.readlink().name for pid in pids for link in _files(pid)}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def _files(pid: int) -> list[Path]:
    try:
        return [link for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    except OSError:
        return []
