"""Atomic files: written aside, synced, renamed. What has its final name is whole."""

import contextlib
import hashlib
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
        sync(path.parent)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Indented JSON, atomically."""
    with atomic_write(path) as f:
        f.write((json.dumps(value, indent=1) + "\n").encode())


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk: a rename then survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
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


def fingerprint(weights: Path) -> str:
    """A short name for the content of a file."""
    digest = hashlib.sha256()
    with open(weights, "rb") as f:
        while piece := f.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()[:16]


def cpu_name() -> str:
    """What the system calls its processor; empty where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        return ""
