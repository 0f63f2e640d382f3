"""Tokens of one sequence in one C call (decode.c), without Python between them: the decoding of a request that is alone, and the drafts and
verifications of speculation.

Tokens, loop steps, keys and values are those of passes of one row, bit for bit, since the kernels are the same.
"""

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from twoscale.engine.kernels.base import Interrupt
from twoscale.engine.kernels.library import (
    ConditionStruct,
    DecodeStage,
    OutputHead,
    SequenceStruct,
    empty_floats,
    pointer,
    sample_floats,
    score_floats,
    threads_to_use,
)
from twoscale.engine.kernels.native_rows import EmbedRows, NativeStageKernels, condition_struct, remembered_buffer
from twoscale.exits import RuleState
from twoscale.exits.rule import condition_for
from twoscale.model import LoopGroup

if TYPE_CHECKING:
    from twoscale.engine.cache import Cache
    from twoscale.engine.engine import Engine
    from twoscale.engine.kernels.native import NativeLinear, NativeNorm


class SequenceSampling(NamedTuple):
    """How the tokens of a sequence are sampled; numbers as sample.c takes them."""

    temperature: float
    top_k: int
    top_p: float
    stops: Sequence[int]
    """Tokens that end the text."""


MAX_ROWS = 16  # of a verification


class Decoded(NamedTuple):
    """Tokens, each sampled from a pass of the one before."""

    tokens: list[int]
    steps: list[tuple[int, ...]]
    """For each of them, the loop steps in each group of the pass that it was sampled from."""


class NativeDecoder:
    """Decodes sequences by the weights of one engine."""

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
    def of(engine: "Engine") -> "NativeDecoder | None":
        """None if the sequences of this engine cannot be decoded in C: then every token is a pass."""
        config, embed = engine.config, engine.embedding
        if not isinstance(embed, EmbedRows) or config.noise_in_steps or not engine.has_tables:
            return None
        return NativeDecoder(engine, embed)

    def sequence(self, cache: "Cache", sampling: SequenceSampling, is_draft: bool = False, max_rows: int = 1) -> "NativeSequence | None":
        """A sequence with its cache, for the loop parameters of the cache; None if one of its exit rules is not implemented in C.

        `max_rows` is the most rows of a verification."""
        config = self.engine.config
        rules = cache.loop_params.rules
        if any(rule is not None and condition_for(rule, g, config.n_embd) is None for g, rule in enumerate(rules)):
            return None
        return NativeSequence(self, cache, sampling, is_draft, max_rows)


