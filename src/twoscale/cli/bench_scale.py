"""`twoscale bench serve --vllm`, `--replicas` and `--speculate`."""

from statistics import median
from typing import TYPE_CHECKING

from twoscale.cli.parse import say
from twoscale.config import UserError, missing_package

if TYPE_CHECKING:
    from twoscale.bench.serve import Load
    from twoscale.cli.bench_serve import BenchServeArgs
    from twoscale.model import LoopedGPT


def serve_replicas(args: "BenchServeArgs", model: "LoopedGPT", load: "Load") -> int:
    try:
        from twoscale.bench.replicas import bench_replicas
    except ModuleNotFoundError as error:
        raise missing_package(f"this bench needs {error.name}", "ray", "httpx") from None
    from twoscale.bench.serve import words
    from twoscale.data.tokenizer import byte_tokenizer

    if not 2 <= args.replicas <= 64:
        raise UserError(f"--replicas {args.replicas}: between 2 and 64")
    rounds = bench_replicas(model, load, byte_tokenizer(), args.replicas, args.rounds, say, args.dtype)
    print(f"preset {args.preset}, {args.clients} clients over HTTP, a core for each replica, medians of {args.rounds} rounds in turns")
    for name, results in (("one replica", [a for a, _ in rounds]), (f"{args.replicas} replicas", [b for _, b in rounds])):
        print(f"{name:<34}{words(results, rows=False)}")
    ratios = sorted(b.rate / a.rate for a, b in rounds)
    print(f"{args.replicas} replicas beside one: {median(ratios):.2f}x  (rounds {', '.join(f'{r:.2f}' for r in ratios)})")
    return 0


def serve_vllm(args: "BenchServeArgs", model: "LoopedGPT", load: "Load") -> int:
    from twoscale.bench.serve import words
    from twoscale.bench.vllm import bench_vllm
    from twoscale.data.tokenizer import byte_tokenizer

    found = bench_vllm(model, load, byte_tokenizer(), args.rounds, say)
    print(f"preset {args.preset}, {args.clients} clients over HTTP, medians of {args.rounds} rounds in turns")
    for name, results in found.items():
        print(f"{name:<34}{words(results, rows=False)}")
    for depth in dict.fromkeys(name.partition(", ")[2] for name in found):
        pairs = zip(found[f"twoscale, {depth}"], found[f"vLLM, {depth}"], strict=True)
        print(f"{depth}, twoscale beside vLLM: {median(ours.rate / theirs.rate for ours, theirs in pairs):.2f}x")
    return 0


def serve_speculate(args: "BenchServeArgs") -> int:
    from twoscale.bench.serve import Load
    from twoscale.bench.speculate import bench_clients
    from twoscale.interop.runs import as_run
    from twoscale.tradeoff.load_run import load_run

    assert args.speculate is not None
    folder = as_run(args.speculate, say)
    run = load_run(folder, dtype=args.dtype)
    loops = 32 if run.model.config.n_groups == 1 else run.model.config.mean_loops
    print(f"{folder.name}, {loops} loops, greedy, prompts of held-out text; `auto` beside `off`, ratios within a round")
    for clients, ratios in bench_clients(run, Load(args.clients, args.seconds), args.rounds, loops, say).items():
        print(f"{clients:3} clients {median(ratios):6.2f}x  (rounds {', '.join(f'{r:.2f}' for r in sorted(ratios))})")
    return 0
