"""Fair scheduling between clients, by virtual time (as in start-time fair queuing, or the virtual token counter of VTC).

A client is all sequences of one HTTP request. Its virtual time is the service that it has received: layer applications to one row. The
client with the smallest virtual time goes first; the choice is made anew between two calls of the engine, so a client with many long
sequences slows the others down no more than its share. A new client starts at the current virtual time, so the past does not count.

Limits of one client while there are others:

    sequences in a batch   at most as many as all others together; none while it has several sequences and is ahead of the others
    running sequences      half of max_num_seqs. A new client is admitted even beyond max_num_seqs, as long as there are fewer clients than
                           that; sequences that do not fit a batch then wait
    cache bytes            half of what the others leave free; without others three quarters, so that a new client can start
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from twoscale.engine.request import Client, Request

QUANTUM = 16.0  # layer applications to one row: how far a client may be ahead of another before the other goes first
CACHE_ALONE, CACHE_CONTESTED = 0.75, 0.5  # share of the cache that the others leave free


@dataclass
class FairShares:
    """Which waiting request starts next, and how much cache each client has reserved."""

    virtual_time: float = 0.0
    """Virtual time of the client that is being served."""
    reserved: Counter[Client] = field(default_factory=Counter)
    """For each client, the cache bytes that its running sequences need at their full length."""

    def begin(self, request: Request, size: int) -> None:
        """A request starts running and reserves `size` cache bytes."""
        if request.client not in self.reserved:
            request.client.virtual_time = max(request.client.virtual_time, self.virtual_time)
        self.reserved[request.client] += size

    def end(self, request: Request, size: int) -> None:
        """A running request has ended."""
        self.reserved[request.client] -= size
        if self.reserved[request.client] <= 0:
            del self.reserved[request.client]

    def next(
        self, waiting: Iterable[Request], running: Sequence[Request], max_num_seqs: int, max_bytes: float, size: Callable[[Request], int]
    ) -> Request | None:
        """The waiting request that may start now, or None. The client with the fewest running requests goes first.

        If the first request of a client without a running one does not fit the cache yet, no other request is started before it.
        """
        n_running = Counter(request.client for request in running)
        if len(n_running) >= max_num_seqs:  # every place is taken by a different client
            return None
        firsts: dict[Client, Request] = {}
        for request in waiting:
            firsts.setdefault(request.client, request)
        contested = len(n_running.keys() | firsts.keys()) > 1
        free = max_bytes - self.reserved.total()
        for client, request in sorted(firsts.items(), key=lambda entry: n_running[entry[0]]):
            need, own_bytes = size(request), self.reserved[client]
            if not n_running[client]:
                return request if need <= free else None
            cache_limit = (CACHE_CONTESTED if contested else CACHE_ALONE) * (own_bytes + free)
            limit = max(1, max_num_seqs // 2) if contested else max_num_seqs
            if len(running) < max_num_seqs and n_running[client] < limit and own_bytes + need <= cache_limit:
                return request
        return None


def clients_ahead(requests: Mapping[Client, Sequence[object]]) -> list[Client]:
    """The clients with several requests that are ahead of another client by more than QUANTUM."""
    least = min(client.virtual_time for client in requests)
    return [client for client, client_requests in requests.items() if len(client_requests) > 1 and client.virtual_time > least + QUANTUM]


def select_for_batch(requests: Sequence[Request], max_requests: int, in_batch: Sequence[Request] = ()) -> list[Request]:
    """At most `max_requests` of the idle requests (running, but in no batch) for a batch. Clients take turns, the least virtual time first.

    `in_batch` are the requests that the batch has already. Beyond its first request a client gets no more than all others together. A
    client with several requests that is ahead of the others gets none: it is served in a later batch.
    """
    by_client: dict[Client, list[Request]] = {}
    for request in requests:
        by_client.setdefault(request.client, []).append(request)
    if len(by_client) == 1 and not in_batch:
        return list(requests[:max_requests])
    all_requests: dict[Client, list[Request]] = {client: list(idle) for client, idle in by_client.items()}
    for request in in_batch:
        all_requests.setdefault(request.client, []).append(request)
    for client in clients_ahead(all_requests):
        by_client.pop(client, None)
    clients = sorted(by_client, key=lambda client: client.virtual_time)
    if sum(map(len, by_client.values())) > len(clients):
        largest = max(clients, key=lambda client: len(by_client[client]))
        others = sum(len(by_client[client]) for client in clients if client is not largest)
        del by_client[largest][max(1, others) :]
    turns = zip_longest(*(by_client[client] for client in clients))
    return [request for turn in turns for request in turn if request is not None][:max_requests]
