"""Token shards: one file = magic, header length, JSON header, then uint16 or uint32 tokens, memory-mapped.

| bytes      | what                                                                                          |
|------------|-----------------------------------------------------------------------------------------------|
| 0-7        | `TWOSCALE`                                                                                    |
| 8-15       | length n of the header, little-endian                                                         |
| 16-(16+n)  | JSON: version, dtype, tokens, crc32, split, documents, consumed, text_bytes; padded by spaces |
| then       | the tokens, little-endian, aligned to 64 bytes                                                |
"""

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from twoscale.config import UserError
from twoscale.config.files import atomic_write

MAGIC = b"TWOSCALE"
VERSION = 1
MAX_HEADER = 1 << 20


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


def open_shard(path: Path, check: bool = True) -> tuple[ShardHeader, np.ndarray]:
    """Header and memory-mapped tokens; a truncated, foreign or damaged file is refused."""
    try:
        with open(path, "rb") as f:
            head = f.read(16)
            length = int.from_bytes(head[8:], "little")
            if head[:8] != MAGIC or not 0 < length <= MAX_HEADER:
                raise UserError(f"{path} is no token shard")
            values: dict[str, Any] = json.loads(f.read(length))
        header = ShardHeader(**values)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} has a damaged header: prepare the data again") from None
    if header.version != VERSION or header.dtype not in ("uint16", "uint32"):
        raise UserError(f"{path} has version {header.version} and dtype {header.dtype}, this program reads version {VERSION}")
    expected = 16 + length + header.tokens * np.dtype(header.dtype).itemsize
    if path.stat().st_size != expected:
        raise UserError(f"{path} has {path.stat().st_size} bytes, {expected} were written: prepare the data again")
    if header.tokens == 0:
        return header, np.empty(0, header.dtype)
    tokens = np.memmap(path, dtype=header.dtype, mode="r", offset=16 + length, shape=(header.tokens,))
    if check and zlib.crc32(tokens.data) != header.crc32:
        raise UserError(f"{path} is damaged (its checksum differs): prepare the data again")
    return header, tokens
