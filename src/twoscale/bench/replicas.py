"""Several replicas beside one, each pinned to a core of its own: the same load over HTTP through a proxy, in turns."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from twoscale.bench.serve import MAX_STEPS, Load, Result, check_served, run_clients
from twoscale.bench.vllm import exported, requests
from twoscale.config import UserError
from twoscale.config.dtypes import WeightDtype
from twoscale.data import Tokenizer
from twoscale.model import LoopedGPT
from twoscale.serve.build import Settings
from twoscale.serve.limits import Limits
from twoscale.serve.local import run_in_thread
from twoscale.serve.proxy import Proxy, create_proxy_app
from twoscale.serve.ray_cluster import connected


def bench_replicas(
    model: LoopedGPT,
    load: Load,
    tokenizer: Tokenizer,
    replicas: int,
    rounds: int,
    say: Callable[[str], object],
    dtype: WeightDtype = "fp32",
) -> list[tuple[Result, Result]]:
    """(one replica, so many) for each round. Both sets run during the whole bench; one of them gets requests at a time."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < replicas:
        raise UserError(f"--replicas {replicas} needs as many cores, there are {len(cores)}")
    found: list[tuple[Result, Result]] = []
    with ExitStack() as stack:
        folder = exported(model, tokenizer, Path(stack.enter_context(TemporaryDirectory())))
        settings = Settings(str(folder), policy="lockstep", max_num_seqs=load.clients, limits=Limits(timeout=600.0), dtype=dtype)
        stack.enter_context(connected(replicas + 1))
        from twoscale.serve.ray_replicas import deployed

        addresses = []
        for n in (1, replicas):
            found_replicas = stack.enter_context(deployed(settings, n, 1))
            for core, pid in zip(cores, found_replicas.handle.broadcast("pid").results(timeout_s=60), strict=False):
                pin(pid, core)
            addresses.append(stack.enter_context(run_in_thread(create_proxy_app(Proxy(found_replicas, settings.limits)))))
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


def pin(pid: int, core: int) -> None:
    """Let all threads of a process run on one core; those that they start will too."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})
