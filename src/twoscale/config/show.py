"""Values on one line: tensors and arrays by shape and dtype, long lists by their first entries and their length."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from twoscale.config.errors import missing_package

FIRST = 3  # entries of a long list that are shown
LONG = 12  # entries from which on a list is long
WIDE = 60  # characters of a text


class ShortRepr:
    """Mixin for dataclasses (with repr=False): a repr of one line, tensors by shape and dtype."""

    def __repr__(self) -> str:
        fields = (f for f in dataclasses.fields(self) if f.repr)  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{f.name}={one_line(getattr(self, f.name))}' for f in fields)})"


def one_line(value: Any) -> str:
    """A short text without line breaks for a value."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, list | tuple):
        shown = [one_line(v) for v in value[: FIRST if len(value) > LONG else None]]
        if len(value) > LONG:
            shown.append(f"... {len(value)} in all")
        inside = ", ".join(shown)
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{one_line(k)}: {one_line(v)}" for k, v in list(value.items())[:LONG]) + ", ..." * (len(value) > LONG) + "}"
    shown_text = " ".join(repr(value).split())
    return shown_text if len(shown_text) <= WIDE else f"{shown_text[: WIDE - 4]} ..."


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows as a pandas DataFrame; pandas is an extra and imported here alone."""
    try:
        import pandas
    except ModuleNotFoundError:
        raise missing_package("to_pandas needs pandas", "pandas") from None
    return pandas.DataFrame([dict(row) for row in rows])
