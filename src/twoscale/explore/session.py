"""What the explorer computes, without any page: two texts in a race, and one token looked at closely. Tasks: see `answers`.

Shapes: G group, K loop step, C width, V vocabulary.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from twoscale import exits
from twoscale.config import UserError
from twoscale.data import Pieces, Tokenizer
from twoscale.engine import Request, SamplingParams, loop_params, stream
from twoscale.geometry import pca, steps as step_statistics
from twoscale.geometry.record import group_names
from twoscale.model import LoopedGPT
from twoscale.tasks.task import Task
from twoscale.tracing import trace

MAX_TOKENS = 512  # prompt and answer: bounds what one visitor can make us hold
MAX_LOOPS = 64
TOP = 5

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Lane:
    """One of the two texts."""

    prompt: list[int]
    ids: list[int]
    """Prompt and answer."""
    pieces: list[str]
    """The text that each of them adds."""
    steps: list[tuple[int, ...] | None]
    """For each token the steps, in each group, of the pass that chose it; None for the first one, which nothing chose."""
    seconds: float = 0.0
    """Spent so far, the prompt included."""
    first: float = 0.0
    """Spent until the first new token."""
    done: bool = False

    @property
    def new(self) -> int:
        return len(self.ids) - len(self.prompt)

    @property
    def ms(self) -> float:
        """Milliseconds a token, after the first."""
        return 1e3 * (self.seconds - self.first) / (self.new - 1) if self.new > 1 else 1e3 * self.seconds

    def mean_steps(self, layers: list[int]) -> float:
        """Mean steps of the new tokens, each group counted by its layers."""
        taken = [s for s in self.steps[len(self.prompt) :] if s is not None]
        return sum(k * n for s in taken for k, n in zip(s, layers, strict=True)) / (len(taken) * sum(layers)) if taken else 0.0


@dataclass(frozen=True)
class Race:
    """The text with exits and the full run, as far as they have come."""

    quick: Lane
    full: Lane
    loops: tuple[int, ...]
    layers: list[int] = field(default_factory=list)
    """Layers of each group."""
    mean_loops: int = 1
    """The model's default depth."""

    @property
    def first_difference(self) -> int | None:
        """The first token in which the two differ, as far as both are written."""
        return next((i for i, (a, b) in enumerate(zip(self.quick.ids, self.full.ids, strict=False)) if a != b), None)


@dataclass(frozen=True)
class Said:
    """What the model would have said after one loop step: the likeliest tokens."""

    ids: list[int]
    tokens: list[str]
    shares: list[float]
    chosen: float
    """The share of the token that was chosen in the end."""


@dataclass(frozen=True)
class Inspection:
    """The pass that chose one token."""

    id: int
    token: str
    context: str
    groups: list[str]
    taken: tuple[int, ...]
    """Steps that were taken, in each group."""
    path: Tensor
    """(G, K + 1, 3): the states of all groups in their first three principal components."""
    explained: list[float]
    norms: Tensor
    """(G, K)"""
    cosines: Tensor
    """(G, K - 1)"""
    accelerations: Tensor
    """(G, K - 1)"""
    said: list[list[Said]]
    """[group][step - 1]"""


