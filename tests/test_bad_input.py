"""Bad configs, flags, files and folders: each gives one clear line on stderr and exit code 2, and loses nothing."""

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import CommandLine, is_one_line, nano_run
from twoscale.train import start_run


def parquet(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def cut(path: Path, keep: float = 0.6) -> Path:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])
    return path


def text(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def packed(path: Path, opener: Callable[..., object]) -> Path:
    with opener(path, "wb") as f:  # type: ignore[attr-defined]
        f.write(b"some text in here " * 5000)
    return path


def folder(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content)
    return path


TRAIN = ("train", "--preset", "nano", "--out", "{out}")
PREPARE = ("prepare", "--out", "{out}", "--source")

# (name, arguments, a word that the line must hold); {shards} and {out} are filled in
FLAGS: list[tuple[str, tuple[str, ...], str]] = [
    ("unknown command", ("trian",), "did you mean `train`? The commands are prepare, train,"),
    ("unknown command, like no other", ("zzz",), "there is no command 'zzz': choose one of prepare, train,"),
    ("few-shot without tasks", ("eval", "{out}", "--num-fewshot", "2"), "--num-fewshot goes with --tasks"),
    ("a negative number of shots", ("eval", "{out}", "--tasks", "x", "--num-fewshot", "-1"), "--num-fewshot"),
    ("an empty batch", ("eval", "{out}", "--tasks", "x", "--batch-size", "0"), "--batch-size"),
    ("unknown flag", (*TRAIN, "--train.learning-rate", "1"), "--train.learning-rate"),
    ("not a number", (*TRAIN, "--train.lr", "fast"), "fast"),
    ("no value", (*TRAIN, "--train.lr"), "--train.lr"),
    ("unknown preset", ("train", "--preset", "huge"), "huge"),
    ("unknown optimizer", (*TRAIN, "--train.optimizer", "sgd"), "sgd"),
    ("negative rate", (*TRAIN, "--train.lr", "-1"), "lr = -1"),
    ("no steps", (*TRAIN, "--train.steps", "0"), "steps = 0"),
    ("warm-up past the end", (*TRAIN, "--train.warmup-steps", "99"), "warmup_steps = 99"),
    ("micro-batch that does not divide", (*TRAIN, "--data-dir", "{shards}", "--train.micro-batch-size", "3"), "divisor"),
    ("micro-batch above the batch", (*TRAIN, "--train.micro-batch-size", "99"), "micro_batch_size = 99"),
    ("heads that do not divide", (*TRAIN, "--model.n-head", "5"), "n_embd = 32"),
    ("key heads that do not divide", (*TRAIN, "--model.n-kv-head", "3"), "n_kv_head"),
    ("group of a missing layer", (*TRAIN, "--model.groups", "1,9"), "layer 9"),
    ("overlapping groups", (*TRAIN, "--model.groups", "1-2,2-3"), "disjoint"),
    ("groups that are no list", (*TRAIN, "--model.groups", "one"), "4,5-6,7"),
    ("groups cut off from their input", (*TRAIN, "--model.inject", "none"), "start=input"),
    ("zero loops", (*TRAIN, "--model.mean-loops", "0"), "mean_loops = 0"),
    ("zero context", (*TRAIN, "--model.block-size", "0"), "block_size = 0"),
    ("a billion layers", (*TRAIN, "--model.n-layer", "1000000000"), "at most 4096"),
    ("too large to be meant", (*TRAIN, "--model.n-embd", "100000000"), "parameters"),
    ("odd rotary head", (*TRAIN, "--model.positions", "rotary", "--model.n-head", "32"), "even head size"),
    ("vocabulary below the tokenizer's", (*TRAIN, "--model.vocab-size", "100"), "vocab_size"),
    ("context longer than the text", (*TRAIN, "--data-dir", "{shards}", "--model.block-size", "1000000"), "needs at least"),
    ("shards that are not there", (*TRAIN, "--data-dir", "{out}/none"), "does not exist"),
    ("resume nothing", ("train", "--resume", "{out}/none"), "does not exist"),
    ("resume and out", ("train", "--resume", "{out}", "--out", "{out}"), "omit --out"),
    ("resume with other settings", ("train", "--preset", "nano", "--resume", "{out}", "--train.lr", "1e-4"), "settings of the run"),
    ("checkpoint that is not there", (*TRAIN, "--data-dir", "{shards}", "--checkpoint", "step-000777"), "step-000777"),
    ("no out folder", ("prepare",), "--out"),
    ("source that is not there", (*PREPARE, "{out}/none.txt"), "does not exist"),
    ("share above a half", (*PREPARE, "builtin", "--val-fraction", "0.9"), "val_fraction"),
    ("tiny vocabulary", (*PREPARE, "builtin", "--tokenizer", "bpe", "--bpe-vocab", "10"), "bpe_vocab"),
    ("bench of nothing", ("bench",), "train"),
    ("bench of something else", ("bench", "coffee"), "train"),
    ("bench of no steps", ("bench", "train", "--steps", "0"), "--steps 0"),
    ("reproduce elsewhere", ("reproduce", "--preset", "nano", "--data-dir", "{shards}"), "one folder"),
]

# (name, what makes the file, a word that the line must hold)
FILES: list[tuple[str, Callable[[Path], Path], str]] = [
    ("unknown ending", lambda d: text(d / "a.docx", "text"), "unknown kind of file"),
    ("empty file", lambda d: text(d / "a.txt", ""), "too little text"),
    ("blank documents", lambda d: text(d / "a.txt", "\n<|endoftext|>\n \n<|endoftext|>\n"), "2 empty"),
    ("binary file", lambda d: text(d / "a.txt", bytes(range(128, 256)) * 50), "1 not text"),
    ("truncated parquet", lambda d: cut(parquet(d / "a.parquet", text=["a long text"] * 500)), "truncated"),
    ("empty parquet file", lambda d: text(d / "a.parquet", b""), "truncated"),
    ("missing column", lambda d: parquet(d / "a.parquet", body=["x"], url=["y"]), "no column 'text' (found: body, url)"),
    ("column of numbers", lambda d: parquet(d / "a.parquet", text=[1, 2]), "not text"),
    ("truncated xz", lambda d: cut(packed(d / "a.txt.xz", lzma.open)), "truncated"),
    ("truncated gz", lambda d: cut(packed(d / "a.txt.gz", gzip.open)), "truncated"),
    ("gz that is none", lambda d: text(d / "a.jsonl.gz", "plain"), "truncated"),
    ("cut jsonl", lambda d: text(d / "a.jsonl", '{"text": "one"}\n{"text": "tw'), "line 2"),
    ("jsonl without text", lambda d: text(d / "a.jsonl", '{"body": "one"}\n'), "found: body"),
    ("jsonl of numbers", lambda d: text(d / "a.jsonl", "17\n"), "line 1"),
    ("folder without text", lambda d: folder(d / "x", a__png="no"), "holds no"),
]


@pytest.mark.parametrize("args,word", [case[1:] for case in FLAGS], ids=[case[0] for case in FLAGS])
def test_flags(args: tuple[str, ...], word: str, tmp_path: Path, shards: Path, cli: CommandLine) -> None:
    """A wrong flag or value names itself and what to do."""
    code, out, err = cli(*(a.format(out=tmp_path / "out", shards=shards) for a in args))
    assert code == 2 and is_one_line(err) and word in err and not out, err


@pytest.mark.parametrize("make,word", [case[1:] for case in FILES], ids=[case[0] for case in FILES])
def test_files(make: Callable[[Path], Path], word: str, tmp_path: Path, cli: CommandLine) -> None:
    """A bad file is named with what is wrong with it, and what was prepared of it is not taken for whole."""
    code, _, err = cli("prepare", "--out", tmp_path / "out", "--source", make(tmp_path))
    assert code == 2 and is_one_line(err) and word in err, err
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_run_folders(tmp_path: Path, shards: Path, cli: CommandLine) -> None:
    """Folders that are no run, or a run with a broken config, are refused by name and left as they were."""
    start_run(nano_run(steps=4), tmp_path / "run", shards)
    config = tmp_path / "run" / "config.json"
    good = config.read_text()
    cases = {
        "{not json": "readable JSON",
        json.dumps({"model_type": "gpt2"}): "model_type",
        good.replace('"n_layer": 4', '"n_layer": "four"'): "expected int",
        good.replace('"n_layer"', '"layers"'): "unknown setting 'layers'",
    }
    for body, word in cases.items():
        config.write_text(body)
        code, _, err = cli("train", "--resume", tmp_path / "run", "--data-dir", shards)
        assert code == 2 and is_one_line(err) and word in err, err
        assert config.read_text() == body
    config.write_text(good)
    assert cli("train", "--resume", tmp_path / "run", "--data-dir", shards)[0] == 0
    code, _, err = cli("train", "--preset", "nano", "--out", text(tmp_path / "file", "x"), "--data-dir", shards)
    assert code == 2 and "cannot create" in err


def test_damaged_shards(tmp_path: Path, shards: Path, cli: CommandLine) -> None:
    """Training on truncated shards, or on a folder that `prepare` never finished, is refused."""
    for name in ("train-00000.bin", "manifest.json", "tokenizer.json"):
        broken = tmp_path / f"broken-{name}"
        broken.mkdir()
        for p in shards.iterdir():
            (broken / p.name).write_bytes(p.read_bytes())
        cut(broken / name)
        code, _, err = cli("train", "--preset", "nano", "--out", tmp_path / f"run-{name}", "--data-dir", broken)
        assert code == 2 and len(err.strip().splitlines()) == 1 and name in err, err
    (broken / "manifest.json").unlink()
    code, _, err = cli("train", "--preset", "nano", "--out", tmp_path / "run", "--data-dir", broken)
    assert (code == 2 and "tokenizer" in err) or "not finished" in err


def test_help(cli: CommandLine) -> None:
    """Help of every command is printed with code 0 and names its options."""
    assert "prepare" in cli("--help")[1] and cli()[0] == 0
    assert cli("--version")[1].startswith("twoscale ")
    for command, option in (("prepare", "--source"), ("train", "--model.groups"), ("reproduce", "--preset"), ("bench", "train")):
        code, out, _ = cli(command, "--help")
        assert code == 0 and option in out
    assert "--steps" in cli("bench", "train", "--help")[1]
