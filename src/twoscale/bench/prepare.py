"""`twoscale bench prepare`: tokens a second of `prepare` with one worker and with several, beside the tokenizer's own speed."""

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twoscale.bench.timing import interleaved
from twoscale.config import DataConfig
from twoscale.data import Tokenizer, prepare
from twoscale.data.builtin import builtin_documents
from twoscale.data.encode import BATCH
from twoscale.data.units import BATCH_DOCUMENTS


@dataclass(frozen=True)
class PrepareBench:
    """Medians of interleaved rounds, over the same files."""

    tokens: int
    text_bytes: int
    tokenizer_s: float
    """The tokenizer's own `encode_batch` on one core, in this process: no reading, no shards."""
    workers_s: dict[int, float]
    """`prepare` as a whole, by number of workers: start of the processes, reading, encoding, shards."""


def bench_prepare(megabytes: float, files: int, workers: tuple[int, ...], tokenizer: str, rounds: int) -> PrepareBench:
    """Prepare so much text, the built-in one repeated, in so many files of equal size."""
    with tempfile.TemporaryDirectory() as folder, _one_thread():
        root = Path(folder)
        batches = _write_files(root / "in", megabytes, files)
        prepare(DataConfig(source=str(root / "in" / "0000.txt"), tokenizer=tokenizer), root / "tokenizer")
        config = DataConfig(source=str(root / "in"), tokenizer=str(root / "tokenizer"))
        found = Tokenizer.load(root / "tokenizer")
        works: dict[str, Callable[[], object]] = {"tokenizer": lambda: [found.encode_batch(batch) for batch in batches]}
        for count in workers:
            works[str(count)] = lambda count=count: _fresh(config, root / "out", count)  # type: ignore[misc]
        seconds = interleaved(works, rounds, warm=0)
        manifest = _fresh(config, root / "out", max(workers))
        return PrepareBench(
            sum(manifest["tokens"].values()),
            sum(manifest["text_bytes"].values()),
            seconds["tokenizer"],
            {count: seconds[str(count)] for count in workers},
        )


def _fresh(config: DataConfig, out: Path, workers: int) -> dict[str, dict[str, int]]:
    shutil.rmtree(out, ignore_errors=True)
    return prepare(config, out, workers=workers)


def _write_files(folder: Path, megabytes: float, files: int) -> list[list[str]]:
    """Write the files; returns their documents in batches as `prepare` encodes them."""
    folder.mkdir()
    documents, total = list(builtin_documents()), 0
    texts: list[str] = []
    while total < megabytes * 1e6:
        texts.append(documents[len(texts) % len(documents)])
        total += len(texts[-1].encode())
    batches: list[list[str]] = [[]]
    for i in range(files):
        mine = texts[i::files]
        (folder / f"{i:04d}.txt").write_text("\n<|endoftext|>\n".join(mine))
        for text in mine:
            if sum(map(len, batches[-1])) >= BATCH or len(batches[-1]) >= BATCH_DOCUMENTS:
                batches.append([])
            batches[-1].append(text)
    return batches


class _one_thread:
    """`tokenizers` on one core, as in the workers."""

    def __enter__(self) -> None:
        self.before = os.environ.get("TOKENIZERS_PARALLELISM")
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def __exit__(self, *error: object) -> None:
        if self.before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = self.before
