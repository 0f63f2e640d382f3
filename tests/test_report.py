"""Geometry over training, `trace`, the claims' rules, the figures and the page."""

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure
from PIL import Image

from conftest import CommandLine, nano_run
from forked import start_process
from training import arguments, finish
from twoscale.bench.trace import bench_trace
from twoscale.config import UserError
from twoscale.config.serial import read_jsonl
from twoscale.geometry.probe import probe_geometry
from twoscale.model import LoopedGPT
from twoscale.report import registry
from twoscale.report.build import report
from twoscale.report.claims import judge
from twoscale.report.load import RunFiles, load_run
from twoscale.report.overview import MARKS
from twoscale.report.page import page_html, run_html
from twoscale.report.registry import FigureEntry
from twoscale.report.style import chosen, ordered_colours, visible
from twoscale.train import start_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    """A nano run with geometry over training, traced."""
    from twoscale.cli.main import main

    out = tmp_path_factory.mktemp("report") / "run"
    start_run(nano_run(steps=12, geometry_interval=4, checkpoint_interval=6, keep_last=5), out, shards, probes=[probe_geometry])
    assert main(["trace", str(out), "--data-dir", str(shards), "--loops", "16", "--sequences", "4", "--limit-loops", "20"]) == 0
    return out


def test_geometry_over_training(run: Path, shards: Path, tmp_path: Path) -> None:
    """Training measures at the start, at the interval and at the end, and says what that cost; it changes nothing else."""
    records = read_jsonl(run / "geometry.jsonl")
    assert [r["step"] for r in records] == [0, 4, 8, 12]
    assert all(len(r["groups"]) == 2 and r["optimizer"] == "muon" for r in records)
    assert len(records[1]["groups"][0]["step_norm"]["mean"]) == 30 and "limit" in records[-1]["groups"][0]
    metrics = read_jsonl(run / "metrics.jsonl")
    assert [r["step"] for r in metrics if "geometry_s" in r] == [1, 4, 8, 12], "step 1 carries the cost of the look before training"
    start_run(nano_run(steps=12, geometry_interval=0), tmp_path / "without", shards, probes=[probe_geometry])
    assert [r["loss"] for r in read_jsonl(tmp_path / "without" / "metrics.jsonl")] == [r["loss"] for r in metrics]
    assert not (tmp_path / "without" / "geometry.jsonl").exists()


def test_processes_measure_the_same(shards: Path, tmp_path: Path) -> None:
    """Two sharded processes write the records that one writes."""
    config = nano_run(steps=8, geometry_interval=4)
    start_run(config, tmp_path / "one", shards, probes=[probe_geometry])
    finish(start_process([*arguments(config, tmp_path / "two", shards), "--train.parallel", "fsdp"], processes=2))
    one, two = (read_jsonl(tmp_path / name / "geometry.jsonl") for name in ("one", "two"))
    assert [r["step"] for r in one] == [r["step"] for r in two] == [0, 4, 8]
    for a, b in zip(one, two, strict=True):
        for g, h in zip(a["groups"], b["groups"], strict=True):
            assert g["step_norm"]["mean"][:5] == pytest.approx(h["step_norm"]["mean"][:5], rel=1e-3)


def test_trace_all(run: Path, shards: Path, cli: CommandLine) -> None:
    """`trace --all` measures every checkpoint again, in place of what training wrote for those steps."""
    before = {r["step"]: r for r in read_jsonl(run / "geometry.jsonl")}
    words = ("--data-dir", shards, "--loops", "16", "--sequences", "2", "--limit-loops", "20")
    code, _, err = cli("trace", run, "--all", *words)
    assert code == 0 and "2/2 step-000012" in err
    after = {r["step"]: r for r in read_jsonl(run / "geometry.jsonl")}
    assert set(after) == {0, 4, 6, 8, 12} and after[4] == before[4] and "limit" in after[6]["groups"][0]
    sequence = json.loads((run / "trace" / "sequence.json").read_text())
    assert len(sequence["tokens"]) == len(sequence["verdicts"][0]) == 64 and len(sequence["pca"]["paths"][0]["groups"][0]) == 17


