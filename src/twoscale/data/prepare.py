"""`twoscale prepare`: text to token shards.

Documents are read in a fixed order, cleaned, split into training and validation by a hash of their number, and
encoded. A shard is written whole or not at all, and says how many documents of the source had been read, so a
killed run goes on from there and ends with the very same files. `manifest.json` comes last: a folder without it
is not finished. Several workers, on one node or many, encode the files of a source ahead (data/units.py); the
shards are the same.
"""

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from twoscale.config import DataConfig, UserError
from twoscale.config.cpu import usable_cores
from twoscale.config.files import make_folder, write_json
from twoscale.config.lock import FolderInUse, is_lock, lock
from twoscale.config.run_folder import TOKENIZER
from twoscale.config.serial import from_dict, read_json, to_dict
from twoscale.data.encode import DocumentEncoder, pieces
from twoscale.data.shards import Shard, ShardHeader, token_dtype, write_shard
from twoscale.data.sources import KINDS, SUFFIXES, Documents
from twoscale.data.tokenizer import Tokenizer, byte_tokenizer, gpt2_tokenizer, train_bpe
from twoscale.data.units import Encoded, Units, Workers, encode_documents

MANIFEST, REQUEST = "manifest.json", "request.json"
BPE_SAMPLE = 200_000_000  # characters that a BPE is learned from
MUCH_TEXT = 32 << 20  # bytes of files from which workers earn back the time that they take to start
SHARE_WAIT = 0.5  # seconds between two looks at a folder that another node has

Progress = Callable[[int, int, str], None]
"""progress(documents read, training tokens, what is being done)"""


def quiet(documents: int, tokens: int, doing: str) -> None:
    """A progress that says nothing."""


def prepare(config: DataConfig, out: Path, progress: Progress = quiet, workers: int | None = None, share: bool = False) -> dict[str, Any]:
    """Make (or finish) the shards in `out` and return the manifest. Does nothing where they are whole already.

    So many `workers` encode files ahead, each on a core of its own; 0: this process alone; None: one a core where there are several files
    and much text. With `share` other nodes may run the same on the same folder: one of them writes the shards, all of them encode files.
    """
    if _is_done(config, out):
        return load_manifest(out)  # the source itself is no longer needed
    documents = Documents(config)
    workers = _useful_workers(documents, workers)
    make_folder(out)
    while True:
        try:
            with lock(out, "prepare"):
                return _prepare(config, out, documents, progress, workers)
        except FolderInUse:
            if not share:
                raise
        if workers and (out / TOKENIZER).exists():
            _open_folder(config, documents, out, again=True)
            try:
                with Workers(out, workers) as helpers:
                    helpers.wait()
            except UserError:
                if not _is_done(config, out):  # the other node may have removed what a worker was about to write
                    raise
        time.sleep(SHARE_WAIT)  # until the other node has finished, or has gone and this one takes over
        if _is_done(config, out):
            return load_manifest(out)


def _useful_workers(documents: Documents, wanted: int | None) -> int:
    """How many workers to start: none for a source that is not several files."""
    if len(documents.files) < 2:
        return 0
    if wanted is None:
        wanted = usable_cores() if sum(path.stat().st_size for path in documents.files) >= MUCH_TEXT else 0
    return min(wanted, len(documents.files))


def _prepare(config: DataConfig, out: Path, documents: Documents, progress: Progress, workers: int) -> dict[str, Any]:
    """What `prepare` does in the process that has the lock."""
    if _is_done(config, out):
        return load_manifest(out)
    for rest in out.glob(".*.tmp"):  # of a killed run
        rest.unlink()
    _open_folder(config, documents, out)
    if (out / TOKENIZER).exists():
        tokenizer = Tokenizer.load(out)
    else:
        tokenizer = _make_tokenizer(config, progress)
        tokenizer.save(out)
    writer = _Writer(config, out, tokenizer, progress)
    units = Units(config, out, documents, tokenizer)
    with contextlib.ExitStack() as held:
        pool = held.enter_context(Workers(out, workers)) if workers else None
        manifest = writer.run(documents, units, pool)
    units.remove()
    return manifest


