"""A server in a thread, and ways to ask it: for the tests of the HTTP API."""

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Iterator

import pytest

from twoscale.engine.scheduler import Scheduler

openai = pytest.importorskip("openai", reason="openai is not installed (the extra twoscale[test])")
pytest.importorskip("uvicorn", reason="uvicorn is not installed (the extra twoscale[serve])")


@contextlib.contextmanager
def serving(loaded, key: str | None = None, policy: str = "lockstep", calibration=None, **limits: object) -> Iterator[tuple[str, object]]:  # type: ignore[no-untyped-def]
    """A server in a thread: its address and itself."""
    from twoscale.serve.app import create_app
    from twoscale.serve.limits import Limits
    from twoscale.serve.local import run_in_thread
    from twoscale.serve.server import Server

    model, tokenizer = loaded
    max_num_seqs = int(limits.pop("max_num_seqs", 8))  # type: ignore[call-overload]
    server = Server(
        model,
        tokenizer,
        "nano",
        Scheduler(model, policy, max_num_seqs=max_num_seqs),
        key=key,
        limits=Limits(**limits),
        calibration=calibration,  # type: ignore[arg-type]
    )
    with run_in_thread(create_app(server)) as address:
        yield address, server


def client(address: str, key: str = "none"):  # type: ignore[no-untyped-def]
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


def post(address: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, dict[str, object]]:
    """One raw request."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json", **(headers or {})})
    answer = connection.getresponse()
    text = answer.read()
    return answer.status, json.loads(text) if text else {}


def metrics_of(host: str) -> str:
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request("GET", "/metrics")
    return connection.getresponse().read().decode()


def metric(host: str, name: str) -> float:
    return next(float(line.split()[1]) for line in metrics_of(host).splitlines() if line.startswith(f"twoscale_{name} "))


def wait_for(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Until something holds, or it did not in time."""
    deadline = time.time() + seconds
    while not holds():
        assert time.time() < deadline, "not in time"
        time.sleep(0.02)
