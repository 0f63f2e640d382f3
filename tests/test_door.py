"""The door: OpenAI's own client gets what `generate` gives; what is malformed, too much or too long is told so; nobody harms the others."""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import twoscale
from conftest import CommandLine, nano_run
from twoscale import exits
from twoscale.serve.choose import at, choose_policy
from twoscale.serve.scheduler import Scheduler
from twoscale.train import start_run

openai = pytest.importorskip("openai", reason="openai is not installed (the extra twoscale[test])")
uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed (the extra twoscale[serve])")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory, shards: Path):  # type: ignore[no-untyped-def]
    out = tmp_path_factory.mktemp("door") / "run"
    start_run(nano_run(steps=20), out, shards)
    return twoscale.load(out)


@contextlib.contextmanager
def serving(loaded, key: str | None = None, policy: str = "lockstep", calibrated=None, **limits: object) -> Iterator[tuple[str, object]]:  # type: ignore[no-untyped-def]
    """A server in a thread: its address and itself."""
    from twoscale.serve.app import Limits, Server, create_app

    model, tokenizer = loaded
    rows = int(limits.pop("rows", 8))  # type: ignore[call-overload]
    server = Server(
        model,
        tokenizer,
        "nano",
        Scheduler(model, policy, rows=rows),
        key=key,
        limits=Limits(**limits),
        calibrated=calibrated,  # type: ignore[arg-type]
    )
    config = uvicorn.Config(create_app(server), host="127.0.0.1", port=0, log_level="warning")
    listening = config.bind_socket()
    uv = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: uv.run(sockets=[listening]), daemon=True)
    thread.start()
    while not uv.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", server
    finally:
        uv.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def door(loaded):  # type: ignore[no-untyped-def]
    with serving(loaded, body=20_000, calibrated=({0: exits.Fixed(2)}, 5)) as (address, server):
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


@pytest.mark.parametrize("stream", [False, True])
def test_completions(loaded, door, stream: bool) -> None:  # type: ignore[no-untyped-def]
    """Text, steps, log-probabilities and usage of two prompts, twice each, are those of `generate` and of a direct computation."""
    model, tokenizer = loaded
    prompts = ["the loop", "a state that"]
    asked = {"exit": "step-norm", "tau": 2.0, "loops": 6}
    given = client(door[0]).completions.create(
        model="nano", prompt=prompts, max_tokens=8, n=2, temperature=0.7, seed=0, logprobs=2, stream=stream, extra_body=asked,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )  # fmt: skip
    texts, steps, told, finish, usage = [""] * 4, [[] for _ in range(4)], [[] for _ in range(4)], [None] * 4, None  # type: ignore[var-annotated]
    for part in given if stream else [given]:
        usage = part.usage or usage
        for c in part.choices:
            texts[c.index] += c.text
            steps[c.index] += c.steps
            told[c.index] += c.logprobs.token_logprobs
            finish[c.index] = c.finish_reason or finish[c.index]
    rule = exits.StepNorm(2.0)
    for i, prompt in enumerate(prompts):
        ids = tokenizer.encode(prompt)
        want = twoscale.generate(model, [ids, ids], 8, exit=rule, loops=6, temperature=0.7, stop=(tokenizer.eot,))
        for j in range(2):
            assert texts[2 * i + j] == tokenizer.decode([*ids, *want.tokens[j]])[len(prompt) :].removesuffix("<|endoftext|>")
            assert [tuple(s) for s in steps[2 * i + j]] == want.steps[j]
            assert finish[2 * i + j] == want.finish[j]
            logits = twoscale.forward(model, [ids + want.tokens[j][:-1]], exit=rule, loops=6).logits[0, len(ids) - 1 :]
            direct = torch.log_softmax(logits, dim=-1)[torch.arange(len(want.tokens[j])), want.tokens[j]]
            assert told[2 * i + j] == pytest.approx(direct.tolist(), abs=1e-4)
    assert usage is not None and usage.prompt_tokens == sum(len(tokenizer.encode(p)) for p in prompts)
    assert usage.completion_tokens == sum(len(s) for s in steps)


