"""The engine: rows on their way through the network, each leaving every loop group on its own.

    engine = Engine(model, loops=30, exit=exits.Acceleration(1e-2), kv="exact")
    cache = engine.open(capacity=512)
    x, steps = engine.run([(0, cache, [5, 7, 9])])    # three tokens of sequence 0, in parallel
    x, steps = engine.run([(0, cache, [2])])          # one more, through the cache

`Loop` is the part that a scheduler drives by itself: rows are admitted to a group, `advance` applies the group's map once to
all that are there, whatever their step, and hands out the ones that leave.

Shapes: N rows, C width, G group.
"""

import ctypes
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.engine.cache import Cache, parse_kv
from twoscale.engine.native import pointer, threads_to_use
from twoscale.engine.quick import PARALLEL, Kernels, library_of, quicken
from twoscale.engine.rows import Rows, part_of
from twoscale.exits import Exit, Gate, RuleState, plan
from twoscale.exits.rule import Numbers
from twoscale.model import LoopedGPT, LoopGroup, StateNoise
from twoscale.model.layers import Rope
from twoscale.model.start import start_state

Feed = tuple[int, Cache, Sequence[int]]  # a sequence's number, its cache, and its next tokens

Call = tuple[Rows, int]  # rows that a call of the engine took, and through how many layers

# A table of start states for all positions is kept where it is no larger than this, in entries.
TABLE = 1 << 24


@dataclass(frozen=True)
class Left:
    """Rows that have left a group."""

    places: Tensor
    """int64 (n,): the numbers that they were admitted under."""
    x: Tensor
    """(n, C): the group's output."""
    steps: Tensor
    """int64 (n,): applications that they took."""


