"""The rows of a batch for the C kernels: attention, and the layers of a stage in one call (loop.c).

One C call runs a plain stage, or several loop steps of a group with the conditions of its exit rules. It is bit-equal to
`base.StageKernels`, which is used in the other cases: more than MAX_FUSED_ROWS rows, noise in every step, or an exit rule without a
`Condition`.

Shapes: N rows, C width, H query heads, J key/value heads, D head width.
"""

import ctypes
import math
import threading
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from twoscale.engine.kernels.base import Interrupt, LoopSteps, StageKernels
from twoscale.engine.kernels.library import (
    MAX_FUSED_ROWS,
    SANITIZE,
    ConditionStruct,
    Embedding,
    KVView,
    Library,
    LoopRowsStruct,
    OutputHead,
    RowSet,
    StageWeights,
    empty_floats,
    input_and_output,
    pointer,
    row_pointer,
    score_floats,
    threads_to_use,
)  # fmt: skip
from twoscale.exits import Rule, StepView
from twoscale.exits.statistics import Condition
from twoscale.model import LoopedGPT, LoopGroup
from twoscale.model.layers import Rope

if TYPE_CHECKING:
    from twoscale.engine.kernels.native import NativeBlock, NativeLinear, NativeNorm
    from twoscale.engine.loop import LoopRows
    from twoscale.engine.row_rules import LoopExitRules
    from twoscale.engine.rows import Rows


NORMS = 5  # of a row, see `update_norms` in rowwise.c
LENS_ROWS = 32  # rows whose logits are computed at a time, as in loop.c


class Scratch(threading.local):
    """Scratch memory of one thread, valid during a C call."""

    size, memory = 0, empty_floats(0)

    def __call__(self, size: int) -> int:
        """The address of at least `size` floats."""
        if size > self.size or SANITIZE:  # with SANITIZE always of exactly this size, so that accesses beyond it are detected
            self.memory, self.size = empty_floats(size), size
            self.address = pointer(self.memory, size)
        return self.address


scratch = Scratch()


class NativeRowKernels:
    """The rows of a batch for the C kernels: positions and caches, reused at every loop step."""

    def __init__(self, rows: "Rows", library: Library) -> None:
        self.parts, self.n, self.longest, self.library = rows.parts, rows.n, rows.longest, library
        for part in rows.parts:
            if not 0 < part.end <= part.cache.capacity:
                raise IndexError(f"position {part.end - 1} lies outside a cache for {part.cache.capacity} tokens")
        part_of_row = [i for i, part in enumerate(rows.parts) for _ in range(part.count)]
        parts, capacities = (
            (ctypes.c_int64 * self.n)(*part_of_row),
            (ctypes.c_int64 * len(rows.parts))(*[p.cache.capacity for p in rows.parts]),
        )
        self._keep_alive = parts, capacities, rows.positions  # C holds their addresses
        self.addresses = ctypes.addressof(parts), ctypes.addressof(capacities), pointer(rows.positions, self.n, torch.int64)
        self._row_set = RowSet(self.n, len(rows.parts), *self.addresses, self.longest)
        self.row_set_address = ctypes.addressof(self._row_set)
        self._rope: Rope | None = None
        self._kv_pointers: dict[int, ctypes.Array[ctypes.c_void_p]] = {}

    def attention(self, layer: int) -> "NativeAttention":
        return NativeAttention(self, layer)

    def cos_sin_addresses(self, rope: Rope, head_dim: int) -> tuple[int, int]:
        """The addresses of cos and sin of the rotary embedding."""
        if rope is not self._rope:
            self._cos_sin = pointer(rope[0], self.n * head_dim), pointer(rope[1], self.n * head_dim)
            self._rope = rope
        return self._cos_sin

    def kv_pointers(self, first_layer: int, n_layers: int) -> int:
        """The address of pointers (n_layers, parts) to the `KVPointers` of each part's cache. Allocates the first level of each layer."""
        if first_layer not in self._kv_pointers:
            layers = [part.cache.layers[i] for i in range(first_layer, first_layer + n_layers) for part in self.parts]
            for i, layer in enumerate(layers):
                if not layer.n_levels:
                    layer.ensure_level(1, self.parts[i % len(self.parts)].cache.length)
            self._kv_pointers[first_layer] = (ctypes.c_void_p * len(layers))(*[layer.kv_pointers_address for layer in layers])
        return ctypes.addressof(self._kv_pointers[first_layer])


