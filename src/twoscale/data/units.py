"""Files of a source as units of work: workers, on one node or several, encode whole files; `prepare` puts them into shards in order.

    OUT/.units/00012.tokens   the tokens of file number 12, all documents
    OUT/.units/00012.npy      (documents, 3) int64: tokens (-1: left out), bytes of text, kind; written last, so it vouches for the other

A worker claims a file by a lock that the kernel frees when the worker ends, however it ends. What is in a unit does not depend on who
made it. `python -m twoscale.data.units OUT` is one worker; `prepare` starts as many as it is told to.
"""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from twoscale.config import DataConfig, UserError
from twoscale.config.files import atomic_write, make_folder
from twoscale.config.lock import lock
from twoscale.data.encode import BATCH, DocumentEncoder
from twoscale.data.shards import token_dtype
from twoscale.data.sources import KINDS, Documents
from twoscale.data.tokenizer import Tokenizer

FOLDER = ".units"
BATCH_DOCUMENTS = 512
WAIT = 0.1  # seconds between two looks for a unit that another process makes


@dataclass(frozen=True)
class Encoded:
    """One document of a source."""

    ids: np.ndarray | None
    """Its tokens with the end of text behind them; None if it was left out, or is in a shard already."""
    text_bytes: int
    kind: str
    """One of `KINDS`."""


def encode_documents(texts: Iterator[tuple[str | None, str]], encoder: DocumentEncoder, skip: int = 0) -> Iterator[Encoded]:
    """Documents encoded in batches; the first `skip` ones are read and not encoded."""
    batch: list[tuple[str | None, str]] = []
    chars = 0
    for number, (text, kind) in enumerate(texts):
        if number < skip:
            yield Encoded(None, 0, kind)
            continue
        batch.append((text, kind))
        chars += len(text or "")
        if chars >= BATCH or len(batch) >= BATCH_DOCUMENTS:
            yield from _encode(batch, encoder)
            batch, chars = [], 0
    yield from _encode(batch, encoder)


def _encode(batch: list[tuple[str | None, str]], encoder: DocumentEncoder) -> Iterator[Encoded]:
    ids = iter(encoder([text for text, _ in batch if text is not None]))
    for text, kind in batch:
        yield Encoded(None, 0, kind) if text is None else Encoded(next(ids), len(text.encode()), kind)


class Units:
    """The units of one source, in a folder that workers share."""

    def __init__(self, config: DataConfig, out: Path, documents: Documents, tokenizer: Tokenizer) -> None:
        self.config, self.documents = config, documents
        self.folder = out / FOLDER
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.encoder = DocumentEncoder(tokenizer, self.dtype)

    def __len__(self) -> int:
        return len(self.documents.files)

    def index(self, number: int) -> Path:
        return self.folder / f"{number:05d}.npy"

    def tokens(self, number: int) -> Path:
        return self.folder / f"{number:05d}.tokens"

    def claim(self, number: int) -> bool:
        """Encode a file unless that was done, or another worker is at it; says whether it did."""
        if self.index(number).exists():
            return False
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(lock(self.folder, f"{number:05d}"))
            except UserError:
                return False
            if self.index(number).exists():
                return False
            self._make(number)
        return True

    def _make(self, number: int) -> None:
        rows = []
        with atomic_write(self.tokens(number)) as f:
            texts = self.documents.read(self.documents.files[number : number + 1])
            for document in encode_documents(texts, self.encoder):
                if document.ids is not None:
                    f.write(document.ids.data)
                rows.append((-1 if document.ids is None else len(document.ids), document.text_bytes, KINDS.index(document.kind)))
                if len(rows) % BATCH_DOCUMENTS == 0 and os.getppid() != PARENT:
                    raise SystemExit(1)  # whoever started this worker has gone
        with atomic_write(self.index(number)) as f:
            np.save(f, np.array(rows, dtype=np.int64).reshape(-1, 3))

    def read(self, number: int, skip: int = 0) -> Iterator[Encoded]:
        """The documents of a file, from its unit if there is one; the first `skip` ones without tokens."""
        rows = np.load(self.index(number), allow_pickle=False) if self.index(number).exists() else None
        if rows is None or (skip < len(rows) and not self.tokens(number).exists()):
            yield from encode_documents(self.documents.read(self.documents.files[number : number + 1]), self.encoder, skip)
            return
        with contextlib.ExitStack() as held:
            f: IO[bytes] | None = None
            for place, (length, text_bytes, kind) in enumerate(rows.tolist()):
                if place < skip or length < 0:
                    yield Encoded(None, 0, KINDS[kind])
                    continue
                if f is None:
                    f = held.enter_context(open(self.tokens(number), "rb"))
                    f.seek(int(rows[:place, 0].clip(min=0).sum()) * np.dtype(self.dtype).itemsize)
                ids = np.fromfile(f, dtype=self.dtype, count=length)
                if len(ids) < length:
                    raise UserError(f"{self.tokens(number)} is truncated: remove {self.folder} and run the same command again")
                yield Encoded(ids, text_bytes, KINDS[kind])

    def forget_tokens(self, number: int) -> None:
        """All of the unit's documents are in shards."""
        self.tokens(number).unlink(missing_ok=True)

    def remove(self) -> None:
        for path in self.folder.glob("*") if self.folder.exists() else ():
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()


class Workers:
    """Processes on this node that encode units, each on one core."""

    def __init__(self, out: Path, count: int) -> None:
        make_folder(out / FOLDER)
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "twoscale.data.units", str(out)]
        self.processes = [
            subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            for _ in range(count)
        ]

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait()
            if process.stderr is not None:
                process.stderr.close()

    def check(self) -> bool:
        """Whether one is still at work; an error where one has failed."""
        for process in self.processes:
            if process.poll() not in (None, 0):
                said = process.stderr.read().strip().splitlines() if process.stderr is not None else []
                if process.returncode == 2 and said:
                    raise UserError(said[-1])
                last = said[-1] if said else f"exit code {process.returncode}"
                raise UserError(
                    f"a worker has failed ({last}): run the same command again to go on, with fewer --workers if memory was short"
                )
        return any(process.poll() is None for process in self.processes)

    def wait_for(self, units: Units, number: int) -> None:
        """Return when the unit is there, or when nobody on this node is at work: the caller then reads the file itself."""
        while not units.index(number).exists() and self.check():
            time.sleep(WAIT)

    def wait(self) -> None:
        """Until no file is left for them."""
        while self.check():
            time.sleep(WAIT)


PARENT = os.getppid()


def work(out: Path) -> None:
    """Encode one file after another, as long as there is one that nobody has claimed."""
    from twoscale.data.prepare import prepared_config

    config = prepared_config(out)
    units = Units(config, out, Documents(config), Tokenizer.load(out))
    for number in range(len(units)):
        units.claim(number)


if __name__ == "__main__":
    try:
        work(Path(sys.argv[1]))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(2)
