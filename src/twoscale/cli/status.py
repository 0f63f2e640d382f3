"""The progress of `twoscale reproduce`: one line on what is being done and what is left, and a line for each stage that is done."""

import shutil
import sys
import time
from collections.abc import Sequence
from typing import TextIO

QUIET_SECONDS = 20.0  # between two lines of one stage where no terminal listens
REDRAW_SECONDS = 0.1
EARLY = 0.02  # share of all work; before it an estimate tells nothing


class StatusLine:
    """Stages with the seconds that each is expected to take, from which the time that is left is estimated as they proceed.

    On a terminal the line is redrawn in place; elsewhere a new one is printed now and then.
    """

    def __init__(self, stages: Sequence[tuple[str, float]], out: TextIO | None = None) -> None:
        self.names, self.expected = [name for name, _ in stages], [seconds for _, seconds in stages]
        self.out = out or sys.stderr
        self.drawn = self.out.isatty()
        self.began = self.began_stage = self.shown = time.monotonic()
        self.stage, self.share, self.remark, self.worked = 0, 0.0, "", 0.0

    def begin(self, stage: int) -> None:
        """Stage number `stage` (from 0) starts."""
        self.stage, self.share, self.remark = stage, 0.0, ""
        self.began_stage = self.shown = time.monotonic()
        self._show("", redraw=True)

    def hear(self, words: str, share: float | None) -> None:
        """Progress within the stage (`twoscale.config.progress.Listener`). The last remark, with a share of None, becomes its result."""
        if share is None:
            self.remark = words
        else:
            self.share = share
        self._show(words.splitlines()[-1] if words else "", redraw=False)

    def end(self) -> None:
        """The stage is done: its line stays, with the time it took and its last remark."""
        took = time.monotonic() - self.began_stage
        self.expected[self.stage], self.worked = (self.expected[self.stage], self.worked + took) if took >= 1 else (0.0, self.worked)
        lines = self.remark.splitlines() or ["done"]
        self._clear()
        print(f"{self._label()}  {clock(took)}  {lines[0]}", *(f"    {line}" for line in lines[1:]), sep="\n", file=self.out, flush=True)

    def close(self) -> None:
        """Leave nothing half drawn."""
        self._clear()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def left(self) -> float | None:
        """Seconds that are left, by the pace so far; None while it is too early to tell."""
        done = sum(self.expected[: self.stage]) + self.share * self.expected[self.stage]
        total = sum(self.expected)
        if total <= 0 or done < EARLY * total:
            return None
        worked = self.worked + (time.monotonic() - self.began_stage if self.share else 0.0)
        return worked / done * (total - done)

    def _label(self) -> str:
        width = max(map(len, self.names))
        return f"[{self.stage + 1}/{len(self.names)}] {self.names[self.stage]:{width}}"

    def _show(self, words: str, redraw: bool) -> None:
        now = time.monotonic()
        if not redraw and now - self.shown < (REDRAW_SECONDS if self.drawn else QUIET_SECONDS):
            return
        self.shown = now
        left = self.left()
        when = f"{clock(self.elapsed)} so far" + (f", about {clock(left)} left" if left is not None else "")
        line = f"{self._label()}  {when}" + (f"  {words}" if words else "")
        if self.drawn:
            columns = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{line[:columns]}", end="", file=self.out, flush=True)
        elif not redraw:
            print(line, file=self.out, flush=True)

    def _clear(self) -> None:
        if self.drawn:
            print("\r\x1b[K", end="", file=self.out, flush=True)


def clock(seconds: float) -> str:
    """4:05."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
