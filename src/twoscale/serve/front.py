"""The front of several replicas: takes HTTP requests, asks a replica, and asks another one if it dies before anything was sent.

A response that is not streamed is sent when it is whole, so its request can always be asked again. A streamed one can until its first
event; after that it ends with an error event, as OpenAI's clients expect it, and without `[DONE]`.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from twoscale.serve.api import MAX_SEQUENCES
from twoscale.serve.app import RequestGuard, error, or_disconnect
from twoscale.serve.connections import Connections
from twoscale.serve.limits import Limits
from twoscale.serve.replica import Asked, Head

ATTEMPTS = 5
GRACE = 10.0  # seconds beyond a replica's own time limit
DIED = "the replica that was writing this text died: ask again"


class ReplicaDied(Exception):
    """A replica ended before its response did."""


class Replicas(Protocol):
    """Several replicas, of which each request goes to the one with the fewest rows."""

    def ask(self, asked: Asked, rows: int) -> AsyncGenerator[Head | bytes]:
        """`Replica.ask` of one of them; ReplicaDied if it ends meanwhile."""

    async def metrics(self) -> list[str]:
        """The metrics of all that are alive, in Prometheus's text format."""


class Front:
    """Sends requests to replicas and their responses to clients."""

    def __init__(self, replicas: Replicas, limits: Limits | None = None, key: str | None = None) -> None:
        self.replicas, self.limits, self.key = replicas, limits or Limits(), key
        self.connections = Connections(self.limits)
        self.n_asked_again = 0
        """Requests that were sent to another replica because theirs died."""

    async def respond(self, request: Request) -> Response:
        """The response to any request."""
        asked = Asked(request.method, request.url.path, tuple(request.headers.raw), await request.body())
        if (asked.method, asked.path) == ("GET", "/metrics"):
            return PlainTextResponse(await self.metrics())
        try:
            return await or_disconnect(self._ask(asked), request)
        except ClientDisconnect:
            return Response(status_code=499)
        except TimeoutError:
            return error(504, f"no replica answered within {self.limits.timeout:g} seconds")

    async def _ask(self, asked: Asked) -> Response:
        async with asyncio.timeout(self.limits.timeout + GRACE):
            for _ in range(ATTEMPTS):
                messages = self.replicas.ask(asked, rows_of(asked.body))
                try:
                    return await self._begin(messages)
                except ReplicaDied:
                    self.n_asked_again += 1
                except BaseException:
                    await messages.aclose()
                    raise
        return error(503, f"{ATTEMPTS} replicas died with this request", headers={"Retry-After": "1"})

    async def _begin(self, messages: AsyncGenerator[Head | bytes]) -> Response:
        """A whole response, or one that has begun to stream."""
        head = await anext(messages)
        assert isinstance(head, Head)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        if not headers.get("content-type", "").startswith("text/event-stream"):
            return Response(b"".join([part async for part in messages if isinstance(part, bytes)]), head.status, headers)
        first = await anext(messages)
        assert isinstance(first, bytes)
        return StreamingResponse(_rest(first, messages), head.status, headers)

    async def metrics(self) -> str:
        """The sums over all replicas, and what the front counts itself."""
        each = await self.replicas.metrics()
        own = [
            ("replicas", "gauge", "Replicas that are alive.", len(each)),
            ("asked_again_total", "counter", "Requests sent to another replica because theirs died.", self.n_asked_again),
        ]
        lines = [f"# HELP twoscale_{n} {about}\n# TYPE twoscale_{n} {kind}\ntwoscale_{n} {value!r}\n" for n, kind, about, value in own]
        front = {"twoscale_connections": len(self.connections.active), "twoscale_connections_closed_total": self.connections.n_closed}
        return add_metrics(each, front) + "".join(lines)


def create_front(front: Front) -> Starlette:
    """The ASGI application of a front."""
    app = Starlette(routes=[Route("/{path:path}", front.respond, methods=["GET", "POST", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"])])
    app.state.connections = front.connections
    app.add_middleware(RequestGuard, server=front)
    return app


async def _rest(first: bytes, messages: AsyncGenerator[Head | bytes]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for part in messages:
            assert isinstance(part, bytes)
            yield part
    except ReplicaDied:
        yield f"data: {json.dumps({'error': {'message': DIED, 'type': 'server_error'}})}\n\n".encode()
    finally:
        await messages.aclose()


def rows_of(body: bytes) -> int:
    """Sequences that a request asks for, prompts times n; 1 for a malformed one, which its replica refuses."""
    try:
        found = json.loads(body or b"{}")
        prompt, n = found.get("prompt"), found.get("n") or 1
        prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
        return min(max(1, prompts * int(n)), MAX_SEQUENCES)
    except (ValueError, TypeError, AttributeError):
        return 1


def add_metrics(texts: list[str], own: Mapping[str, float] | None = None) -> str:
    """Metrics of several replicas in one text: values are added up, ratios and means taken anew from the sums. `own` replaces values."""
    total: dict[str, float] = {}
    for text in texts:
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                total[name] = total.get(name, 0.0) + float(value)
    total |= {name: value for name, value in (own or {}).items() if name in total}
    tokens = max(1.0, total.get("twoscale_processed_tokens_total", 0.0))
    for name in total:
        if name.startswith("twoscale_mean_steps"):
            total[name] = total[name.replace("mean_steps", "loop_steps_total")] / tokens
    if "twoscale_running_ratio" in total:
        total["twoscale_running_ratio"] /= len(texts)
    lines = texts[0].splitlines() if texts else []
    return "".join(f"{line if line.startswith('#') else _with_value(line, total)}\n" for line in lines)


def _with_value(line: str, total: dict[str, float]) -> str:
    name = line.rpartition(" ")[0]
    return f"{name} {total[name]!r}"