class NativeAttention:
    """The attention of one layer: called directly, or used by a fused block through `view_address`."""

    def __init__(self, row_kernels: NativeRowKernels, layer: int) -> None:
        self.row_kernels, self.layer = row_kernels, layer
        self._view: KVView | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (1, N, H, D), k and v (1, N, J, D) -> (1, N, H, D). Without mask or padding: each row reads the keys up to its own position."""
        _, n, H, D = q.shape
        rows, threads = self.row_kernels, threads_to_use()
        J, out = k.shape[2], q.new_empty(1, n, H, D)
        addresses = (row_pointer(heads, n, count, D) for heads, count in ((q, H), (k, J), (v, J)))
        rows.library.attend(
            threads, n, H, J, D, *addresses, q.stride(1), k.stride(1), v.stride(1),
            self.view_address(), scratch(score_floats(threads, rows.longest)), pointer(out, n * H * D),
        )  # fmt: skip
        return out

    def view_address(self) -> int:
        """The address of the KVView of these rows at their current loop steps."""
        rows, layer = self.row_kernels, self.layer
        if self._view is None:
            self._keys, self._values = ((ctypes.c_void_p * len(rows.parts))() for _ in range(2))
            self._format = (ctypes.c_int32 * len(rows.parts))(*(part.cache.layers[layer].kv_pointers.format for part in rows.parts))
            arrays = (_address(array) for array in (self._keys, self._values, self._format))
            self._view = KVView(*rows.addresses, *arrays, rows.longest)
        for i, part in enumerate(rows.parts):
            layer_cache = part.cache.layers[layer]
            self._keys[i], self._values[i] = layer_cache.address(layer_cache.ensure_level(part.level_step, part.cache.length))
        return ctypes.addressof(self._view)


class EmbedRows:
    """(wte + wpe) * scale of the rows in one call, as `LoopedGPT.embed`; the scale is sqrt(C) with `scale_embedding`, else 1."""

    def __init__(self, model: LoopedGPT, library: Library) -> None:
        """The token embedding is fp32 or in panels."""
        c, wpe, panels = model.config, None if model.wpe is None else model.wpe.weight, getattr(model.wte, "panels", None)
        wte = model.wte.weight if panels is None else None
        self.width, self.library, self._keep_alive = c.n_embd, library, (wte, wpe, panels)
        self.n_tokens, self.n_positions = c.padded_vocab_size, 0 if wpe is None else len(wpe)
        wte_ptr = None if wte is None else pointer(wte, self.n_tokens * self.width)
        wpe_ptr = None if wpe is None else pointer(wpe, self.n_positions * self.width)
        scale = c.n_embd**0.5 if c.scale_embedding else 1.0
        panels_ptr = None if panels is None else panels.address
        self._struct = Embedding(self.width, scale, self.n_tokens, self.n_positions, wte_ptr, panels_ptr, wpe_ptr)
        self.address = ctypes.addressof(self._struct)

    def __call__(self, rows: "Rows") -> Tensor:
        n, C = rows.n, self.width
        out = torch.empty((n, C), dtype=torch.float32, device="cpu")
        tokens, positions = pointer(rows.tokens, n, torch.int64), pointer(rows.positions, n, torch.int64)
        if not self.library.embed(n, self.address, tokens, positions, pointer(out, n * C)):
            raise IndexError(f"a token is not below {self.n_tokens}, or a position not below {self.n_positions}")
        return out


class NativeStageKernels(StageKernels):
    """The kernels of a stage of the inference copy, whose modules are native."""

    def __init__(self, module: nn.Module, first_layer: int, library: Library) -> None:
        super().__init__(module, first_layer)
        self.library = library
        blocks = cast("list[NativeBlock]", self.blocks)
        self.n_layers, self.width, self.head_dim = len(blocks), blocks[0].width, blocks[0].head_dim
        self.scratch_per_row = max(block.scratch_per_row for block in blocks)
        self._blocks = (ctypes.c_void_p * len(blocks))(*(block.address for block in blocks))
        state_weight, gain, eps = None, None, 0.0
        if isinstance(module, LoopGroup):
            if module.adapter is not None:
                state_weight = cast("NativeLinear", module.adapter.of_state).address
            if module.config.group_norm == "step" and module.norm is not None:
                norm = cast("NativeNorm", module.norm)
                gain, eps = norm.gain_address, norm.eps
        self._weights = StageWeights(self.width, len(blocks), ctypes.addressof(self._blocks), state_weight, gain, eps)
        self.address = ctypes.addressof(self._weights)

    def run(self, x: Tensor, rope: Rope | None, rows: "Rows") -> Tensor:
        row_kernels, n, threads = cast(NativeRowKernels, rows.row_kernels), rows.n, threads_to_use()
        if n > MAX_FUSED_ROWS:
            return super().run(x, rope, rows)
        x, x_ptr, out, out_ptr = input_and_output(x, n * self.width)
        cos, sin = (None, None) if rope is None else row_kernels.cos_sin_addresses(rope, self.head_dim)
        kv = row_kernels.kv_pointers(self.first_layer, self.n_layers)
        work = scratch(n * self.scratch_per_row + score_floats(threads, row_kernels.longest))
        self.library.run_stage(threads, self.address, row_kernels.row_set_address, kv, x_ptr, cos, sin, work, out_ptr)
        return out

    def iterate(self, loop: "LoopRows", max_steps: int, interrupt: Interrupt, steps_after_exit: int = 0) -> LoopSteps:
        if not loop.fused_decided:
            loop.fused, loop.fused_decided = FusedLoop(self, loop) if FusedLoop.applies(loop) else None, True
        if loop.fused is None:
            return super().iterate(loop, max_steps, interrupt)
        return loop.fused.run(loop, max_steps, interrupt, steps_after_exit)


class FusedLoop:
    """Rows inside a loop group whose steps are taken in C. It is made anew when the rows change."""

    def __init__(self, stage: NativeStageKernels, loop: "LoopRows") -> None:
        rows, rules = loop.rows, loop.rules
        assert rows is not None
        n, C, n_parts, row_kernels = rows.n, stage.width, len(rows.parts), cast(NativeRowKernels, rows.row_kernels)
        self.stage, self.rows, self.n, self.row_kernels, self.threads = stage, rows, n, row_kernels, threads_to_use()
        self.states, streaks = (torch.empty_like(loop.x), torch.empty_like(loop.x)), rules.streaks()
        self.streaks = None if streaks is None else (ctypes.c_int64 * n)(*streaks)
        self.loop_step, step_limit = (ctypes.c_int64 * n_parts)(), (ctypes.c_int64 * n_parts)(*loop.step_limits)
        self.fired, self.exits, self.first_exit = (ctypes.c_uint8 * n)(), (ctypes.c_uint8 * n)(), ctypes.c_int32()
        self.filled = (ctypes.c_int64 * n_parts)()
        self._kept: tuple[Tensor, ctypes.Array[ctypes.c_int64]] | None = None
        """`kept_inputs` and `kept_rows` of loop.c."""
        statistics = (ctypes.c_double * n)()
        injected = None if loop.injected is None else loop.injected.contiguous()
        previous_update = None if rules.previous_updates is None else rules.previous_updates.vectors_like(loop.x)
        norms = None if previous_update is None else (ctypes.c_float * (NORMS * n))()
        cos, sin = (None, None) if loop.rope is None else row_kernels.cos_sin_addresses(loop.rope, stage.head_dim)
        self.struct = struct = LoopRowsStruct(
            injected=None if injected is None else pointer(injected, n * C),
            cos=cos,
            sin=sin,
            previous_update=None if previous_update is None else pointer(previous_update, n * C),
            norms=_address(norms),
            kv=row_kernels.kv_pointers(stage.first_layer, stage.n_layers),
            loop_step=_address(self.loop_step),
            step_limit=_address(step_limit),
            statistics=_address(statistics),
            streak=_address(self.streaks),
            fired=_address(self.fired),
            exits=_address(self.exits),
            filled=_address(self.filled),
        )
        self._keep_alive: list[object] = [step_limit, statistics, injected, previous_update, norms]  # C holds their addresses
        self._add_conditions(struct, rules, loop.engine.model)
        self.address = ctypes.addressof(struct)

    def _add_conditions(self, struct: LoopRowsStruct, rules: "LoopExitRules", model: LoopedGPT) -> None:
        """The conditions of the rows' rules."""
        if all(entry.rule is None for entry in rules.by_rule):
            return
        conditions = (ConditionStruct * len(rules.by_rule))()
        for i, entry in enumerate(rules.by_rule):
            if entry.rule_state is not None and entry.condition is not None:
                rule_state, n_rows = entry.rule_state, len(entry.row_indices)
                remembered = remembered_buffer(entry.condition, rule_state.remembered, n_rows, model.config.vocab_size)
                rule_state.remembered = remembered
                conditions[i] = condition_struct(entry.condition, rule_state.rule, remembered)
        struct.conditions = ctypes.addressof(conditions)
        self._keep_alive.append(conditions)
        if any(entry.condition is not None and entry.condition.statistic.reads_logits for entry in rules.by_rule):
            norm = cast("NativeNorm | None", model.ln_f) if model.config.final_norm else None
            head = cast("NativeLinear", model.lm_head)
            gain, eps = (None, 0.0) if norm is None else (norm.gain_address, norm.eps)
            lens = OutputHead(model.config.vocab_size, gain, head.address, eps)
            size = min(self.n, LENS_ROWS) * (self.stage.width + head.out_features)
            logits = empty_floats(size)
            struct.lens, struct.lens_scratch = ctypes.addressof(lens), pointer(logits, size)
            self._keep_alive += [lens, logits]
        if len(conditions) > 1:
            condition_index, index_in_condition = (ctypes.c_int32 * self.n)(), (ctypes.c_int32 * self.n)()
            for i, entry in enumerate(rules.by_rule):
                for j, row in enumerate(entry.row_indices):
                    condition_index[row], index_in_condition[row] = -1 if entry.rule is None else i, j
            struct.condition_index, struct.index_in_condition = ctypes.addressof(condition_index), ctypes.addressof(index_in_condition)
            self._keep_alive += [condition_index, index_in_condition]

    @staticmethod
    def applies(loop: "LoopRows") -> bool:
        """Whether the steps of these rows can be taken in C."""
        return len(loop) <= MAX_FUSED_ROWS and not loop.engine.config.noise_in_steps and loop.rules.conditions() is not None

    def _output_and_compaction_memory(self) -> Tensor:
        """A new output (N, C) for rows that exit one after the other in one call, and the memory by which C removes them.

        The rows that stay are made contiguous there: `kept_inputs` holds their injected inputs, cos and sin, `kept_rows` their parts,
        positions and indices."""
        n, C, D = self.n, self.stage.width, self.stage.head_dim
        if self._kept is None:
            self._kept = kept_inputs, kept_rows = empty_floats(n * (C + 2 * D)), (ctypes.c_int64 * (3 * n))()
            self.struct.kept_inputs, self.struct.kept_rows = pointer(kept_inputs, n * (C + 2 * D)), _address(kept_rows)
            self.struct.rope_size = D
        result = torch.empty_like(self.states[0])
        self.struct.result = pointer(result, n * C)
        return result

    def run(self, loop: "LoopRows", max_steps: int, interrupt: Interrupt, steps_after_exit: int) -> LoopSteps:
        """See `StageKernels.iterate`. Rows that exit before others are removed in C if `steps_after_exit` is above 0 and every part has one
        row; otherwise the call ends when a row exits."""
        stage, struct, parts, (buffer_a, buffer_b) = self.stage, self.struct, self.rows.parts, self.states
        x, size = loop.x, self.n * self.stage.width
        if x is buffer_a:  # x may be the output buffer of the previous call: write the other buffer first
            buffer_a, buffer_b = buffer_b, buffer_a
        struct.x, struct.buffer_a, struct.buffer_b = pointer(x, size), pointer(buffer_a, size), pointer(buffer_b, size)
        struct.scratch = scratch(self.n * stage.scratch_per_row + score_floats(self.threads, self.row_kernels.longest))
        for i, part in enumerate(parts):
            self.loop_step[i], self.filled[i] = part.loop_step, loop.filled_steps[i]
        result = self._output_and_compaction_memory() if steps_after_exit and self.n > 1 and self.rows.one_row_per_part else None
        if result is None:
            struct.result = None
        taken = stage.library.iterate(
            self.threads, stage.address, self.row_kernels.row_set_address, self.address, max_steps, min(steps_after_exit, max_steps),
            ctypes.addressof(self.first_exit), interrupt.address,
        )  # fmt: skip
        for part, loop_step in zip(parts, self.loop_step, strict=True):
            part.loop_step = loop_step
        if self.streaks is not None:
            loop.rules.set_streaks(self.streaks[:])
        exits, return_previous = self._exits(loop.rules)
        if result is not None:
            return LoopSteps(taken, result, result, exits, False, self.first_exit.value, deeper_levels_filled=True)
        before, after = (buffer_b, buffer_a) if taken % 2 else (buffer_a, buffer_b)
        deeper_levels_filled = self.rows.one_row_per_part
        return LoopSteps(taken, x if taken == 1 else before, after, exits, return_previous, self.first_exit.value, deeper_levels_filled)

    def _exits(self, rules: "LoopExitRules") -> tuple[Tensor | bool, Tensor | bool]:
        """Which rows exit, and which of them return the state before the newest step."""
        by_rule = rules.by_rule
        if self.n == 1:
            rule = by_rule[0].rule
            return bool(self.exits[0]), bool(self.fired[0]) and rule is not None and rule.keep == "previous"
        if 1 not in bytes(self.exits):
            return False, False
        exits, previous = (
            torch.frombuffer(self.exits, dtype=torch.bool),
            [r for r in by_rule if r.rule is not None and r.rule.keep == "previous"],
        )
        if not previous:
            return exits, False
        fired = torch.frombuffer(self.fired, dtype=torch.bool)
        if len(previous) < len(by_rule):
            mask = torch.zeros_like(fired)
            for entry in previous:
                mask[entry.row_indices] = True
            fired = fired & mask
        return exits, fired


