"""`twoscale generate RUN "prompt"`: text from a model, streamed, each token coloured by the loop steps it took.

twoscale generate runs/tiny "The module provides" --exit acceleration:0.05 --loops 30
"""

import math
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from twoscale.cli.parse import parse, say
from twoscale.config import UserError
from twoscale.config.dtypes import DtypeChoice, KVDtype
from twoscale.config.words import group_label, plural
from twoscale.report.style import step_share
from twoscale.report.words import against_default, mean_steps

if TYPE_CHECKING:
    from twoscale.data import Tokenizer

RAMP = (27, 33, 39, 45, 49, 84, 119, 155, 190, 226, 220, 214, 208, 202, 196)  # terminal colours from few steps to many
MAX_NEW_TOKENS = 200  # unless --max-new-tokens says otherwise


@dataclass(frozen=True)
class GenerateArgs:
    """Continue a prompt with a trained model; text goes to stdout, figures to stderr."""

    run: Annotated[Path, tyro.conf.Positional]
    """Folder of a run, a checkpoint or another model; or `bundled`."""
    prompt: Annotated[str, tyro.conf.Positional]
    """What to continue; - reads it from stdin."""
    max_new_tokens: int | None = None
    """How many tokens to write at most; by default 200, or as many as the context has room for."""
    exit: str | None = None
    """Exit rule: `auto` (as calibrated), NAME:VALUE or NAME:VALUE,setting=value: acceleration:0.01, kl:1e-3,read=coda, fixed:4"""
    loops: tuple[int, ...] = ()
    """The most steps that a group may take: one number, or one for each group; by default the model's mean_loops."""
    kv: str = "exact"
    """Which keys and values are kept: exact, last or ring:n."""
    kv_dtype: KVDtype = "auto"
    """The dtype of cached keys and values: fp32, bf16 (half the memory), or auto: the one in which the model computes, fp32 on the CPU."""
    temperature: float = 0.8
    """0 takes the most likely token every time."""
    top_k: int | None = None
    """Draw among so many most likely tokens."""
    top_p: float | None = None
    """Draw among the most likely tokens that together reach this probability."""
    stop: tuple[str, ...] = ()
    """Strings before which the text ends."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids at which the text ends, beside the end of text."""
    logprobs: int | None = None
    """After the text, list every new token with its log-probability and those of so many of the likeliest ones."""
    seed: int = 0
    """Fixes the draws and the start states."""
    speculate: str = "off"
    """Guess tokens ahead, with the same result to the bit: off, auto, wavefront (one loop group), draft:m or lookup:n."""
    dtype: DtypeChoice = "auto"
    """How the weights are held: fp32, bf16, int8, w8a8 (int8, and inputs are rounded to int8 too), or auto: as the folder has them."""
    device: str = "cpu"
    """Where to compute: cpu, or a device of torch such as cuda."""
    color: Literal["auto", "always", "never"] = "auto"
    """Colour tokens by their steps, blue for few and red for many; auto: where stdout is a terminal."""


