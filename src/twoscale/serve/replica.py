"""One of several servers behind a front: the same FastAPI application, called without a socket."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from twoscale.serve.app import create_app
from twoscale.serve.server import Server

STOP_SECONDS = 5.0  # for a request to notice that its client has gone


@dataclass(frozen=True)
class Asked:
    """An HTTP request."""

    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes = b""


@dataclass(frozen=True)
class Head:
    """Status and headers of a response; its body follows as bytes, in one piece or several."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


class Replica:
    """A server whose scheduler thread runs, and its application."""

    def __init__(self, server: Server) -> None:
        self.server, self.app = server, create_app(server)
        server.worker.start()

    async def ask(self, asked: Asked) -> AsyncGenerator[Head | bytes]:
        """The response to a request: a Head, then its body. Closing the iterator is a client that disconnects."""
        scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": asked.method, "scheme": "http", "path": asked.path,
            "raw_path": asked.path.encode(), "query_string": b"", "root_path": "", "headers": list(asked.headers), "client": None,
            "server": None,
        }  # fmt: skip
        messages: asyncio.Queue[Any] = asyncio.Queue()
        body, gone = [{"type": "http.request", "body": asked.body, "more_body": False}], asyncio.Event()

        async def receive() -> Any:
            if body:
                return body.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.ensure_future(self.app(scope, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    yield Head(message["status"], tuple((bytes(name), bytes(value)) for name, value in message["headers"]))
                elif message.get("body"):
                    yield message["body"]
        finally:
            gone.set()
            await asyncio.wait([task], timeout=STOP_SECONDS)
            task.cancel()
