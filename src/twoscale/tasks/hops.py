"""hops: follow a random permutation p times.

    3>7 0>2 ... 7>0  <2> 3 0  <1> 7 0 ...

N edges in random order, one token each, then Q queries of three tokens: how many hops, from which node, and the answer f^p(x), which is
predicted at x. The true depth of an answer is p. A model that doubles pointers needs about log2 p steps: what a model needs is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from twoscale.config.task import HopsConfig
from twoscale.tasks.task import Batch, Task, draw_below


@dataclass(frozen=True)
class Hops(HopsConfig, Task):
    """Token ids: nodes 0 to N - 1, hop counts `<1>` to `<P>`, edges `a>b` in order of a, then b, end of text."""

    name: ClassVar[str] = "hops"
    key: ClassVar[int] = 1

    def words(self) -> list[str]:
        nodes = range(self.nodes)
        edges = [f"{a}>{b}" for a in nodes for b in nodes] if self.edges == "tokens" else []
        return [*(str(x) for x in nodes), *(f"<{p}>" for p in range(1, self.hops + 1)), *edges]

    def batch(self, samples: Sequence[int], seed: int = 0) -> Batch:
        N, P, Q = self.nodes, self.hops, self.queries
        uniform = self._uniforms(samples, seed, 4, max(N, Q))
        f = uniform[:, 0, :N].argsort(dim=1, stable=True)  # (B, N)
        a = uniform[:, 1, :N].argsort(dim=1, stable=True)  # the edges' starts, in the order they are written
        p = 1 + draw_below(uniform[:, 2, :Q], P)  # (B, Q)
        x = draw_below(uniform[:, 3, :Q], N)
        path, node = [], x
        for _ in range(P):
            node = f.gather(1, node)
            path.append(node)
        place = torch.arange(1, P + 1).minimum(p.unsqueeze(-1)) - 1  # (B, Q, P): min(k, p) - 1
        progress = torch.stack(path, dim=-1).gather(2, place)  # f^min(k, p)(x)
        b = f.gather(1, a)
        context = N + P + a * N + b if self.edges == "tokens" else torch.stack((a, b), dim=-1).flatten(1)
        queries = torch.stack((N + p - 1, x, progress[..., -1]), dim=-1).flatten(1)  # (B, 3 Q)
        ids = torch.cat((context, queries), dim=1)
        return _placed(ids, context.shape[1] + 1 + 3 * torch.arange(Q), p, progress)


def _placed(ids: torch.Tensor, places: torch.Tensor, depth: torch.Tensor, progress: torch.Tensor) -> Batch:
    """A batch whose answers (B, Q) are asked at these positions (Q,)."""
    B, T = ids.shape
    depths, steps = torch.zeros_like(ids), torch.full((B, T, progress.shape[-1]), -1)
    depths[:, places], steps[:, places] = depth, progress
    return Batch(ids, steps[..., -1].contiguous(), depths, steps)
