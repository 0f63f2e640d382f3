"""The engine: a model prepared for decoding, which computes the stages of the network for the rows of a batch.

    engine = Engine(model)
    cache = engine.new_cache(512, loop_params(model, exit=exits.Acceleration(1e-2), loops=30))
    x, steps = engine.run([(0, cache, [5, 7, 9])])    # prefill: three tokens in parallel
    x, steps = engine.run([(0, cache, [2])])          # decode: one more token

Shapes: N rows, C width, G group.
"""

import functools
import threading
from collections.abc import Sequence
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from twoscale.config.dtypes import WeightDtype
from twoscale.engine.cache import Cache
from twoscale.engine.counters import Counters
from twoscale.engine.kernels import InferenceCopy, KernelName, TorchKernels, optimize_for_inference
from twoscale.engine.kernels.native_decode import NativeDecoder
from twoscale.engine.kernels.quantize import quantize
from twoscale.engine.request import LoopParams, RequestGroup
from twoscale.engine.rows import Rows
from twoscale.model import LoopedGPT, StateNoise
from twoscale.model.layers import Rope, rope_table
from twoscale.model.start import start_state

SequenceInput = tuple[int, Cache, Sequence[int]]  # a sequence's index in the caller's batch, its cache, and its next tokens

KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MAX_TABLE_SIZE = 1 << 24  # entries; if start states, or cos and sin, of all positions need more, they are computed for each token instead
MAX_TABLES = 4  # tables that are cached: of start states, for as many seeds of a model; of cos and sin, for as many model shapes
DRAFT_DTYPE: WeightDtype = "w8a8"


