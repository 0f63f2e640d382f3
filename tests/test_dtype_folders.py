"""Model folders in bf16 and int8: loading in every dtype, `twoscale convert --dtype`, and what a damaged folder gives."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import twoscale
from conftest import CommandLine, is_one_line
from families import HUGINN, OURO, folder, huginn_tensors, ouro_tensors
from twoscale.bench.shapes import SHAPES, ouro, write_folder
from twoscale.config import UserError
from twoscale.config.dtypes import WEIGHT_DTYPES
from twoscale.engine.kernels.quantize import quantize
from twoscale.interop.quantize import WINDOWS, convert_dtype
from twoscale.tradeoff.load_run import load_run

IDS = [[1, 5, 9, 3], [2, 4]]
SOURCES = {"ouro": (OURO, ouro_tensors), "huginn": (HUGINN, huginn_tensors)}


def source(path: Path, family: str, dtype: torch.dtype = torch.float32) -> Path:
    config, tensors = SOURCES[family]
    return folder(path, config, {name: t.to(dtype) for name, t in tensors().items()})


@pytest.mark.parametrize("family", SOURCES)
def test_load_in_every_dtype(family: str, tmp_path: Path) -> None:
    """A folder loaded in a dtype is the fp32 model rounded to it, to the bit; `auto` takes bf16 as it is stored, which loses nothing."""
    path = source(tmp_path / "fp32", family)
    model, _ = twoscale.load(path)
    assert model.weight_dtype == "fp32" and all(p.requires_grad for p in model.parameters())
    for dtype in WEIGHT_DTYPES[1:]:
        loaded, _ = twoscale.load(path, dtype=dtype)
        assert loaded.weight_dtype == dtype
        assert torch.equal(twoscale.forward(loaded, IDS).logits, twoscale.forward(quantize(model, dtype), IDS).logits)
    stored, _ = twoscale.load(half := source(tmp_path / "bf16", family, torch.bfloat16))
    assert stored.weight_dtype == "bf16"
    exact, _ = twoscale.load(half, dtype="fp32")
    assert torch.allclose(twoscale.forward(stored, IDS).logits, twoscale.forward(exact, IDS).logits, atol=1e-4)


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("family", SOURCES)
def test_convert(dtype: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A converted folder loads as the model rounded to its dtype, in one file or several; loaded as fp32 it has the same weights."""
    path = source(tmp_path / "source", family)
    model, _ = twoscale.load(path)
    want = twoscale.forward(quantize(model, dtype), IDS).logits  # type: ignore[arg-type]
    for name, size in (("one", 1 << 29), ("several", 2_000)):
        monkeypatch.setattr("twoscale.interop.quantize.SHARD", size)
        out = convert_dtype(path, tmp_path / name, dtype)  # type: ignore[arg-type]
        assert (len(list(out.glob("*.safetensors"))) > 1) == (name == "several")
        found, _ = twoscale.load(out)
        assert found.weight_dtype == dtype and torch.equal(twoscale.forward(found, IDS).logits, want)
        again, _ = twoscale.load(out, dtype="fp32")
        assert again.train().weight_dtype == "fp32" and torch.allclose(twoscale.forward(again.eval(), IDS).logits, want, atol=1e-4)
    if dtype == "int8":
        w8a8, _ = twoscale.load(tmp_path / "one", dtype="w8a8")
        assert torch.equal(twoscale.forward(w8a8, IDS).logits, twoscale.forward(quantize(model, "w8a8"), IDS).logits)
        with pytest.raises(UserError, match="already"):
            convert_dtype(tmp_path / "one", tmp_path / "twice", "int8")
    card = (tmp_path / "one" / "README.md").read_text()
    assert f"in {dtype}" in card and "largest change" in card


