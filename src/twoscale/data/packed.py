"""Compressed text as a stream of bytes. An .xz file says itself how much memory it takes to unpack; more than a bound is refused."""

import gzip
import io
import lzma
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

XZ_MEMORY = 256 << 20  # `xz -9` takes 65 MB
CHUNK = 1 << 16


@contextmanager
def open_packed(path: Path) -> Iterator[IO[bytes]]:
    """A file as bytes, unpacked if its last ending is .gz or .xz."""
    if path.suffix == ".gz":
        with gzip.open(path, "rb") as f:
            yield cast(IO[bytes], f)
    elif path.suffix == ".xz":
        with open(path, "rb") as raw, io.BufferedReader(_Xz(raw), CHUNK) as unpacked:
            yield cast(IO[bytes], unpacked)
    else:
        with open(path, "rb") as plain:
            yield plain


class _Xz(io.RawIOBase):
    """The content of one or more .xz streams. (`lzma.open` has no bound on memory.)"""

    def __init__(self, raw: IO[bytes]) -> None:
        self.raw, self.decoder = raw, lzma.LZMADecompressor(memlimit=XZ_MEMORY)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self.decoder.eof:
                rest = self.decoder.unused_data.lstrip(b"\0") or self._packed().lstrip(b"\0")  # streams may be padded with zeros
                if not rest:
                    return 0
                self.decoder = lzma.LZMADecompressor(memlimit=XZ_MEMORY)
            elif self.decoder.needs_input:
                rest = self._packed()
                if not rest:
                    raise EOFError("the file ends before its end-of-stream marker")
            else:
                rest = b""
            data = self.decoder.decompress(rest, len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)

    def _packed(self) -> bytes:
        return self.raw.read(CHUNK)
