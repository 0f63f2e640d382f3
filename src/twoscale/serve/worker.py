"""The thread that runs the scheduler, and the queue through which jobs come from the server's event loop."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass

from twoscale.serve.job import Job
from twoscale.serve.scheduler import Scheduler


class Failed(Exception):
    """A request that went wrong inside."""


class Busy(Exception):
    """The queue is full."""


@dataclass(frozen=True)
class News:
    """What has come since the last word of a job: its tokens from `first` to `last`, and whether that is all."""

    first: int
    last: int
    done: bool


class Worker:
    """Runs the scheduler in a thread of its own. Jobs are submitted and heard from an event loop."""

    def __init__(self, scheduler: Scheduler, queue: int = 256) -> None:
        self.scheduler, self.queue = scheduler, queue
        self.failure: str | None = None
        self._told: list[tuple[asyncio.AbstractEventLoop, asyncio.Queue[int], int]] = []
        self._work, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="twoscale scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float = 30.0) -> None:
        """Finish what is there, then end."""
        self._stopping.set()
        self._work.set()
        self._thread.join(seconds)

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def _run(self) -> None:
        try:
            while True:
                worked = self.scheduler.step()
                self._pass_on()
                if worked:
                    continue
                if self.stopping:
                    return
                self._work.wait(0.5)
                self._work.clear()
        except Exception as error:  # a fault of ours: nobody must wait for ever
            self.failure = f"{type(error).__name__}: {error}"
            self._give_up()
            raise

    def _give_up(self) -> None:
        """Tell everybody that nothing more will come."""
        for job in self.scheduler.abandon():
            job.error, job.finish = "the server has failed inside", "error"
            if job.told is not None:
                job.told(job)
        self._pass_on()

    def _pass_on(self) -> None:
        """All news of a round in one message to each event loop: waking it costs more than the news."""
        told, self._told = self._told, []
        for loop in dict.fromkeys(entry[0] for entry in told):
            news = [(heard, i) for its, heard, i in told if its is loop]
            with contextlib.suppress(RuntimeError):  # a loop that is closed hears nothing
                loop.call_soon_threadsafe(_deliver, news)

    def submit(self, jobs: list[Job]) -> None:
        """All of them or none."""
        self.check_room(len(jobs))
        for job in jobs:
            self.scheduler.check(job)
        for job in jobs:
            self.scheduler.submit(job)
        if self.failure is not None:  # just now
            self._give_up()
        self._work.set()

    def check_room(self, jobs: int) -> None:
        """Busy where so many more cannot wait now."""
        if self.failure is not None or self.stopping:
            raise Busy("the server is going down" if self.failure is None else "the server has failed inside")
        if len(self.scheduler.waiting) + jobs > self.queue:
            raise Busy("too many requests are waiting")

    async def listen(self, jobs: list[Job], seconds: float) -> AsyncIterator[tuple[int, News]]:
        """Submit jobs and hear of them as tokens come: (number of the job, news). Whoever stops listening cancels them."""
        loop = asyncio.get_running_loop()
        heard: asyncio.Queue[int] = asyncio.Queue()
        number = {job: i for i, job in enumerate(jobs)}
        for job in jobs:
            job.told = lambda job: self._told.append((loop, heard, number[job]))
        self.submit(jobs)
        told = [0] * len(jobs)
        live = set(range(len(jobs)))
        deadline = loop.time() + seconds
        try:
            while live:
                async with asyncio.timeout_at(deadline):
                    i = await heard.get()
                job = jobs[i]
                done = bool(job.finish)  # first: tokens that come meanwhile are news of their own
                now = len(job.tokens)
                if job.error:
                    raise Failed(job.error)
                if i in live and (now > told[i] or done):
                    yield i, News(told[i], now, done)
                    told[i] = now
                if done:
                    live.discard(i)
        finally:
            for i in live:
                jobs[i].cancelled = True
            self._work.set()


def _deliver(news: list[tuple[asyncio.Queue[int], int]]) -> None:
    for heard, i in news:
        heard.put_nowait(i)