def run(args: list[str]) -> int:
    options = parse(GenerateArgs, args, "twoscale generate")

    import twoscale
    from twoscale.interop import find
    from twoscale.tradeoff.load_run import chosen_exit

    folder = find(options.run)
    model, tokenizer = twoscale.load(folder, options.dtype, options.device)
    if tokenizer is None:
        raise UserError(f"{folder} has no tokenizer.json: put the model's own beside its weights")
    c = model.config
    try:
        prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    except UnicodeDecodeError as error:
        raise UserError(f"the prompt on stdin is not UTF-8 at byte {error.start + 1}: give it as UTF-8") from None
    ids = tokenizer.encode(prompt)
    if not ids:
        raise UserError("the prompt is empty: give at least one character")
    if len(ids) > c.block_size:
        raise UserError(f"the prompt has {len(ids)} tokens, the model's context {c.block_size}: shorten it")
    asked = options.loops if len(options.loops) > 1 else options.loops[0] if options.loops else None
    exit, max_loops = chosen_exit(folder, options.exit, asked, model.weight_dtype)
    loops = c.loops_for(max_loops)
    color = options.color == "always" or (options.color == "auto" and sys.stdout.isatty())
    stream = Stream(
        tokenizer, ids, "" if options.prompt == "-" else options.prompt, loops if color else (), options.stop, options.stop_token_ids
    )
    started = time.perf_counter()
    gen = twoscale.generate(
        model,
        [ids],
        min(MAX_NEW_TOKENS, c.block_size - len(ids) + 1) if options.max_new_tokens is None else options.max_new_tokens,
        exit=exit,
        loops=loops,
        kv=options.kv,
        kv_dtype=options.kv_dtype,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=(tokenizer.eot, *options.stop_token_ids, *options.stop),
        logprobs=options.logprobs,
        tokenizer=tokenizer,
        callback=stream,
        speculate=options.speculate,
    )
    seconds = time.perf_counter() - started
    stream.end()
    if color:
        say("steps: " + "".join(f"\x1b[38;5;{n}m■\x1b[0m" for n in RAMP) + f" 1 to {max(loops, default=0)}, mean over groups")
    if gen.logprobs is not None:
        say("\n".join(logprob_lines(gen.logprobs[0], tokenizer)))
    groups = [stage for stage, g in c.stages if g is not None]
    say(summary(gen.steps[0], loops, groups, c.mean_loops, seconds, gen.cache_bytes))
    if (speculation := gen.speculation).drafted:
        passes = speculation.calls / len(gen.steps[0])
        say(f"speculation: {speculation.accepted} of {speculation.drafted} guesses right, {passes:.1f} stage passes a token")
    return 0


def summary(
    steps: list[tuple[int, ...]], loops: tuple[int, ...], groups: list[tuple[int, ...]], mean_loops: int, seconds: float, held: int
) -> str:
    """Time, steps of each group and the loop work beside the default depth's, in one line."""
    n = len(steps)
    words = [f"{plural(n, 'token')} in {seconds:.2f} s, prompt included ({seconds / n * 1e3:.1f} ms a token)"]
    if loops:
        means = [sum(s[g] for s in steps) / n for g in range(len(loops))]
        each = ", ".join(
            f"{m:.1f} of {max_loops} in {group_label(g, groups[g])}" for g, (m, max_loops) in enumerate(zip(means, loops, strict=True))
        )
        work = against_default(mean_steps(means, [len(g) for g in groups]), mean_loops)
        words.append(f"mean steps {each}; {work}")
    words.append(f"keys and values held {held / 1e6:.1f} MB")
    return "; ".join(words)


def logprob_lines(logprobs: list[list[tuple[int, float]]], tokenizer: "Tokenizer") -> list[str]:
    """A line for each new token: itself, then the likeliest ones, each with its log-probability."""
    return [
        f"{tokenizer.decode([own[0]])!r} {own[1]:.3f}" + "".join(f"   {tokenizer.decode([token])!r} {value:.3f}" for token, value in likely)
        for own, *likely in logprobs
    ]


class Stream:
    """Prints tokens as they come: whole characters only, and in colour if there are loop counts to measure by."""

    def __init__(
        self,
        tokenizer: "Tokenizer",
        ids: list[int],
        prompt: str,
        loops: tuple[int, ...],
        stop: tuple[str, ...] = (),
        stop_token_ids: tuple[int, ...] = (),
    ) -> None:
        from twoscale.engine.text import TextStream

        self.prompt, self.loops = prompt, loops
        self.stream = TextStream(tokenizer, ids, stop, frozenset({tokenizer.eot, *stop_token_ids}))

    def __call__(self, row: int, token: int, steps: tuple[int, ...]) -> None:
        self.text(self.prompt)
        self.prompt = ""
        if text := self.stream.add(token):
            self.text(text, self._color(steps))

    def _color(self, steps: tuple[int, ...]) -> int | None:
        if not self.loops:
            return None
        return RAMP[min(len(RAMP) - 1, math.floor(step_share(steps, self.loops) * len(RAMP)))]

    def text(self, text: str, color: int | None = None) -> None:
        text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "�", text)  # what a model writes must not steer the terminal
        sys.stdout.write(text if color is None else f"\x1b[38;5;{color}m{text}\x1b[0m")
        sys.stdout.flush()

    def end(self) -> None:
        self.text(self.stream.finish() + "\n")
