"""Trains the heads of `exits.Learned` on a frozen model: will more steps lower this token's loss?

Features are those of a full run; a step's label is whether the token's loss after that many steps (in all groups) still lies more than
MARGIN above its loss after all of them.

Shapes: K steps, n tokens, F features.
"""

import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from twoscale import exits
from twoscale.config.files import write_json
from twoscale.config.run_folder import RunFolder
from twoscale.config.serial import read_json
from twoscale.exits.learned import FEATURES, features, heads_of
from twoscale.model import LoopedGPT
from twoscale.tradeoff.evaluate import evaluate
from twoscale.tradeoff.heldout import HeldOut
from twoscale.tradeoff.load_run import LoadedRun
from twoscale.tradeoff.signals import record_signals

MARGIN = 0.01  # nats
DECAY = 1e-3
WINDOWS = 8  # of text: eight weights need no more
SAMPLES = 64  # of a task


def train_controller(model: LoopedGPT, text: HeldOut, loops: int) -> dict[str, Any]:
    """The heads of all groups, and how well they tell: a record for controller.json."""
    started = time.perf_counter()
    asked = text.asked.flatten()  # on a task the answers' positions alone have a loss
    table = torch.stack([evaluate(model, text, None, k).losses.flatten()[asked] for k in range(1, loops + 1)])  # (K, n)
    better = (table - table[-1] > MARGIN).float()
    seen = record_signals(model, text, exits.Acceleration(0.0), loops, features)
    heads, told = [], []
    for values in seen:
        x, y = values[1:, asked].flatten(0, 1), better[1:].flatten()  # the first step has nothing to compare with
        known = x.isfinite().all(dim=1)
        head = fit(x[known], y[known])
        right = ((x[known] @ head > 0).float() == y[known]).float().mean()
        heads.append([float(f"{w:.6g}") for w in head])
        told.append({"right": float(right), "base": float(max(y[known].mean(), 1 - y[known].mean()))})
    return {"features": list(FEATURES), "heads": heads, "told": told, "tokens": text.n_asked, "loops": loops,
            "margin": MARGIN, "seconds": round(time.perf_counter() - started, 1)}  # fmt: skip


def fit(x: Tensor, y: Tensor) -> Tensor:
    """Logistic regression of y (n,) on x (n, F), whose first column is 1: (F,)."""
    mean, std = x[:, 1:].mean(dim=0), x[:, 1:].std(dim=0).clamp(min=1e-6)
    z = torch.cat((x[:, :1], (x[:, 1:] - mean) / std), dim=1)
    weight = torch.zeros(z.shape[1], requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(z @ weight, y) + DECAY * weight[1:].square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with torch.enable_grad():
        optimizer.step(closure)  # type: ignore[no-untyped-call]
    w = weight.detach()
    slopes = w[1:] / std
    return torch.cat((w[:1] - (slopes * mean).sum(), slopes))


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
