"""Requests for the scheduler, and a check of each against `generate` alone."""

import dataclasses
import random

import twoscale
from models import LAYOUTS, loud, small_model
from twoscale import exits
from twoscale.engine.policy import POLICIES as POLICIES
from twoscale.engine.request import Request, SamplingParams, loop_params
from twoscale.engine.scheduler import Scheduler

RULES = (exits.StepNorm(0.5), exits.Acceleration(1.0), exits.KL(0.05), exits.RandomExit(3.0), None, exits.Confidence(0.05, read="coda"))


def model_of(layout: str = "default") -> twoscale.LoopedGPT:
    return loud(dataclasses.replace(small_model(block_size=64), **LAYOUTS[layout]), 0, scale=0.1)


def request_of(
    model: twoscale.LoopedGPT,
    seed: int,
    rule: exits.Rule | None = RULES[0],
    longest: int = 30,
    new: int | None = None,
    temperature: float | None = None,
    loops: int = 7,
    kv: str = "exact",
    **changes: object,
) -> Request:
    chance = random.Random(seed)
    prompt = [chance.randrange(model.config.vocab_size) for _ in range(chance.randint(1, longest))]
    drawn = chance.choice((0.0, 0.8)), chance.randint(1, 12)
    sampling = SamplingParams(drawn[0] if temperature is None else temperature, max_new_tokens=new or drawn[1])
    return dataclasses.replace(Request(prompt, sampling, loop_params(model, exit=rule, loops=loops, kv=kv)), **changes)


def alone(model: twoscale.LoopedGPT, request: Request, **settings: object) -> twoscale.engine.Generation:
    """What `generate` gives to a request's prompt alone."""
    s, p = request.sampling, request.loop_params
    assert s.seed == p.seed  # `generate` has one seed for start states and draws
    rules = {g: rule for g, rule in enumerate(p.rules) if rule is not None}
    return twoscale.generate(
        model, [request.prompt], s.max_new_tokens, exit=rules, loops=p.loops, kv=p.kv, temperature=s.temperature, seed=s.seed, **settings
    )


def check(model: twoscale.LoopedGPT, request: Request) -> None:
    """A request has what it gets alone."""
    want = alone(model, request)
    assert request.finish_reason == "length" and request.steps == want.steps[0] and request.prompt_steps == want.prompt_steps[0]
    assert request.tokens == want.tokens[0]


def finish(scheduler: Scheduler, rounds: int = 20_000) -> None:
    for _ in range(rounds):
        if not scheduler.step():
            return
    raise AssertionError("the scheduler does not come to an end")
