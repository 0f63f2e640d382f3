"""`twoscale bench decode` runs and says what it promises; no test looks at the times."""

import dataclasses
from pathlib import Path

import pytest
import torch

import twoscale
from conftest import CommandLine
from twoscale.bench.decode import HUGINN
from twoscale.bench.family import ListCache, bench_family, straightforward
from twoscale.bench.load import bytes_of_a_token
from twoscale.bench.quantize import loop_error
from twoscale.bench.shapes import SHAPES, write_folder
from twoscale.config import UserError, presets
from twoscale.engine.kernels.quantize import quantize
from twoscale.model import LoopedGPT


def test_decode(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps against the floor, rules, saved time, batches, the parallel pass and the cache are all in the answer."""
    monkeypatch.setattr(presets, "small", presets.nano)
    words = ("bench", "decode", "--preset", "nano", "--contexts", 8, "--batches", 1, 2, "--loops", 4, "--repeats", 1)
    code, out, _ = cli(*words)
    assert code == 0
    for word in ("floor", "batch  2, context    8", "Acceleration", "of the loop work saved", "teacher-forced", "Huginn", "last", "1.00x"):
        assert word in out, word


def test_saved_time(cli: CommandLine) -> None:
    """The steps and the time that each rule saves beside a fixed depth are printed, for a task's samples and for text."""
    code, out, err = cli("bench", "decode", "--model", "hops", "--repeats", 1, "--batches", 1, 3)
    assert code == 0, err
    assert "3 rows: fixed depth 12" in out and all(rule in out for rule in ("step-norm:10.64", "kl:0.03928", "time / steps"))
    code, out, err = cli("bench", "decode", "--model", "bundled", "--rules", "fixed:1", "--depth", 2, "--repeats", 1, "--batches", 1)
    assert code == 0 and "50.0%" in next(line for line in out.splitlines() if line.startswith("fixed:1")), err
    assert cli("bench", "decode", "--model", "hops", "--busy")[0] == 2 and cli("bench", "decode", "--model", "hops", "--depth", 0)[0] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--contexts", 64), "context of 64"),
        (("--loops", 1), "--loops is at least 2"),
        (("--batches", 0), "at least 1"),
        (("--repeats", 0), "at least 1"),
    ],
    ids=str,
)
def test_bad_decode(words: tuple[object, ...], said: str, cli: CommandLine) -> None:
    """Settings that make no sense are one line and exit code 2."""
    code, _, err = cli("bench", "decode", "--preset", "nano", *words)
    assert code == 2 and said in err and len(err.strip().splitlines()) == 1


def test_family_computes_the_same() -> None:
    """The straightforward loop that ours is measured against gives the same logits, token after token."""
    config = dataclasses.replace(HUGINN, n_embd=64, mlp_hidden=96, vocab_size=64)
    model, ids, cache = LoopedGPT(config, seed=1).eval(), [3, 9, 27, 5, 11], ListCache()
    plain = torch.stack([straightforward(model, cache, token, i, 6) for i, token in enumerate(ids)])
    assert torch.allclose(plain, twoscale.forward(model, [ids], loops=6).logits[0], atol=1e-4)
    result = bench_family(LoopedGPT(dataclasses.replace(config, block_size=24)).eval(), 3, 16, 1)
    assert result.ours > 0 and result.straightforward > 0


def test_serve(cli: CommandLine) -> None:
    """Every way of serving is in the answer, over HTTP too."""
    pytest.importorskip("uvicorn", reason="uvicorn is not installed (the extra twoscale[serve])")
    code, out, err = cli("bench", "serve", "--preset", "nano", "--rounds", 1, "--seconds", 0.5, "--clients", 3)
    assert code == 0, err
    for word in ("one request after another", "batches that wait", "lockstep, with exits", "depth, all 12 loops", "over HTTP", "tokens/s"):
        assert word in out, word
    assert cli("bench", "serve", "--clients", 0)[0] == 2 and cli("bench", "serve", "--new", 9, 2)[0] == 2


