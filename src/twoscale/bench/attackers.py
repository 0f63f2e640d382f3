"""Clients and attackers on loopback, each in a process of its own: run as a script, so that it loads nothing but this file.

Standard input has one line of JSON.

    {"role": "clients", "address", "clients", "asks"}
        So many clients send the requests of `asks`, each once. Standard output: the seconds of each request, null where it failed.
    {"role": "attackers", "address", "connections", "heavy", "seconds"}
        The request `heavy` is sent, again whenever it has ended, and `connections` connections send half a header and stay open. Those
        that the server closes are opened again. Standard output: `ready` when all have been opened once. It ends after `seconds`.

Either ends with its standard input, so that it does not outlive the program that started it.
"""

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from typing import Any

AGAIN = 1.0  # seconds until a connection that was closed is opened again
HALF = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
PATIENCE = 120.0  # seconds that a client waits for an answer


def request(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + data


async def ask(host: str, port: int, body: dict[str, Any], patience: float = PATIENCE) -> float | None:
    """Seconds until a request is answered in full; None where it is not answered with 200."""
    began = time.perf_counter()
    try:
        async with asyncio.timeout(patience):
            reader, writer = await asyncio.open_connection(host, port)
            with contextlib.closing(writer):
                writer.write(request(body))
                answer = await reader.read()
    except (OSError, TimeoutError):
        return None
    return time.perf_counter() - began if answer.startswith(b"HTTP/1.1 200") else None


async def clients(host: str, port: int, clients: int, asks: list[dict[str, Any]]) -> None:
    """All requests, each once, by so many clients at a time."""
    found: list[float | None] = [None] * len(asks)
    todo = iter(enumerate(asks))

    async def one() -> None:
        for i, body in todo:
            found[i] = await ask(host, port, body)

    await asyncio.gather(*(one() for _ in range(clients)))
    print(json.dumps(found), flush=True)  # noqa: T201


async def attackers(host: str, port: int, connections: int, heavy: dict[str, Any], seconds: float) -> None:
    """Half-open connections, and one heavy request."""
    opened, ready = set[int](), asyncio.Event()

    async def one(i: int) -> None:
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection(host, port)
                with contextlib.closing(writer):
                    writer.write(HALF)
                    opened.add(i)
                    if len(opened) == connections:
                        ready.set()
                    await reader.read()  # until the server closes it
            await asyncio.sleep(AGAIN)

    async def ask_heavy() -> None:
        while True:
            await ask(host, port, heavy, seconds)
            await asyncio.sleep(AGAIN)

    tasks = [asyncio.create_task(ask_heavy())]
    await asyncio.sleep(AGAIN)  # until the server has read it: a connection without a request may be closed for another one
    tasks += [asyncio.create_task(one(i)) for i in range(connections)]
    await ready.wait()
    print("ready", flush=True)  # noqa: T201
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()


def main() -> None:
    task = json.loads(sys.stdin.readline())
    host, _, port = task.pop("address").removeprefix("http://").partition(":")
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    run = clients if task.pop("role") == "clients" else attackers
    asyncio.run(run(host, int(port), **task))


if __name__ == "__main__":
    main()
