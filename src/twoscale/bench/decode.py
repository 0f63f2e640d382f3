"""`twoscale bench decode`: what a loop step costs against its matmuls alone, what rules cost, and what leaving early saves.

Everything is measured in one run, interleaved, as medians. Weights and cached keys are random: only time is asked for.

Shapes: N rows, C width.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from twoscale import exits
from twoscale.bench.timing import interleaved, timed
from twoscale.config import ModelConfig
from twoscale.config.dtypes import KVDtype
from twoscale.engine import Engine, LoopRows, forward, generate, loop_params
from twoscale.engine.cache import Cache, bytes_per_token
from twoscale.engine.kernels import InferenceCopy, KernelName, Kernels, TorchKernels, optimize_for_inference
from twoscale.engine.kernels.fingerprint import fingerprint
from twoscale.engine.kernels.packed import can_pack, pack, packed_linear
from twoscale.engine.request import LoopParams
from twoscale.engine.rows import Rows, make_part
from twoscale.exits import Exit, Rule
from twoscale.model import LoopedGPT, LoopGroup

HUGINN = ModelConfig(
    vocab_size=512, block_size=512, n_layer=8, n_head=4, n_embd=256, groups=((2, 3, 4, 5),), qk_bias=True, positions="rotary",
    rope_base=50_000.0, mlp="gated", mlp_hidden=704, group_norm="leave", share_group_norm=True, mean_loops=16,
)  # fmt: skip
"""Huginn's layout at 6.7M parameters: 2 layers, 4 looped, 2 layers."""


def spread(b: int, groups: int, low: int, high: int) -> dict[int, Rule]:
    """Rules for one sequence that pay for acceleration and leave after depths spread evenly over `low` .. `high`, as a trained model's
    tokens do."""
    depths = [low + (b * 7 + g * 3) % (high - low + 1) for g in range(groups)]
    return {g: exits.Acceleration(math.inf, hits=1, min_steps=depth) for g, depth in enumerate(depths)}


class Steps:
    """One token for each of `batch` sequences at a given context, ready to go through the loop groups again and again.

    Works that are compared share their caches: where memory happens to lie costs some per cent.
    """

    def __init__(
        self,
        model: LoopedGPT,
        batch: int,
        context: int,
        loops: int,
        kernels: KernelName = "auto",
        exit: Exit | None = None,
        caches: list[Cache] | None = None,
        lowest: int | None = None,
        kv_dtype: KVDtype = "auto",
    ) -> None:
        """With `lowest` each sequence has rules of its own (`spread`) instead of `exit`."""
        self.engine, params = Engine(model, kernels=kernels), loop_params(model, loops=loops, exit=exit, kv_dtype=kv_dtype)
        self.caches = [filled(self.engine, context, params) for _ in range(batch)] if caches is None else caches[:batch]
        self.caches = [replaced(cache, params, self.engine.kernels) for cache in self.caches]
        groups = model.config.n_groups
        self.params = [] if lowest is None else [loop_params(model, loops=loops, exit=spread(b, groups, lowest, loops)) for b in range(16)]
        """Of each sequence in turn; empty: as in the caches."""
        self.context, self.loops = context, loops
        self.e = torch.randn(batch, model.config.n_embd, device=self.engine.device)

    @torch.inference_mode()
    def loop(self) -> None:
        """All groups, one after the other; nothing else."""
        for stage, module in enumerate(self.engine.model.stages):
            if isinstance(module, LoopGroup):
                parts = [make_part(b, cache, self.context, 1) for b, cache in enumerate(self.caches)]
                tokens = torch.arange(len(parts), device=self.engine.device)
                loop = LoopRows(self.engine, stage)
                loop.admit(Rows(parts, torch.stack((torch.full_like(tokens, self.context), tokens)), self.engine.kernels), self.e)
                while len(loop):
                    loop.advance(math.inf)

    @torch.inference_mode()
    def token(self, first: int = 0) -> None:
        """One more token for every sequence, counted from `first`: all stages, the head and the choice; then it is forgotten."""
        for b, cache in enumerate(self.caches, start=first):
            cache.loop_params = self.params[b % len(self.params)] if self.params else cache.loop_params
        x, _ = self.engine.run([(b, cache, [b]) for b, cache in enumerate(self.caches, start=first)])
        self.engine.model.head(x).argmax(dim=-1).tolist()
        for cache in self.caches:
            cache.rewind(self.context)


