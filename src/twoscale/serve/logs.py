"""Rate limits for log messages, so that clients cannot fill the disk."""

import logging
import time

LOG = logging.getLogger("twoscale.serve")
LOGGERS = ("twoscale", "twoscale.serve", "uvicorn.error", "asyncio")
MAX_MESSAGES, PERIOD = 5, 60.0


class RateLimit(logging.Filter):
    """At most `max_messages` messages in `seconds` from one line of code; the next message tells how many were left out."""

    def __init__(self, max_messages: int = MAX_MESSAGES, seconds: float = PERIOD) -> None:
        super().__init__()
        self.max_messages, self.seconds = max_messages, seconds
        self.counts: dict[tuple[str, int], tuple[float, int]] = {}
        """For each line of code: when its current period began, and the number of messages since."""

    def filter(self, record: logging.LogRecord) -> bool:
        key, now = (record.pathname, record.lineno), time.monotonic()
        began, count = self.counts.get(key, (now, 0))
        if now - began > self.seconds:
            if count > self.max_messages:
                record.msg, record.args = f"{record.getMessage()} ({count - self.max_messages} more like it were left out)", ()
            began, count = now, 0
        self.counts[key] = began, count + 1
        return count < self.max_messages


def limit_logs() -> None:
    """Limit the messages of the server, of uvicorn and of asyncio."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(existing, RateLimit) for existing in logger.filters):
            logger.addFilter(RateLimit())
