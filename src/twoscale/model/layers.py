"""The block: attention and MLP between sandwich norms.

Shapes: B batch, T position, C width, H query heads, J key/value heads, D head width.

A block does not know where its keys and values come from: it hands queries, keys and values to `attend`, which
is `causal` for whole sequences, and a cache's own for the decoding engine.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twoscale.config import ModelConfig

# attend(q (B, T, H, D), k (B, T, J, D), v (B, T, J, D)) -> (B, T, H, D)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Rope = tuple[Tensor, Tensor]  # cos and signed sin, each (..., T, 1, D)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every position sees itself and what came before."""
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=q.shape[2] != k.shape[2]
    )
    return y.transpose(1, 2)


def rope_table(positions: Tensor, head_dim: int, base: float) -> Rope:
    """cos and sin of the rotary angles at int64 positions (..., T); halves are paired, as in Llama, and the first has -sin."""
    inverse = base ** -(torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angle = (positions.to(torch.float32).unsqueeze(-1) * inverse).unsqueeze(-2)  # (..., T, 1, D/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Turn queries or keys (B, T, H, D) by their positions' angles."""
    cos, sin = rope
    turned = x.float()
    return torch.addcmul(turned * cos, turned.roll(x.shape[-1] // 2, dims=-1), sin).type_as(x)


class RMSNorm(nn.Module):
    """x / rms(x) * gain, computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).type_as(x)


class Attention(nn.Module):
    """Causal self-attention with fused projections, grouped-query heads and optional rotary positions."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.n_head, config.kv_heads, config.head_dim
        self.qkv = nn.Linear(config.n_embd, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(self.heads * self.head_dim, config.n_embd, bias=False)
        self.qk_bias = nn.Parameter(torch.zeros(self.heads + self.kv_heads, self.head_dim)) if config.qk_bias else None

    def forward(self, x: Tensor, rope: Rope | None, attend: Attend) -> Tensor:
        heads = self.qkv(x).view(*x.shape[:-1], -1, self.head_dim)  # (B, T, H + 2J, D)
        qk, v = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=-2)
        if self.qk_bias is not None:
            qk = qk + self.qk_bias.type_as(qk)
        if rope is not None:
            qk = rotate(qk, rope)
        q, k = qk.split((self.heads, self.kv_heads), dim=-2)
        y: Tensor = self.out(attend(q, k, v).flatten(-2))  # (B, T, C)
        return y


class MLP(nn.Module):
    """down(silu(up x)), or down(silu(gate x) * up x) with gate and up in one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "gated"
        self.up = nn.Linear(config.n_embd, config.hidden * (2 if self.gated else 1), bias=False)
        self.down = nn.Linear(config.hidden, config.n_embd, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.gated:
            gate, h = h.chunk(2, dim=-1)
            h = F.silu(gate) * h
        else:
            h = F.silu(h)
        y: Tensor = self.down(h)
        return y


class Block(nn.Module):
    """norm="sum": x <- n2(x + attn(n1 x)), x <- n4(x + mlp(n3 x)); "branch": the outer norms on attn and mlp alone; "pre": without them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm_after_add = config.norm == "sum"
        self.norm1, self.norm3 = RMSNorm(config.n_embd, config.norm_eps), RMSNorm(config.n_embd, config.norm_eps)
        self.norm2, self.norm4 = (nn.Identity() if config.norm == "pre" else RMSNorm(config.n_embd, config.norm_eps) for _ in range(2))
        self.attn = Attention(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope: Rope | None = None, attend: Attend = causal) -> Tensor:
        if self.norm_after_add:
            x = self.norm2(x + self.attn(self.norm1(x), rope, attend))
            return self.norm4(x + self.mlp(self.norm3(x)))
        x = x + self.norm2(self.attn(self.norm1(x), rope, attend))
        return x + self.norm4(self.mlp(self.norm3(x)))
