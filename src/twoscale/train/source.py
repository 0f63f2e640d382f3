"""What a run trains on: shards of text, or a task. Both give samples by number, so a run has no data state of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from twoscale.config import RunConfig, UserError
from twoscale.config.words import plural, text_words
from twoscale.data import Batches, TokenData, Tokenizer, held_out, source_name
from twoscale.tasks.file import task_of
from twoscale.tasks.task import Task


class Source(Protocol):
    """Samples and held-out samples."""

    tokenizer: Tokenizer
    name: str
    """Where the samples come from: `builtin`, a file or folder, a dataset of the hub, or a task."""
    identity: dict[str, object]
    """What must be the same in every process of a run, besides its settings."""

    def __call__(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Ids (B, T) and what the objective is computed against: (B, T), or (B, T, M) with one target for each loop step."""

    def heldout(self, sequences: int) -> tuple[Tensor, Tensor]:
        """Ids and targets (B, T) that are never trained on, at most so many."""

    def describe(self, targets: Tensor) -> str:
        """What held-out targets (B, T) are of, in words."""


class TextSource:
    """Windows of the training split of shards; the validation split is held out."""

    def __init__(self, config: RunConfig, data: Path, part: tuple[int, int]) -> None:
        self.tokenizer, self.name = Tokenizer.load(data), source_name(data)
        train, self.val = TokenData(data, "train", part), TokenData(data, "val", part)
        self.identity: dict[str, object] = {"tokenizer": self.tokenizer.fingerprint}
        for tokens in (train, self.val):
            self.identity |= {f"number of {tokens.split} tokens": len(tokens), f"checksum of the {tokens.split} shards": tokens.checksum}
        if train.vocab_size > config.model.vocab_size:
            raise UserError(f"the data in {data} has {train.vocab_size} tokens, model.vocab_size is {config.model.vocab_size}: raise it")
        self.block_size = config.model.block_size
        self.batches = Batches(train, self.block_size, config.train.seed)

    def __call__(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self.batches(numbers)

    def heldout(self, sequences: int) -> tuple[Tensor, Tensor]:
        return held_out(self.val, self.block_size, sequences)

    def describe(self, targets: Tensor) -> str:
        return text_words("all", targets.numel(), len(targets), "windows", self.name)


class TaskSource:
    """Samples of a task; the run's seed is the samples'."""

    def __init__(self, config: RunConfig, task: Task) -> None:
        self.task, self.tokenizer, self.seed = task, task.tokenizer(), config.train.seed
        self.name = f"the task {task.name}"
        self.identity: dict[str, object] = {}
        self.steps = config.train.objective.name == "progress"
        if task.vocab_size > config.model.vocab_size:
            raise UserError(f"the task {task.name} has {task.vocab_size} tokens, model.vocab_size is {config.model.vocab_size}: raise it")
        if task.length > config.model.block_size:
            raise UserError(f"a sample of {task.name} has {task.length} tokens, model.block_size is {config.model.block_size}: raise it")

    def __call__(self, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        batch = self.task.batch(numbers, self.seed)
        return batch.ids, batch.progress if self.steps else batch.targets

    def heldout(self, sequences: int) -> tuple[Tensor, Tensor]:
        batch = self.task.heldout(sequences, self.seed)
        return batch.ids, batch.targets

    def describe(self, targets: Tensor) -> str:
        return f"{plural(int((targets >= 0).sum()), 'answer')} of {plural(len(targets), 'held-out sample')} of {self.name}"


def open_source(config: RunConfig, data: Path | None, part: tuple[int, int] = (0, 1)) -> Source:
    """The task of a run, or its text in the folder `data`; `part` (i, n): of n processes that share the folder this is number i."""
    task = task_of(config)
    if task is not None:
        return TaskSource(config, task)
    assert data is not None
    return TextSource(config, data, part)
