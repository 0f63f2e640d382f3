"""`twoscale report RUN`: figures, tables, the paper's claims and their verdicts on one page.

twoscale report runs/tiny
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from twoscale.cli.parse import parse


@dataclass(frozen=True)
class ReportArgs:
    """Write RUN/report/index.html from what was measured; it opens from disk and needs no network."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""


def run(args: list[str]) -> int:
    from twoscale.report.page import write_report

    print(write_report(parse(ReportArgs, args, "twoscale report").run))
    return 0
