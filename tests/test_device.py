"""The path that GPUs take: torch's kernels, on the CPU here and on a GPU where there is one (`make test-gpu`)."""

import dataclasses

import pytest
import torch

import twoscale
from models import LAYOUTS, loud, small_model
from scheduling import RULES
from twoscale import exits
from twoscale.engine import Engine, Scheduler, loop_params
from twoscale.engine.kernels.eager import EagerRows
from twoscale.engine.request import Request, SamplingParams

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    return str(request.param)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("layout", ["default", "rotary, grouped queries"])
def test_generate(device: str, layout: str) -> None:
    """Ragged prompts decode on the device to the tokens and steps that they have on the CPU."""
    model = loud(dataclasses.replace(small_model(block_size=64), **LAYOUTS[layout]), 0, scale=0.1)
    prompts = [[1, 2, 3], [4], [5] * 9, [7, 8]]
    want = twoscale.generate(model, prompts, 10, exit=exits.Fixed(3), loops=6)
    got = twoscale.generate(model.to(device), prompts, 10, exit=exits.Fixed(3), loops=6, kernels="torch")
    assert got.tokens == want.tokens and got.steps == want.steps


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_forward(device: str) -> None:
    """A pass with exits on the device gives the CPU's logits and steps, up to rounding."""
    model = loud(small_model(), scale=0.1)
    want = twoscale.forward(model, [[1, 2, 3, 4], [5]], exit=exits.RandomExit(3.0), loops=6)
    got = twoscale.forward(model.to(device), [[1, 2, 3, 4], [5]], exit=exits.RandomExit(3.0), loops=6)
    assert torch.equal(got.steps.cpu(), want.steps) and torch.allclose(got.logits.cpu(), want.logits, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES, indirect=True)
def test_scheduler(device: str) -> None:
    """Requests with different rules share calls on the device too."""
    model = loud(small_model(block_size=64), scale=0.1).to(device)
    scheduler = Scheduler(model, kernels="torch")
    requests = [
        Request([1 + i, 2, 3], SamplingParams(max_new_tokens=5), loop_params(model, exit=rule, loops=5)) for i, rule in enumerate(RULES)
    ]
    for request in requests:
        scheduler.add(request)
    while scheduler.step():
        pass
    assert [len(request.tokens) for request in requests] == [5] * len(requests)


def test_padded_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """One padded attention call for all sequences gives what one call a sequence gives."""
    model = loud(small_model(block_size=64, positions="rotary", n_kv_head=2), 0, scale=0.1)

    def states() -> torch.Tensor:
        engine, params = Engine(model, kernels="torch"), loop_params(model, exit=exits.Acceleration(1.0, normalize="steps"), loops=5)
        caches, found = [engine.open(20, params) for _ in range(4)], []
        engine.run([(b, cache, list(range(1, 3 + 4 * b))) for b, cache in enumerate(caches)])
        for token in (5, 9, 2):
            found.append(engine.run([(b, cache, [token + b]) for b, cache in enumerate(caches)])[0])
        return torch.cat(found)

    together = states()
    init = EagerRows.__init__

    def one_by_one(self: EagerRows, rows: object) -> None:
        init(self, rows)  # type: ignore[arg-type]
        self.together = False

    monkeypatch.setattr(EagerRows, "__init__", one_by_one)
    assert torch.allclose(together, states(), atol=1e-5)
