"""Which run a command means; what is made of the bundled model on the way is said."""

from pathlib import Path

from twoscale.cli.parse import say
from twoscale.config.run_folder import BUNDLED as BUNDLED


def as_run(path: Path) -> Path:
    """The folder of a run; for `bundled` runs/bundled, made when it is first asked for."""
    from twoscale.interop import runs

    return runs.as_run(path, say)
