"""What the server allows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and what connections may take."""

    max_body: int = 1 << 20
    """Bytes of a request."""
    timeout: float = 120.0
    """Seconds until a request is given up."""
    max_loops: int = 64
    max_queue: int = 256
    """Requests that may wait."""
    max_connections: int = 512
    """Open connections; fewer where the process may open few files."""
    read_timeout: float = 10.0
    """Until the headers of a request must have come, and again until its body must have."""
    idle_timeout: float = 5.0
    """Until a connection without a request is closed."""
    write_timeout: float = 30.0
    """Until a client that does not read its answer is cut off."""
