"""`twoscale bench train | scale | prepare | trace | decode | serve | load | quantize`: speed on this machine, as ratios within one run."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from twoscale.cli import bench_serve, bench_training, bench_weights
from twoscale.cli.parse import parse, say
from twoscale.config import UserError, presets
from twoscale.config.dtypes import WeightDtype

if TYPE_CHECKING:
    from twoscale.model import LoopedGPT

KINDS = ("train", "scale", "prepare", "trace", "decode", "serve", "load", "quantize")


@dataclass(frozen=True)
class BenchTrainArgs:
    """Model FLOP/s of training against the square matmul's FLOP/s, measured in one run."""

    preset: Literal["nano", "tiny", "small", "paper"] = "small"
    """Which config to train."""
    steps: int = 12
    """Steps to measure, after three to warm up."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether to compile the blocks."""


@dataclass(frozen=True)
class BenchTraceArgs:
    """The cost of tracing and of all statistics, beside a plain forward pass of the same loops, measured in one run."""

    preset: Literal["nano", "tiny", "small", "paper"] = "tiny"
    """Which model to trace, with random weights."""
    sequences: int = 16
    """Sequences at full context."""
    loops: int = 30
    """Loop steps."""
    repeats: int = 7
    """Interleaved repeats; medians are reported."""
    dtype: WeightDtype = "fp32"
    """How the weights are held: fp32, bf16, int8 or w8a8."""
    device: str = "cpu"
    """Where to compute: cpu, or a device of torch such as cuda."""


@dataclass(frozen=True)
class BenchDecodeArgs:
    """What a loop step costs beside its matmuls, what exit rules cost and save, and what keys and values hold; one run."""

    preset: Literal["nano", "tiny", "small", "paper"] = "paper"
    """Which model to decode with, with random weights."""
    loops: int = 12
    """Loop steps of every group."""
    batches: tuple[int, ...] = (1, 4, 8, 16)
    """Rows that share a step."""
    contexts: tuple[int, ...] = (64, 448)
    """Tokens that are in the cache already."""
    repeats: int = 9
    """Interleaved repeats; medians are reported."""
    family: Literal["huginn"] | None = None
    """Instead: a published layout (6.7M parameters, random weights) beside a straightforward loop with a list of keys and values."""
    busy: bool = False
    """Instead: decoding on free cores, with one core kept busy by another program, and with all of them."""
    model: str | None = None
    """Instead: the time that exit rules save beside the steps that they save, with a model of your own, `hops` or `bundled`."""
    rules: tuple[str, ...] = ()
    """With --model: the rules. Without it those of docs/results-tasks.md for `hops`, and the calibrated one for other models."""
    depth: int | None = None
    """With --model: the fixed depth to compare with; without it 12 for `hops`, and mean_loops for other models."""
    sampling: bool = False
    """Instead: every kind of sampling beside greedy decoding, 64 rows, a vocabulary of 32,000."""
    speculate: str | None = None
    """Instead: plain and speculative decoding of a trained model (a run, or `bundled`) on held-out text, and what bounds their ratio."""
    prompts: int = 4
    """With --speculate: prompts from the held-out text."""
    new_tokens: int = 64
    """With --speculate: tokens to write after each prompt."""
    dtype: tuple[WeightDtype, ...] = ()
    """Instead: a loop step of 1, 8 and 32 rows with the weights in these dtypes, against fp32."""
    kv_dtype: Literal["bf16"] | None = None
    """Instead: a token at --contexts of any length with keys and values in bf16, against fp32."""
    device: str = "cpu"
    """Where to compute: cpu, or a device of torch such as cuda."""


