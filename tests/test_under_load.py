"""Many requests at a time, hang-ups, and a server that is told to go: everybody gets exactly what they get alone."""

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import twoscale
from http_client import metric, serving, wait_for
from twoscale import exits

TEXT = "the loop turns and a state moves; then it settles, and what was left of the step is a small turn of the same state"
ASKED = [
    {"prompt": TEXT[i % 37 :][: 3 + i * 7 % 38], "max_tokens": 4 + i * 5 % 21, "temperature": 0, "exit": "acceleration:1.0", "loops": 7}
    for i in range(200)
]


def answer_alone(loaded, asked: dict[str, object]) -> tuple[str, list[list[int]]]:  # type: ignore[no-untyped-def]
    """What `generate` gives to one request: new text and steps."""
    model, tokenizer = loaded
    ids = tokenizer.encode(asked["prompt"])
    want = twoscale.generate(model, [ids], asked["max_tokens"], exit=exits.Acceleration(1.0), loops=7, stop=(tokenizer.eot,))
    text = tokenizer.decode([*ids, *want.tokens[0]])[len(str(asked["prompt"])) :].removesuffix("<|endoftext|>")
    return text, [list(s) for s in want.steps[0]]


@pytest.fixture(scope="module")
def alone(loaded):  # type: ignore[no-untyped-def]
    return [answer_alone(loaded, asked) for asked in ASKED]


def stream_of(answer: http.client.HTTPResponse) -> tuple[str, list[list[int]], int]:
    """The text, the steps and the number of endings of a streamed answer; it must say that it is done."""
    text, steps, ends = "", [], 0
    lines = [line for line in answer.read().decode().splitlines() if line]
    assert lines[-1] == "data: [DONE]", lines[-1:]
    for line in lines[:-1]:
        choice = json.loads(line.removeprefix("data: "))["choices"][0]
        text, steps, ends = text + choice["text"], steps + choice["steps"], ends + (choice["finish_reason"] is not None)
    return text, steps, ends


@pytest.mark.parametrize(
    ("policy", "speculate"),
    [("lockstep", ("off",)), ("depth", ("off",)), ("lockstep", ("draft:3", "lookup:2", "auto", "off")), ("depth", ("draft:2", "auto"))],
    ids=str,
)
def test_two_hundred_requests(loaded, alone, policy: str, speculate: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    """From 24 clients at a time, streamed and whole, while others hang up: each gets exactly what it gets alone.

    No near-tie is excused: the kernels sum in one order whatever the rows beside a row.
    """
    found: dict[int, tuple[str, list[list[int]], int]] = {}
    with serving(loaded, policy=policy, max_num_seqs=24) as (address, server):
        host, head = address.removeprefix("http://"), {"Content-Type": "application/json"}

        def ask(first: int) -> None:
            for i in range(first, 200, 24):
                body = json.dumps({**ASKED[i], "stream": i % 3 > 0, "speculate": speculate[i % len(speculate)]}).encode()
                if i % 5 == 0:
                    gone = http.client.HTTPConnection(host, timeout=60)
                    gone.request("POST", "/v1/completions", body, head)
                    if i % 2:
                        gone.getresponse().read(20)
                    gone.close()
                connection = http.client.HTTPConnection(host, timeout=60)
                connection.request("POST", "/v1/completions", body, head)
                answer = connection.getresponse()
                if i % 3 > 0:
                    found[i] = stream_of(answer)
                else:
                    choice = json.loads(answer.read())["choices"][0]
                    found[i] = choice["text"], choice["steps"], int(choice["finish_reason"] is not None)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        scheduler = server.scheduler_thread.scheduler  # type: ignore[attr-defined]
    assert not scheduler.running and not scheduler.waiting and scheduler.reserved_bytes == 0
    for i, (text, steps) in enumerate(alone):
        assert found[i] == (text, steps, 1), ASKED[i]


def test_sigterm_under_load(loaded, trained: Path) -> None:  # type: ignore[no-untyped-def]
    """Told to go while six texts are being written and six wait: all are finished, nobody new is let in, and the process ends well."""
    model, tokenizer = loaded
    process = subprocess.Popen(
        [sys.executable, "-m", "twoscale", "serve", str(trained), "--port", "0", "--policy", "depth", "--max-num-seqs", "6"],
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        address = next(line.strip() for line in process.stderr if line.startswith("http://"))
        host, head = address.removeprefix("http://").removesuffix("/v1"), {"Content-Type": "application/json"}
        bodies = [
            {"prompt": TEXT[: 5 + i], "max_tokens": 24, "temperature": 0, "stream": True, "loops": 40, "exit": "none"} for i in range(12)
        ]
        connections = [http.client.HTTPConnection(host, timeout=120) for _ in bodies]
        for connection, body in zip(connections, bodies, strict=True):
            connection.request("POST", "/v1/completions", json.dumps(body).encode(), head)
        first = connections[0].getresponse()
        assert first.readline().startswith(b"data: ")
        wait_for(lambda: sum(metric(host, name) for name in ("running", "waiting", "finished_total")) == 12)
        assert metric(host, "finished_total") < 12
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(OSError):
            http.client.HTTPConnection(host, timeout=5).request("GET", "/health")
        assert stream_of(first)[2] == 1
        for connection, body in list(zip(connections, bodies, strict=True))[1:]:
            _, steps, ends = stream_of(connection.getresponse())
            want = twoscale.generate(model, [tokenizer.encode(body["prompt"])], 24, loops=40, stop=(tokenizer.eot,))
            assert ends == 1 and steps == [list(s) for s in want.steps[0]]
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