def test_page(run: Path, cli: CommandLine) -> None:
    """The page holds every figure, the tables and the claims with their rules; figures are there as PNG and PDF."""
    code, out, err = cli("report", run)
    page = Path(out.strip()).read_text()
    mapped = "so there is no map to draw" not in page
    count = 7 if mapped else 6
    assert f"figure 1/{count}, step_norms" in err and f"figure {count}/{count}" in err, "progress on stderr"
    assert code == 0 and len(page) < 8_000_000 and "writing" in err.splitlines()[-1]
    for name in ("step_norms", "step_cosines", "accelerations", "drift_to_loop", "limit", "trajectories", "verdict_map"):
        assert f"<a href='#{name}'>" in page and f"<details class='part' id='{name}'>" in page, "in the contents, and folded"
        if name == "verdict_map" and not mapped:
            assert f"{name}.png" not in page and not list((run / "report" / "figures").glob(f"{name}*")), "a sentence in its place"
            continue
        assert f"id='{name}-0'" in page
        image = Image.open(run / "report" / "figures" / f"{name}.png")
        assert image.width > 800 and len(set(image.convert("L").resize((200, 200)).tobytes())) > 5
        assert (run / "report" / "figures" / f"{name}.pdf").read_bytes().startswith(b"%PDF")
    for letter in "abcd":
        assert f"({letter})" in page
    assert "leads with it" in page and "muon" in page


def test_no_network(run: Path) -> None:
    """The page loads nothing from anywhere: no source, link or import but fragments and its own figures."""
    page = report(run).path.read_text()
    outside_script = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    for target in re.findall(r"(?:src|href)=['\"]([^'\"]+)", outside_script):
        assert target.startswith(("figures/", "#")), target
    assert "@import" not in outside_script and "url(" not in outside_script


def test_one_entry_a_figure(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure is one entry of the registry and the function that draws it: files, section, verdicts and the value follow from it."""

    def toy(run: RunFiles) -> Figure:
        figure, ax = plt.subplots()
        ax.plot(run.last["groups"][0]["step_norm"]["mean"])
        return figure

    missing = FigureEntry("absent", "Absent", "Not shown.", toy, available=lambda run: False)
    norms = next(entry for entry in registry.FIGURES if entry.name == "step_norms")
    monkeypatch.setattr(registry, "FIGURES", (norms, FigureEntry("toy", "A toy", "With `code`.", toy, claims="d"), missing))
    lines: list[str] = []
    found = report(run, tmp_path / "out", progress=lines.append)
    page = found.path.read_text()
    assert (
        "<details class='part' id='toy'><summary><h2>A toy</h2></summary><p>With <code>code</code>. Claim (d): " in page
        and "<img src='figures/toy.png' alt='A toy'>" in page
    )
    assert "absent" not in page and not list((tmp_path / "out").rglob("absent*")) and "id='step_norms-0'" in page
    assert list(found.runs[0].figures) == ["step_norms", "toy"] and all(
        (tmp_path / "out" / "figures" / f"toy.{kind}").exists() for kind in ("png", "pdf")
    )
    assert [line.partition(": ")[2] for line in lines[:2]] == ["figure 1/2, step_norms", "figure 2/2, toy"]


def test_report_value(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report returns a value with one line for a repr: path, figures and verdicts; there is no advice without a sweep."""
    monkeypatch.setattr(registry, "FIGURES", tuple(registry.figures_of(load_run(run))[:1]))
    found = report([str(run)], str(tmp_path / "out"))
    one = found.runs[0]
    assert found.path == tmp_path / "out" / "index.html" and one.setting is None and one.advice == "" and one.folder == run
    verdicts = " ".join(f"{letter}{MARKS[claim.outcome]}" for letter, claim in one.claims.items())
    assert repr(found) == f"Report({found.path}; {one.name}: 1 figure, {verdicts})" and list(one.claims) == list("abcd")
    assert [c.outcome for c in one.claims.values()] == [c.outcome for c in judge(load_run(run).geometry)]
    with pytest.raises(UserError, match="at least one run"):
        report([])


def test_looks(run: Path) -> None:
    """The page follows the reader's system, or is light or dark where that is asked for."""
    files = load_run(run)
    both, dark, light = (page_html([files], [run_html(files, "figures")], asked) for asked in (None, True, False))
    assert "content='light dark'" in both and "@media (prefers-color-scheme: dark)" in both and "matchMedia('(prefers" in both
    assert "content='dark'" in dark and "prefers-color-scheme" not in dark.split("</style>")[0] and "{matches: true," in dark
    assert (
        "content='light'" in light and "{matches: false," in light and light.count("--page: #f5f7fa") == 1 == dark.count("--page: #10171d")
    )


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)")
def test_page_in_a_browser(run: Path, tmp_path: Path) -> None:
    """In a browser every plot is drawn once all sections are open, inside its card, at desktop and phone width."""
    page = report(run).path
    for width in (1280, 500):
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
        flags += ["--disable-component-update", "--disable-quic", f"--user-data-dir={tmp_path / str(width)}", f"--window-size={width},3000"]
        command = [str(CHROMIUM), *flags, "--virtual-time-budget=20000", "--dump-dom", f"file://{page}#all"]
        dom = subprocess.run(command, capture_output=True, text=True, timeout=180).stdout
        assert dom.count("main-svg") >= 10, "the plots are drawn"
        sizes = [int(float(w)) for w in re.findall(r"class=\"main-svg\"[^>]*?width=\"([\d.]+)\"", dom)]
        assert sizes and max(sizes) <= width


