"""Where progress goes: to stderr, or for a while to a function that somebody has put in its place.

`twoscale reproduce` runs the work of several commands, each with progress of its own, and shows all of it on one line.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Listener = Callable[[str, float | None], None]
"""Called with what is being done and which share of it is done (0 to 1), or with a remark and None."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def progress_to(listener: Listener) -> Iterator[None]:
    """Send progress and remarks to this function."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def listening() -> Listener | None:
    """The function that progress is sent to; None where it is printed."""
    return _listener.get()


def remark(text: str) -> None:
    """A line of its own: on stderr, or to the function that listens."""
    listener = _listener.get()
    if listener is None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    else:
        listener(text, None)