def test_cost_in_the_card(trained: Path, cli: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The card of a run's model has the change of its held-out loss, as computed by hand; that of a large model has none."""
    code, _, err = cli("convert", str(trained), "--dtype", "int8", "--out", str(tmp_path / "small"))
    assert code == 0, err
    run = load_run(trained)
    text, loops = run.text("report", WINDOWS), run.model.config.mean_loops

    def losses(model: twoscale.LoopedGPT) -> torch.Tensor:
        logits = twoscale.forward(model, text.ids, loops=loops).logits
        return torch.nn.functional.cross_entropy(logits[text.asked], text.targets[text.asked], reduction="none").double()

    change = float((losses(quantize(run.model, "int8")) - losses(run.model)).mean())
    card = (tmp_path / "small" / "README.md").read_text()
    (shown,) = re.findall(r"change of the loss, \d+ loops? \| ([+-][\d.]+) \[", card)
    assert float(shown) == pytest.approx(change, abs=2e-5) and "the most likely token is the same" in card
    monkeypatch.setattr("twoscale.interop.quantize.MEASURED", 1000)
    convert_dtype(trained, tmp_path / "unmeasured", "int8")
    assert "change of the loss" not in (tmp_path / "unmeasured" / "README.md").read_text()


def test_convert_the_bundled_model(cli: CommandLine, tmp_path: Path) -> None:
    """The bundled model converts by the command, is about a quarter the size of fp32, keeps its tokenizer, and writes text."""
    code, _, err = cli("convert", "bundled", "--dtype", "int8", "--out", str(tmp_path / "small"))
    assert code == 0, err
    size = sum(f.stat().st_size for f in (tmp_path / "small").glob("*.safetensors"))
    model, tokenizer = twoscale.load("bundled")
    assert tokenizer is not None and size < 0.3 * 4 * sum(p.numel() for p in model.parameters())
    code, text, err = cli("generate", str(tmp_path / "small"), "The old man", "--max-new-tokens", "4", "--loops", "2", "--dtype", "w8a8")
    assert code == 0 and "The old man" in text
    code, _, err = cli("convert", "bundled", "--dtype", "int8", "--loops", "3", "--out", str(tmp_path / "other"))
    assert code == 2 and is_one_line(err) and "omit" in err and not (tmp_path / "other").exists()


KILLED = """
import os, signal, sys
from pathlib import Path
from twoscale.interop import quantize
quantize.SHARD = 2_000
write, calls = quantize.save_file, []

def save(*args, **kwargs):
    write(*args, **kwargs)
    calls.append(1)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

quantize.save_file = save
quantize.convert_dtype(sys.argv[1], Path(sys.argv[2]), "int8")
"""


def test_killed_conversion(tmp_path: Path) -> None:
    """A conversion that is killed leaves no folder under the name that was asked for; the next one succeeds and removes what it left."""
    path, out = source(tmp_path / "source", "ouro"), tmp_path / "out"
    result = subprocess.run([sys.executable, "-c", KILLED, str(path), str(out)], capture_output=True, text=True, timeout=300)
    assert result.returncode == -signal.SIGKILL and not out.exists(), result.stderr
    assert [p for p in tmp_path.iterdir() if p.name.startswith(".out.")]
    convert_dtype(path, out, "int8")
    assert twoscale.load(out)[0].weight_dtype == "int8" and not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def tensors_changed(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        (file,) = path.glob("*.safetensors")
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
        places = {"weight_map": dict.fromkeys(tensors, file.name)}
        (path / "model.safetensors.index.json").write_text(json.dumps(places))

    return apply


def settings_changed(**changes: Any) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        settings = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(settings | changes))

    return apply


QKV = "model.stages.0.blocks.0.attn.qkv.weight"
DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("missing scales", tensors_changed(lambda t: t.pop(QKV + "_scale")), "lacks the scales"),
    ("NaN scales", tensors_changed(lambda t: t[QKV + "_scale"].fill_(torch.nan)), "not all finite"),
    ("negative scales", tensors_changed(lambda t: t[QKV + "_scale"].neg_()), "not all finite and positive"),
    ("scales of another shape", tensors_changed(lambda t: t.update({QKV + "_scale": torch.ones(3, 1)})), "another shape"),
    ("scales of another dtype", tensors_changed(lambda t: t.update({QKV + "_scale": t[QKV + "_scale"].half()})), "another shape or dtype"),
    ("mixed dtypes", tensors_changed(lambda t: t.update({QKV: t[QKV].bfloat16()})), "stored as BF16"),
    ("norms in int8", tensors_changed(lambda t: t.update({"model.ln_f.weight": t["model.ln_f.weight"].char()})), "stored as I8"),
    ("a missing weight", tensors_changed(lambda t: t.pop(QKV)), "lacks"),
    ("an unknown weight", tensors_changed(lambda t: t.update({"model.more": torch.ones(2)})), "model does not"),
    ("an unknown dtype", settings_changed(quantization={"dtype": "int4"}), "'int4'"),
    ("another group", settings_changed(quantization={"dtype": "int8", "group_size": 64}), "group_size = 64"),
    ("no quantisation at all", settings_changed(quantization="yes"), "None"),
]