def test_one_legend_a_figure(run: Path) -> None:
    """Panels of a figure share one legend above them, which names each curve once; the panels have none."""
    page = report(run).path.read_text()
    part = page.split("<details class='part' id='step_norms'>")[1].split("</details>")[0]
    names = re.findall(r"data-name='([^']*)'", part)
    assert part.count("class='keys'") == 1 and len(names) == len(set(names)) > 1 and "training step:" in part
    figures = [json.loads(text) for text in re.findall(r"<script type='application/json'[^>]*>(.*?)</script>", part, flags=re.S)]
    assert len(figures) == 2 and all(f["layout"]["showlegend"] is False for f in figures)
    assert {t["name"] for f in figures for t in f["data"] if t.get("showlegend") is not False} == set(names)


def test_report_needs_no_torch() -> None:
    """The report is made of saved numbers: importing it imports no torch."""
    script = "import sys, twoscale.report.build; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def record(norms: list[float], cosines: list[float], drift: float, step: int = 100) -> dict[str, Any]:
    n = [1000] * len(cosines)
    group = {"name": "4", "step_norm": {"mean": norms}, "step_cosine": {"mean": cosines, "count": n}}
    other = copy.deepcopy(group) | {"name": "5"}
    return {"step": step, "groups": [group, other], "boundaries": [{"from": "4", "to": "5", "dlr": {"settled_k1": {"mean": drift}}}]}


def outcomes(*records: dict[str, Any]) -> str:
    return "".join(c.outcome[0] for c in judge(records))


def test_claims() -> None:
    """Each claim comes out confirmed, refuted or undecided by its rule."""
    decay, slow = [4 * 0.5**k for k in range(30)], [4 * 0.9**k for k in range(30)]
    steady, moving = [0.5] * 29, [0.9 - 0.05 * k for k in range(29)]
    assert outcomes(record(decay, steady, 20)) == "ccuc"
    assert outcomes(record([1.0] * 30, moving, 0.5)) == "rrur"
    assert outcomes(record(slow, [0.5] * 22 + [0.3] * 7, 2)) == "uuuu"
    assert outcomes(record(slow, moving, 9, step=10), record(decay, steady, 9)) == "cccc"
    assert outcomes(record(decay, steady, 9, step=10), record(slow, moving, 9)) == "urrc"
    assert outcomes(record(slow, moving, 9, step=0), record(decay, steady, 9)) == "ccuc", "the start is not training"
    assert outcomes(record(decay[:5], steady[:4], 9)) == "uuuc", "too few steps to judge"
    sunk = record(decay, steady, 9)
    for g in sunk["groups"]:
        g["step_cosine"]["count"] = [1000] * 8 + [10] * 21
    assert outcomes(sunk) == "cuuc", "cosines of rounding do not count"


