"""What a model answers under a rule on given text: losses, steps and choices of every token, and what that costs.

Shapes: N windows, T tokens, G groups, K the most steps.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from twoscale import exits
from twoscale.config import ModelConfig
from twoscale.config.dtypes import KVDtype
from twoscale.config.show import ShortRepr
from twoscale.engine import forward
from twoscale.exits import Exit
from twoscale.exits.logits import Reads
from twoscale.model import LoopedGPT
from twoscale.model.flops import enter_flops, head_flops, layer_flops, step_flops
from twoscale.tradeoff.heldout import HeldOut
from twoscale.tradeoff.stats import interval

LOGITS = 1 << 25  # logits that are held at a time


@dataclass(frozen=True, repr=False)
class Evaluation(ShortRepr):
    """Of every token: its loss, its steps, and the most likely next token."""

    losses: Tensor
    """fp64 (N, T), nats; 0 where nothing is asked."""
    steps: Tensor
    """int64 (N, T, G)."""
    choices: Tensor
    """int64 (N, T)."""


def evaluate(model: LoopedGPT, text: HeldOut, exit: Exit | None, loops: int | Sequence[int], kv_dtype: KVDtype = "auto") -> Evaluation:
    """One parallel pass over the text, some windows at a time; `kv_dtype` as in `forward`."""
    T, device = text.ids.shape[1], next(model.parameters()).device
    batch = max(1, min(16, LOGITS // (T * model.config.vocab_size)))
    losses, steps, choices = [], [], []
    for first in range(0, len(text.ids), batch):
        rows = slice(first, first + batch)
        rule = exit.of_rows(rows) if isinstance(exit, exits.Oracle | exits.AnswersOnly) else exit
        out = forward(model, text.ids[rows], exit=rule, loops=loops, kv_dtype=kv_dtype)
        wanted = text.targets[rows].to(device)
        loss = F.cross_entropy(out.logits.flatten(0, 1), wanted.flatten(), reduction="none", ignore_index=-1)
        losses.append(loss.view(wanted.shape).double().cpu())
        steps.append(out.steps.cpu())
        choices.append(out.logits.argmax(dim=-1).cpu())
    return Evaluation(torch.cat(losses), torch.cat(steps), torch.cat(choices))


def counted_flops(config: ModelConfig, steps: Tensor, exit: Exit | None = None) -> tuple[float, float]:
    """Mean FLOPs a token with these steps (N, T, G), token t seeing t + 1 tokens; and how many of them are the rule's own looks."""
    total, looks = flops_of_tokens(config, steps, exit)
    return float(total.mean()), float(looks.mean())


def flops_of_tokens(config: ModelConfig, steps: Tensor, exit: Exit | None = None) -> tuple[Tensor, Tensor]:
    """FLOPs of every token (N, T), and how many of them are the rule's own looks.

    Every look of a rule on logits reads the head; through the coda, the layers after the last group as well. A learned controller's looks
    are the products of its own head.
    """
    c, (N, T, _) = config, steps.shape
    context = torch.arange(1, T + 1, dtype=torch.float64)
    plain = c.n_layer - sum(len(g) for g in c.groups)
    layers = plain * torch.tensor([layer_flops(c, t) for t in range(1, T + 1)], dtype=torch.float64)
    total, looks = (layers + head_flops(c)).expand(N, T), torch.zeros(N, T, dtype=torch.float64)
    # step_flops is linear in the context: what a step costs at context 0, and what each token in sight adds
    for g, rule in enumerate(exits.rules_per_group(exit, c.n_groups)):
        taken = steps[..., g].double()
        base = step_flops(c, g, 0)
        total = total + enter_flops(c) + taken * (base + (step_flops(c, g, 1) - base) * context)
        rule = rule.rule if isinstance(rule, exits.AnswersOnly) else rule
        if isinstance(rule, Reads):
            coda = sum(len(layer) for layer, group in c.stages[-1:] if group is None) if rule.read == "coda" else 0
            at_zero = layer_flops(c, 0)
            look = head_flops(c) + coda * (at_zero + (layer_flops(c, 1) - at_zero) * context)
            looks = looks + taken * look
        elif isinstance(rule, exits.Learned):
            looks = looks + taken * rule.flops(g)
    return total + looks, looks


def describe(config: ModelConfig, text: HeldOut, evaluation: Evaluation, full: Evaluation, exit: Exit | None) -> dict[str, Any]:
    """The record of one point: quality against the full run, with intervals over documents, and cost. On a task quality and steps are those
    of the answers, FLOPs those of all tokens."""
    asked = text.asked
    clusters, losses, steps = text.clusters[asked].numpy(), evaluation.losses[asked], evaluation.steps[asked]
    ce, rise = losses.mean(), (losses - full.losses[asked]).numpy()
    low, high = interval(rise, clusters)
    flops, looks = flops_of_tokens(config, evaluation.steps, exit)
    flops_low, flops_high = interval(flops.numpy(), text.clusters.numpy())
    ce_low, ce_high = interval(losses.numpy(), clusters)
    groups = []
    for g in range(steps.shape[-1]):
        taken = steps[..., g].flatten()
        groups.append(
            {
                "mean": float(taken.double().mean()),
                "std": float(taken.double().std(correction=0)),
                "histogram": torch.bincount(taken).tolist(),
            }
        )
    return {
        "ce": float(ce), "ce_low": ce_low, "ce_high": ce_high, "ppl": float(ce.exp()),
        "dce": float(rise.mean()), "dce_low": low, "dce_high": high,
        "agree": float((evaluation.choices == full.choices)[asked].double().mean()),
        "mean_steps": float(steps.double().mean()), "steps": groups,
        "flops": float(flops.mean()), "flops_low": flops_low, "flops_high": flops_high, "flops_looks": float(looks.mean()),
    }  # fmt: skip


def hard_tokens(
    text: HeldOut, evaluation: Evaluation, full: Evaluation, spell: Callable[[int], str] = str, shown: int = 12, bins: int = 8
) -> dict[str, Any]:
    """What the tokens that took longest have in common: tokens by mean steps, and mean steps against the token's loss."""
    mean = evaluation.steps.double().mean(dim=-1).flatten().numpy()
    losses, ids = full.losses.flatten().numpy(), text.ids.flatten().numpy()
    order = np.argsort(losses, kind="stable")
    by_loss = [
        {"loss": float(losses[place].mean()), "steps": float(mean[place].mean()), "std": float(mean[place].std())}
        for place in np.array_split(order, bins)
        if len(place)
    ]
    kinds, place, counts = np.unique(ids, return_inverse=True, return_counts=True)
    steps = np.bincount(place, weights=mean) / counts
    loss = np.bincount(place, weights=losses) / counts
    often = np.flatnonzero(counts >= max(5, -(-len(ids) // 1000)))
    slow = often[np.argsort(-steps[often], kind="stable")]
    ends = [*slow[:shown], *slow[max(shown, len(slow) - shown) :]]
    tokens = [{"token": spell(int(kinds[i])), "count": int(counts[i]), "steps": float(steps[i]), "loss": float(loss[i])} for i in ends]
    correlation = float(np.corrcoef(mean, losses)[0, 1]) if mean.std() > 0 and losses.std() > 0 else None
    return {"tokens": tokens, "by_loss": by_loss, "correlation": correlation}
