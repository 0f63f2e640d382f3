"""`twoscale prepare`: text to token shards.

twoscale prepare --source corpus/ --tokenizer bpe --bpe-vocab 4096 --out data/corpus
twoscale prepare --source fineweb/ --tokenizer gpt2 --out data/fineweb --workers 16 --share
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from twoscale.cli.parse import parse, say
from twoscale.config import DataConfig, UserError


@dataclass(frozen=True)
class PrepareArgs:
    """Turn text into token shards: tokenized, split by document, written atomically; a killed run goes on where it was."""

    out: Path
    """Folder for the shards."""
    workers: int | None = None
    """Processes that encode files, each on one core; by default one a core where there is much text. The shards do not depend on it."""
    share: bool = False
    """Several nodes run this command on one folder: each encodes files, one of them writes the shards."""
    data: Annotated[DataConfig, tyro.conf.arg(name="")] = field(default_factory=DataConfig)


def run(args: list[str]) -> int:
    parsed = parse(PrepareArgs, args, "twoscale prepare")

    if parsed.workers is not None and not 0 <= parsed.workers <= 1024:
        raise UserError(f"--workers {parsed.workers}: must lie between 0 and 1024")

    from twoscale.data import prepare
    from twoscale.data.prepare import describe_skipped
    from twoscale.data.progress import DocumentLine

    with DocumentLine() as line:
        manifest = prepare(parsed.data, parsed.out, line, parsed.workers, parsed.share)
    tokens, counts = manifest["tokens"], manifest["counts"]
    say(
        f"{parsed.out}: {tokens['train']:,} training and {tokens['val']:,} validation tokens from {counts['documents']:,} documents "
        f"({counts['empty']} empty and {counts['not_text']} without text left out, {counts['bad_utf8']} with bad UTF-8 mended)"
    )
    if (skipped := describe_skipped(manifest)) is not None:
        say(skipped)
    return 0
