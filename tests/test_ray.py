"""Replicas with Ray Serve: what a front answers while one of them is killed. Run by `make test-ray`, in an environment of its own."""

import concurrent.futures
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import twoscale
from conftest import CommandLine, is_one_line
from models import save_folder, small_model

pytest.importorskip("ray.serve", reason="Ray is not installed here: `make test-ray` makes an environment for it")
httpx = pytest.importorskip("httpx", reason="httpx is not installed (the extra twoscale[test])")

from twoscale.serve import ray_replicas  # noqa: E402
from twoscale.serve.build import Settings  # noqa: E402
from twoscale.serve.front import DIED, Front, create_front  # noqa: E402
from twoscale.serve.local import run_in_thread  # noqa: E402

CLIENTS, REQUESTS, NEW = 24, 4, 48
PROMPTS = [f"Client {i} asks" for i in range(CLIENTS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(small_model(vocab_size=257, block_size=128), tmp_path_factory.mktemp("ray") / "model")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[str, Any]]:
    """The address of a front with two replicas, and Ray Serve's handle."""
    handle = ray_replicas.start(Settings(str(folder), policy="lockstep", max_num_seqs=8), 2)
    try:
        with run_in_thread(create_front(Front(ray_replicas.RayReplicas(handle)))) as address:
            yield address, handle
    finally:
        ray_replicas.stop()


def pids(handle: Any) -> set[int]:
    return set(handle.broadcast("pid").results(timeout_s=60))


def metric(address: str, name: str) -> float:
    text = httpx.get(f"{address}/metrics", timeout=60).text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"twoscale_{name} "))


def ask(address: str, prompt: str, stream: bool) -> tuple[str, str]:
    """(text, how it ended): `whole`, or the message of the error that ended it."""
    body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "loops": 6, "exit": "none", "stream": stream}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=240) as response:
        if response.status_code != 200 or not stream:
            content = json.loads(response.read())
            return (content["choices"][0]["text"], "whole") if response.status_code == 200 else ("", content["error"]["message"])
        text = ""
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return text, "whole"
            if line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    return text, event["error"]["message"]
                text += event["choices"][0]["text"]
        return text, "the stream ended without a word"


def test_kill(served: tuple[str, Any], folder: Path) -> None:
    """kill -9 of a replica under 24 clients: every request is answered rightly, or its stream ends with an error that says so; none hangs
    and none is doubled. The replica is replaced, and both take requests."""
    address, handle = served
    model, tokenizer = twoscale.load(folder)
    assert tokenizer is not None
    stop = (tokenizer.eot,)
    want = [tokenizer.decode(t) for t in twoscale.generate(model, [tokenizer.encode(p) for p in PROMPTS], NEW, loops=6, stop=stop).tokens]
    before = pids(handle)
    assert len(before) == 2

    def client(i: int) -> list[tuple[str, str]]:
        return [ask(address, PROMPTS[i], stream=(i + j) % 2 == 0) for j in range(REQUESTS)]

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        answers = [pool.submit(client, i) for i in range(CLIENTS)]
        while metric(address, "tokens_total") < CLIENTS * NEW / 2:
            time.sleep(0.1)
        os.kill(killed := min(before), signal.SIGKILL)
        found = [future.result(timeout=400) for future in answers]
    broken = 0
    for i, each in enumerate(found):
        for text, end in each:
            assert (end == "whole" and text == want[i]) or (end == DIED and want[i].startswith(text) and text != want[i]), (end, text)
            broken += end == DIED
    assert broken + metric(address, "asked_again_total") >= 1, "the killed replica should have had requests"
    deadline = time.monotonic() + 200
    while len(now := pids(handle)) < 2 or killed in now:
        assert time.monotonic() < deadline, "the replica was not replaced"
        time.sleep(1)
    again = [ask(address, prompt, False) for prompt in PROMPTS[:4]]
    assert again == [(text, "whole") for text in want[:4]]


def test_fewest_rows(served: tuple[str, Any]) -> None:
    """Requests at the same time are spread over the replicas by their rows: one with 8 sequences here, eight with one there."""
    address, handle = served
    tokens = "\ntwoscale_tokens_total "

    def each() -> list[float]:
        return [float(t.split(tokens)[1].split()[0]) for t in handle.broadcast("metrics").results(timeout_s=60)]

    before = each()
    many = {"prompt": "Many", "n": 8, "max_tokens": NEW, "temperature": 0, "loops": 6, "exit": "none", "stop_token_ids": []}
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        first = pool.submit(httpx.post, f"{address}/v1/completions", json=many, timeout=240)
        time.sleep(0.3)
        rest = [pool.submit(ask, address, f"One {i}", False) for i in range(8)]
        assert first.result().status_code == 200 and all(future.result()[1] == "whole" for future in rest)
    added = [b - a for a, b in zip(before, each(), strict=True)]
    assert min(added) > 0 and sum(added) == metric(address, "tokens_total") - sum(before)


@pytest.mark.parametrize(("words", "line"), [(("--ray-address", "127.0.0.1:1"), "no Ray cluster at 127.0.0.1:1"), ((), "cannot listen on")])
def test_bad_command(words: tuple[str, ...], line: str, folder: Path, cli: CommandLine) -> None:
    """A cluster that is not there, and a port in use: one line and code 2."""
    from twoscale.serve.local import listen

    with listen("127.0.0.1", 0) as taken:
        port = 0 if words else taken.getsockname()[1]
        code, _, err = cli("serve", folder, "--replicas", "2", "--port", port, *words)
    assert code == 2 and line in err and is_one_line(err)
