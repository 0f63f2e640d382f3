"""`twoscale.generate`: cached decoding of ragged batches, every token leaving every loop on its own.

gen = twoscale.generate(model, [[1, 2, 3], [4, 5]], max_new_tokens=64, exit=exits.Acceleration(1e-2), loops=30)
gen.tokens[1]    # the new tokens of the second text: what it gives alone, whoever it shares the batch with
gen.steps[1]     # for each of them, the steps that the pass which chose it took in each group
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.config.show import OneLine
from twoscale.engine.cache import Cache
from twoscale.engine.loop import Engine
from twoscale.engine.passes import NOT_FINITE
from twoscale.engine.quick import Kernels
from twoscale.engine.sample import Draw, Sampling, sample
from twoscale.exits import Exit
from twoscale.model import LoopedGPT
from twoscale.model.input import as_batch

Callback = Callable[[int, int, tuple[int, ...]], object]

PREFILL = 2048  # prompts go through the network together while they have no more tokens than this


@dataclass(repr=False)
class Text(OneLine):
    """One text that is being written."""

    index: int
    """Its place in the batch."""
    prompt: list[int]
    cache: Cache
    stream: int
    """Tells texts with the same prompt apart when tokens are drawn."""
    tokens: list[int] = field(default_factory=list)
    steps: list[tuple[int, ...]] = field(default_factory=list)
    prompt_steps: list[tuple[int, ...]] = field(default_factory=list)
    finish: str = ""


@dataclass(frozen=True, repr=False)
class Generation(OneLine):
    """What was written, one entry for each prompt."""

    tokens: list[list[int]]
    """The new tokens; a stop token that ended a text is the last of them."""
    steps: list[list[tuple[int, ...]]]
    """For each new token, the steps in each group of the pass that chose it."""
    prompt_steps: list[list[tuple[int, ...]]]
    """For each token of the prompt, its steps; the last entry is also the first of `steps`."""
    finish: list[str]
    """Why each text ended: `stop` or `length`."""
    work: list[int]
    """Applications of each group's map to one token, in all: the sum of all steps."""
    cache_bytes: int
    """What keys and values held at the most, over all texts."""

    def __post_init__(self) -> None:
        assert all(len(t) == len(s) for t, s in zip(self.tokens, self.steps, strict=True))


def generate(
    model: LoopedGPT,
    ids: Tensor | Sequence[Sequence[int]],
    max_new_tokens: int = 64,
    *,
    exit: Exit | None = None,
    loops: int | Sequence[int] | None = None,
    kv: str = "exact",
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: Iterable[int] = (),
    callback: Callback | None = None,
    kernels: Kernels = "auto",
) -> Generation:
    """Continue every prompt by at most `max_new_tokens` tokens.

    `exit` and `loops` are as in `forward`; `kv` says which keys and values are kept (`exact`, `last`, `ring:n`). A token of
    `stop` ends its text. `callback(row, token, steps)` is called for every new token as it comes. `seed` fixes the
    start states and the draws; texts with the same prompt in one batch draw differently.
    """
    engine = Engine(model, loops=loops, exit=exit, kv=kv, seed=seed, kernels=kernels)
    writer = Writer(engine, Sampling(temperature, top_k, top_p, seed), frozenset(stop), max_new_tokens, callback)
    texts = writer.open(ids)
    for _ in writer.write(texts):
        pass
    return Generation(
        [t.tokens for t in texts],
        [t.steps for t in texts],
        [t.prompt_steps for t in texts],
        [t.finish for t in texts],
        list(engine.work),
        writer.cache_bytes,
    )


def stream(
    model: LoopedGPT,
    prompt: Sequence[int],
    max_new_tokens: int = 64,
    *,
    exit: Exit | None = None,
    loops: int | Sequence[int] | None = None,
    kv: str = "exact",
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: Iterable[int] = (),
) -> Iterator[Text]:
    """`generate` for one prompt, to be iterated: gives the text so far after each new token, and does no work in between."""
    engine = Engine(model, loops=loops, exit=exit, kv=kv, seed=seed)
    writer = Writer(engine, Sampling(temperature, top_k, top_p, seed), frozenset(stop), max_new_tokens, None)
    (text,) = writer.open([prompt])
    return (text for _ in writer.write([text]))


