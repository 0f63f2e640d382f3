"""The thread that runs the scheduler, and the queue through which requests come from the server's event loop."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass

from twoscale.config import UserError
from twoscale.engine.request import Request
from twoscale.engine.scheduler import Scheduler

INTERNAL_ERROR = "the server has failed inside"


class InternalError(Exception):
    """A request that went wrong inside."""


class Busy(Exception):
    """The queue is full."""


@dataclass(frozen=True)
class Update:
    """What has come of a request since its last update: its tokens from `first` to `last`, and whether that is all."""

    first: int
    last: int
    done: bool


class Worker:
    """Runs the scheduler in a thread of its own. Requests are submitted and followed from an event loop."""

    def __init__(self, scheduler: Scheduler, max_queue: int = 256) -> None:
        self.scheduler, self.max_queue = scheduler, max_queue
        self.failure: str | None = None
        self._events: list[tuple[asyncio.AbstractEventLoop, asyncio.Queue[int], int]] = []
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="twoscale scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 30.0) -> None:
        """Finish what is there, then end."""
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
        except Exception as error:  # a fault of ours: nobody must wait for ever
            self.failure = f"{type(error).__name__}: {error}"
            self._fail_all()
            raise

    def _fail_all(self) -> None:
        """End all requests with an error."""
        for request in self.scheduler.remove_all():
            request.error, request.finish = InternalError(INTERNAL_ERROR), "error"
            if request.on_token is not None:
                request.on_token(request)
        self._deliver_events()

    def _deliver_events(self) -> None:
        """All events of a round in one call to each event loop: waking a loop costs more than the events."""
        events, self._events = self._events, []
        for loop in dict.fromkeys(event[0] for event in events):
            own = [(queue, i) for its_loop, queue, i in events if its_loop is loop]
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_put_all, own)

    def submit(self, requests: list[Request]) -> None:
        """All of them or none."""
        self.check_queue(len(requests))
        for request in requests:
            self.scheduler.check(request)
        for request in requests:
            self.scheduler.add(request)
        if self.failure is not None:  # just now
            self._fail_all()
        self._wake.set()

    def check_queue(self, requests: int) -> None:
        """Busy where so many more cannot wait now."""
        if self.failure is not None or self.stopping:
            raise Busy("the server is going down" if self.failure is None else INTERNAL_ERROR)
        if len(self.scheduler.waiting) + requests > self.max_queue:
            raise Busy("too many requests are waiting")

    async def follow(self, requests: list[Request], timeout: float) -> AsyncIterator[tuple[int, Update]]:
        """Submit requests and follow them as tokens come: (number of the request, update). They are cancelled when nobody follows them."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[int] = asyncio.Queue()
        number = {request: i for i, request in enumerate(requests)}
        for request in requests:
            request.on_token = lambda request: self._events.append((loop, queue, number[request]))
        self.submit(requests)
        n_seen = [0] * len(requests)
        live = set(range(len(requests)))
        deadline = loop.time() + timeout
        try:
            while live:
                async with asyncio.timeout_at(deadline):
                    i = await queue.get()
                request = requests[i]
                done = bool(request.finish)  # first: tokens that come meanwhile are an update of their own
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
