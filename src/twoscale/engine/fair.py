"""Fair scheduling between request groups, by virtual time (as in start-time fair queuing, or the virtual token counter of VTC).

A request group is the requests that were submitted together, such as all sequences of one HTTP request. Its virtual time is the service
that it has received: one unit is one layer applied to one row. The group with the smallest virtual time goes first. The choice is made
again after every few stage passes, so a group with many long sequences slows the others down no more than its share. A new group starts at
the current virtual time: it has no claim on what was computed before it came.

Limits of one request group:

    sequences in a batch   Of the sequences added to a batch at one time, a group gets at most as many as all other groups together (at
                           least one). It gets none if it has several sequences and is ahead of another group by more than QUANTUM.
    running sequences      While other groups run or wait: half of max_num_seqs. A new group is admitted even beyond max_num_seqs, as long
                           as there are fewer groups than that; sequences that do not fit a batch then wait.
    cache bytes            Half of what the other groups leave free; three quarters if no other group runs or waits, so that a new group can
                           start. The first sequence of a group may use all that is free.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from twoscale.engine.request import Request, RequestGroup

QUANTUM = 16.0  # layer applications to one row: how far a group may be ahead of another before the other goes first
CACHE_ALONE, CACHE_CONTESTED = 0.75, 0.5  # share of the cache that the others leave free


@dataclass
class FairAdmission:
    """Chooses the waiting request that starts next, and counts the cache bytes that each request group has reserved."""

    virtual_time: float = 0.0
    """Virtual time of the group that is being served."""
    reserved: Counter[RequestGroup] = field(default_factory=Counter)
    """For each group, the cache bytes that its running sequences need at their full length."""

    def begin(self, request: Request, size: int) -> None:
        """Start a request, which reserves `size` cache bytes."""
        if request.request_group not in self.reserved:
            request.request_group.virtual_time = max(request.request_group.virtual_time, self.virtual_time)
        self.reserved[request.request_group] += size

    def end(self, request: Request, size: int) -> None:
        """Release the `size` cache bytes of a running request that has ended."""
        self.reserved[request.request_group] -= size
        if self.reserved[request.request_group] <= 0:
            del self.reserved[request.request_group]

    def next_request(
        self, waiting: Iterable[Request], running: Sequence[Request], max_num_seqs: int, max_bytes: float, size: Callable[[Request], int]
    ) -> Request | None:
        """The waiting request that may start now, or None. The group with the fewest running requests goes first.

        A group that has no running request yet, and whose first request does not fit the cache, blocks the queue: no other request starts
        before it, so that it cannot starve.
        """
        n_running = Counter(request.request_group for request in running)
        if len(n_running) >= max_num_seqs:  # every place is taken by a different group
            return None
        firsts: dict[RequestGroup, Request] = {}
        for request in waiting:
            firsts.setdefault(request.request_group, request)
        contested = len(n_running.keys() | firsts.keys()) > 1
        free = max_bytes - self.reserved.total()
        for group, request in sorted(firsts.items(), key=lambda entry: n_running[entry[0]]):
            need, own_bytes = size(request), self.reserved[group]
            if not n_running[group]:
                return request if need <= free else None
            cache_limit = (CACHE_CONTESTED if contested else CACHE_ALONE) * (own_bytes + free)
            limit = max(1, max_num_seqs // 2) if contested else max_num_seqs
            if len(running) < max_num_seqs and n_running[group] < limit and own_bytes + need <= cache_limit:
                return request
        return None


def groups_ahead(requests: Mapping[RequestGroup, Sequence[object]]) -> list[RequestGroup]:
    """The groups that have several requests and whose virtual time exceeds another group's by more than QUANTUM."""
    least = min(group.virtual_time for group in requests)
    return [group for group, own_requests in requests.items() if len(own_requests) > 1 and group.virtual_time > least + QUANTUM]


def select_for_batch(requests: Sequence[Request], max_requests: int, in_batch: Sequence[Request] = ()) -> list[Request]:
    """Select at most `max_requests` of the unbatched requests (running, but in no batch) for a batch. Groups take turns, smallest virtual
    time first.

    `in_batch` are the requests that the batch has already. None are selected of a group in `groups_ahead`, which counts `in_batch` too: it
    waits for a later batch. Of the largest group at most as many are selected as of all other groups together, but at least one; this limit
    does not count `in_batch`.
    """
    by_group: dict[RequestGroup, list[Request]] = {}
    for request in requests:
        by_group.setdefault(request.request_group, []).append(request)
    if len(by_group) == 1 and not in_batch:
        return list(requests[:max_requests])
    all_requests: dict[RequestGroup, list[Request]] = {group: list(unbatched) for group, unbatched in by_group.items()}
    for request in in_batch:
        all_requests.setdefault(request.request_group, []).append(request)
    for group in groups_ahead(all_requests):
        by_group.pop(group, None)
    groups = sorted(by_group, key=lambda group: group.virtual_time)
    if sum(map(len, by_group.values())) > len(groups):
        largest = max(groups, key=lambda group: len(by_group[group]))
        others = sum(len(by_group[group]) for group in groups if group is not largest)
        del by_group[largest][max(1, others) :]
    turns = zip_longest(*(by_group[group] for group in groups))
    return [request for turn in turns for request in turn if request is not None][:max_requests]