def run(args: list[str]) -> int:
    if args and args[0] in ("-h", "--help"):
        print(f"usage: twoscale bench {' | '.join(KINDS)} [options]\n\n`twoscale bench train --help` lists the options of one bench.")
        return 0
    if not args or args[0] not in KINDS:
        raise UserError(f"say what to measure: twoscale bench {' | '.join(KINDS)}")
    if args[0] == "decode":
        decode = parse(BenchDecodeArgs, args[1:], "twoscale bench decode")
        chosen = {
            _busy: decode.busy,
            _sampling: decode.sampling,
            _family: decode.family,
            _speculate: decode.speculate,
            _dtypes: decode.dtype,
            _kv_dtypes: decode.kv_dtype,
            _saved: decode.model,
        }
        others = [bench for bench, wanted in chosen.items() if wanted]
        if len(others) > 1:
            raise UserError(
                "--busy, --sampling, --family, --speculate, --dtype, --kv-dtype and --model are benches of their own: choose one"
            )
        if decode.device != "cpu" and (decode.busy or decode.speculate):
            raise UserError(f"--device {decode.device}: --busy and --speculate are measured on the CPU alone")
        return (others or [_decode])[0](decode)
    if args[0] == "trace":
        return _trace(parse(BenchTraceArgs, args[1:], "twoscale bench trace"))
    if args[0] == "scale":
        return bench_training.scale(parse(bench_training.BenchScaleArgs, args[1:], "twoscale bench scale"))
    if args[0] == "prepare":
        return bench_training.prepare(parse(bench_training.BenchPrepareArgs, args[1:], "twoscale bench prepare"))
    if args[0] == "load":
        return bench_weights.load(parse(bench_weights.BenchLoadArgs, args[1:], "twoscale bench load"))
    if args[0] == "quantize":
        return bench_weights.quantize(parse(bench_weights.BenchQuantizeArgs, args[1:], "twoscale bench quantize"))
    if args[0] == "serve":
        return bench_serve.serve(parse(bench_serve.BenchServeArgs, args[1:], "twoscale bench serve"))
    return _train(parse(BenchTrainArgs, args[1:], "twoscale bench train"))


def _trace(args: BenchTraceArgs) -> int:
    from twoscale.bench.shapes import random_model
    from twoscale.bench.trace import bench_trace
    from twoscale.interop.load import usable_device

    if min(args.sequences, args.loops, args.repeats) < 1:
        raise UserError("--sequences, --loops and --repeats are at least 1")
    model = random_model(presets.get(args.preset).model, args.dtype, usable_device(args.device))
    r = bench_trace(model, args.sequences, args.loops, args.repeats)
    print(f"preset {args.preset}, {args.dtype}, {r.tokens} tokens, {r.loops} loops, median of {args.repeats} interleaved repeats")
    print(f"plain forward             {r.forward_s * 1e3:8.0f} ms")
    print(f"trace, states stored      {r.trace_s * 1e3:8.0f} ms  {r.trace_s / r.forward_s:.2f}x")
    print(f"all statistics, streamed  {r.measure_s * 1e3:8.0f} ms  {r.measure_s / r.forward_s:.2f}x")
    return 0


def _family(args: BenchDecodeArgs) -> int:
    from twoscale.bench.family import LAYOUTS, bench_family
    from twoscale.bench.shapes import random_model
    from twoscale.interop.load import usable_device

    device = usable_device(args.device)
    assert args.family is not None
    config, loops = LAYOUTS[args.family]
    print(f"{args.family}'s layout, width {config.n_embd}, {loops} loops, one row; medians of {3 * args.repeats} interleaved repeats")
    print("context        ours   straightforward   ratio")
    for context in (96, 448):
        r = bench_family(random_model(config, device=device), loops, context, 3 * args.repeats)
        print(f"{context:7} {r.ours * 1e3:8.2f} ms {r.straightforward * 1e3:14.2f} ms {r.straightforward / r.ours:6.2f}x")
    return 0


def _busy(args: BenchDecodeArgs) -> int:
    from twoscale import load
    from twoscale.bench.busy import beside_other_programs, decode_works
    from twoscale.model import LoopedGPT

    if args.repeats < 1:
        raise UserError("--repeats is at least 1")
    bundled, tokenizer = load("bundled")
    assert tokenizer is not None
    preset, ids = LoopedGPT(presets.get(args.preset).model).eval(), list(range(1, 9))
    works = decode_works({"bundled, README's example, 64 tokens": (bundled, tokenizer.encode("The old man looked at the sea and"), 64)})
    works |= decode_works({f"preset {args.preset}, 8 tokens": (preset, ids, 8)})
    print(f"medians of {args.repeats} interleaved rounds, ratios within a round\n{bench_serve.BUSY_HEAD}")
    for name, beside in beside_other_programs(works, args.repeats).items():
        print(f"{name:<38}{beside.words}")
    return 0


def _speculate(args: BenchDecodeArgs) -> int:
    from twoscale.bench.speculate import PROMPT, bench_speculation
    from twoscale.engine.kernels.library import c_library
    from twoscale.interop.runs import as_run
    from twoscale.tradeoff.load_run import calibration_for, load_run

    if min(args.repeats, args.prompts) < 1 or args.new_tokens < 2:
        raise UserError("--repeats and --prompts are at least 1, --new-tokens at least 2")
    if c_library() is None:
        raise UserError("this bench needs the C kernels, without which speculation is off: install a C compiler")
    assert args.speculate is not None
    folder = as_run(args.speculate, say)
    run = load_run(folder)
    try:
        calibration = calibration_for(folder)
    except UserError:
        calibration = None
    parameters = sum(p.numel() for p in run.model.parameters())
    print(f"{folder.name}: {parameters / 1e6:.2f}M parameters, loop groups {run.model.config.groups}, held-out text of {run.source}")
    print(f"{args.prompts} prompts of {PROMPT} tokens, {args.new_tokens} new ones; medians of {args.repeats} turns of all; equal results")
    bench_speculation(run, calibration, args.prompts, args.new_tokens, args.repeats, print)
    return 0


