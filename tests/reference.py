"""A slow, obvious implementation of the spec: one token, one layer, one step at a time, in plain loops.

It shares nothing with the package but the parameters' names.
"""

import math

import torch
from torch import Tensor

from twoscale.config import ModelConfig
from twoscale.model import LoopedGPT, StateNoise


def rms(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * gain


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


class Reference:
    """One sequence through the network, token after token; keeps every key and value it ever computed."""

    def __init__(self, model: LoopedGPT, seed: int = 0) -> None:
        self.c: ModelConfig = model.config
        self.p = {name: p.detach().double() for name, p in model.named_parameters()}
        if self.c.share_group_norm:
            self.p.update({f"stages.{i}.norm.weight": self.p["ln_f.weight"] for i in range(len(self.c.stages))})
        self.noise = StateNoise(seed)
        self.keys: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}  # (layer, position, step) -> key, value
        self.last: dict[tuple[int, int], int] = {}  # (layer, position) -> last step

    def turn(self, x: Tensor, position: int) -> Tensor:
        """Rotate one head's vector: the pair (i, i + D/2) by the angle position / base^(2i/D)."""
        D = len(x)
        y = x.clone()
        for i in range(D // 2):
            angle = position * self.c.rope_base ** (-2 * i / D)
            a, b = x[i], x[i + D // 2]
            y[i], y[i + D // 2] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
        return y

    def layer(self, name: str, layer: int, x: Tensor, t: int, k: int) -> Tensor:
        """Layer number `layer` on the token at position t in loop step k; it sees token j at step min(k, k_j)."""
        c, p = self.c, self.p
        norm = [p[f"{name}.norm{j}.weight"] for j in (1, 2, 3, 4)]
        h, D, J = c.n_head, c.head_dim, c.kv_heads
        heads = (p[f"{name}.attn.qkv.weight"] @ rms(x, norm[0], c.norm_eps)).view(h + 2 * J, D)
        q, key, value = heads[:h].clone(), heads[h : h + J].clone(), heads[h + J :].clone()
        if c.qk_bias:
            q, key = q + p[f"{name}.attn.q_bias"], key + p[f"{name}.attn.k_bias"]
        if c.positions == "rotary":
            q, key = torch.stack([self.turn(v, t) for v in q]), torch.stack([self.turn(v, t) for v in key])
        self.keys[layer, t, k], self.last[layer, t] = (key, value), k
        mixed = []
        for i in range(h):
            seen = [self.keys[layer, j, min(k, self.last[layer, j])] for j in range(t + 1)]
            score = torch.stack([q[i] @ kk[i * J // h] / math.sqrt(D) for kk, _ in seen])
            weight = torch.softmax(score, dim=0)
            mixed.append(sum(w * vv[i * J // h] for w, (_, vv) in zip(weight, seen, strict=True)))
        attended = p[f"{name}.attn.out.weight"] @ torch.cat(mixed)
        x = rms(x + attended, norm[1], c.norm_eps) if c.norm == "sum" else x + rms(attended, norm[1], c.norm_eps)
        hidden = p[f"{name}.mlp.up.weight"] @ rms(x, norm[2], c.norm_eps)
        hidden = silu(hidden[: c.hidden]) * hidden[c.hidden :] if c.mlp == "gated" else silu(hidden)
        out = p[f"{name}.mlp.down.weight"] @ hidden
        return rms(x + out, norm[3], c.norm_eps) if c.norm == "sum" else x + rms(out, norm[3], c.norm_eps)

    def group_step(self, stage: int, layers: tuple[int, ...], x: Tensor, e: Tensor, t: int, k: int) -> Tensor:
        c = self.c
        if c.inject == "concat":
            x = self.p[f"stages.{stage}.adapter.weight"] @ torch.cat((x, e))
        elif c.inject == "add":
            x = x + e
        for i, layer in enumerate(layers):
            x = self.layer(f"stages.{stage}.blocks.{i}", layer, x, t, k)
        return rms(x, self.p[f"stages.{stage}.norm.weight"], c.norm_eps) if c.group_norm == "step" else x

    def token(self, token: int, t: int, loops: tuple[int, ...]) -> Tensor:
        """Logits of the token at position t, which takes loops[g] steps in group g."""
        c, p = self.c, self.p
        x = p["wte.weight"][token]
        if c.positions == "learned":
            x = x + p["wpe.weight"][t]
        x = x * math.sqrt(c.n_embd) if c.scale_embedding else x
        for stage, (layers, g) in enumerate(c.stages):
            if g is None:
                for i, layer in enumerate(layers):
                    x = self.layer(f"stages.{stage}.blocks.{i}", layer, x, t, 1)
                continue
            e = x
            starts = {"zeros": torch.zeros_like(e), "input": e, "noise": self.noise(g, torch.tensor([t]), c.n_embd)[0].double()}
            x = starts[c.start]
            for k in range(1, loops[g] + 1):
                if c.noise == "every_step":
                    fresh = self.noise(g, torch.tensor([t]), c.n_embd, k)[0].double()
                    x = (1 - c.noise_mix) * x + c.noise_mix * fresh
                x = self.group_step(stage, layers, x, e, t, k)
            if c.group_norm == "leave":
                x = rms(x, p[f"stages.{stage}.norm.weight"], c.norm_eps)
        if c.final_norm:
            x = rms(x, p["ln_f.weight"], c.norm_eps)
        head = p["wte.weight"] if c.tie_head else p["lm_head.weight"]
        return (head @ x)[: c.vocab_size]

    def sequence(self, ids: list[int], loops: list[tuple[int, ...]]) -> Tensor:
        """Logits (T, V); loops[t][g] are the steps of each token in each group."""
        return torch.stack([self.token(token, t, loops[t]) for t, token in enumerate(ids)])
