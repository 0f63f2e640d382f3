"""The limits of the server."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of requests and connections. Times are in seconds."""

    max_body: int = 1 << 20
    """Bytes of a request's body."""
    timeout: float = 120.0
    """Until a request ends with the tokens it has."""
    max_loops: int = 64
    """Loop steps that a request may ask for; raised to the model's default where that is larger."""
    max_queue: int = 256
    """Sequences that may wait in the queue."""
    max_connections: int = 512
    """Open connections; at most three quarters of the files that the process may open."""
    read_timeout: float = 10.0
    """For the headers of a request, beginning when the connection is opened, and again for its body."""
    idle_timeout: float = 5.0
    """Until a connection is closed that has had a response and sends no further request (keep-alive)."""
    write_timeout: float = 30.0
    """Until a connection is closed whose client does not read the response."""