def _saved(args: BenchDecodeArgs) -> int:
    from twoscale import exits, load
    from twoscale.bench import saved as b
    from twoscale.interop.load import find
    from twoscale.tasks.file import load_task

    assert args.model is not None
    if args.repeats < 1 or (args.depth is not None and args.depth < 1) or min(args.batches, default=0) < 1:
        raise UserError("--repeats, --depth and --batches are at least 1")
    model, _ = load(args.model, device=args.device)
    hops = args.model == "hops"
    depth = args.depth or (b.HOPS_DEPTH if hops else model.config.mean_loops)
    names = args.rules or (b.HOPS_RULES if hops else ("auto",))
    rules: dict[str, exits.Exit] = {name: name if name == "auto" else exits.parse(name) for name in names}
    loops = max(depth, model.config.mean_loops, 16)
    rounds = 3 * args.repeats
    print(f"{args.model}, width {model.config.n_embd}, at most {loops} loops; medians of {rounds} interleaved rounds")
    for rows in args.batches:
        fixed, found = b.bench_saved(model, load_task(find(args.model)), rules, depth, loops, rounds, rows)
        print(f"{rows} rows: fixed depth {depth}, {fixed:.3f} ms for a token of each")
        print(f"{'':<32}{'ms':>8}{'steps saved':>13}{'time saved':>12}{'quartiles':>19}{'time / steps':>14}")
        for name, r in found.items():
            share = f"{r.time / r.work:.2f}" if r.work > 0 else "-"
            print(f"{name:<32}{r.ms:8.3f}{r.work:13.1%}{r.time:12.1%}{f'{r.low:.1%} to {r.high:.1%}':>19}{share:>14}")
    return 0


def _sampling(args: BenchDecodeArgs) -> int:
    from twoscale.bench.sampling import NEW, ROWS, SHAPE, bench_sampling
    from twoscale.interop.load import usable_device

    if args.repeats < 1:
        raise UserError("--repeats is at least 1")
    device = usable_device(args.device)
    print(f"{ROWS} rows, {NEW} tokens, vocabulary {SHAPE.vocab_size:,}, 15M parameters; medians of {args.repeats} interleaved repeats")
    for name, seconds in bench_sampling(args.repeats, device).items():
        print(name)
        for setting, value in seconds.items():
            print(f"  {setting:<24}{value * 1e3:8.0f} ms {value / seconds['greedy']:6.2f}x")
    return 0


def _random_model(args: BenchDecodeArgs) -> "LoopedGPT":
    """The preset's model with random weights, once the settings of the bench are checked."""
    from twoscale.bench.shapes import random_model
    from twoscale.engine.kernels.library import c_library
    from twoscale.interop.load import usable_device

    config = presets.get(args.preset).model
    if args.loops < 2 or args.repeats < 1 or min(args.batches, default=0) < 1 or min(args.contexts, default=0) < 1:
        raise UserError("--loops is at least 2; --repeats, --batches and --contexts are at least 1")
    if args.kv_dtype is not None:  # contexts may be longer than the preset's
        config = dataclasses.replace(config, block_size=max(config.block_size, max(args.contexts) + 1))
    if max(args.contexts) >= config.block_size:
        raise UserError(f"--contexts {max(args.contexts)}: the preset {args.preset} has a context of {config.block_size}")
    device = usable_device(args.device)
    kernels = "C kernels" if c_library() is not None else "no C kernels (no compiler?), packed weights"
    kernels = kernels if device.type == "cpu" else f"torch's operators on {device}"
    print(f"preset {args.preset}, {args.loops} loops, {kernels}; medians of {args.repeats} interleaved repeats\n")
    return random_model(config, device=device)


def _dtypes(args: BenchDecodeArgs) -> int:
    return bench_weights.dtypes(_random_model(args), args.dtype, min(args.contexts), args.loops, args.repeats)


def _kv_dtypes(args: BenchDecodeArgs) -> int:
    return bench_weights.kv_dtypes(_random_model(args), args.contexts, args.loops, args.repeats)


