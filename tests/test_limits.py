"""Any input in bounded memory, or a clear refusal: long documents, compressed bombs, strange files, hostile tokenizers."""

import dataclasses
import gzip
import hashlib
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer as Pipeline

from conftest import CommandLine, write_corpus
from twoscale.config import DataConfig, UserError
from twoscale.data import Tokenizer, encode, pipeline, prepare, sources, tokenizer as tokenizer_module
from twoscale.data.encode import DocumentEncoder, pieces, splits_at_spaces
from twoscale.data.tokenizer import byte_tokenizer, gpt2_tokenizer, train_bpe
from twoscale.interop.load import BUNDLED

WORDS = [
    "the",
    "state",
    "don't",
    "it's",
    "Señor",
    "中文句子。",
    "🙂",
    "x1y2",
    "  ",
    "\n\n",
    "\t",
    "1234",
    "--",
    "'",
    "<|endoftext|>",
    "a'b",
]
WORDS += ["\u3000", "\u00a0", "we'll"]
# Of the shards as they were before long documents were encoded in pieces.
SHARDS = {"bytes": "319d15d087594815", "bpe": "52bc488fb6fd6a51", "gpt2": "f4c6531e3a200859"}


def mixed_texts() -> list[str]:
    """Twelve documents with every kind of character and space."""
    return [
        "".join(WORDS[(i * i + 7 * i * d + d) % len(WORDS)] + ("" if (i + d) % 5 == 0 else " ") for i in range(400 + 900 * d)) + "\n"
        for d in range(12)
    ]


@pytest.fixture(scope="module")
def encoders() -> list[DocumentEncoder]:
    tokenizers = [byte_tokenizer(), gpt2_tokenizer(), train_bpe(mixed_texts(), 400)]
    assert all(splits_at_spaces(t) for t in tokenizers)
    return [DocumentEncoder(t, "uint16") for t in tokenizers]


@pytest.mark.parametrize("piece", [encode.PIECE, 40])
@pytest.mark.parametrize("tokenizer", list(SHARDS))
def test_shards_stay_the_same(tokenizer: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards are byte for byte those of documents encoded whole, however small the pieces are."""
    monkeypatch.setattr(encode.DocumentEncoder.__init__, "__defaults__", (piece,))
    monkeypatch.setattr(encode.pieces, "__defaults__", (piece, encode.LONGEST_WORD))
    (tmp_path / "a.txt").write_text("<|endoftext|>\n".join(mixed_texts()), encoding="utf-8")
    config = DataConfig(source=str(tmp_path / "a.txt"), tokenizer=tokenizer, bpe_vocab=600, val_fraction=0.2, shard_tokens=20_000)
    prepare(config, tmp_path / "out")
    body = b"".join(p.read_bytes() for p in sorted((tmp_path / "out").glob("*.bin")))
    assert hashlib.sha256(body).hexdigest()[:16] == SHARDS[tokenizer]


SPACES = st.sampled_from([" ", "\n", "\t", "\r", "\x0b", "\x0c", "\x1c", "\x1f", "\x85", "\u00a0", "\u2009", "\u200b", "\u3000", "\ufeff"])
CHARACTERS = st.one_of(SPACES, st.sampled_from(list("aZ1'.,-_<|>")), st.sampled_from(WORDS), st.characters(exclude_categories=("Cs",)))


@settings(max_examples=150, deadline=None)
@given(parts=st.lists(CHARACTERS, max_size=60), size=st.integers(1, 12))
def test_pieces_have_the_tokens_of_the_text(parts: list[str], size: int, encoders: list[DocumentEncoder]) -> None:
    """The tokens of a text's pieces, one after the other, are the text's own."""
    text = "".join(parts)
    cut = list(pieces(text, size))
    assert "".join(cut) == text
    for encoder in encoders:
        whole = encoder.tokenizer.encode(text)
        assert [i for piece in cut for i in encoder.tokenizer.encode(piece)] == whole
        encoder.piece = size
        assert encoder([text, "x", text])[2].tolist() == [*whole, encoder.tokenizer.eot]


SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}


def test_only_known_pipelines_are_cut() -> None:
    """A pipeline that looks at more than GPT-2's pre-tokens takes a document whole."""
    for part, value in {
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        },
    }.items():
        assert not splits_at_spaces(changed_tokenizer(**{part: value})), part
    assert splits_at_spaces(changed_tokenizer())


