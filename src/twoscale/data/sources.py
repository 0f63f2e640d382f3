"""Documents out of files: .txt and .md (split at lines `<|endoftext|>`), .jsonl, .parquet, each also as .gz or .xz where that
makes sense; folders of those; hf:OWNER/NAME streamed; the built-in corpus.

A reader yields one `str` a document, or None for one that it had to drop, and says which kind it was. A document above the limit is refused
before it is read to its end, however small it is when compressed.
"""

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from twoscale.config import DataConfig, UserError, missing_package
from twoscale.data.builtin import builtin_documents
from twoscale.data.packed import open_packed

END_OF_TEXT = "<|endoftext|>"
TEXT, PACKED = (".txt", ".md", ".jsonl"), (".gz", ".xz")
SUFFIXES = (*(kind + packed for kind in TEXT for packed in ("", *PACKED)), ".parquet")
MAX_UNDECODABLE = 0.01  # a document with a larger share of undecodable characters is not text
JSON_SHARE = 8  # a line of JSON takes up to some twenty times its size when parsed
HASHED_WHOLE, SAMPLES, SAMPLE = 64 << 20, 64, 1 << 20  # bytes of a file that is hashed whole; of larger ones so many samples
KINDS = ("text", "bad_utf8", "empty", "not_text")  # of documents: as it is, mended, and two that are left out
PARQUET_ROWS, PARQUET_BYTES = 256, 256 << 20  # rows that are read at once, and bytes


class Documents:
    """The documents of one source, in a fixed order."""

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self.seen = 0
        self.limit = config.max_document_mb * 1_000_000
        self.files, self.skipped = ([], {}) if _is_virtual(config.source) else find_files(config.source)

    def __iter__(self) -> Iterator[str | None]:
        return (text for text, _ in self.read())

    def read(self, files: Sequence[Path] | None = None) -> Iterator[tuple[str | None, str]]:
        """Text (None: left out) and kind of every document; `files` are some of the source's."""
        config = self.config
        if config.source == "builtin":
            raw: Iterator[str | bytes] = builtin_documents()
        elif config.source.startswith("hf:"):
            raw = _hub(config)
        else:
            chosen = self.files if files is None else files
            raw = (document for path in chosen for document in _read(path, config.text_column, self.limit))
        for document in raw:
            yield self._clean(document)

    def _clean(self, document: str | bytes) -> tuple[str | None, str]:
        """Text worth keeping, or None; and its kind."""
        self.seen += 1
        if len(document) > self.limit:
            raise _too_long(self.config.source, f"document {self.seen}", self.limit)
        raw = document if isinstance(document, bytes) else document.encode("utf-8", "surrogatepass")  # JSON can smuggle half characters in
        text = raw.decode("utf-8", errors="replace")
        kind = "text"
        if len(text) > 0 and text != document and "\ufffd" in text:
            if text.count("\ufffd") > MAX_UNDECODABLE * len(text):
                return None, "not_text"
            kind = "bad_utf8"
        return (text, kind) if text.strip() else (None, "empty")

    def fingerprint(self) -> list[list[Any]]:
        """What would change if the input did: for every file its name, size, time of writing (None where it is hashed whole) and hash.

        A file above 64 MB is hashed in 64 samples of 1 MB, the first and the last included: another one of the same size and time that
        differs only between them is not noticed.
        """
        return [_fingerprint(path) for path in self.files]


def _is_virtual(source: str) -> bool:
    return source == "builtin" or source.startswith("hf:")