class Engine:
    """A model, an exit rule for each group, and how keys and values are kept."""

    def __init__(
        self,
        model: LoopedGPT,
        *,
        loops: int | Sequence[int] | None = None,
        exit: Exit | None = None,
        kv: str = "exact",
        seed: int = 0,
        kernels: Kernels = "auto",
        decoder: LoopedGPT | None = None,
    ) -> None:
        """`decoder` is a copy of the model by `quicken`, for a caller who makes many engines; without it all weights are read once,
        to see whether the copy at hand is still right. An engine decodes with the weights as they were when it was made."""
        self.config = model.config
        if isinstance(exit, str) and exit == "auto":
            exit, loops = _calibrated(model, loops)
        self.loops = self.config.loops_for(loops)
        self.rules = plan(exit, self.config.n_groups)
        if any(isinstance(rule, Gate) for rule in self.rules) and not self.config.exit_gate:
            raise UserError("exits.Gate needs a model with a learned gate (exit_gate), and this one has none")
        if any(isinstance(rule, Gate) for rule in self.rules[:-1]):
            raise UserError(f"exits.Gate: only the last group has a gate, use {{{self.config.n_groups - 1}: Gate(...)}}")
        parse_kv(kv)
        self.kv, self.noise = kv, StateNoise(seed)
        autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        self.model = model if autocast else decoder or quicken(model, kernels)
        self.library = library_of(self.model)
        self.device = model.wte.weight.device
        self._like = torch.empty(
            0, dtype=torch.get_autocast_dtype(self.device.type) if autocast else model.wte.weight.dtype, device=self.device
        )
        self.work = [0] * self.config.n_groups
        """Applications of each group's map to one token, so far."""
        self.first_layers = [0]
        for layers, _ in self.config.stages:
            self.first_layers.append(self.first_layers[-1] + len(layers))
        self._tables = _tables_of(model, seed, self._like)
        self._numbers = (ctypes.c_float * 4)()
        self._metered: tuple[Tensor | None, int, Tensor | None, int] = (None, 0, None, 0)
        self.nothing = torch.empty(0, dtype=torch.float32, device=self.device)
        self.no_rows = Rows([], torch.empty(3, 0, dtype=torch.int64, device=self.device))

    def meter(self, before: Tensor, after: Tensor, last: Tensor) -> Sequence[Numbers]:
        """What rules on steps compare, in one C call: see `exits.rule.Meter`."""
        n, C = after.shape
        numbers = self._numbers if n == 1 else (ctypes.c_float * (4 * n))()
        threads = 1 if n * C < PARALLEL else threads_to_use()
        # One step's result is the next one's start, and `last` is updated in place: what was checked a step ago is not checked again.
        known, at = self._metered, pointer(after, n * C)
        at_before = known[1] if before is known[0] else pointer(before, n * C)
        at_last = known[3] if last is known[2] else pointer(last, n * C)
        self._metered = after, at, last, at_last
        self.library.measure(threads, n, C, at_before, at, at_last, numbers)  # type: ignore[union-attr]
        # As doubles, which a single token's plain floats are: a token must not pass or fail by who is beside it.
        return numbers if n == 1 else torch.frombuffer(numbers, dtype=torch.float32).view(n, 4).double().unbind(dim=1)  # type: ignore[return-value]

    @property
    def token_by_token(self) -> bool:
        """Whether a rule wants the tokens of a sequence one after the other."""
        return any(rule is not None and rule.token_by_token for rule in self.rules)

    def open(self, capacity: int) -> Cache:
        """An empty cache for one sequence."""
        return Cache(self.config, min(capacity, self.config.block_size), self.loops, self.kv, self._like, self.library)

    @torch.inference_mode()
    def run(
        self, feeds: Sequence[Feed], start: Sequence[Tensor] | None = None, stages: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """The next tokens of several sequences, through all stages: states before the closing norm (N, C), and steps (N, G).

        Rows are stacked in the order of `feeds`. `start` gives the groups' initial states, one (N, C) each. Where a rule wants the tokens
        of a sequence one after the other they go through in as many passes. The embedding and the state after each stage, (N, C) each,
        are appended to `stages` where a list is given.
        """
        if self.token_by_token and any(len(new) > 1 for _, _, new in feeds):
            return self._one_by_one(feeds, start, stages)
        calls = self.calls(feeds, start, stages)
        while True:
            try:
                next(calls)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]

    def calls(
        self, feeds: Sequence[Feed], start: Sequence[Tensor] | None = None, stages: list[Tensor] | None = None
    ) -> Generator[Call, None, tuple[Tensor, Tensor]]:
        """What `run` does, to be iterated in inference mode: yields after every plain stage and every step of a loop, and may be left there
        while others use the model. Tokens of a sequence go through together."""
        parts = []
        for sequence, cache, new in feeds:
            if cache.length + len(new) > cache.capacity:
                raise UserError(f"a sequence of {cache.length + len(new)} tokens does not fit the context of {cache.capacity} tokens")
            parts.append(part_of(sequence, cache, cache.length, len(new)))
            cache.length += len(new)
        ids = [t for _, _, new in feeds for t in new]
        places = [p for part in parts for p in range(part.end - part.count, part.end)]
        rows = Rows(parts, torch.tensor([places, ids, range(len(ids))], device=self.device), self.library)
        rope = self.model.rope(rows.positions)
        x = self.model.embed(rows.tokens, rows.positions)
        steps = torch.empty(len(rows), self.config.n_groups, dtype=torch.int64, device=self.device)
        if stages is not None:
            stages.append(x)
        for i, stage in enumerate(self.model.stages):
            if isinstance(stage, LoopGroup):
                loop = Loop(self, i)
                loop.admit(rows, x, None if start is None else start[stage.index])
                x, steps[:, stage.index] = yield from self._finish(loop, x)
            else:
                x = self.plain(i, x, rope, rows)
                yield rows, len(stage.blocks)  # type: ignore[arg-type]
            if stages is not None:
                stages.append(x)
        return x, steps

    def _one_by_one(self, feeds: Sequence[Feed], start: Sequence[Tensor] | None, stages: list[Tensor] | None) -> tuple[Tensor, Tensor]:
        firsts = [0, *accumulate(len(new) for _, _, new in feeds)]
        x: Tensor | None = None
        steps = torch.empty(firsts[-1], self.config.n_groups, dtype=torch.int64, device=self.device)
        for t in range(max(len(new) for _, _, new in feeds)):
            live = [i for i, (_, _, new) in enumerate(feeds) if t < len(new)]
            rows = torch.tensor([firsts[i] + t for i in live], device=self.device)
            given = None if start is None else [states[rows] for states in start]
            seen: list[Tensor] | None = None if stages is None else []
            found, taken = self.run([(*feeds[i][:2], feeds[i][2][t : t + 1]) for i in live], given, seen)
            x = found.new_empty(firsts[-1], self.config.n_embd) if x is None else x
            x[rows], steps[rows] = found, taken
            if stages is not None and seen is not None:
                stages += [] if stages else [torch.empty_like(x) for _ in seen]
                for whole, part in zip(stages, seen, strict=True):
                    whole[rows] = part
        assert x is not None
        return x, steps

    def plain(self, stage: int, x: Tensor, rope: Rope | None, rows: Rows) -> Tensor:
        """The layers of a plain stage on rows (N, C)."""
        blocks = self.model.stages[stage].blocks
        attend = rows.attention(self.first_layers[stage], len(blocks))  # type: ignore[arg-type]
        x = x[None]
        for i, block in enumerate(blocks):  # type: ignore[arg-type]
            x = block(x, rope, attend(i))
        return x[0]

    def _finish(self, loop: "Loop", x: Tensor) -> Generator[Call, None, tuple[Tensor, Tensor]]:
        """Advance until all rows have left: their states and steps, in the order in which they were admitted."""
        out = torch.empty_like(x)
        steps = torch.empty(len(x), dtype=torch.int64, device=x.device)
        while len(loop):
            rows, left = loop.rows, loop.advance()
            yield rows, len(loop.layers)
            if left is None:
                continue
            if len(left.places) == len(x):
                return left.x, left.steps
            out.index_copy_(0, left.places, left.x)
            steps.index_copy_(0, left.places, left.steps)
        return out, steps

    def start(self, group: int, e: Tensor, positions: Tensor) -> Tensor:
        """x^(0) of rows whose input is e (N, C)."""
        c = self.config
        if c.start != "noise" or c.block_size * c.n_embd > TABLE:
            return start_state(c, group, e, positions, self.noise)
        if group not in self._tables:
            every = torch.arange(c.block_size, device=e.device)
            self._tables[group] = self.noise(group, every, c.n_embd).to(self._like)
        return self._tables[group][positions]


