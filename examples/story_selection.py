"""Stories that keep their characters: those of a corpus that do, and stories that a student model tells itself and that do.

    python examples/story_selection.py stories/ selected/     # the folder made by story_corpus.py or story_names.py
    python examples/story_selection.py stories/ own/ --student runs/stories --copies 2    # its own, from their first sentences

A small model doubles its characters ("the bird and the bird") more often than its teacher does. Training on its own stories without these
mistakes (rejection sampling) makes them rarer. The rules below are simple ones: they refuse some sound stories, and find no other mistakes.
"""

import argparse
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from story_corpus import sound
from story_names import BOYS, GIRLS, SEPARATOR

import twoscale

ANIMALS = (
    "bird|birdie|cat|kitty|kitten|dog|puppy|bear|lion|tiger|ant|bug|bee|spider|butterfly|worm|snail|frog|fish|crab|shark|whale|dolphin|bunny|"
    "rabbit|squirrel|mouse|monkey|elephant|deer|fox|wolf|owl|duck|goose|hen|chicken|snake|turtle|horse|pony|cow|pig|sheep|goat|zebra|giraffe"
)
BEINGS = (
    f"{ANIMALS}|animal|boy|girl|child|baby|man|woman|lady|king|queen|prince|princess|fairy|witch|wizard|dragon|monster|giant|robot|ghost|doctor|teacher|"
    "farmer|policeman|stranger|voice"
)
NAME = r"[A-Z][a-z]+"
INTRODUCES = re.compile(r"\b(?:named|called|friends?|sister|brother|name|names|cousin|neighbor|cat|dog|puppy|kitten)\b[^.!?]{0,20}$")
SAID_NAME = re.compile(r"\b(?:I am|I'm|name is|named|called|friends?|[Tt]his is|[Ii]t's|[Ii]t is)\b[^.!?]{0,20}$")
NEWCOMER = re.compile(rf"\b(\w+ \w+) an? (?:\w+,? ){{0,3}}?({ANIMALS})\b", re.I)
OF_ONE_KNOWN = re.compile(r"\b(?:was|were|is|be|been|like|as|not|become|became|such|just|really)$")
DOUBLED = (
    re.compile(rf"\b({NAME}) and \1\b"),
    re.compile(rf"\b(?:the|a|an|another|other) (?:\w+ )?({BEINGS}) and (?:the|a|an|another|other) (?:\w+ )?\1\b", re.I),
    re.compile(rf"\b({NAME})(?: \w+)? (?:said|asked|replied|told|answered)\b[^.!?\"]*\"[^\"]*\b\1\b"),
    re.compile(rf"\"[^\"]*\b({NAME})\b[^\"]*\" (?:said|asked|replied|answered) \1\b"),
    re.compile(r"\b(\w{3,}) and (?:some|the|a|an|his|her|their|its|more) \1\b"),
)
PARENTS = (r"mom|mommy|mama|mother|parents|family", r"dad|daddy|papa|father|parents|family")


def without_quotes(text: str) -> str:
    """A text without what is said in it."""
    return re.sub(r'"[^"]*"', '""', text)


def keeps_characters(story: str) -> bool:
    """Whether nobody in a story is doubled, acts on himself, or appears as known without having been introduced."""
    if any(pattern.search(story) for pattern in DOUBLED):
        return False
    told = without_quotes(story)
    sentences = re.split(r"(?<=[.!?])\s+|\n+", told)
    for sentence in sentences:
        for clause in re.split(r"[,;]|\band (?:then|they|she|he|it)\b|\bbecause\b|\bso\b|\bbut\b|\bwhen\b|\bthat\b", sentence):
            names = re.findall(rf"\b({NAME})\b(?!')", clause)
            beings = re.findall(rf"\b(?:[Tt]he|[Aa]n?) (?:\w+ )?({BEINGS})\b(?!')", clause)
            if any(name in GIRLS or name in BOYS for name in names if names.count(name) > 1) or len(set(beings)) < len(beings):
                return False
    return _all_introduced(told, sentences) and _names_said_are_known(story) and not _comes_twice(told)


