"""Held-out text in three parts that share no document, or samples of a task: to fit thresholds on, to certify them on, and to report on.

Shapes: N windows, T tokens in each.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.config.show import ShortRepr
from twoscale.data import TokenData, held_out
from twoscale.tasks.task import HELD_OUT, Task

By = Literal["documents", "pieces", "windows", "samples"]
Role = Literal["fit", "certify", "report"]
SHARES: dict[Role, float] = {"fit": 0.25, "certify": 0.375, "report": 0.375}
MAX_TOKENS = 4_000_000  # tokens of a split that are looked at
ENOUGH = 12  # documents; with fewer the text is parted by windows
FEW = 8  # documents in a part; with fewer, pieces of them take their place
PIECE = 2048  # tokens in a piece
PART = 2**32  # samples of a task between the first ones of two parts; the first part of all is training's own validation


@dataclass(frozen=True, repr=False)
class HeldOut(ShortRepr):
    """Windows of held-out text."""

    ids: Tensor
    """int64 (N, T)."""
    targets: Tensor
    """int64 (N, T); on a task -1 where nothing is asked."""
    clusters: Tensor
    """int64 (N, T): what each target belongs to."""
    by: By
    """What the clusters are: documents; pieces of documents where there are few; windows where there are fewer still; samples of a task."""
    depth: Tensor | None = None
    """On a task, int64 (N, T): the true depth of each answer, 0 where nothing is asked; None for text."""

    @property
    def asked(self) -> Tensor:
        """bool (N, T): the tokens that are measured; on a task the answers, in text all."""
        return self.targets >= 0

    @property
    def n_asked(self) -> int:
        return int(self.asked.sum())

    @property
    def first_asked(self) -> int:
        """The first position at which any sample is asked."""
        return int(self.asked.any(dim=0).long().argmax())

    @property
    def fingerprint(self) -> str:
        """Tells one text from another."""
        return hashlib.sha256(self.ids.numpy().tobytes()).hexdigest()[:16]

    @property
    def window_fingerprints(self) -> list[str]:
        """Tells one window from another, so that two texts can be compared window by window."""
        return [hashlib.sha256(row.tobytes()).hexdigest()[:12] for row in self.ids.numpy()]

    @property
    def n_clusters(self) -> int:
        return len(set(self.clusters.flatten().tolist()))


def heldout_windows(data: TokenData, block_size: int, windows: int) -> HeldOut:
    """That many windows of a whole split, spread evenly over it."""
    ids, targets = held_out(data, block_size, windows)
    return HeldOut(ids, targets, torch.arange(len(ids))[:, None].expand_as(ids).contiguous(), "windows")


def spelt_fingerprint(text: HeldOut, decode: Callable[[Sequence[int]], str]) -> str:
    """Tells one text from another by its characters, so that models with different tokenizers can be told to have read the same."""
    rows = (decode([*ids, targets[-1]]) for ids, targets in zip(text.ids.tolist(), text.targets.tolist(), strict=True))
    return hashlib.sha256("\0".join(rows).encode()).hexdigest()[:16]


def heldout_part(data: TokenData, eot: int, block_size: int, role: Role, windows: int, split_seed: int = 0) -> HeldOut:
    """At most that many windows of one part of a split, spread evenly over it. Which document is in which part is drawn from the seed."""
    n = min(len(data), MAX_TOKENS)
    tokens = data.read(0, n).astype(np.int64) if n else np.empty(0, np.int64)
    documents = np.concatenate(([0], np.cumsum(tokens[:-1] == eot))) if n else np.empty(0, np.int64)
    by: By = "documents"
    size = min(block_size, max(1, n // (2 * ENOUGH)))
    if n and documents[-1] + 1 < ENOUGH:
        by, documents = "windows", np.arange(n) // (size + 1)
    mine = _members(documents, role, split_seed)
    tokens, documents, pieces = tokens[mine], documents[mine], _pieces(documents)[mine]
    if len(tokens) < size + 1 or n < 8 * ENOUGH:
        raise UserError(
            f"the {data.split} split of {data.folder} has {len(data)} tokens, too few to part them for fitting and reporting: "
            "hold out more text (data.val_fraction) or name other shards with --data-dir"
        )
    available = (len(tokens) - 1) // size
    places = np.linspace(0, available - 1, min(windows, available)).round().astype(int) * size
    rows = np.stack([tokens[p : p + size + 1] for p in places])
    owners = np.stack([documents[p + 1 : p + size + 1] for p in places])
    if by == "documents" and len(np.unique(owners)) < FEW:
        by, owners = "pieces", np.stack([pieces[p + 1 : p + size + 1] for p in places])
    if len(np.unique(owners)) < 4:
        by, owners = "windows", np.broadcast_to(np.arange(len(rows))[:, None], owners.shape).copy()
    ids = torch.from_numpy(rows)
    return HeldOut(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.from_numpy(owners), by)


def task_part(task: Task, role: Role, samples: int, seed: int = 0) -> HeldOut:
    """The first samples of one part of a task's held-out samples. Parts share no sample, with each other or with training's validation."""
    first = HELD_OUT + (1 + list(SHARES).index(role)) * PART
    batch = task.batch(range(first, first + samples), seed)
    clusters = torch.arange(samples)[:, None].expand_as(batch.ids).contiguous()
    return HeldOut(batch.ids, batch.targets, clusters, "samples", batch.depth)


def _pieces(documents: np.ndarray) -> np.ndarray:
    """Numbers of the documents' pieces, in order, from the number of each token's document."""
    first = np.searchsorted(documents, documents)  # where each token's document begins
    piece = (np.arange(len(documents)) - first) // PIECE
    return np.cumsum(np.concatenate(([0], (np.diff(documents) != 0) | (np.diff(piece) != 0))))


def _members(documents: np.ndarray, role: Role, seed: int) -> np.ndarray:
    """Which tokens belong to a part: whole documents are dealt in a drawn order, each to the part that lacks most."""
    sizes = np.bincount(documents)
    have = dict.fromkeys(SHARES, 0.0)
    owner = np.empty(len(sizes), dtype=object)
    for d in np.random.default_rng((seed, len(sizes))).permutation(len(sizes)):
        total = sum(have.values()) + sizes[d]
        lacks: Role = max(SHARES, key=lambda r: SHARES[r] * total - have[r])
        owner[d] = lacks
        have[lacks] += sizes[d]
    return (owner == role)[documents]