class Writer:
    """Feeds texts to an engine, token after token, until each has ended."""

    def __init__(self, engine: Engine, sampling: Sampling, stop: frozenset[int], most: int, callback: Callback | None) -> None:
        self.engine, self.sampling, self.stop, self.most, self.callback = engine, sampling, stop, most, callback
        self.cache_bytes = 0

    def open(self, ids: Tensor | Sequence[Sequence[int]]) -> list[Text]:
        """Texts with room for their prompts and what is to come."""
        config = self.engine.model.config
        tokens, lengths = as_batch(ids, config.vocab_size, config.block_size)
        if isinstance(self.most, bool) or not isinstance(self.most, int) or self.most < 1:
            raise UserError(f"max_new_tokens = {self.most!r}: a whole number of at least 1")
        prompts = [row[:n] for row, n in zip(tokens.tolist(), lengths.tolist(), strict=True)]
        longest = max(len(p) for p in prompts)
        room = config.block_size - longest + 1  # the last new token is never read
        if self.most > room:
            raise UserError(
                f"a prompt of {longest} tokens and {self.most} new ones do not fit the context of "
                f"{config.block_size} tokens: ask for at most {room} new ones, or shorten the prompt"
            )
        seen: Counter[tuple[int, ...]] = Counter()
        texts = []
        for i, prompt in enumerate(prompts):
            texts.append(Text(i, prompt, self.engine.open(len(prompt) + self.most - 1), seen[tuple(prompt)]))
            seen[tuple(prompt)] += 1
        return texts

    @torch.inference_mode()
    def write(self, texts: list[Text]) -> Iterator[None]:
        """Write on until every text has ended; gives way after the prompts and after each token."""
        live: list[Text] = []
        for batch in _batches(texts):
            self._prompt(batch)
            live += [text for text in batch if not text.finish]
        yield
        while live:
            x, steps = self.engine.run([(t.index, t.cache, t.tokens[-1:]) for t in live])
            self._extend(live, x, steps)
            live = [text for text in live if not text.finish]
            yield

    def _prompt(self, texts: list[Text]) -> None:
        """Prompts go through together."""
        x, steps = self.engine.run([(t.index, t.cache, t.prompt) for t in texts])
        ends = list(accumulate(len(t.prompt) for t in texts))
        for t, end in zip(texts, ends, strict=True):
            t.prompt_steps += [tuple(s) for s in steps[end - len(t.prompt) : end].tolist()]
        last = torch.tensor(ends, device=x.device) - 1
        self._extend(texts, x[last], steps[last])

    def _extend(self, texts: list[Text], x: Tensor, steps: Tensor) -> None:
        """One more token for each text, from the state (N, C) that its last token left."""
        logits = self.engine.model.head(x).float()
        sampled = sample(logits, [Draw(self.sampling, t.stream, len(t.tokens)) for t in texts])
        if not all(sampled.finite):
            raise UserError(NOT_FINITE)
        self.cache_bytes = max(self.cache_bytes, sum(t.cache.nbytes for t in texts))
        for text, token, taken in zip(texts, sampled.tokens, steps.tolist(), strict=True):
            text.tokens.append(token)
            text.steps.append(tuple(taken))
            if token in self.stop or len(text.tokens) == self.most:
                text.finish = "stop" if token in self.stop else "length"
            if self.callback is not None:
                self.callback(text.index, token, tuple(taken))


def _batches(texts: list[Text]) -> list[list[Text]]:
    """Prompts in batches of at most PREFILL tokens; a prompt is never cut."""
    batches: list[list[Text]] = [[]]
    rows = 0
    for text in texts:
        if batches[-1] and rows + len(text.prompt) > PREFILL:
            batches.append([])
            rows = 0
        batches[-1].append(text)
        rows += len(text.prompt)
    return batches
