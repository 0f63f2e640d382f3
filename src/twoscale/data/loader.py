"""Batches out of shards. Which tokens a sample holds is a pure function of (seed, sample number), so a run can stop,
go on and be spread over processes without any state of its own."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.data.prepare import load_manifest
from twoscale.data.shards import Shard


class TokenData:
    """The tokens of one split, all shards as one long sequence."""

    def __init__(self, folder: Path, split: str, part: tuple[int, int] = (0, 1)) -> None:
        """Opens all shards. `part` (i, n): of n processes that do so this is number i, and compares the checksum of every n-th one."""
        manifest = load_manifest(folder)
        self.folder, self.split = folder, split
        self.shards: list[Shard] = []
        for number, entry in enumerate(manifest["shards"]):
            if entry["split"] == split and entry["tokens"]:
                shard = Shard(folder / Path(entry["file"]).name)
                if number % part[1] == part[0]:
                    shard.check()
                if shard.header.split != split or shard.header.tokens != entry["tokens"]:
                    raise UserError(f"{folder / entry['file']} is not the shard that the manifest names: prepare the data again")
                self.shards.append(shard)
        self.ends = np.cumsum([len(s) for s in self.shards])
        self.vocab_size: int = manifest["vocab_size"]
        self.tokenizer: str = manifest["tokenizer"]

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def checksum(self) -> str:
        """A short name for the tokens, by what the shards say of themselves."""
        return hashlib.sha256(repr([(s.header.tokens, s.header.crc32) for s in self.shards]).encode()).hexdigest()[:16]

    def read(self, start: int, n: int) -> np.ndarray:
        """n tokens from position `start`, across shards."""
        assert start >= 0 and start + n <= len(self)
        parts = []
        shard = int(np.searchsorted(self.ends, start, side="right"))
        while n > 0:
            offset = start - (int(self.ends[shard - 1]) if shard else 0)
            part = self.shards[shard].read(offset, n)
            parts.append(part)
            start, n, shard = start + len(part), n - len(part), shard + 1
        return np.concatenate(parts)


class Batches:
    """Samples of block_size tokens with their next tokens, shuffled anew every epoch."""

    def __init__(self, data: TokenData, block_size: int, seed: int) -> None:
        if len(data) <= block_size:
            raise UserError(
                f"the {data.split} split of {data.folder} has {len(data)} tokens, a context of {block_size} needs at least "
                f"{block_size + 1}: use more text or a smaller model.block_size"
            )
        self.data, self.block_size, self.seed = data, block_size, seed
        self.per_epoch = max(1, len(data) // block_size - 1)
        self._epoch: tuple[int, int, np.ndarray] = (-1, 0, np.empty(0))

    def starts(self, sample: int) -> int:
        """Where sample number `sample` begins. Each epoch shifts the windows and draws their order."""
        epoch, place = divmod(sample, self.per_epoch)
        if self._epoch[0] != epoch:
            generator = np.random.default_rng((self.seed, epoch))
            spare = len(self.data) - 1 - self.per_epoch * self.block_size
            shift = int(generator.integers(0, max(1, min(spare + 1, self.block_size))))
            self._epoch = (epoch, shift, generator.permutation(self.per_epoch))
        _, shift, order = self._epoch
        return shift + int(order[place]) * self.block_size

    def __call__(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """ids and targets (B, T), int64, of those samples."""
        return _stack(self.data, [self.starts(s) for s in samples], self.block_size)


def held_out(data: TokenData, block_size: int, sequences: int) -> tuple[Tensor, Tensor]:
    """At most that many windows, spread evenly over the split; a split shorter than one window gives one short one."""
    block_size = min(block_size, len(data) - 1)
    if block_size < 1:
        raise UserError(f"the {data.split} split of {data.folder} has {len(data)} tokens: at least 2 are needed")
    available = (len(data) - 1) // block_size
    places = np.linspace(0, available - 1, min(sequences, available)).round().astype(int)
    return _stack(data, [int(p) * block_size for p in places], block_size)


def _stack(data: TokenData, starts: list[int], block_size: int) -> tuple[Tensor, Tensor]:
    rows = np.stack([data.read(s, block_size + 1) for s in starts]).astype(np.int64)
    tokens = torch.from_numpy(rows)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