@pytest.mark.parametrize("name, damage, word", DAMAGES, ids=[name for name, _, _ in DAMAGES])
def test_damaged_folder(name: str, damage: Callable[[Path], None], word: str, tmp_path: Path, cli: CommandLine) -> None:
    """A quantised folder that is not whole is refused in one line that says what is wrong, with exit code 2."""
    out = convert_dtype(source(tmp_path / "source", "ouro"), tmp_path / "out", "int8")
    damage(out)
    code, _, err = cli("generate", str(out), "x")
    assert code == 2 and is_one_line(err) and word in err, err


@pytest.mark.parametrize(
    "dtype, device, word", [("int4", "cpu", "choose one of"), ("int8", "no-such", "cannot be used here"), ("fp32", "cuda:7", "cannot")]
)
def test_what_the_machine_cannot_do(dtype: Any, device: str, word: str) -> None:
    """An unknown dtype and a device that is not there are refused in one line."""
    with pytest.raises(UserError, match=word) as error:
        twoscale.load("bundled", dtype=dtype, device=device)
    assert len(str(error.value).splitlines()) == 1


def test_calibration_of_another_dtype(tmp_path: Path, cli: CommandLine) -> None:
    """exit="auto" refuses a calibration that was made with weights in another dtype, and says what to do."""
    code, _, err = cli("generate", "bundled", "The", "--exit", "auto", "--dtype", "int8", "--max-new-tokens", "2")
    assert code == 2 and is_one_line(err) and "weights in fp32" in err and "--dtype int8" in err
    model, _ = twoscale.load("bundled", dtype="int8")
    with pytest.raises(UserError, match="weights in fp32"):
        twoscale.generate(model, [[1, 2]], 2, exit="auto")
    pytest.importorskip("uvicorn", reason="uvicorn is not installed (the extra twoscale[serve])")
    from twoscale.serve.build import Settings, build_server

    assert "weights in fp32" in build_server(Settings("bundled", "lockstep", dtype="int8"))[1]
    assert build_server(Settings("bundled", "lockstep"))[1] == "lockstep"


def test_without_the_kernels(tmp_path: Path) -> None:
    """Without the C kernels an int8 folder gives the same tokens, by torch's operators."""
    out = convert_dtype(source(tmp_path / "source", "ouro"), tmp_path / "out", "int8")
    script = "import sys, twoscale; print(twoscale.generate(twoscale.load(sys.argv[1])[0], [[1, 5, 9]], 6).tokens)"
    found = [
        subprocess.run(
            [sys.executable, "-c", script, str(out)],
            env=os.environ | {"TWOSCALE_NATIVE": native},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for native in ("0", "1")
    ]
    assert found[0] == found[1] and found[0].startswith("[[")


PEAK = """
import sys
from pathlib import Path
import torch, twoscale
from twoscale.bench.load import memory
from twoscale.engine.kernels.library import c_library
c_library()
twoscale.load(sys.argv[1], dtype="int8")  # a tiny one: what the first load needs
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
model, _ = twoscale.load(sys.argv[2], dtype=sys.argv[3])
print(memory("VmHWM") - before, memory("VmRSS") - before)
"""


@pytest.mark.long
@pytest.mark.parametrize("dtype, size", [("bf16", 2), ("int8", 1)])
def test_memory_of_loading(dtype: str, size: int, tmp_path: Path) -> None:
    """While a folder in bf16 is loaded, memory stays below 1.15 times the final size, which is that of the weights."""
    shape = ouro(512, 8, 1408, 4096, 48)
    parameters = write_folder(shape, tmp_path / "folder") // 2
    write_folder(SHAPES["ouro-tiny"], tmp_path / "tiny")
    words = [sys.executable, "-c", PEAK, str(tmp_path / "tiny"), str(tmp_path / "folder"), dtype]
    result = subprocess.run(words, capture_output=True, text=True, timeout=600, check=True)
    peak, held = map(int, result.stdout.split())
    assert peak <= 1.15 * held and held <= 1.1 * size * parameters, (peak, held, parameters)