def filled(engine: Engine, context: int, params: LoopParams) -> Cache:
    """A cache of `context` tokens, every level in place."""
    cache = engine.new_cache(context + 1, params)
    cache.extend(context)
    for layer in cache.layers:
        layer.ensure_level(layer.max_levels, context)
        layer.keys.normal_()
        layer.values.normal_()
    return cache


def replaced(cache: Cache, params: LoopParams, kernels: Kernels) -> Cache:
    """The same memory for a request with other parameters, or a copy of it where other kernels want it elsewhere."""
    new = copy(cache)
    new.loop_params = params
    new.layers = [layer if layer.kernels.name == kernels.name else layer.copy(kernels) for layer in cache.layers]
    return new


def floor(model: LoopedGPT, batch: int, loops: int) -> Callable[[], None]:
    """Only the matmuls of the groups' steps: packed, in the same shapes and order."""
    stages: list[list[tuple[Tensor, Tensor]]] = []
    for group in model.groups:
        weights: list[Any] = [] if group.adapter is None else [group.adapter.weight[:, : model.config.n_embd]]
        block: Any
        for block in group.blocks:
            weights += [block.attn.qkv.weight, block.attn.out.weight, block.mlp.up.weight, block.mlp.down.weight]
        stages.append([(pack(w), torch.randn(batch, w.shape[1])) for w in weights])

    @torch.inference_mode()
    def work() -> None:
        for stage in stages:
            for _ in range(loops):
                for packed, x in stage:
                    packed_linear(x, packed)

    return work


@dataclass(frozen=True)
class StepBench:
    """Median seconds of one loop step (the mean over groups) for a batch and a context."""

    batch: int
    context: int
    auto: float
    packed: float
    plain: float
    floor: float | None
    """The matmuls alone; None where torch cannot pack."""


def bench_steps(model: LoopedGPT, batch: int, context: int, loops: int, repeats: int) -> StepBench:
    ours = Steps(model, batch, context, loops)
    others = {k: Steps(model, batch, context, loops, k, caches=ours.caches) for k in ("packed", "torch")}  # type: ignore[arg-type]
    steps = {"auto": ours, **others}
    works: dict[str, Callable[[], object]] = {k: s.loop for k, s in steps.items()}
    device = ours.engine.device
    if can_pack() and device.type == "cpu" and model.weight_dtype == "fp32":
        works["floor"] = floor(model, batch, loops)
    seconds = interleaved(works, repeats, device=device)
    each = {k: s / (loops * model.config.n_groups) for k, s in seconds.items()}
    return StepBench(batch, context, each["auto"], each["packed"], each["torch"], each.get("floor"))


def bench_rules(model: LoopedGPT, rules: Sequence[Rule], context: int, loops: int, repeats: int) -> dict[str, float]:
    """Median seconds that one look of each rule takes for a single token: the loops' time with a rule that never fires, less the time
    without a rule in the same round. May be slightly negative where a look costs less than the noise."""
    shared = Steps(model, 1, context, loops).caches
    works: dict[str, Callable[[], object]] = {"": Steps(model, 1, context, loops, caches=shared).loop}
    works |= {type(rule).__name__: Steps(model, 1, context, loops, exit=rule, caches=shared).loop for rule in rules}
    more: dict[str, list[float]] = {name: [] for name in works}
    device = next(model.parameters()).device
    for i in range(2 + repeats):
        seconds = {name: timed(work, device) for name, work in works.items()}
        if i >= 2:
            for name, spent in seconds.items():
                more[name].append((spent - seconds[""]) / (loops * model.config.n_groups))
    return {name: median(values) for name, values in more.items() if name}


@dataclass(frozen=True)
class ExitBench:
    """What leaving early saves."""

    saved_work: float
    """Share of the loop work that one row saves with depths spread over 3 .. 12."""
    saved_time: float
    """Share of the loops' time that it saves."""
    one_row: float
    """Seconds for one token of one row, whole network."""
    rows: float
    """Seconds for one token of each of `batch` rows, whole network."""
    rows_full: float
    """The same with all 12 steps."""
    batch: int = 16