def _names_said_are_known(story: str) -> bool:
    """Whether a name that is first said by somebody is given there ("My name is Sue"), and parents who are spoken of are in the story."""
    first = (re.search(rf"\b{name}\b", story) for name in (*GIRLS, *BOYS))
    before = [story[: found.start()] for found in first if found]
    if not all(SAID_NAME.search(text) for text in before if text.count('"') % 2):
        return False
    told = without_quotes(story)
    said = re.findall(r'"[^"]*"', story)
    return all(re.search(rf"\b(?:{p})\b", told, re.I) for p in PARENTS if any(re.search(rf"\b(?:{p})\b", text, re.I) for text in said))


def _comes_twice(told: str) -> bool:
    """Whether an animal that is there already appears once more as a new one ("a lion saw a big lion")."""
    seen: set[str] = set()
    for found in NEWCOMER.finditer(told):
        before, animal = found[1].lower(), found[2].lower()
        if OF_ONE_KNOWN.search(before) and before != "there was":
            continue
        if animal in seen:
            return True
        seen.add(animal)
    return False


def _all_introduced(told: str, sentences: list[str]) -> bool:
    beginning = len(" ".join(sentences[:2]))
    for name in (*GIRLS, *BOYS):
        found = re.search(rf"\b{name}\b", told)
        if found and found.start() > beginning and not INTRODUCES.search(told[: found.start()]):
            return False
    known: set[str] = set()
    for found in re.finditer(rf"\b(\w+) (?:\w+ )?({BEINGS})s?\b", told):
        article, being = found[1].lower(), found[2].lower()
        if article == "the" and being not in known:
            return False
        known.add(being)
    return True


def words_of(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]+(?:'[a-z]+)?", text)


def spelled(story: str, known: set[str]) -> bool:
    """Whether all words are among the known ones, which are in lower case; a name that is not must occur twice."""
    words = Counter(words_of(story))
    strange = [word for word in words if word.lower() not in known and word.removesuffix("'s").lower() not in known]
    return all(word[0].isupper() and words[word] + words[f"{word}'s"] > 1 for word in (w.removesuffix("'s") for w in strange))


def first_sentences(stories: list[str]) -> list[str]:
    found = (re.match(r'.*?[.!?]"?(?=\s|$)', story, re.S) for story in stories)
    return list(dict.fromkeys(match[0] for match in found if match))


def own_stories(student: str, stories: list[str], args: argparse.Namespace) -> Iterator[str]:
    """Stories that the student tells from the first sentences of others."""
    model, tokenizer = twoscale.load(student, dtype=args.dtype)
    assert tokenizer is not None
    openings = first_sentences(stories)
    end = model.config.block_size - 1
    for copy in range(args.copies):
        for i in range(0, len(openings), args.rows):
            prompts = [tokenizer.encode(opening) for opening in openings[i : i + args.rows]]
            gen = twoscale.generate(
                model, prompts, end - max(map(len, prompts)), temperature=args.temperature, seed=args.seed + copy, loops=args.loops,
                stop=(tokenizer.eot,), tokenizer=tokenizer,
            )  # fmt: skip
            for opening, tokens, why in zip(openings[i : i + args.rows], gen.tokens, gen.finish_reasons, strict=True):
                if why == "stop":
                    yield opening + tokenizer.decode([token for token in tokens if token != tokenizer.eot]).rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stories", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--student", default=None, help="a run, an export or `bundled`, whose own stories are taken")
    parser.add_argument("--copies", type=int, default=1, help="stories for each first sentence")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--loops", type=int, default=4)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dtype", default="fp32", help="of the student's weights; w8a8 is the fastest")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    stories = [story for file in sorted(args.stories.glob("*.txt")) for story in file.read_text().split(SEPARATOR)[:-1]]
    all_stories = own_stories(args.student, stories, args) if args.student else iter(stories)
    args.out.mkdir(parents=True, exist_ok=True)
    n = kept = 0
    file = args.out / ("own.txt" if args.student else "stories.txt")
    with file.with_suffix(".part").open("w") as part:
        for story in all_stories:
            n += 1
            if sound(story) and keeps_characters(story):
                part.write(story + SEPARATOR)
                kept += 1
    file.with_suffix(".part").rename(file)
    print(f"{file}: {kept:,} of {n:,} stories")


if __name__ == "__main__":
    main()