def changed_tokenizer(**parts: Any) -> Tokenizer:
    return Tokenizer(Pipeline.from_str(json.dumps(json.loads(byte_tokenizer().pipeline.to_str()) | parts)))


def test_words_without_end() -> None:
    """A run without a space that is too long for the tokenizer is refused, and one that is not is taken whole."""
    assert list(pieces("a" * 50, 10, 40)) == ["a" * 50]
    with pytest.raises(UserError, match="without a space"):
        list(pieces("a b " + "a" * 51, 4, 40))
    ids = DocumentEncoder(byte_tokenizer(), "uint16")(["a" * 3_000_000])[0]
    assert len(ids) == 3_000_001 and ids[-1] == 256


PEAKS = """
import json, sys
from pathlib import Path
from twoscale.config import DataConfig, UserError
from twoscale.data import prepare
def high():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])
def run(source, limit):
    before = high()
    try:
        prepare(DataConfig(source=str(source), tokenizer="gpt2", max_document_mb=limit), folder / f"out-{source.name}")
        said = ""
    except UserError as error:
        said = str(error)
    return (high() - before) // 1024, said
folder = Path(sys.argv[1])
run(folder / "small.txt", 1)  # what the tokenizer and the imports take
print(json.dumps({name: run(folder / name, limit) for name, limit in json.loads(sys.argv[2]).items()}))
"""
BOMBS = {"a.txt.gz": 8, "a.txt.xz": 8, "a.jsonl.gz": 64}  # and their limits in MB


@pytest.fixture(scope="module")
def peaks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """For each source by how many megabytes it raised the peak of memory of one process that prepares all of them, and the refusal."""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc to read the peak of memory")
    folder = tmp_path_factory.mktemp("peaks")
    (folder / "small.txt").write_text("a few words <|endoftext|> " * 100)
    for name in BOMBS:
        with gzip.open(folder / name, "wb") if name.endswith("gz") else lzma.open(folder / name, "wb", preset=0) as f:
            for _ in range(100):
                f.write(b"a" * 1_000_000)
    (folder / "long.txt").write_text("".join(f"the state {i} moves, then it settles.\n" for i in range(82_000)))
    words = [sys.executable, "-c", PEAKS, str(folder), json.dumps(BOMBS | {"long.txt": 256})]
    found: dict[str, tuple[int, str]] = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    return found


def test_memory_of_a_long_document(peaks: dict[str, tuple[int, str]]) -> None:
    """A document of 3 MB is prepared in less than 100 bytes for each of its own (it took 215), and longer ones in far fewer."""
    grown, said = peaks["long.txt"]
    assert not said and 0 < grown < 300


@pytest.mark.parametrize("name", list(BOMBS))
def test_bombs(name: str, peaks: dict[str, tuple[int, str]]) -> None:
    """A small file that unpacks to a line of 100 MB is refused by name after the allowed 8 MB, in memory of that order."""
    grown, said = peaks[name]
    assert f"{name}: " in said and "longer than 8 MB" in said and "--max-document-mb" in said and grown < 60


def test_repeated_rows(tmp_path: Path) -> None:
    """A parquet file may store a long text once and repeat it: so few rows are read at once that they fit even then."""
    for size, rows in ((1000, sources.PARQUET_ROWS), (2_000_000, 134)):
        text = "".join(chr(97 + i * i % 26) for i in range(size))
        pq.write_table(pa.table({"text": [text] * 3, "id": [1, 2, 3]}), tmp_path / "a.parquet", dictionary_pagesize_limit=1 << 30)
        with pq.ParquetFile(tmp_path / "a.parquet") as table:
            assert sources._parquet_rows(table, "text") == rows
    with pytest.raises(UserError, match="document 1 is longer than 1 MB"):
        prepare(DataConfig(source=str(tmp_path / "a.parquet"), max_document_mb=1), tmp_path / "out")


