"""`twoscale report RUN`: figures, tables, the paper's claims and their verdicts on one page.

twoscale report runs/tiny
twoscale report runs/bundled runs/tiny --out report
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from twoscale.cli.parse import parse, say


@dataclass(frozen=True)
class ReportArgs:
    """Write a page from what was measured; it opens from disk and needs no network."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs (or `bundled`); several come on one page."""
    out: Path | None = None
    """Folder of the page; RUN/report by default, and for several runs `report` beside the first."""


def run(args: list[str]) -> int:
    parsed = parse(ReportArgs, args, "twoscale report")

    from twoscale.report.build import report

    print(report(parsed.runs, out=parsed.out, progress=say).path)
    return 0
