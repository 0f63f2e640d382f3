"""Atomic files: written aside, synced, renamed. What has its final name is whole."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from twoscale.config import UserError


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A binary file that appears under its name only when the block ends well."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(aside, path)
        sync_folder(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Indented JSON, atomically."""
    with atomic_write(path) as f:
        f.write((json.dumps(value, indent=1) + "\n").encode())


def sync_folder(folder: Path) -> None:
    """Make a rename in that folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> Path:
    """Create a folder with its parents; a clear word where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the folder {path}: {error.strerror or error}") from None
    return path