def _calibrated(model: LoopedGPT, loops: int | Sequence[int] | None) -> tuple[Exit, int | Sequence[int]]:
    """What exit="auto" stands for: the rules of the model's calibration, and its loops where the caller gives none."""
    if model.calibration is None:
        raise UserError('this model was not calibrated, so exit="auto" has no rule: run `twoscale calibrate RUN`, then twoscale.load(RUN)')
    rules, most = model.calibration()
    return rules, most if loops is None else loops


_TABLES: WeakKeyDictionary[LoopedGPT, tuple[object, dict[int, Tensor]]] = WeakKeyDictionary()
_TABLES_LOCK = threading.Lock()


def _tables_of(model: LoopedGPT, seed: int, like: Tensor) -> dict[int, Tensor]:
    """Start states of all positions, by group: the engines of a model share them, as long as they have the same seed."""
    key = (seed, like.dtype, like.device)
    with _TABLES_LOCK:
        held = _TABLES.get(model)
        if held is None or held[0] != key:
            held = _TABLES[model] = (key, {})
        return held[1]


class Loop:
    """Rows inside one group. Every call of `advance` applies the map once to all of them; rows may join in between."""

    def __init__(self, engine: Engine, stage: int) -> None:
        group = engine.model.stages[stage]
        assert isinstance(group, LoopGroup)
        self.engine, self.group, self.most = engine, group, engine.loops[group.index]
        self.layers = range(engine.first_layers[stage], engine.first_layers[stage + 1])
        self.rule_state: RuleState | None = None
        self._empty()

    def __len__(self) -> int:
        return len(self.rows)

    def _empty(self) -> None:
        """Nobody is inside, and nothing is held for anybody."""
        self.rows, self.x, self.injected = self.engine.no_rows, self.engine.nothing, self.engine.nothing
        self.rope: Rope | None = None
        self.attention = self.rows.attention(0, 0)

    def admit(self, rows: Rows, e: Tensor, start: Tensor | None = None) -> None:
        """Rows enter the group with the input e (N, C); those that are inside already stay at their steps."""
        for part in rows.parts:
            part.k = 0
        x = (self.engine.start(self.group.index, e, rows.positions) if start is None else start.to(e)).contiguous()
        injected = self.group.inject(e)
        if len(self):
            if self.rule_state is not None:
                self.rule_state.admit(len(self), len(rows))
            rows, x = self.rows.join(rows), torch.cat((self.x, x))
            injected = None if injected is None else torch.cat((self.injected, injected))
        elif (rule := self.engine.rules[self.group.index]) is not None:
            self.rule_state = RuleState(rule, self.engine.meter if self.engine.library is not None else None)
        self._hold(rows, x, injected)

    def _hold(self, rows: Rows, x: Tensor, injected: Tensor | None) -> None:
        self.rows, self.x = rows, x
        self.injected = injected  # type: ignore[assignment]
        self.rope = self.engine.model.rope(rows.positions)
        self.attention = rows.attention(self.layers.start, len(self.layers))

    def keep(self, who: Sequence[bool]) -> None:
        """Only these rows stay; the others are gone without a trace."""
        if all(who):
            return
        stay = torch.tensor([i for i, kept in enumerate(who) if kept], dtype=torch.int64, device=self.engine.device)
        if len(stay):
            self._stay(stay)
        else:
            self._empty()

    def _stay(self, stay: Tensor) -> None:
        """Only the rows of `stay`, ascending int64."""
        if self.rule_state is not None:
            self.rule_state.take(stay)
        injected = None if self.injected is None else self.injected.index_select(0, stay)
        self._hold(self.rows.take(stay), self.x.index_select(0, stay), injected)

    def advance(self) -> Left | None:
        """Apply the map once to every row; returns those that have left, if any."""
        rows, before, g = self.rows, self.x, self.group.index
        for part in rows.parts:
            part.k += 1
        x = before if self.engine.config.noise == "start" else self.group.stir(before, self._fresh())
        injected = None if self.injected is None else self.injected[None]
        after = self.group.step(x[None], injected, self.rope, self.attention)[0]
        self.engine.work[g] += rows.n
        passed = None if self.rule_state is None else self.rule_state.update(g, rows, before, after, self._read)
        return self._release_one(before, after, passed) if rows.n == 1 else self._release(before, after, passed)

    def _release_one(self, before: Tensor, after: Tensor, passed: Tensor | bool | None) -> Left | None:
        """The same as `_release` where there is only one row, with nothing to select."""
        rows, part = self.rows, self.rows.parts[0]
        if not passed and part.k < self.most:
            self.x = after
            return None
        for layer in self.layers:
            part.cache.layers[layer].settle(part.k, part.at)
        kept = before if passed and self._keeps_previous else after
        self._empty()
        return Left(rows.places, self.group.leave(kept), torch.tensor([part.k], dtype=torch.int64, device=after.device))

    def _release(self, before: Tensor, after: Tensor, passed: Tensor | bool | None) -> Left | None:
        """Let go the rows that have passed the rule or taken all their steps."""
        rows = self.rows
        if isinstance(passed, bool):
            passed = torch.full((rows.n,), passed, device=after.device)
        left = passed
        if any(part.k >= self.most for part in rows.parts):
            limit = torch.tensor([part.k >= self.most for part in rows.parts for _ in range(part.count)], device=after.device)
            left = limit if left is None else left | limit
        if left is None or not left.any():
            self.x = after
            return None
        if passed is not None and self._keeps_previous:
            after = torch.where(passed[:, None], before, after)
        gone = left.nonzero().flatten()
        rows.leave(self.layers, gone)
        result = Left(rows.places[gone], self.group.leave(after.index_select(0, gone)), rows.steps_of(gone))
        if len(gone) == rows.n:
            self._empty()
            return result
        self.x = after
        self._stay((~left).nonzero().flatten())
        return result

    @property
    def _keeps_previous(self) -> bool:
        return self.rule_state is not None and self.rule_state.rule.keep == "previous"

    def _fresh(self) -> Tensor:
        """Noise for this step of every row (noise="every_step")."""
        width, rows = self.engine.config.n_embd, self.rows
        each, first = [], 0
        for part in rows.parts:
            each.append(self.engine.noise(self.group.index, rows.positions[first : first + part.count], width, part.k))
            first += part.count
        return torch.cat(each)

    def _read(self, x: Tensor, how: Literal["lens", "coda", "gate"]) -> Tensor:
        """What a rule may ask of states x (N, C): logits (N, V), or the gate's probability (N,)."""
        model = self.engine.model
        if how == "gate":
            assert self.group.gate is not None
            return self.group.gate(x).sigmoid().squeeze(-1)
        last = len(model.stages) - 1
        if how == "coda" and not isinstance(model.stages[last], LoopGroup):
            # The keys and values that this writes are provisional: the next look and the token itself overwrite them.
            assert all(part.count == 1 for part in self.rows.parts), "reading through the coda goes token by token"
            x = self.engine.plain(last, self.group.leave(x), self.rope, self.rows)
        return model.head(x)
