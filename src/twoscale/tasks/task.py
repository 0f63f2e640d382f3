"""What a task is: samples by number, with targets, true depths and the targets of every loop step.

Shapes: B samples, T positions, M the largest true depth.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from tokenizers import AddedToken, Tokenizer as Pipeline, models, pre_tokenizers
from torch import Tensor

from twoscale.config import UserError
from twoscale.config.show import ShortRepr
from twoscale.data import Tokenizer
from twoscale.data.sources import END_OF_TEXT
from twoscale.model.noise import fold, keyed_uniform

HELD_OUT = 2**40  # number of the first held-out sample; training stays far below


@dataclass(frozen=True, repr=False)
class Batch(ShortRepr):
    """Samples of a task."""

    ids: Tensor
    """int64 (B, T)."""
    targets: Tensor
    """int64 (B, T): the answer that is predicted at this position, -1 where nothing is asked."""
    depth: Tensor
    """int64 (B, T): true depth of the answer, 0 where nothing is asked."""
    progress: Tensor
    """int64 (B, T, M): the task's own target after loop step k = 1 to M, the answer from the true depth on; -1 where nothing is asked."""

    def __post_init__(self) -> None:
        assert self.ids.shape == self.targets.shape == self.depth.shape == self.progress.shape[:2]


class Task(ABC):
    """A family of samples. Sample n with seed s is always the same, whatever batch it is in."""

    name: ClassVar[str]
    key: ClassVar[int]
    """Keeps the random numbers of one task apart from another's."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, the end of text included."""

    @property
    @abstractmethod
    def length(self) -> int:
        """T: tokens of a sample."""

    @property
    @abstractmethod
    def max_depth(self) -> int:
        """M: the largest true depth."""

    @abstractmethod
    def words(self) -> list[str]:
        """The vocabulary in order, without the end of text, which comes last."""

    @abstractmethod
    def batch(self, samples: Sequence[int], seed: int = 0) -> Batch:
        """The samples with these numbers."""

    def heldout(self, samples: int, seed: int = 0) -> Batch:
        """The first held-out samples: the same for every run with this seed, and never trained on."""
        return self.batch(range(HELD_OUT, HELD_OUT + samples), seed)

    def tokenizer(self) -> Tokenizer:
        """Words separated by blanks, one token each."""
        pipeline = Pipeline(models.WordLevel({word: i for i, word in enumerate(self.words())}, unk_token="?"))
        pipeline.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        pipeline.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
        return Tokenizer(pipeline)

    def _uniforms(self, samples: Sequence[int], seed: int, rows: int, width: int) -> Tensor:
        """Uniforms in [0, 1), (B, rows, width), each a function of (seed, task, sample number, row, column)."""
        numbers = list(samples)
        if not numbers or min(numbers) < 0:
            raise UserError(f"samples = {numbers[:3]}: give at least one number, none below 0")
        keys = [fold(seed, self.key, n) for n in numbers]
        uniform = keyed_uniform(keys, torch.arange(rows).expand(len(numbers), rows), width)
        return uniform.clamp_(max=1 - 2**-24)  # rounding may give 1


def draw_below(uniform: Tensor, n: int) -> Tensor:
    """Whole numbers 0 to n - 1 from uniforms in [0, 1)."""
    return (uniform * n).long().clamp_(max=n - 1)
