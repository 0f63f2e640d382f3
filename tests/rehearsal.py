"""Two nodes on one machine: network namespaces joined by a cable where that is permitted, else two loopback addresses."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Node:
    """Where the processes of a node are started."""

    address: str
    interface: str
    prefix: tuple[str, ...] = ()

    def start(self, words: list[str], log: Path) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": self.interface, "OMP_NUM_THREADS": "1", "TWOSCALE_JOIN_SECONDS": "100"}
        with open(log, "ab") as out:
            return subprocess.Popen([*self.prefix, sys.executable, "-m", *words], env=environment, stdout=out, stderr=subprocess.STDOUT)


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Nodes that reach each other by their addresses alone."""
    names = [f"ts{os.getpid()}{side}" for side in "ab"]
    made = shutil.which("ip") is not None and os.geteuid() == 0 and all(_ip("netns", "add", name) for name in names)
    made = made and _ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
    try:
        if not made:
            yield Node("127.0.0.1", "lo"), Node("127.0.0.2", "lo")
            return
        for i, name in enumerate(names, start=1):
            assert _ip("-n", name, "address", "add", f"10.213.7.{i}/24", "dev", name)
            assert _ip("-n", name, "link", "set", name, "up") and _ip("-n", name, "link", "set", "lo", "up")
        first, second = (Node(f"10.213.7.{i}", name, ("ip", "netns", "exec", name)) for i, name in enumerate(names, start=1))
        yield first, second
    finally:
        for name in names:
            if shutil.which("ip") is not None:
                _ip("netns", "del", name)


def _ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True).returncode == 0


def kill_node(process: subprocess.Popen[bytes]) -> None:
    """kill -9 for a process and all that it started, as when the power goes."""
    found = [process.pid]
    for pid in found:
        with contextlib.suppress(OSError):
            found += [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
