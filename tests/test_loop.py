"""The one loop over whole sequences: what a recorder sees."""

import torch
from torch import Tensor

import twoscale
from conftest import small_model
from models import loud


class Everything:
    """Records all that a recorder is shown."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, int]] = []
        self.tensors: list[Tensor] = []

    def start(self, group: int, x: Tensor, projected: Tensor) -> None:
        self.events.append(("start", group, 0))
        self.tensors.append(projected.clone())

    def step(self, group: int, k: int, x: Tensor) -> None:
        self.events.append(("step", group, k))
        self.tensors.append(x.clone())

    def stage(self, index: int, x: Tensor) -> None:
        self.events.append(("stage", index, 0))
        self.tensors.append(x.clone())


def test_recorder_sees_everything_in_order() -> None:
    """Embedding, start, every step and every stage, in the order in which they happen."""
    model = loud(small_model())
    recorder = Everything()
    with torch.no_grad():
        model.hidden(torch.zeros(1, 4, dtype=torch.int64), loops=(2, 1), recorder=recorder)
    assert recorder.events == [
        ("stage", -1, 0), ("stage", 0, 0), ("start", 0, 0), ("step", 0, 1), ("step", 0, 2), ("stage", 1, 0),
        ("start", 1, 0), ("step", 1, 1), ("stage", 2, 0), ("stage", 3, 0),
    ]  # fmt: skip
    group, e = model.groups[0], recorder.tensors[1]
    x0 = twoscale.model.StateNoise()(0, torch.arange(4), 32).expand(1, 4, 32)
    assert group.adapter is not None
    assert torch.allclose(recorder.tensors[2], group.adapter(torch.cat((x0, e), dim=-1)), atol=1e-5)