class NativeSequence:
    """A sequence that is decoded in C, one token after the other."""

    def __init__(self, decoder: NativeDecoder, cache: "Cache", sampling: SequenceSampling, is_draft: bool, max_rows: int) -> None:
        self.decoder, self.cache, self.is_draft, self.max_rows = decoder, cache, is_draft, max_rows
        config, head = decoder.engine.config, decoder.head
        self._keep_alive: list[object] = []  # C holds their addresses
        kv = (ctypes.c_void_p * len(cache.layers))(*[layer.kv_pointers_address for layer in cache.layers])
        stages = (DecodeStage * len(decoder.stages))(*[self._stage(kernels, ctypes.addressof(kv)) for kernels in decoder.stages])
        self.threads, stops = threads_to_use(), (ctypes.c_int64 * len(sampling.stops))(*sampling.stops)
        per_row = 8 * config.n_embd + 2 * config.head_dim + 2 * head.out_features + decoder.scratch_per_row  # `row_floats` of decode.c
        size = max_rows * per_row + self.threads * sample_floats(config.vocab_size) + score_floats(self.threads, cache.capacity)
        scratch = empty_floats(size)
        cos, sin = (None, None) if decoder.rope is None else (pointer(table, table.numel()) for table in decoder.rope)
        self._struct = SequenceStruct(
            rope_size=config.head_dim, n_stages=len(stages), n_stops=len(stops), embedding=decoder.embed.address, cos=cos, sin=sin,
            stages=ctypes.addressof(stages), output_head=ctypes.addressof(decoder.output_head), stops=ctypes.addressof(stops),
            capacity=cache.capacity, max_rows=max_rows, scratch=pointer(scratch, size), temperature=sampling.temperature,
            top_k=sampling.top_k, top_p=sampling.top_p,
        )  # fmt: skip
        self._keep_alive += [kv, stages, stops, scratch]

    def decode(self, token: int, uniform: Sequence[float], interrupt: Interrupt) -> Decoded:
        """One token for each uniform number, after `token`, which is at the position where the cache ends; its length is not changed.

        There are fewer, or none, if one is a stop token (the last then), if the cache is full or has no level for a loop step yet, if
        logits are not finite, or if `interrupt` is set."""
        cache, m, groups = self.cache, min(len(uniform), self.cache.capacity - self.cache.length), len(self.cache.loop_params.loops)
        numbers, tokens, steps = (ctypes.c_double * m)(*uniform[:m]), (ctypes.c_int64 * m)(), (ctypes.c_int32 * (m * groups))()
        n = self.decoder.embed.library.decode(
            self.threads, ctypes.addressof(self._struct), m, token, cache.length, numbers, tokens, steps, interrupt.address
        )
        return Decoded(tokens[:n], [tuple(steps[i * groups : (i + 1) * groups]) for i in range(n)])

    def verify(self, tokens: Sequence[int], uniform: Sequence[float], interrupt: Interrupt) -> Decoded | None:
        """A pass of several tokens, the first at the position where the cache ends, and the token that is sampled after each of them.

        None if there are more than `max_rows`, if the cache is too short or has no level for a loop step yet, if logits are not finite, or
        if `interrupt` is set: the caller takes a pass of a batch then."""
        cache, n, groups = self.cache, len(tokens), len(self.cache.loop_params.loops)
        if n > self.max_rows or cache.length + n > cache.capacity:
            return None
        fed, numbers = (ctypes.c_int64 * n)(*tokens), (ctypes.c_double * n)(*uniform)
        sampled, steps = (ctypes.c_int64 * n)(), (ctypes.c_int32 * (n * groups))()
        library = self.decoder.embed.library
        struct = ctypes.addressof(self._struct)
        if not library.run_pass(self.threads, struct, n, fed, cache.length, numbers, sampled, steps, interrupt.address):
            return None
        return Decoded(sampled[:], [tuple(steps[i * groups : (i + 1) * groups]) for i in range(n)])

    def _stage(self, kernels: NativeStageKernels, kv: int) -> DecodeStage:
        """A stage; `kv` is the address of the pointers of all layers."""
        engine, params, group = self.decoder.engine, self.cache.loop_params, kernels.module
        config = engine.config
        stage = DecodeStage(weights=kernels.address, kv=kv + kernels.first_layer * ctypes.sizeof(ctypes.c_void_p))
        if isinstance(group, LoopGroup):
            stage.max_steps, stage.is_draft = params.loops[group.index], self.is_draft
            stage.adds_input, stage.starts_with_input = config.inject == "add", config.start == "input"
            if group.adapter is not None:
                stage.input_weight = cast("NativeLinear", group.adapter.of_input).address
            if config.start == "noise":
                states = engine.start_table(group.index, params.seed)
                stage.start_states = pointer(states, states.numel())
                self._keep_alive.append(states)
            if config.norm_at_exit and group.norm is not None:
                norm = cast("NativeNorm", group.norm)
                stage.norm_gain, stage.norm_eps = norm.gain_address, norm.eps
            self._add_rule(stage, group.index)
        return stage

    def _add_rule(self, stage: DecodeStage, group: int) -> None:
        """The condition of the group's exit rule."""
        config, rule = self.decoder.engine.config, self.cache.loop_params.rules[group]
        if rule is None:
            return
        condition = condition_for(rule, group, config.n_embd)
        assert condition is not None
        remembered = remembered_buffer(condition, RuleState(rule).remembered, self.max_rows, config.vocab_size)
        struct: ConditionStruct = condition_struct(condition, rule, remembered)
        stage.condition, stage.needs_updates = ctypes.addressof(struct), rule.needs_previous_update
        if condition.statistic.reads_logits:
            stage.lens = ctypes.addressof(self.decoder.output_head)
        self._keep_alive += [condition, remembered, struct]
