"""`twoscale serve MODEL --port 8000`: completions over HTTP, as OpenAI's clients expect them.

twoscale serve bundled --port 8000
"""

import os
import signal
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from twoscale.cli.parse import parse, say
from twoscale.config import UserError, missing_package
from twoscale.config.dtypes import DtypeChoice, KVDtype
from twoscale.config.words import plural

if TYPE_CHECKING:
    from socket import socket

    from twoscale.serve.build import Settings
    from twoscale.serve.connections import Connections


@dataclass(frozen=True)
class ServeArgs:
    """Serve /v1/completions, /v1/models, /health and /metrics. Requests share batches, and every token exits loops on its own."""

    model: Annotated[str, tyro.conf.Positional] = "bundled"
    """A run, a checkpoint, an export, a Huginn, Ouro or Llama folder, or the bundled model."""
    host: str = "127.0.0.1"
    """Address to listen on; by default this machine alone can reach it."""
    port: int = 8000
    """Port; 0 takes a free one."""
    dtype: DtypeChoice = "auto"
    """How the weights are held: fp32, bf16, int8, w8a8 (int8, and inputs are rounded to int8 too), or auto: as the folder has them."""
    device: str = "cpu"
    """Where to compute: cpu, or a device of torch such as cuda."""
    kv_dtype: KVDtype = "auto"
    """The dtype of cached keys and values: fp32, bf16 (half the memory), or auto: the one in which the model computes, fp32 on the CPU."""
    policy: str = "auto"
    """How requests share stage passes: lockstep, depth, or auto, which measures what a pass costs with few and with many rows."""
    max_num_seqs: int = 32
    """Sequences in one batch. A new request need not wait until one of them ends: it starts, and batches take turns."""
    cache_mb: int = 1024
    """Memory of the KV caches of running requests, in MB."""
    max_queue: int = 256
    """Sequences that may wait in the queue; further requests are rejected with 429."""
    timeout: float = 120.0
    """Seconds after which a request ends with the tokens it has."""
    max_connections: int = 512
    """Connections that may be open. Beyond that, those that have waited longest for their client are closed."""
    read_timeout: float = 10.0
    """Seconds that a client may take to send the headers of a request, and again for its body."""
    speculate: str = "auto"
    """How tokens are guessed ahead for requests that do not say: auto (where it pays, while no other request is running), off, wavefront,
    draft:m or lookup:n. The answers are the same to the bit."""
    key_env: str = "TWOSCALE_API_KEY"
    """Environment variable with the API key; if it is not set, no key is required."""
    engine: Literal["twoscale", "vllm"] = "twoscale"
    """Who computes: this package, or vLLM with our plugin, at a fixed depth unless --hf-overrides names an exit rule."""
    replicas: int | None = None
    """Serve by so many processes, which Ray Serve starts and replaces when they die. By default this process serves, without Ray."""
    ray_address: str = ""
    """With --replicas: HOST:PORT of a Ray cluster, or auto; empty starts Ray on this machine."""
    hf_overrides: str = ""
    """With --engine vllm: settings as JSON, above all `loops` (one number, or one for each group) and `exit`."""


MAX_REPLICAS = 1000
VLLM_TAKES = ("model", "host", "port", "max_num_seqs", "cache_mb", "key_env", "engine", "hf_overrides")  # the other options are ours alone


def _run_vllm(options: ServeArgs) -> int:
    """Replace this process by vLLM's server."""
    from twoscale.interop import find
    from twoscale.serve.vllm_engine import read_overrides, vllm_command

    ignored = [f.name for f in fields(options) if f.name not in VLLM_TAKES and getattr(options, f.name) != f.default]
    if ignored:
        raise UserError(f"--{ignored[0].replace('_', '-')} does not go with --engine vllm: omit it, or call `vllm serve` yourself")
    folder = find(options.model)
    overrides = read_overrides(options.hf_overrides)
    words = vllm_command(folder, folder.resolve().name, options.host, options.port, overrides, options.max_num_seqs, options.cache_mb << 20)
    from twoscale.serve.local import listen  # FastAPI comes along with vLLM

    listen(options.host, options.port).close()  # a port in use is told now, not after the weights are loaded
    if key := os.environ.get(options.key_env):
        os.environ["VLLM_API_KEY"] = key
    say(" ".join(words))
    os.execv(words[0], words)


