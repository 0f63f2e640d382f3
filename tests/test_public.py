"""The public surface in Python: exactly the promised names, values that print on one line, `exit="auto"`, clear errors."""

import copy
import dataclasses
import inspect
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import twoscale
from conftest import CommandLine, nano_run, small_model
from twoscale.config import UserError
from twoscale.config.show import one_line
from twoscale.geometry.probe import probe_geometry
from twoscale.report.build import report
from twoscale.tradeoff.summary import Sweep, read_sweep
from twoscale.train import start_run


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """A nano run with a calibration."""
    from twoscale.cli.main import main

    run = tmp_path_factory.mktemp("calibrated") / "run"
    start_run(nano_run(steps=8, geometry_loops=4), run, shards, probes=[probe_geometry])
    assert main(["calibrate", str(run), "--max-dce", "0.5", "--loops", "6", "--windows", "6", "--rule", "step-norm"]) == 0
    return run


def test_names() -> None:
    """dir(twoscale) shows the public names and nothing else, before and after modules are imported; each of them exists."""
    script = (
        "import twoscale; before = dir(twoscale); import twoscale.engine, twoscale.report.page; print(before == dir(twoscale), *before)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert said == ["True", *sorted([*twoscale.__all__, "__version__"])]
    assert {"exits", "geometry", "load", "forward", "generate", "trace", "presets", "sweep", "calibrate", "evaluate", "report"} <= set(said)
    assert all(getattr(twoscale, name) is not None for name in twoscale.__all__)
    with pytest.raises(AttributeError, match="no_such_name"):
        twoscale.no_such_name  # noqa: B018


def test_one_line() -> None:
    """Public values print on one line, with shapes and dtypes in place of numbers."""
    model = twoscale.LoopedGPT(small_model())
    ids = [[1, 2, 3], [4, 5]]
    trace = twoscale.trace(model, ids, loops=7)
    values = [
        (trace, ["Trace(", "states=[(8, 2, 3, 32) float32, (8, 2, 3, 32) float32]", "ids=(2, 3) int64", "layers=[[1], [2, 3]]"]),
        (twoscale.forward(model, ids, loops=2), ["Forward(logits=(2, 3, 64) float32, steps=(2, 3, 2) int64)"]),
        (twoscale.geometry.pca(trace.states), ["PCA(points=[(8, 2, 3, 2) float32"]),
    ]
    for value, words in values:
        shown = repr(value)
        assert "\n" not in shown and len(shown) < 600 and all(word in shown for word in words), shown
    gen = repr(twoscale.generate(model, ids, 20, loops=2))
    assert "\n" not in gen and len(gen) < 400 and "work=[86, 86]" in gen and "finish_reasons=['length', 'length']" in gen, gen


def test_one_line_shortens() -> None:
    """Long lists and texts are cut and their lengths told; short ones are shown as they are."""
    assert one_line([1, 2, 3]) == "[1, 2, 3]" and one_line("abc") == "'abc'" and one_line({"a": (1.5, None)}) == "{'a': (1.5, None)}"
    assert one_line(list(range(1000))) == "[0, 1, 2, ... 1000 in all]"
    assert one_line([[(1, 2)] * 500] * 2) == "[[(1, 2), (1, 2), (1, 2), ... 500 in all], [(1, 2), (1, 2), (1, 2), ... 500 in all]]"
    assert one_line((7,)) == "(7,)" and len(one_line("x" * 999)) < 100 and "\n" not in one_line("a\nb")


def test_auto(calibrated: Path, cli: CommandLine) -> None:
    """exit="auto" is the rule and the loops of the calibration: in forward, in generate, for copies, and as on the command line."""
    from twoscale.tradeoff.load_run import calibration_for

    rules, loops = calibration_for(calibrated)
    model, tokenizer = twoscale.load(calibrated)
    ids = [tokenizer.encode("The loop turns"), tokenizer.encode("A state")]
    want = twoscale.generate(model, ids, 8, exit=rules, loops=loops)
    for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twoscale.generate(same, ids, 8, exit="auto") == want
    out, expected = (twoscale.forward(model, ids, exit=e, loops=n) for e, n in (("auto", None), (rules, loops)))
    assert torch.equal(out.logits, expected.logits) and torch.equal(out.steps, expected.steps)
    assert int(twoscale.forward(model, ids, exit="auto", loops=2).steps.max()) <= 2
    code, said, err = cli("generate", calibrated, "The loop turns", "--exit", "auto", "--temperature", "0", "--max-new-tokens", "8")
    assert code == 0 and said == "The loop turns" + tokenizer.decode(want.tokens[0]) + "\n", err


def test_not_calibrated(calibrated: Path, trained: Path) -> None:
    """Without a calibration, or with one of other weights, exit="auto" says so; a model that came from no folder has none."""
    model, _ = twoscale.load(trained)
    with pytest.raises(UserError, match=r"calibration\.json.*twoscale calibrate"):
        twoscale.generate(model, [[1]], 2, exit="auto")
    fresh = twoscale.LoopedGPT(small_model())
    for call in (lambda: twoscale.forward(fresh, [[1]], exit="auto"), lambda: twoscale.generate(fresh, [[1]], 2, exit="auto")):
        with pytest.raises(UserError, match="this model was not calibrated"):
            call()
    with pytest.raises(UserError, match="auto"):
        twoscale.forward(fresh, [[1]], exit={0: "auto"})


def test_help_and_version(cli: CommandLine) -> None:
    """Help lists every command and how to get a first text; the version is told in three ways."""
    from twoscale.cli.main import COMMANDS

    for words in ([], ["--help"], ["-h"], ["help"]):
        code, out, _ = cli(*words)
        assert code == 0 and all(f"  {name} " in out for name in COMMANDS) and "twoscale generate bundled" in out
    assert {cli(word) for word in ("--version", "-V", "version")} == {(0, f"twoscale {twoscale.__version__}\n", "")}


@pytest.mark.parametrize("loops", ["12", b"12", "4,4"])
def test_loops_as_text(loops: object) -> None:
    """Loops given as text are refused by what they are, not counted by their characters."""
    with pytest.raises(UserError, match=f"loops = {loops!r}: give one integer, or one for each group"):
        twoscale.forward(twoscale.LoopedGPT(small_model()), [[1]], loops=loops)  # type: ignore[arg-type]


# -- the commands as functions -------------------------------------------------------------------------------------


def is_one_line(value: object) -> bool:
    return "\n" not in repr(value) and len(repr(value)) < 300


def test_evaluate(calibrated: Path, cli: CommandLine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`twoscale.evaluate` returns what `twoscale eval` writes, for rules as objects, as text and as calibrated, and prints nothing."""
    for words, exit, loops in (
        ((), None, None),
        (("--exit", "auto"), "auto", None),
        (("--exit", "step-norm:0.5", "--loops", "5"), twoscale.exits.StepNorm(0.5), 5),
    ):
        capsys.readouterr()
        found = twoscale.evaluate(str(calibrated), exit=exit, loops=loops, windows=3)
        assert capsys.readouterr() == ("", "") and is_one_line(found) and "bits per byte" in repr(found)
        code, out, err = cli("eval", calibrated, *words, "--windows", "3", "--output", tmp_path / "found.json")
        assert code == 0 and json.loads((tmp_path / "found.json").read_text()) == dataclasses.asdict(found), err
        assert f"{found.ce:.4f} nats a token" in out
    with pytest.raises(UserError, match="at least 2"):
        twoscale.evaluate(calibrated, windows=1)


def test_calibrate(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`twoscale.calibrate` returns what it writes; its `exit` and `loops` are what exit="auto" stands for from then on."""
    found = twoscale.calibrate(calibrated, max_dce=0.5, loops=6, windows=6, rule="step-norm")
    assert capsys.readouterr() == ("", "") and is_one_line(found) and "CE rises by at most" in repr(found)
    assert json.loads((calibrated / "calibration.json").read_text()) == found.record and found.loops == 6
    model, tokenizer = twoscale.load(calibrated)
    assert tokenizer is not None
    ids = [tokenizer.encode("The loop turns")]
    assert twoscale.generate(model, ids, 8, exit="auto") == twoscale.generate(model, ids, 8, exit=found.exit, loops=found.loops)
    table = found.to_pandas()
    assert list(table["setting"]) == ["calibrated", "single", "fixed", "default"]
    assert table["mean_steps"][0] == found.mean_steps == pytest.approx(table[["steps_1", "steps_2"]].loc[0].mean())


def test_sweep_and_report(calibrated: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, undrawn: None) -> None:
    """`twoscale.sweep` returns what it writes, a row a point; `twoscale.report` returns its page; both print nothing."""
    settings = {"rules": ["step-norm"], "taus": [0.1], "loops": 4, "windows": 2, "rounds": 1, "controller": False}
    found = twoscale.sweep(calibrated, **settings)  # type: ignore[arg-type]
    assert capsys.readouterr() == ("", "") and is_one_line(found) and found == read_sweep(calibrated / "sweep.jsonl")
    table = found.to_pandas()
    assert len(table) == len(found.points) and set(table["id"]) >= {"full", "fixed:1", "step-norm:0.1"}
    assert table.set_index("id").loc["full", ["steps_1", "steps_2"]].tolist() == [4.0, 4.0] and "hard" not in table and "kind" not in table
    found = twoscale.report(calibrated, out=tmp_path / "page")
    assert capsys.readouterr() == ("", "") and found.path == tmp_path / "page" / "index.html" and found.path.exists() and is_one_line(found)
    with pytest.raises(UserError, match="name at least one run"):
        twoscale.report([])


def test_report_is_package_and_function() -> None:
    """`twoscale.report` can be called whether its modules were imported before or not, and its modules can be imported either way."""
    for first in ("assert callable(twoscale.report)", "import twoscale.report.style", "from twoscale import report; report.__path__"):
        then = "from twoscale.report import load; assert callable(twoscale.report) and 'torch' not in sys.modules"
        script = f"import sys, twoscale; {first}; {then}"
        assert subprocess.run([sys.executable, "-c", script]).returncode == 0, first
    assert inspect.signature(twoscale.report) == inspect.signature(report) and twoscale.report.report is report  # type: ignore[attr-defined]


def test_without_pandas(calibrated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables need pandas, and nothing else does: where it is missing the line says how to install it."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"to_pandas needs pandas, .*\.\[pandas\]"):
        Sweep({}, [], 0).to_pandas()


def test_text(calibrated: Path) -> None:
    """With a tokenizer, `trace` takes one text or several in place of their ids; without one, or mixed with ids, text is refused."""
    model, tokenizer = twoscale.load(calibrated)
    assert tokenizer is not None
    texts = ["The loop turns", "A state"]
    want = twoscale.trace(model, [tokenizer.encode(text) for text in texts], loops=3)
    found = twoscale.trace(model, texts, tokenizer=tokenizer, loops=3)
    assert torch.equal(found.ids, want.ids) and all(torch.equal(a, b) for a, b in zip(found.states, want.states, strict=True))
    one = twoscale.trace(model, texts[1], tokenizer=tokenizer, loops=3)
    assert one.ids.tolist() == [tokenizer.encode(texts[1])]
    for bad, words in ((texts, "text needs a tokenizer"), ([texts[0], [1, 2]], "mixed"), (["", "a"], "text 0 is empty")):
        with pytest.raises(UserError, match=words):
            twoscale.trace(model, bad, tokenizer=tokenizer if words != "text needs a tokenizer" else None)  # type: ignore[arg-type]
