"""The thread that runs the scheduler. An asyncio event loop submits requests to it and receives their tokens."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass

from twoscale.config import UserError
from twoscale.engine.request import Request
from twoscale.engine.scheduler import Scheduler

INTERNAL_ERROR = "internal server error"


class InternalError(Exception):
    """A request has failed because of an error in the server."""


class Unavailable(Exception):
    """The queue is full, the server is shutting down, or the scheduler's thread has ended with an exception."""


@dataclass(frozen=True)
class Update:
    """New tokens first .. last - 1 of a request, and whether it has ended."""

    first: int
    last: int
    done: bool


class SchedulerThread:
    """Runs the scheduler in its own thread."""

    def __init__(self, scheduler: Scheduler, max_queue: int = 256) -> None:
        self.scheduler, self.max_queue = scheduler, max_queue
        self.failure: str | None = None
        """The exception that ended the thread."""
        self._events: list[tuple[asyncio.AbstractEventLoop, asyncio.Queue[int], int]] = []
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="twoscale scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        """Finish all submitted requests, then end the thread."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(timeout)

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def _run(self) -> None:
        try:
            while True:
                worked = self.scheduler.step()
                self._deliver_events()
                if worked:
                    continue
                if self.stopping:
                    return
                self._wake.wait(0.5)
                self._wake.clear()
        except Exception as error:  # the thread ends: requests must not wait for ever
            self.failure = f"{type(error).__name__}: {error}"
            self._fail_all()
            raise

    def _fail_all(self) -> None:
        """End all requests with an error."""
        for request in self.scheduler.remove_all():
            request.error, request.finish_reason = InternalError(INTERNAL_ERROR), "error"
            if request.on_token is not None:
                request.on_token(request)
        self._deliver_events()

    def _deliver_events(self) -> None:
        """Send the events of a scheduler step to the event loops, with one call for each loop: waking a loop is the expensive part."""
        events, self._events = self._events, []
        for loop in dict.fromkeys(event[0] for event in events):
            loop_events = [(queue, i) for its_loop, queue, i in events if its_loop is loop]
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_put_all, loop_events)

    def submit(self, requests: list[Request]) -> None:
        """Add requests to the scheduler, all of them or none; Unavailable or UserError if they cannot be served."""
        self.check_queue(len(requests))
        for request in requests:
            self.scheduler.check(request)
        for request in requests:
            self.scheduler.add(request)
        if self.failure is not None:  # the thread has ended since check_queue
            self._fail_all()
        self._wake.set()

    def check_queue(self, n_requests: int) -> None:
        """Raise Unavailable if `n_requests` more do not fit the queue, the server is shutting down, or the scheduler's thread has ended."""
        if self.failure is not None or self.stopping:
            raise Unavailable("the server is shutting down" if self.failure is None else INTERNAL_ERROR)
        if len(self.scheduler.waiting) + n_requests > self.max_queue:
            raise Unavailable("too many requests are waiting")

    async def submit_and_stream(self, requests: list[Request], timeout: float) -> AsyncIterator[tuple[int, Update]]:
        """Submit requests and yield (index of the request, update) as tokens are generated. Closing the iterator cancels them."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[int] = asyncio.Queue()
        index = {request: i for i, request in enumerate(requests)}
        for request in requests:
            request.on_token = lambda request: self._events.append((loop, queue, index[request]))
        self.submit(requests)
        n_seen = [0] * len(requests)
        live = set(range(len(requests)))
        deadline = loop.time() + timeout
        try:
            while live:
                async with asyncio.timeout_at(deadline):
                    i = await queue.get()
                request = requests[i]
                done = bool(request.finish_reason)  # read before the number of tokens: later tokens belong to the next update
                n = len(request.tokens)
                if request.error is not None:
                    raise InternalError(str(request.error) if isinstance(request.error, UserError | InternalError) else INTERNAL_ERROR)
                if i in live and (n > n_seen[i] or done):
                    yield i, Update(n_seen[i], n, done)
                    n_seen[i] = n
                if done:
                    live.discard(i)
        finally:
            for i in live:
                requests[i].cancelled = True
            self._wake.set()


def _put_all(events: list[tuple[asyncio.Queue[int], int]]) -> None:
    for queue, i in events:
        queue.put_nowait(i)
