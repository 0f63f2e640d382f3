"""Drafts of speculation in one C call (draft.c): several tokens of one sequence, each with few loop steps, without Python between them.

The tokens are those of passes of one row, bit for bit, since the kernels are the same.
"""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from twoscale.engine.kernels.base import Interrupt
from twoscale.engine.kernels.library import (
    Drafter,
    DraftStage,
    OutputHead,
    empty_floats,
    pointer,
    sample_floats,
    score_floats,
    threads_to_use,
)
from twoscale.engine.kernels.native_rows import EmbedRows, NativeStageKernels
from twoscale.model import LoopGroup

if TYPE_CHECKING:
    from twoscale.engine.cache import Cache
    from twoscale.engine.engine import Engine
    from twoscale.engine.kernels.native import NativeLinear, NativeNorm


class DraftSampling(NamedTuple):
    """How the tokens are sampled; numbers as sample.c takes them."""

    temperature: float
    top_k: int
    top_p: float
    uniform: Sequence[float]
    """A uniform number for each token."""
    stops: Sequence[int]
    """Tokens that end the text."""


class NativeDrafts:
    """Drafts by the weights of one engine."""

    def __init__(self, engine: "Engine", embed: EmbedRows) -> None:
        config, model = engine.config, engine.model
        self.engine, self.embed, self.rope = engine, embed, engine.rope_table()
        self.stages = cast("list[NativeStageKernels]", engine.stage_kernels)
        norm = cast("NativeNorm | None", model.ln_f) if config.final_norm else None
        self.head = cast("NativeLinear", model.lm_head)
        gain, eps = (None, 0.0) if norm is None else (norm.gain_address, norm.eps)
        self.output_head = OutputHead(config.vocab_size, gain, self.head.address, eps)
        self.scratch_per_row = max(stage.scratch_per_row for stage in self.stages)

    @staticmethod
    def of(engine: "Engine") -> "NativeDrafts | None":
        """None if drafts of this engine cannot be made in C: then they are passes like others."""
        config, embed = engine.config, engine.embedding
        if not isinstance(embed, EmbedRows) or config.noise_in_steps or not engine.has_tables:
            return None
        return NativeDrafts(engine, embed)

    def draft(self, cache: "Cache", token: int, sampling: DraftSampling, interrupt: Interrupt) -> list[int] | None:
        """One token for each number in `sampling.uniform`, after `token`; fewer if one of them is a stop token, which is the last then,
        or if `interrupt` is set. None if a level of the cache is not filled yet.

        `cache` is a view with the loop parameters of drafts, which have no rules; it ends before `token`, and its length is not changed.
        """
        config, m, end = self.engine.config, len(sampling.uniform), cache.length + len(sampling.uniform)
        steps = [1 if group is None else cache.loop_params.loops[group] for layers, group in config.stages for _ in layers]
        if end > cache.capacity or any(layer.n_levels < k for layer, k in zip(cache.layers, steps, strict=True)):
            return None
        kv = (ctypes.c_void_p * len(cache.layers))(*[layer.kv_pointers_address for layer in cache.layers])
        stages = (DraftStage * len(self.stages))(*[self._stage(i, cache, ctypes.addressof(kv)) for i in range(len(self.stages))])
        threads, stops = threads_to_use(), (ctypes.c_int64 * len(sampling.stops))(*sampling.stops)
        V, C = config.vocab_size, config.n_embd
        size = 4 * C + self.head.out_features + sample_floats(V) + self.scratch_per_row + score_floats(threads, end)
        scratch = empty_floats(size)
        cos, sin = (None, None) if self.rope is None else (pointer(table, table.numel()) for table in self.rope)
        drafter = Drafter(
            rope_size=config.head_dim, n_stages=len(stages), n_stops=len(stops), embedding=self.embed.address, cos=cos, sin=sin,
            stages=ctypes.addressof(stages), output_head=ctypes.addressof(self.output_head), stops=ctypes.addressof(stops),
            capacity=cache.capacity, scratch=pointer(scratch, size), temperature=sampling.temperature, top_k=sampling.top_k,
            top_p=sampling.top_p,
        )  # fmt: skip
        uniform, tokens = (ctypes.c_double * m)(*sampling.uniform), (ctypes.c_int64 * m)()
        n = self.embed.library.draft(threads, ctypes.addressof(drafter), m, token, cache.length, uniform, tokens, interrupt.address)
        return tokens[:n]

    def _stage(self, index: int, cache: "Cache", kv: int) -> DraftStage:
        """A stage; `kv` is the address of the pointers of all layers."""
        config, kernels = self.engine.config, self.stages[index]
        stage = DraftStage(weights=kernels.address, kv=kv + kernels.first_layer * ctypes.sizeof(ctypes.c_void_p))
        group = kernels.module
        if isinstance(group, LoopGroup):
            stage.steps = cache.loop_params.loops[group.index]
            stage.adds_input, stage.starts_with_input = config.inject == "add", config.start == "input"
            if group.adapter is not None:
                stage.input_weight = cast("NativeLinear", group.adapter.of_input).address
            if config.start == "noise":
                states = self.engine.start_table(group.index, cache.loop_params.seed)
                stage.start_states = pointer(states, states.numel())  # the engine keeps it
            if config.norm_at_exit and group.norm is not None:
                norm = cast("NativeNorm", group.norm)
                stage.norm_gain, stage.norm_eps = norm.gain_address, norm.eps
        return stage
