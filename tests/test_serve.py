"""Serving: what a request gets does not depend on who else is served, by either policy."""

import dataclasses
import random

import pytest
import torch

import twoscale
from scheduling import POLICIES, RULES, check, finish, job_of, model_of
from twoscale import exits
from twoscale.config import UserError
from twoscale.engine.sample import Sampling
from twoscale.serve.job import Job
from twoscale.serve.scheduler import Policy, Scheduler

KVS = ("exact", "exact", "last", "exact", "ring:2")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("layout", ["default", "all loops", "rotary, grouped queries", "branch norms", "noise at every step"])
def test_invariance(policy: Policy, layout: str) -> None:
    """Thirty requests with different prompts, lengths, rules and draws, coming in while others are served: each gets what it gets alone."""
    model = model_of(layout)
    jobs = [job_of(model, i, RULES[i % len(RULES)], kv=KVS[i % len(KVS)], sampling=Sampling(0.8 * (i % 2))) for i in range(30)]
    scheduler = Scheduler(model, policy, rows=9)
    for i, job in enumerate(jobs):
        scheduler.submit(job)
        for _ in range(i % 4):
            scheduler.step()
    finish(scheduler)
    for job in jobs:
        check(model, job)
    assert scheduler.held == 0 and not scheduler.running and scheduler.counters.tokens == sum(len(job.tokens) for job in jobs)
    taken = [s for job in jobs for s in [*job.prompt_steps, *job.steps[1:]]]
    assert scheduler.counters.steps == [sum(s[g] for s in taken) for g in range(model.config.n_groups)]  # work = sum of steps


@pytest.mark.parametrize("policy", POLICIES)
def test_cancelled(policy: Policy) -> None:
    """Whoever vanishes, waiting, reading or writing, frees its place at once, and the others finish unharmed."""
    model = model_of()
    jobs = [job_of(model, i, most=12, sampling=Sampling()) for i in range(12)]
    scheduler = Scheduler(model, policy, rows=6)
    for job in jobs:
        scheduler.submit(job)
    chance = random.Random(1)
    vanish = {3: chance.randrange(1, 40), 4: 0, 7: chance.randrange(1, 40), 11: 1}
    for turn in range(20_000):
        for i, when in vanish.items():
            if turn == when:
                jobs[i].cancelled = True
        if not scheduler.step():
            break
    for i, job in enumerate(jobs):
        if i in vanish and job.finish == "cancelled":
            assert job.cache is None and len(job.tokens) < 12
        else:
            check(model, job)
    assert any(jobs[i].finish == "cancelled" for i in vanish) and scheduler.held == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_and_order(policy: Policy) -> None:
    """No more is promised than there is; first come, first served; what can never fit is refused."""
    model = model_of()
    jobs = [job_of(model, i, most=4, sampling=Sampling(), longest=20) for i in range(10)]
    scheduler = Scheduler(model, policy, rows=4)
    room = 2 * max(scheduler._bytes(job) for job in jobs)
    scheduler.cache_bytes = room
    began: list[Job] = []
    for job in jobs:
        scheduler.submit(job)
    for _ in range(20_000):
        working = scheduler.step()
        assert scheduler.held <= room and len(scheduler.running) <= 4
        assert sum(job.cache.nbytes for job in scheduler.running if job.cache is not None) <= scheduler.held
        began += [job for job in jobs if job.cache is not None and job not in began]
        if not working:
            break
    assert began == jobs and all(job.finish == "length" for job in jobs)
    scheduler.cache_bytes = 1000
    with pytest.raises(UserError, match="memory"):
        scheduler.submit(job_of(model, 1))
    with pytest.raises(UserError, match="context"):
        scheduler.submit(job_of(model, 1, most=500))


@pytest.mark.parametrize("policy", POLICIES)
def test_poisoned(policy: Policy) -> None:
    """A request whose logits are not finite fails alone."""
    model = model_of()
    with torch.no_grad():
        model.wte.weight[13] = float("nan")
        model.lm_head = torch.nn.Linear(model.config.n_embd, model.config.padded_vocab_size, bias=False)  # the head stays whole
        torch.nn.init.normal_(model.lm_head.weight, generator=torch.Generator().manual_seed(0))
    clean = [job_of(model, i, sampling=Sampling(), longest=8) for i in range(6)]
    clean = [dataclasses.replace(job, prompt=[t if t != 13 else 14 for t in job.prompt], stop=frozenset({13})) for job in clean]
    bad = job_of(model, 99, prompt=[1, 13, 2])
    scheduler = Scheduler(model, policy)
    for job in [*clean[:3], bad, *clean[3:]]:
        scheduler.submit(job)
    finish(scheduler)
    assert bad.finish == "error" and "finite" in bad.error and not bad.tokens
    for job in clean:
        want = twoscale.generate(model, [job.prompt], job.most, exit=job.settings.exit, loops=7, stop=(13,))
        assert job.tokens == want.tokens[0] and job.steps == want.steps[0]


@dataclasses.dataclass(frozen=True)
class Broken(exits.StepNorm):
    """A rule that goes wrong at its third step."""

    def measure(self, view: exits.StepView) -> float:
        if bool((torch.as_tensor(view.k) >= 3).any()):
            raise ZeroDivisionError
        return 1.0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_rule_that_breaks(policy: Policy) -> None:
    """Requests whose rule raises fail, told so; all others get theirs, and the scheduler goes on."""
    model = model_of()
    jobs = [job_of(model, i, Broken(0.1) if i % 3 == 0 else RULES[0], sampling=Sampling()) for i in range(9)]
    scheduler = Scheduler(model, policy, rows=5)
    for job in jobs:
        scheduler.submit(job)
    finish(scheduler)
    for i, job in enumerate(jobs):
        if i % 3 == 0:
            assert job.finish == "error" and "failed" in job.error and job.cache is None
        else:
            check(model, job)
    assert scheduler.held == 0 and not scheduler.running
