"""Stories from a small teacher, in large batches: text to train a looped model on.

    python examples/story_corpus.py teacher/ stories/ --batches 400      # the folder made by story_teacher.py
    twoscale prepare --source stories/ --tokenizer bpe --bpe-vocab 4096 --out data/stories

A batch is a function of its number and is written whole, so the program may be stopped and started again, and several may share the work
(--first). With a low temperature most stories begin alike: --opening draws the first tokens of each at a higher one. Kept are stories that
the teacher ended itself, that end like a sentence, say nothing twice and were not told before. A small model loses the thread of long
stories: --max-tokens keeps short ones alone.
"""

import argparse
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import twoscale

BEGIN, ENDS = 1, (1, 2)
SHORTEST = 60  # tokens


def spell(tokens: list[int], pieces: list[bytes]) -> str:
    """The text of a story; bytes that are no character are dropped."""
    return b"".join(pieces[t] for t in tokens if t not in ENDS).decode("utf-8", "ignore").strip()


def pieces(text: str, separator: str) -> Iterator[tuple[int, str]]:
    """The parts of a text between separators, each with its offset."""
    start = 0
    for found in re.finditer(separator, text):
        yield start, text[start : found.start()]
        start = found.end()
    yield start, text[start:]


def repeated(story: str) -> list[int]:
    """Offsets of the fifth word of sentences that occur a second time."""
    seen: set[str] = set()
    found = []
    for start, sentence in pieces(story, r'[.!?\n"]+'):
        words = list(re.finditer(r"\S+", sentence))
        if len(words) >= 5:
            if sentence in seen:
                found.append(start + words[4].start())
            seen.add(sentence)
    return found


def sound(text: str) -> bool:
    """Whether a story is printable text that ends like a sentence, in which no sentence of five words or more occurs twice."""
    readable = all(c.isprintable() or c == "\n" for c in text) and not set("<\N{REPLACEMENT CHARACTER}") & set(text)
    return text.endswith((".", "!", "?", '"')) and readable and not repeated(text)


def write_batch(model: twoscale.LoopedGPT, pieces: list[bytes], number: int, args: argparse.Namespace) -> list[str]:
    """The stories of one batch: `args.rows` draws of the teacher with the batch's number as the seed, less what is not kept."""
    rows, limit = [[BEGIN]] * args.rows, min(args.max_tokens, model.config.block_size) - 1
    shared = {"top_p": args.top_p, "seed": number, "stop": ENDS, "kv_dtype": args.kv_dtype}
    if args.opening:
        opened = twoscale.generate(model, rows, args.opening, temperature=args.opening_temperature, **shared)
        rows = [[BEGIN, *tokens] for tokens, why in zip(opened.tokens, opened.finish_reasons, strict=True) if why == "length"]
    gen = twoscale.generate(model, rows, limit - args.opening, temperature=args.temperature, **shared)
    stories = [row[1:] + tokens for row, tokens in zip(rows, gen.tokens, strict=True)]
    ended = [t for t, why in zip(stories, gen.finish_reasons, strict=True) if why == "stop" and len(t) > SHORTEST]
    return [text for text in (spell(t, pieces) for t in ended) if sound(text)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("teacher", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.95)
    parser.add_argument("--opening", type=int, default=0, help="the first tokens of a story, drawn at a temperature of their own")
    parser.add_argument("--opening-temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=256, help="longer stories are not kept")
    parser.add_argument("--top-p", type=float, default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="fp32", help="of the teacher's weights; w8a8 is the fastest")
    parser.add_argument("--kv-dtype", default="fp32", help="of keys and values; with bf16 attention reads half the bytes")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, _ = twoscale.load(args.teacher, dtype=args.dtype)
    pieces = [piece.encode("latin-1") for piece in json.loads((args.teacher / "pieces.json").read_text())]
    args.out.mkdir(parents=True, exist_ok=True)
    told = set()
    for number in range(args.first, args.first + args.batches):
        file = args.out / f"stories-{number:06}.txt"
        if not file.exists():
            started = time.perf_counter()
            stories = write_batch(model, pieces, number, args)
            part = file.with_suffix(".part")
            part.write_text("".join(f"{text}\n<|endoftext|>\n" for text in stories))
            os.replace(part, file)
            seconds = time.perf_counter() - started
            print(f"{file.name}: {len(stories)} of {args.rows} stories, {sum(map(len, stories)):,} characters, {seconds:.0f} s", flush=True)
        texts = file.read_text().split("\n<|endoftext|>\n")[:-1]
        keys = [hashlib.sha256(text.encode()).digest() for text in texts]
        fresh = [text for text, key in zip(texts, keys, strict=True) if key not in told]
        told.update(keys)
        if len(fresh) < len(set(keys)):
            file.write_text("".join(f"{text}\n<|endoftext|>\n" for text in fresh))


if __name__ == "__main__":
    main()
