"""Arguments by tyro, with two additions: errors are one line, and loop groups are written `4,5-6,7`."""

import contextlib
import io
import re
import sys
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from twoscale.config import UserError

T = TypeVar("T")
Groups = tuple[tuple[int, ...], ...]

registry = ConstructorRegistry()


@registry.primitive_rule
def _groups_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Groups] | None:
    if info.type != Groups:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="4,5-6,7",
        instance_from_str=lambda args: parse_groups(args[0]),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [format_groups(value)],
    )


def parse_groups(text: str) -> Groups:
    """`4,5-6,7` to ((4,), (5, 6), (7,)); `none` to no groups at all."""
    if text == "none":
        return ()
    groups = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part.strip())
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise UserError(f"{text!r} is no list of loop groups: write 4,5-6,7 for the groups [4], [5, 6] and [7], or none")
        groups.append(tuple(range(int(match[1]), int(match[2] or match[1]) + 1)))
    return tuple(groups)


def format_groups(groups: Groups) -> str:
    return ",".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else str(g[0]) for g in groups) or "none"


def parse(kind: type[T], args: Sequence[str], prog: str, default: Any = None, description: str | None = None) -> T:
    """An instance of the dataclass `kind` from the words of a command line; UserError for words that do not fit."""
    caught = io.StringIO()
    extra = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(caught):
            return cast(T, tyro.cli(kind, prog=prog, args=list(args), description=description, registry=registry, **extra))
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UserError(f"{one_line(caught.getvalue())} (see {prog} --help)") from None


def one_line(boxed: str) -> str:
    """The message of tyro's framed error: what stands above its first rule, on one line."""
    words: list[str] = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", boxed).splitlines():
        inner = line.strip().strip("│╭╮╰╯").strip()
        if words and re.fullmatch(r"─{5,}", inner):
            break
        if inner and not re.match(r"^─ .* ─+$", inner) and not re.fullmatch(r"─+", inner):
            words.append(inner)
    return " ".join(words) or "these arguments do not fit"


def chosen(args: Sequence[str], flag: str, otherwise: str) -> str:
    """The value of one flag, looked up before the rest is parsed."""
    for i, word in enumerate(args):
        if word == flag and i + 1 < len(args):
            return args[i + 1]
        if word.startswith(flag + "="):
            return word.split("=", 1)[1]
    return otherwise


def say(*words: object) -> None:
    """Progress and remarks go to stderr, results to stdout."""
    print(*words, file=sys.stderr, flush=True)