def _is_done(config: DataConfig, out: Path) -> bool:
    return (out / MANIFEST).exists() and (out / REQUEST).exists() and _same_shards(prepared_config(out), config)


def _open_folder(config: DataConfig, documents: Documents, out: Path, again: bool = False) -> None:
    """Note in `out` what is about to be prepared, unless another node has; refuse a folder that holds anything else."""
    files = documents.fingerprint()
    if (out / REQUEST).exists():
        known = read_json(out / REQUEST).get("files") if _same_shards(prepared_config(out), config) else None
        if not isinstance(known, list) or not _same_files(known, files):
            raise UserError(f"{out} holds the shards of another source or other settings: choose another --out or remove the folder")
    elif any(path for path in out.iterdir() if not is_lock(path)):
        raise UserError(f"{out} is not empty and holds no shards of this program: choose another --out")
    if not again:
        write_json(out / REQUEST, {"data": to_dict(config), "files": files})


def _same_shards(a: DataConfig, b: DataConfig) -> bool:
    """Whether two settings give the same shards: a limit on the length of documents changes none."""
    return replace(a, max_document_mb=1) == replace(b, max_document_mb=1)


def _same_files(known: list[Any], files: list[list[Any]]) -> bool:
    """Whether the files are those that were noted; an older version noted names and sizes alone."""
    if len(known) != len(files):
        return False
    return all(isinstance(old, list) and old == (new[:2] if len(old) == 2 else new) for old, new in zip(known, files, strict=True))


def prepared_config(folder: Path) -> DataConfig:
    """The settings that a folder of shards was made with."""
    request = read_json(folder / REQUEST)
    if not isinstance(request, dict) or "data" not in request:
        raise UserError(f"{folder / REQUEST} does not say what the shards were made from: prepare the data again")
    return from_dict(DataConfig, request["data"], str(folder / REQUEST))


