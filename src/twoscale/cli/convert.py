"""`twoscale convert FOLDER --out RUN`: a run of a model that came from elsewhere.

twoscale convert models/Llama --groups 4-11 --out runs/retrofit
twoscale convert models/huginn --out runs/huginn --data.source texts/
twoscale convert models/huginn --dtype int8 --out models/huginn-int8
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from twoscale.cli.parse import parse, say
from twoscale.config import DataConfig, UserError
from twoscale.config.groups import Groups
from twoscale.config.run_folder import RunFolder


@dataclass(frozen=True)
class ConvertArgs:
    """Make a run folder of a looped model (export, Huginn, Ouro, bundled) or, with --groups, of a plain one shaped like Llama.

    With --dtype instead a model folder with the weights in fewer bits, which loads fast and small; it cannot be trained.
    """

    model: Annotated[str, tyro.conf.Positional]
    """Folder of the model, `bundled`, or OWNER/NAME on the hub."""
    out: Path
    """Folder of the run, or of the model with --dtype."""
    dtype: Literal["bf16", "int8"] | None = None
    """Instead of a run: the model with its weights rounded to bf16, or to int8 with a scale for each output and 256 inputs."""
    groups: Groups = ()
    """Which layers of a plain model become loop groups, counted from 0."""
    loops: int | None = None
    """Mean loops r; by default the model's own, or 4 for a plain one."""
    inject: Literal["concat", "none"] = "concat"
    """concat: exact at any number of loops; none: a group repeats its layers, exact at one loop."""
    block_size: int | None = None
    """Context to measure with, for rotary positions; by default the model's own, at most 1024 tokens."""
    data_dir: Path | None = None
    """Shards to measure on; by default they are made in OUT/data from data.source."""
    data: DataConfig = field(default_factory=lambda: DataConfig(val_fraction=0.5))


def run(args: list[str]) -> int:
    parsed = parse(ConvertArgs, args, "twoscale convert")

    from twoscale.data.prepare import describe_skipped, load_manifest
    from twoscale.data.progress import DocumentLine
    from twoscale.interop.convert import convert

    if parsed.dtype is not None:
        return _to_dtype(parsed)
    if parsed.data_dir is not None and parsed.data != ConvertArgs("", Path()).data:
        raise UserError("--data-dir names shards that are there: omit --data.*")
    if parsed.inject != "concat" and not parsed.groups:
        raise UserError("--inject goes with --groups: a looped model is taken as it is")
    if parsed.block_size is not None and parsed.block_size < 2:
        raise UserError("--block-size is at least 2")
    with DocumentLine() as line:
        run_folder = convert(
            parsed.model, parsed.out, parsed.groups, loops=parsed.loops, inject=parsed.inject, block_size=parsed.block_size,
            data=parsed.data, data_dir=parsed.data_dir,
            progress=line,
        )  # fmt: skip
    if parsed.data_dir is None and (skipped := describe_skipped(load_manifest(RunFolder(run_folder).data))) is not None:
        say(skipped)
    print(run_folder)
    return 0


def _to_dtype(parsed: ConvertArgs) -> int:
    from twoscale.interop.quantize import convert_dtype

    assert parsed.dtype is not None
    if parsed != ConvertArgs(parsed.model, parsed.out, parsed.dtype):
        raise UserError("--dtype makes a model folder, not a run: omit --groups, --loops, --inject, --block-size and --data")
    print(convert_dtype(parsed.model, parsed.out, parsed.dtype))
    return 0
