"""`--device` and `--dtype` of the benches; no test looks at the times."""

from pathlib import Path

import pytest
import torch

import twoscale
from conftest import CommandLine
from twoscale.bench.load import bench_load
from twoscale.bench.shapes import SHAPES, random_model, write_folder
from twoscale.config import UserError, presets
from twoscale.interop.load import usable_device

NANO = ("--preset", "nano")
BENCHES = [
    ("decode", *NANO, "--contexts", 8),
    ("decode", *NANO, "--contexts", 8, "--dtype", "int8"),
    ("decode", "--model", "hops"),
    ("decode", "--family", "huginn"),
    ("decode", "--sampling"),
    ("decode", "--busy"),
    ("decode", "--speculate", "bundled"),
    ("serve", *NANO),
    ("serve", *NANO, "--mixed"),
    ("serve", "--busy"),
    ("serve", "--replicas", 2),
    ("serve", "--speculate", "bundled"),
    ("trace", *NANO),
    ("quantize", "hops"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
@pytest.mark.parametrize("words", BENCHES, ids=lambda words: " ".join(map(str, words)))
def test_a_device_that_is_not_there(words: tuple[object, ...], cli: CommandLine) -> None:
    """Every bench refuses a device that the machine does not have: one line, exit code 2, nothing measured."""
    code, out, err = cli("bench", *words, "--device", "cuda")
    assert code == 2 and len(err.strip().splitlines()) == 1 and "cuda" in err, err
    assert "ms" not in out


def test_load_refuses_before_it_writes(tmp_path: Path, cli: CommandLine) -> None:
    """`bench load` looks at the device before it makes gigabytes of weights."""
    code, _, err = cli("bench", "load", "--shape", "ouro-tiny", "--folder", tmp_path, "--device", "nonsense")
    assert code == 2 and len(err.strip().splitlines()) == 1 and "nonsense" in err and not list(tmp_path.iterdir())


@pytest.mark.parametrize("device", ["meta", "mps", "nonsense", "cuda:99", "mkldnn", ""])
def test_what_is_no_device(device: str) -> None:
    """A device that holds no numbers, one of another machine, and no device at all are refused in one short line."""
    with pytest.raises(UserError, match="cannot be used here") as found:
        usable_device(device)
    assert len(str(found.value)) < 300 and "\n" not in str(found.value)


@pytest.mark.parametrize("command", ["generate", "serve", "explore"])
def test_commands(command: str, cli: CommandLine) -> None:
    """generate, serve and explore refuse it likewise."""
    words = {"generate": ("The",), "serve": ("--port", 0), "explore": ("--port", 0)}[command]
    code, _, err = cli(command, "bundled", *words, "--device", "meta")
    assert code == 2 and "cannot be used here" in err and len(err.strip().splitlines()) == 1, err


def test_vllm_takes_no_dtype(cli: CommandLine) -> None:
    """vLLM reads the folder itself: another dtype is refused, not ignored."""
    code, _, err = cli("bench", "serve", "--vllm", "--dtype", "int8")
    assert code == 2 and "--dtype int8" in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("dtype", ["bf16", "int8", "w8a8"])
def test_random_model(dtype: str) -> None:
    """A random model in a dtype decodes, and says its dtype."""
    model = random_model(presets.nano().model, dtype, torch.device("cpu"))  # type: ignore[arg-type]
    assert model.weight_dtype == dtype and len(twoscale.generate(model, [[1, 2]], 3).tokens[0]) == 3


def test_trace_and_serve_in_int8(cli: CommandLine) -> None:
    """`bench trace` and `bench serve` run with weights in another dtype."""
    code, out, err = cli("bench", "trace", *NANO, "--dtype", "int8", "--sequences", 2, "--loops", 3, "--repeats", 1)
    assert code == 0 and "int8" in out and "streamed" in out, err
    pytest.importorskip("uvicorn", reason="uvicorn is not installed (the extra twoscale[serve])")
    code, out, err = cli("bench", "serve", *NANO, "--mixed", "--dtype", "int8", "--rounds", 1, "--seconds", 0.2, "--clients", 2)
    assert code == 0 and "eight rules" in out, err


def test_load_without_c_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench load` measures memory and time without the C kernels too, as on a GPU; there is no read of panels to compare with."""
    monkeypatch.setenv("TWOSCALE_NATIVE", "0")  # for the process of the bench
    folder = tmp_path / "tiny"
    write_folder(SHAPES["huginn-tiny"], folder)
    found = bench_load(folder, "int8", 2, 2, torch.device("cpu"))
    assert found.token_s > 0 and found.peak >= found.held > 0 and found.read == 0
