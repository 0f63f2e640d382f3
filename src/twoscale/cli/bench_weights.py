"""`twoscale bench load`, `bench quantize` and `bench decode --dtype`: weights in fewer bits."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from twoscale.cli.parse import say
from twoscale.config import UserError
from twoscale.config.dtypes import WeightDtype

if TYPE_CHECKING:
    from twoscale.bench.load import LoadBench
    from twoscale.model import LoopedGPT

BATCHES = (1, 8, 32)  # rows of the comparison of dtypes


@dataclass(frozen=True)
class BenchLoadArgs:
    """Peak memory, load time and speed of a model with random weights at a published shape, in several dtypes, beside torch's operators."""

    shape: Literal["huginn-3.5b", "ouro-1.4b", "ouro-2.6b", "huginn-tiny", "ouro-tiny"]
    """Which shape; the tiny ones are for trying the command."""
    folder: Path
    """A folder for the weights (2.9 to 7.1 GB in bf16); they are made there, and removed at the end."""
    dtype: tuple[WeightDtype, ...] = ("bf16", "int8", "w8a8")
    """Which dtypes to load it in."""
    plain: tuple[Literal["bf16", "fp32"], ...] = ("bf16", "fp32")
    """Beside them: the same architecture by torch's operators in these dtypes, and Ouro by transformers' own, where transformers is
    installed; `--plain` alone for none."""
    loops: int | None = None
    """Loop steps; by default 4 for Ouro and 8 for Huginn."""
    tokens: int = 32
    """Tokens to write after a prompt of 8."""
    keep: bool = False
    """Keep the weights, and use them if they are there already."""
    device: str = "cpu"
    """Where to compute: cpu, or a device of torch such as cuda."""


@dataclass(frozen=True)
class BenchQuantizeArgs:
    """Does quantisation survive the loop? Loss, agreement, steps of exit rules and states of a model in several dtypes, against fp32."""

    run: Annotated[str, tyro.conf.Positional] = "bundled"
    """Folder of a run, `bundled` or `hops`."""
    dtype: tuple[WeightDtype, ...] = ("bf16", "int8", "w8a8")
    """Which dtypes to compare with fp32."""
    loops: tuple[int, ...] = (1, 2, 4, 8, 16, 30)
    """Loop steps at which the loss is compared; rules and states take the most of them."""
    windows: int = 24
    """Held-out windows, or samples of a task."""
    kv_dtype: Literal["bf16"] | None = None
    """Also: weights in fp32, and keys and values in bf16."""
    figure: Path | None = None
    """Where to draw the figure."""
    device: str = "cpu"
    """Where to compute: cpu, or a device of torch such as cuda."""


