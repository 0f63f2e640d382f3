"""The main job: from nothing to a trained and evaluated model in one folder."""

import html
import json
import re
import sys
from pathlib import Path

import pytest

from conftest import CommandLine
from twoscale.cli.reproduce import EFFORTS, Effort
from twoscale.interop.export import export
from twoscale.report.build import report
from twoscale.report.claims import judge
from twoscale.report.exit_claims import judge_exits
from twoscale.report.load import load_run

NANO = (
    "reproduce",
    "--preset",
    "nano",
    "--train.steps",
    "6",
    "--data.max-documents",
    "12",
    "--train.eval-sequences",
    "4",
    "--effort",
    "quick",
)


def test_resumable(tmp_path: Path, cli: CommandLine, undrawn: None) -> None:
    """Run again it does nothing but print, and what it prints is the same."""
    code, out, err = cli(*NANO, "--out", tmp_path / "run")
    assert code == 0 and "nats a token" in out and str(tmp_path / "run") in err
    text = r"[\d,]+ tokens \(\d windows\) spread over all held-out text of builtin"
    stages = [line for line in err.splitlines() if re.match(r"\[\d/6\] \w+ +\d+:\d\d  ", line)]
    assert [re.match(r"\[(\d)/6\] (\w+)", line).groups() for line in stages] == [  # type: ignore[union-attr]
        ("1", "train"), ("2", "evaluate"), ("3", "trace"), ("4", "calibrate"), ("5", "sweep"), ("6", "report"),
    ]  # fmt: skip
    assert re.search(rf"validation loss [\d.]+ nats a token on {text}, at \d+ loops; weights in", stages[0]) and " 1 loops" not in err + out
    assert re.search(rf"cross-entropy at 7 depths on {text}", stages[1]) and "most tokens: group 1 (layer 1) " in stages[2]
    assert re.search(r"\nloops +1 +2 +4 .*\nnats a token +[\d.]+ .*\nbits per byte +[\d.]+ ", out)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    code, again, err = cli(*NANO, "--out", tmp_path / "run")
    assert (
        code == 0
        and again == out
        and "already trained" in err
        and "already evaluated" in err
        and "already traced" in err
        and "already calibrated" in err
        and "already written" in err
    )
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == before


@pytest.mark.parametrize("bundled", ["a small model in its place", pytest.param("the model in the package", marks=pytest.mark.long)])
def test_two_models(
    bundled: str, tmp_path: Path, trained: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """What `make reproduce` does, in small: one run is trained, the bundled one measured, one page shows both; again it only prints."""
    monkeypatch.chdir(tmp_path)
    if bundled != "the model in the package":
        request.getfixturevalue("undrawn")
        in_the_package = sys.modules["twoscale.interop.load"].IN_THE_PACKAGE
        monkeypatch.setitem(in_the_package, "bundled", export(trained, tmp_path / "small", code=False))
    monkeypatch.setitem(
        EFFORTS, "quick", Effort(loops=3, windows=2, rounds=1, controller=False, calibration_windows=3, evaluation_windows=2)
    )
    code, out, err = cli(*NANO, "--with-bundled")
    assert code == 0 and "report    runs/report/index.html" in out, err
    page = (tmp_path / "runs" / "report" / "index.html").read_text()
    assert "Loops and exits of bundled and nano" in page and "id=r0-top" in page and "id='r1-step_norms-0'" in page
    assert page.count("<h2>What it writes</h2>") == 2 and (tmp_path / "runs" / "report" / "figures" / "run-2" / "step_norms.png").exists()
    assert len(page) < 8_000_000
    came = bundled == "the model in the package"
    assert ("came with the model" in err) == came and ("These measurements came with the model" in page) == came
    code, again, err = cli(*NANO, "--with-bundled")
    assert code == 0 and again == out and "already written" in err
    twice = report([tmp_path / "runs" / "nano"] * 2, tmp_path / "twice").path.read_text()
    assert "nano (nano)" in twice and "figures/run-1/" in twice and "figures/run-2/" in twice


@pytest.mark.long
@pytest.mark.timeout(1800)  # three minutes of training, and a busy machine may take thrice that
def test_tiny(tmp_path: Path, cli: CommandLine) -> None:
    """`tiny` ends clearly below a bigram model on the same split, and more loops never hurt by more than 1 % up to 30."""
    code, out, err = cli("reproduce", "--preset", "tiny", "--out", tmp_path / "tiny", "--effort", "quick")
    assert code == 0, err
    result = json.loads((tmp_path / "tiny" / "evaluation.json").read_text())
    by_loops = {int(k): ce for k, ce in result["cross_entropy_by_loops"].items()}
    assert max(by_loops) == 30 and "bigram" in out
    assert by_loops[8] < result["bigram_cross_entropy"] - 0.2, result
    best = by_loops[1]
    for k in sorted(by_loops):
        assert by_loops[k] <= 1.01 * best, result
        best = min(best, by_loops[k])
    assert by_loops[1] > by_loops[30] + 0.05, "the loops must be worth something"
    page = (tmp_path / "tiny" / "report" / "index.html").read_text()
    claims = {c.letter: c for c in judge(load_run(tmp_path / "tiny").geometry)}
    swept = load_run(tmp_path / "tiny").sweep
    assert swept is not None and any(p["family"] == "calibrated" for p in swept.points)
    claims |= {c.letter: c for c in judge_exits(swept)}
    for letter in "abcdefg":
        assert html.escape(claims[letter].measured) in page and f"outcome {claims[letter].outcome}" in page
    last = load_run(tmp_path / "tiny").last
    assert claims["a"].outcome == "confirmed" and claims["d"].outcome == "confirmed", claims
    assert len(last["boundaries"]) == 2 and [r["step"] for r in load_run(tmp_path / "tiny").geometry] == [0, 44, 88, 132, 176, 220]
