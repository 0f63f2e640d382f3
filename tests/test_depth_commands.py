"""`sweep`, `calibrate`, `trace` and `report` on a run of a task: values, files, resumption, bad input."""

import json
import shutil
from pathlib import Path

import pytest

import twoscale
from conftest import CommandLine, is_one_line
from training import tiny_hops
from twoscale import exits
from twoscale.config.serial import read_jsonl
from twoscale.geometry.probe import probe_geometry
from twoscale.tradeoff import commands
from twoscale.tradeoff.depth import drop_bound
from twoscale.tradeoff.depth_summary import PAIRS, depth_rows
from twoscale.tradeoff.evaluate import evaluate
from twoscale.tradeoff.summary import Sweep, read_sweep
from twoscale.tradeoff.task_points import TASK_RULES
from twoscale.train import start_run

SHORT = ("--loops", "4", "--samples", "6", "--rounds", "1", "--max-accuracy-drop", "0.3")


# -- the commands ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def task_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on a tiny hops."""
    run = tmp_path_factory.mktemp("depth") / "run"
    start_run(tiny_hops(staircase_loops=4, geometry_loops=6), run, probes=[probe_geometry])
    return run


@pytest.fixture(scope="module")
def swept(task_run: Path) -> Path:
    from twoscale.cli.main import main

    assert main(["sweep", str(task_run), *SHORT]) == 0
    return task_run


def found_in(run: Path) -> Sweep:
    sweep = read_sweep(run / "sweep.jsonl")
    assert sweep is not None
    return sweep


def test_everything_is_measured(swept: Path) -> None:
    """Every rule has points, a choice for all tokens and one for the answers, beside fixed depths, random exits and the true depths."""
    sweep = found_in(swept)
    rules = {*TASK_RULES[:-1], "learned", "learned:hits=2", "learned:hits=3"}  # the model has no gate
    assert sweep.task == "hops" and {p["family"].removesuffix("@answers") for p in sweep.points} - rules <= {
        "full",
        "fixed",
        "random",
        "true-depth",
        "true-depth+1",
    }
    assert {(c["family"], c["scope"]) for c in sweep.choices} == {(r, s) for r in rules for s in ("all", "answers")} | {("fixed", "all")}
    assert {(c["a"], c["b"]) for c in sweep.comparisons} == set(PAIRS)
    full = sweep.point("full")
    assert full is not None and full["mean_steps"] == 4 and full["drop"] == 0 and full["spearman"] is None
    assert [p["mean_steps"] for p in sweep.family("fixed")] == [1, 2, 3]
    for p in sweep.points:
        for key in ("accuracy", "drop", "mean_steps"):
            assert p[f"{key}_low"] <= p[key] <= p[f"{key}_high"], p["id"]
        assert sum(row["answers"] for row in p["by_depth"]) == sweep.header["tokens"] == 12
    rows = depth_rows(sweep)
    assert len(rows) == 2 * len(rules) + 3 and [r.steps for r in rows if r.id] == sorted(r.steps for r in rows if r.id)
    timed = [p["id"] for p in sweep.points if "timed_steps" in p]
    assert "full" in timed and all(sweep.point(id)["ms"] > 0 for id in timed)  # type: ignore[index]


def test_choices_are_certified(swept: Path) -> None:
    """A choice's bound is that of its setting on the certify part and keeps the limit; the settings tested before it passed as well."""
    opened = commands.load_run(swept)
    certify = opened.text("certify", 6)
    full, sweep = evaluate(opened.model, certify, None, 4), found_in(swept)
    for choice in (c for c in sweep.choices if c["id"] is not None and not c["family"].startswith("learned")):
        rule = exits.parse(choice["id"])
        rule = rule if choice["scope"] == "all" else exits.AnswersOnly.of(rule, certify.asked)
        bound = drop_bound(certify, evaluate(opened.model, certify, rule, 4), full, 0.05)
        assert choice["bound"] == pytest.approx(bound) and bound <= 0.3 and choice["tested"] <= choice["settings"]


def test_comparisons_are_paired(swept: Path) -> None:
    """A comparison is the difference of the two choices' mean steps on the report part."""
    sweep = found_in(swept)
    steps = {row.family: row.steps for row in depth_rows(sweep) if row.scope == "all"}
    for c in sweep.comparisons:
        assert c["steps"] == pytest.approx(steps[c["a"]] - steps[c["b"]]) and c["low"] - 1e-9 <= c["steps"] <= c["high"] + 1e-9