def quantize(args: BenchQuantizeArgs) -> int:
    from twoscale.bench.quantize import bench_quantize, draw
    from twoscale.interop.load import usable_device
    from twoscale.interop.runs import as_run
    from twoscale.tradeoff.load_run import load_run

    if args.windows < 2 or not args.loops or min(args.loops) < 1 or not (args.dtype or args.kv_dtype):
        raise UserError("--windows is at least 2, --loops at least 1, and --dtype names at least one unless there is --kv-dtype")
    if args.figure is not None and not args.dtype:
        raise UserError("--figure draws the states of rounded weights: name at least one --dtype")
    device = usable_device(args.device)
    opened = load_run(as_run(args.run, say), device=device)
    text = opened.text("report", args.windows)
    found = bench_quantize(opened.model, text, args.dtype, args.loops, say, args.kv_dtype is not None)
    print(f"{args.run}, {text.n_asked:,} tokens of {opened.source}, {text.n_clusters} {text.by}; 95 % intervals\n")
    print("change of the loss against fp32, nats a token, and how often the most likely token is the same")
    for k in args.loops:
        parts = ((one.dtype, one.by_loops[k]) for one in found)
        print(
            f"  {k:3} loops"
            + "".join(f"   {d} {r['dce']:+.5f} [{r['dce_low']:+.5f}, {r['dce_high']:+.5f}] {r['agree']:.2%}" for d, r in parts)
        )
    print(f"\nmean steps a group, at most {max(args.loops)}: fp32, then each dtype (change of the loss against all loops)")
    for rule in found[0].by_rule:
        exact = found[0].by_rule[rule][1]
        parts = ((one.dtype, one.by_rule[rule][0]) for one in found)
        each = "".join(f"   {d} {r['mean_steps']:.2f} ({r['dce']:+.4f})" for d, r in parts)
        print(f"  {rule:<28} fp32 {exact['mean_steps']:.2f} ({exact['dce']:+.4f}){each}")
    if args.dtype:
        print("\ndistance of rounded and exact states over their size, after 1, half and all steps; last over half")
    for one in found:
        for g, error in enumerate(one.groups):
            half = error.distance[len(error.distance) // 2 - 1]
            shown = f"{error.distance[0]:.2e} {half:.2e} {error.distance[-1]:.2e}"
            rates = "a step shrinks by {:.3f} (fp32 {:.3f})".format(*reversed(error.rates))
            print(f"  {one.dtype}, group {g + 1}: {shown}, {error.grows:.2f}x; own last step {error.step[-1]:.2e}, {rates}")
    if args.figure is not None:
        draw(found, f"{args.run}, against fp32").savefig(args.figure, dpi=150)
    return 0


def load(args: BenchLoadArgs) -> int:
    from twoscale.bench.load import bench_load, bench_plain, bench_transformers, kv_bytes
    from twoscale.bench.shapes import SHAPES, write_folder
    from twoscale.interop.load import model_config, usable_device

    if args.tokens < 1 or (args.loops is not None and args.loops < 1):
        raise UserError("--tokens and --loops are at least 1")
    device = usable_device(args.device)
    folder = args.folder / args.shape
    if folder.exists() and not args.keep:
        raise UserError(f"{folder} exists: choose another --folder, or --keep to use it")
    loops = args.loops or (8 if args.shape.startswith("huginn") else 4)
    try:
        if not folder.exists():
            say(f"writing {folder}")
            write_folder(SHAPES[args.shape], folder)
        config = model_config(folder)
        print(f"{args.shape}, random weights, {loops} loops, prompt 8, {args.tokens} tokens, one row; each line is a process of its own\n")
        print(f"{'':<20}{'load':>8}{'held':>10}{'peak':>10}{'a token':>12}{'weights read':>16}{'plain read':>14}{'':>8}")
        for dtype in args.dtype:
            print(_line(f"ours, {dtype}", bench_load(folder, dtype, loops, args.tokens, device)))
        for plain in args.plain:
            print(_line(f"torch, {plain}", bench_plain(folder, plain, loops, args.tokens, device)))
            if args.shape.startswith("ouro") and find_spec("transformers") is not None:
                print(_line(f"transformers, {plain}", bench_transformers(folder, plain, loops, args.tokens, device)))
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print("\nkeys and values, bytes a token in fp32, and in bf16 (--kv-dtype)")
    for n in (4, 32):
        print(f"  {n:2} loops  " + "  ".join(f"{kv} {size:,} {size // 2:,}" for kv, size in kv_bytes(config, n).items()))
    return 0


def kv_dtypes(model: "LoopedGPT", contexts: Sequence[int], loops: int, repeats: int) -> int:
    """A token at several contexts with keys and values in fp32 and in bf16."""
    from twoscale.bench.dtypes import bench_kv_dtypes
    from twoscale.bench.load import kv_bytes

    print(f"one row, {loops} loops, kv=exact, the whole network; ratios of medians in the same rounds")
    for context, seconds in bench_kv_dtypes(model, contexts, loops, repeats).items():
        fp32, bf16 = seconds["fp32"], seconds["bf16"]
        print(f"  context {context:6}   fp32 {fp32 * 1e3:8.2f} ms   bf16 {bf16 * 1e3:8.2f} ms {bf16 / fp32:5.2f}x")
    print("bytes a token in fp32, and in bf16")
    for n in (4, 32):
        print(f"  {n:2} loops  " + "  ".join(f"{kv} {size:,} {size // 2:,}" for kv, size in kv_bytes(model.config, n).items()))
    return 0


def _line(name: str, r: "LoadBench") -> str:
    line = f"{name:<20}{r.load_s:6.1f} s{r.held / 1e9:7.2f} GB{r.peak / 1e9:7.2f} GB{r.token_s * 1e3:9.0f} ms"
    if not r.read:
        return line
    speed, plain = r.read / r.token_s / 1e9, r.read / r.plain_read_s / 1e9
    peak = f"  peak while loading {r.peak_load / r.held:.2f}x of held"
    return f"{line}{speed:11.1f} GB/s{plain:9.1f} GB/s{speed / plain:7.0%}{peak}"


def dtypes(model: "LoopedGPT", chosen: Sequence[WeightDtype], context: int, loops: int, repeats: int) -> int:
    """A loop step in several dtypes against fp32."""
    from twoscale.bench.dtypes import bench_dtypes

    found = bench_dtypes(model, chosen, BATCHES, context, loops, repeats)
    print("one loop step (mean over groups), against fp32 in the same rounds")
    for batch, seconds in found.items():
        beside = "".join(f"{dtype:>9} {s * 1e3:6.3f} ms {s / seconds['fp32']:5.2f}x" for dtype, s in seconds.items())
        print(f"  {batch:2} rows {beside}")
    return 0
