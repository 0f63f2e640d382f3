"""A replica: one of several servers behind a proxy. It has the same FastAPI application as a single server; it is called directly,
without a socket."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from twoscale.serve.app import create_app
from twoscale.serve.logs import LOG
from twoscale.serve.server import Server

STOP_SECONDS = 5.0  # how long the application may run on after its client has disconnected, before it is cancelled


@dataclass(frozen=True)
class HTTPRequest:
    """An HTTP request with its whole body."""

    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes = b""


@dataclass(frozen=True)
class ResponseStart:
    """Status and headers of a response; its body follows as bytes, in one part or several."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


class Replica:
    """A server with its application. The scheduler thread is started."""

    def __init__(self, server: Server) -> None:
        self.server, self.app = server, create_app(server)
        server.scheduler_thread.start()

    async def send(self, request: HTTPRequest) -> AsyncGenerator[ResponseStart | bytes]:
        """The response to a request: a ResponseStart, then its body. If the caller closes the iterator, the application sees a client
        that has disconnected."""
        scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": request.method, "scheme": "http",
            "path": request.path, "raw_path": request.path.encode(), "query_string": b"", "root_path": "",
            "headers": list(request.headers), "client": None, "server": None,
        }  # fmt: skip
        messages: asyncio.Queue[Any] = asyncio.Queue()
        body, disconnected = [{"type": "http.request", "body": request.body, "more_body": False}], asyncio.Event()

        async def receive() -> Any:
            if body:
                return body.pop()
            await disconnected.wait()
            return {"type": "http.disconnect"}

        def ended(task: asyncio.Future[None]) -> None:
            if not task.cancelled() and (problem := task.exception()) is not None:  # the application has sent a 500 for it
                LOG.error("a request failed", exc_info=problem)
            messages.put_nowait(None)

        task = asyncio.ensure_future(self.app(scope, receive, messages.put))
        task.add_done_callback(ended)
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield ResponseStart(message["status"], tuple((bytes(name), bytes(value)) for name, value in message["headers"]))
                elif message.get("body"):
                    yield message["body"]
        finally:
            disconnected.set()
            await asyncio.wait([task], timeout=STOP_SECONDS)
            task.cancel()
