"""The progress line of `prepare`: documents and tokens so far, and how fast."""

import sys
import time
from types import TracebackType

from tqdm import tqdm

from twoscale.config.progress import listening


class DocumentLine:
    """A bar on a terminal, a line every few seconds elsewhere, or words for a listener. Call it as prepare's `progress`."""

    def __init__(self, seconds: float = 15.0) -> None:
        self.seconds, self.printed = seconds, time.monotonic()
        self.listener = listening()
        drawn = self.listener is None and sys.stderr.isatty()
        self.bar = tqdm(unit=" documents", file=sys.stderr, dynamic_ncols=True) if drawn else None

    def __call__(self, documents: int, tokens: int, doing: str) -> None:
        if self.listener is not None:
            self.listener(f"{doing}, {documents:,} documents", 0.0)
        elif self.bar is not None:
            self.bar.set_description_str(doing, refresh=False)
            self.bar.set_postfix_str(f"{tokens / 1e6:.2f}M training tokens", refresh=False)
            self.bar.update(documents - self.bar.n)
        elif time.monotonic() - self.printed >= self.seconds:
            self.printed = time.monotonic()
            print(f"{doing}: {documents:,} documents, {tokens / 1e6:.2f}M training tokens", file=sys.stderr, flush=True)

    def __enter__(self) -> "DocumentLine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.bar is not None:
            self.bar.close()
