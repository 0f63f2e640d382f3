"""Where the steps go on a task: accuracy, steps and true depth of the answers under a rule.

Shapes: N samples, T tokens, G groups, A answers.
"""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from twoscale import exits
from twoscale.tradeoff.evaluate import Evaluation
from twoscale.tradeoff.heldout import HeldOut
from twoscale.tradeoff.stats import interval, spearman, upper_bound


def right_answers(text: HeldOut, found: Evaluation) -> np.ndarray:
    """1.0 for a right answer, 0.0 for a wrong one: (A,)."""
    right: np.ndarray = (found.choices == text.targets)[text.asked].double().numpy()
    return right


def accuracy_drop(text: HeldOut, found: Evaluation, full: Evaluation) -> np.ndarray:
    """Of every answer: right in the full run minus right here, (A,)."""
    return right_answers(text, full) - right_answers(text, found)


def drop_bound(text: HeldOut, found: Evaluation, full: Evaluation, delta: float) -> float:
    """A bound on the drop of accuracy that is wrong with probability delta at most, by Student's t over samples.

    Never below ln(1 / delta) / A, the bound that holds for A answers of which none has changed: where nothing has gone wrong yet there is
    no variance to go by.
    """
    bound = upper_bound(accuracy_drop(text, found, full), answer_clusters(text), delta)
    return max(bound, -math.log(delta) / text.n_asked)


def answer_clusters(text: HeldOut) -> np.ndarray:
    """The sample of every answer: (A,)."""
    clusters: np.ndarray = text.clusters[text.asked].numpy()
    return clusters


def answer_steps(text: HeldOut, found: Evaluation) -> np.ndarray:
    """Steps of every answer, mean over groups: (A,)."""
    steps: np.ndarray = found.steps[text.asked].double().mean(dim=-1).numpy()
    return steps


def depth_record(text: HeldOut, found: Evaluation, full: Evaluation) -> dict[str, Any]:
    """What a point of a task's sweep has beside `describe`: accuracy, its drop against the full run, steps, both by true depth, and the
    rank correlation of steps and true depth; intervals are over samples."""
    assert text.depth is not None
    clusters, depth = answer_clusters(text), text.depth[text.asked].numpy()
    right, drop, steps = right_answers(text, found), accuracy_drop(text, found, full), answer_steps(text, found)
    record: dict[str, Any] = {}
    for name, values in (("accuracy", right), ("drop", drop), ("mean_steps", steps)):
        low, high = interval(values, clusters)
        record |= {name: float(values.mean()), f"{name}_low": low, f"{name}_high": high}
    rank = spearman(steps, depth, clusters)
    record |= dict(zip(("spearman", "spearman_low", "spearman_high"), rank or (None, None, None), strict=True))
    record["all_steps"] = float(found.steps.double().mean())
    record["by_depth"] = [
        {
            "depth": int(d), "answers": int((depth == d).sum()), "accuracy": float(right[depth == d].mean()),
            "steps": float(steps[depth == d].mean()), "std": float(steps[depth == d].std()),
        }
        for d in np.unique(depth)
    ]  # fmt: skip
    return record


def true_depths(text: HeldOut, loops: int, more: int = 0) -> exits.Oracle:
    """Every answer takes its true depth and so many steps more; what is asked nothing takes all loops."""
    assert text.depth is not None
    depths: Tensor = torch.where(text.asked, (text.depth + more).clamp(max=loops), loops)
    return exits.Oracle(depths)
