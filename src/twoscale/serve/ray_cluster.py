"""Starts Ray on this machine, or connects to a cluster that runs already (the extra `ray`).

Ray reads most of its settings from the environment when it is imported, so nothing here imports it before `connected` does.
"""

import importlib.util
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from twoscale.config import UserError, missing_package

OBJECT_STORE_BYTES = 100 << 20  # messages are small: requests, and the tokens of responses
REACH_SECONDS, CHECK_SECONDS = 10.0, 40.0
MAX_ROOT = 40  # characters of the folder for temporary files: paths of Unix sockets have at most 107
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux too: all processes listen on 127.0.0.1 alone
    "RAY_AUTH_MODE": "token",  # Ray runs code that is sent to it: other users of this machine must not reach it
    "RAY_worker_niceness": "0",  # by default replicas would yield to every other program of the machine
    "RAY_gcs_rpc_server_reconnect_timeout_s": "20",  # until processes end when the first one was killed; 60 by default
    "RAY_ROTATION_MAX_BYTES": str(8 << 20),
    "RAY_ROTATION_BACKUP_COUNT": "1",
}


@contextmanager
def connected(cpus: float, gpus: int = 0, address: str = "") -> Iterator[None]:
    """Connect to the Ray cluster at `address`, or start Ray on this machine, for the time of the `with` block. At its end the connection is
    closed; the processes and files of a Ray that was started here are removed."""
    if importlib.util.find_spec("ray") is None:
        raise missing_package("--replicas needs Ray", "ray")
    if address:
        check_cluster(address)
    with tempfile.TemporaryDirectory(prefix="twoscale-ray-", dir=_temporary_root(), ignore_cleanup_errors=True) as folder:
        where = {"address": address} if address else _local_init_arguments(cpus, gpus, folder)
        import ray

        try:
            try:
                ray.init(**where, log_to_driver=False, logging_level="ERROR")
            except Exception as problem:  # of many kinds, by what is wrong with the cluster
                raise UserError(f"Ray does not start at {address or 'this machine'}: {_first_line(problem)}") from None
            yield
        finally:
            ray.shutdown()


def _local_init_arguments(cpus: float, gpus: int, folder: str) -> dict[str, Any]:
    """The arguments of ray.init for a Ray on this machine; also sets the environment variables from which it reads other settings."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    bounds = {"num_cpus": cpus, "num_gpus": gpus, "object_store_memory": OBJECT_STORE_BYTES}
    return {"address": "local", "include_dashboard": False, "_temp_dir": folder, **bounds}


def _temporary_root() -> str:
    root = tempfile.gettempdir()
    return root if len(root) <= MAX_ROOT else "/tmp"


def check_cluster(address: str) -> None:
    """UserError unless a Ray cluster answers at HOST:PORT, or `auto`, in less than a minute.

    A process of its own asks, because Ray may end the process that cannot connect.
    """
    advice = "start one with `ray start --head`, and give its HOST:PORT"
    host, _, port = address.rpartition(":")
    if address != "auto":
        if not host or not port.isdigit() or "/" in host:
            raise UserError(f"--ray-address {address}: write HOST:PORT, or auto")
        try:
            socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
        except (OSError, OverflowError) as problem:
            raise UserError(f"no Ray cluster at {address} ({problem}): {advice}") from None
    words = [sys.executable, "-m", "ray.scripts.scripts", "health-check", *([] if address == "auto" else ["--address", address])]
    try:
        found = subprocess.run(words, capture_output=True, timeout=CHECK_SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        found = False
    if not found:
        raise UserError(f"no Ray cluster of this version at {address}: {advice}")


def _first_line(problem: Exception) -> str:
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return lines[0] if lines else type(problem).__name__
