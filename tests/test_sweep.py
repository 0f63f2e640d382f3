"""`sweep`, `calibrate`, `generate --exit auto` and the verdicts, from the command line and on files."""

import copy
import html
import json
import math
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import twoscale
from conftest import CommandLine, nano_run
from forked import start_process
from training import finish
from twoscale.geometry.probe import probe_geometry
from twoscale.report.advice import recommend
from twoscale.report.build import report
from twoscale.report.exit_claims import judge_exits
from twoscale.report.words import measured_words, signed
from twoscale.tradeoff.summary import Sweep, read_sweep
from twoscale.train import start_run

SHORT = ("--loops", "6", "--windows", "3", "--rounds", "1")
KEYS = ("id", "ce", "dce", "dce_low", "dce_high", "agree", "flops", "steps", "mean_steps")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    out = tmp_path_factory.mktemp("sweep") / "run"
    start_run(nano_run(steps=12, geometry_interval=6, checkpoint_interval=6, keep_last=5), out, shards, probes=[probe_geometry])
    return out


@pytest.fixture(scope="module")
def swept(trained: Path) -> Path:
    """A run with a calibration and a sweep."""
    from twoscale.cli.main import main

    assert main(["calibrate", str(trained), "--max-dce", "0.02", "--loops", "6", "--windows", "6", "--rule", "step-norm"]) == 0
    assert main(["sweep", str(trained), *SHORT]) == 0
    return trained


def measured(path: Path) -> dict[str, dict[str, Any]]:
    """What must be the same in two sweeps."""
    sweep = read_sweep(path)
    assert sweep is not None
    return {p["id"]: {key: p[key] for key in KEYS} for p in sweep.points}


def test_everything_is_measured(swept: Path) -> None:
    """Every rule and every baseline has its points, with all that a point tells."""
    sweep = read_sweep(swept / "sweep.jsonl")
    assert sweep is not None
    families = {p["family"] for p in sweep.points}
    assert families == {
        "full", "fixed", "fixed-one", "step-norm", "kl", "acceleration", "learned", "calibrated", "random",
        "oracle-stay", "oracle-lagrange",
    }  # fmt: skip
    full = sweep.point("full")
    assert full is not None and full["dce"] == 0 and full["agree"] == 1 and full["mean_steps"] == 6
    for p in sweep.points:
        assert p["ms_low"] <= p["ms"] <= p["ms_high"] and p["dce_low"] <= p["dce"] <= p["dce_high"] and p["flops"] > 0, p["id"]
        assert all(sum(g["histogram"]) == sweep.header["tokens"] for g in p["steps"])
    assert [p["mean_steps"] for p in sweep.family("fixed")] == [1, 2, 3, 4, 5]
    steps = [p["mean_steps"] for p in sweep.family("step-norm")]
    assert steps == sorted(steps, reverse=True), "a larger threshold never takes more steps"
    for p in sweep.family("random"):
        other = sweep.point(p["id"].removeprefix("random~"))
        assert other is not None and p["mean_steps"] == pytest.approx(other["mean_steps"], abs=0.5)
    assert all("ce_table" in p for f in ("oracle-stay", "oracle-lagrange") for p in sweep.family(f))
    kl = sweep.family("kl")[0]
    assert kl["flops_looks"] > 0 and kl["hard"]["tokens"] and len(kl["hard"]["by_loss"]) == 8
    kinds = kl["hard"]["kinds"]
    assert sum(row["tokens"] for row in kinds) <= sweep.header["tokens"] and all(row["low"] <= row["steps"] <= row["high"] for row in kinds)
    assert {"first of a word", "inside a word", "space or line break"} <= {row["kind"] for row in kinds}  # the run's tokens are bytes