def test_rules_and_models(loaded, door) -> None:  # type: ignore[no-untyped-def]
    """Without a word on exits the calibrated rule is used; `none` runs all loops; models and health are told."""
    address = door[0]
    assert [m.id for m in client(address).models.list()] == ["nano"]
    calibrated = post(address, json.dumps({"prompt": "a", "max_tokens": 4}).encode())[1]["choices"][0]["steps"]  # type: ignore[index]
    assert all(s[0] == 2 and s[1] == 5 for s in calibrated)
    full = post(address, json.dumps({"prompt": "a", "max_tokens": 4, "exit": "none", "loops": [3, 4]}).encode())[1]
    assert all(s == [3, 4] for s in full["choices"][0]["steps"]) and full["twoscale"]["work_saved"] == 0.0  # type: ignore[index]
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    connection.request("GET", "/health")
    assert json.loads(connection.getresponse().read()) == {"status": "ok"}
    connection.request("GET", "/metrics")
    metrics = connection.getresponse().read().decode()
    assert "twoscale_tokens_total" in metrics and 'twoscale_loop_steps_total{group="1"}' in metrics


def test_stop_words(loaded, door) -> None:  # type: ignore[no-untyped-def]
    """The text ends where a stop word begins, also one that spans tokens, and none of it is shown on the way."""
    ask = {"model": "nano", "prompt": "the loop", "max_tokens": 30, "temperature": 0.9, "seed": 1}
    whole = client(door[0]).completions.create(**ask).choices[0].text
    stop = whole[5:8]
    cut = client(door[0]).completions.create(**ask, stop=[stop]).choices[0]
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"
    streamed = "".join(p.choices[0].text for p in client(door[0]).completions.create(**ask, stop=stop, stream=True))
    assert streamed == cut.text


BAD = {
    "not JSON": b"{",
    "a list": b"[]",
    "no prompt": b"{}",
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "infinite tau": b'{"prompt": "a", "exit": "step-norm", "tau": 1e999}',
    "huge number": b'{"prompt": "a", "max_tokens": 1e400}',
    "huge n": b'{"prompt": "a", "n": 100000000000000000000}',
    "text for a number": b'{"prompt": "a", "max_tokens": "8"}',
    "boolean for a number": b'{"prompt": "a", "n": true}',
    "empty prompt": b'{"prompt": ""}',
    "token beyond the vocabulary": b'{"prompt": [5000]}',
    "negative token": b'{"prompt": [-1]}',
    "too long": json.dumps({"prompt": "a" * 500}).encode(),
    "unknown rule": b'{"prompt": "a", "exit": "whatever"}',
    "a rule that reads a file": b'{"prompt": "a", "exit": "learned:0.1,file=/etc/passwd"}',
    "gate without one": b'{"prompt": "a", "exit": "gate:0.5"}',
    "many loops": b'{"prompt": "a", "loops": 200}',
    "loops for other groups": b'{"prompt": "a", "loops": [1, 2, 3, 4]}',
    "tau alone": b'{"prompt": "a", "tau": 0.1, "exit": "none"}',
    "unknown cache": b'{"prompt": "a", "kv": "ring:0"}',
    "another model": b'{"prompt": "a", "model": "gpt-9"}',
    "echo": b'{"prompt": "a", "echo": true}',
    "many prompts": json.dumps({"prompt": ["a"] * 40}).encode(),
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "deep": b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
}


@pytest.mark.parametrize("name", BAD)
def test_malformed(door, name: str) -> None:  # type: ignore[no-untyped-def]
    """4xx with a reason, never 5xx, and the next request is served."""
    status, body = post(door[0], BAD[name])
    assert 400 <= status < 500 and body["error"]["message"], body  # type: ignore[index]
    assert post(door[0], b'{"prompt": "a", "max_tokens": 1}')[0] == 200


def test_limits(loaded, door) -> None:  # type: ignore[no-untyped-def]
    """Large bodies, a full queue, a request that takes too long, a wrong key."""
    assert post(door[0], b" " * 30_000)[0] == 413
    with serving(loaded, key="secret", queue=1, rows=1, seconds=0.2) as (address, server):
        assert post(address, b'{"prompt": "a"}')[0] == 401
        assert post(address, b'{"prompt": "a"}', {"Authorization": "Bearer wrong"})[0] == 401
        mine = {"Authorization": "Bearer secret"}
        assert post(address, b'{"prompt": "a", "max_tokens": 2}', mine)[0] == 200
        status, body = post(address, b'{"prompt": "a", "n": 4}', mine)
        assert status == 429 and "waiting" in body["error"]["message"]  # type: ignore[index]
        step = server.worker.scheduler.step  # type: ignore[attr-defined]
        server.worker.scheduler.step = lambda: time.sleep(0.1) or step()  # type: ignore[attr-defined]
        assert post(address, b'{"prompt": "a", "max_tokens": 60}', mine)[0] == 504
        deadline = time.time() + 10
        while server.worker.scheduler.running and time.time() < deadline:  # type: ignore[attr-defined]
            time.sleep(0.05)
        assert not server.worker.scheduler.running  # type: ignore[attr-defined]


