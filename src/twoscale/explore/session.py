"""What the explorer computes, without any page: two texts in a race, and one token looked at closely. Tasks: see `answers`.

Shapes: G group, K loop step, C width, V vocabulary.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from twoscale import exits
from twoscale.config import UserError
from twoscale.config.serial import read_json
from twoscale.data import IncrementalDecoder, Tokenizer
from twoscale.engine import Request, SamplingParams, forward, loop_params, stream
from twoscale.engine.request import SamplingKey
from twoscale.engine.sample import sample
from twoscale.geometry import pca, steps as step_statistics
from twoscale.geometry.record import group_names
from twoscale.model import LoopedGPT, LoopGroup
from twoscale.tasks.task import Task
from twoscale.tracing import Trace, trace

PROMPT = "The old man looked at the sea and"  # where a model comes with none of its own
MAX_PROMPTS, MAX_PROMPT = 6, 120  # prompts that come with a model, and characters of each
MAX_TOKENS = 512  # prompt and answer: bounds what one visitor can make us hold
MAX_LOOPS = 64
TOP = 5
SPECULATIONS = ("off", "auto", "draft:4", "lookup:3")
CODA = 1 << 24  # numbers in a batch that goes through the layers behind the last group

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
    answers: list["Said"] = field(default_factory=list)
    """For each new token what the model said in that pass."""
    seconds: float = 0.0
    """Spent so far, the prompt included."""
    first: float = 0.0
    """Spent until the first new token."""
    done: bool = False
    passes: list[int] = field(default_factory=list)
    """For each new token the number of the pass that gave it, from 0 on; with speculation a pass may give several."""
    guesses: tuple[int, int] = 0, 0
    """Tokens that speculation guessed, and how many of them were right."""

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


@dataclass
class Race:
    """The text with exits and the full run, as far as they have come."""

    quick: Lane
    full: Lane
    loops: tuple[int, ...]
    layers: list[int] = field(default_factory=list)
    """Layers of each group."""
    mean_loops: int = 1
    """The model's default depth."""
    others: dict[int, "Other"] | None = None
    """Tokens of the text with exits, by their place, where the full run on the same text would have chosen otherwise; None until both texts
    are written."""

    @property
    def scale(self) -> tuple[float, float]:
        """The fewest and the most steps, mean over groups, of a new token in the text with exits; colours go from one to the other."""
        taken = [sum(s) / len(s) for s in self.quick.steps[len(self.quick.prompt) :] if s]
        return (min(taken), max(taken)) if taken else (1.0, 1.0)

    @property
    def first_difference(self) -> int | None:
        """The first token in which the two differ, as far as both are written."""
        return next((i for i, (a, b) in enumerate(zip(self.quick.ids, self.full.ids, strict=False)) if a != b), None)


@dataclass(frozen=True)
class Said:
    """What the model said, or would have said after one loop step: the likeliest tokens."""

    ids: list[int]
    tokens: list[str]
    shares: list[float]
    chosen: float
    """The share of the token that was chosen in the end."""


@dataclass(frozen=True)
class Other:
    """What the full run would have chosen at one place of the text with exits, with the same random number."""

    token: str
    share: float
    """Its probability in the full run."""
    kept: float
    """The probability, in the full run, of the token that stands in the text."""
    mine: float
    """That token's probability with exits."""


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
    """[group][step - 1]: read through the plain layers behind the last group and the head; later groups are skipped."""
    lens: list[list[Said]] = field(default_factory=list)
    """[group][step - 1]: read by the head alone, on the state itself."""
    answer: Said | None = None
    """What the model said in the pass that chose the token, as the text was written; None where there was no such pass."""


def load_prompts(path: Path) -> tuple[str, ...]:
    """The prompts in a file that comes with a model; none where there is no such file."""
    found = read_json(path) if path.exists() else []
    if not isinstance(found, list) or not all(isinstance(prompt, str) and prompt.strip() for prompt in found):
        raise UserError(f"{path} must be a list of strings that are not empty: mend or remove it")
    return tuple(prompt[:MAX_PROMPT] for prompt in found[:MAX_PROMPTS])