def test_repeatable_and_resumed(swept: Path, trained: Path, tmp_path: Path, cli: CommandLine) -> None:
    """A second sweep measures the same; one that was cut in the middle of a line goes on behind it and ends the same; a finished
    one is only read."""
    again = tmp_path / "again"
    shutil.copytree(swept, again)
    (again / "data_dir.json").write_text((swept / "data_dir.json").read_text())
    whole = (again / "sweep.jsonl").read_text().splitlines(keepends=True)
    kept = "".join(whole[:9])
    (again / "sweep.jsonl").write_text(kept + whole[9][: len(whole[9]) // 2])
    code, out, _ = cli("sweep", again, *SHORT)
    assert code == 0 and "dCE" in out
    text = (again / "sweep.jsonl").read_text()
    assert text.startswith(kept) and measured(again / "sweep.jsonl") == measured(swept / "sweep.jsonl")
    code, out, err = cli("sweep", again, *SHORT)
    assert code == 0 and (again / "sweep.jsonl").read_text() == text and "left" not in err
    code, _, _ = cli("sweep", again, *SHORT, "--rules", "cosine", "--taus", "0.01")
    more = measured(again / "sweep.jsonl")
    assert code == 0 and set(more) > set(measured(swept / "sweep.jsonl")) and "cosine:0.01" in more, "other rules join those that are there"


def test_killed(swept: Path, tmp_path: Path) -> None:
    """A sweep that is killed loses nothing that it has written."""
    run = tmp_path / "run"
    shutil.copytree(swept, run)
    (run / "sweep.jsonl").unlink()
    process = start_process(["sweep", str(run), *SHORT])
    for _ in range(3000):
        if (sweep := read_sweep(run / "sweep.jsonl")) is not None and len(sweep.points) >= 5:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = measured(run / "sweep.jsonl")
    assert len(before) >= 5
    finish(start_process(["sweep", str(run), *SHORT]))
    after = measured(run / "sweep.jsonl")
    assert all(after[name] == before[name] for name in before) and set(after) == set(measured(swept / "sweep.jsonl"))


def test_two_processes(swept: Path, tmp_path: Path) -> None:
    """Spread over two processes the sweep gives the same."""
    run = tmp_path / "run"
    shutil.copytree(swept, run)
    (run / "sweep.jsonl").unlink()
    finish(start_process(["sweep", str(run), *SHORT], processes=2))
    one, two = measured(swept / "sweep.jsonl"), measured(run / "sweep.jsonl")
    assert list(one) == list(two)
    for name in one:
        assert one[name]["ce"] == pytest.approx(two[name]["ce"], rel=1e-5) and one[name]["mean_steps"] == pytest.approx(
            two[name]["mean_steps"], abs=0.02
        )


def test_another_checkpoint(swept: Path, tmp_path: Path, cli: CommandLine) -> None:
    """A sweep of another checkpoint sets the old one aside, and says so; a calibration of another is not used, or refused."""
    run = tmp_path / "run"
    shutil.copytree(swept, run)
    old = (run / "sweep.jsonl").read_text()
    code, out, err = cli("sweep", run, *SHORT, "--checkpoint", "step-000006", "--rules", "step-norm", "--taus", "0.1", "--no-controller")
    assert code == 0 and "kept as sweep-step-000012.jsonl" in err and "step-000006" in out
    assert (run / "sweep-step-000012.jsonl").read_text() == old
    assert not any(p["family"] == "calibrated" for p in read_sweep(run / "sweep.jsonl").points)  # type: ignore[union-attr]
    code, _, err = cli("generate", run / "checkpoints" / "step-000006", "The", "--exit", "auto")
    assert code == 2 and "step-000012" in err and err.count("\n") == 1


def test_auto(swept: Path, trained: Path, cli: CommandLine) -> None:
    """`--exit auto` runs the calibrated rules, at the loops that they were calibrated for."""
    found = json.loads((swept / "calibration.json").read_text())
    assert found["goal"] == {"max_dce": 0.02} and found["bound"] <= 0.02 and len(found["rules"]) == 2
    report = found["report"]
    assert set(report) == {"calibrated", "single", "fixed", "default", "differences"} and found["source"] == "corpus.txt"
    assert found["mean_loops"] == 3 and report["default"]["mean_steps"] == 3 and report["default"]["rule"] == "fixed:3"
    for name in ("single", "fixed", "default"):
        d = report["differences"][name]
        assert d["steps"] == pytest.approx(report["calibrated"]["mean_steps"] - report[name]["mean_steps"])
        assert d["ce"] == pytest.approx(report["calibrated"]["ce"] - report[name]["ce"])
        assert all(d[f"{key}_low"] <= d[key] <= d[f"{key}_high"] for key in ("steps", "ce"))
    words = ("The loop", "--max-new-tokens", "12", "--temperature", "0")
    code, out, err = cli("generate", swept, *words, "--exit", "auto")
    assert code == 0 and "of 6 in" in err
    from twoscale import generate, load
    from twoscale.tradeoff.load_run import calibration_for

    rules, loops = calibration_for(swept)
    model, tokenizer = load(swept)
    gen = generate(model, [tokenizer.encode("The loop")], 12, exit=rules, loops=loops)
    assert out.strip("\n").endswith(tokenizer.decode(gen.tokens[0]).strip("\n")) and loops == 6


@pytest.mark.parametrize(
    "words,printed",
    [
        (("sweep", "{out}/none"), "is no folder"),
        (("sweep", "{run}", "--rules", "fixed"), "always there"),
        (("sweep", "{run}", "--rules", "no-such"), "choose among"),
        (("sweep", "{run}", "--taus", "-1"), "at least 0"),
        (("sweep", "{run}", "--taus", "nan"), "at least 0"),
        (("sweep", "{run}", "--loops", "1"), "--loops"),
        (("sweep", "{run}", "--windows", "0"), "--windows"),
        (("sweep", "{run}", "--checkpoint", "step-9"), "does not exist"),
        (("sweep", "{run}", "--data-dir", "{out}"), ""),
        (("calibrate", "{run}", "--max-dce", "0"), "above zero"),
        (("calibrate", "{run}", "--max-dce", "0.1", "--ms", "2"), "ask for one thing"),
        (("calibrate", "{run}", "--rule", "fixed:3"), "no threshold"),
        (("calibrate", "{run}", "--rule", "none"), "no exit rule"),
        (("calibrate", "{run}", "--delta", "0.9", "--loops", "4", "--windows", "3"), "delta"),
    ],
)
def test_bad_input(words: tuple[str, ...], printed: str, swept: Path, tmp_path: Path, cli: CommandLine) -> None:
    """One clear line, exit code 2, and nothing measured is touched."""
    before = {name: (swept / name).read_bytes() for name in ("sweep.jsonl", "calibration.json")}
    code, _, err = cli(*(w.format(run=swept, out=tmp_path) for w in words))
    assert code == 2 and printed in err and len(err.strip().splitlines()) == 1, err
    assert before == {name: (swept / name).read_bytes() for name in before}


def test_no_held_out_text(trained: Path, tmp_path: Path, cli: CommandLine) -> None:
    """A split without enough text is named, with what to do."""
    from twoscale.config import DataConfig
    from twoscale.data import prepare

    (tmp_path / "text.txt").write_text("<|endoftext|>\n".join(f"{i}\n" for i in range(20)))
    prepare(DataConfig(source=str(tmp_path / "text.txt"), val_fraction=0.1), tmp_path / "few")
    for command in ("sweep", "calibrate"):
        code, _, err = cli(command, trained, "--data-dir", tmp_path / "few")
        assert code == 2 and "hold out more text" in err, err


def test_thresholds_that_say_nothing(swept: Path, tmp_path: Path, cli: CommandLine) -> None:
    """A grid at which nobody leaves, or everybody at once, is measured and said."""
    run = tmp_path / "run"
    shutil.copytree(swept, run)
    words = (*SHORT, "--no-controller", "--rules", "step-norm", "--taus")
    (run / "sweep.jsonl").unlink()
    code, out, _ = cli("sweep", run, *words, "1e-12", "1e-11")
    assert code == 0 and "step-norm: no token left before the last step" in out
    (run / "sweep.jsonl").unlink()
    code, out, _ = cli("sweep", run, *words, "1e6", "1e7")
    assert code == 0 and "step-norm: every threshold gave the same steps" in out


def test_full_disk(swept: Path, tmp_path: Path, cli: CommandLine) -> None:
    """Where the file cannot be written the reason is told."""
    run = tmp_path / "run"
    shutil.copytree(swept, run)
    (run / "sweep.jsonl").unlink()
    (run / "sweep.jsonl").mkdir()
    code, _, err = cli("sweep", run, *SHORT)
    assert code == 2 and "sweep.jsonl" in err.strip().splitlines()[-1], err


@pytest.mark.parametrize("text", ["[]", "{}", '{"checkpoint": 1, "rules": 3, "loops": 2}', "{"])
def test_bad_calibration(text: str, swept: Path, tmp_path: Path, cli: CommandLine) -> None:
    """A file that is no calibration is refused in one line."""
    run = tmp_path / "run"
    shutil.copytree(swept, run)
    (run / "calibration.json").write_text(text)
    code, _, err = cli("generate", run, "The", "--exit", "auto")
    assert code == 2 and err.count("\n") == 1 and "calibration" in err
    (run / "calibration.json").unlink()
    code, _, err = cli("generate", run, "The", "--exit", "auto")
    assert code == 2 and "twoscale calibrate" in err


# -- verdicts ----------------------------------------------------------------------------------------------------


def a_sweep(**points: tuple[float, float, float]) -> Sweep:
    """A sweep with (dce, ms, steps) for each point; intervals of +-0.001 nats and +-2 % of the time."""
    samples = []
    for word, (dce, ms, steps) in points.items():
        family, _, setting = word.replace("__", ":").replace("_", "-").partition(":")
        tau = float(setting.replace("e", "e-")) if setting else None
        samples.append(
            {
                "id": f"{family}:{tau:g}" if setting else family,
                "family": family,
                "label": "",
                "ce": 2 + dce,
                "ppl": 7.0,
                "setting": tau,
                "dce": dce,
                "dce_low": dce - 0.001,
                "dce_high": dce + 0.001,
                "ms": ms,
                "ms_low": 0.98 * ms,
                "ms_high": 1.02 * ms,
                "mean_steps": steps,
                "flops": 1e6 * steps,
                "flops_looks": 0.0,
                "agree": 1.0,
                "steps": [{"mean": steps, "std": 0.0, "histogram": [0, 1]}],
            }
        )  # fmt: skip
    return Sweep({"loops": 30, "checkpoint": "step-1", "groups": 1, "tokens": 1, "clusters": 1, "by": "documents"}, samples, 3)


PAPERS = {
    "full": (0.0, 600.0, 30.0), "fixed__1e0": (0.5, 100.0, 1.0),
    "acceleration__1e5": (0.0, 580.0, 28.0), "acceleration__1e2": (0.002, 360.0, 16.0),
    "kl__1e5": (0.0, 700.0, 20.0), "kl__1e4": (0.0, 650.0, 18.0), "kl__1e3": (0.001, 600.0, 15.0), "kl__1e2": (0.004, 500.0, 12.0),
    "step_norm__1e3": (0.004, 400.0, 18.0), "step_norm__1e2": (0.3, 300.0, 12.0),
}  # fmt: skip


def test_claims_on_exits() -> None:
    """The paper's own numbers confirm (e), (f), (g); opposite ones refute them; what is missing leaves them undecided."""

    def outcomes(**changes: Any) -> str:
        points = copy.deepcopy(PAPERS) | changes
        return "".join(c.outcome[0] for c in judge_exits(a_sweep(**{k: v for k, v in points.items() if v is not None})))

    assert outcomes() == "ccc"
    assert outcomes(acceleration__1e2=(0.002, 575.0, 27.0))[0] == "r" and outcomes(acceleration__1e2=(0.05, 360.0, 16.0))[0] == "r"
    assert outcomes(acceleration__1e2=(0.002, 500.0, 20.0))[0] == "u" and outcomes(acceleration__1e5=None)[0] == "u"
    assert (
        outcomes(kl__1e2=(0.05, 500.0, 12.0))[1] == "r"
        and outcomes(kl__1e3=(0.001, 330.0, 15.0))[1] == "r"
        and outcomes(kl__1e2=None)[1] == "u"
    )
    assert outcomes(step_norm__1e2=(0.0, 300.0, 12.0))[2] == "r" and outcomes(step_norm__1e2=(0.01, 300.0, 12.0))[2] == "u"
    assert outcomes(step_norm__1e3=None)[2] == "u"


def test_recommendation() -> None:
    """The cheapest setting that keeps CE is named, a fixed depth too where it wins; nothing is recommended that loses quality."""
    head, words = recommend(a_sweep(**PAPERS))
    assert head.startswith(
        "Use acceleration:0.01: 360.0 [352.8, 367.2] ms a token, 16.0 steps (40 % less time (38 to 42 %) than all 30 loops"
    )
    assert "The best fixed depth within the same limit of loss is all 30 loops: 600.0" in words
    head, words = recommend(a_sweep(**PAPERS, fixed__6e0=(0.003, 200.0, 6.0)))
    assert head.startswith("Use fixed:6") and "no rule that was tried saves anything" in words and "acceleration:0.01" in words
    head, words = recommend(a_sweep(full=(0.0, 600.0, 30.0), step_norm__1e2=(0.3, 300.0, 12.0)))
    assert head.startswith("Use all 30 loops") and "No rule" in words
    assert recommend(a_sweep(kl__1e2=(0.0, 1.0, 1.0)))[0] == "The sweep is not finished."
    assert signed(-0.00001) == "0.0000" and signed(0.0123) == "+0.0123"


def test_page(swept: Path) -> None:
    """The report shows the trade-off with its figures, every point, claims (a) to (g) and what to use."""
    page = report(swept).path.read_text()
    for name in ("against_tau", "tradeoff", "steps_taken", "hard_tokens", "token_kinds"):
        assert f"<details class='part' id='{name}'" in page and (swept / "report" / "figures" / f"{name}.png").stat().st_size > 10_000
    for letter in "abcdefg":
        assert f"({letter}) " in page
    sweep = read_sweep(swept / "sweep.jsonl")
    assert sweep is not None and f"All {len(sweep.points)} points" in page and "id='recommendation'" in page
    assert page.index("class='verdicts'") < page.index("id='contents'") < page.index("id='claims'"), "the verdicts are on the first screen"
    untimed, timed = (html.escape(measured_words(sweep.header, rounds)) for rounds in (0, sweep.rounds))
    decides = sweep.cost == "ms"
    assert "corpus.txt" in untimed and "decoding of 8 tokens of 1 window of" in timed and sweep.header["timed_tokens"] == 8
    assert (page.count(untimed), page.count(timed)) == (4 - decides, 2 + decides), "three figures, two with times, and the recommendation"
    assert "Losses are to be compared only where they are of the same tokens" in page and "the default of 3 loops" in page


def test_eval(swept: Path, cli: CommandLine) -> None:
    """Loss, perplexity and bits per byte: with bytes for tokens a byte's bits are its nats over ln 2; exits say their steps."""
    code, out, _ = cli("eval", swept, "--windows", "4", "--exit", "auto")
    assert code == 0 and "bits per byte" in out and "of 6" in out
    found = twoscale.evaluate(swept, windows=4, loops=3)
    ends = found.tokens - found.bytes  # ends of documents stand for no byte
    assert 0 <= ends < 20 and found.steps == [3.0, 3.0]
    assert found.bits_per_byte == pytest.approx(found.ce / math.log(2) * found.tokens / found.bytes)
    for words, printed in ((("--windows", "0"), "--windows"), (("--loops", "0"), "loops"), (("--exit", "no"), "no exit rule")):
        code, _, err = cli("eval", swept, *words)
        assert code == 2 and printed in err and err.count("\n") == 1


def test_byte_lengths(corpus: Path) -> None:
    """A text's tokens stand for exactly its bytes, whatever the tokenizer."""
    from twoscale.data.tokenizer import byte_tokenizer, train_bpe

    for tokenizer in (byte_tokenizer(), train_bpe([corpus.read_text()], 300)):
        text = "the loop settles, naïvely: 循環\n\t<|endoftext|>"
        assert int(tokenizer.byte_lengths()[tokenizer.encode(text)].sum()) == len(text.encode())
        assert tokenizer.byte_lengths()[tokenizer.eot] == 0


def test_learned_calibration_keeps_its_heads(trained: Path, tmp_path: Path, cli: CommandLine) -> None:
    """A calibration of the learned rule goes on with the controller that was certified, whatever controller.json becomes; a text of
    another fingerprint trains another."""
    from twoscale.tradeoff.load_run import calibration_for

    run = tmp_path / "run"
    shutil.copytree(trained, run)
    code, out, err = cli("calibrate", run, "--rule", "learned", "--max-dce", "0.5", "--loops", "6", "--windows", "6")
    assert code == 0 and "learned" in out, err
    before = json.loads((run / "controller.json").read_text())
    rules, _ = calibration_for(run)
    changed = before | {"heads": [[0.0] * 7 for _ in before["heads"]]}
    (run / "controller.json").write_text(json.dumps(changed))
    again, _ = calibration_for(run)
    assert again == rules and all([list(h) for h in rule.heads] == before["heads"] for rule in again.values())  # type: ignore[attr-defined]
    (run / "controller.json").write_text(json.dumps(before | {"text": "another"}))
    assert cli("sweep", run, *SHORT, "--rules", "step-norm", "--taus", "0.1")[0] == 0
    assert json.loads((run / "controller.json").read_text())["text"] == before["text"]
    code, _, err = cli("calibrate", run, "--rule", "kl:0.01,read=coda", "--loops", "4", "--windows", "3")
    assert code == 2 and "coda" in err


def test_report_leaves_out_a_foreign_calibration(swept: Path, tmp_path: Path) -> None:
    """A calibration of another checkpoint than the sweep's is not shown beside it."""
    from twoscale.report.load import load_run

    run = tmp_path / "run"
    shutil.copytree(swept, run)
    assert load_run(run).calibration is not None
    found = json.loads((run / "calibration.json").read_text())
    (run / "calibration.json").write_text(json.dumps(found | {"weights": "other"}))
    assert load_run(run).calibration is None


def test_one_round_decides_nothing() -> None:
    """Claims on time need several rounds."""
    sweep = a_sweep(**PAPERS)
    lone = Sweep(sweep.header, sweep.points, 1)
    assert [c.outcome for c in judge_exits(lone)][:2] == ["undecided", "undecided"]
