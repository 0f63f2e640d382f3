"""The report of one run or several, as a function: figures in files, one page, and a value that says what came out.

found = report("runs/tiny")            # Report(runs/tiny/report/index.html; tiny: 11 figures, a✓ b✓ c? d✓ e? f✓ g✗, use fixed:4)
found.runs[0].claims["b"].measured     # the numbers of a verdict
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import matplotlib.pyplot as plt

from twoscale.config import UserError
from twoscale.config.files import atomic_write, make_folder
from twoscale.config.run_folder import IN_THE_PACKAGE, ReportFolder, check_run
from twoscale.config.words import plural
from twoscale.report.advice import recommend
from twoscale.report.claims import Claim
from twoscale.report.depth_words import headline
from twoscale.report.figures import STYLE
from twoscale.report.load import RunFiles, load_run
from twoscale.report.overview import MARKS, missing
from twoscale.report.page import claims_of, names_of, page_html, run_html
from twoscale.report.registry import figures_of
from twoscale.tradeoff.choice import choose, name_of
from twoscale.tradeoff.depth_summary import depth_rows, rules_alone


@dataclass(frozen=True)
class RunReport:
    """What a report says of one run."""

    name: str
    folder: Path
    figures: dict[str, Path]
    """Name of a figure -> its PNG; the PDF lies beside it."""
    claims: dict[str, Claim]
    """Letter -> the paper's claim with this run's verdict and numbers."""
    setting: str | None
    """What is recommended, for example `fixed:4`; None without a sweep."""
    advice: str
    """The recommendation in a sentence; empty without a sweep."""

    def __str__(self) -> str:
        verdicts = " ".join(f"{letter}{MARKS[claim.outcome]}" for letter, claim in self.claims.items())
        return f"{self.name}: {plural(len(self.figures), 'figure')}, {verdicts}" + (f", use {self.setting}" if self.setting else "")


@dataclass(frozen=True, repr=False)
class Report:
    """A page that was written."""

    path: Path
    """The page, index.html."""
    runs: tuple[RunReport, ...]

    def __repr__(self) -> str:
        return f"Report({self.path}; {'; '.join(map(str, self.runs))})"


def report(
    runs: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    dark: bool | None = None,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Figures, tables, the paper's claims and their verdicts on one page: in RUN/report, and for several runs in `report` beside the first.

    A run is its folder, or `bundled`. The page opens from disk and needs no network; it follows the reader's system, light or dark,
    unless `dark` says which. `progress` is called with a line before each figure and before the page.
    """
    named = [runs] if isinstance(runs, str | Path) else list(runs)
    if not named:
        raise UserError("name at least one run")
    say = progress or _quiet
    folders = [_folder(run, progress) for run in named]
    files = [load_run(folder) for folder in folders]
    place = ReportFolder(make_folder(Path(out))) if out is not None else ReportFolder.of(*folders)
    parts, found = [], []
    for i, (run, name) in enumerate(zip(files, names_of(files), strict=True)):
        several = len(files) > 1
        figures = place.figures(i + 1 if several else None)
        drawn = _draw(run, make_folder(figures), say)
        parts.append(run_html(run, figures.relative_to(place.path).as_posix(), f"r{i}-" if several else ""))
        found.append(_run_report(run, name, drawn))
        for what, command in missing(run):
            say(f"not measured yet: {what}; `{command}` measures it")
    say(f"writing {place.page}")
    with atomic_write(place.page) as f:
        f.write(page_html(files, parts, dark).encode())
    return Report(place.page, tuple(found))


def _quiet(line: str) -> None:
    """No progress."""


def _folder(run: str | Path, progress: Callable[[str], None] | None) -> Path:
    """The folder of a run; of the bundled model one is made, which takes torch and is done a layer above."""
    if str(run) in IN_THE_PACKAGE:
        return importlib.import_module("twoscale.interop.runs").as_run(run, progress)  # type: ignore[no-any-return]
    return check_run(Path(run))


def _run_report(run: RunFiles, name: str, figures: dict[str, Path]) -> RunReport:
    choice = choose(run.sweep, run.calibration) if run.sweep is not None else None
    setting = name_of(choice.pick, run.sweep.header["loops"]) if run.sweep is not None and choice is not None else None
    advice = recommend(run.sweep, run.calibration)[0] if run.sweep is not None else ""
    if run.depth is not None:
        best = next((row.id for row in rules_alone(depth_rows(run.depth)) if row.verdict == "finds"), None)
        setting, advice = best, headline(run.depth)
    return RunReport(name, run.folder, figures, {c.letter: c for c in claims_of(run)}, setting, advice)


def _draw(run: RunFiles, folder: Path, progress: Callable[[str], None]) -> dict[str, Path]:
    """Every figure that the run's files allow, as NAME.png and NAME.pdf; the PNGs by name. One that a sentence stands for is not drawn, and
    removed where it was drawn before."""
    wanted = [entry for entry in figures_of(run) if not entry.instead(run)]
    for entry in set(figures_of(run)) - set(wanted):
        for suffix in ("png", "pdf"):
            (folder / f"{entry.name}.{suffix}").unlink(missing_ok=True)
    for i, entry in enumerate(wanted, start=1):
        progress(f"{run.folder}: figure {i}/{len(wanted)}, {entry.name}")
        with plt.rc_context(cast(Any, STYLE)):
            figure = entry.print(run)
            for suffix in ("png", "pdf"):
                figure.savefig(folder / f"{entry.name}.{suffix}", dpi=200)
                figure.set_layout_engine("none")  # laid out once for both
            plt.close(figure)
    return {entry.name: folder / f"{entry.name}.png" for entry in wanted}
