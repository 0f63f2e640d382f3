"""A few texts that a model writes with a rule, token by token with their steps: RUN/samples.json, which the report shows."""

from pathlib import Path
from typing import Any

from twoscale import exits
from twoscale.config.files import write_json
from twoscale.config.run_folder import RunFolder
from twoscale.data import IncrementalDecoder
from twoscale.engine import generate
from twoscale.tradeoff.load_run import LoadedRun

COUNT, PROMPT, NEW = 3, 24, 96
TEMPERATURE, SEED = 0.7, 0


def write_samples(run: Path, opened: LoadedRun, exit: exits.Exit | None, words: str, loops: int) -> dict[str, Any]:
    """Continue the beginnings of held-out documents; `words` names the rule."""
    model, tokenizer = opened.model, opened.tokenizer
    size = model.config.block_size
    starts = _beginnings(opened, min(PROMPT, size // 2))
    new = min(NEW, size - max(len(ids) for ids in starts) + 1)
    gen = generate(model, starts, new, exit=exit, loops=loops, temperature=TEMPERATURE, seed=SEED, stop=(tokenizer.eot,))
    texts = []
    for prompt, tokens, steps in zip(starts, gen.tokens, gen.steps, strict=True):
        decoder = IncrementalDecoder(tokenizer)
        prompt_text = "".join(decoder.add(t) for t in prompt)
        written = [[decoder.add(t), list(s)] for t, s in zip(tokens, steps, strict=True) if t != tokenizer.eot]
        texts.append({"prompt": prompt_text, "tokens": written})
    found = {**opened.about, "rule": words, "loops": loops, "temperature": TEMPERATURE, "seed": SEED, "samples": texts}
    write_json(RunFolder(run).samples, found)
    return found


def _beginnings(opened: LoadedRun, length: int) -> list[list[int]]:
    """The first tokens of some held-out documents; of windows, where documents are too short."""
    tokens = opened.data.read(0, min(len(opened.data), 2_000_000)).tolist()
    eot = opened.tokenizer.eot
    starts = [0, *(i + 1 for i, t in enumerate(tokens[:-1]) if t == eot)]
    whole = [tokens[s : s + length] for s in starts if len(tokens[s : s + length]) == length and eot not in tokens[s : s + length]]
    if len(whole) < COUNT:
        at = range(0, max(1, len(tokens) - length), max(1, len(tokens) // COUNT))
        whole = [tokens[s : s + length] for s in at][:COUNT]
    return [whole[i * len(whole) // COUNT] for i in range(min(COUNT, len(whole)))]