def test_resumed(swept: Path, tmp_path: Path, cli: CommandLine) -> None:
    """A finished sweep is only read; one that was cut goes on behind its last whole line and ends the same."""
    run = tmp_path / "run"
    shutil.copytree(swept, run)
    whole = (run / "sweep.jsonl").read_text()
    code, out, _ = cli("sweep", run, *SHORT)
    assert code == 0 and (run / "sweep.jsonl").read_text() == whole and "rank correlation" in out
    lines = whole.splitlines(keepends=True)
    choice = next(i for i, line in enumerate(lines) if '"choice"' in line) + 3
    (run / "sweep.jsonl").write_text("".join(lines[:choice]) + lines[choice][:20])
    assert cli("sweep", run, *SHORT)[0] == 0
    ours, theirs = ({json.dumps(r, sort_keys=True) for r in read_jsonl(p / "sweep.jsonl") if r["kind"] != "round"} for p in (run, swept))
    assert ours == theirs


def test_python(swept: Path) -> None:
    """`twoscale.sweep` returns the values with a line that says what was found, and a table."""
    found = twoscale.sweep(swept, loops=4, samples=6, rounds=1, max_accuracy_drop=0.3)
    assert repr(found).startswith("Sweep(step-000002, task hops: ") and "\n" not in repr(found)
    pytest.importorskip("pandas")
    table = found.to_pandas()
    assert {"id", "accuracy", "mean_steps", "spearman", "drop"} <= set(table.columns) and len(table) == len(found.points)


def test_calibrate(swept: Path, cli: CommandLine, tmp_path: Path) -> None:
    """Calibration certifies on the drop of accuracy, chooses what the sweep chose, and `--exit auto` then uses it."""
    run = tmp_path / "run"
    shutil.copytree(swept, run)
    code, out, _ = cli("calibrate", run, "--rule", "kl", "--loops", 4, "--samples", 6, "--max-accuracy-drop", 0.3, "--delta", 0.1)
    assert code == 0 and "asked: max-accuracy-drop 0.3" in out and "nats" not in out
    found = json.loads((run / "calibration.json").read_text())
    choice = next(c for c in found_in(swept).choices if c["family"] == "kl" and c["scope"] == "all")
    assert found["rules"] == [choice["id"]] and found["goal"] == {"max_accuracy_drop": 0.3} and found["task"] == "hops"
    assert found["tokens"] == {"fit": 4, "certify": 12, "report": 12} and found["bound"] == pytest.approx(choice["bound"] or 0.0)
    assert found["report"]["calibrated"]["accuracy"] <= 1
    found_again = twoscale.calibrate(run, rule="kl", loops=4, samples=6, max_accuracy_drop=0.3)
    assert "steps an answer, accuracy drops by at most" in repr(found_again) and "nats" not in repr(found_again)
    for words in (("--mean-steps", 3), ("--rule", "learned", "--max-accuracy-drop", 0.5)):
        assert cli("calibrate", run, "--loops", 4, "--samples", 6, *words)[0] == 0


def test_report(swept: Path, tmp_path: Path, cli: CommandLine, undrawn: None) -> None:
    """The report of a run on a task has the staircase, steps against depth, the table of rules and the sentences, and no claim on text."""
    run = tmp_path / "run"
    shutil.copytree(swept, run)
    code, out, err = cli("report", run)
    assert code == 0, err
    page = Path(out.strip()).read_text()
    for words in (
        "Where do the steps go?",
        "The staircase",
        "Steps against the true depth",
        "The second hit of acceleration",
        "true depths",
    ):
        assert words in page
    assert "</span> (e) " not in page and "</span> (a) " in page and (run / "report" / "figures" / "staircase.png").exists()
    assert f"twoscale sweep {run.as_posix()} --loops 4 --samples 6 --max-accuracy-drop 0.3 --rounds 1" in page


def test_trace_of_a_task(task_run: Path, cli: CommandLine, tmp_path: Path) -> None:
    """`trace` measures a run on a task on its held-out samples."""
    run = tmp_path / "run"
    shutil.copytree(task_run, run)
    code, _, err = cli("trace", run, "--loops", 4, "--sequences", 3, "--limit-loops", 5)
    assert code == 0 and f"{3 * 10} tokens of held-out samples of hops" in err
    assert read_jsonl(run / "geometry.jsonl")[-1]["source"] == "hops"


