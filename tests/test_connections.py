"""Connections: clients that send half a request, or do not read their answer, do not keep others from being served."""

import contextlib
import http.client
import json
import logging
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ROOT
from http_client import post, serving, wait_for
from twoscale.serve.connections import max_connections
from twoscale.serve.limits import Limits
from twoscale.serve.logs import RateLimit

FILES = 256  # open files that the server may have


@contextlib.contextmanager
def half_open(host: str, count: int, data: bytes = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n") -> Iterator[list[socket.socket]]:
    """Connections that send `data` and then nothing."""
    name, port = host.split(":")
    with contextlib.ExitStack() as stack:
        sockets = []
        for _ in range(count):
            sockets.append(stack.enter_context(socket.create_connection((name, int(port)), timeout=20)))
            with contextlib.suppress(OSError):  # it may have been closed already
                sockets[-1].sendall(data)
        yield sockets


def test_more_half_open_connections_than_files(trained: Path, tmp_path: Path) -> None:
    """300 half-open connections to a server with a limit of 256 files: requests are answered meanwhile, and the log stays short."""
    log = tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "twoscale", "serve", str(trained), "--port", "0", "--policy", "lockstep", "--max-num-seqs", "2"],
            stderr=stderr,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES)),
        )
    try:
        host = ""
        for _ in range(600):
            host = next((line.strip() for line in log.read_text().splitlines() if line.startswith("http://")), "")
            if host or process.poll() is not None:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        host = host.removeprefix("http://").removesuffix("/v1")
        assert post(f"http://{host}", b'{"prompt": "a", "max_tokens": 1}')[0] == 200
        with half_open(host, 300):
            for _ in range(3):
                connection = http.client.HTTPConnection(host, timeout=10)
                connection.request("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 2}', {"Content-Type": "application/json"})
                assert connection.getresponse().status == 200
        assert process.poll() is None and log.stat().st_size < 100_000
    finally:
        process.kill()
        process.wait()


ASK = b'{"prompt": "a", "max_tokens": 1}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(ASK)


def answer(sock: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := sock.recv(65536):
            found += data
    return found


@pytest.mark.parametrize("data", [HEAD[:40], HEAD + ASK[:5], HEAD + ASK + HEAD[:9]], ids=["headers", "body", "second headers"])
def test_slow_senders(loaded, data: bytes) -> None:  # type: ignore[no-untyped-def]
    """A request of which a part does not come in time is answered with 408 and its connection closed, also if bytes keep trickling in."""
    with (
        serving(loaded, read_timeout=0.5, idle_timeout=60.0) as (address, _),
        half_open(address.removeprefix("http://"), 1, data) as (sock,),
    ):
        with contextlib.suppress(OSError):
            for _ in range(200):
                sock.sendall(b"x")
                time.sleep(0.01)
        found = answer(sock)
        assert b"408 Request Timeout" in found and b"within 0.5 seconds" in found
        assert (b"200 OK" in found) == (data.count(b"POST") == 2)
        assert post(address, ASK)[0] == 200


def test_idle_connections(loaded) -> None:  # type: ignore[no-untyped-def]
    """Requests share a connection, also when two are sent at once; without a request it is closed after a while."""
    with serving(loaded, idle_timeout=0.4) as (address, _), half_open(address.removeprefix("http://"), 1, 2 * (HEAD + ASK)) as (sock,):
        found = answer(sock)
        assert found.count(b"200 OK") == 2 and b"408 Request Timeout" not in found


def test_silent_connections(loaded) -> None:  # type: ignore[no-untyped-def]
    """A new connection that sends nothing is closed by the read timeout, not by the shorter idle timeout, and the docs give both times."""
    with serving(loaded, read_timeout=1.0, idle_timeout=0.1) as (address, _):
        connected = time.monotonic()
        with half_open(address.removeprefix("http://"), 1, b"") as (sock,):
            assert b"408 Request Timeout" in answer(sock)
            assert time.monotonic() - connected >= 1.0
    words = " ".join((ROOT / "docs" / "serve.md").read_text().split())
    assert f"A new connection has {Limits().read_timeout:g} seconds (`--read-timeout`) to send the headers of a request" in words
    assert f"A connection that is kept alive after a response is closed after {Limits().idle_timeout:g} seconds without a request" in words


def test_oldest_first(loaded) -> None:  # type: ignore[no-untyped-def]
    """Where too many connections are open, those that have waited longest for their client are closed, and new clients are served."""
    with serving(loaded, max_connections=4) as (address, _), half_open(address.removeprefix("http://"), 10) as sockets:
        assert [post(address, ASK)[0] for _ in range(3)] == [200] * 3
        wait_for(lambda: all(answer_now(sock) == b"" for sock in sockets[:6]))
        assert answer_now(sockets[-1]) is None  # still open


def answer_now(sock: socket.socket) -> bytes | None:
    """What has come so far; nothing where the connection is closed, None where it is open and silent."""
    sock.setblocking(False)
    try:
        return sock.recv(65536)
    except BlockingIOError:
        return None
    except ConnectionResetError:
        return b""


def test_slow_readers(loaded) -> None:  # type: ignore[no-untyped-def]
    """A client that does not read its stream is cut off; others are served meanwhile, and its jobs leave nothing behind."""
    body = json.dumps(
        {"prompt": ["the loop turns"] * 16, "n": 4, "max_tokens": 60, "logprobs": 5, "stream": True, "temperature": 1}
    ).encode()
    with serving(loaded, write_timeout=0.5, max_num_seqs=64) as (address, server):
        name, port = address.removeprefix("http://").split(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(30)
            sock.connect((name, int(port)))
            sock.sendall(HEAD.replace(b"%d" % len(ASK), b"%d" % len(body)) + body)
            assert post(address, ASK)[0] == 200
            scheduler = server.scheduler_thread.scheduler  # type: ignore[attr-defined]
            wait_for(lambda: server.connections.n_closed == 1)  # type: ignore[attr-defined]
            wait_for(lambda: not scheduler.running)
            found = answer(sock)
            assert b"200 OK" in found and b"[DONE]" not in found
        assert post(address, ASK)[0] == 200 and scheduler.reserved_bytes == 0


def test_key_before_body(loaded) -> None:  # type: ignore[no-untyped-def]
    """Without the key a request is refused when its headers are there, before any of its body."""
    with serving(loaded, key="secret") as (address, _), half_open(address.removeprefix("http://"), 1, HEAD) as (sock,):
        assert sock.recv(65536).startswith(b"HTTP/1.1 401 ")


def test_bound_follows_the_file_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections never use up the files that the process may open."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    assert max_connections(Limits(max_connections=1000)) == 192 and max_connections(Limits(max_connections=10)) == 10
    monkeypatch.setattr(resource, "getrlimit", lambda _: (-1, -1))  # no limit
    assert max_connections(Limits(max_connections=1000)) == 1000


def test_log_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a thousand equal messages in a minute five are logged; the next one, a minute later, says how many were left out."""
    now = [0.0]
    monkeypatch.setattr("twoscale.serve.logs.time.monotonic", lambda: now[0])
    limit = RateLimit(5, 60.0)
    records = [logging.LogRecord("x", logging.WARNING, __file__, line, "trouble %d", (line,), None) for line in [1] * 1000 + [2, 1]]
    kept = [limit.filter(record) for record in records[:-1]]
    assert sum(kept[:1000]) == 5 and kept[1000]
    now[0] = 61.0
    assert limit.filter(records[-1]) and records[-1].getMessage() == "trouble 1 (995 more like it were left out)"