def test_busy_and_sampling(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding and serving beside other programs, and sampling beside greedy, give their tables; the programs are ended."""
    from twoscale.bench import busy, sampling

    monkeypatch.setattr(busy, "SETTLE", 0.01)
    started: list[busy.OtherPrograms] = []
    begin = busy.OtherPrograms.__init__
    monkeypatch.setattr(busy.OtherPrograms, "__init__", lambda self, limit: (begin(self, limit), started.append(self))[0])
    code, out, _ = cli("bench", "decode", "--busy", "--preset", "nano", "--repeats", 1)
    assert code == 0 and "one core busy" in out and "README's example" in out and out.count("x") >= 4
    code, out, _ = cli("bench", "serve", "--busy", "--rounds", 1)
    assert code == 0 and "over HTTP" in out
    assert len(started) == 2 and all(p.poll() is not None for others in started for p in others.processes)
    monkeypatch.setattr(sampling, "SHAPE", presets.nano().model)
    code, out, _ = cli("bench", "decode", "--sampling", "--repeats", 1)
    assert code == 0 and out.count("greedy  ") == 2 and "top_k 50, top_p 0.9" in out
    assert cli("bench", "decode", "--sampling", "--busy")[0] == 2 and cli("bench", "decode", "--busy", "--repeats", 0)[0] == 2


def test_attack(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests are sent with and without half-open connections and a heavy request, all are answered, and each is compared with itself."""
    pytest.importorskip("uvicorn", reason="uvicorn is not installed (the extra twoscale[serve])")
    from twoscale.bench import attack

    found, run = [], attack.bench_attack
    monkeypatch.setattr(attack, "bench_attack", lambda *a: found.append(run(*a, connections=20)) or found[-1])
    code, out, err = cli("bench", "serve", "--preset", "nano", "--attack", "--rounds", 1, "--clients", 2, "--new", 2, 4)
    assert code == 0 and "half-open" in out and "of 8 within 3x" in out, err
    assert len(found[0].quiet) == len(found[0].attacked) == 1 and len(found[0].ratios) == 8
    attacked = attack.Attacked([[1.0, 2.0], [3.0, 2.0], [2.0, 4.0]], [[4.0, 2.0], [2.0, 2.0], [8.0, 9.0]], 5)
    assert attacked.ratios == [2.0, 1.0]


def test_speculate(cli: CommandLine, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain and speculative decoding of a run on its held-out text: ratios, bounds, right guesses by depth; clients with and without."""
    from twoscale.bench import speculate

    monkeypatch.setattr(speculate, "WIDTHS", (2, 4))
    code, out, err = cli("bench", "decode", "--speculate", trained, "--prompts", 1, "--repeats", 1, "--new-tokens", 6)
    assert code == 0, err
    for word in ("c(2) = ", "draft:3, 1 steps", "lookup:3", "auto", "by its steps: 1: ", "temperature 0.8", "no calibrated exit rule"):
        assert word in out, word
    code, out, err = cli("bench", "serve", "--speculate", trained, "--rounds", 1, "--seconds", 0.05, "--clients", 4)
    assert code == 0 and "  1 clients" in out and "  4 clients" in out, err
    assert cli("bench", "decode", "--speculate", trained, "--prompts", 0)[0] == 2


def test_dtypes(cli: CommandLine) -> None:
    """A loop step in every dtype stands beside fp32's, for 1, 8 and 32 rows; other benches of decoding are refused beside it."""
    code, out, _ = cli(
        "bench", "decode", "--preset", "nano", "--contexts", 8, "--loops", 2, "--repeats", 1, "--dtype", "bf16", "int8", "w8a8"
    )
    assert code == 0
    rows = [line for line in out.splitlines() if " rows " in line]
    assert [line.split()[0] for line in rows] == ["1", "8", "32"]
    assert all(f"{dtype} " in line for line in rows for dtype in ("fp32", "bf16", "int8", "w8a8"))
    code, _, err = cli("bench", "decode", "--dtype", "int8", "--busy")
    assert code == 2 and "choose one" in err


@pytest.mark.long
def test_load(cli: CommandLine, tmp_path: Path) -> None:
    """A folder at a published layout is made, loaded in a dtype and by torch's operators, measured and removed; one that exists stays."""
    words = ("bench", "load", "--shape", "huginn-tiny", "--folder", tmp_path, "--dtype", "int8", "--plain", "bf16", "fp32", "--tokens", 2)
    code, out, err = cli(*words)
    assert code == 0, err
    assert "ours, int8" in out and "torch, bf16" in out and "GB/s" in out and " 32 loops  last" in out and not list(tmp_path.iterdir())
    (tmp_path / "huginn-tiny").mkdir()
    code, _, err = cli(*words)
    assert code == 2 and "--keep" in err and (tmp_path / "huginn-tiny").is_dir()


@pytest.mark.parametrize("shape", ["huginn-tiny", "ouro-tiny"])
def test_shapes(shape: str, tmp_path: Path) -> None:
    """A folder with random weights loads as its family does, in bf16, and its bytes are those of its parameters."""
    size = write_folder(SHAPES[shape], tmp_path / shape)
    model, _ = twoscale.load(tmp_path / shape, dtype="fp32")
    assert twoscale.load(tmp_path / shape)[0].weight_dtype == "bf16" and size == 2 * sum(p.numel() for p in model.parameters())


def test_transformers_computes_the_same(tmp_path: Path) -> None:
    """Ouro by transformers' operators, which ours is measured against, gives our logits, token after token."""
    pytest.importorskip("transformers", reason="transformers is not installed (the extra twoscale[hf])")
    from transformers.cache_utils import DynamicCache

    from twoscale.bench.transformers_loop import TransformersOuro

    write_folder(SHAPES["ouro-tiny"], tmp_path / "ouro")
    write_folder(SHAPES["huginn-tiny"], tmp_path / "huginn")
    want = twoscale.forward(twoscale.load(tmp_path / "ouro", dtype="fp32")[0], [[3, 9, 27, 5]], loops=3).logits[0]
    model, cache = TransformersOuro(tmp_path / "ouro", torch.float32, torch.device("cpu")), DynamicCache()
    got = torch.stack([model(cache, token, i, 3) for i, token in enumerate((3, 9, 27, 5))])
    assert torch.allclose(got, want, atol=1e-5) and float(want.std()) > 0.1
    with pytest.raises(UserError, match="no folder of an Ouro"):
        TransformersOuro(tmp_path / "huginn", torch.float32, torch.device("cpu"))


def test_bytes_that_a_token_reads(tmp_path: Path) -> None:
    """Weights of a loop group are read once a loop, but for the half of its projection that sees the input; all others once."""
    c = dataclasses.replace(HUGINN, n_embd=64, n_head=4, mlp_hidden=96, vocab_size=128)
    model = quantize(LoopedGPT(c), "int8")
    layer, square = 4 * 64 * 64 + 3 * 64 * 96, 64 * 64
    assert bytes_of_a_token(model, 5) == 4 * layer + 5 * (4 * layer + square) + square + c.padded_vocab_size * 64


def test_loop_error() -> None:
    """Under x -> c x + b with b rounded to b + d, the distance of the states follows its closed form |d| (1 - c^k) / (1 - c): it settles
    where c < 1 and grows where c > 1."""
    for c, settles in ((0.5, True), (1.2, False)):
        exact, rounded = [torch.ones(1, 1, 3)], [torch.ones(1, 1, 3)]
        for _ in range(20):
            exact.append(c * exact[-1] + 1.0)
            rounded.append(c * rounded[-1] + 1.01)
        found = loop_error(torch.stack(exact), torch.stack(rounded))
        want = [0.01 * (1 - c**k) / (1 - c) / (c**k + (1 - c**k) / (1 - c)) for k in range(1, 21)]
        assert found.distance == pytest.approx(want, rel=1e-3)
        assert (found.grows < 1.01) == settles
    halving = torch.stack([torch.full((1, 1, 3), 1.0 + 0.5**k) for k in range(16)])
    assert loop_error(halving, halving).rates == pytest.approx((0.5, 0.5), rel=1e-2)
