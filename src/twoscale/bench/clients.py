"""Clients on loopback, in a process of their own: run as a script, so that it loads nothing but this file and httpx.

Standard input has one JSON object: {"address", "clients", "seconds", "drain", "asks"}. Every client takes the next of `asks`, again from
the beginning when they are used up: {"body": what is posted, "how": "stream" | "whole" | "vanish", "steps": those of the answer, if known}.
Standard output has `start` when every client has had its first answer, or refusal, `stop` so many seconds later, and then what was found,
as JSON; from then on nobody asks, and for up to `drain` seconds those that are still waiting may have their answers.
"""

import asyncio
import itertools
import json
import os
import sys
import time
from typing import Any

import httpx

CLOCK = time.perf_counter


class Tally:
    """What the clients were answered between start and stop, and what went wrong at any time."""

    def __init__(self) -> None:
        self.tokens, self.latency, self.first = 0, [], []  # type: ignore[var-annotated]
        self.counts = dict.fromkeys(("asked", "answered", "refused", "vanished", "wrong"), 0)
        self.troubles: list[str] = []

    def trouble(self, words: str) -> None:
        self.counts["wrong"] += 1
        if len(self.troubles) < 5:
            self.troubles.append(words)

    def refusal(self, answer: httpx.Response) -> None:
        """429 is a word that counts only with the time after which to come back."""
        if answer.status_code == 429 and answer.headers.get("retry-after", "").isdigit():
            self.counts["refused"] += 1
        else:
            self.trouble(f"status {answer.status_code}")


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def ask(client: httpx.AsyncClient, address: str, ask_: dict[str, Any], tally: Tally, answered: asyncio.Event) -> None:
    """One request and its answer."""
    began, first, ends, how = CLOCK(), 0.0, 0, ask_["how"]
    steps: list[list[int]] = []
    body = {**ask_["body"], "stream": how != "whole"}
    tally.counts["asked"] += 1
    async with client.stream("POST", f"{address}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            await answer.aread()
            tally.refusal(answer)
            answered.set()
            await asyncio.sleep(0.05)
            return
        if how == "whole":
            choices = json.loads(await answer.aread())["choices"]
            steps, ends, first = choices[0]["steps"], sum(c["finish_reason"] is not None for c in choices), CLOCK()
            tally.tokens += len(steps)
        else:
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    break
                if line.startswith("data: "):
                    choice = json.loads(line[6:])["choices"][0]
                    first = first or CLOCK()
                    if "steps" in choice:
                        tally.tokens += len(choice["steps"])
                        steps += choice["steps"]
                    else:  # another server, which was asked for logprobs
                        tally.tokens += len((choice["logprobs"] or {}).get("tokens", ()))
                    ends += choice["finish_reason"] is not None
                    if how == "vanish":
                        tally.counts["vanished"] += 1
                        answered.set()
                        return
    answered.set()
    if ends != 1:
        tally.trouble(f"an answer ended {ends} times")
    elif ask_.get("steps") is not None and steps != ask_["steps"]:
        tally.trouble(f"steps {steps} instead of {ask_['steps']}")
    else:
        tally.counts["answered"] += 1
    tally.latency.append(CLOCK() - began)
    tally.first.append(first - began)


async def main(address: str, clients: int, seconds: float, drain: float, asks: list[dict[str, Any]]) -> None:
    tally, todo, stopping = Tally(), itertools.cycle(asks), asyncio.Event()
    events = [asyncio.Event() for _ in range(clients)]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:

        async def one(answered: asyncio.Event) -> None:
            while not stopping.is_set():
                try:
                    await ask(client, address, next(todo), tally, answered)
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    tally.trouble(f"{type(error).__name__}: {error}")
                    await asyncio.sleep(0.2)
                    answered.set()

        tasks = [asyncio.create_task(one(event)) for event in events]
        await asyncio.gather(*(event.wait() for event in events))
        tally.tokens, tally.latency, tally.first = 0, [], []
        tell("start")
        began = CLOCK()
        await asyncio.sleep(seconds)
        tell("stop")
        result = {"seconds": CLOCK() - began, "tokens": tally.tokens, "latency": list(tally.latency), "first": list(tally.first)}
        stopping.set()
        if drain:
            await asyncio.wait(tasks, timeout=drain)
        result |= {"counts": tally.counts, "troubles": tally.troubles}
        for task in tasks:
            task.cancel()
    tell(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main(**json.load(sys.stdin)))
    os._exit(0)
