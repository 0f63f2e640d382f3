"""A slow, obvious implementation of the spec: one token, one layer, one step at a time, in plain loops.

It shares nothing with the package but the parameters' names.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from twoscale.config import ModelConfig
from twoscale.model import LoopedGPT, StateNoise

# (group, position, states x^(0) .. x^(k)) -> the state to leave with, or None to go on
Leaves = Callable[[int, int, list[Tensor]], Tensor | None]


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

    def rotate(self, x: Tensor, position: int) -> Tensor:
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
        norm = [p.get(f"{name}.norm{j}.weight") for j in (1, 2, 3, 4)]
        h, D, J = c.n_head, c.head_dim, c.kv_heads
        heads = (p[f"{name}.attn.qkv.weight"] @ rms(x, norm[0], c.norm_eps)).view(h + 2 * J, D)
        q, key, value = heads[:h].clone(), heads[h : h + J].clone(), heads[h + J :].clone()
        if c.qk_bias:
            q, key = q + p[f"{name}.attn.qk_bias"][:h], key + p[f"{name}.attn.qk_bias"][h:]
        if c.positions == "rotary":
            q, key = torch.stack([self.rotate(v, t) for v in q]), torch.stack([self.rotate(v, t) for v in key])
        self.keys[layer, t, k], self.last[layer, t] = (key, value), k
        mixed = []
        for i in range(h):
            seen = [self.seen(layer, j, t, k) for j in range(t + 1)]
            score = torch.stack([q[i] @ kk[i * J // h] / math.sqrt(D) for kk, _ in seen])
            weight = torch.softmax(score, dim=0)
            mixed.append(sum(w * vv[i * J // h] for w, (_, vv) in zip(weight, seen, strict=True)))
        attended = p[f"{name}.attn.out.weight"] @ torch.cat(mixed)
        x = self.join(x, attended, norm[1])
        hidden = p[f"{name}.mlp.up.weight"] @ rms(x, norm[2], c.norm_eps)
        hidden = silu(hidden[: c.hidden]) * hidden[c.hidden :] if c.mlp == "gated" else silu(hidden)
        out = p[f"{name}.mlp.down.weight"] @ hidden
        return self.join(x, out, norm[3])

    def join(self, x: Tensor, y: Tensor, gain: Tensor | None) -> Tensor:
        """The branch y put back into the stream x."""
        if self.c.norm == "pre":
            return x + y
        return rms(x + y, gain, self.c.norm_eps) if self.c.norm == "sum" else x + rms(y, gain, self.c.norm_eps)

    def seen(self, layer: int, j: int, t: int, k: int) -> tuple[Tensor, Tensor]:
        """The key and value of token j that token t sees at step k."""
        return self.keys[layer, j, min(k, self.last[layer, j])]

    def group_step(self, stage: int, layers: tuple[int, ...], x: Tensor, e: Tensor, t: int, k: int) -> Tensor:
        c = self.c
        if c.inject == "concat":
            x = self.p[f"stages.{stage}.adapter.weight"] @ torch.cat((x, e))
        elif c.inject == "add":
            x = x + e
        for i, layer in enumerate(layers):
            x = self.layer(f"stages.{stage}.blocks.{i}", layer, x, t, k)
        return rms(x, self.p[f"stages.{stage}.norm.weight"], c.norm_eps) if c.group_norm == "step" else x

    def token(self, token: int, t: int, leaves: Leaves, max_loops: int) -> tuple[Tensor, list[int]]:
        """Logits of the token at position t, and its steps in each group; `leaves(g, t, states)` says after each whether it goes."""
        c, p = self.c, self.p
        x = p["wte.weight"][token]
        if c.positions == "learned":
            x = x + p["wpe.weight"][t]
        x = x * math.sqrt(c.n_embd) if c.scale_embedding else x
        steps: list[int] = []
        for stage, (layers, g) in enumerate(c.stages):
            if g is None:
                for i, layer in enumerate(layers):
                    x = self.layer(f"stages.{stage}.blocks.{i}", layer, x, t, 1)
                continue
            e = x
            starts = {"zeros": torch.zeros_like(e), "input": e, "noise": self.noise(g, torch.tensor([t]), c.n_embd)[0].double()}
            x = starts[c.start]
            states = [x]
            for k in range(1, max_loops + 1):
                if c.noise == "every_step":
                    fresh = self.noise(g, torch.tensor([t]), c.n_embd, k)[0].double()
                    x = (1 - c.noise_mix) * x + c.noise_mix * fresh
                x = self.group_step(stage, layers, x, e, t, k)
                states.append(x)
                if (kept := leaves(g, t, states)) is not None:
                    x = kept
                    break
            steps.append(len(states) - 1)
            if c.group_norm == "leave":
                x = rms(x, p[f"stages.{stage}.norm.weight"], c.norm_eps)
        return self.head(x), steps

    def head(self, x: Tensor) -> Tensor:
        """Closing norm and read-out of one state."""
        c, p = self.c, self.p
        if c.final_norm:
            x = rms(x, p["ln_f.weight"], c.norm_eps)
        head = p["wte.weight"] if c.tie_head else p["lm_head.weight"]
        return (head @ x)[: c.vocab_size]

    def coda(self, x: Tensor, g: int, t: int) -> Tensor:
        """The layers after the last group on one state of group g, seeing the finished tokens before it; then the head."""
        c = self.c
        stage, (layers, group) = len(c.stages) - 1, c.stages[-1]
        if c.group_norm == "leave":
            x = rms(x, self.p[f"stages.{next(s for s, (_, n) in enumerate(c.stages) if n == g)}.norm.weight"], c.norm_eps)
        if group is None:
            for i, layer in enumerate(layers):
                x = self.layer(f"stages.{stage}.blocks.{i}", layer, x, t, 1)
        return self.head(x)

    def sequence(self, ids: list[int], loops: list[tuple[int, ...]]) -> Tensor:
        """Logits (T, V); loops[t][g] are the steps of each token in each group."""
        return self.leaving(ids, lambda g, t, states: states[-1] if len(states) > loops[t][g] else None, 10**6)[0]

    def leaving(self, ids: list[int], leaves: Leaves, max_loops: int) -> tuple[Tensor, list[list[int]]]:
        """Logits (T, V) and steps [t][g] of a sequence whose tokens leave as `leaves` says, after `most` steps at the latest."""
        tokens = [self.token(token, t, leaves, max_loops) for t, token in enumerate(ids)]
        return torch.stack([logits for logits, _ in tokens]), [steps for _, steps in tokens]
