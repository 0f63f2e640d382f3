"""Loop groups: layer ids for each group, written `4,5-6,7` on a command line."""

import re
from typing import Annotated

from tyro.constructors import PrimitiveConstructorSpec

from twoscale.config.errors import UserError


def parse_groups(text: str) -> tuple[tuple[int, ...], ...]:
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


def format_groups(groups: tuple[tuple[int, ...], ...]) -> str:
    """The reverse."""
    return ",".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else str(g[0]) for g in groups) or "none"


Groups = Annotated[
    tuple[tuple[int, ...], ...],
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="4,5-6,7",
        instance_from_str=lambda args: parse_groups(args[0]),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [format_groups(value)],
    ),
]