def find_files(source: str) -> tuple[list[Path], dict[str, list[int]]]:
    """The files of a path, sorted, and for each ending of others how many there are and their bytes; refuses what cannot be read."""
    path = Path(source).expanduser()
    if not path.exists():
        raise UserError(f"{source} does not exist: give a file, a folder, hf:OWNER/NAME or builtin")
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.is_file())
        files = [p for p in found if p.name.endswith(SUFFIXES)]
        if not files:
            raise UserError(f"{source} holds no {', '.join(SUFFIXES)} file")
        skipped: dict[str, list[int]] = {}
        for other in found:
            if not other.name.endswith(SUFFIXES):
                count = skipped.setdefault(other.suffix or "no ending", [0, 0])
                count[0], count[1] = count[0] + 1, count[1] + other.stat().st_size
        return files, skipped
    if not path.is_file():  # a pipe would wait for ever, a device may never end
        raise UserError(f"{source} is no regular file: write the text to a file first")
    if not path.name.endswith(SUFFIXES):
        raise UserError(f"{source}: unknown kind of file, use one of {', '.join(SUFFIXES)}")
    return [path], {}


def kind_of(path: Path) -> str:
    """The ending that says what a file holds: the last one, or the one before .gz and .xz."""
    name = path.name.removesuffix(path.suffix) if path.suffix in PACKED else path.name
    return next(kind for kind in (*TEXT, ".parquet") if name.endswith(kind))


def _fingerprint(path: Path) -> list[Any]:
    """Name, size, time of writing or None, and a hash of a file."""
    digest = hashlib.sha256()
    try:
        found = path.stat()
        whole = found.st_size <= HASHED_WHOLE
        places = range(0, found.st_size, SAMPLE) if whole else [i * (found.st_size - SAMPLE) // (SAMPLES - 1) for i in range(SAMPLES)]
        with open(path, "rb") as f:
            for place in places:
                f.seek(place)
                digest.update(f.read(SAMPLE))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    return [str(path), found.st_size, None if whole else found.st_mtime_ns, digest.hexdigest()[:32]]


def _too_long(source: object, what: str, limit: int) -> UserError:
    return UserError(
        f"{source}: {what} is longer than {limit / 1e6:g} MB: split it (in a .txt file by lines that hold {END_OF_TEXT} alone), "
        "or raise --max-document-mb"
    )


def _read(path: Path, column: str, limit: int) -> Iterator[str | bytes]:
    try:
        kind = kind_of(path)
        if kind == ".parquet":
            yield from _parquet(path, column)
        else:
            with open_packed(path) as f:
                yield from _jsonl(f, path, column, limit // JSON_SHARE) if kind == ".jsonl" else _text(f, path, limit)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path} is truncated or not what its name says: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def _text(f: IO[bytes], path: Path, limit: int) -> Iterator[bytes]:
    """Documents end with a line that holds nothing but the marker; the last one may go without."""
    marker, count = END_OF_TEXT.encode(), 1
    text = bytearray()
    while line := f.readline(limit + 1):
        if line.strip() == marker:
            yield bytes(text)
            text, count = bytearray(), count + 1
            continue
        text += line
        if len(text) > limit:
            raise _too_long(path, f"document {count}", limit)
    if text.strip():
        yield bytes(text)


def _jsonl(f: IO[bytes], path: Path, column: str, limit: int) -> Iterator[str]:
    number = 0
    while line := f.readline(limit + 1):
        number += 1
        if len(line) > limit:
            raise _too_long(path, f"line {number}", limit)
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
            held = table.schema_arrow.field(column).type
            if not (pa.types.is_string(held) or pa.types.is_large_string(held) or pa.types.is_null(held)):
                raise UserError(f"{path}: column {column!r} holds {held}, not text")
            for batch in table.iter_batches(batch_size=_parquet_rows(table, column), columns=[column]):
                for value in batch.column(0).cast(pa.large_binary()):  # as bytes: parquet does not promise that they are UTF-8
                    yield value.as_py() or b""
    except (pa.ArrowException, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} is truncated or no parquet file: {first}") from None


def _parquet_rows(table: Any, column: str) -> int:
    """Rows to read at once. Any row may be as long as its column chunk: a text that is stored once can be repeated."""
    largest = 1
    for i in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(i)
        columns = [group.column(j) for j in range(group.num_columns)]
        largest = max([largest, *(c.total_uncompressed_size for c in columns if c.path_in_schema == column)])
    return max(1, min(PARQUET_ROWS, PARQUET_BYTES // largest))


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
