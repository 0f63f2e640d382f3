"""`twoscale export RUN`: the model as a folder that transformers opens.

twoscale export runs/tiny --out exported/tiny
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from twoscale.cli.parse import parse


@dataclass(frozen=True)
class ExportArgs:
    """Write weights, settings, tokenizer and a model card for AutoModelForCausalLM and AutoTokenizer."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run."""
    out: Path | None = None
    """Where to write; RUN/export by default."""
    checkpoint: str | None = None
    """Which checkpoint (for example step-000120); the newest by default."""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Precision of the weights on disk."""
    code: bool = True
    """Whether to write the file that transformers opens the model with; without it the folder is for twoscale.load alone."""


def run(args: list[str]) -> int:
    given = parse(ExportArgs, args, "twoscale export")

    from twoscale.interop.export import export

    print(export(given.run, given.out or given.run / "export", given.checkpoint, given.dtype, given.code))
    return 0
