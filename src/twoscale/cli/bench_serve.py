"""`twoscale bench serve`: the same load served in several ways."""

from dataclasses import dataclass
from statistics import median
from typing import Literal

from twoscale.cli import bench_scale
from twoscale.cli.parse import say
from twoscale.config import UserError, missing_package, presets
from twoscale.config.dtypes import KVDtype, WeightDtype

BUSY_HEAD = f"{'':<38}{'free cores':>13}{'one core busy':>16}{'all cores busy':>16}"


@dataclass(frozen=True)
class BenchServeArgs:
    """The same load served one after another, in batches that wait, and by both policies with and without exits; one run."""

    preset: Literal["nano", "tiny", "small", "paper"] = "paper"
    """Which model to serve, with random weights."""
    clients: int = 32
    """Clients that ask at a time."""
    seconds: float = 20.0
    """How long each way is measured, in each round."""
    rounds: int = 3
    """Rounds in which all ways take turns; medians are reported."""
    prompt: tuple[int, int] = (8, 48)
    """Tokens of a prompt, at least and at most."""
    new: tuple[int, int] = (16, 64)
    """Tokens of an answer, at least and at most."""
    soak: float = 0.0
    """Instead: so many seconds of overload by twice as many clients, some of whom hang up; looks at memory and at every answer."""
    vllm: bool = False
    """Instead: vLLM with our plugin and our own server, each with all loops and with exits (needs vLLM: `make venv-vllm`)."""
    replicas: int = 0
    """Instead: so many replicas beside one, by Ray Serve, each pinned to one core (needs Ray: `make venv-ray`)."""
    busy: bool = False
    """Instead: one request to `bundled` on free cores, with one core kept busy by another program, and with all of them."""
    mixed: bool = False
    """Instead: all clients with one rule, and with eight different rules and depth limits."""
    attack: bool = False
    """Instead: the latency of every request with and without 1,000 half-open connections and one heavy request, on 127.0.0.1."""
    speculate: str | None = None
    """Instead: 1, 4, 16 and 32 clients of a trained model (a run, or `bundled`) with speculation `auto` and off, on held-out text."""
    dtype: WeightDtype = "fp32"
    """How the weights are held: fp32, bf16, int8 or w8a8."""
    device: str = "cpu"
    """Where to compute: cpu, or a device of torch such as cuda."""
    kv_dtype: KVDtype = "auto"
    """The dtype of cached keys and values: fp32, bf16 (half the memory), or auto: the one in which the model computes, fp32 on the CPU."""


def serve(args: BenchServeArgs) -> int:
    try:
        import httpx  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_package(f"this bench needs {error.name}", "serve", "httpx") from None
    from twoscale.bench import attack, serve as b
    from twoscale.bench.shapes import random_model
    from twoscale.bench.soak import soak
    from twoscale.data.tokenizer import byte_tokenizer
    from twoscale.interop.load import usable_device

    if not 1 <= args.clients <= 1000 or not 1 <= args.rounds <= 100 or not 0 < args.seconds <= 3600 or not 0 <= args.soak <= 86_400:
        raise UserError("--clients lies between 1 and 1000, --rounds between 1 and 100, --seconds up to an hour, --soak up to a day")
    if any(not 1 <= low <= high for low, high in (args.prompt, args.new)):
        raise UserError("--prompt and --new want two numbers, at least 1, the smaller one first")
    if args.vllm and args.dtype != "fp32":
        raise UserError(f"--dtype {args.dtype} does not go with --vllm, which reads the folder in fp32")
    if args.kv_dtype != "auto" and (args.vllm or args.replicas or args.busy or args.speculate or args.attack or args.soak):
        raise UserError(f"--kv-dtype {args.kv_dtype} goes with the plain bench and with --mixed")
    if args.device != "cpu" and (args.vllm or args.replicas or args.busy or args.speculate):
        raise UserError(f"--device {args.device}: --vllm, --replicas, --busy and --speculate are measured on the CPU alone")
    device = usable_device(args.device)
    if args.busy:
        return _serve_busy(args)
    if args.speculate is not None:
        return bench_scale.serve_speculate(args)
    config, load = presets.get(args.preset).model, b.Load(args.clients, args.seconds, args.prompt, args.new, kv_dtype=args.kv_dtype)
    if args.vllm:
        return bench_scale.serve_vllm(args, random_model(config), load)
    if args.replicas:
        return bench_scale.serve_replicas(args, random_model(config), load)
    model = random_model(config, args.dtype, device)
    if args.soak:
        return soak(model, load, byte_tokenizer(), args.soak, print)
    if args.mixed:
        rounds = b.bench_mixed(model, load, args.rounds, say)
        print(f"preset {args.preset}, {args.clients} clients, lockstep, medians of {args.rounds} rounds in turns")
        for name, results in (("one rule", [one for one, _ in rounds]), ("eight rules and depth limits", [eight for _, eight in rounds])):
            print(f"{name:<34}{b.words(results)}")
        print(f"eight rules beside one: {median(eight.rate / one.rate for one, eight in rounds):.2f}x")
        return 0
    if args.attack:
        print(f"preset {args.preset}, {args.clients} clients, {args.rounds} rounds in turns")
        print("\n".join(attack.words(attack.bench_attack(model, load, byte_tokenizer(), args.rounds, say))))
        return 0
    spread = f"prompts of {args.prompt[0]} to {args.prompt[1]} tokens, answers of {args.new[0]} to {args.new[1]}"
    print(f"preset {args.preset}, {args.clients} clients, {spread}, {b.MIN_STEPS} to {b.MAX_STEPS} steps a group")
    found = b.bench_serve(model, load, byte_tokenizer(), args.rounds, say)
    for name, results in found.items():
        print(f"{name:<34}{b.words(results)}")
    http = next(name for name in found if name.endswith("over HTTP"))
    best = found[http.removesuffix(", over HTTP")]
    for name in (b.WAIT, b.ONE):
        print(f"beside {name}: {median(ours.rate / other.rate for ours, other in zip(best, found[name], strict=True)):.2f}x")
    alone, with_http = (median(r.overhead for r in results) for results in (best, found[http]))
    print(f"scheduling {alone:.1%} of the time of the engine's calls, with HTTP {with_http:.1%}")
    return 0


def _serve_busy(args: BenchServeArgs) -> int:
    from twoscale import load
    from twoscale.bench.busy import beside_other_programs, served

    model, tokenizer = load("bundled", args.dtype)
    assert tokenizer is not None
    with served(model, tokenizer, tokenizer.encode("The old man looked at the sea and"), 24) as request:
        print(f"medians of {args.rounds} interleaved rounds, ratios within a round\n{BUSY_HEAD}")
        for name, beside in beside_other_programs({"bundled over HTTP, 24 tokens": request}, args.rounds).items():
            print(f"{name:<38}{beside.words}")
    return 0