def test_xz_that_wants_too_much_memory(tmp_path: Path, cli: CommandLine) -> None:
    """An .xz file that asks for more memory than the bound is refused; several streams in one file are read."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(b"text " * 100, filters=filters))
    code, _, err = cli("prepare", "--source", tmp_path / "a.txt.xz", "--out", tmp_path / "out")
    assert code == 2 and "a.txt.xz" in err and len(err.strip().splitlines()) == 1, err
    corpus = write_corpus(tmp_path / "b.txt").read_bytes()
    half = len(corpus) // 2
    (tmp_path / "c.txt.xz").write_bytes(lzma.compress(corpus[:half]) + bytes(8) + lzma.compress(corpus[half:]))
    one = prepare(DataConfig(source=str(tmp_path / "b.txt")), tmp_path / "one")
    assert prepare(DataConfig(source=str(tmp_path / "c.txt.xz")), tmp_path / "two")["tokens"] == one["tokens"]


def test_a_raised_limit_goes_on(tmp_path: Path) -> None:
    """After a refusal the same folder takes the same source with a higher limit, and a finished one any limit."""
    (tmp_path / "a.txt").write_text("some words " * 200_000)
    config = DataConfig(source=str(tmp_path / "a.txt"), max_document_mb=1)
    with pytest.raises(UserError, match="document 1 is longer than 1 MB"):
        prepare(config, tmp_path / "out")
    manifest = prepare(dataclasses.replace(config, max_document_mb=3), tmp_path / "out")
    assert prepare(config, tmp_path / "out") == manifest


def test_special_files(tmp_path: Path, cli: CommandLine) -> None:
    """A pipe as a source, or as a tokenizer, is refused instead of waited for."""
    os.mkfifo(tmp_path / "a.txt")
    code, _, err = cli("prepare", "--source", tmp_path / "a.txt", "--out", tmp_path / "out")
    assert code == 2 and "no regular file" in err
    (tmp_path / "model").mkdir()
    os.mkfifo(tmp_path / "model" / "tokenizer.json")
    code, _, err = cli("prepare", "--source", "builtin", "--tokenizer", tmp_path / "model", "--out", tmp_path / "out")
    assert code == 2 and "no regular file" in err
    os.mkfifo(tmp_path / "model" / "config.json")
    with pytest.raises(UserError, match="no regular file"):
        Tokenizer.load(Path(tmp_path / "model"))


def test_the_last_ending_counts(tmp_path: Path) -> None:
    """notes.jsonl.txt is text, notes.txt.jsonl.gz is JSON lines."""
    (tmp_path / "notes.jsonl.txt").write_text('{"text": "not parsed"}\n' * 40)
    manifest = prepare(DataConfig(source=str(tmp_path / "notes.jsonl.txt")), tmp_path / "a")
    assert manifest["counts"]["documents"] == 1
    with gzip.open(tmp_path / "notes.txt.jsonl.gz", "wb") as f:
        f.write(b'{"text": "parsed"}\n' * 40)
    manifest = prepare(DataConfig(source=str(tmp_path / "notes.txt.jsonl.gz")), tmp_path / "b")
    assert manifest["counts"]["documents"] == 40


def test_what_a_folder_leaves_out(tmp_path: Path, cli: CommandLine) -> None:
    """Files of other kinds are counted by ending with their bytes and named on stderr; .md is read."""
    folder = tmp_path / "in"
    (folder / "deep").mkdir(parents=True)
    write_corpus(folder / "a.txt")
    (folder / "b.md").write_text("# A title\n\nA paragraph that is read.\n")
    (folder / "c.rst").write_text("x" * 100)
    (folder / "deep" / "d.rst").write_text("x" * 50)
    (folder / "LICENSE").write_text("x" * 7)
    code, _, err = cli("prepare", "--source", folder, "--out", tmp_path / "out")
    assert code == 0 and "left out 3 files (157 bytes)" in err and "2 .rst (150 bytes)" in err and "1 no ending (7 bytes)" in err, err
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["counts"]["documents"] == 41 and manifest["skipped"][".rst"] == [2, 150]
    text = b"".join(p.read_bytes()[-4000:] for p in (tmp_path / "out").glob("*.bin"))
    assert "paragraph that is read".encode("utf-16-le") in text


def test_a_swapped_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another file of the same size under the same name is not mixed with the shards of the first; a touched one goes on."""
    monkeypatch.setattr(sources, "SAMPLE", 64)
    source = write_corpus(tmp_path / "a.txt")
    config = DataConfig(source=str(source), shard_tokens=5000)
    for whole in (1 << 20, 100):  # hashed whole, and in samples
        monkeypatch.setattr(sources, "HASHED_WHOLE", whole)
        out = tmp_path / f"out-{whole}"
        body = source.read_bytes()
        prepare(config, out)
        (out / "manifest.json").unlink()
        swapped = body[:-30] + b"X" * 30
        source.write_bytes(swapped)
        with pytest.raises(UserError, match="another source"):
            prepare(config, out)
        source.write_bytes(body)
    os.utime(source, ns=(1, 1))
    with pytest.raises(UserError, match="another source"):
        prepare(config, tmp_path / "out-100")
    monkeypatch.setattr(sources, "HASHED_WHOLE", 1 << 20)
    assert prepare(config, tmp_path / f"out-{1 << 20}")["tokens"]["train"] > 0


