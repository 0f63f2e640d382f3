"""PCA of trajectories: one plane (or space) for all states of a sequence, over depth and loop steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.config.show import ShortRepr


@dataclass(frozen=True, repr=False)
class PCA(ShortRepr):
    """Coordinates of several sets of states in one common frame; iterating over it gives them set by set."""

    points: list[Tensor]
    """For each set of states (..., C): its coordinates (..., n)."""
    mean: Tensor
    """(C,)"""
    components: Tensor
    """(n, C), orthonormal rows."""
    explained: Tensor
    """(n,): share of the variance along each."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, i: int) -> Tensor:
        return self.points[i]

    def project(self, states: Tensor) -> Tensor:
        return (states.to(self.mean) - self.mean) @ self.components.T


def pca(states: Sequence[Tensor], n: int = 2) -> PCA:
    """Fit on the union of all states, each (..., C). The sign of a component is fixed: its largest entry is positive."""
    if not states:
        raise UserError("pca needs at least one set of states")
    width = states[0].shape[-1]
    if any(x.shape[-1] != width for x in states) or not 1 <= n <= width:
        raise UserError(f"pca: states must share one width, and 1 <= n <= width; n = {n}, widths {sorted({x.shape[-1] for x in states})}")
    points = torch.cat([x.reshape(-1, width) for x in states]).double()
    if not points.isfinite().all():
        raise UserError("pca: the states are not finite")
    mean = points.mean(dim=0)
    centred = points - mean
    values, vectors = torch.linalg.eigh(centred.T @ centred)
    components = vectors.flip(1)[:, :n].T
    signs = components.gather(1, components.abs().argmax(dim=1, keepdim=True)).sign()
    components = components * signs
    total = values.clamp(min=0).sum()
    explained = values.flip(0)[:n].clamp(min=0) / total if total > 0 else torch.zeros(n, dtype=torch.float64)
    return PCA([((x.double() - mean) @ components.T).float() for x in states], mean.float(), components.float(), explained.float())
