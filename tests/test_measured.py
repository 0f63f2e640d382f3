"""Measurements that come with a model: they belong to its weights, and a run that is made of it has them."""

import json
import shutil
from pathlib import Path

import pytest

from conftest import CommandLine
from twoscale import exits
from twoscale.cli.status import StatusLine, clock
from twoscale.config.files import fingerprint
from twoscale.config.progress import listening, progress_to, remark
from twoscale.interop.convert import convert
from twoscale.interop.load import BUNDLED
from twoscale.interop.measured import comes_with, unpack
from twoscale.tradeoff.load_run import calibration_for, name_checkpoint
from twoscale.tradeoff.summary import came_with_model, read_calibration_of, read_evaluation, read_sweep
from twoscale.train.checkpoint import find_checkpoint


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """runs/bundled, as the commands make it."""
    return convert("bundled", tmp_path_factory.mktemp("measured") / "bundled")


def test_they_are_of_the_shipped_weights(run: Path) -> None:
    """Every file that is shipped names the weights of a run that is made of the shipped model, and all of it is in that run."""
    about, weights = comes_with(BUNDLED), name_checkpoint(find_checkpoint(run, None))["weights"]
    assert about is not None and about["model"] == fingerprint(BUNDLED / "model.safetensors") and about["weights"] == weights
    sweep, evaluation = read_sweep(run / "sweep.jsonl"), read_evaluation(run / "evaluation.json")
    assert sweep is not None and evaluation is not None and read_calibration_of(run, sweep) is not None
    assert sweep.header["weights"] == evaluation["weights"] == json.loads((run / "samples.json").read_text())["weights"] == weights
    assert sweep.point("full") is not None and sweep.rounds >= 3 and sweep.header["cpu"] and (run / "trace" / "sequence.json").exists()
    assert "limit" in json.loads((run / "geometry.jsonl").read_text().splitlines()[-1])["groups"][0]


def test_one_calibration() -> None:
    """`--exit auto` of the bundled model takes the calibration that comes with its measurements: the two files differ in whose they are."""
    own, shipped = (json.loads((BUNDLED / name).read_text()) for name in ("calibration.json", "measured/calibration.json"))
    assert own | name_checkpoint(BUNDLED) == own and {k: v for k, v in own.items() if shipped[k] != v} == name_checkpoint(BUNDLED)
    rules, loops = calibration_for(BUNDLED)
    assert [rules.get(g) for g in range(3)] == [r and exits.parse(r) for r in shipped["rules"]]
    assert loops == shipped["loops"]


def test_other_weights_get_none(run: Path, tmp_path: Path) -> None:
    """A changed model file, or a run of other weights, takes nothing; and a run whose sweep was measured again has its own."""
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED, folder, ignore=shutil.ignore_patterns("hops"))
    assert comes_with(folder) is not None and came_with_model(run)
    about = json.loads((folder / "measured" / "about.json").read_text())
    (folder / "measured" / "about.json").write_text(json.dumps(about | {"weights": "another"}))
    assert not unpack(folder, run)
    with open(folder / "model.safetensors", "ab") as f:
        f.write(b" ")
    assert comes_with(folder) is None and not unpack(folder, run)
    again = tmp_path / "again"
    shutil.copytree(run, again)
    with open(again / "sweep.jsonl", "a") as f:
        f.write("\n")
    assert not came_with_model(again)


def test_pack_and_take_up_again(run: Path, tmp_path: Path, cli: CommandLine) -> None:
    """`export --measurements` puts a run's measurements beside the weights it was made of, byte for byte; anything else is refused."""
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED, folder, ignore=shutil.ignore_patterns("hops", "measured"))
    code, out, err = cli("export", run, "--out", folder, "--measurements")
    assert code == 0 and Path(out.strip()) == folder / "measured", err
    for name in ("evaluation.json", "calibration.json", "sweep.jsonl", "samples.json", "trace/sequence.json"):
        assert (folder / "measured" / name).read_bytes() == (BUNDLED / "measured" / name).read_bytes()
    assert comes_with(folder) == comes_with(BUNDLED)
    assert calibration_for(folder) == calibration_for(run), "--exit auto of the model is what was measured"
    for words, says in ((("--out", tmp_path / "elsewhere"), "is no folder"), ((), "--measurements needs a run")):
        code, _, err = cli("export", run, *words, "--measurements")
        assert code == 2 and says in err and err.count("\n") == 1
    bare = tmp_path / "bare"
    shutil.copytree(run, bare)
    (bare / "samples.json").unlink()
    code, _, err = cli("export", bare, "--out", folder, "--measurements")
    assert code == 2 and "samples.json is missing" in err and "twoscale reproduce --bundled-only" in err


# -- the status line ---------------------------------------------------------------------------------------------


class Screen:
    """A terminal that remembers what was written to it."""

    def __init__(self, terminal: bool) -> None:
        self.text, self.terminal = "", terminal

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""


@pytest.mark.parametrize("terminal", [True, False])
def test_status_line(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that is done leaves one line with its time and its last remark; what is left follows from the pace; on a terminal the line in
    between is drawn in place."""
    now = [0.0]
    monkeypatch.setattr("twoscale.cli.status.time.monotonic", lambda: now[0])
    screen = Screen(terminal)
    status = StatusLine([("train", 100.0), ("sweep", 50.0)], screen)  # type: ignore[arg-type]
    status.begin(0)
    assert status.left() is None
    now[0] = 60.0
    status.hear("50/100  loss 1.0", 0.5)
    assert status.left() == pytest.approx(120.0) and "[1/2] train  1:00 so far, about 2:00 left  50/100  loss 1.0" in screen.text
    now[0] = 120.0
    status.hear("finished, validation loss 1.0", None)
    status.end()
    assert "[1/2] train  2:00  finished, validation loss 1.0\n" in screen.text and ("\r\x1b[K" in screen.text) == terminal
    status.begin(1)
    assert status.left() == pytest.approx(60.0)
    status.end()
    assert screen.text.count("\n") == (2 if terminal else 4) and "[2/2] sweep  0:00  done\n" in screen.text and clock(125.9) == "2:05"
    assert status.left() is not None and sum(status.expected) == 100.0, "a stage that was done already tells nothing of the pace"


def test_progress_is_sent_where_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Remarks go to stderr, or to the function that listens while it does."""
    heard: list[tuple[str, float | None]] = []
    remark("one")
    with progress_to(lambda words, share: heard.append((words, share))):
        remark("two")
        assert listening() is not None
    assert heard == [("two", None)] and capsys.readouterr().err == "one\n" and listening() is None
