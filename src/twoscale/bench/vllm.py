"""vLLM with our plugin and our own server under the same load: one exported model, at a fixed depth and with the same exit rules.

Two of vLLM's servers (the depth is set at the start) and ours run during the whole bench; one of them is asked at a time, in turns.
Tokens are counted in the streams, over HTTP, from the moment when every client has had its first answer.
"""

import itertools
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file

from twoscale import exits
from twoscale.bench.serve import MAX_STEPS, Load, Result, check_served, run_clients
from twoscale.config import UserError
from twoscale.config.files import write_json
from twoscale.config.run_folder import CONFIG, MODEL
from twoscale.config.serial import to_dict
from twoscale.data import Tokenizer
from twoscale.engine import Scheduler
from twoscale.geometry import accelerations
from twoscale.interop.export import export
from twoscale.interop.load import PREFIX
from twoscale.interop.vllm_plugin import check_vllm
from twoscale.model import LoopedGPT
from twoscale.serve.app import create_app
from twoscale.serve.limits import Limits
from twoscale.serve.local import listen, run_in_thread
from twoscale.serve.server import Server
from twoscale.serve.vllm_engine import vllm_command
from twoscale.tracing import trace

START_SECONDS = 600.0  # imports and first use of vLLM on two busy cores
# By default vLLM leaves a core to its scheduler: half of a machine with two.
QUIET_ON_ALL_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}


def exit_words(model: LoopedGPT) -> list[str]:
    """One acceleration rule for each group, whose threshold about half of the tokens meet half-way to MAX_STEPS."""
    ids = [[(31 * i + 7) % model.config.vocab_size for i in range(min(48, model.config.block_size))]]
    states = trace(model, ids, loops=MAX_STEPS).states
    return [f"acceleration:{float(accelerations(x)[MAX_STEPS // 2 - 1].median()):.4g}" for x in states]


def bench_vllm(model: LoopedGPT, load: Load, tokenizer: Tokenizer, rounds: int, say: Callable[[str], object]) -> dict[str, list[Result]]:
    """All ways, in turns; their names tell server and depth."""
    check_vllm()
    words = exit_words(model)
    say(f"exit rules: {', '.join(words)}")
    found: dict[str, list[Result]] = {}
    with ExitStack() as stack:
        folder = exported(model, tokenizer, Path(stack.enter_context(TemporaryDirectory())))
        ways: dict[str, tuple[str, dict[str, Any]]] = {}  # name -> address, settings of each request
        for name, rules in ((f"all {MAX_STEPS} loops", None), ("with exits", words)):
            ways[f"vLLM, {name}"] = stack.enter_context(vllm_server(folder, load.clients, rules)), {}
        ours = stack.enter_context(our_server(model, tokenizer, load.clients, words))
        for name, exit in ((f"all {MAX_STEPS} loops", "none"), ("with exits", "auto")):
            ways[f"twoscale, {name}"] = ours, {"loops": MAX_STEPS, "exit": exit}
        for round_, (name, (address, settings)) in itertools.product(range(rounds), ways.items()):
            answers = run_clients(address, load.clients, load.seconds, requests(model, replace(load, seed=round_), settings))
            check_served(answers)
            result = Result(answers["seconds"], answers["tokens"], answers["latency"], answers["first"])
            found.setdefault(name, []).append(result)
            say(f"{name}: {result.rate:.1f} tokens/s")
    return found


def exported(model: LoopedGPT, tokenizer: Tokenizer, root: Path) -> Path:
    """An export of the model."""
    source = root / "source"
    source.mkdir()
    save_file({PREFIX + name: t for name, t in model.state_dict().items()}, source / MODEL)
    write_json(source / CONFIG, {"model_type": "twoscale", "twoscale": to_dict(model.config)})
    tokenizer.save(source)
    return export(source, root / "bench")


def requests(model: LoopedGPT, load: Load, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The requests as clients.py takes them. Logprobs of the tokens themselves are asked for: their number counts the tokens of a chunk."""
    shared = {"model": "bench", "temperature": 0, "logprobs": 0, **settings}
    asked = itertools.islice(load.requests(model, None), 2000)
    return [{"body": {"prompt": r.prompt, "max_tokens": r.sampling.max_new_tokens, **shared}, "how": "stream"} for r in asked]


@contextmanager
def our_server(model: LoopedGPT, tokenizer: Tokenizer, clients: int, rules: list[str]) -> Iterator[str]:
    """Our server in a thread of this process; yields its address. exit=auto stands for the rules."""
    calibrated = {g: exits.parse(rule) for g, rule in enumerate(rules)}, MAX_STEPS
    scheduler = Scheduler(model, "lockstep", max_num_seqs=clients)
    server = Server(model, tokenizer, "bench", scheduler, calibration=calibrated, limits=Limits(timeout=600.0))
    with run_in_thread(create_app(server)) as address:
        yield address


@contextmanager
def vllm_server(folder: Path, clients: int, rules: list[str] | None) -> Iterator[str]:
    """vLLM's server in a process of its own; yields its address."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    overrides = {"loops": MAX_STEPS} | ({"exit": rules} if rules else {})
    words = vllm_command(folder, "bench", "127.0.0.1", port, overrides, max_num_seqs=clients)
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=sys.stderr, env={**QUIET_ON_ALL_CORES, **os.environ}) as process:
        try:
            while not _answers(address):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise UserError("vLLM's server did not start; what it said is above")
                time.sleep(1)
            yield address
        finally:
            process.terminate()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
