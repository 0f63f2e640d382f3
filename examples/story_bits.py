"""Bits per byte of whole stories: a student beside its teacher, which has another tokenizer, on the same text.

    python examples/story_bits.py package/src/llama2.data teacher/ --student bundled

Each story is scored from its first token, after the token that begins one: every byte of the text counts, its end does not. Stories that
do not fit one of the two contexts are left out.
"""

import argparse
import lzma
import math
from pathlib import Path

import torch
from story_distillation import BEGIN, TeacherTokenizer
from story_names import SEPARATOR

import twoscale
from twoscale.interop import find

STORIES = Path("heldout") / "stories.txt.xz"


@torch.no_grad()
def nats(model: twoscale.LoopedGPT, begin: int, tokens: list[int]) -> float:
    """Minus the log-probability of the tokens of a story."""
    logits = twoscale.forward(model, [[begin, *tokens[:-1]]]).logits[0]
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(tokens), reduction="sum"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the teacher's file in llama2.c's format, which has its tokenizer")
    parser.add_argument("teacher", type=Path, help="the folder made of it by story_teacher.py, with all its tokens")
    parser.add_argument("--student", default="bundled")
    parser.add_argument("--stories", type=Path, default=None, help=f"by default {STORIES} beside the student")
    args = parser.parse_args()
    (student, tokenizer), (teacher, _) = twoscale.load(args.student), twoscale.load(args.teacher)
    assert tokenizer is not None
    their_tokenizer = TeacherTokenizer.read(args.source.read_bytes())
    with lzma.open(args.stories or find(args.student) / STORIES, "rt") as file:
        stories = file.read().split(SEPARATOR)[:-1]
    n_bytes, n_stories, totals = 0, 0, [0.0, 0.0]
    for story in stories:
        mine, theirs = tokenizer.encode(story), their_tokenizer.encode(story.encode())
        if len(mine) <= student.config.block_size and len(theirs) <= teacher.config.block_size:
            n_bytes, n_stories = n_bytes + len(story.encode()), n_stories + 1
            totals[0] += nats(student, tokenizer.eot, mine)
            totals[1] += nats(teacher, BEGIN, theirs)
    student_bits, teacher_bits = (total / math.log(2) / n_bytes for total in totals)
    print(f"{n_stories} stories, {n_bytes:,} bytes: student {student_bits:.4f} bits per byte, teacher {teacher_bits:.4f}")


if __name__ == "__main__":
    main()
