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

from twoscale.engine.request import Client, Request

QUANTUM = 16.0  # layer applications of one row: a share may be ahead of another by this much before it lets it go first
CACHE_ALONE, CACHE_CONTESTED = 0.75, 0.5  # of the cache that the others leave


@dataclass
class FairShares:
    """The order in which requests are served."""

    virtual_time: float = 0.0
    """Virtual time of the share that is being served."""
    reserved: Counter[Client] = field(default_factory=Counter)
    """Bytes of cache that the running texts of each share may come to hold."""

    def begin(self, request: Request, size: int) -> None:
        """A text begins to run, with so many bytes of cache."""
        if request.client not in self.reserved:
            request.client.virtual_time = max(request.client.virtual_time, self.virtual_time)
        self.reserved[request.client] += size

    def end(self, request: Request, size: int) -> None:
        """A text has ended."""
        self.reserved[request.client] -= size
        if self.reserved[request.client] <= 0:
            del self.reserved[request.client]

    def next(
        self, waiting: Iterable[Request], running: Sequence[Request], max_num_seqs: int, cache: float, size: Callable[[Request], int]
    ) -> Request | None:
        """The waiting text that is to begin now, if any: of the share with the fewest running ones, first come, first served.

        A share without a running text is not overtaken where its cache does not fit yet.
        """
        n_running = Counter(request.client for request in running)
        if len(n_running) >= max_num_seqs:  # each of them is another client's
            return None
        firsts: dict[Client, Request] = {}
        for request in waiting:
            firsts.setdefault(request.client, request)
        contested = len(n_running.keys() | firsts.keys()) > 1
        free = cache - self.reserved.total()
        for client, request in sorted(firsts.items(), key=lambda entry: n_running[entry[0]]):
            need, own = size(request), self.reserved[client]
            if not n_running[client]:
                return request if need <= free else None
            cache_limit = (CACHE_CONTESTED if contested else CACHE_ALONE) * (own + free)
            limit = max(1, max_num_seqs // 2) if contested else max_num_seqs
            if len(running) < max_num_seqs and n_running[client] < limit and own + need <= cache_limit:
                return request
        return None


def clients_ahead(n_running: Mapping[Client, Sequence[object]]) -> list[Client]:
    """The shares with several texts that are ahead of another one by more than QUANTUM."""
    least = min(client.virtual_time for client in n_running)
    return [client for client, own in n_running.items() if len(own) > 1 and client.virtual_time > least + QUANTUM]


def select_for_batch(requests: Sequence[Request], rows: int, in_flight: Sequence[Request] = ()) -> list[Request]:
    """Texts for one round, at most `rows`; shares take turns, the one that has had the least first. `beside` are in flight already.

    Beyond its first text a share has no more of them than all others have together. One with several texts that is ahead of the others has
    none: it has a round when they have caught up with it.
    """
    by_client: dict[Client, list[Request]] = {}
    for request in requests:
        by_client.setdefault(request.client, []).append(request)
    if len(by_client) == 1 and not in_flight:
        return list(requests[:rows])
    all_requests: dict[Client, list[Request]] = {client: list(own) for client, own in by_client.items()}
    for request in in_flight:
        all_requests.setdefault(request.client, []).append(request)
    for client in clients_ahead(all_requests):
        by_client.pop(client, None)
    clients = sorted(by_client, key=lambda client: client.virtual_time)
    if sum(map(len, by_client.values())) > len(clients):
        largest = max(clients, key=lambda client: len(by_client[client]))
        others = sum(len(by_client[client]) for client in clients if client is not largest)
        del by_client[largest][max(1, others) :]
    turns = zip_longest(*(by_client[client] for client in clients))
    return [request for texts_ in turns for request in texts_ if request is not None][:rows]
