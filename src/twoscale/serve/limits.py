"""The limits of the server."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of requests and connections. Times are in seconds."""

    max_body: int = 1 << 20
    """Bytes of a request's body."""
    timeout: float = 120.0
    """Time limit of a request; then it ends with the tokens it has."""
    max_loops: int = 64
    """Loop steps that a request may ask for; the model's default if that is larger."""
    max_queue: int = 256
    """Sequences that may wait in the queue."""
    max_connections: int = 512
    """Open connections; at most three quarters of the files that the process may open."""
    read_timeout: float = 10.0
    """Time limit for the headers of a request, and the same again for its body. It begins when the connection is opened, or, on one that
    was kept alive, at the first byte of the next request."""
    idle_timeout: float = 5.0
    """Time limit for the next request on a connection that has had a response (keep-alive)."""
    write_timeout: float = 30.0
    """Time limit for a client that does not read the response."""