def bench_exits(model: LoopedGPT, batch: int, context: int, loops: int, repeats: int) -> ExitBench:
    """Every figure is a median over rounds, each of which takes all its times token by token in turn."""
    lowest = min(3, loops)
    rows = Steps(model, batch, context, loops, lowest=lowest)
    rows_full = Steps(model, batch, context, loops, caches=rows.caches)
    full, bare = (Steps(model, 1, context, n, caches=rows.caches) for n in (loops, 1))
    alone = Steps(model, 1, context, loops, caches=rows.caches, lowest=lowest)
    rounds = []
    for i in range(1 + repeats):
        spent = dict.fromkeys(("full", "bare", "one", "rows", "rows_full"), 0.0)
        done = sum(alone.engine.loop_steps)
        for b in range(batch):  # the single row takes each sequence's place in turn, so that it meets the same depths
            spent["full"] += timed(full.token) / batch
            spent["bare"] += timed(bare.token) / batch  # one step in every group: what is left is everything but the loops
            spent["one"] += timed(lambda b=b: alone.token(b)) / batch  # type: ignore[misc]
            if b % 4 == 0:
                spent["rows"] += timed(rows.token) * 4 / batch
                spent["rows_full"] += timed(rows_full.token) * 4 / batch
        saved_work = 1 - (sum(alone.engine.loop_steps) - done) / (batch * loops * model.config.n_groups)
        loop = (spent["full"] - spent["bare"]) * loops / (loops - 1)
        if i:
            rounds.append((saved_work, (spent["full"] - spent["one"]) / loop, spent["one"], spent["rows"], spent["rows_full"]))
    work, time_, one, many, many_full = (median(r[j] for r in rounds) for j in range(5))
    return ExitBench(work, time_, one, many, many_full, batch)


@dataclass(frozen=True)
class ParallelBench:
    """Seconds of a teacher-forced pass."""

    full: float
    half: float
    mean_steps: float


def bench_parallel(model: LoopedGPT, sequences: int, loops: int, repeats: int) -> ParallelBench:
    """The plain pass of all loops against one whose tokens take half of them on average."""
    c = model.config
    device = next(model.parameters()).device
    ids = torch.randint(0, c.vocab_size, (sequences, c.block_size), generator=torch.Generator().manual_seed(0)).to(device)
    rule = exits.RandomExit(loops / 2)
    steps = forward(model, ids, exit=rule, loops=loops).steps
    works = {"full": lambda: forward(model, ids, loops=loops), "half": lambda: forward(model, ids, exit=rule, loops=loops)}
    seconds = interleaved(works, repeats, warm=1, device=device)
    return ParallelBench(seconds["full"], seconds["half"], float(steps.double().mean()))


def bench_torch_kernels(model: LoopedGPT, sequences: int, context: int, loops: int, repeats: int) -> tuple[float, float]:
    """Seconds of one more token for each sequence on torch's operators: one attention call a slab of sequences, one a sequence."""
    works = {}
    for name, batch_attention in (("slab", True), ("sequence", False)):
        engine = Engine(model, inference_copy=InferenceCopy(optimize_for_inference(model, "torch").model, TorchKernels(batch_attention)))
        engine.kernels.hint_capacities([context + 1] * sequences)
        caches = [engine.new_cache(context + 1, loop_params(model, loops=loops)) for _ in range(sequences)]
        lengths = [context - i % 8 for i in range(sequences)]
        engine.run([(i, cache, [1] * n) for i, (cache, n) in enumerate(zip(caches, lengths, strict=True))])
        works[name] = partial(_again, engine, caches, lengths)
    seconds = interleaved(works, repeats, device=engine.device)
    return seconds["slab"], seconds["sequence"]


def _again(engine: Engine, caches: list[Cache], lengths: list[int]) -> None:
    engine.run([(i, cache, [2]) for i, cache in enumerate(caches)])
    for cache, n in zip(caches, lengths, strict=True):
        cache.rewind(n)


def bench_token(model: LoopedGPT, context: int, loops: int, repeats: int) -> float:
    """Seconds a token, batch 1, at a context."""
    return interleaved({"token": Steps(model, 1, context, loops).token}, repeats)["token"]


def bench_weight_check(model: LoopedGPT, new_tokens: int, loops: int, repeats: int) -> tuple[float, float]:
    """Seconds of the check that the weights have not changed since they were packed, and of a whole `generate`, which includes it."""
    decode = partial(generate, model, [[1, 2, 3, 4]], new_tokens, loops=loops)
    seconds = interleaved({"check": lambda: fingerprint(model), "generate": lambda: decode()}, repeats)
    return seconds["check"], seconds["generate"]


def cache_table(config: ModelConfig, loops: int) -> dict[str, int]:
    """Bytes a token for each kind of cache; the first is a plain GPT of as many layers."""
    counts, rules = config.loops_for(loops), (None,) * config.n_groups
    plain = config.n_layer * 2 * config.kv_heads * config.head_dim * 4
    return {"plain GPT": plain, **{kv: bytes_per_token(config, LoopParams(rules, counts, kv)) for kv in ("last", "ring:4", "exact")}}