def test_bad_input(run: Path, shards: Path, tmp_path: Path, cli: CommandLine) -> None:
    """Missing runs, runs without measurements, broken lines and foreign shards get one clear line."""
    (tmp_path / "empty").mkdir()
    broken = tmp_path / "broken"
    shutil.copytree(run, broken)
    (broken / "geometry.jsonl").write_text('{"step": 1\n')
    bare = tmp_path / "bare"
    shutil.copytree(run, bare)
    (bare / "geometry.jsonl").unlink()
    hollow = tmp_path / "hollow"
    shutil.copytree(run, hollow)
    (hollow / "geometry.jsonl").write_text("{}\n")
    other = tmp_path / "other"
    assert (
        cli(
            "prepare", "--source", shards.parent.parent / "corpus0" / "corpus.txt", "--tokenizer", "bpe", "--bpe-vocab", 300, "--out", other
        )[0]
        == 0
    )
    cases = {
        ("report", tmp_path / "none"): "no folder",
        ("report", tmp_path / "empty"): "config.json does not exist",
        ("report", broken): "line 1 is not JSON",
        ("report", bare): "twoscale trace",
        ("report", hollow): "no measurements",
        ("trace", tmp_path / "none"): "no folder",
        ("trace", tmp_path / "empty"): "no checkpoint",
        ("trace", run, "--data-dir", tmp_path / "none"): "does not exist",
        ("trace", run, "--data-dir", other): "another tokenizer",
        ("trace", run, "--loops", 0): "between 1",
        ("trace", run, "--checkpoint", "step-000777"): "step-000777",
        ("bench", "trace", "--repeats", 0): "at least 1",
    }
    for args, word in cases.items():
        code, _, err = cli(*args)
        assert code == 2 and word in err and len(err.strip().splitlines()) == 1, (args, err)


def test_strange_tokens_and_names(run: Path, tmp_path: Path) -> None:
    """Dollar signs, closing tags and markup in tokens and names are printed, not obeyed."""
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    sequence = json.loads((copied / "trace" / "sequence.json").read_text())
    sequence["tokens"][:3] = ["$$", "$\\foo$", "</script>"]
    sequence["tokens"][sequence["pca"]["paths"][-1]["token"]] = "$x$"
    (copied / "trace" / "sequence.json").write_text(json.dumps(sequence))
    records = read_jsonl(copied / "geometry.jsonl")
    records[-1]["boundaries"][0]["from"] = "<img src=x onerror=alert(1)>"
    (copied / "geometry.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    page = report(copied).path.read_text()
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert "<img" not in outside and "&lt;img" in outside


def test_trace_of_an_older_checkpoint(run: Path, shards: Path, tmp_path: Path, cli: CommandLine) -> None:
    """A named checkpoint is measured even when the newest one is damaged."""
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    (copied / "checkpoints" / "step-000012" / "model.safetensors").write_bytes(b"")
    few = ("--data-dir", shards, "--loops", 8, "--sequences", 1, "--limit-loops", 8)
    assert cli("trace", copied, *few)[0] == 2
    assert cli("trace", copied, "--checkpoint", "step-000006", *few)[0] == 0


def test_bench_trace() -> None:
    """The bench measures the plain pass, the trace and the statistics in one run."""
    result = bench_trace(LoopedGPT(nano_run().model).eval(), sequences=2, loops=4, repeats=1)
    assert min(result.forward_s, result.trace_s, result.measure_s) > 0 and result.tokens == 128


def test_small_runs_still_report(run: Path, shards: Path, tmp_path: Path) -> None:
    """One group, one step, one record: a page without the figures that need more."""
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    records = read_jsonl(copied / "geometry.jsonl")[:1]
    records[0]["boundaries"] = []
    records[0]["groups"] = records[0]["groups"][:1]
    for name in ("step_cosine", "acceleration", "acceleration_steps", "acceleration_state"):
        records[0]["groups"][0].pop(name)
    (copied / "geometry.jsonl").write_text(json.dumps(records[0]) + "\n")
    shutil.rmtree(copied / "trace")
    page = report(copied).path.read_text()
    assert "id='step_norms-0'" in page and "id='drift_to_loop-0'" not in page and len(load_run(copied).geometry) == 1


def test_a_cut_line_of_metrics(run: Path, tmp_path: Path) -> None:
    """A kill may cut the last line of metrics.jsonl; the report is made all the same."""
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    with open(copied / "metrics.jsonl", "a") as f:
        f.write('{"step": 13, "lo')
    assert len(load_run(copied).metrics) == 12


def test_style() -> None:
    """Colours are distinct and ordered, labels show what cannot be seen, at most six lines stand in a panel."""
    assert len(set(ordered_colours(6))) == 6 and ordered_colours(1) == ["#440154"]
    assert visible(" a\n\t\x00") == "␣a⏎⇥·" and visible("") == "·"
    kept = chosen([{"step": i} for i in range(40)])
    assert len(kept) == 6 and kept[0]["step"] == 0 and kept[-1]["step"] == 39
