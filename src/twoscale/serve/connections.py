"""Limits of HTTP connections: how many may be open, and how long a client may take to send a request and to read the response.

uvicorn has none of these limits: an incomplete header stays open for ever, and asyncio's accept loop logs an error for every connection
that it cannot accept. `HTTPServer` is a uvicorn server that accepts connections itself. If too many are open, it closes the one that has
waited longest for data of its client, so half-open connections cannot keep new clients out.
"""

import asyncio
import json
import socket
import time
from collections.abc import Callable
from enum import Enum
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from twoscale.serve.limits import Limits
from twoscale.serve.logs import LOG, limit_logs

try:
    import resource
except ModuleNotFoundError:  # not a Unix system
    resource = None  # type: ignore[assignment]

ACCEPT_BATCH = 4  # connections accepted before other tasks of the event loop run
SEND_BUFFER = 1 << 17  # socket send buffer in bytes; the system's default may be megabytes for a client that does not read
ACCEPT_RETRY = 0.1  # seconds until the next attempt after an error of accept


class Phase(Enum):
    """The state of a connection."""

    HEADERS = "headers"
    BODY = "body"
    RESPONSE = "response"
    """The response is being computed, or sent."""
    IDLE = "idle"
    """Kept alive after a response, without a new request."""


def max_connections(limits: Limits) -> int:
    """The number of connections that may be open: the limit, and at most three quarters of the files that the process may open."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource is not None else -1
    return limits.max_connections if files < 0 else max(1, min(limits.max_connections, 3 * files // 4))


class Connections:
    """All open connections of a server."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.max_connections = limits, max_connections(limits)
        self.open_connections: set[Connection] = set()
        self.waiting: dict[Connection, None] = {}
        """Those of the open connections that wait for data of their client, ordered by the beginning of the wait."""
        self.n_closed = 0
        """Connections closed by a time limit, or because too many were open."""

    @property
    def full(self) -> bool:
        """Whether no connection can be accepted: the limit is reached and none of them waits for its client."""
        return len(self.open_connections) >= self.max_connections and not self.waiting

    def set_phase(self, connection: "Connection", phase: Phase) -> None:
        """Update `waiting` for a connection that changes to this phase."""
        self.waiting.pop(connection, None)
        if phase is not Phase.RESPONSE:
            self.waiting[connection] = None

    def discard(self, connection: "Connection") -> None:
        self.waiting.pop(connection, None)
        self.open_connections.discard(connection)

    def enforce_limit(self) -> None:
        """Close the connections that have waited longest until the limit is kept."""
        while len(self.open_connections) > self.max_connections and self.waiting:
            self.close_oldest()

    def close_oldest(self) -> None:
        """Close the connection that has waited longest for its client."""
        oldest = next(iter(self.waiting), None)
        if oldest is not None:
            self.n_closed += 1
            self.discard(oldest)
            oldest.transport.abort()
            LOG.warning("%d connections are open: the ones that have waited longest for their client are closed", self.max_connections)

    def close_expired(self, now: float) -> None:
        """Close the connections whose deadline has passed."""
        for connection in list(self.open_connections):
            if connection.transport is not None and now > connection.deadline():
                self.n_closed += connection.phase is not Phase.IDLE
                connection.expire()


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with a time limit for each phase."""

    def __init__(self, connections: Connections, **settings: Any) -> None:
        super().__init__(**settings)
        self.registry, self.limits = connections, connections.limits
        self.phase, self.phase_began = Phase.HEADERS, time.monotonic()
        self.write_blocked_since: float | None = None
        """Since when the send buffer is full, because the client does not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.registry.set_phase(self, self.phase)
        self.registry.enforce_limit()

    def connection_lost(self, exc: Exception | None) -> None:
        self.registry.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update(Phase.HEADERS)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update(Phase.IDLE)

    def pause_writing(self) -> None:
        self.write_blocked_since = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self.write_blocked_since = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Idle connections are closed by `Connections.close_expired`."""

    def _update(self, without_request: Phase) -> None:
        """Update the phase; `without_request` is the phase of a connection that has no request now."""
        if self not in self.registry.open_connections:
            return
        if self.conn.their_state is h11.SEND_BODY:
            phase = Phase.BODY
        elif self.cycle is not None and not self.cycle.response_complete:
            phase = Phase.RESPONSE
        else:
            phase = without_request
        if phase is not self.phase:
            self.phase, self.phase_began = phase, time.monotonic()
            self.registry.set_phase(self, phase)

    def deadline(self) -> float:
        """The time at which the connection is closed, by time.monotonic."""
        if self.write_blocked_since is not None:
            return self.write_blocked_since + self.limits.write_timeout
        if self.phase is Phase.RESPONSE:
            return float("inf")
        if self.phase is not Phase.IDLE:
            return self.phase_began + self.limits.read_timeout
        unread = self.transport.get_write_buffer_size() > 0
        return self.phase_began + (self.limits.write_timeout if unread else self.limits.idle_timeout)

    def expire(self) -> None:
        """Close the connection; with status 408 if the request was not complete."""
        if self.phase in (Phase.HEADERS, Phase.BODY) and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._send_408()
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # `close` would wait until the client has read everything
        else:
            self.transport.close()

    def _send_408(self) -> None:
        part = "headers were" if self.phase is Phase.HEADERS else "body was"
        message = f"the {part} not complete within {self.limits.read_timeout:g} seconds"
        body = json.dumps({"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        events = (h11.Response(status_code=408, headers=headers, reason=b"Request Timeout"), h11.Data(data=body), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))


class Listener:
    """Accepts connections on one socket; replaces asyncio's server."""

    def __init__(self, listening: socket.socket, connections: Connections, make_connection: Callable[[], Connection]) -> None:
        self.listening, self.connections, self.make_connection = listening, connections, make_connection
        self.loop = asyncio.get_running_loop()
        self.opening: set[asyncio.Task[None]] = set()
        self.closed = False
        listening.setblocking(False)
        self._resume()

    def _resume(self) -> None:
        if not self.closed:
            self.loop.add_reader(self.listening, self._accept)

    def _pause(self) -> None:
        """Stop polling for a moment: the socket stays readable while connections wait in the kernel's queue."""
        self.loop.remove_reader(self.listening)
        self.loop.call_later(ACCEPT_RETRY, self._resume)

    def _accept(self) -> None:
        for _ in range(ACCEPT_BATCH):
            if self.connections.full and not self.opening:
                return self._pause()
            try:
                accepted, _ = self.listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return None
            except OSError as error:  # too many open files, or out of memory
                LOG.warning("a connection could not be accepted: %s", error)
                self.connections.close_oldest()
                return self._pause()
            accepted.setblocking(False)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            connection = self.make_connection()
            self.connections.open_connections.add(connection)
            task = self.loop.create_task(self._open(accepted, connection))
            self.opening.add(task)
            task.add_done_callback(self.opening.discard)
        return None

    async def _open(self, accepted: socket.socket, connection: Connection) -> None:
        try:
            await self.loop.connect_accepted_socket(lambda: connection, accepted)
        except OSError:
            self.connections.discard(connection)
            accepted.close()

    def close(self) -> None:
        self.closed = True
        self.loop.remove_reader(self.listening)

    async def wait_closed(self) -> None:
        """Nothing to do: `uvicorn.Server` waits for its connections itself."""


class HTTPServer(uvicorn.Server):
    """A uvicorn server with limits on connections."""

    def __init__(self, app: Any, connections: Connections, **settings: Any) -> None:
        super().__init__(uvicorn.Config(app, http="h11", ws="none", log_level="warning", access_log=False, **settings))
        limit_logs()
        self.connections = connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])  # uvicorn starts the application; it gets no socket
        self.servers = [Listener(listening, self.connections, self._make_connection) for listening in sockets or ()]  # type: ignore[misc]
        self._close_expired()

    def _make_connection(self) -> Connection:
        return Connection(self.connections, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def _close_expired(self) -> None:
        limits = self.connections.limits
        every = min(1.0, limits.read_timeout / 4, limits.idle_timeout / 4, limits.write_timeout / 4)
        asyncio.get_running_loop().call_later(every, self._close_expired)  # first, so that an exception below does not stop the checks
        self.connections.close_expired(time.monotonic())
