"""Requests for the scheduler, and a check of each against `generate` alone."""

import dataclasses
import random

import twoscale
from models import LAYOUTS, loud, small_model
from twoscale import exits
from twoscale.engine.sample import Sampling
from twoscale.exits import plan
from twoscale.serve.job import Job, Settings
from twoscale.serve.scheduler import Policy, Scheduler

POLICIES: tuple[Policy, ...] = ("lockstep", "depth")
RULES = (exits.StepNorm(0.5), exits.Acceleration(1.0), exits.KL(0.05), exits.RandomExit(3.0), None, exits.Confidence(0.05, read="coda"))


def model_of(layout: str = "default") -> twoscale.LoopedGPT:
    return loud(dataclasses.replace(small_model(block_size=64), **LAYOUTS[layout]), 0, scale=0.1)


def job_of(
    model: twoscale.LoopedGPT, seed: int, rule: exits.Rule | None = RULES[0], longest: int = 30, kv: str = "exact", **changes: object
) -> Job:
    chance = random.Random(seed)
    prompt = [chance.randrange(model.config.vocab_size) for _ in range(chance.randint(1, longest))]
    settings = Settings(plan(rule, model.config.n_groups), model.config.loops_for(7), kv)
    sampling = Sampling(chance.choice((0.0, 0.8)))
    return dataclasses.replace(Job(prompt, chance.randint(1, 12), settings, sampling), **changes)


def check(model: twoscale.LoopedGPT, job: Job) -> None:
    """A job has what `generate` gives to its prompt alone."""
    s = job.settings
    assert job.sampling.seed == s.seed  # `generate` has one seed for start states and draws
    want = twoscale.generate(
        model, [job.prompt], job.most, exit=s.exit, loops=s.loops, kv=s.kv, temperature=job.sampling.temperature, seed=s.seed
    )
    assert job.finish == "length" and job.steps == want.steps[0] and job.prompt_steps == want.prompt_steps[0]
    assert job.tokens == want.tokens[0]


def finish(scheduler: Scheduler, rounds: int = 20_000) -> None:
    for _ in range(rounds):
        if not scheduler.step():
            return
    raise AssertionError("the scheduler does not come to an end")
