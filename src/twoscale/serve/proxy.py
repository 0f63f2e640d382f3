"""A load-balancing reverse proxy for several replicas. It sends each HTTP request to a replica, and again to another one if the first dies
before its response has begun.

A response that is not streamed is passed on when it is complete, so its request can always be retried. A streamed one can be retried until
its first event; if the replica dies later, the stream ends with an error event, as OpenAI's clients expect it, and without `[DONE]`.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from twoscale.serve.api import MAX_SEQUENCES
from twoscale.serve.app import RequestGuard, error, or_disconnect
from twoscale.serve.connections import Connections
from twoscale.serve.limits import Limits
from twoscale.serve.logs import LOG
from twoscale.serve.metrics import ReplicaMetrics
from twoscale.serve.replica import HTTPRequest, ResponseStart
from twoscale.serve.scheduler_thread import INTERNAL_ERROR

ATTEMPTS = 5
GRACE = 10.0  # seconds that the proxy waits beyond a replica's own time limit
HEALTH_SECONDS = 5.0
DIED = "the replica that generated this text died: send the request again"
METHODS = ["GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"]


class ReplicaDied(Exception):
    """A replica ended before its response did."""


class Replicas(Protocol):
    """Several replicas, from which the one with the fewest sequences is chosen for each request."""

    def send(self, request: HTTPRequest, sequences: int) -> AsyncGenerator[ResponseStart | bytes]:
        """`Replica.send` of the chosen one; ReplicaDied if it dies before the response is complete."""

    async def metrics(self) -> dict[str, str]:
        """The metrics of all that are alive, in Prometheus's text format, by replica id; TimeoutError if one does not answer."""


class Proxy:
    """Sends requests to replicas and their responses to clients."""

    def __init__(self, replicas: Replicas, limits: Limits | None = None, key: str | None = None) -> None:
        self.replicas, self.limits, self.key = replicas, limits or Limits(), key
        self.connections = Connections(self.limits)
        self.totals = ReplicaMetrics()
        self.n_retried = 0
        """Requests that were sent to another replica because theirs died."""

    async def respond(self, request: Request) -> Response:
        """The response to any request."""
        message = HTTPRequest(request.method, request.url.path, tuple(request.headers.raw), await request.body())
        seconds = HEALTH_SECONDS if message.path == "/health" else self.limits.timeout + GRACE
        if (message.method, message.path) == ("GET", "/metrics"):
            try:
                return PlainTextResponse(await self.metrics())
            except TimeoutError:
                return error(503, "a replica does not answer")
        try:
            return await or_disconnect(self._send(message, seconds), request)
        except ClientDisconnect:
            return Response(status_code=499)
        except TimeoutError:
            return error(503 if message.path == "/health" else 504, f"no replica answered within {seconds:g} seconds")

    async def _send(self, request: HTTPRequest, seconds: float) -> Response:
        """The response to a request, which is sent to another replica as long as replicas die before their response has begun."""
        sequences = n_sequences(request.body)
        async with asyncio.timeout(seconds):
            for _ in range(ATTEMPTS):
                messages = self.replicas.send(request, sequences)
                try:
                    return await self._begin(messages)
                except ReplicaDied:
                    LOG.warning("a replica died: its request is sent to another one")
                    self.n_retried += 1
                except BaseException:
                    await messages.aclose()
                    raise
        return error(503, f"{ATTEMPTS} replicas died with this request", headers={"Retry-After": "1"})

    async def _begin(self, messages: AsyncGenerator[ResponseStart | bytes]) -> Response:
        """A complete response, or one that has begun to stream."""
        start = await anext(messages, None)
        if not isinstance(start, ResponseStart):
            return error(500, INTERNAL_ERROR)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in start.headers}
        if not headers.get("content-type", "").startswith("text/event-stream"):
            return Response(b"".join([part async for part in messages if isinstance(part, bytes)]), start.status, headers)
        first = await anext(messages, b"")
        return StreamingResponse(self._stream(first, messages), start.status, headers)

    async def _stream(self, first: ResponseStart | bytes, messages: AsyncGenerator[ResponseStart | bytes]) -> AsyncIterator[bytes]:
        """The events of a response. A failure is the last one, because the status has been sent."""
        seconds = self.limits.timeout + GRACE
        try:
            part: ResponseStart | bytes | None = first
            while isinstance(part, bytes):
                yield part
                part = await asyncio.wait_for(anext(messages, None), seconds)
        except ReplicaDied:
            LOG.warning("a replica died: the stream of its response ends with an error")
            yield error_event(DIED)
        except TimeoutError:
            yield error_event(f"the replica was silent for {seconds:g} seconds")
        except Exception:
            LOG.exception("a streamed response failed")
            yield error_event(INTERNAL_ERROR)
        finally:
            await messages.aclose()

    async def metrics(self) -> str:
        """The totals of all replicas, and what the proxy counts itself."""
        each = await self.replicas.metrics()
        own = [
            ("replicas", "gauge", "Replicas that are alive.", len(each)),
            ("retried_total", "counter", "Requests sent to another replica because theirs died.", self.n_retried),
        ]
        lines = [f"# HELP twoscale_{n} {about}\n# TYPE twoscale_{n} {kind}\ntwoscale_{n} {value!r}\n" for n, kind, about, value in own]
        opened, closed = len(self.connections.open_connections), self.connections.n_closed
        connections = {"twoscale_connections": opened, "twoscale_connections_closed_total": closed}
        return self.totals.update(each, connections) + "".join(lines)


def create_proxy_app(proxy: Proxy) -> Starlette:
    """The ASGI application of a proxy."""
    app = Starlette(routes=[Route("/{path:path}", proxy.respond, methods=METHODS)])
    app.state.connections = proxy.connections
    app.add_middleware(RequestGuard, settings=proxy)
    return app


def error_event(message: str) -> bytes:
    """An error as a server-sent event."""
    return f"data: {json.dumps({'error': {'message': message, 'type': 'server_error'}})}\n\n".encode()


def n_sequences(body: bytes) -> int:
    """Sequences that a request asks for, prompts times n; 1 for a malformed one, which its replica refuses."""
    try:
        found = json.loads(body or b"{}")
        prompt, n = found.get("prompt"), found.get("n") or 1
        prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        return min(max(1, prompts * int(n)), MAX_SEQUENCES)
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return 1
