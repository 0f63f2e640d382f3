"""Arguments by tyro, with errors folded into one line."""

import contextlib
import io
import os
import re
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import tyro

from twoscale.config import UserError
from twoscale.config.progress import remark

T = TypeVar("T")


def parse(kind: type[T], args: Sequence[str], prog: str, default: Any = None, description: str | None = None) -> T:
    """An instance of the dataclass `kind` from the words of a command line; UserError for words that do not fit."""
    caught = io.StringIO()
    extra = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(caught):
            return cast(T, tyro.cli(kind, prog=prog, args=list(args), description=description, **extra))
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UserError(f"{one_line(caught.getvalue())} (see {prog} --help)") from None


def one_line(boxed: str) -> str:
    """The message of tyro's framed error on one line: what stands between its title and its pointer to the help."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", boxed)
    lines = [line.strip(" │|").strip() for line in text.splitlines()]
    rule = re.compile(r"[─╭╮╰╯+-]{3,}.*")  # the frame and the lines across it, also where the terminal has no box characters
    sections: list[list[str]] = [[]]
    for line in lines:
        if rule.fullmatch(line) or line.startswith("╭─"):
            sections.append([])
        elif line:
            sections[-1].append(line)
    messages = [" ".join(part) for part in sections if part and not part[0].startswith(("For full helptext", "Argument helptext"))]
    titled = 0 if "╭" in text or len(messages) < 2 else 1  # without box characters the title is a section of its own
    return messages[titled] if messages else "these arguments do not fit"


def chosen(args: Sequence[str], flag: str, otherwise: str) -> str:
    """The value of one flag, looked up before the rest is parsed; given twice, the last one counts, as for the parser."""
    found = otherwise
    for i, word in enumerate(args):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") == flag and (equals or i + 1 < len(args)):
            found = value if equals else args[i + 1]
    return found


def options(args: Any) -> dict[str, Any]:
    """The arguments of a command by name, without the run."""
    return {name: value for name, value in vars(args).items() if name != "run"}


def is_main_process() -> bool:
    """Whether this is the first of the processes that torchrun may have started."""
    return os.environ.get("RANK", "0") == "0"


def say(*words: object) -> None:
    """Progress and remarks go to stderr, results to stdout; of several processes the first one speaks."""
    if is_main_process():
        remark(" ".join(map(str, words)))