def _decode(args: BenchDecodeArgs) -> int:
    from twoscale import exits
    from twoscale.bench import decode as b
    from twoscale.bench.shapes import random_model

    model = _random_model(args)
    config, device = model.config, next(model.parameters()).device
    print("one loop step (mean over groups)      ours    floor  ours/floor   packed    plain  plain/ours")
    step = 0.0
    for context in args.contexts:
        for batch in args.batches:
            r = b.bench_steps(model, batch, context, args.loops, args.repeats)
            step = step or r.auto
            beside = "        -           -" if r.floor is None else f"{r.floor * 1e3:6.2f} ms {r.auto / r.floor:10.2f}x"
            print(
                f"  batch {batch:2}, context {context:4}        {r.auto * 1e3:8.2f} ms {beside} {r.packed * 1e3:6.2f} ms"
                f" {r.plain * 1e3:6.2f} ms {r.plain / r.auto:9.2f}x"
            )

    print(f"\none look of a rule, one row               us   of a step ({step * 1e3:.2f} ms)")
    rules = (exits.StepNorm(1e-9), exits.Acceleration(1e-9), exits.Cosine(1e-9), exits.KL(1e-12), exits.Entropy(1e-12))
    for name, seconds in b.bench_rules(model, rules, min(args.contexts), args.loops, args.repeats).items():
        print(f"  {name:<36}{seconds * 1e6:8.1f} {seconds / step:11.1%}")

    e = b.bench_exits(model, 16, min(args.contexts), args.loops, args.repeats)
    print(f"\ndepths spread over 3 to {args.loops}, acceleration paid for, context {min(args.contexts)}")
    share = e.saved_time / e.saved_work
    print(f"  one row: {e.saved_work:.1%} of the loop work saved, {e.saved_time:.1%} of the loops' time: {share:.2f} of it")
    more = e.one_row * e.batch / e.rows
    print(f"  one row {e.one_row * 1e3:.1f} ms a token; {e.batch} rows {e.rows * 1e3:.1f} ms: {more:.2f}x the tokens/s")
    print(f"  {e.batch} rows with all {args.loops} steps {e.rows_full * 1e3:.1f} ms: leaving early gives {e.rows_full / e.rows:.2f}x")

    print("\nteacher-forced pass, preset small, 8 x 256 tokens")
    for loops in (12, 30):
        p = b.bench_parallel(random_model(presets.small().model, device=device), 8, loops, max(3, args.repeats // 2))
        print(f"  {loops} loops {p.full * 1e3:.0f} ms, mean steps {p.mean_steps:.2f} {p.half * 1e3:.0f} ms: {p.half / p.full:.2f}x")

    token = b.bench_token(random_model(b.HUGINN, device=device), 96, 16, 3 * args.repeats)
    print(f"\nHuginn's layout, 6.7M parameters, width 256, 16 loops, context 96, one row: {token * 1e3:.1f} ms a token")

    print("\nwithout C kernels, 32 sequences, 4 loops, ms a token: one attention call for many sequences, one a sequence")
    for name in ("nano", "tiny"):
        other = random_model(presets.get(name).model, device=device)
        slab, one = b.bench_torch_kernels(other, 32, min(48, other.config.block_size - 8), 4, args.repeats)
        print(f"  preset {name:<6} {slab * 1e3:8.1f} ms {one * 1e3:8.1f} ms: {one / slab:.2f}x the tokens/s")

    if device.type == "cpu":
        check, whole = b.bench_weight_check(model, 32, args.loops, args.repeats)
        print(f"\nhave the weights changed? {check * 1e3:.1f} ms, {check / whole:.2%} of 32 tokens, {whole * 1e3:.0f} ms")

    print(f"\nkeys and values, bytes a token at {args.loops} loops (fp32)")
    table = b.cache_table(config, args.loops)
    for kv, size in table.items():
        print(f"  {kv:<12}{size:10,} {size / table['plain GPT']:7.2f}x")
    return 0


def _train(args: BenchTrainArgs) -> int:
    from twoscale.bench.train import bench_train

    if args.steps < 1:
        raise UserError(f"--steps {args.steps}: at least 1")
    config = presets.get(args.preset)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, compile=args.compile))
    result = bench_train(config, args.steps)
    blocks = "compiled" if result.compiled else "not compiled"
    print(f"preset {args.preset}, {config.train.optimizer}, blocks {blocks}, median of {result.steps} steps")
    print(f"model          {result.model_flops / 1e9:8.1f} GFLOP/s  ({result.tokens_per_s:.0f} tokens/s)")
    print(f"square matmul  {result.matmul_flops / 1e9:8.1f} GFLOP/s")
    print(f"ratio          {result.ratio:8.2f}")
    print(f"with only the causal half of attention counted: {result.causal_flops / result.matmul_flops:.2f}")
    return 0
