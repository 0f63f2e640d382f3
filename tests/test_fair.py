"""Fair shares: a request that asks for much slows others down by its share and no more, and is not starved by them."""

import dataclasses

import pytest

import twoscale
from scheduling import POLICIES, RULES, check, finish, job_of, model_of
from twoscale.engine.sample import Sampling
from twoscale.serve.fair import QUANTUM, select
from twoscale.serve.job import Job, Settings, Share
from twoscale.serve.scheduler import Policy, Scheduler

ROWS = 6


def heavy_of(model: twoscale.LoopedGPT, texts: int = 8, loops: int = 16, most: int = 14, like: Job | None = None) -> list[Job]:
    """One request for many long texts with many loops and no exits, or with the settings of another one."""
    settings = Settings((None,) * model.config.n_groups, model.config.loops_for(loops)) if like is None else like.settings
    share = Share()
    return [job_of(model, 100 + i, longest=12, most=most, settings=settings, share=share, sampling=Sampling()) for i in range(texts)]


def light_of(model: twoscale.LoopedGPT, seed: int = 1) -> Job:
    return job_of(model, seed, RULES[0], longest=8, most=10, sampling=Sampling())


def serve_until_done(scheduler: Scheduler, job: Job) -> None:
    for _ in range(20_000):
        if job.finish:
            return
        scheduler.step()
    raise AssertionError("it does not come to an end")


@pytest.mark.parametrize("same", [False, True], ids=["other settings", "same settings"])
@pytest.mark.parametrize("policy", POLICIES)
def test_light_beside_heavy(policy: Policy, same: bool) -> None:
    """From a light request's arrival to its end a heavy one gets about as much work as the light one, though it holds all rows; nobody's
    result changes."""
    model = model_of()
    light = light_of(model)
    heavy = heavy_of(model, like=light if same else None)
    scheduler = Scheduler(model, policy, rows=ROWS)
    for job in heavy:
        scheduler.submit(job)
    while sum(len(job.tokens) for job in heavy) < 20:
        scheduler.step()
    assert len(scheduler.running) == ROWS
    before, now = heavy[0].share.work, scheduler.fair.now
    scheduler.submit(light)
    serve_until_done(scheduler, light)
    layers = model.config.n_layer * max(light.settings.loops)
    running_round = ROWS * layers if same else 0  # jobs of the same settings join at the next token
    one_call = ROWS * model.config.n_layer
    assert heavy[0].share.work - before <= 1.5 * (light.share.work - now) + running_round + one_call + QUANTUM
    finish(scheduler)
    for job in (light, *heavy):
        check(model, job)
    assert scheduler.held == 0 and not scheduler.running


@pytest.mark.parametrize("policy", POLICIES)
def test_heavy_among_many_light_ones(policy: Policy) -> None:
    """While three clients ask again and again, a heavy request gets its quarter of the work."""
    model = model_of()
    heavy = heavy_of(model, texts=4, most=40)
    scheduler = Scheduler(model, policy, rows=ROWS)
    for job in heavy:
        scheduler.submit(job)
    lights = [light_of(model, i) for i in range(40)]
    there = [lights.pop() for _ in range(3)]
    done = 0.0
    for job in there:
        scheduler.submit(job)
    before = heavy[0].share.work
    while lights:
        scheduler.step()
        for i, job in enumerate(there):
            if job.finish and lights:
                steps = [*job.prompt_steps, *job.steps[1:]]
                done += sum(k * len(g) for s in steps for k, g in zip(s, model.config.groups, strict=True))
                there[i] = lights.pop()
                scheduler.submit(there[i])
    got = heavy[0].share.work - before
    assert 0.6 * done / 3 <= got <= 2.0 * done / 3


def test_two_heavy_ones() -> None:
    """Two requests of different cost a token get equal work, each the half of the rows."""
    model = model_of()
    one, two = heavy_of(model, loops=24, most=30), heavy_of(model, loops=5, most=30)
    scheduler = Scheduler(model, "lockstep", rows=ROWS)
    for pair in zip(one, two, strict=True):
        for job in pair:
            scheduler.submit(job)
    for _ in range(300):
        scheduler.step()
        assert all(sum(job.share is share for job in scheduler.running) <= ROWS // 2 for share in (one[0].share, two[0].share))
    works = one[0].share.work, two[0].share.work
    assert abs(works[0] - works[1]) <= QUANTUM + 64 * model.config.n_layer and min(works) > 2000


def test_memory_is_left_for_others() -> None:
    """One request alone takes at most three quarters of the cache, beside others half of what they leave; another one begins at once."""
    model = model_of()
    heavy, light = heavy_of(model, texts=5), light_of(model)
    scheduler = Scheduler(model, "lockstep", rows=ROWS)
    scheduler.cache_bytes = int(4.2 * max(scheduler._bytes(job) for job in heavy))
    for job in heavy:
        scheduler.submit(job)
    scheduler.step()
    assert 2 <= len(scheduler.running) < ROWS and scheduler.held <= 0.75 * scheduler.cache_bytes
    scheduler.submit(light)
    scheduler.step()
    assert light in scheduler.running
    while not light.finish:
        scheduler.step()
        assert scheduler.held <= scheduler.cache_bytes
    finish(scheduler)
    for job in (light, *heavy):
        check(model, job)


def test_select() -> None:
    """A round takes requests in turns, the one that has had the least first, and of one request no more than of all others together."""
    model = model_of()

    def request(texts: int, work: float, fed: int = 1) -> list[Job]:
        share = Share(work)
        return [dataclasses.replace(job_of(model, i, prompt=[1]), share=share, fed=fed) for i in range(texts)]

    big, one, two = request(9, 5.0), request(1, 7.0), request(1, 3.0)
    assert select(big, 6) == big[:6]
    assert select([*big, *one], 6) == [big[0], *one]
    assert select([*big, *one, *two], 6) == [*two, big[0], *one, big[1]]
    assert select([*big, *request(4, 9.0)], 6)[::2] == big[:3]
    reading = request(3, 500.0, fed=0)
    assert select([*reading, *one, *two], 6) == [*two, *one, reading[0]]  # far ahead: its other texts read later
    assert len(select([*request(1, 1.0), *one, *two], 2)) == 2
