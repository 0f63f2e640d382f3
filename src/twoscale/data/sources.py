"""Documents out of files: .txt (split at lines `<|endoftext|>`), .jsonl, .parquet, each also as .gz or .xz where that
makes sense; folders of those; hf:OWNER/NAME streamed; the built-in corpus.

A reader yields one `str` a document, or None for one that it had to drop, and counts why.
"""

import gzip
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from twoscale.config import DataConfig, UserError, missing_package
from twoscale.data.builtin import builtin_documents

END_OF_TEXT = "<|endoftext|>"
SUFFIXES = (".txt", ".txt.gz", ".txt.xz", ".jsonl", ".jsonl.gz", ".jsonl.xz", ".parquet")
MOST_BAD = 0.01  # a document with a larger share of undecodable characters is not text


class Documents:
    """The documents of one source, in a fixed order. `counts` says what was met on the way."""

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self.counts: Counter[str] = Counter()
        self.files = [] if _is_virtual(config.source) else find_files(config.source)

    def __iter__(self) -> Iterator[str | None]:
        config = self.config
        if config.source == "builtin":
            raw: Iterator[str | bytes] = builtin_documents()
        elif config.source.startswith("hf:"):
            raw = _hub(config)
        else:
            raw = (document for path in self.files for document in _read(path, config.text_column))
        for document in raw:
            yield self._clean(document)

    def _clean(self, document: str | bytes) -> str | None:
        """Text worth keeping, or None; either way it is counted."""
        self.counts["documents"] += 1
        raw = document if isinstance(document, bytes) else document.encode("utf-8", "surrogatepass")  # JSON can smuggle half characters in
        text = raw.decode("utf-8", errors="replace")
        if len(text) > 0 and text != document and "\ufffd" in text:
            if text.count("\ufffd") > MOST_BAD * len(text):
                self.counts["not_text"] += 1
                return None
            self.counts["bad_utf8"] += 1
        if not text.strip():
            self.counts["empty"] += 1
            return None
        return text

    def fingerprint(self) -> list[list[Any]]:
        """What would change if the input did: names and sizes of the files."""
        return [[str(path), path.stat().st_size] for path in self.files]


def _is_virtual(source: str) -> bool:
    return source == "builtin" or source.startswith("hf:")


def find_files(source: str) -> list[Path]:
    """The files of a path, sorted; refuses what cannot be read."""
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(f"{source} does not exist: give a file, a folder, hf:OWNER/NAME or builtin")
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(SUFFIXES))
        if not files:
            raise UserError(f"{source} holds no {', '.join(SUFFIXES)} file")
        return files
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"{source}: unknown kind of file, use one of {', '.join(SUFFIXES)}")
    return [path]


def _read(path: Path, column: str) -> Iterator[str | bytes]:
    try:
        if path.name.endswith(".parquet"):
            yield from _parquet(path, column)
        else:
            with _open(path) as f:
                yield from _jsonl(f, path, column) if ".jsonl" in path.suffixes else _text(f)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is truncated or not what its name says: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    with openers.get(path.suffix, open)(path, "rb") as f:
        yield f


def _text(f: IO[bytes]) -> Iterator[bytes]:
    """Documents end with a line that holds nothing but the marker; the last one may go without."""
    marker = END_OF_TEXT.encode()
    lines: list[bytes] = []
    for line in f:
        if line.strip() == marker:
            yield b"".join(lines)
            lines = []
        else:
            lines.append(line)
    if lines and b"".join(lines).strip():
        yield b"".join(lines)


def _jsonl(f: IO[bytes], path: Path, column: str) -> Iterator[str]:
    for number, line in enumerate(f, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, a number of five thousand digits
            raise UserError(f"{path}, line {number} is not JSON ({error}): mend or remove the line") from None
        if not isinstance(record, dict) or not isinstance(record.get(column), str):
            found = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            raise UserError(f"{path}, line {number} has no text under {column!r} (found: {found}): set --text-column")
        yield record[column]


def _parquet(path: Path, column: str) -> Iterator[bytes]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise missing_package("reading .parquet needs pyarrow", "data") from None
    try:
        with pq.ParquetFile(path) as table:
            names = table.schema_arrow.names
            if column not in names:
                raise UserError(f"{path} has no column {column!r} (found: {', '.join(names)}): set --text-column")
            for batch in table.iter_batches(batch_size=256, columns=[column]):
                values = batch.column(0)
                if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type) or pa.types.is_null(values.type)):
                    raise UserError(f"{path}: column {column!r} holds {values.type}, not text")
                for value in values.cast(pa.large_binary()).to_pylist():  # as bytes: parquet does not promise that they are UTF-8
                    yield value or b""
    except (pa.ArrowException, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is truncated or no parquet file: {first}") from None


def _hub(config: DataConfig) -> Iterator[str]:
    try:
        import datasets
    except ImportError:
        raise missing_package("streaming from the hub needs datasets", "data") from None
    name = config.source.removeprefix("hf:")
    try:
        stream = iter(datasets.load_dataset(name, config.subset, split="train", streaming=True))
        while (record := next(stream, None)) is not None:
            if not isinstance(record.get(config.text_column), str):
                raise UserError(
                    f"{config.source} has no text column {config.text_column!r} (found: {', '.join(record)}): set --text-column"
                )
            yield record[config.text_column]
    except UserError:
        raise
    except Exception as error:  # the hub's client raises many kinds; all of them mean that the stream ended here
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{config.source} could not be streamed ({first}): run the same command again to go on") from error