def load_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder; a clear word where it is missing or wrong."""
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist: run `twoscale prepare` first")
    if not (folder / MANIFEST).exists():
        raise UserError(f"{folder} is not finished (no {MANIFEST}): run the same `twoscale prepare` again")
    manifest = read_json(folder / MANIFEST)
    wanted = {"shards": list, "tokenizer": str, "vocab_size": int, "tokens": dict, "counts": dict}
    if not isinstance(manifest, dict) or any(not isinstance(manifest.get(key), kind) for key, kind in wanted.items()):
        raise UserError(f"{folder / MANIFEST} lacks one of {', '.join(wanted)}, or has it in another type: prepare the data again")
    skipped = manifest.get("skipped", {})
    pairs = list(skipped.values()) if isinstance(skipped, dict) else [None]
    if any(type(manifest["tokens"].get(split)) is not int for split in ("train", "val")) or not all(_is_pair(pair) for pair in pairs):
        raise UserError(f"{folder / MANIFEST} has tokens or skipped files that are no numbers: prepare the data again")
    for entry in manifest["shards"]:
        fields = [entry.get(key) for key in ("file", "split", "tokens")] if isinstance(entry, dict) else []
        if [type(value) for value in fields] != [str, str, int] or not _is_file_name(entry["file"]):
            raise UserError(f"{folder / MANIFEST} has a shard without file, split or tokens: prepare the data again")
    return manifest


def source_name(folder: Path) -> str:
    """What a prepared folder was made from: `builtin`, the name of a file or folder, or a dataset of the hub (`hf:...`)."""
    named = load_manifest(folder).get("source")
    if not isinstance(named, str) or not named:
        return folder.name
    return named if named.startswith("hf:") else Path(named).name


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and [type(number) for number in value] == [int, int]


def _is_file_name(name: str) -> bool:
    return Path(name).name == name and name.isprintable()


def describe_skipped(manifest: dict[str, Any]) -> str | None:
    """One line on the files of a folder that were left out because of their endings; None where there were none."""
    skipped = manifest.get("skipped")
    if not isinstance(skipped, dict) or not skipped:
        return None
    endings = ", ".join(f"{count} {ending} ({size:,} bytes)" for ending, (count, size) in sorted(skipped.items()))
    total = [sum(entry[i] for entry in skipped.values()) for i in (0, 1)]
    return f"{manifest['source']}: left out {total[0]} files ({total[1]:,} bytes) of other kinds: {endings}; read are {', '.join(SUFFIXES)}"


def is_validation(config: DataConfig, index: int) -> bool:
    """Whether document number `index` is held out."""
    digest = hashlib.blake2b(f"{config.seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < config.val_fraction * 2**64


def _make_tokenizer(config: DataConfig, progress: Progress) -> Tokenizer:
    if config.tokenizer == "bytes":
        return byte_tokenizer()
    if config.tokenizer == "gpt2":
        return gpt2_tokenizer()
    if config.tokenizer != "bpe":
        return Tokenizer.load(Path(config.tokenizer).expanduser())
    return train_bpe(_training_text(config, progress), config.bpe_vocab)


def _training_text(config: DataConfig, progress: Progress) -> Iterator[str]:
    """Training documents alone: a tokenizer must not have seen what it is judged on."""
    chars = 0
    for index, text in enumerate(_limited(config)):
        if text is not None and not is_validation(config, index):
            chars += len(text)
            yield from pieces(text)  # the same words, in less memory
        progress(index + 1, 0, "learning the tokenizer")
        if chars >= BPE_SAMPLE:
            return


def _limited(config: DataConfig) -> Iterator[str | None]:
    for index, text in enumerate(Documents(config)):
        if config.max_documents is not None and index >= config.max_documents:
            return
        yield text


@dataclass
class _Buffer:
    """Tokens of one split that wait to be written."""

    documents: list[np.ndarray] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    tokens: int = 0

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        self.documents.append(ids)
        self.sizes.append(text_bytes)
        self.tokens += len(ids)

    def pop(self) -> tuple[np.ndarray, int]:
        self.tokens -= len(self.documents[-1])
        return self.documents.pop(), self.sizes.pop()


class _Writer:
    """Encodes documents in order and closes a pair of shards whenever enough training tokens have come together."""

    def __init__(self, config: DataConfig, out: Path, tokenizer: Tokenizer, progress: Progress) -> None:
        self.config, self.out, self.tokenizer, self.progress = config, out, tokenizer, progress
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.encode = DocumentEncoder(tokenizer, self.dtype)
        self.headers: dict[str, ShardHeader] = {}
        self.buffers = {"train": _Buffer(), "val": _Buffer()}
        self.consumed = 0
        self.counts = dict.fromkeys(KINDS, 0)
        self._take_over()

    def _take_over(self) -> None:
        """Whole pairs of an earlier, killed run. The training shard of a pair is written last, so it vouches for both."""
        for index in range(1 << 20):
            path = self.out / _name("train", index)
            if not path.exists():
                return
            for split in ("val", "train"):
                name = _name(split, index)
                if (self.out / name).exists():
                    self.headers[name] = Shard(self.out / name).check().header
            self.consumed = self.headers[path.name].consumed

    def run(self, documents: Documents, units: Units, pool: Workers | None) -> dict[str, Any]:
        written = sum(h.tokens for h in self.headers.values() if h.split == "train")
        enough = self.config.max_tokens is not None and written >= self.config.max_tokens
        done = self.consumed  # documents in the shards of an earlier run
        for index, document in enumerate(self._documents(documents, units, pool)):
            if (self.config.max_documents is not None and index >= self.config.max_documents) or (enough and index >= done):
                break
            self.counts[document.kind] += 1
            if index < done:
                continue
            if self.buffers["train"].tokens >= self.config.shard_tokens:  # not sooner: the last document may have to be held out
                written += self.buffers["train"].tokens
                self._flush()
            if document.ids is not None:
                split = "val" if is_validation(self.config, index) else "train"
                self.buffers[split].add(document.ids, document.text_bytes)
            self.consumed = index + 1
            self.progress(self.consumed, written + self.buffers["train"].tokens, "encoding")
            enough = self.config.max_tokens is not None and written + self.buffers["train"].tokens >= self.config.max_tokens
            if enough:
                break
        self._hold_out_something()
        if any(buffer.tokens for buffer in self.buffers.values()):
            self._flush()
        return self._finish(documents)

    def _documents(self, documents: Documents, units: Units, pool: Workers | None) -> Iterator[Encoded]:
        """All documents of the source in order; those that are in a shard already without tokens."""
        if len(units) < 2:
            yield from encode_documents(documents.read(), self.encode, self.consumed)
            return
        done, first, waiting = self.consumed, 0, []  # `first`: number of a file's first document
        for number in range(len(units)):
            if pool is not None:
                pool.wait_for(units, number)
            count = 0
            for document in units.read(number, max(0, done - first)):
                yield document
                count += 1
            first += count
            waiting.append((first, number))
            in_shards = max((h.consumed for h in self.headers.values() if h.split == "train"), default=0)
            while waiting and waiting[0][0] <= in_shards:
                units.forget_tokens(waiting.pop(0)[1])

    def _hold_out_something(self) -> None:
        """A small corpus may have no held-out document by chance: take its last one, or the tail of its only one."""
        train, val = self.buffers["train"], self.buffers["val"]
        if val.tokens or any(h.split == "val" for h in self.headers.values()) or not train.documents:
            return
        ids, size = train.pop()
        if not train.documents and not self.headers:
            cut = len(ids) - max(1, int(len(ids) * self.config.val_fraction))
            train.add(ids[:cut], size * cut // len(ids))
            ids, size = ids[cut:], size - size * cut // len(ids)
        val.add(ids, size)

    def _flush(self) -> None:
        index = sum(h.split == "train" for h in self.headers.values())
        for split in ("val", "train"):
            buffer = self.buffers[split]
            if split == "train" or buffer.tokens:
                tokens = buffer.documents[0] if len(buffer.documents) == 1 else np.concatenate([np.empty(0, self.dtype), *buffer.documents])
                name = _name(split, index)
                self.headers[name] = write_shard(self.out / name, tokens, split, len(buffer.documents), self.consumed, sum(buffer.sizes))
            self.buffers[split] = _Buffer()

    def _finish(self, documents: Documents) -> dict[str, Any]:
        tokens = {s: sum(h.tokens for h in self.headers.values() if h.split == s) for s in ("train", "val")}
        counts = {"documents": self.consumed, **{kind: self.counts[kind] for kind in ("empty", "bad_utf8", "not_text")}}
        if not tokens["train"] or not tokens["val"]:
            raise UserError(
                f"{self.config.source} holds too little text ({counts['documents']} documents, {counts['empty']} empty, "
                f"{counts['not_text']} not text): nothing was prepared"
            )
        manifest = {
            "source": self.config.source,
            "tokenizer": self.tokenizer.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "dtype": self.dtype,
            "tokens": tokens,
            "text_bytes": {s: sum(h.text_bytes for h in self.headers.values() if h.split == s) for s in tokens},
            "counts": counts,
            "skipped": documents.skipped,
            "shards": [
                {"file": name, "split": h.split, "tokens": h.tokens, "documents": h.documents} for name, h in sorted(self.headers.items())
            ],
        }
        write_json(self.out / MANIFEST, manifest)
        return manifest


def _name(split: str, index: int) -> str:
    return f"{split}-{index:05d}.bin"
