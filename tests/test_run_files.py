"""What a run folder may hold after a full disk, an editor or a stranger: one clear line, and the last checkpoint stays usable."""

import ast
import dataclasses
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import ROOT, CommandLine, is_one_line, nano_run
from families import OURO, folder, ouro_tensors
from training import arguments, losses
from twoscale.cli.train import TrainArgs, parse_train
from twoscale.config import UserError
from twoscale.config.serial import read_jsonl, read_steps
from twoscale.data import TokenData, Tokenizer
from twoscale.geometry.probe import probe_geometry, tracked, write_record
from twoscale.interop import load
from twoscale.interop.weights import INDEX
from twoscale.report.load import load_run
from twoscale.tradeoff.summary import read_evaluation
from twoscale.train import checkpoint as ckpt, metrics, start_run


def test_full_disk_for_metrics(tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    """A disk that is full when a line of metrics.jsonl is written ends the run with one line; it goes on from its last checkpoint."""
    config = nano_run(steps=12, checkpoint_interval=4)
    start_run(config, tmp_path / "whole", shards)
    write = metrics.Metrics.write

    def full(self: metrics.Metrics, record: dict[str, Any]) -> None:
        if record["step"] == 7:
            self.file.write(b'{"step": 7, "lo')
            self.file.close()
            self.file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
        write(self, record)

    monkeypatch.setattr(metrics.Metrics, "write", full)
    code, _, err = cli(*arguments(config, tmp_path / "run", shards))
    assert code == 2 and "metrics.jsonl: No space left on device" in err.splitlines()[-1] and "Traceback" not in err, err
    monkeypatch.undo()
    assert ckpt.fault(tmp_path / "run" / "checkpoints" / "step-000004") is None
    assert cli("train", "--resume", tmp_path / "run")[0] == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


BAD_LINES = [b"\xff\xfe\n", b"17\n", b"[1, 2]\n", b'{"loss": 1.0}\n', b'{"step": "one"}\n', b"{not json\n", b"[" * 9999 + b"\n"]


@pytest.mark.parametrize("bad", BAD_LINES, ids=lambda b: repr(b[:12]))
def test_bad_lines(bad: bytes, tmp_path: Path, trained: Path) -> None:
    """A line of metrics.jsonl or geometry.jsonl with bad UTF-8, bad JSON or of a wrong type is named; the file stays as it is."""
    for name in ("metrics.jsonl", "geometry.jsonl", "config.json"):
        (tmp_path / name).write_bytes(bad if name != "config.json" else (trained / name).read_bytes())
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        metrics.Metrics(tmp_path, nano_run(), 0)
    for read in (lambda: load_run(tmp_path), lambda: write_record(tmp_path, {"step": 3})):
        with pytest.raises(UserError, match=r"geometry\.jsonl"):
            read()
    assert (tmp_path / "metrics.jsonl").read_bytes() == (tmp_path / "geometry.jsonl").read_bytes() == bad


def test_commands_on_bad_lines(tmp_path: Path, trained: Path, cli: CommandLine) -> None:
    """Every command that reads metrics.jsonl or geometry.jsonl names the damaged file in one line."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for name, words in (("metrics", ("train", "--resume", run)), ("geometry", ("report", run)), ("geometry", ("export", run))):
        before = (run / f"{name}.jsonl").read_bytes() if (run / f"{name}.jsonl").exists() else b""
        (run / f"{name}.jsonl").write_bytes(b"\xff\n" + before)
        code, _, err = cli(*words)
        assert code == 2 and f"{name}.jsonl, line 1" in err.splitlines()[-1] and "Traceback" not in err, (words, err)
        (run / f"{name}.jsonl").write_bytes(before)


def test_measurements_of_a_wrong_type(tmp_path: Path, trained: Path, shards: Path) -> None:
    """A measurement whose parts have wrong types is refused by the report."""
    start_run(nano_run(steps=1, geometry_interval=1, geometry_loops=3, warmup_steps=0), tmp_path, shards, probes=[probe_geometry])
    assert len(load_run(tmp_path).geometry) == 2
    record = read_steps(tmp_path / "geometry.jsonl")[-1]
    group = record["groups"][0]
    for changed in (
        record | {"groups": [5]},
        record | {"boundaries": [5]},
        record | {"groups": [group | {"step_norm": "high"}]},
        record | {"groups": [group | {"step_norm": {"mean": ["x"], "std": [1.0], "count": [1]}}]},
        record | {"groups": [group | {"name": 1}]},
        record | {"tokens": "many"},
    ):
        (tmp_path / "geometry.jsonl").write_text(json.dumps(changed) + "\n")
        with pytest.raises(UserError, match="no measurements"):
            load_run(tmp_path)


def test_bad_evaluation(tmp_path: Path, trained: Path, cli: CommandLine) -> None:
    """An evaluation.json with bad UTF-8 or of a wrong type is named by every command that reads it."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for body in (b"\xff\xff", b"[]", b"5", b'{"tokens": 1}', b'{"weights": 1, "cross_entropy_by_loops": 7}'):
        (run / "evaluation.json").write_bytes(body)
        with pytest.raises(UserError, match=r"evaluation\.json"):
            read_evaluation(run / "evaluation.json")
    code, _, err = cli("export", run, "--out", tmp_path / "out")
    assert code == 2 and is_one_line(err) and "evaluation.json" in err, err


def test_bad_state(tmp_path: Path, trained: Path, cli: CommandLine) -> None:
    """A state.json with bad UTF-8 or wrong types, and folders that are named almost like checkpoints, give one line."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    newest = ckpt.list_checkpoints(run / "checkpoints")[-1]
    good = json.loads((newest / "state.json").read_text())
    bodies = [b"\xff", b"[]", b"5", b"null", json.dumps(good | {"files": ["model.safetensors"]}).encode()]
    for name in ("..", "\0", "\ud800"):
        bodies.append(json.dumps(good | {"files": good["files"] | {name: {"bytes": 4096, "crc32": 0}}}).encode())
    for body in bodies:
        (newest / "state.json").write_bytes(body)
        code, _, err = cli("train", "--resume", run)
        assert code == 2 and is_one_line(err) and newest.name in err, (body[:20], err)
    for step in ("one", -1, None, True):
        (newest / "state.json").write_text(json.dumps(good | {"step": step}))
        code, _, err = cli("train", "--resume", run)
        assert code == 2 and is_one_line(err) and "state.json" in err, err
    (newest / "state.json").write_text(json.dumps(good))
    for name in ("step-00012²", "step-٣", "step-", "step-x"):
        (run / "checkpoints" / name).mkdir()
    assert ckpt.list_checkpoints(run / "checkpoints")[-1] == newest
    assert cli("train", "--resume", run)[0] == 0


MANIFESTS: list[Callable[[dict[str, Any]], Any]] = [
    lambda m: [m],
    lambda m: m | {"shards": 5},
    lambda m: m | {"shards": ["train-00000.bin"]},
    lambda m: m | {"shards": [m["shards"][0] | {"file": 5}]},
    lambda m: m | {"shards": [m["shards"][0] | {"file": "\ud800.bin"}]},
    lambda m: m | {"shards": [m["shards"][0] | {"tokens": "many"}]},
    lambda m: m | {"vocab_size": "257"},
    lambda m: m | {"tokenizer": None},
    lambda m: m | {"counts": []},
    lambda m: m | {"tokens": {"train": "1"}},
    lambda m: m | {"skipped": {".rst": 5}},
]


@pytest.mark.parametrize("change", MANIFESTS, ids=range(len(MANIFESTS)))
def test_bad_manifest(change: Callable[[dict[str, Any]], Any], tmp_path: Path, shards: Path, cli: CommandLine) -> None:
    """A manifest with a wrong type anywhere is refused by name."""
    shutil.copytree(shards, tmp_path / "data")
    path = tmp_path / "data" / "manifest.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    code, _, err = cli("train", "--preset", "nano", "--data-dir", tmp_path / "data", "--out", tmp_path / "run")
    assert code == 2 and is_one_line(err) and "manifest.json" in err, err


def test_shards_that_change_in_use(tmp_path: Path, shards: Path) -> None:
    """A shard that is cut, overwritten or extended while it is open is an error that names it; one that is replaced is read to the end."""
    for number, damage in enumerate((b"", b"x" * 3000, None)):
        data_dir = tmp_path / str(number)
        shutil.copytree(shards, data_dir)
        data = TokenData(data_dir, "train")
        before, path = data.read(0, 100).tolist(), data_dir / "train-00000.bin"
        if damage is None:
            with open(path, "ab") as f:
                f.write(b"more")
        else:
            os.truncate(path, 200)
            path.write_bytes(path.read_bytes() + damage)
        with pytest.raises(UserError, match=r"train-00000\.bin was changed while it was in use"):
            data.read(0, 100)
    shutil.copytree(shards, tmp_path / "replaced")
    data = TokenData(tmp_path / "replaced", "train")
    (tmp_path / "replaced" / "other").write_bytes(b"y" * 5000)
    os.replace(tmp_path / "replaced" / "other", tmp_path / "replaced" / "train-00000.bin")
    assert data.read(0, 100).tolist() == before


def test_resume_refuses_an_edited_config(tmp_path: Path, shards: Path, cli: CommandLine) -> None:
    """--resume with another rate or seed in config.json than its checkpoint was saved with is refused; how often to save may change."""
    start_run(nano_run(steps=8, checkpoint_interval=4), tmp_path / "run", shards)
    ckpt.set_aside_after(tmp_path / "run" / "checkpoints", 4)
    path = tmp_path / "run" / "config.json"
    good = json.loads(path.read_text())
    for part, name, value in (("train", "lr", 0.1), ("train", "seed", 7), ("model", "mean_loops", 9)):
        path.write_text(json.dumps(good | {part: good[part] | {name: value}}))
        code, _, err = cli("train", "--resume", tmp_path / "run")
        assert code == 2 and is_one_line(err) and f"{part}.{name} is {value} in" in err and "--init" in err, err
    path.write_text(json.dumps(good | {"train": good["train"] | {"checkpoint_interval": 2}}))
    assert cli("train", "--resume", tmp_path / "run")[0] == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.uint8], ids=str)
def test_weights_that_are_no_floats(dtype: torch.dtype, tmp_path: Path, trained: Path) -> None:
    """Integer, bool and complex weights are refused with their names and dtypes, in foreign folders and in checkpoints."""
    tensors = ouro_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    with pytest.raises(UserError, match=r"model\.norm\.weight is stored as (I64|BOOL|C64|U8)"):
        load(folder(tmp_path / "ouro", OURO, tensors))
    shutil.copytree(trained, tmp_path / "run")
    newest = ckpt.list_checkpoints(tmp_path / "run" / "checkpoints")[-1]
    own = load_file(newest / "model.safetensors")
    own["ln_f.weight"] = own["ln_f.weight"].to(dtype)
    save_file(own, newest / "model.safetensors")
    state = json.loads((newest / "state.json").read_text())
    state["files"]["model.safetensors"] = ckpt._facts(newest / "model.safetensors")
    (newest / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"ln_f\.weight is stored as"):
        load(newest)


def test_index_with_half_a_character(tmp_path: Path) -> None:
    """An index that names a file or a weight with half a character is refused as any other that names what is not there."""
    outcome = folder(tmp_path, OURO, None)
    for listed in ({"a": "\ud800.safetensors"}, {"a": "b\0.safetensors"}):
        (outcome / INDEX).write_text(json.dumps({"weight_map": listed}))
        with pytest.raises(UserError, match=r"only \.safetensors files"):
            load(outcome)


@pytest.mark.parametrize("prompt", ["caf\udce9", "\ud800"])
def test_prompts_that_are_no_text(prompt: str, loaded: tuple[Any, Tokenizer], trained: Path, cli: CommandLine) -> None:
    """A prompt that is not UTF-8 is refused with the place where it goes wrong."""
    code, out, err = cli("generate", trained, prompt)
    assert code == 2 and is_one_line(err) and "not UTF-8 at character" in err and not out
    with pytest.raises(UserError, match="not UTF-8"):
        loaded[1].encode_batch(["fine", prompt])


def test_prompt_from_a_pipe(trained: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt on stdin that is not UTF-8 is refused with the place where it goes wrong."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    code, _, err = cli("generate", trained, "-")
    assert code == 2 and is_one_line(err) and "not UTF-8 at byte 4" in err


def test_vocabulary_follows_the_data(tmp_path: Path, corpus: Path, shards: Path, cli: CommandLine) -> None:
    """A preset takes the vocabulary of the shards, or of the tokenizer that is asked for, unless another one is given."""

    def config(*words: object) -> Any:
        return parse_train([str(word) for word in words], "twoscale train", TrainArgs).config

    assert config("--preset", "small", "--data-dir", shards).model.vocab_size == 257
    assert config("--preset", "tiny", "--data.tokenizer", "bpe", "--data.bpe_vocab=600").model.vocab_size == 600
    assert config("--preset", "tiny", "--data.tokenizer=gpt2").model.vocab_size == 50257
    assert config("--preset", "tiny", "--data.tokenizer", shards).model.vocab_size == 257
    assert config("--preset", "small").model.vocab_size == 4096 and config("--preset", "paper").model.vocab_size == 50257
    assert config("--preset", "small", "--data-dir", shards, "--model.vocab-size", 5000).model.vocab_size == 5000
    assert config("--preset", "small", "--data-dir", shards, "--model.vocab-size", 300).model.vocab_size == 300
    data = tmp_path / "data"
    assert cli("prepare", "--source", corpus, "--tokenizer", "bpe", "--bpe-vocab", 300, "--out", data)[0] == 0
    words = ("train", "--preset", "nano", "--data-dir", data, "--out", tmp_path / "mine", "--train.steps", 4)
    assert cli(*words)[0] == 0 and ckpt.load_config(tmp_path / "mine").model.vocab_size == 300
    assert cli(*words)[0] == 0, "the same command goes on"
    larger = dataclasses.replace(nano_run(steps=4), model=dataclasses.replace(nano_run().model, vocab_size=400))
    start_run(larger, tmp_path / "larger", shards)
    words = ("train", "--preset", "nano", "--data-dir", shards, "--out", tmp_path / "larger", "--train.steps", 4)
    assert cli(*words)[0] == 0, "so does a run that was given a larger vocabulary"


def test_names_and_batches(tmp_path: Path, trained: Path) -> None:
    """A run is called as its folder unless a name is given or it has one; a micro-batch of the preset gives way to a smaller batch."""

    def config(*words: object) -> Any:
        return parse_train(["--preset", "small", *map(str, words)], "twoscale train", TrainArgs).config

    assert config("--out", tmp_path / "mine").name == "mine" and config().name == "small"
    assert config("--out", tmp_path / "mine", "--name", "other").name == "other"
    assert config("--out", trained).name == "nano"
    sizes = {4: 4, 12: 6, 7: 7, 16: 8, 11: 1}
    assert {n: config("--train.batch-size", n).train.micro_batch_size for n in sizes} == sizes
    with pytest.raises(UserError, match="settings of the run itself"):
        config("--resume", trained, "--train.batch-size", 4, "--train.micro-batch-size", 2)
    with pytest.raises(UserError, match="omit the others"):
        parse_train(["--preset", "nano", "--resume", str(trained), "--train.batch-size", "4"], "twoscale train", TrainArgs)
    with pytest.raises(UserError, match="micro_batch_size = 8"):
        config("--train.batch-size", 4, "--train.micro-batch-size", 8)


def test_tensorboard_gets_the_geometry(tmp_path: Path, shards: Path) -> None:
    """TensorBoard shows for every group step norm, cosine and acceleration after chosen steps and the drift, as in geometry.jsonl."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = nano_run(steps=4, tracker="tensorboard", geometry_interval=4, geometry_loops=5)
    start_run(config, tmp_path, shards, probes=[probe_geometry])
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    last = read_steps(tmp_path / "geometry.jsonl")[-1]
    shown = tracked(last)
    names = ("step_norm", "step_cosine", "acceleration")
    assert {f"geometry/{name}/{g}/k={k}" for name in names for g in "12" for k in (1, 2, 4)} < set(shown)
    assert shown["geometry/step_norm/1/k=2"] == last["groups"][0]["step_norm"]["mean"][2]
    assert shown["geometry/step_cosine/2/k=4"] == last["groups"][1]["step_cosine"]["mean"][3]
    assert shown["geometry/dlr_settled/1_2"] == last["boundaries"][0]["dlr"]["settled_k1"]["mean"]
    for key, value in shown.items():
        points = events.Scalars(key)
        assert [p.step for p in points] == [0, 4] and points[-1].value == pytest.approx(value, rel=1e-4)
    assert not any("geometry/" in key for r in read_jsonl(tmp_path / "metrics.jsonl") for key in r)


def test_checkpoint_version(tmp_path: Path, trained: Path, cli: CommandLine) -> None:
    """A checkpoint has a format version: a newer one is refused in one line that says so, none counts as version 1, no number as damage."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    folder = run / "checkpoints" / "step-000020"
    state = json.loads((folder / "state.json").read_text())
    assert state["version"] == 1 and ckpt.VERSION == 2  # sharded checkpoints are of version 2
    prompt = ("generate", run, "The loop", "--max-new-tokens", "2", "--temperature", "0")
    commands = (prompt, ("eval", run), ("train", "--resume", run), ("trace", run, "--checkpoint", folder.name), ("export", folder))
    code, text, err = cli(*prompt)
    assert code == 0, err
    for version in (3, 99):
        (folder / "state.json").write_text(json.dumps(state | {"version": version}))
        for command in commands:
            code, _, err = cli(*command)
            assert code == 2 and is_one_line(err) and f"format version {version}, this twoscale reads up to 2: update" in err, err
    for version in (0, "1", None, True):
        (folder / "state.json").write_text(json.dumps(state | {"version": version}))
        code, _, err = cli(*prompt)
        assert code == 2 and is_one_line(err) and "is damaged (state.json has version = " in err, err
    del state["version"]
    (folder / "state.json").write_text(json.dumps(state))
    assert cli(*prompt)[:2] == (0, text)


def test_run_folder_names() -> None:
    """The names of a run's files and folders are spelt in config/run_folder.py and nowhere else in the package."""
    home = ROOT / "src" / "twoscale" / "config" / "run_folder.py"
    names = {value for value in literals(home) if re.fullmatch(r"[a-z_]+\.[a-z]+", value)} | {"checkpoints", "figures"}
    assert {"config.json", "metrics.jsonl", "sweep.jsonl", "index.html", "state.json"} <= names
    for path in (ROOT / "src").rglob("*.py"):
        assert path == home or not set(literals(path)) & names, path


def literals(path: Path) -> list[str]:
    """The texts in a file's code, docstrings left out."""
    tree = ast.parse(path.read_text())
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in bare)
    return [node.value for node in constants if isinstance(node.value, str)]
