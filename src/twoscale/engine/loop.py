"""The engine: rows on their way through the network, each leaving every loop group on its own.

    engine = Engine(model, loops=30, exit=exits.Acceleration(1e-2), kv="exact")
    cache = engine.open(capacity=512)
    x, steps = engine.run([(0, cache, [5, 7, 9])])    # three tokens of sequence 0, in parallel
    x, steps = engine.run([(0, cache, [2])])          # one more, through the cache

`Loop` is the part that a scheduler drives by itself: rows are admitted to a group, `advance` applies the group's map once to
all that are there, whatever their step, and hands out the ones that leave.

Shapes: N rows, C width, G group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.engine.cache import Cache, parse_kv
from twoscale.engine.quick import Kernels, quicken
from twoscale.engine.rows import Rows, part_of
from twoscale.exits import Exit, Gate, Look, Watch, plan
from twoscale.model import LoopedGPT, LoopGroup, StateNoise
from twoscale.model.layers import Rope
from twoscale.model.start import start_state

Feed = tuple[int, Cache, Sequence[int]]  # a sequence's number, its cache, and its next tokens

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
    ) -> None:
        self.config = model.config
        self.loops = self.config.loops_for(loops)
        self.rules = plan(exit, self.config.n_groups)
        if any(isinstance(rule, Gate) for rule in self.rules) and not self.config.exit_gate:
            raise UserError("exits.Gate needs a model with a learned gate (exit_gate), and this one has none")
        parse_kv(kv)
        self.kv, self.noise = kv, StateNoise(seed)
        autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
        self.model = model if autocast else quicken(model, kernels)
        self.device = model.wte.weight.device
        self._like = torch.empty(
            0, dtype=torch.get_autocast_dtype(self.device.type) if autocast else model.wte.weight.dtype, device=self.device
        )
        self.work = [0] * self.config.n_groups
        """Applications of each group's map to one token, so far."""
        self.first_layers = [0]
        for layers, _ in self.config.stages:
            self.first_layers.append(self.first_layers[-1] + len(layers))
        self._tables: dict[int, Tensor] = {}

    @property
    def token_by_token(self) -> bool:
        """Whether a rule wants the tokens of a sequence one after the other."""
        return any(rule is not None and rule.token_by_token for rule in self.rules)

    def open(self, capacity: int) -> Cache:
        """An empty cache for one sequence."""
        return Cache(self.config, min(capacity, self.config.block_size), self.loops, self.kv, self._like)

    @torch.inference_mode()
    def run(self, feeds: Sequence[Feed], start: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The next tokens of several sequences, through all stages: states before the closing norm (N, C), and steps (N, G).

        Rows are stacked in the order of `feeds`. `start` gives the groups' initial states, one (N, C) each.
        """
        parts = []
        for sequence, cache, new in feeds:
            if cache.length + len(new) > cache.capacity:
                raise UserError(f"a sequence of {cache.length + len(new)} tokens does not fit the context of {cache.capacity} tokens")
            parts.append(part_of(sequence, cache, cache.length, len(new)))
            cache.length += len(new)
        tokens = torch.tensor([t for _, _, new in feeds for t in new], device=self.device)
        positions = torch.tensor([p for part in parts for p in range(part.end - part.count, part.end)], device=self.device)
        rows = Rows(parts, positions, tokens, torch.arange(len(tokens), device=self.device))
        rope = self.model.rope(positions)
        x = self.model.embed(tokens, positions)
        steps = torch.empty(len(rows), self.config.n_groups, dtype=torch.int64, device=self.device)
        for i, stage in enumerate(self.model.stages):
            if isinstance(stage, LoopGroup):
                loop = Loop(self, i)
                loop.admit(rows, x, None if start is None else start[stage.index])
                x, steps[:, stage.index] = self._finish(loop, x)
            else:
                x = self.plain(i, x, rope, rows)
        return x, steps

    def plain(self, stage: int, x: Tensor, rope: Rope | None, rows: Rows) -> Tensor:
        """The layers of a plain stage on rows (N, C)."""
        blocks = self.model.stages[stage].blocks
        attend = rows.attention(self.first_layers[stage], len(blocks))  # type: ignore[arg-type]
        x = x[None]
        for i, block in enumerate(blocks):  # type: ignore[arg-type]
            x = block(x, rope, attend(i))
        return x[0]

    def _finish(self, loop: "Loop", x: Tensor) -> tuple[Tensor, Tensor]:
        """Advance until all rows have left: their states and steps, in the order in which they were admitted."""
        out = torch.empty_like(x)
        steps = torch.empty(len(x), dtype=torch.int64, device=x.device)
        while len(loop):
            left = loop.advance()
            if left is None:
                continue
            if len(left.places) == len(x):
                return left.x, left.steps
            out[left.places], steps[left.places] = left.x, left.steps
        return out, steps

    def start(self, group: int, e: Tensor, positions: Tensor) -> Tensor:
        """x^(0) of rows whose input is e (N, C)."""
        c = self.config
        if c.start != "noise" or c.block_size * c.n_embd > TABLE:
            return start_state(c, group, e, positions, self.noise)
        if group not in self._tables:
            every = torch.arange(c.block_size, device=e.device)
            self._tables[group] = self.noise(group, every, c.n_embd).to(e.dtype)
        return self._tables[group][positions]


class Loop:
    """Rows inside one group. Every call of `advance` applies the map once to all of them; rows may join in between."""

    def __init__(self, engine: Engine, stage: int) -> None:
        group = engine.model.stages[stage]
        assert isinstance(group, LoopGroup)
        self.engine, self.group, self.most = engine, group, engine.loops[group.index]
        self.layers = range(engine.first_layers[stage], engine.first_layers[stage + 1])
        rule = engine.rules[group.index]
        self.watch = None if rule is None else Watch(rule)
        nothing = torch.empty(0, dtype=torch.int64, device=engine.device)
        self.rows = Rows([], nothing, nothing, nothing)
        self.x = self.injected = torch.empty(0, device=engine.device)

    def __len__(self) -> int:
        return len(self.rows)

    def admit(self, rows: Rows, e: Tensor, start: Tensor | None = None) -> None:
        """Rows enter the group with the input e (N, C); those that are inside already stay at their steps."""
        for part in rows.parts:
            part.k = 0
        x = self.engine.start(self.group.index, e, rows.positions) if start is None else start.to(e)
        injected = self.group.inject(e)
        if len(self):
            if self.watch is not None:
                self.watch.admit(len(self), len(rows))
            rows, x = self.rows.join(rows), torch.cat((self.x, x))
            injected = None if injected is None else torch.cat((self.injected, injected))
        self._hold(rows, x, injected)

    def _hold(self, rows: Rows, x: Tensor, injected: Tensor | None) -> None:
        self.rows, self.x = rows, x
        self.injected = injected  # type: ignore[assignment]
        self.rope = self.engine.model.rope(rows.positions)
        self.attention = rows.attention(self.layers.start, len(self.layers))

    def advance(self) -> Left | None:
        """Apply the map once to every row; returns those that have left, if any."""
        rows, before, g = self.rows, self.x, self.group.index
        for part in rows.parts:
            part.k += 1
        x = before if self.engine.config.noise == "start" else self.group.stir(before, self._fresh())
        injected = None if self.injected is None else self.injected[None]
        after = self.group.step(x[None], injected, self.rope, self.attention)[0]
        self.engine.work[g] += len(rows)
        passed = None if self.watch is None else self.watch(Look(g, rows, before, after, self.watch.last, self._read))
        return self._release(before, after, passed)

    def _release(self, before: Tensor, after: Tensor, passed: Tensor | None) -> Left | None:
        """Let go the rows that have passed the rule or taken all their steps."""
        rows = self.rows
        spent = [part.k >= self.most for part in rows.parts]
        left = passed
        if any(spent):
            limit = rows.k >= self.most
            left = limit if left is None else left | limit
        if left is None or not left.any():
            self.x = after
            return None
        if self.watch is not None and self.watch.rule.keep == "printed":
            assert passed is not None
            after = torch.where(passed[:, None], before, after)
        gone = left.nonzero().flatten()
        rows.leave(self.layers, gone)
        result = Left(rows.places[gone], self.group.leave(after[gone]), rows.k[gone])
        stay = (~left).nonzero().flatten()
        if self.watch is not None:
            self.watch.take(stay)
        self._hold(rows.take(stay), after[stay], None if self.injected is None else self.injected[stay])
        return result

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
