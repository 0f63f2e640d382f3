"""Stories with other names, so that a small model learns to keep the name that a story began with.

    python examples/story_names.py stories/ named/ --copies 3            # the folder made by story_corpus.py
    twoscale prepare --source named/ --tokenizer bpe --bpe-vocab 4096 --out data/stories

Most stories of the teacher are about Lily or Timmy, so a model that learns from them writes these names whatever its prompt says. Each
copy of a story has other names: girls' names become girls' names, boys' names boys', two names never become one. Nothing else changes. A
copy is a function of the story and the copy's number.
"""

import argparse
import hashlib
import random
import re
from pathlib import Path

SEPARATOR = "\n<|endoftext|>\n"
GIRLS = (
    "Lily",
    "Sue",
    "Lucy",
    "Mia",
    "Amy",
    "Sara",
    "Sarah",
    "Emma",
    "Emily",
    "Sally",
    "Jane",
    "Ella",
    "Rosie",
    "Jill",
    "Bella",
    "Daisy",
    "Ellie",
    "Mary",
    "Betty",
)
BOYS = (
    "Timmy",
    "Tim",
    "Tom",
    "Max",
    "Sam",
    "Ben",
    "Jack",
    "Billy",
    "Bob",
    "Tommy",
    "Johnny",
    "Benny",
    "Jim",
    "Bobby",
    "Leo",
    "Mike",
    "Fred",
    "Dan",
    "Sammy",
    "Jake",
    "John",
    "Mark",
    "Nick",
)


def renamed(story: str, key: str) -> str:
    """The story with names drawn by `key`."""
    draw = random.Random(hashlib.sha256(f"{key}\n{story}".encode()).digest())
    new: dict[str, str] = {}
    for names in (GIRLS, BOYS):
        old = [name for name in names if re.search(rf"\b{name}\b", story)]
        new |= dict(zip(old, draw.sample(names, len(old)), strict=True))
    return re.sub(r"\b(" + "|".join(new) + r")\b", lambda match: new[match[0]], story) if new else story


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stories", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--copies", type=int, default=3)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for file in sorted(args.stories.glob("stories-*.txt")):
        stories = file.read_text().split(SEPARATOR)[:-1]
        for copy in range(args.copies):
            text = "".join(renamed(story, str(copy)) + SEPARATOR for story in stories)
            (args.out / f"{file.stem}-{copy}.txt").write_text(text)


if __name__ == "__main__":
    main()
