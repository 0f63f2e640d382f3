"""Fair shares: a request that asks for much slows others down by its share and no more, and is not starved by them."""

import pytest

import twoscale
from scheduling import POLICIES, RULES, check, finish, model_of, request_of
from twoscale.engine.batch import Batch
from twoscale.engine.fair import QUANTUM, select_for_batch
from twoscale.engine.request import Request, RequestGroup
from twoscale.engine.scheduler import Scheduler

ROWS = 6


def heavy_of(model: twoscale.LoopedGPT, texts: int = 8, loops: int = 16, new: int = 14, like: Request | None = None) -> list[Request]:
    """One request group: many long texts with many loops and no exits, or with the parameters of another one."""
    request_group, changes = RequestGroup(), {} if like is None else {"loop_params": like.loop_params}
    return [
        request_of(model, 100 + i, None, longest=12, new=new, loops=loops, temperature=0.0, request_group=request_group, **changes)
        for i in range(texts)
    ]


def light_of(model: twoscale.LoopedGPT, seed: int = 1) -> Request:
    return request_of(model, seed, RULES[0], longest=8, new=10, temperature=0.0)


def serve_until_done(scheduler: Scheduler, request: Request) -> None:
    for _ in range(20_000):
        if request.finish_reason:
            return
        scheduler.step()
    raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("same", [False, True], ids=["other settings", "same settings"])
@pytest.mark.parametrize("policy", POLICIES)
def test_light_beside_heavy(policy: str, same: bool) -> None:
    """From a light request's arrival to its end a heavy one gets about as much work as the light one, though it holds all rows, besides the
    tokens that are in flight; nobody's result changes."""
    model = model_of()
    light = light_of(model)
    heavy = heavy_of(model, like=light if same else None)
    scheduler = Scheduler(model, policy, max_num_seqs=ROWS)
    for request in heavy:
        scheduler.add(request)
    while sum(len(request.tokens) for request in heavy) < 20:
        scheduler.step()
    assert len(scheduler.running) == ROWS
    before, now = heavy[0].request_group.virtual_time, scheduler.fair.virtual_time
    scheduler.add(light)
    serve_until_done(scheduler, light)
    overtaken = policy == "lockstep" and not same  # then the round in flight does not come first
    in_flight = 0 if overtaken else ROWS * model.config.n_layer * max(heavy[0].loop_params.loops)
    one_pass = ROWS * model.config.n_layer
    assert heavy[0].request_group.virtual_time - before <= 1.5 * (light.request_group.virtual_time - now) + in_flight + one_pass + QUANTUM
    finish(scheduler)
    for request in (light, *heavy):
        check(model, request)
    assert scheduler.reserved_bytes == 0 and not scheduler.running


@pytest.mark.parametrize("policy", POLICIES)
def test_heavy_among_many_light_ones(policy: str) -> None:
    """While three request groups ask again and again, a heavy request gets its quarter of the work."""
    model = model_of()
    heavy = heavy_of(model, texts=4, new=40)
    scheduler = Scheduler(model, policy, max_num_seqs=ROWS)
    for request in heavy:
        scheduler.add(request)
    lights = [light_of(model, i) for i in range(40)]
    active = [lights.pop() for _ in range(3)]
    done = 0.0
    for request in active:
        scheduler.add(request)
    before = heavy[0].request_group.virtual_time
    while lights:
        scheduler.step()
        for i, request in enumerate(active):
            if request.finish_reason and lights:
                steps = [*request.prompt_steps, *request.steps[1:]]
                done += sum(k * len(g) for s in steps for k, g in zip(s, model.config.groups, strict=True))
                active[i] = lights.pop()
                scheduler.add(active[i])
    got = heavy[0].request_group.virtual_time - before
    assert 0.6 * done / 3 <= got <= 2.0 * done / 3


@pytest.mark.parametrize("policy", POLICIES)
def test_size_of_a_batch(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No batch has more than max_num_seqs sequences, also when others arrive while another one has all of them in flight."""
    model = model_of()
    heavy, lights = heavy_of(model, texts=ROWS), [light_of(model, i) for i in range(ROWS - 1)]
    scheduler = Scheduler(model, policy, max_num_seqs=ROWS)
    for request in heavy:
        scheduler.add(request)
    while sum(len(request.tokens) for request in heavy) < 2 * ROWS:
        scheduler.step()
    for request in lights:
        scheduler.add(request)
    sizes, advance = [], Batch.advance
    monkeypatch.setattr(Batch, "advance", lambda batch, *args: sizes.append(len(batch)) or advance(batch, *args))
    finish(scheduler)
    assert max(sizes) == ROWS
    monkeypatch.undo()
    for request in (*lights, *heavy):
        check(model, request)


def test_two_heavy_ones() -> None:
    """Two requests of different cost a token get equal work, each the half of the rows."""
    model = model_of()
    one, two = heavy_of(model, loops=24, new=30), heavy_of(model, loops=5, new=30)
    scheduler = Scheduler(model, "lockstep", max_num_seqs=ROWS)
    for pair in zip(one, two, strict=True):
        for request in pair:
            scheduler.add(request)
    while not any(all(request.finish_reason for request in requests) for requests in (one, two)):
        scheduler.step()
        assert all(
            sum(request.request_group is request_group for request in scheduler.running) <= ROWS // 2
            for request_group in (one[0].request_group, two[0].request_group)
        )
    works = one[0].request_group.virtual_time, two[0].request_group.virtual_time
    assert abs(works[0] - works[1]) <= QUANTUM + 64 * model.config.n_layer and min(works) > 2000


def test_memory_is_left_for_others() -> None:
    """One request alone takes at most three quarters of the cache, beside others half of what they leave; another one begins at once."""
    model = model_of()
    heavy, light = heavy_of(model, texts=5), light_of(model)
    scheduler = Scheduler(model, "lockstep", max_num_seqs=ROWS)
    scheduler.cache_bytes = int(4.2 * max(scheduler._bytes(request) for request in heavy))
    for request in heavy:
        scheduler.add(request)
    scheduler.step()
    assert 2 <= len(scheduler.running) < ROWS and scheduler.reserved_bytes <= 0.75 * scheduler.cache_bytes
    scheduler.add(light)
    scheduler.step()
    assert light in scheduler.running
    while not light.finish_reason:
        scheduler.step()
        assert scheduler.reserved_bytes <= scheduler.cache_bytes
    finish(scheduler)
    for request in (light, *heavy):
        check(model, request)


def test_select() -> None:
    """A round takes requests in turns, the one that has had the least first, and of one request no more than of all others together."""
    model = model_of()

    def requests_of(texts: int, virtual_time: float) -> list[Request]:
        request_group = RequestGroup(virtual_time)
        return [request_of(model, i, prompt=[1], request_group=request_group) for i in range(texts)]

    big, one, two = requests_of(9, 5.0), requests_of(1, 7.0), requests_of(1, 3.0)
    assert select_for_batch(big, 6) == big[:6]
    assert select_for_batch([*big, *one], 6) == [big[0], *one]
    assert select_for_batch([*big, *one, *two], 6) == [*two, big[0], *one, big[1]]
    assert select_for_batch([*big, *requests_of(4, 9.0)], 6)[::2] == big[:3]
    ahead = requests_of(3, 500.0)
    assert select_for_batch([*ahead, *one, *two], 6) == [*two, *one]  # it has several texts and is ahead
    assert len(select_for_batch([*requests_of(1, 1.0), *one, *two], 2)) == 2
