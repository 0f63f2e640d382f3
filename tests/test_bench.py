"""`twoscale bench decode` runs and says what it promises; no test looks at the times."""

import dataclasses
from pathlib import Path

import pytest
import torch

import twoscale
from conftest import CommandLine
from twoscale.bench.decode import HUGINN
from twoscale.bench.family import ListCache, bench_family, straightforward
from twoscale.config import presets
from twoscale.model import LoopedGPT


def test_decode(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps against the floor, rules, saved time, batches, the parallel pass and the cache are all in the answer."""
    monkeypatch.setattr(presets, "small", presets.nano)
    words = ("bench", "decode", "--preset", "nano", "--contexts", 8, "--batches", 1, 2, "--loops", 4, "--repeats", 1)
    code, out, _ = cli(*words)
    assert code == 0
    for word in ("floor", "batch  2, context    8", "Acceleration", "of the loop work saved", "teacher-forced", "Huginn", "last", "1.00x"):
        assert word in out, word


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
