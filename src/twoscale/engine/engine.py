"""The engine: a model that is ready to decode. It applies stages to rows; what differs between requests travels with their rows.

    engine = Engine(model)
    cache = engine.open(512, loop_params(model, exit=exits.Acceleration(1e-2), loops=30))
    x, steps = engine.run([(0, cache, [5, 7, 9])])    # three tokens of sequence 0, in parallel
    x, steps = engine.run([(0, cache, [2])])          # one more, through the cache

Shapes: N rows, C width, G group.
"""

import threading
from collections.abc import Sequence
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from twoscale.engine.cache import Cache
from twoscale.engine.kernels import DecodeCopy, EagerKernels, KernelName, optimize_for_decode
from twoscale.engine.request import LoopParams
from twoscale.engine.rows import Rows
from twoscale.model import LoopedGPT, StateNoise
from twoscale.model.layers import Rope
from twoscale.model.start import start_state

Feed = tuple[int, Cache, Sequence[int]]  # a sequence's number, its cache, and its next tokens

MAX_TABLE_SIZE = 1 << 24  # entries of a table of start states for all positions; without it they are computed for each token
MAX_TABLES = 4  # seeds whose tables are kept


class Engine:
    """A model, as a copy for decoding."""

    def __init__(self, model: LoopedGPT, *, kernels: KernelName = "auto", copy: DecodeCopy | None = None) -> None:
        """`copy` is the model's by `optimize_for_decode`, for a caller who makes many engines; without it all weights are read once,
        to see whether the copy at hand is still right. An engine decodes with the weights as they were when it was made."""
        self.config = model.config
        autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        copy = DecodeCopy(model, EagerKernels()) if autocast else copy or optimize_for_decode(model, kernels)
        self.model, self.kernels = copy.model, copy.kernels.for_engine()
        self.device = model.wte.weight.device
        dtype = torch.get_autocast_dtype(self.device.type) if autocast else model.wte.weight.dtype
        self._like = torch.empty(0, dtype=dtype, device=self.device)
        self.work = [0] * self.config.n_groups
        """Applications of each group's map to one token, so far."""
        self.stages = list(self.model.stages)
        self.blocks = [list(stage.blocks) for stage in self.stages]  # type: ignore[arg-type]
        """The layers of each stage. (Indexing a ModuleList takes microseconds.)"""
        self.first_layers = [0]
        for layers, _ in self.config.stages:
            self.first_layers.append(self.first_layers[-1] + len(layers))
        self._origin = model

    def open(self, capacity: int, params: LoopParams) -> Cache:
        """An empty cache for one sequence."""
        return Cache(self.config, min(capacity, self.config.block_size), params, self._like, self.kernels)

    def embed(self, rows: Rows) -> Tensor:
        """(N, C)."""
        return self.model.embed(rows.tokens, rows.positions)

    def rope(self, rows: Rows) -> Rope | None:
        """Rotary angles of the rows' positions."""
        if rows.rope is None:
            rows.rope = (self.model.rope(rows.positions),)
        return rows.rope[0]

    def plain(self, stage: int, x: Tensor, rows: Rows) -> Tensor:
        """The layers of a plain stage on rows (N, C)."""
        blocks = self.blocks[stage]
        attend, rope = rows.attention(self.first_layers[stage], len(blocks)), self.rope(rows)
        x = x[None]
        for i, block in enumerate(blocks):
            x = block(x, rope, attend(i))
        return x[0]

    def noise(self, seed: int) -> StateNoise:
        return StateNoise(seed)

    def start(self, group: int, e: Tensor, rows: Rows) -> Tensor:
        """x^(0) of rows whose input is e (N, C)."""
        seeds = {part.cache.params.seed for part in rows.parts}
        if len(seeds) == 1:
            return self._start(group, e, rows.positions, seeds.pop())
        each, first = [], 0
        for part in rows.parts:
            own = slice(first, first + part.count)
            each.append(self._start(group, e[own], rows.positions[own], part.cache.params.seed))
            first += part.count
        return torch.cat(each)

    def _start(self, group: int, e: Tensor, positions: Tensor, seed: int) -> Tensor:
        c = self.config
        if c.start != "noise" or c.block_size * c.n_embd > MAX_TABLE_SIZE:
            return start_state(c, group, e, positions, self.noise(seed))
        tables = _tables_of(self._origin, seed, self._like)
        if group not in tables:
            every = torch.arange(c.block_size, device=e.device)
            tables[group] = self.noise(seed)(group, every, c.n_embd).to(self._like)
        return tables[group][positions]

    @torch.inference_mode()
    def run(
        self, feeds: Sequence[Feed], start: Sequence[Tensor] | None = None, stages: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The next tokens of several sequences, through all stages: states before the closing norm (N, C), and steps (N, G).

        Rows are stacked in the order of `feeds`. `start` gives the groups' initial states, one (N, C) each. Where a rule wants the tokens
        of a sequence one after the other they go through in as many passes. The embedding and the state after each stage, (N, C) each,
        are appended to `stages` where a list is given.
        """
        from twoscale.engine.pipeline import Pipeline

        if any(cache.params.token_by_token and len(new) > 1 for _, cache, new in feeds):
            return self._one_by_one(feeds, start, stages)
        pipeline = Pipeline(self)
        flights = pipeline.enter([(sequence, cache, new, None) for sequence, cache, new in feeds], start, keep_stages=stages is not None)
        while len(pipeline):
            pipeline.advance(pipeline.lowest)
        x = torch.cat([f.x for f in flights]) if len(flights) > 1 else flights[0].x
        if stages is not None:
            stages += [torch.cat(states) for states in zip(*(f.stages for f in flights), strict=True)]
        steps = [step for f in flights for step in f.steps_of_tokens()]
        return x, torch.tensor(steps, dtype=torch.int64, device=self.device).view(len(x), self.config.n_groups)

    def _one_by_one(self, feeds: Sequence[Feed], start: Sequence[Tensor] | None, stages: list[Tensor] | None) -> tuple[Tensor, Tensor]:
        firsts = [0, *accumulate(len(new) for _, _, new in feeds)]
        x: Tensor | None = None
        steps = torch.empty(firsts[-1], self.config.n_groups, dtype=torch.int64, device=self.device)
        for t in range(max(len(new) for _, _, new in feeds)):
            live = [i for i, (_, _, new) in enumerate(feeds) if t < len(new)]
            rows = torch.tensor([firsts[i] + t for i in live], device=self.device)
            own_start = None if start is None else [states[rows] for states in start]
            own_stages: list[Tensor] | None = None if stages is None else []
            found, taken = self.run([(*feeds[i][:2], feeds[i][2][t : t + 1]) for i in live], own_start, own_stages)
            x = found.new_empty(firsts[-1], self.config.n_embd) if x is None else x
            x[rows], steps[rows] = found, taken
            if stages is not None and own_stages is not None:
                stages += [] if stages else [torch.empty_like(x) for _ in own_stages]
                for whole, part in zip(stages, own_stages, strict=True):
                    whole[rows] = part
        assert x is not None
        return x, steps


_TABLES: WeakKeyDictionary[LoopedGPT, dict[object, dict[int, Tensor]]] = WeakKeyDictionary()
_TABLES_LOCK = threading.Lock()


def _tables_of(model: LoopedGPT, seed: int, like: Tensor) -> dict[int, Tensor]:
    """Start states of all positions, by group: the engines of a model share those of the last few seeds."""
    key = (seed, like.dtype, like.device)
    with _TABLES_LOCK:
        held = _TABLES.setdefault(model, {})
        if key not in held:
            while len(held) >= MAX_TABLES:
                del held[next(iter(held))]
            held[key] = {}
        return held[key]
