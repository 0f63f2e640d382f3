"""Trains the heads of `exits.Learned` on a frozen model: will more steps lower this token's loss?

Features are those of a full run; a step's label is whether the token's loss after that many steps (in all groups) still lies more than
MARGIN above its loss after all of them. Two kinds of heads are fitted for each group, on the geometry of its steps and on
the state itself; the one that tells better on sequences that neither was fitted to is kept, the smaller one if they are equal.

Shapes: K steps, n tokens, F features.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twoscale import exits
from twoscale.config.files import write_json
from twoscale.config.run_folder import RunFolder
from twoscale.config.serial import read_json
from twoscale.exits.learned import FEATURES, HIDDEN, features, heads_of, score_of_state, state_features
from twoscale.exits.rule import Numbers, StepView
from twoscale.model import LoopedGPT
from twoscale.tradeoff.evaluate import evaluate
from twoscale.tradeoff.heldout import HeldOut
from twoscale.tradeoff.load_run import LoadedRun
from twoscale.tradeoff.signals import record_signals

MARGIN = 0.01  # nats
DECAY = 1e-3
STATE_DECAY = 1e-3
MAX_ROWS = 20_000  # that a head on the state is fitted to
WINDOWS = 16  # of text
SAMPLES = 128  # of a task
HELD_BACK = 4  # every fourth sequence is not fitted to, and chooses between the kinds of heads


def train_controller(model: LoopedGPT, text: HeldOut, loops: int) -> dict[str, Any]:
    """The heads of all groups, and how well they tell: a record for controller.json."""
    started = time.perf_counter()
    # What is not asked for on a task has no target; others may depend on it, and the model's own last prediction takes its place.
    text = replace(text, targets=torch.where(text.asked, text.targets, evaluate(model, text, None, loops).choices))
    table = torch.stack([evaluate(model, text, None, k).losses.flatten() for k in range(1, loops + 1)])  # (K, n)
    better = (table - table[-1] > MARGIN).float()
    sequence = torch.arange(len(text.ids))[:, None].expand_as(text.ids).flatten()
    fitted = sequence % HELD_BACK != HELD_BACK - 1
    found: list[dict[str, dict[str, Any]]] = [{} for _ in range(model.config.n_groups)]
    for name, kind in KINDS.items():
        for group, values in enumerate(record_signals(model, text, exits.Acceleration(0.0), loops, kind.features)):
            found[group][name] = _fitted(kind, values, better, fitted)
    heads, told = [], []
    for each in found:
        name = min(each, key=lambda name: float(each[name]["loss"]))
        heads.append(each[name]["head"])
        losses = {kind: values["loss"] for kind, values in each.items()}
        told.append({"kind": name, "right": each[name]["right"], "base": each[name]["base"], "loss": losses})
    return {"features": list(FEATURES), "heads": heads, "told": told, "tokens": text.n_asked, "loops": loops,
            "margin": MARGIN, "seconds": round(time.perf_counter() - started, 1)}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A kind of head."""

    features: Callable[[StepView], list[Numbers]]
    fit: Callable[[Tensor, Tensor], Tensor]
    """(features (n, F), labels (n,)) -> weights."""
    score: Callable[[Tensor, Tensor], Tensor]
    """(weights, features (n, F)) -> (n,)."""


def _fitted(kind: Kind, x: Tensor, y: Tensor, fitted: Tensor) -> dict[str, Any]:
    """A head on features x (K, n, F) for labels y (K, n), and what it tells of the tokens that are not `fitted` (n,).

    Kinds are compared from the second step on: the geometry of the first has nothing to compare with, and the token stays.
    """
    known = x.isfinite().all(dim=2)
    head = kind.fit(x[known & fitted], y[known & fitted])
    compared = known & ~fitted
    compared[0] = False
    score, labels = kind.score(head, x[compared]), y[compared]
    loss = float(F.binary_cross_entropy_with_logits(score, labels)) if len(labels) else math.inf
    right = float(((score > 0).float() == labels).float().mean()) if len(labels) else 0.0
    base = float(labels.mean()) if len(labels) else 0.0
    return {"head": [float(f"{w:.6g}") for w in head], "loss": loss, "right": right, "base": max(base, 1 - base)}


def fit(x: Tensor, y: Tensor) -> Tensor:
    """Logistic regression of y (n,) on x (n, F), whose first column is 1: (F,)."""
    z, mean, std = _standardize(x)
    w = _minimize(torch.zeros(z.shape[1]), lambda w: F.binary_cross_entropy_with_logits(z @ w, y) + DECAY * w[1:].square().sum())
    slopes = w[1:] / std
    return torch.cat((w[:1] - (slopes * mean).sum(), slopes))


def fit_state(x: Tensor, y: Tensor) -> Tensor:
    """The same with a hidden layer: the weights of a head on the state, from the same start every time."""
    every = -(-len(x) // MAX_ROWS)
    (z, mean, std), y = _standardize(x[::every]), y[::every]
    start = torch.randn(HIDDEN * (z.shape[1] + 1) + 1, generator=torch.Generator().manual_seed(0)) / z.shape[1] ** 0.5
    w = _minimize(start, lambda w: F.binary_cross_entropy_with_logits(score_of_state(w, z), y) + STATE_DECAY * w[:-1].square().sum())
    first = w[: HIDDEN * z.shape[1]].view(HIDDEN, -1)
    slopes = first[:, 1:] / std
    first = torch.cat((first[:, :1] - (slopes * mean).sum(dim=1, keepdim=True), slopes), dim=1)
    return torch.cat((first.flatten(), w[HIDDEN * z.shape[1] :]))


KINDS = {  # the simpler one first
    "geometry": Kind(features, fit, lambda head, x: x @ head),
    "state": Kind(state_features, fit_state, score_of_state),
}


def _standardize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x with all columns but the first, which is 1, of mean 0 and deviation 1; what they were."""
    mean, std = x[:, 1:].mean(dim=0), x[:, 1:].std(dim=0).clamp(min=1e-6)
    return torch.cat((x[:, :1], (x[:, 1:] - mean) / std), dim=1), mean, std


def _minimize(start: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    weight = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([weight], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(weight)
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    return weight.detach()


def controller(folder: Path, opened: LoadedRun, loops: int) -> exits.Learned:
    """The controller of a run: read if it was trained for this very checkpoint, depth and text, trained and saved otherwise."""
    path, text = RunFolder(folder).controller, opened.text("fit", WINDOWS if opened.task is None else SAMPLES)
    about = opened.about | {"text": text.fingerprint}
    wanted = about | {"loops": loops}
    stored = read_json(path) if path.exists() else {}
    if not isinstance(stored, dict) or not all(stored.get(key) == value for key, value in wanted.items()):
        stored = about | train_controller(opened.model, text, loops)
        write_json(path, stored)
    return exits.Learned(0.5, weights=heads_of(stored, path))