A = {"type": "Replace", "pattern": {"String": "a"}}
OPEN = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
EOT = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
EOTS = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}}
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "long replacement": (
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 1000}},
        "normalizer makes up to 1,000",
    ),
    "a chain of replacements": (
        {"normalizer": {"type": "Sequence", "normalizers": [A | {"content": "a" * 10}] * 8}},
        "100,000,000",
    ),
    "between all characters": ({"normalizer": {"type": "Replace", "pattern": {"Regex": ""}, "content": "b" * 99}}, "100 characters"),
    "long decoder": ({"decoder": A | {"content": "b" * 1000}}, "decoder"),
    "many added tokens": (
        {"post_processor": {"type": "TemplateProcessing", "single": [EOT] * 99, "pair": [SEQUENCE], "special_tokens": EOTS}},
        "post_processor adds 99 tokens",
    ),
    "bad expression": (
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
        "readable",
    ),
    "no object": ({"model": 5}, "no readable tokenizer"),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_tokenizers(name: str, tmp_path: Path, cli: CommandLine) -> None:
    """A tokenizer.json that would expand texts without bound, or is broken, is refused when it is read."""
    parts, word = HOSTILE[name]
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(byte_tokenizer().pipeline.to_str()) | parts))
    code, _, err = cli("prepare", "--source", "builtin", "--tokenizer", tmp_path, "--out", tmp_path / "out")
    assert code == 2 and word in err and len(err.strip().splitlines()) == 1, err


def test_expressions_that_panic() -> None:
    """An expression that the tokenizer's own library gives up on is a UserError, not a panic."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    tokenizer = changed_tokenizer(pre_tokenizer=split)
    for call in (lambda: tokenizer.encode("a" * 40 + "b"), lambda: tokenizer.encode_batch(["a" * 40 + "b"])):
        with pytest.raises(UserError, match="cannot encode this text"):
            call()


def test_texts_that_are_too_long_for_a_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that is too long once normalised is refused before it is encoded, and a large tokenizer.json before it is parsed."""
    monkeypatch.setattr(tokenizer_module, "MAX_CHARS", 1000)
    monkeypatch.setattr(tokenizer_module, "NORMALIZED_AT_ONCE", 100)
    grows = changed_tokenizer(normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 50})
    assert len(grows.encode("c" * 1000)) == 1000
    with pytest.raises(UserError, match=r"200 characters \(10,000 for the tokenizer\)"):
        grows.encode("a" * 200)
    with pytest.raises(UserError, match="at most 1,000"):
        byte_tokenizer().encode("c" * 1001)
    monkeypatch.setattr(pipeline, "MAX_BYTES", 1000)
    with pytest.raises(UserError, match="a tokenizer has at most 1,000"):
        Tokenizer.load(BUNDLED)


def test_ids_of_the_bytes_are_the_pipelines() -> None:
    """Bytes are taken as they are, which is what the byte tokenizer's pipeline does with them."""
    text = "".join(chr(i) for i in range(0x800)) + "🙂<|endoftext|>"
    ids = DocumentEncoder(byte_tokenizer(), "uint16")([text])[0]
    assert np.array_equal(ids[:-1], byte_tokenizer().encode(text))
