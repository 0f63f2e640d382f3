"""A lock on a folder: one command at a time writes there.

The kernel holds it (flock) for as long as the process lives, so a killed one leaves nothing to clean up; its file may stay and is taken
over. Where a file system has no locks, a warning says so and the command goes on.
"""

import contextlib
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

from twoscale.config.errors import UserError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

SUFFIX = ".lock"
PATIENCE = 60.0  # seconds to wait for a lock that is held for moments only; a stopped process must not hold up a training run for ever


class FolderInUse(UserError):
    """Another process has the lock."""


def is_lock(path: Path) -> bool:
    """Whether a file is one of these locks."""
    return path.name.startswith(".") and path.name.endswith(SUFFIX)


@contextlib.contextmanager
def lock(folder: Path, name: str, wait: bool = False) -> Iterator[None]:
    """Hold FOLDER/.NAME.lock. Where another process does: UserError that names it; with `wait` only after PATIENCE."""
    path = folder / f".{name}{SUFFIX}"
    held = _acquire(path, folder, name, wait)
    try:
        yield
    finally:
        if held is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)  # still locked: whoever opened it meanwhile sees that it is gone and tries again
            os.close(held)


def _acquire(path: Path, folder: Path, name: str, wait: bool) -> int | None:
    """The locked file; None where there is no lock to be had."""
    if fcntl is None:
        return None
    until = time.monotonic() + (PATIENCE if wait else 0.0)
    while True:
        try:
            found = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{folder} is no folder: give a run") from None
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror or error}") from None
        try:
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(found, path):  # removed by the process that held it before
                os.close(found)
                continue
            os.ftruncate(found, 0)
            os.write(found, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
            return found
        except BlockingIOError:
            holder = os.pread(found, 4096, 0)
            os.close(found)
            if time.monotonic() < until:
                time.sleep(0.05)
                continue
            raise FolderInUse(f"{folder} is in use by {_holder(holder, name)}: wait until that ends, or choose another folder") from None
        except OSError as error:
            os.close(found)
            warnings.warn(f"{folder} cannot be locked ({error.strerror or error}): see that no other command writes there", stacklevel=4)
            return None


def _is_at(found: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(found), path.stat())
    except FileNotFoundError:
        return False


def _holder(content: bytes, name: str) -> str:
    """Who holds a lock, in words."""
    try:
        about = json.loads(content)
        return f"another `{name}`, process {int(about['pid'])} on {about['host']}"
    except (ValueError, KeyError, TypeError):  # not written yet, or somebody else's file
        return f"another `{name}`"
