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
from story_corpus import pieces, sound
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
NAME = r"(?!(?:The|An?|She|He|It|They|We|You|But|Then|One|His|Her|Let|Don|Yes|No|Thank|Can|Look|What|Why)\b)[A-Z][a-z]+"
WORD = r"[A-Za-z]+(?:'[a-z]+)?"
CLAUSE_END = r"(?<=[.!?])\s+|\n+|[,;]|\band (?:then|they|she|he|it)\b|\band (?=[A-Z])|\bbecause\b|\bso\b|\bbut\b|\bwhen\b|\bthat\b"
INTRODUCES = re.compile(r"\b(?:named|called|friends?|sister|brother|name|names|cousin|neighbor|cat|dog|puppy|kitten)\b[^.!?]{0,20}$")
SAID_NAME = re.compile(r"\b(?:I am|I'm|name is|named|called|friends?|[Tt]his is|[Ii]t's|[Ii]t is)\b[^.!?]{0,20}$")
SMALL_WORDS = "with|of|and|to|in|on|at|for|from|who|that|the|an?|his|her|their|its|was|is|had|very"
NEWCOMER = re.compile(rf"\b(\w+ \w+) an? (?:(?!(?:{SMALL_WORDS})\b)\w+,? ){{0,3}}?({ANIMALS})\b", re.I)
OF_ONE_KNOWN = re.compile(r"\b(?:was|were|is|be|been|like|as|not|become|became|into|of|about|such|just|now|really)$")
ROLES = ("doctor", "teacher", "policeman", "farmer", "animal")  # somebody whom a place brings along
DOUBLED = (
    re.compile(rf"\b({NAME}) and \1\b"),
    re.compile(rf"\b(?:the|a|an|another|other) (?:\w+ )?({BEINGS}) and (?:the|a|an|another|other) (?:\w+ )?\1\b", re.I),
    re.compile(
        rf"\b({NAME})(?: (?!and\b)\w+)? (?:said|asked|replied|told|answered)\b[^.!?\"]*\"[^\"]*\b(?<!I am )(?<!I'm )(?<!name is )\1\b"
    ),
    re.compile(rf"\"[^\"]*\b(?<!I am )(?<!I'm )(?<!name is )({NAME})\b[^\"]*\" (?:said|asked|replied|answered) \1\b"),
    re.compile(r"\b(\w{3,}) and (?:some|the|a|an|his|her|their|its|more) \1\b"),
)
PARENTS = (r"mom|mommy|mama|mother|parents|family", r"dad|daddy|papa|father|parents|family")


def without_quotes(story: str) -> str:
    """A story in which what somebody says is blank, so that offsets stay the same."""
    return re.sub(r'"[^"]*"', lambda quote: '"' + " " * (len(quote[0]) - 2) + '"', story)


def faults(story: str) -> list[int]:
    """Offsets of the words with which somebody in a story is doubled, acts on himself, or appears as known and was not introduced."""
    told = without_quotes(story)
    doubled = {found.end() - len(found[1]) for pattern in DOUBLED for found in pattern.finditer(story)}
    return sorted(
        {*doubled, *_twice_in_a_clause(told), *_not_introduced(told), *_not_known_to_the_speaker(story, told), *_comes_twice(told)}
    )


def keeps_characters(story: str) -> bool:
    return not faults(story)


def _twice_in_a_clause(told: str) -> Iterator[int]:
    for start, clause in pieces(told, CLAUSE_END):
        seen: set[str] = set()
        for found in re.finditer(rf"\b(?:(?:[Tt]he|[Aa]n?) (?:\w+ )?({BEINGS})|({NAME}))\b(?!')", clause):
            if (found[1] and not OF_ONE_KNOWN.search(clause[: found.start()].rstrip())) or found[2] in GIRLS or found[2] in BOYS:
                if found[1 if found[1] else 2] in seen:
                    yield start + found.start(1 if found[1] else 2)
                seen.add(found[1] or found[2])


def _not_introduced(told: str) -> Iterator[int]:
    """Names after the first two sentences, and beings with "the", that come without a word that introduces them."""
    starts = [start for start, _ in pieces(told, r"(?<=[.!?])\s+|\n+")]
    for name in (*GIRLS, *BOYS):
        found = re.search(rf"\b{name}\b", told)
        if found and len(starts) > 2 and found.start() > starts[2] and not INTRODUCES.search(told[: found.start()]):
            yield found.start()
    known: set[str] = set()
    for found in re.finditer(rf"\b(\w+) (?:\w+ )?({BEINGS})s?\b", told):
        article, being = found[1].lower(), found[2].lower()
        if article == "the" and being not in known and being not in ROLES and not re.search(r"\bfriends?, $", told[: found.start()]):
            yield found.start(2)
        known.add(being)


def _not_known_to_the_speaker(story: str, told: str) -> Iterator[int]:
    """Names that are first said by somebody and not given there ("My name is Sue"), and parents who are spoken of but not in the story."""
    first = [found for name in (*GIRLS, *BOYS) if (found := re.search(rf"\b{name}\b", story))]
    for found in first:
        before = story[: found.start()]
        if before.count('"') % 2 and not SAID_NAME.search(before):
            yield found.start()
    for parents in PARENTS:
        found = re.search(rf"\b(?:{parents})\b", story, re.I)
        if found and not re.search(rf"\b(?:{parents})\b", told, re.I):
            yield found.start()


def _comes_twice(told: str) -> Iterator[int]:
    """Animals that are there already and appear once more as new ones ("a lion saw a big lion")."""
    seen: set[str] = set()
    for found in NEWCOMER.finditer(told):
        before, animal = found[1].lower(), found[2].lower()
        if OF_ONE_KNOWN.search(before) and before != "there was":
            continue
        if animal in seen:
            yield found.start(2)
        seen.add(animal)


def words_of(text: str) -> list[str]:
    return re.findall(WORD, text)


def misspelled(story: str, known: set[str]) -> list[int]:
    """Offsets of the last letters of words that are not among the known ones (in lower case); a name is known if it occurs twice."""
    words = Counter(word.removesuffix("'s") for word in words_of(story))
    strange = {w for w, n in words.items() if w.lower() not in known and not (w[0].isupper() and n > 1)}
    return [
        found.end() - 1 for found in re.finditer(WORD, story) if found[0].removesuffix("'s") in strange and found[0].lower() not in known
    ]


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
