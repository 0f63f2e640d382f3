"""Measures the staircase of a model: accuracy by true depth and loop steps on held-out samples."""

import dataclasses

import torch
from torch import Tensor

from twoscale.model import LoopedGPT, LoopGroup
from twoscale.tasks.staircase import Staircase
from twoscale.tasks.task import Task

ROWS = 128  # samples in one pass


class _Answers:
    """A recorder that keeps the states of one group at some positions (A,) of the flattened batch, after each step."""

    def __init__(self, group: int, places: Tensor) -> None:
        self.group, self.places, self.states = group, places, list[Tensor]()

    def start(self, group: int, x: Tensor, projected: Tensor) -> None:
        pass

    def step(self, group: int, k: int, x: Tensor) -> None:
        if group == self.group:
            self.states.append(x.flatten(0, 1).index_select(0, self.places))

    def stage(self, index: int, x: Tensor) -> None:
        pass


@torch.no_grad()
def predictions(model: LoopedGPT, ids: Tensor, places: Tensor, loops: int) -> Tensor:
    """Most likely token (K, A) at the places (A,) of the flattened batch (B, T), after 1 to `loops` steps in every group."""
    if isinstance(model.stages[-1], LoopGroup) and model.config.n_groups == 1:  # every step is read from one pass
        seen = _Answers(0, places)
        model.hidden(ids, loops=loops, recorder=seen)
        states = torch.stack([model.stages[-1].output(x) for x in seen.states])
        return model.head(states).argmax(dim=-1)
    taken = []
    for k in range(1, loops + 1):
        hidden, _ = model.hidden(ids, loops=k)
        taken.append(model.head(hidden.flatten(0, 1).index_select(0, places)).argmax(dim=-1))
    return torch.stack(taken)


def measure_staircase(model: LoopedGPT, task: Task, loops: int, samples: int, seed: int = 0, step: int = 0) -> Staircase:
    """Accuracy on the first held-out samples. Start states are those of evaluation."""
    batch = task.heldout(samples, seed)
    device = next(model.parameters()).device
    right = torch.zeros(task.max_depth + 1, loops, dtype=torch.int64)
    count = torch.zeros(task.max_depth + 1, dtype=torch.int64)
    for first in range(0, samples, ROWS):
        ids, targets, depth = (x[first : first + ROWS] for x in (batch.ids, batch.targets, batch.depth))
        places = (targets.flatten() >= 0).nonzero().flatten()
        wanted, depths = targets.flatten()[places], depth.flatten()[places]
        found = predictions(model, ids.to(device), places.to(device), loops).cpu()
        right.index_add_(0, depths, (found == wanted).T.long())
        count.index_add_(0, depths, torch.ones_like(depths))
    depths_seen = count.nonzero().flatten().tolist()
    return Staircase(
        task=task.name, settings=dataclasses.asdict(task), step=step, samples=samples, seed=seed,  # type: ignore[call-overload]
        depths=tuple(depths_seen), count=tuple(count[depths_seen].tolist()),
        accuracy=tuple(tuple((right[d].double() / count[d]).tolist()) for d in depths_seen),
    )  # fmt: skip
