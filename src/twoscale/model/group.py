"""A loop group: its map applied once (`step`), and the one loop over whole sequences (`forward`).

Shapes: B batch, T position, C width, K loop step.

Training, evaluation and tracing all run `forward`, and a recorder may watch the states. The engine, where tokens leave
one by one, drives `step` on rows of its own.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoscale.config import ModelConfig
from twoscale.model.layers import Attend, Block, RMSNorm, Rope, causal

AttentionOfLayer = Callable[[int], Attend]  # i -> the attention of the i-th layer of a stage


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


class Adapter(nn.Linear):
    """The input projection of [state; input] (Huginn's `adapter`): A [x; e], a map 2d -> d without bias, in two halves: A_x x + A_e e. The
    second is the same at every step."""

    def __init__(self, width: int) -> None:
        super().__init__(2 * width, width, bias=False)

    def of_state(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight[:, : self.out_features])

    def of_input(self, e: Tensor) -> Tensor:
        return F.linear(e, self.weight[:, self.out_features :])


class SplitAdapter(nn.Module):
    """An `Adapter` for inference, split into two modules: A_x (`of_state`), applied at every loop step, and A_e (`of_input`), applied
    once."""

    def __init__(self, of_state: nn.Module, of_input: nn.Module) -> None:
        super().__init__()
        self.of_state, self.of_input = of_state, of_input


class LoopGroup(nn.Module):
    """Layers that run K times on a state x, with the group's input e injected at every step."""

    def __init__(self, config: ModelConfig, index: int, final_norm: RMSNorm | None) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.blocks = nn.ModuleList(Block(config) for _ in config.groups[index])
        self.adapter = Adapter(config.n_embd) if config.inject == "concat" else None
        self.gate = nn.Linear(config.n_embd, 1) if config.exit_gate and index == config.n_groups - 1 else None
        self.norm: RMSNorm | None = None
        if config.group_norm != "none":
            self.norm = final_norm if config.share_group_norm else RMSNorm(config.n_embd, config.norm_eps)

    # -- the map -------------------------------------------------------------------------------------------------

    def inject(self, e: Tensor) -> Tensor | None:
        """The injected input: what the group's input e (B, T, C) adds to the state at every loop step; None with inject="none"."""
        if self.adapter is not None:
            return self.adapter.of_input(e)
        return e if self.config.inject == "add" else None

    def project(self, x: Tensor, injected: Tensor | None) -> Tensor:
        """What the first layer of the group sees: A_g [x; e], x + e, or x."""
        adapter = self.adapter
        if adapter is not None:
            # Under autocast the map gives half precision; the state itself stays as precise as it came.
            x = adapter.of_state(x).type_as(x)
        return x if injected is None else x + injected

    def step(
        self, x: Tensor, injected: Tensor | None, rope: Rope | None = None, attention_of_layer: AttentionOfLayer = all_causal
    ) -> Tensor:
        """The group's map, applied once. All that iterates a group calls this."""
        x = self.project(x, injected)
        for i, block in enumerate(self.blocks):
            x = block(x, rope, attention_of_layer(i))
        if self.config.group_norm == "step" and self.norm is not None:
            x = self.norm(x)
        return x

    def output(self, x: Tensor) -> Tensor:
        """What the next stage sees of the last state."""
        return self.norm(x) if self.config.norm_at_exit and self.norm is not None else x

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
    ) -> tuple[Tensor, Tensor]:
        """Iterate the map from x (B, T, C) at most `loops` times; returns the output and each token's steps (B, T).

        `fresh(k)` gives the noise (B, T, C) that is mixed into the state before step k. Gradients flow through the
        last `backprop_steps` steps; the ones before run without.
        """
        injected = self.inject(e)
        if recorder is not None:
            recorder.start(self.index, x, self.project(x, injected))
        grad = torch.is_grad_enabled()
        first_tracked = loops - backprop_steps if backprop_steps is not None else 0
        for k in range(loops):
            with torch.set_grad_enabled(grad and k >= first_tracked):
                x = self.step(x if fresh is None else self.mix_noise(x, fresh(k)), injected, rope)
            if recorder is not None:
                recorder.step(self.index, k + 1, x)
        return self.output(x), torch.full(x.shape[:2], loops, device=x.device)

    def mix_noise(self, x: Tensor, noise: Tensor) -> Tensor:
        """The state before a step with noise mixed into it (noise="every_step")."""
        return torch.lerp(x, noise.to(x.dtype).expand_as(x), self.config.noise_mix)
