"""A loop group: its map applied once (`step`), and the one loop over whole sequences (`forward`).

Shapes: B batch, T position, C width, K loop step, N rows (tokens still active, flattened over B and T).

Training, evaluation and tracing all run `forward`: a recorder may watch the states, a stop rule may let tokens
leave one by one. The decoding engine drives `step` on rows of its own.
"""

from collections.abc import Callable
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoscale.config import ModelConfig
from twoscale.model.layers import Attend, Block, RMSNorm, Rope, causal

Layers = Callable[[int], Attend]  # the attention of the i-th layer of a stage


def all_causal(layer: int) -> Attend:
    """Whole sequences: every layer attends causally within the pass."""
    return causal


class Recorder(Protocol):
    """Watches a forward pass; it must copy what it keeps."""

    def start(self, group: int, x: Tensor, projected: Tensor) -> None:
        """A group begins: x^(0) and A_g [x^(0); e], both (B, T, C)."""

    def step(self, group: int, k: int, x: Tensor) -> None:
        """The state after k applications of the group's map."""

    def stage(self, index: int, x: Tensor) -> None:
        """The output of a stage of the network; -1 is the embedding."""


class Stop(Protocol):
    """Decides which tokens leave a group."""

    keep: Literal["newest", "printed"]
    """Whether a leaving token takes the state it has just computed, or the one before."""

    def __call__(self, group: int, k: int, rows: Tensor, before: Tensor, after: Tensor) -> Tensor:
        """After the k-th application (from 1): which of the rows leave, as bools (N,).

        `rows` (N,) are the active tokens' places b * T + t; `before` and `after` (N, C) are their states.
        """


class LoopGroup(nn.Module):
    """Layers that run K times on a state x, with the group's input e injected at every step."""

    def __init__(self, config: ModelConfig, index: int, closing_norm: RMSNorm | None) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.blocks = nn.ModuleList(Block(config) for _ in config.groups[index])
        self.adapter = nn.Linear(2 * config.n_embd, config.n_embd, bias=False) if config.inject == "concat" else None
        self.norm: RMSNorm | None = None
        if config.group_norm != "none":
            self.norm = closing_norm if config.share_group_norm else RMSNorm(config.n_embd, config.norm_eps)

    # -- the map -------------------------------------------------------------------------------------------------

    def inject(self, e: Tensor) -> Tensor | None:
        """What the input adds to every step. A [x; e] = A_x x + A_e e, and the second term is the same at each of them."""
        if self.adapter is not None:
            return F.linear(e, self.adapter.weight[:, self.config.n_embd :])
        return e if self.config.inject == "add" else None

    def project(self, x: Tensor, injected: Tensor | None) -> Tensor:
        """What the first layer of the group sees: A_g [x; e], x + e, or x."""
        if self.adapter is not None:
            x = F.linear(x, self.adapter.weight[:, : self.config.n_embd])
        return x if injected is None else x + injected

    def step(self, x: Tensor, injected: Tensor | None, rope: Rope | None = None, layers: Layers = all_causal) -> Tensor:
        """The group's map, applied once. All that iterates a group calls this."""
        x = self.project(x, injected)
        for i, block in enumerate(self.blocks):
            x = block(x, rope, layers(i))
        if self.norm is not None and self.config.group_norm == "step":
            x = self.norm(x)
        return x

    def leave(self, x: Tensor) -> Tensor:
        """What the next stage sees of the last state."""
        return self.norm(x) if self.norm is not None and self.config.group_norm == "leave" else x

    # -- the loop ------------------------------------------------------------------------------------------------

    def forward(
        self,
        x: Tensor,
        e: Tensor,
        loops: int,
        *,
        rope: Rope | None = None,
        fresh: Callable[[int], Tensor] | None = None,
        backprop_steps: int | None = None,
        recorder: Recorder | None = None,
        stop: Stop | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Iterate the map from x (B, T, C) at most `loops` times; returns the output and each token's steps (B, T).

        `fresh(k)` gives the noise (B, T, C) that is mixed into the state before step k. Gradients flow through the
        last `backprop_steps` steps; the ones before run without.
        """
        injected = self.inject(e)
        if recorder is not None:
            recorder.start(self.index, x, self.project(x, injected))
        if stop is not None:
            x, steps = self._forward_rows(x, injected, loops, rope, fresh, recorder, stop)
            return self.leave(x), steps
        grad = torch.is_grad_enabled()
        first_tracked = loops - backprop_steps if backprop_steps is not None else 0
        for k in range(loops):
            with torch.set_grad_enabled(grad and k >= first_tracked):
                x = self.step(self._stir(x, fresh, k), injected, rope)
            if recorder is not None:
                recorder.step(self.index, k + 1, x)
        return self.leave(x), torch.full(x.shape[:2], loops, device=x.device)

    def _stir(self, x: Tensor, fresh: Callable[[int], Tensor] | None, k: int) -> Tensor:
        if fresh is None:
            return x
        return torch.lerp(x, fresh(k).to(x.dtype).expand_as(x), self.config.noise_mix)

    def _forward_rows(
        self,
        x: Tensor,
        injected: Tensor | None,
        loops: int,
        rope: Rope | None,
        fresh: Callable[[int], Tensor] | None,
        recorder: Recorder | None,
        stop: Stop,
    ) -> tuple[Tensor, Tensor]:
        """The same loop on the tokens that are still active; one that has left is neither computed nor written again."""
        B, T, _ = x.shape
        x = x.clone()
        flat = x.view(B * T, -1)
        given = None if injected is None else injected.reshape(B * T, -1)
        steps = torch.zeros(B * T, dtype=torch.int64, device=x.device)
        rows = torch.arange(B * T, device=x.device)
        held = HeldKeys(B, T)
        for k in range(loops):
            held.rows = rows
            before = flat[rows]
            stirred = self._stir(x, fresh, k).view(B * T, -1)[rows] if fresh is not None else before
            turned = None if rope is None else (rope[0][rows % T], rope[1][rows % T])
            after = self.step(stirred[None], None if given is None else given[rows][None], turned, held)[0]
            steps[rows] = k + 1
            left = stop(self.index, k + 1, rows, before, after)
            flat[rows] = after if stop.keep == "newest" else torch.where(left[:, None], before, after)
            rows = rows[~left]
            if recorder is not None:
                recorder.step(self.index, k + 1, x)
            if not len(rows):
                break
        return x, steps.view(B, T)


class HeldKeys:
    """Keys and values of a pass whose tokens leave one by one: each token's newest ones stay visible to all after it.

    Token t at step k sees token j at step min(k, k_j), where k_j is the last step that j took.
    """

    def __init__(self, B: int, T: int) -> None:
        self.B, self.T = B, T
        self.rows = torch.empty(0, dtype=torch.int64)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (1, N, H, D)
            if layer not in self.kept:
                self.kept[layer] = (self._dense(k), self._dense(v))
            keys, values = self.kept[layer]
            keys.view(-1, *keys.shape[2:])[self.rows] = k[0]
            values.view(-1, *values.shape[2:])[self.rows] = v[0]
            queries = self._dense(q)
            queries.view(-1, *queries.shape[2:])[self.rows] = q[0]
            return causal(queries, keys, values).reshape(-1, *q.shape[2:])[self.rows][None]

        return attend

    def _dense(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.B, self.T, *like.shape[2:])