class Session:
    """One model, opened for visitors."""

    def __init__(
        self,
        model: LoopedGPT,
        tokenizer: Tokenizer,
        name: str,
        calibrated: tuple[Mapping[int, exits.Rule], int] | None = None,
        task: Task | None = None,
    ) -> None:
        if not model.config.n_groups:
            raise UserError(f"{name} has no loop groups: there is nothing to explore")
        if task is not None:
            _check_task(model, task, name)
        self.model, self.tokenizer, self.name, self.calibrated, self.task = model, tokenizer, name, calibrated, task
        self.groups = group_names(model.config.groups)
        self.layers = [len(g) for g in model.config.groups]
        self._thread = ThreadPoolExecutor(1, "twoscale explorer")

    def compute(self, what: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something in the one thread that computes, whoever asks: a page serves every click from another one, and each would
        get OpenMP helpers of its own."""
        return self._thread.submit(what, *args, **kwargs).result()

    def warm_up(self) -> None:
        """Pack the weights and build what is built on first use, before the first visitor waits for it."""
        self.compute(self._warm_up)

    def _warm_up(self) -> None:
        for exit in (exits.Acceleration(1.0), None):
            params = loop_params(self.model, exit=exit, loops=4)
            for _ in stream(self.model, [self.tokenizer.eot], SamplingParams(max_new_tokens=2), params):
                pass

    @property
    def room(self) -> int:
        """Tokens of prompt and answer together."""
        return min(MAX_TOKENS, self.model.config.block_size)

    def rules(self) -> list[str]:
        """Names of the rules that this model can use with one threshold."""
        kinds = [name for name, kind in exits.NAMES.items() if "tau" in kind.__dataclass_fields__ and kind is not exits.Learned]
        gate = ["gate"] if self.model.config.exit_gate else []
        return ["calibrated"] * (self.calibrated is not None) + kinds + gate

    def rule(self, name: str, value: float) -> exits.Exit:
        """The rule that a visitor has chosen."""
        if name == "calibrated":
            if self.calibrated is None:
                raise UserError("this model was not calibrated")
            return dict(self.calibrated[0])
        return exits.parse(f"{name}:{value!r}")

    def prompt(self, text: str, new: int) -> list[int]:
        """Tokens of a prompt that leaves room for the answer."""
        ids = self.tokenizer.encode(text)
        if not ids:
            raise UserError("the prompt is empty: type something")
        if len(ids) + new > self.room:
            raise UserError(f"the prompt has {len(ids)} tokens; with {new} new ones at most {self.room - new} fit: shorten it")
        return ids

    def race(self, text: str, exit: exits.Exit, loops: int, *, kv: str, new: int, temperature: float, seed: int) -> Iterator[Race]:
        """Write both texts, always going on with the one that has used less time; so on the page they run as they would side by side."""
        counts = self.model.config.loops_for(min(loops, MAX_LOOPS))
        ids = self.prompt(text, new)
        pieces, lanes, requests = [], [], []
        sampling = SamplingParams(temperature, seed=seed, max_new_tokens=new, stop_token_ids=frozenset({self.tokenizer.eot}))
        spelt = [Pieces(self.tokenizer) for _ in range(2)]
        for piece in spelt:
            pieces.append([piece.add(token) for token in ids])
        for i, rule in enumerate((exit, None)):
            lanes.append(Lane(ids, list(ids), pieces[i], [None] * len(ids)))
            params = loop_params(self.model, exit=rule, loops=counts, kv=kv, seed=seed)
            requests.append(stream(self.model, ids, sampling, params))
        race = Race(lanes[0], lanes[1], counts, self.layers, self.model.config.mean_loops)
        while not (race.quick.done and race.full.done):
            i = min((i for i in range(2) if not lanes[i].done), key=lambda i: lanes[i].seconds)
            self._go_on(lanes[i], requests[i], spelt[i])
            yield race

    def _go_on(self, lane: Lane, tokens: Iterator[Request], spelt: Pieces) -> None:
        """One more token in one lane."""
        started = time.perf_counter()
        now = self.compute(next, tokens, None)
        lane.seconds += time.perf_counter() - started
        if now is None:
            lane.done = True
            return
        if not lane.new:
            lane.first = lane.seconds
            lane.steps = [None, *now.prompt_steps[:-1]]
        lane.ids.append(now.tokens[-1])
        lane.steps.append(now.steps[-1])
        lane.pieces.append(spelt.add(now.tokens[-1]))
        lane.done = bool(now.finish)
        if lane.done:
            lane.pieces[-1] += spelt.rest()

    def inspect(self, lane: Lane, index: int, loops: int, seed: int = 0) -> Inspection:
        """The pass that chose token `index` of a text, with all loop steps, whether they were taken or not."""
        return self.compute(self._inspect, lane, index, loops, seed)

    def _inspect(self, lane: Lane, index: int, loops: int, seed: int) -> Inspection:
        if not 1 <= index < len(lane.ids):
            raise UserError("nothing chose the first token: click a later one")
        taken = lane.steps[index]
        assert taken is not None
        context = "".join(lane.pieces[max(0, index - 12) : index])
        return self._examine(lane.ids[:index], lane.ids[index], lane.pieces[index], context, taken, loops, seed)

    def examine(self, before: list[int], id: int, token: str, context: str, taken: tuple[int, ...], loops: int) -> Inspection:
        """The pass over `before` that chose token `id`, with all loop steps, whether they were taken or not."""
        return self.compute(self._examine, before, id, token, context, taken, loops, 0)

    @torch.inference_mode()
    def _examine(self, before: list[int], id: int, token: str, context: str, taken: tuple[int, ...], loops: int, seed: int) -> Inspection:
        counts = self.model.config.loops_for(max(2, min(loops, MAX_LOOPS)))
        traced = trace(self.model, [before], loops=counts, seed=seed)
        states = [x[:, 0, -1] for x in traced.states]  # (K + 1, C) each
        frame = pca(states, 3)
        every = torch.stack(states)
        measured = step_statistics.Steps(every.transpose(0, 1))
        said = [self._said(g, x[1:], id) for g, x in enumerate(states)]
        return Inspection(
            id=id, token=token, context=context, groups=self.groups, taken=taken,
            path=torch.stack([points.float() for points in frame]), explained=[float(x) for x in frame.explained],
            norms=measured.norms.T, cosines=measured.cosines.T, accelerations=measured.accelerations.T, said=said,
        )  # fmt: skip

    def _said(self, group: int, states: Tensor, chosen: int) -> list[Said]:
        """The head on each state (K, C) of a group, as if it left there."""
        shares = torch.softmax(
            self.model.head(self.model.groups[group].output(states.to(next(self.model.parameters()).device))).float(), dim=-1
        )
        best = shares.topk(min(TOP, shares.shape[-1]), dim=-1)
        return [
            Said(tokens, [self.tokenizer.decode([t]) for t in tokens], values, float(shares[k, chosen]))
            for k, (tokens, values) in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        ]


def _check_task(model: LoopedGPT, task: Task, name: str) -> None:
    """An error where task.json lies beside the weights of another model."""
    c = model.config
    if c.vocab_size != task.vocab_size:
        raise UserError(
            f"{name}: task.json names the task {task.name} with {task.vocab_size} tokens, the model has {c.vocab_size}: it is of another"
        )
    if c.block_size < task.length:
        raise UserError(
            f"{name}: task.json names the task {task.name} with samples of {task.length} tokens, the model takes {c.block_size}"
        )
