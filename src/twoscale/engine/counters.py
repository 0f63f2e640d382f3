"""Counters of a scheduler: stage passes, rows, tokens and time since its start."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from twoscale.engine.speculation import NO_SPECULATION_STATS, SpeculationStats


@dataclass
class Counters:
    """Statistics since the start."""

    stage_passes: int = 0
    """Loop steps, and passes through plain stages, each over all rows that take it."""
    rows: int = 0
    """Rows of all stage passes together."""
    tokens: int = 0
    """Generated tokens."""
    processed_tokens: int = 0
    """Tokens whose forward pass is done, prompts included."""
    engine_seconds: float = 0.0
    finished: int = 0
    """Requests that were started and have ended, for any reason."""
    loop_steps: list[int] = field(default_factory=list)
    """For each group, the loop steps of all rows. With speculation this includes drafts and rejected guesses."""
    speculation_stats: SpeculationStats = NO_SPECULATION_STATS
    """Guesses of the requests that have ended."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time of the block as `engine_seconds`."""
        started = time.perf_counter()
        yield
        self.engine_seconds += time.perf_counter() - started
