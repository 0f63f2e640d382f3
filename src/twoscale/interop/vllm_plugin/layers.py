# mypy: ignore-errors
# vLLM is an extra
"""The block of a looped GPT on vLLM's tensor-parallel layers. Names of the weights are those of `model/layers.py`.

Shapes: N tokens of all sequences of a step, C width, H query heads, J key/value heads (of this rank), D head width, P padded head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention as CacheSlot
from vllm.model_executor.layers.attention.attention import unified_kv_cache_update
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.attention.selector import get_attn_backend

from twoscale.config import ModelConfig, UserError


class Slots:
    """Numbers the attention instances: vLLM finds the cache of each by the one number in its name."""

    def __init__(self, prefix: str) -> None:
        self.prefix, self.n = prefix, 0

    def name(self) -> str:
        self.n += 1
        return f"{self.prefix}.slots.{self.n - 1}.attn"


class Live:
    """Which tokens of a step are still in the loop; keys and values of the others stay as at their last loop step."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.index: Tensor | None = None
        """Rows of the live tokens, int64 (n,); None means all."""
        self.kept: dict[Attention, tuple[Tensor, Tensor]] = {}

    def take(self, rows: Tensor) -> None:
        """Only these of the live tokens stay."""
        self.index = rows if self.index is None else self.index.index_select(0, rows)

    def attend(self, layer: "Attention", slot: CacheSlot, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of the live tokens; all tokens' keys and values are written to the slot."""
        if self.index is None:
            self.kept[layer] = k, v
            return slot(q, k, v)
        keys, values = self.kept[layer]
        keys.index_copy_(0, self.index, k)
        values.index_copy_(0, self.index, v)
        queries = q.new_zeros(self.n, q.shape[1]).index_copy_(0, self.index, q)
        return slot(queries, keys, values).index_select(0, self.index)

    def fill(self, layer: "Attention", slot: CacheSlot) -> None:
        """Write the last keys and values of all tokens to a deeper slot, which none of them has reached."""
        keys, values = (kept.reshape(self.n, slot.num_kv_heads, slot.head_size) for kept in self.kept[layer])
        unified_kv_cache_update(keys, values, slot.layer_name)


class Attention(nn.Module):
    """Causal self-attention with a cache slot for each loop step."""

    def __init__(self, c: ModelConfig, config: VllmConfig, slots: Slots, steps: int, prefix: str) -> None:
        super().__init__()
        world = get_tensor_model_parallel_world_size()
        if c.n_head % world or (c.kv_heads % world and world % c.kv_heads) or c.hidden % world:
            raise UserError(
                f"tensor parallel size {world} does not divide {c.n_head} heads, {c.kv_heads} key/value heads and {c.hidden} inner channels"
            )
        self.heads, self.kv_heads, self.head_dim = c.n_head // world, max(1, c.kv_heads // world), c.head_dim
        quant = config.quant_config
        self.qkv = QKVParallelLinear(c.n_embd, c.head_dim, c.n_head, c.kv_heads, bias=c.qk_bias, quant_config=quant, prefix=f"{prefix}.qkv")
        self.out = RowParallelLinear(c.n_head * c.head_dim, c.n_embd, bias=False, quant_config=quant, prefix=f"{prefix}.out")
        rope = {"rope_type": "default", "rope_theta": c.rope_base}
        self.rope = get_rope(c.head_dim, c.block_size, rope_parameters=rope) if c.positions == "rotary" else None
        self.padded_dim = _supported_head_size(c.head_dim, config)
        self.slots = nn.ModuleList(
            CacheSlot(
                self.heads, self.padded_dim, c.head_dim**-0.5, num_kv_heads=self.kv_heads, cache_config=config.cache_config,
                quant_config=quant, prefix=slots.name(),
            )
            for _ in range(steps)
        )  # fmt: skip

    def forward(self, x: Tensor, positions: Tensor, step: int, live: Live | None) -> Tensor:
        qkv, _ = self.qkv(x)  # (N, (H + 2 J) D)
        q, k, v = qkv.split([heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)], dim=-1)
        if self.rope is not None:
            q, k = self.rope(positions, q, k)
        q, k, v = (self._pad(t) for t in (q, k, v))
        slot = self.slots[step]
        y = slot(q, k, v) if live is None else live.attend(self, slot, q, k, v)  # (N, H P)
        if self.padded_dim != self.head_dim:
            y = y.view(-1, self.heads, self.padded_dim)[..., : self.head_dim].flatten(1)
        return self.out(y)[0]

    def _pad(self, x: Tensor) -> Tensor:
        """Heads (N, H D) with zeros up to the padded width: (N, H P). Zeros change no product."""
        if self.padded_dim == self.head_dim:
            return x
        return F.pad(x.reshape(len(x), -1, self.head_dim), (0, self.padded_dim - self.head_dim)).flatten(1)

    def fill(self, first: int, live: Live) -> None:
        """Write the last keys and values to the slots from `first` on."""
        for slot in self.slots[first:]:
            live.fill(self, slot)


def _supported_head_size(head_dim: int, config: VllmConfig) -> int:
    """The smallest head width of the attention backend that holds one of this width."""
    backend = get_attn_backend(64, torch.get_default_dtype(), config.cache_config.cache_dtype)
    sizes = backend.get_supported_head_sizes()
    fit = [size for size in sizes if size >= head_dim]
    if sizes and not fit:
        raise UserError(f"heads of width {head_dim} are wider than the attention backend {backend.get_name()} takes ({max(sizes)})")
    return min(fit, default=head_dim)


class MLP(nn.Module):
    """down(silu(up x)), or down(silu(gate x) * up x)."""

    def __init__(self, c: ModelConfig, config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.gated, quant, up = c.mlp == "gated", config.quant_config, f"{prefix}.up"
        if self.gated:
            self.up = MergedColumnParallelLinear(c.n_embd, [c.hidden] * 2, bias=False, quant_config=quant, prefix=up)
        else:
            self.up = ColumnParallelLinear(c.n_embd, c.hidden, bias=False, quant_config=quant, prefix=up)
        self.down = RowParallelLinear(c.hidden, c.n_embd, bias=False, quant_config=quant, prefix=f"{prefix}.down")
        self.act = SiluAndMul() if self.gated else nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)[0]))[0]


class Block(nn.Module):
    """A layer with its cache slots: one for each loop step of its group."""

    def __init__(self, c: ModelConfig, config: VllmConfig, slots: Slots, steps: int, prefix: str) -> None:
        super().__init__()
        self.norm_after_add = c.norm == "sum"
        self.norm1, self.norm3 = RMSNorm(c.n_embd, c.norm_eps), RMSNorm(c.n_embd, c.norm_eps)
        self.norm2, self.norm4 = (nn.Identity() if c.norm == "pre" else RMSNorm(c.n_embd, c.norm_eps) for _ in range(2))
        self.attn = Attention(c, config, slots, steps, f"{prefix}.attn")
        self.mlp = MLP(c, config, f"{prefix}.mlp")

    def forward(self, x: Tensor, positions: Tensor, step: int = 0, live: Live | None = None) -> Tensor:
        if self.norm_after_add:
            x = self.norm2(x + self.attn(self.norm1(x), positions, step, live))
            return self.norm4(x + self.mlp(self.norm3(x)))
        x = x + self.norm2(self.attn(self.norm1(x), positions, step, live))
        return x + self.norm4(self.mlp(self.norm3(x)))
