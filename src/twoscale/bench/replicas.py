"""Several replicas beside one, with one thread each: the same load over HTTP through a front, in turns."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from twoscale.bench.serve import MAX_STEPS, Load, Result, check_served, run_clients
from twoscale.bench.vllm import exported, requests
from twoscale.data import Tokenizer
from twoscale.model import LoopedGPT
from twoscale.serve import ray_replicas
from twoscale.serve.build import Settings
from twoscale.serve.front import Front, create_front
from twoscale.serve.limits import Limits
from twoscale.serve.local import run_in_thread


def bench_replicas(
    model: LoopedGPT, load: Load, tokenizer: Tokenizer, replicas: int, rounds: int, say: Callable[[str], object]
) -> list[tuple[Result, Result]]:
    """(one replica, so many) for each round. Both sets run during the whole bench; one of them is asked at a time."""
    found: list[tuple[Result, Result]] = []
    with ExitStack() as stack:
        folder = exported(model, tokenizer, Path(stack.enter_context(TemporaryDirectory())))
        settings = Settings(str(folder), policy="lockstep", max_num_seqs=load.clients, limits=Limits(timeout=600.0))
        ray_replicas.connect(replicas + 1)
        stack.callback(ray_replicas.stop)
        addresses = []
        for n in (1, replicas):
            handle = ray_replicas.deploy(settings, n, 1, name=f"replicas-{n}")
            front = Front(ray_replicas.RayReplicas(handle), settings.limits)
            addresses.append(stack.enter_context(run_in_thread(create_front(front))))
        for round_ in range(rounds):
            asks = requests(model, replace(load, seed=round_), {"loops": MAX_STEPS, "exit": "none"})
            pair = []
            for address in addresses:
                answers = run_clients(address, load.clients, load.seconds, asks)
                check_served(answers)
                pair.append(Result(answers["seconds"], answers["tokens"], answers["latency"], answers["first"]))
            found.append((pair[0], pair[1]))
            say(f"round {round_ + 1}: {pair[0].rate:.1f} tokens/s by one replica, {pair[1].rate:.1f} by {replicas}")
    return found
