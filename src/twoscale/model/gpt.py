"""LoopedGPT: a GPT whose layer groups loop.

Shapes: B batch, T position, C width, V vocabulary, G group, K loop step.

    model = LoopedGPT(presets.tiny().model)
    logits = model(ids)                    # evaluation: mean_loops steps in every group
    loss = model(ids, targets, loops=(3, 9, 4), noise=StateNoise(seed, step, rows))
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoscale.config import ModelConfig, RunConfig, UserError
from twoscale.config.dtypes import WeightDtype
from twoscale.model.group import LoopGroup, Recorder
from twoscale.model.layers import Block, RMSNorm, Rope, rope_table
from twoscale.model.noise import truncated_normal_
from twoscale.model.start import StateNoise, start_state


def embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding that torch does not initialise: `init_weights` does, and on the meta device torch's own init imports its compiler."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)  # type: ignore[no-untyped-call, no-any-return]


class Objective(Protocol):
    """A training loss that reads more than the last step (train/objective.py)."""

    def __call__(self, model: "LoopedGPT", ids: Tensor, targets: Tensor, loops: tuple[int, ...], noise: StateNoise) -> Tensor:
        """The scalar to minimise."""


class PlainStage(nn.Module):
    """A run of layers that each run once."""

    def __init__(self, config: ModelConfig, n_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(n_layers))

    def forward(self, x: Tensor, rope: Rope | None) -> Tensor:
        for block in self.blocks:
            x = block(x, rope)
        return x


class LoopedGPT(nn.Module):
    """Embedding, stages (plain runs of layers and loop groups), final norm, head."""

    def __init__(self, config: ModelConfig | RunConfig, seed: int | None = 0) -> None:
        """A fresh model; `seed=None` leaves the weights as they come, for a caller who fills them."""
        super().__init__()
        self.config = config.model if isinstance(config, RunConfig) else config
        c = self.config
        self.wte = embedding(c.padded_vocab_size, c.n_embd)
        self.wpe = embedding(c.block_size, c.n_embd) if c.positions == "learned" else None
        # With share_group_norm the final norm exists even where the head does not read through it.
        needed = c.final_norm or (c.share_group_norm and c.group_norm != "none")
        self.ln_f = RMSNorm(c.n_embd, c.norm_eps) if needed else None
        self.stages = nn.ModuleList(
            PlainStage(c, len(layers)) if group is None else LoopGroup(c, group, self.ln_f) for layers, group in c.stages
        )
        self.lm_head = None if c.tie_head else nn.Linear(c.n_embd, c.padded_vocab_size, bias=False)
        self.exit_calibration: Callable[[], tuple[Any, int]] | None = None
        """Exit rules and most loops for exit="auto"; set by `twoscale.load`, valid for the weights that were loaded."""
        self.weight_dtype: WeightDtype = "fp32"
        """How the matrices are stored; another one than fp32 is for inference alone (`engine/kernels/quantize.py`)."""
        if seed is not None:
            init_weights(self, seed)

    def train(self, mode: bool = True) -> "LoopedGPT":
        if mode and self.weight_dtype != "fp32":
            raise UserError(f"a model with its weights in {self.weight_dtype} cannot be trained: load it with dtype='fp32'")
        return super().train(mode)

    # -- parts ---------------------------------------------------------------------------------------------------

    @property
    def groups(self) -> list[LoopGroup]:
        return [stage for stage in self.stages if isinstance(stage, LoopGroup)]

    def blocks(self) -> Iterator[Block]:
        """Every layer in order, looped ones once."""
        for stage in self.stages:
            yield from stage.blocks  # type: ignore[misc, union-attr]

    def embed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """(wte + wpe) * sqrt(d) for ids (..., T) at positions (..., T)."""
        x: Tensor = self.wte(ids)
        if self.wpe is not None:
            x = x + self.wpe(positions)
        return x * self.config.n_embd**0.5 if self.config.scale_embedding else x

    def rope(self, positions: Tensor) -> Rope | None:
        """Rotary angles of the positions, where the model uses them."""
        c = self.config
        return rope_table(positions, c.head_dim, c.rope_base) if c.positions == "rotary" else None

    def head(self, x: Tensor) -> Tensor:
        """Closing norm and read-out: logits (..., V); the rows that only pad the embedding are left out."""
        if self.config.final_norm and self.ln_f is not None:
            x = self.ln_f(x)
        logits = F.linear(x, self.wte.weight) if self.lm_head is None else self.lm_head(x)
        return logits[..., : self.config.vocab_size]

    # -- the pass ------------------------------------------------------------------------------------------------

    def hidden(
        self,
        ids: Tensor,
        *,
        loops: int | Sequence[int] | None = None,
        noise: StateNoise | None = None,
        start: Sequence[Tensor] | None = None,
        backprop_steps: int | None = None,
        recorder: Recorder | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The state before the final norm (B, T, C), and the steps that each token took in each group (B, T, G)."""
        c = self.config
        B, T = ids.shape
        if not 0 < T <= c.block_size:
            raise UserError(f"a sequence of {T} tokens does not fit the context of 1 to {c.block_size} tokens")
        counts = c.loops_for(loops)
        noise = noise or StateNoise()
        positions = torch.arange(T, device=ids.device)
        rope = self.rope(positions)
        x = self.embed(ids, positions)
        if recorder is not None:
            recorder.stage(-1, x)
        taken = []
        for i, stage in enumerate(self.stages):
            if isinstance(stage, LoopGroup):
                g = stage.index
                x0 = start_state(c, g, x, positions, noise) if start is None else start[g].to(x)
                fresh = None if not c.noise_in_steps else _fresh(noise, g, positions, c.n_embd)
                x, steps = stage(x0, x, counts[g], rope=rope, fresh=fresh, backprop_steps=backprop_steps, recorder=recorder)
                taken.append(steps)
            else:
                x = stage(x, rope)
            if recorder is not None:
                recorder.stage(i, x)
        return x, torch.stack(taken, dim=-1) if taken else ids.new_zeros(B, T, 0)

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        *,
        loops: int | Sequence[int] | None = None,
        noise: StateNoise | None = None,
        recorder: Recorder | None = None,
        objective: Objective | None = None,
    ) -> Tensor:
        """Logits (B, T, V), or with targets (B, T) their mean cross-entropy, -1 ignored; with an objective its loss."""
        if objective is not None:
            assert targets is not None
            return objective(self, ids, targets, self.config.loops_for(loops), noise or StateNoise())
        x, _ = self.hidden(ids, loops=loops, noise=noise, backprop_steps=self.config.backprop_steps, recorder=recorder)
        logits = self.head(x)
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), ignore_index=-1)