def remembered_buffer(condition: Condition, remembered: Tensor, n: int, vocab_size: int) -> Tensor:
    """`RuleState.remembered` of n rows as a buffer that C updates, (n, size) fp32; all NaN if `remembered` is still a scalar."""
    size = {"nothing": 0, "number": 1, "distribution": vocab_size}[condition.statistic.remembers]
    if not size or remembered.dim():
        return remembered
    return torch.full((n, size), math.nan, dtype=torch.float32, device="cpu")


def condition_struct(condition: Condition, rule: Rule | None, remembered: Tensor) -> ConditionStruct:
    """The C struct of a condition. `remembered` is what its rule has kept of the rows since their previous step; C overwrites it. The
    caller must keep `condition` and `remembered` alive while C uses them."""
    remembered_ptr, size = (pointer(remembered, remembered.numel()), remembered.shape[1]) if remembered.dim() else (None, 0)
    parameters = condition.parameter_array.buffer_info()[0] if condition.parameters else None
    hits, min_steps, previous = (1, 1, False) if rule is None else (rule.hits, rule.min_steps, rule.keep == "previous")
    return ConditionStruct(
        condition.tau, parameters, remembered_ptr, size, hits, min_steps, condition.statistic.code, condition.above, previous
    )


class NativeStatistic:
    """The statistic of a condition, for steps that are taken one by one and not in a FusedLoop; it has the same bits there. Implements
    `exits.rule.StatisticFunction`."""

    def __init__(self, condition: Condition, library: Library) -> None:
        self.condition, self.library = condition, library

    def __call__(self, view: StepView) -> tuple[Tensor, Tensor]:
        before, after, k = view.before.contiguous(), view.after.contiguous(), view.k
        n, C = after.shape
        steps = (ctypes.c_int64 * n)(*([k] * n if isinstance(k, int) else k.tolist()))
        norms = None
        if view.norms is not None:
            as_doubles = torch.stack([torch.as_tensor(norm, dtype=torch.float64).expand(n) for norm in view.norms], dim=1)
            norms = as_doubles.float().contiguous()
        logits = view.logits.contiguous() if self.condition.statistic.reads_logits else None
        V = 0 if logits is None else logits.shape[1]
        remembered = remembered_buffer(self.condition, view.last, n, V)
        condition, values = condition_struct(self.condition, None, remembered), torch.empty(n, dtype=torch.float64, device="cpu")
        self.library.statistics(
            n, C, V, ctypes.addressof(condition), pointer(before, n * C), pointer(after, n * C),
            None if norms is None else pointer(norms, n * NORMS), steps, None if logits is None else pointer(logits, n * V),
            pointer(values, n, torch.float64),
        )  # fmt: skip
        return values, remembered


def _address(array: "ctypes.Array[Any] | None") -> int | None:
    return None if array is None else ctypes.addressof(array)
