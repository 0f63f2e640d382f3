"""`twoscale export RUN`: the model as a folder that transformers opens.

twoscale export runs/tiny --out exported/tiny
twoscale export bundled
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from twoscale.cli.parse import parse
from twoscale.config import UserError
from twoscale.config.run_folder import RunFolder


@dataclass(frozen=True)
class ExportArgs:
    """Write weights, settings, tokenizer and a model card for AutoModelForCausalLM and AutoTokenizer."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run or of another model, or `bundled`."""
    out: Path | None = None
    """Where to write; by default RUN/export, or exported/NAME for a model that is no run."""
    checkpoint: str | None = None
    """Which checkpoint (for example step-000120); the newest by default."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Precision of the weights on disk."""
    measurements: bool = False
    """Write no weights: put what was measured of RUN beside those in OUT, of which RUN was made. Runs made of OUT then have it, and
    --exit auto of OUT takes RUN's calibration."""
    code: bool = True
    """Whether to write the file that transformers opens the model with; without it the folder is for twoscale.load alone."""


def run(args: list[str]) -> int:
    parsed = parse(ExportArgs, args, "twoscale export")

    from twoscale.interop import find
    from twoscale.interop.convert import converted_from
    from twoscale.interop.export import export
    from twoscale.interop.measured import pack

    folder = find(parsed.run)
    if parsed.measurements:
        if parsed.out is None or not RunFolder(folder).is_run or not converted_from(folder, parsed.out):
            raise UserError(
                f"--measurements needs a run and, as --out, the folder of the model that it was made of; {folder} was not made of it"
            )
        print(pack(folder, parsed.out))
        return 0
    default = RunFolder(folder).export if RunFolder(folder).is_run else Path("exported") / folder.resolve().name
    print(export(folder, parsed.out or default, parsed.checkpoint, parsed.dtype, parsed.code))
    return 0
