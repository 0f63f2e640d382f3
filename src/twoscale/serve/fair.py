"""Fair shares: how requests divide the engine among themselves.

A request (all texts of one HTTP request) has a virtual time: the layer applications that its rows have taken. Whoever has the least goes
first, between two calls of the engine, so a request that asks for much slows the others down by its share and no more. A request that
begins has the virtual time of the one that is being served: the past of the others is neither a debt nor a credit.

Three bounds on one request while there are others:

    rows in a round   no more than all others together have; its first text is always there
    running texts     half of the rows; a request without a running text begins even where the rows are taken
    cache bytes       half of what the others leave; alone, three quarters of it, so that there is room for whoever comes
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from twoscale.engine.cache import Cache
from twoscale.engine.rows import Part
from twoscale.serve.job import Job, Share

QUANTUM = 16.0  # layer applications of one row: so far a request may be ahead of another before it lets it go first
ALONE, CONTESTED = 0.75, 0.5  # of the cache that the others leave


@dataclass
class FairShares:
    """The order in which requests are served."""

    now: float = 0.0
    """Virtual time of the request that is being served."""
    held: Counter[Share] = field(default_factory=Counter)
    """Bytes of cache that the running texts of each request may come to hold."""

    def begin(self, job: Job, size: int) -> None:
        """A text begins to run, with so many bytes of cache."""
        if job.share not in self.held:
            job.share.work = max(job.share.work, self.now)
        self.held[job.share] += size

    def end(self, job: Job, size: int) -> None:
        """A text has ended."""
        self.held[job.share] -= size
        if self.held[job.share] <= 0:
            del self.held[job.share]

    def lead(self, running: Sequence[Job]) -> tuple[Job, float]:
        """The running text whose request has had the least, and the least of the requests with other settings (infinite if none)."""
        first = min(running, key=lambda job: job.share.work)
        self.now = max(self.now, first.share.work)
        return first, min((job.share.work for job in running if job.settings != first.settings), default=float("inf"))

    def next(self, waiting: Iterable[Job], running: Sequence[Job], rows: int, cache: int, size: Callable[[Job], int]) -> Job | None:
        """The waiting text that is to begin now, if any: of the request with the fewest running ones, first come, first served.

        A request without a running text is not overtaken where its cache does not fit yet.
        """
        texts = Counter(job.share for job in running)
        if len(texts) >= rows:  # each row has a request of its own
            return None
        firsts: dict[Share, Job] = {}
        for job in waiting:
            firsts.setdefault(job.share, job)
        contested = len(texts.keys() | firsts.keys()) > 1
        free = cache - self.held.total()
        for share, job in sorted(firsts.items(), key=lambda entry: texts[entry[0]]):
            need, own = size(job), self.held[share]
            if not texts[share]:
                return job if need <= free else None
            most = (CONTESTED if contested else ALONE) * (own + free)
            if len(running) < rows and texts[share] < (max(1, rows // 2) if contested else rows) and own + need <= most:
                return job
        return None


def charge(parts: Iterable[Part], layers: int, shares: Mapping[Cache, Share]) -> None:
    """A call took these rows through so many layers; `shares` has the request of each cache."""
    for part in parts:
        shares[part.cache].work += part.count * layers


def select(jobs: Sequence[Job], rows: int) -> list[Job]:
    """Texts for one round, at most `rows`; requests take turns, the one that has had the least first.

    Beyond its first text a request has no more of them than all others have together, and those that still read their prompt wait until
    the request is not ahead of the others.
    """
    by_share: dict[Share, list[Job]] = {}
    for job in jobs:
        by_share.setdefault(job.share, []).append(job)
    if len(by_share) == 1:
        return list(jobs[:rows])
    shares = sorted(by_share, key=lambda share: share.work)
    if len(shares) < len(jobs):
        for share in shares:
            ahead = share.work > shares[0].work + QUANTUM
            by_share[share] = [job for i, job in enumerate(by_share[share]) if not (i and ahead and job.reading)]
        largest = max(shares, key=lambda share: len(by_share[share]))
        others = sum(len(by_share[share]) for share in shares if share is not largest)
        del by_share[largest][max(1, others) :]
    turns = zip_longest(*(by_share[share] for share in shares))
    return [job for turn in turns for job in turn if job is not None][:rows]
