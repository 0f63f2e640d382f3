"""The public surface in Python: exactly the promised names, values that print on one line, `exit="auto"`, clear errors."""

import copy
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
from twoscale.train import start_run


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """A nano run with a calibration."""
    from twoscale.cli.main import main

    run = tmp_path_factory.mktemp("calibrated") / "run"
    start_run(nano_run(steps=8), run, shards)
    assert main(["calibrate", str(run), "--max-dce", "0.5", "--loops", "6", "--windows", "6", "--rule", "step-norm"]) == 0
    return run


def test_names() -> None:
    """dir(twoscale) shows the public names and nothing else, before and after modules are imported; each of them exists."""
    script = (
        "import twoscale; before = dir(twoscale); import twoscale.engine, twoscale.report.page; print(before == dir(twoscale), *before)"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert said == ["True", *sorted([*twoscale.__all__, "__version__"])]
    assert {"exits", "geometry", "load", "forward", "generate", "trace", "presets"} <= set(said)
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
    assert "\n" not in gen and len(gen) < 400 and "work=[86, 86]" in gen and "finish=['length', 'length']" in gen, gen


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
    with pytest.raises(UserError, match=f"loops = {loops!r}: give one whole number, or one for each group"):
        twoscale.forward(twoscale.LoopedGPT(small_model()), [[1]], loops=loops)  # type: ignore[arg-type]
