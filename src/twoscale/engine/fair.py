"""Fair shares: how clients divide the engine among themselves.

A share (all texts of one HTTP request) has a virtual time: the layer applications that its rows have taken. Those who have had the least go
first, between two calls of the engine, so a client that asks for much slows the others down by its share and no more. A share that begins
has the virtual time of the one that is being served: the past of the others is neither a debt nor a credit.

Three bounds on one share while there are others:

    rows in a round   no more than all others together have, and none while it has several texts and is ahead of the others
    running texts     half of max_num_seqs; a share without a running text begins even where all of them are taken
    cache bytes       half of what the others leave; alone, three quarters of it, so that there is room for whoever comes
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from twoscale.engine.request import Request, Share

QUANTUM = 16.0  # layer applications of one row: a share may be ahead of another by this much before it lets it go first
CACHE_ALONE, CACHE_CONTESTED = 0.75, 0.5  # of the cache that the others leave


@dataclass
class FairShares:
    """The order in which requests are served."""

    now: float = 0.0
    """Virtual time of the share that is being served."""
    held: Counter[Share] = field(default_factory=Counter)
    """Bytes of cache that the running texts of each share may come to hold."""

    def begin(self, request: Request, size: int) -> None:
        """A text begins to run, with so many bytes of cache."""
        if request.share not in self.held:
            request.share.work = max(request.share.work, self.now)
        self.held[request.share] += size

    def end(self, request: Request, size: int) -> None:
        """A text has ended."""
        self.held[request.share] -= size
        if self.held[request.share] <= 0:
            del self.held[request.share]

    def next(
        self, waiting: Iterable[Request], running: Sequence[Request], max_num_seqs: int, cache: float, size: Callable[[Request], int]
    ) -> Request | None:
        """The waiting text that is to begin now, if any: of the share with the fewest running ones, first come, first served.

        A share without a running text is not overtaken where its cache does not fit yet.
        """
        texts = Counter(request.share for request in running)
        if len(texts) >= max_num_seqs:  # each of them is another client's
            return None
        firsts: dict[Share, Request] = {}
        for request in waiting:
            firsts.setdefault(request.share, request)
        contested = len(texts.keys() | firsts.keys()) > 1
        free = cache - self.held.total()
        for share, request in sorted(firsts.items(), key=lambda entry: texts[entry[0]]):
            need, own = size(request), self.held[share]
            if not texts[share]:
                return request if need <= free else None
            cache_limit = (CACHE_CONTESTED if contested else CACHE_ALONE) * (own + free)
            limit = max(1, max_num_seqs // 2) if contested else max_num_seqs
            if len(running) < max_num_seqs and texts[share] < limit and own + need <= cache_limit:
                return request
        return None


def ahead(texts: Mapping[Share, Sequence[object]]) -> list[Share]:
    """The shares with several texts that are ahead of another one by more than QUANTUM."""
    least = min(share.work for share in texts)
    return [share for share, own in texts.items() if len(own) > 1 and share.work > least + QUANTUM]


def select(requests: Sequence[Request], rows: int, beside: Sequence[Request] = ()) -> list[Request]:
    """Texts for one round, at most `rows`; shares take turns, the one that has had the least first. `beside` are in flight already.

    Beyond its first text a share has no more of them than all others have together. One with several texts that is ahead of the others has
    none: it has a round when they have caught up with it.
    """
    by_share: dict[Share, list[Request]] = {}
    for request in requests:
        by_share.setdefault(request.share, []).append(request)
    if len(by_share) == 1 and not beside:
        return list(requests[:rows])
    everybody: dict[Share, list[Request]] = {share: list(own) for share, own in by_share.items()}
    for request in beside:
        everybody.setdefault(request.share, []).append(request)
    for share in ahead(everybody):
        by_share.pop(share, None)
    shares = sorted(by_share, key=lambda share: share.work)
    if sum(map(len, by_share.values())) > len(shares):
        largest = max(shares, key=lambda share: len(by_share[share]))
        others = sum(len(by_share[share]) for share in shares if share is not largest)
        del by_share[largest][max(1, others) :]
    turns = zip_longest(*(by_share[share] for share in shares))
    return [request for texts_ in turns for request in texts_ if request is not None][:rows]