def test_clients_that_vanish(loaded) -> None:  # type: ignore[no-untyped-def]
    """Whoever hangs up, streaming or waiting, is cancelled within a token; the others get all of theirs."""
    model, tokenizer = loaded
    with serving(loaded, rows=4) as (address, server):
        scheduler = server.worker.scheduler  # type: ignore[attr-defined]
        step = scheduler.step
        scheduler.step = lambda: time.sleep(0.02) or step()
        host = address.removeprefix("http://")
        for stream in (True, False):
            connection = http.client.HTTPConnection(host)
            body = json.dumps({"prompt": "the loop", "max_tokens": 50, "stream": stream}).encode()
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            if stream:
                connection.getresponse().read(10)
            else:
                time.sleep(0.3)
            connection.close()
        got = client(address).completions.create(model="nano", prompt="a state", max_tokens=20, temperature=0)
        want = twoscale.generate(model, [tokenizer.encode("a state")], 20, stop=(tokenizer.eot,))
        assert [tuple(s) for s in got.choices[0].steps] == want.steps[0]
        deadline = time.time() + 10
        while scheduler.running and time.time() < deadline:
            time.sleep(0.05)
        assert not scheduler.running and scheduler.held == 0 and scheduler.counters.tokens < 2 * 50 + 20


def test_many_at_once(loaded) -> None:  # type: ignore[no-untyped-def]
    """Forty requests from eight clients at a time, by depth: each gets what it gets alone. Going down, the server finishes what it has."""
    model, tokenizer = loaded
    found: dict[int, object] = {}
    with serving(loaded, policy="depth") as (address, _):

        def ask(first: int) -> None:
            for i in range(first, 40, 8):
                prompt = "the loop turns and a state moves"[: 3 + i % 20]
                found[i] = client(address).completions.create(
                    model="nano", prompt=prompt, max_tokens=4 + i % 9, temperature=0, extra_body={"exit": "acceleration:1.0", "loops": 7}
                )

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for i in range(40):
        prompt = "the loop turns and a state moves"[: 3 + i % 20]
        want = twoscale.generate(model, [tokenizer.encode(prompt)], 4 + i % 9, exit=exits.Acceleration(1.0), loops=7, stop=(tokenizer.eot,))
        assert [tuple(s) for s in found[i].choices[0].steps] == want.steps[0]  # type: ignore[attr-defined]


def test_fuzz(loaded) -> None:  # type: ignore[no-untyped-def]
    """Requests drawn from the schema, and from outside of it: never a 5xx."""
    schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (the extra twoscale[test])")
    from hypothesis import HealthCheck, settings

    with serving(loaded) as (address, _):
        schema = schemathesis.openapi.from_url(f"{address}/openapi.json")

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
        def check(case) -> None:  # type: ignore[no-untyped-def]
            assert case.call().status_code < 500

        for operation in schema.get_all_operations():
            op = operation.ok()
            from hypothesis import given as drawn

            drawn(op.as_strategy())(check)()


def test_policy_by_cost(loaded) -> None:  # type: ignore[no-untyped-def]
    """Flat costs favour mixing by depth, costs that grow with the rows favour lockstep; and the measured choice says why."""
    policy, why = choose_policy(loaded[0], 4)
    assert policy in ("lockstep", "depth") and policy in why and "ms of a loop step" in why
    assert at({1: 1.0, 4: 4.0}, 2) == 2.0 and at({1: 1.0, 4: 4.0}, 8) == 8.0 and at({1: 1.0, 4: 4.0}, 0.5) == 1.0


def test_bad_flags(cli: CommandLine, tmp_path: Path) -> None:
    for words, says in ((("--port", "99999"), "--port"), (("--rows", "0"), "--rows"), ((), "no folder")):
        code, _, err = cli("serve", tmp_path / "nothing", *words)
        assert code == 2 and says in err and err.count("\n") == 1
