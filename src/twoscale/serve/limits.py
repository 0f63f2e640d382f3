"""What the server allows."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and what connections may take."""

    body: int = 1 << 20
    """Bytes of a request."""
    seconds: float = 120.0
    """Until a request is given up."""
    loops: int = 64
    queue: int = 256
    """Requests that may wait."""
    connections: int = 512
    """Open connections; fewer where the process may open few files."""
    read_seconds: float = 10.0
    """Until the headers of a request must have come, and again until its body must have."""
    idle_seconds: float = 5.0
    """Until a connection without a request is closed."""
    write_seconds: float = 30.0
    """Until a client that does not read its answer is cut off."""
