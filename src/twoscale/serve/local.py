"""A listening socket, and a server in a thread of this process for benches and tests."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.applications import Starlette

from twoscale.config import UserError
from twoscale.serve.connections import HTTPServer


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; UserError if the address cannot be used."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(2048)  # clients that connect before the application is ready wait
    except OSError as error:
        raise UserError(f"cannot listen on {host}:{port} ({error.strerror or error}): choose another --port, or 0 for a free one") from None
    return listening


@contextmanager
def run_in_thread(app: Starlette, stop_timeout: float = 60.0) -> Iterator[str]:
    """Run the application on a free port; yields its URL. At the end it is stopped gracefully within `stop_timeout` seconds."""
    listening = listen("127.0.0.1", 0)
    server = HTTPServer(app, app.state.connections)
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise UserError("the server did not start")
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(stop_timeout)