def test_the_name_hops(tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`hops` is a run of the task model in the package, with its task and its staircase, made when it is first asked for."""
    monkeypatch.chdir(tmp_path)
    found = twoscale.sweep("hops", rules=["cosine"], loops=13, samples=2, rounds=1, max_accuracy_drop=0.4, controller=False)
    run = tmp_path / "runs" / "bundled-hops"
    assert found.task == "hops" and (run / "task.json").exists() and (run / "staircase.json").exists() and not (run / "data").exists()
    fixed = {p["id"]: p["accuracy"] for p in found.family("fixed")}
    assert fixed["fixed:12"] == 1.0 and fixed["fixed:3"] < 0.7


def test_card(swept: Path, tmp_path: Path, cli: CommandLine) -> None:
    """The card of an exported model of a task says which rules find the depth, and nothing of losses."""
    code, _, err = cli("export", swept, "--out", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert code == 0 and "12 answers (6 held-out samples) of the task hops" in card and "dCE" not in card, err


# -- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sweep", "--data-dir", "."), "which makes its own samples"), (("calibrate", "--data-dir", "."), "which makes its own samples"),
        (("trace", "--data-dir", "."), "which makes its own samples"),
        (("sweep", "--taus", "0.1"), "--taus goes with text"), (("sweep", "--windows", "3"), "--windows goes with text"),
        (("calibrate", "--max-dce", "0.1"), "--max-dce goes with text"), (("calibrate", "--windows", "9"), "--windows goes with text"),
        (("sweep", "--samples", "1"), "--samples 1: give between 2"), (("sweep", "--max-accuracy-drop", "2"), "between 0 and 1"),
        (("calibrate", "--max-accuracy-drop", "2"), "between 0 and 1"), (("sweep", "--rules", "kl:0.1"), "write kl without one"),
        (("calibrate", "--rule", "fixed:3"), "has no threshold"), (("eval",), "has no text"),
        (("calibrate", "--max-accuracy-drop", "0.1", "--mean-steps", "3"), "ask for one thing"),
    ],
)  # fmt: skip
def test_bad_flags_on_a_task(words: tuple[str, ...], said: str, task_run: Path, cli: CommandLine) -> None:
    """A setting that a task does not have is refused in one line."""
    code, _, err = cli(words[0], task_run, *words[1:])
    assert code == 2 and said in err and is_one_line("twoscale " + err.rpartition("twoscale ")[2]), err


@pytest.mark.parametrize("words", [("sweep", "--samples", "9"), ("calibrate", "--max-accuracy-drop", "0.1")])
def test_task_flags_on_text(words: tuple[str, ...], trained: Path, shards: Path, cli: CommandLine) -> None:
    """A setting of tasks is refused on a run on text."""
    code, _, err = cli(words[0], trained, *words[1:], "--data-dir", shards)
    assert code == 2 and "goes with a task: this run was trained on text" in err and is_one_line(err)


def test_files_of_another_version(swept: Path, tmp_path: Path, cli: CommandLine, undrawn: None) -> None:
    """A task.json or a task's sweep.jsonl of another version, or with lines that are none, is refused in one line."""
    run = tmp_path / "run"
    shutil.copytree(swept, run)
    body = json.loads((run / "task.json").read_text())
    (run / "task.json").write_text(json.dumps(body | {"version": 7}))
    for command in ("sweep", "calibrate"):
        code, _, err = cli(command, run)
        assert code == 2 and "is of version 7" in err and is_one_line(err)
    (run / "task.json").write_text(json.dumps(body))
    lines = [json.loads(line) for line in (run / "sweep.jsonl").read_text().splitlines()]
    for number, change, said in (
        (0, {"task_version": 9}, "version 9"), (3, {"accuracy": "high"}, "line 4"), (2, {"by_depth": [{"depth": 1}]}, "line 3"),
        (5, {"kind": "other"}, "line 6"), (4, {"mean_steps": True}, "line 5"),
    ):  # fmt: skip
        changed = [line | change if i == number else line for i, line in enumerate(lines)]
        (run / "sweep.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
        code, _, err = cli("report", run)
        assert code == 2 and said in err and is_one_line(err), err