class Engine:
    """A model prepared for decoding."""

    def __init__(self, model: LoopedGPT, *, kernels: KernelName = "auto", inference_copy: InferenceCopy | None = None) -> None:
        """`inference_copy` is the result of `optimize_for_inference`, for callers who make many engines.

        With the `native` and `packed` kernels the engine computes on a copy of the weights, and later changes of the model do not affect
        it. Without `inference_copy` the weights are hashed once to check whether the cached copy is up to date. With the `torch` kernels or
        under autocast the engine shares the model's weights, and nothing is hashed."""
        self.config = model.config
        autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        inference_copy = InferenceCopy(model, TorchKernels()) if autocast else inference_copy or optimize_for_inference(model, kernels)
        self.model, self.kernels = inference_copy.model, inference_copy.kernels.for_engine()
        first = next(model.parameters())
        self.device = first.device
        dtype = torch.get_autocast_dtype(self.device.type) if autocast else first.dtype
        self._like = torch.empty(0, dtype=dtype, device=self.device)
        self.loop_steps = [0] * self.config.n_groups
        """For each group, the loop steps of all rows so far, drafts and rejected guesses included."""
        self.stages = list(self.model.stages)
        """The modules: runs of plain layers, and loop groups."""
        self.first_layers = [0]
        """Index of the first layer of each stage; one more entry at the end, the number of layers."""
        for layers, _ in self.config.stages:
            self.first_layers.append(self.first_layers[-1] + len(layers))
        self.embedding = self.kernels.embedding(self.model)
        self.stage_kernels = [
            self.kernels.stage_kernels(stage, first) for stage, first in zip(self.stages, self.first_layers, strict=False)
        ]
        self.decoder = self.kernels.decoder(self)
        """Decodes several tokens of one sequence in one call of a kernel; None: every token is a pass."""
        self.source_model = model
        """The model that the engine was made from; `model` is its inference copy."""

    @property
    def draft_decoder(self) -> NativeDecoder | None:
        """Decodes the drafts of speculation, on the caches of this engine. Weights in fp32 are rounded to w8a8 for it, in a copy that is
        made when the first draft is: a draft need not be exact, and a token takes a fraction of the time."""
        if self.decoder is None or self.source_model.weight_dtype != "fp32":
            return self.decoder
        with _DRAFT_LOCK:
            if self.model not in _DRAFT_ENGINES:
                with torch.inference_mode(False):
                    _DRAFT_ENGINES[self.model] = Engine(quantize(self.source_model, DRAFT_DTYPE))
            return _DRAFT_ENGINES[self.model].decoder

    def new_cache(self, capacity: int, params: LoopParams) -> Cache:
        """An empty KV cache for one sequence."""
        return Cache(self.config, min(capacity, self.config.block_size), params, self._kv_like(params), self.kernels)

    def kv_itemsize(self, params: LoopParams) -> int:
        """Bytes of one number in the KV caches."""
        return self._kv_like(params).itemsize

    def _kv_like(self, params: LoopParams) -> Tensor:
        """An empty tensor with the dtype and device of keys and values."""
        return self._like if params.kv_dtype == "auto" else self._like.to(KV_DTYPES[params.kv_dtype])

    def embed(self, rows: Rows) -> Tensor:
        """Token and position embeddings of the rows, (N, C)."""
        return self.embedding(rows)

    def rope(self, rows: Rows) -> Rope | None:
        """cos and sin of the rotary embedding at the rows' positions; None if the model has no rotary embedding."""
        if rows.rope is None:
            table = self.rope_table()
            rows.rope = (self.model.rope(rows.positions) if table is None else (rows.gather(table[0]), rows.gather(table[1])),)
        return rows.rope[0]

    def rope_table(self) -> Rope | None:
        """cos and sin of all positions; None if the model has no rotary embedding, or if they are too many for a table."""
        c = self.config
        if c.positions != "rotary" or c.block_size * c.head_dim > MAX_TABLE_SIZE:
            return None
        return _rope_table(c.block_size, c.head_dim, c.rope_base, self.device)

    @property
    def has_tables(self) -> bool:
        """Whether start states, and cos and sin, of all positions are in tables."""
        return self.config.block_size * self.config.n_embd <= MAX_TABLE_SIZE

    def run_plain_stage(self, stage: int, x: Tensor, rows: Rows) -> Tensor:
        """The layers of a plain (not looped) stage on rows (N, C)."""
        return self.stage_kernels[stage].run(x, self.rope(rows), rows)

    def noise(self, seed: int) -> StateNoise:
        return StateNoise(seed)

    def start_states(self, group: int, e: Tensor, rows: Rows) -> Tensor:
        """Initial states x^(0) of rows that enter a group with the input e (N, C)."""
        seeds = {part.cache.loop_params.seed for part in rows.parts}
        if len(seeds) == 1:
            return self._start_states(group, e, rows, seeds.pop())
        each, first = [], 0
        for part in rows.parts:
            row_range = slice(first, first + part.count)
            own_rows = Rows([part], rows.positions_and_tokens[:, row_range], rows.kernels)
            each.append(self._start_states(group, e[row_range], own_rows, part.cache.loop_params.seed))
            first += part.count
        return torch.cat(each)

    def _start_states(self, group: int, e: Tensor, rows: Rows, seed: int) -> Tensor:
        c = self.config
        if c.start != "noise" or c.block_size * c.n_embd > MAX_TABLE_SIZE:
            return start_state(c, group, e, rows.positions, self.noise(seed))
        return rows.gather(self.start_table(group, seed))

    def start_table(self, group: int, seed: int) -> Tensor:
        """Start states of all positions (T, C), for start="noise"."""
        tables = _start_tables(self.source_model, seed, self._like)
        if group not in tables:
            all_positions = torch.arange(self.config.block_size, device=self.device)
            tables[group] = self.noise(seed)(group, all_positions, self.config.n_embd).to(self._like)
        return tables[group]

    def count_rows(self, steps: Sequence[Sequence[int]], group: RequestGroup, counters: Counters, together: bool = False) -> None:
        """Count rows of a request group that went through the network outside of a batch, with these loop steps in each loop group: all in
        one pass (`together`), or each in a pass of its own."""
        plain_stages = len(self.stages) - self.config.n_groups
        for of_row in steps:
            for i, n in enumerate(of_row):
                self.loop_steps[i] += n
            group.virtual_time += sum(len(layers) * (1 if i is None else of_row[i]) for layers, i in self.config.stages)
            counters.rows += plain_stages + sum(of_row)
        passes = [[max(of_group) for of_group in zip(*steps, strict=True)]] if together else steps
        counters.stage_passes += sum(plain_stages + sum(of_pass) for of_pass in passes)

    @torch.inference_mode()
    def run(
        self, inputs: Sequence[SequenceInput], start: Sequence[Tensor] | None = None, stage_states: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """A forward pass of the next tokens of several sequences: states before the final norm (N, C), and loop steps (N, G).

        Rows are stacked in the order of `inputs`. `start` gives the groups' initial states, one (N, C) each. If a rule needs the tokens
        of a sequence one at a time, there is one pass for each. The embedding and the state after each stage, (N, C) each, are appended to
        the list `stage_states` if it is given.
        """
        from twoscale.engine.batch import Batch, Entry

        if any(cache.loop_params.token_by_token and len(new) > 1 for _, cache, new in inputs):
            return self._run_token_by_token(inputs, start, stage_states)
        batch = Batch(self)
        entries = [Entry(prompt_index, cache, new, None) for prompt_index, cache, new in inputs]
        chunks = batch.enter(entries, start, keep_stage_states=stage_states is not None)
        while len(batch):
            batch.advance(batch.earliest_stage)
        x = torch.cat([chunk.final_states for chunk in chunks]) if len(chunks) > 1 else chunks[0].final_states
        if stage_states is not None:
            stage_states += [torch.cat(states) for states in zip(*(chunk.stage_states for chunk in chunks), strict=True)]
        steps = [step for chunk in chunks for step in chunk.steps_of_tokens()]
        return x, torch.tensor(steps, dtype=torch.int64, device=self.device).view(len(x), self.config.n_groups)

    def _run_token_by_token(
        self, inputs: Sequence[SequenceInput], start: Sequence[Tensor] | None, stage_states: list[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        firsts = [0, *accumulate(len(new) for _, _, new in inputs)]
        x: Tensor | None = None
        steps = torch.empty(firsts[-1], self.config.n_groups, dtype=torch.int64, device=self.device)
        for t in range(max(len(new) for _, _, new in inputs)):
            live = [i for i, (_, _, new) in enumerate(inputs) if t < len(new)]
            rows = torch.tensor([firsts[i] + t for i in live], device=self.device)
            own_start = None if start is None else [group_start[rows] for group_start in start]
            own_states: list[Tensor] | None = None if stage_states is None else []
            one_each = [(prompt_index, cache, new[t : t + 1]) for prompt_index, cache, new in (inputs[i] for i in live)]
            states, taken = self.run(one_each, own_start, own_states)
            x = states.new_empty(firsts[-1], self.config.n_embd) if x is None else x
            x[rows], steps[rows] = states, taken
            if stage_states is not None and own_states is not None:
                stage_states += [] if stage_states else [torch.empty_like(x) for _ in own_states]
                for whole, part in zip(stage_states, own_states, strict=True):
                    whole[rows] = part
        assert x is not None
        return x, steps


@functools.lru_cache(maxsize=MAX_TABLES)
def _rope_table(block_size: int, head_dim: int, base: float, device: torch.device) -> Rope:
    """cos and sin of the rotary embedding at all positions."""
    with torch.inference_mode(False):
        return rope_table(torch.arange(block_size, device=device), head_dim, base)


_DRAFT_ENGINES: "WeakKeyDictionary[LoopedGPT, Engine]" = WeakKeyDictionary()  # by the inference copy whose drafts they compute
_DRAFT_LOCK = threading.Lock()

_TABLES: WeakKeyDictionary[LoopedGPT, dict[object, dict[int, Tensor]]] = WeakKeyDictionary()
_TABLES_LOCK = threading.Lock()


def _start_tables(model: LoopedGPT, seed: int, like: Tensor) -> dict[int, Tensor]:
    """Start states of all positions, by group, for one seed. Shared by all engines of a model; the last MAX_TABLES seeds are kept."""
    key = (seed, like.dtype, like.device)
    with _TABLES_LOCK:
        tables = _TABLES.setdefault(model, {})
        if key not in tables:
            while len(tables) >= MAX_TABLES:
                del tables[next(iter(tables))]
            tables[key] = {}
        return tables[key]
