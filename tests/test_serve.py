"""Serving: what a request gets does not depend on who else is served, by either policy."""

import dataclasses
import random

import pytest
import torch

from scheduling import POLICIES, RULES, alone, check, finish, model_of, request_of
from twoscale import exits
from twoscale.config import UserError
from twoscale.engine.cache import LayerCache
from twoscale.engine.request import Request
from twoscale.engine.scheduler import Scheduler

KVS = ("exact", "exact", "last", "exact", "ring:2")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", ["default", "all loops", "rotary, grouped queries", "branch norms", "noise at every step"])
def test_invariance(policy: str, layout: str) -> None:
    """Thirty requests with different prompts, lengths, rules and draws, coming in while others are served: each gets what it gets alone."""
    model = model_of(layout)
    requests = [request_of(model, i, RULES[i % len(RULES)], kv=KVS[i % len(KVS)], temperature=0.8 * (i % 2)) for i in range(30)]
    scheduler = Scheduler(model, policy, max_num_seqs=9)
    for i, request in enumerate(requests):
        scheduler.add(request)
        for _ in range(i % 4):
            scheduler.step()
    finish(scheduler)
    for request in requests:
        check(model, request)
    assert (
        scheduler.reserved_bytes == 0
        and not scheduler.running
        and scheduler.counters.tokens == sum(len(request.tokens) for request in requests)
    )
    taken = [s for request in requests for s in [*request.prompt_steps, *request.steps[1:]]]
    assert scheduler.counters.loop_steps == [sum(s[g] for s in taken) for g in range(model.config.n_groups)]


@pytest.mark.parametrize("policy", POLICIES)
def test_cancelled(policy: str) -> None:
    """Whoever vanishes, waiting, reading or writing, frees its place at once, and the others finish unharmed."""
    model = model_of()
    requests = [request_of(model, i, new=12, temperature=0.0) for i in range(12)]
    scheduler = Scheduler(model, policy, max_num_seqs=6)
    for request in requests:
        scheduler.add(request)
    chance = random.Random(1)
    vanish = {3: chance.randrange(1, 40), 4: 0, 7: chance.randrange(1, 40), 11: 1}
    for number in range(20_000):
        for i, when in vanish.items():
            if number == when:
                requests[i].cancelled = True
        if not scheduler.step():
            break
    for i, request in enumerate(requests):
        if i in vanish and request.finish_reason == "cancelled":
            assert request.cache is None and len(request.tokens) < 12
        else:
            check(model, request)
    assert any(requests[i].finish_reason == "cancelled" for i in vanish) and scheduler.reserved_bytes == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_and_order(policy: str) -> None:
    """No more is promised than there is; first come, first served; what can never fit is refused."""
    model = model_of()
    requests = [request_of(model, i, new=4, temperature=0.0, longest=20) for i in range(10)]
    scheduler = Scheduler(model, policy, max_num_seqs=4)
    room = 2 * max(scheduler._bytes(request) for request in requests)
    scheduler.cache_bytes = room
    began: list[Request] = []
    for request in requests:
        scheduler.add(request)
    for _ in range(20_000):
        working = scheduler.step()
        assert scheduler.reserved_bytes <= room and len(scheduler.running) <= 4
        assert sum(request.cache.nbytes for request in scheduler.running if request.cache is not None) <= scheduler.reserved_bytes
        began += [request for request in requests if request.cache is not None and request not in began]
        if not working:
            break
    assert began == requests and all(request.finish_reason == "length" for request in requests)
    scheduler.cache_bytes = 1000
    with pytest.raises(UserError, match="memory"):
        scheduler.add(request_of(model, 1))
    with pytest.raises(UserError, match="context"):
        scheduler.add(request_of(model, 1, new=500))


@pytest.mark.parametrize("policy", POLICIES)
def test_poisoned(policy: str) -> None:
    """A request whose logits are not finite fails alone."""
    model = model_of()
    with torch.no_grad():
        model.wte.weight[13] = float("nan")
        model.lm_head = torch.nn.Linear(model.config.n_embd, model.config.padded_vocab_size, bias=False)  # the head stays whole
        torch.nn.init.normal_(model.lm_head.weight, generator=torch.Generator().manual_seed(0))
    clean = [request_of(model, i, temperature=0.0, longest=8) for i in range(6)]
    clean = [
        dataclasses.replace(
            request,
            prompt=[t if t != 13 else 14 for t in request.prompt],
            sampling=dataclasses.replace(request.sampling, stop_token_ids=frozenset({13})),
        )
        for request in clean
    ]
    bad = request_of(model, 99, prompt=[1, 13, 2])
    scheduler = Scheduler(model, policy)
    for request in [*clean[:3], bad, *clean[3:]]:
        scheduler.add(request)
    finish(scheduler)
    assert bad.finish_reason == "error" and "finite" in str(bad.error) and not bad.tokens
    for request in clean:
        want = alone(model, request, stop=(13,))
        assert request.tokens == want.tokens[0] and request.steps == want.steps[0]


@dataclasses.dataclass(frozen=True)
class Broken(exits.StepNorm):
    """A rule that goes wrong at its third step."""

    def measure(self, view: exits.StepView) -> float:
        if bool((torch.as_tensor(view.k) >= 3).any()):
            raise ZeroDivisionError
        return 1.0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rule_that_breaks(policy: str) -> None:
    """Requests whose rule raises fail, told so; all others get theirs, and the scheduler goes on."""
    model = model_of()
    requests = [request_of(model, i, Broken(0.1) if i % 3 == 0 else RULES[0], temperature=0.0) for i in range(9)]
    scheduler = Scheduler(model, policy, max_num_seqs=5)
    for request in requests:
        scheduler.add(request)
    finish(scheduler)
    for i, request in enumerate(requests):
        if i % 3 == 0:
            assert request.finish_reason == "error" and isinstance(request.error, ZeroDivisionError) and request.cache is None
        else:
            check(model, request)
    assert scheduler.reserved_bytes == 0 and not scheduler.running


@pytest.mark.parametrize("levels", [1, 4], ids=["first level", "deeper level"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_without_memory(policy: str, levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose cache cannot be allocated, at its start or at a deeper loop step, fails alone; all others get theirs."""
    model = model_of()
    requests = [request_of(model, i, RULES[0] if i % 2 else None, longest=8, temperature=0.0) for i in range(6)]
    bad = request_of(model, 99, None, prompt=[1, 2, 3], new=40)
    assert bad.capacity not in [request.capacity for request in requests]
    check_memory = LayerCache._check_memory

    def no_memory(layer: LayerCache, wanted: int) -> None:
        if layer.shape[1] == bad.capacity and wanted >= levels:
            raise MemoryError("no memory for this cache")
        check_memory(layer, wanted)

    monkeypatch.setattr(LayerCache, "_check_memory", no_memory)
    scheduler = Scheduler(model, policy, max_num_seqs=4)
    for request in [*requests[:2], bad, *requests[2:]]:
        scheduler.add(request)
    finish(scheduler)
    assert bad.finish_reason == "error" and isinstance(bad.error, MemoryError) and bad.cache is None
    monkeypatch.undo()
    for request in requests:
        check(model, request)
    assert scheduler.reserved_bytes == 0 and not scheduler.running
