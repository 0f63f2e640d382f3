"""Token shards: one file = magic, header length, JSON header, then uint16 or uint32 tokens.

| bytes      | what                                                                                          |
|------------|-----------------------------------------------------------------------------------------------|
| 0-7        | `TWOSCALE`                                                                                    |
| 8-15       | length n of the header, little-endian                                                         |
| 16-(16+n)  | JSON: version, dtype, tokens, crc32, split, documents, consumed, text_bytes; padded by spaces |
| then       | the tokens, little-endian, aligned to 64 bytes                                                |
"""

import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from twoscale.config import UserError
from twoscale.config.files import atomic_write
from twoscale.config.serial import from_dict

MAGIC = b"TWOSCALE"
VERSION = 1
MAX_HEADER = 1 << 20
CHECKED_AT_ONCE = 1 << 21  # tokens


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says of itself."""

    split: str
    dtype: str
    tokens: int
    crc32: int
    documents: int
    """Documents in this shard."""
    consumed: int
    """Documents of the source that were read when the shard was closed: where a killed `prepare` goes on."""
    text_bytes: int
    """UTF-8 bytes of the text in this shard, for bits per byte."""
    version: int = VERSION


def token_dtype(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_shard(path: Path, tokens: np.ndarray, split: str, documents: int, consumed: int, text_bytes: int) -> ShardHeader:
    """Write a shard atomically."""
    header = ShardHeader(split, str(tokens.dtype), len(tokens), zlib.crc32(tokens.data), documents, consumed, text_bytes)
    text = json.dumps(asdict(header)).encode()
    text += b" " * (-(16 + len(text)) % 64)
    with atomic_write(path) as f:
        f.write(MAGIC + len(text).to_bytes(8, "little") + text)
        f.write(tokens.data)
    return header


class Shard:
    """The tokens of one open shard, read from disk when asked for.

    Not memory-mapped: a page of a mapped file that was cut since is a SIGBUS, which ends the process without a word.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file and reads its header; what is truncated or no shard is refused."""
        self.path = path
        try:
            self.file = open(path, "rb", buffering=0)  # noqa: SIM115 (open as long as this object lives)
            self.header, self.offset = _read_header(self.file.read(16), self.file, path)
            found = os.fstat(self.file.fileno())
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from None
        self.dtype = np.dtype(self.header.dtype)
        self.written = (found.st_size, found.st_mtime_ns)
        expected = self.offset + self.header.tokens * self.dtype.itemsize
        if found.st_size != expected:
            raise UserError(f"{path} has {found.st_size} bytes, {expected} were written: prepare the data again")

    def __len__(self) -> int:
        return self.header.tokens

    def read(self, start: int, n: int) -> np.ndarray:
        """At most n tokens from position `start`; UserError if the file was written to since it was opened."""
        n = max(0, min(n, len(self) - start))
        first, size = self.offset + start * self.dtype.itemsize, n * self.dtype.itemsize
        parts, got = [], 0
        try:
            found = os.fstat(self.file.fileno())
            while got < size and (part := os.pread(self.file.fileno(), size - got, first + got)):  # one call reads 2 GB at most
                parts.append(part)
                got += len(part)
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror or error}") from None
        if got < size or (found.st_size, found.st_mtime_ns) != self.written:
            raise UserError(f"{self.path} was changed while it was in use: prepare the data again, then go on")
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), dtype=self.dtype)

    def check(self) -> "Shard":
        """Compare the tokens with their checksum."""
        crc = 0
        for start in range(0, len(self), CHECKED_AT_ONCE):
            crc = zlib.crc32(self.read(start, CHECKED_AT_ONCE).data, crc)
        if crc != self.header.crc32:
            raise UserError(f"{self.path} is damaged (its checksum differs): prepare the data again")
        return self


def _read_header(head: bytes, file: Any, path: Path) -> tuple[ShardHeader, int]:
    """A shard's header and where its tokens begin."""
    length = int.from_bytes(head[8:], "little")
    if head[:8] != MAGIC or not 0 < length <= MAX_HEADER:
        raise UserError(f"{path} is no token shard")
    try:
        header = from_dict(ShardHeader, json.loads(file.read(length)))
    except (ValueError, RecursionError):  # UserError is one
        raise UserError(f"{path} has a damaged header: prepare the data again") from None
    if header.version != VERSION or header.dtype not in ("uint16", "uint32") or header.tokens < 0:
        raise UserError(f"{path} has version {header.version} and dtype {header.dtype}, this program reads version {VERSION}")
    return header, 16 + length
