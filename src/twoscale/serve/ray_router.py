# mypy: ignore-errors
# Ray is an extra
"""Ray Serve's router for replicas: each request goes to the one with the fewest sequences."""

from collections import Counter

from ray.serve.request_router import RequestRouter


class FewestSequences(RequestRouter):
    """Least-loaded routing. The load of a replica is the number of sequences of the requests that this process has sent to it and that have
    not ended. A request counts from the moment when its replica is chosen, not when it has arrived there: so requests that come at the same
    time are spread over the replicas."""

    def initialize_state(self, **settings) -> None:
        self.sent = {}
        """(replica id, sequences, the future of the choice) by request id."""

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        self.sent = {request: sent for request, sent in self.sent.items() if not sent[2].cancelled()}
        load = Counter()
        for replica, sequences, _ in self.sent.values():
            load[replica] += sequences
        ranked = sorted(candidate_replicas, key=lambda replica: load[replica.replica_id])
        if pending_request is not None and ranked:
            self._count(pending_request, ranked[0].replica_id)
        return [[replica] for replica in ranked]

    def on_request_routed(self, pending_request, replica_id, result) -> None:
        self._count(pending_request, replica_id)  # another one than the first, if that did not answer

    def on_request_completed(self, replica_id, internal_request_id) -> None:
        if self.sent.get(internal_request_id, (None,))[0] == replica_id:
            del self.sent[internal_request_id]

    def _count(self, request, replica_id) -> None:
        self.sent[request.metadata.internal_request_id] = replica_id, request.kwargs.get("sequences", 1), request.future
