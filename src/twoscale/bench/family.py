"""`twoscale bench decode --family huginn`: our decoding beside a straightforward loop on the same weights.

The straightforward loop is what the published code does: eager layers, one linear map after the other, and a list of keys and values
for every layer and loop step that grows by concatenation.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from twoscale.bench.decode import HUGINN, Steps
from twoscale.bench.timing import interleaved
from twoscale.config import ModelConfig
from twoscale.model import LoopedGPT, LoopGroup, StateNoise
from twoscale.model.layers import Attend
from twoscale.model.start import start_state

LAYOUTS: dict[str, tuple[ModelConfig, int]] = {"huginn": (HUGINN, 16)}


@dataclass
class ListCache:
    """Keys and values (1, n, J, D) for each (layer, loop step), concatenated as tokens come."""

    held: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(self, layer: int, k: int) -> Attend:
        def attend(q: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if (layer, k) in self.held:
                keys, values = self.held[layer, k]
                key, value = torch.cat((keys, key), dim=1), torch.cat((values, value), dim=1)
            self.held[layer, k] = key, value
            y = F.scaled_dot_product_attention(
                q.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), enable_gqa=q.shape[2] != key.shape[2]
            )
            return y.transpose(1, 2)

        return attend


@torch.inference_mode()
def straightforward(model: LoopedGPT, cache: ListCache, token: int, position: int, loops: int) -> Tensor:
    """Logits (V,) after one more token."""
    c, device = model.config, next(model.parameters()).device
    at = torch.tensor([position], device=device)
    rope, x, first = model.rope(at), model.embed(torch.tensor([[token]], device=device), at), 0
    for stage in model.stages:
        if isinstance(stage, LoopGroup):
            injected, state = stage.inject(x), start_state(c, stage.index, x, at, StateNoise())
            for k in range(loops):
                state = stage.step(state, injected, rope, lambda i, k=k, first=first: cache.attend(first + i, k))  # type: ignore[misc]
            x = stage.output(state)
        else:
            for i, block in enumerate(stage.blocks):  # type: ignore[arg-type, union-attr]
                x = block(x, rope, cache.attend(first + i, 0))
        first += len(stage.blocks)  # type: ignore[arg-type, union-attr]
    return model.head(x)[0, 0]


@dataclass(frozen=True)
class FamilyBench:
    """Median seconds a token, one row."""

    ours: float
    straightforward: float


def bench_family(model: LoopedGPT, loops: int, context: int, repeats: int) -> FamilyBench:
    """One token at a context, both ways in turn; the token is forgotten after each."""
    config = model.config
    steps, device = Steps(model, 1, context, loops), next(model.parameters()).device
    looped = {layer for group in config.groups for layer in group}
    shape = (1, context, config.kv_heads, config.head_dim)
    filled = {
        (layer, k): (torch.randn(shape, device=device), torch.randn(shape, device=device))
        for layer in range(config.n_layer)
        for k in range(loops if layer in looped else 1)
    }

    def plain() -> None:
        straightforward(model, ListCache(dict(filled)), 1, context, loops).argmax().item()

    works: dict[str, Callable[[], object]] = {"ours": steps.token, "plain": plain}
    seconds = interleaved(works, repeats)
    return FamilyBench(seconds["ours"], seconds["plain"])