class Session:
    """One model, opened for visitors."""

    def __init__(
        self,
        model: LoopedGPT,
        tokenizer: Tokenizer,
        name: str,
        calibrated: tuple[Mapping[int, exits.Rule], int] | None = None,
        task: Task | None = None,
        prompts: Sequence[str] = (),
    ) -> None:
        """`prompts` are examples that suit the model; the page opens with the first."""
        if not model.config.n_groups:
            raise UserError(f"{name} has no loop groups: there is nothing to explore")
        if task is not None:
            _check_task(model, task, name)
        self.model, self.tokenizer, self.name, self.calibrated, self.task = model, tokenizer, name, calibrated, task
        self.prompts = tuple(prompts) or (PROMPT,)
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

    def speculations(self) -> list[str]:
        """Kinds of speculation that this model can use; none changes a text."""
        return [*SPECULATIONS, *["wavefront"] * (self.model.config.n_groups == 1)]

    def race(
        self, text: str, exit: exits.Exit, loops: int, *, kv: str, new: int, temperature: float, seed: int, speculate: str = "off"
    ) -> Iterator[Race]:
        """Write both texts, always going on with the one that has used less time; so on the page they run as they would side by side."""
        counts = self.model.config.loops_for(min(loops, MAX_LOOPS))
        ids = self.prompt(text, new)
        pieces, lanes, requests = [], [], []
        sampling = SamplingParams(temperature, seed=seed, max_new_tokens=new, stop_token_ids=frozenset({self.tokenizer.eot}), logprobs=TOP)
        decoders = [IncrementalDecoder(self.tokenizer) for _ in range(2)]
        for decoder in decoders:
            pieces.append([decoder.add(token) for token in ids])
        for i, rule in enumerate((exit, None)):
            lanes.append(Lane(ids, list(ids), pieces[i], [None] * len(ids)))
            params = loop_params(self.model, exit=rule, loops=counts, kv=kv, seed=seed)
            requests.append(stream(self.model, ids, sampling, params, speculate))
        race = Race(lanes[0], lanes[1], counts, self.layers, self.model.config.mean_loops)
        while not (race.quick.done and race.full.done):
            i = min((i for i in range(2) if not lanes[i].done), key=lambda i: lanes[i].seconds)
            self._go_on(lanes[i], requests[i], decoders[i])
            yield race
        race.others = self.compute(self._others, race.quick, counts, sampling, seed)
        yield race

    def _go_on(self, lane: Lane, tokens: Iterator[Request], decoder: IncrementalDecoder) -> None:
        """The tokens of one more pass in one lane."""
        started = time.perf_counter()
        now = self.compute(next, tokens, None)
        lane.seconds += time.perf_counter() - started
        if now is None:
            lane.done = True
            return
        if not lane.new:
            lane.first = lane.seconds
            lane.steps = [None, *now.prompt_steps[:-1]]
        number = lane.passes[-1] + 1 if lane.passes else 0
        for i in range(lane.new, len(now.tokens)):
            lane.ids.append(now.tokens[i])
            lane.steps.append(now.steps[i])
            (_, own), *best = now.logprobs[i]
            ids = [token for token, _ in best]
            lane.answers.append(Said(ids, [self.tokenizer.decode([t]) for t in ids], [math.exp(p) for _, p in best], math.exp(own)))
            lane.pieces.append(decoder.add(now.tokens[i]))
            lane.passes.append(number)
        lane.guesses = now.speculation_stats.drafted, now.speculation_stats.accepted
        lane.done = bool(now.finish_reason)
        if lane.done:
            lane.pieces[-1] += decoder.rest()

    @torch.inference_mode()
    def _others(self, lane: Lane, loops: tuple[int, ...], sampling: SamplingParams, seed: int) -> dict[int, Other]:
        """Where the full run, reading the same text, would have chosen another token: one parallel pass."""
        first = len(lane.prompt)
        logits = forward(self.model, [lane.ids[:-1]], loops=loops, seed=seed).logits[0, first - 1 :]
        chosen = sample(logits, [SamplingKey(sampling, token_index=i) for i in range(len(logits))]).tokens
        shares = torch.softmax(logits, dim=-1)
        return {
            first + i: Other(self.tokenizer.decode([c]), float(shares[i, c]), float(shares[i, lane.ids[first + i]]), lane.answers[i].chosen)
            for i, c in enumerate(chosen)
            if c != lane.ids[first + i]
        }

    def inspect(self, lane: Lane, index: int, loops: int, seed: int = 0) -> Inspection:
        """The pass that chose token `index` of a text, with all loop steps, whether they were taken or not."""
        return self.compute(self._inspect, lane, index, loops, seed)

    def _inspect(self, lane: Lane, index: int, loops: int, seed: int) -> Inspection:
        if not 1 <= index < len(lane.ids):
            raise UserError("nothing chose the first token: click a later one")
        taken = lane.steps[index]
        assert taken is not None
        context = "".join(lane.pieces[max(0, index - 12) : index])
        found = self._examine(lane.ids[:index], lane.ids[index], lane.pieces[index], context, taken, loops, seed)
        new = index - len(lane.prompt)
        return replace(found, answer=lane.answers[new]) if new >= 0 else found

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
        outputs = [self.model.groups[g].output(x[1:].to(next(self.model.parameters()).device)) for g, x in enumerate(states)]  # (K, C) each
        said = [self._said(self._through_coda(traced, x), id) for x in outputs]
        lens = [self._said(x, id) for x in outputs]
        return Inspection(
            id=id, token=token, context=context, groups=self.groups, taken=taken,
            path=torch.stack([points.float() for points in frame]), explained=[float(x) for x in frame.explained],
            norms=measured.norms.T, cosines=measured.cosines.T, accelerations=measured.accelerations.T, said=said, lens=lens,
        )  # fmt: skip

    def _through_coda(self, traced: Trace, outputs: Tensor) -> Tensor:
        """Outputs (K, C) of a group for the last token, each put through the plain layers behind the last group as if the token had left
        there; the tokens before it are at their last states."""
        coda = self.model.stages[-1]
        if isinstance(coda, LoopGroup):
            return outputs
        before = traced.stages[traced.stage_of_group[-1]][:, :-1].to(outputs)  # (1, T - 1, C): what the coda reads
        T = traced.ids.shape[1]
        rope = self.model.rope(torch.arange(T, device=outputs.device))
        rows = max(1, CODA // (T * outputs.shape[-1]))
        parts = [
            coda(torch.cat((before.expand(len(part), -1, -1), part[:, None]), dim=1), rope)[:, -1] for part in torch.split(outputs, rows)
        ]
        return torch.cat(parts)

    def _said(self, states: Tensor, chosen: int) -> list[Said]:
        """The head on each of the states (K, C)."""
        shares = torch.softmax(self.model.head(states).float(), dim=-1)
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