def _fresh(noise: StateNoise, group: int, positions: Tensor, width: int):  # type: ignore[no-untyped-def]
    """Noise of loop step k; the start state has k = 0, so these begin at 1."""
    return lambda k: noise(group, positions, width, k + 1)


def allocate(model: LoopedGPT) -> LoopedGPT:
    """fp32 memory on the CPU, whatever torch's defaults are, for a model that was made on the meta device; the caller fills it.

    What nn.Module.to_empty does, but that imports a good part of torch's compiler.
    """
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(torch.empty(p.shape, dtype=torch.float32, device="cpu")))
    return model


@torch.no_grad()
def init_weights(model: LoopedGPT, seed: int, place: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
    """All initial values, in one place. Normals are cut at three sigma; d is the width.

    `place(whole, p)` gives the part of a whole tensor that a sharded parameter p holds: the values do not depend on the sharding.

    | weight                              | value                                                       |
    |-------------------------------------|-------------------------------------------------------------|
    | wte, wpe, lm_head, adapter, qkv, up | std sqrt(2 / (5 d))                                         |
    | weight of the exit gate             | std sqrt(2 / (5 d))                                         |
    | attn.out, mlp.down                  | that divided by sqrt(2 L), L = plain + mean_loops * looped  |
    | norm gains                          | 1                                                           |
    | qk_bias, bias of the exit gate      | 0                                                           |
    """
    c = model.config
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.zero_()
        elif p.ndim < 2:
            p.fill_(1.0)
        else:
            out = name.endswith(("attn.out.weight", "mlp.down.weight"))
            whole = p if place is None else torch.empty(p.shape, dtype=p.dtype)
            truncated_normal_(whole, c.out_std if out else c.init_std, generator)
            if place is not None:
                p.copy_(place(whole, p))
