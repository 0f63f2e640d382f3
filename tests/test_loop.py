"""The one loop over whole sequences: what a recorder sees, and what happens to tokens that leave."""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import twoscale
from conftest import small_model
from reference import Reference
from test_model import loud


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


class LeaveAt:
    """A stop rule that lets each token of each group go after a set number of steps."""

    def __init__(self, steps: Tensor, keep: str = "newest") -> None:
        self.steps, self.keep = steps, keep  # (B, T, G)
        self.calls = 0

    def __call__(self, group: int, k: int, rows: Tensor, before: Tensor, after: Tensor) -> Tensor:
        assert before.shape == after.shape == (len(rows), 32)
        self.calls += len(rows)
        return self.steps[..., group].flatten()[rows] <= k


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


@given(st.data())
@settings(max_examples=12, deadline=None)
@pytest.mark.parametrize(
    "options", [{}, {"positions": "rotary", "n_kv_head": 2}, {"noise": "every_step"}], ids=["default", "rotary", "noise"]
)
def test_tokens_leave_one_by_one(options: dict[str, object], data: st.DataObject) -> None:
    """A token that has left stays visible at its last step: logits equal the token-by-token reference."""
    model = loud(small_model(**options))
    B, T = 2, 6
    steps = torch.tensor(data.draw(st.lists(st.integers(1, 5), min_size=B * T * 2, max_size=B * T * 2))).view(B, T, 2)
    ids = torch.randint(0, 64, (B, T), generator=torch.Generator().manual_seed(0))
    rule = LeaveAt(steps)
    out = twoscale.forward(model, ids, exit=rule, loops=5)
    assert torch.equal(out.steps, steps)
    assert rule.calls == int(steps.sum()), "work done is the sum of steps"
    for b in range(B):
        expected = Reference(model).sequence(ids[b].tolist(), [tuple(s) for s in steps[b].tolist()])
        assert torch.allclose(out.logits[b].double(), expected, atol=2e-4)


def test_nobody_leaves() -> None:
    """A rule that never fires gives the plain loop."""
    model = loud(small_model())
    ids = torch.randint(0, 64, (2, 7))
    out = twoscale.forward(model, ids, exit=LeaveAt(torch.full((2, 7, 2), 99)), loops=4)
    assert torch.allclose(out.logits, twoscale.forward(model, ids, loops=4).logits, atol=1e-5)
    assert (out.steps == 4).all()


def test_keep_printed() -> None:
    """keep="printed" leaves with the state before the last step, though the step was paid for."""
    model = loud(small_model(groups=((1,),)))
    ids = torch.randint(0, 64, (1, 1))
    printed = twoscale.forward(model, ids, exit=LeaveAt(torch.full((1, 1, 1), 3), keep="printed"), loops=5)
    assert (printed.steps == 3).all()
    assert torch.allclose(printed.logits, twoscale.forward(model, ids, loops=2).logits, atol=1e-5)