def run(args: list[str]) -> int:
    options = parse(ServeArgs, args, "twoscale serve")
    if not 0 <= options.port <= 65535 or min(options.max_num_seqs, options.cache_mb, options.max_queue, options.max_connections) < 1:
        raise UserError("--port lies between 0 and 65535; --max-num-seqs, --cache-mb, --max-queue and --max-connections are at least 1")
    if not min(options.timeout, options.read_timeout) > 0 or not max(options.timeout, options.read_timeout) <= 86_400:
        raise UserError("--timeout and --read-timeout are above 0 and at most a day")
    if options.replicas is not None and not 1 <= options.replicas <= MAX_REPLICAS:
        raise UserError(f"--replicas {options.replicas}: between 1 and {MAX_REPLICAS}; omit it to serve without Ray")
    if options.ray_address and options.replicas is None:
        raise UserError("--ray-address goes with --replicas")
    if options.engine == "vllm":
        return _run_vllm(options)
    if options.hf_overrides:
        raise UserError("--hf-overrides goes with --engine vllm; requests to our own server say loops and exit themselves")
    try:
        from twoscale.interop import find
        from twoscale.serve.app import create_app
        from twoscale.serve.build import build_server
        from twoscale.serve.local import listen
    except ModuleNotFoundError as error:
        raise missing_package(f"serving needs {error.name}", "serve") from None

    if options.replicas is not None:
        return _run_replicas(options)
    settings = _settings(options)
    find(options.model)  # a folder that is not there is told first
    listening = listen(options.host, options.port)
    server, why = build_server(settings)
    say(f"policy: {why}")
    _run_http(options, create_app(server), server.connections, listening)
    return 0


def _settings(options: ServeArgs) -> "Settings":
    """The settings of one server."""
    from twoscale.engine.speculation import parse_speculation
    from twoscale.serve.build import Settings
    from twoscale.serve.limits import Limits

    limits = Limits(
        timeout=options.timeout, max_queue=options.max_queue, max_connections=options.max_connections, read_timeout=options.read_timeout
    )
    key = os.environ.get(options.key_env) or None
    folder = Path(options.model).expanduser()
    model = str(folder.resolve()) if folder.is_dir() else options.model  # replicas may have another working directory
    speculate = parse_speculation(options.speculate)
    return Settings(
        model, options.policy, options.max_num_seqs, options.cache_mb, key, limits, speculate, options.dtype, options.device,
        options.kv_dtype,
    )  # fmt: skip


def _run_http(options: ServeArgs, app: Any, connections: "Connections", listening: "socket") -> None:
    """Answer HTTP requests until told to stop."""
    from twoscale.serve.connections import HTTPServer

    http = HTTPServer(app, connections, timeout_graceful_shutdown=int(options.timeout) + 1)
    say(f"http://{options.host}:{listening.getsockname()[1]}/v1")
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn ends gracefully, then raises the signal again: being told to go is no fault
    http.run(sockets=[listening])


def _run_replicas(options: ServeArgs) -> int:
    """Serve by several processes, which Ray Serve starts and replaces."""
    from twoscale.config.cpu import usable_cores
    from twoscale.interop import find
    from twoscale.serve.local import listen
    from twoscale.serve.proxy import Proxy, create_proxy_app
    from twoscale.serve.ray_cluster import connected

    assert options.replicas is not None
    find(options.model)  # a folder that is not there is told before anything is started
    settings, listening = _settings(options), listen(options.host, options.port)
    cpus = 1 if options.ray_address else max(1, usable_cores() // options.replicas)
    gpus = options.replicas if options.device != "cpu" else 0
    with connected(options.replicas * cpus, gpus, options.ray_address):
        from twoscale.serve.ray_replicas import deployed  # Ray reads its environment when it is imported

        signal.signal(signal.SIGTERM, _exit)  # Ray has set a handler of its own
        with deployed(settings, options.replicas, cpus) as replicas:
            proxy = Proxy(replicas, settings.limits, settings.key)
            say(f"replicas: {options.replicas}, with {plural(cpus, 'thread')} each")
            _run_http(options, create_proxy_app(proxy), proxy.connections, listening)
    return 0


def _exit(*_: object) -> None:
    raise SystemExit(0)
