"""The proxy of several replicas, with replicas in this process that can be made to die. Ray's own part is in test_ray.py."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from conftest import CommandLine, is_one_line
from twoscale.engine.scheduler import Scheduler

pytest.importorskip("fastapi", reason="fastapi is not installed (the extra twoscale[serve])")
httpx = pytest.importorskip("httpx", reason="httpx is not installed (the extra twoscale[test])")

from twoscale.serve.limits import Limits  # noqa: E402
from twoscale.serve.local import listen  # noqa: E402
from twoscale.serve.metrics import ReplicaMetrics, is_counter, parse_metrics  # noqa: E402
from twoscale.serve.proxy import DIED, Proxy, ReplicaDied, create_proxy_app, n_sequences  # noqa: E402
from twoscale.serve.replica import HTTPRequest, Replica, ResponseStart  # noqa: E402
from twoscale.serve.server import Server  # noqa: E402


class Pair:
    """Two replicas that are asked in turn. One dies after so many messages of a response; dead ones are not asked again."""

    def __init__(self, loaded, dies_after: int | None = None) -> None:  # type: ignore[no-untyped-def]
        model, tokenizer = loaded
        self.replicas = [Replica(Server(model, tokenizer, "nano", Scheduler(model, "lockstep", max_num_seqs=4))) for _ in range(2)]
        self.dies_after, self.dead, self.n_sent = dies_after, False, 0

    async def send(self, request: HTTPRequest, sequences: int) -> AsyncGenerator[ResponseStart | bytes]:
        mortal = self.dies_after is not None and not self.dead
        self.n_sent += 1
        n = 0
        messages = self.replicas[0 if mortal else 1].send(request)
        try:
            async for message in messages:
                if mortal and n == self.dies_after:
                    self.dead = True
                    raise ReplicaDied
                n += 1
                yield message
        finally:
            await messages.aclose()

    async def metrics(self) -> dict[str, str]:
        return {f"replica {i}": replica.server.metrics() for i, replica in enumerate(self.replicas)}

    def stop(self) -> None:
        for replica in self.replicas:
            replica.server.scheduler_thread.stop()


def ask(pair: Pair, *bodies: dict[str, object], path: str = "/v1/completions", key: str | None = None):  # type: ignore[no-untyped-def]
    """The responses of a proxy to requests at the same time, and the proxy."""
    proxy = Proxy(pair, Limits(timeout=30.0), key)

    async def run():  # type: ignore[no-untyped-def]
        transport = httpx.ASGITransport(app=create_proxy_app(proxy))
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy", timeout=60) as client:
            if not bodies:
                return [await client.get(path)]
            return await asyncio.gather(*(client.post(path, json=body) for body in bodies))

    try:
        return asyncio.run(run()), proxy
    finally:
        pair.stop()


BODY: dict[str, object] = {"prompt": "The loop", "max_tokens": 6, "temperature": 0, "loops": 3, "exit": "none"}


def texts_of(stream: str) -> list[dict[str, object]]:
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]


def test_same_answer(loaded) -> None:  # type: ignore[no-untyped-def]
    """Through a proxy a request has the answer of a server alone; errors, unknown paths and the model list are the server's own."""
    import twoscale

    model, tokenizer = loaded
    want = tokenizer.decode(twoscale.generate(model, [tokenizer.encode("The loop")], 6, loops=3).tokens[0])
    (whole, streamed, bad), _ = ask(Pair(loaded), BODY, {**BODY, "stream": True}, {"promt": "x"})
    assert whole.json()["choices"][0]["text"] == want
    assert "".join(e["choices"][0]["text"] for e in texts_of(streamed.text)) == want and streamed.text.endswith("data: [DONE]\n\n")  # type: ignore[index]
    assert bad.status_code == 400 and "did you mean 'prompt'" in bad.text
    ([models], _), ([missing], _) = ask(Pair(loaded), path="/v1/models"), ask(Pair(loaded), path="/nothing")
    assert models.json()["data"][0]["id"] == "nano" and missing.status_code == 404
    ([refused], _) = ask(Pair(loaded), path="/metrics", key="secret")
    assert refused.status_code == 401


@pytest.mark.parametrize("dies_after", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_retried(dies_after: int, stream: bool, loaded) -> None:  # type: ignore[no-untyped-def]
    """A replica that dies before anything was sent to the client: another one answers, once."""
    pair = Pair(loaded, dies_after)
    ([response], proxy) = ask(pair, {**BODY, "stream": stream})
    assert response.status_code == 200 and pair.n_sent == 2 and proxy.n_retried == 1
    assert response.text.count('"finish_reason": "length"' if stream else '"finish_reason":"length"') == 1


def test_dies_while_streaming(loaded) -> None:  # type: ignore[no-untyped-def]
    """A replica that dies after the first event: the stream ends with an error event and without [DONE], and is not asked again."""
    pair = Pair(loaded, 2)  # the start of the response and one event, which may have several tokens
    ([response], _) = ask(pair, {**BODY, "stream": True})
    events = texts_of(response.text)
    assert events[-1] == {"error": {"message": DIED, "type": "server_error"}} and len(events) == 2 and "[DONE]" not in response.text
    assert pair.n_sent == 1


def test_all_die(loaded) -> None:  # type: ignore[no-untyped-def]
    """A request whose replicas all die ends with 503."""
    pair = Pair(loaded, 0)
    pair.send = _always_dying  # type: ignore[assignment, method-assign]
    ([response], _) = ask(pair, BODY)
    assert response.status_code == 503 and "replicas died" in response.text


async def _always_dying(request: HTTPRequest, sequences: int) -> AsyncGenerator[ResponseStart | bytes]:
    raise ReplicaDied
    yield b""


def test_metrics_add_up(loaded) -> None:  # type: ignore[no-untyped-def]
    """Counters and sizes of all replicas are added, means and shares are computed from the totals, and every metric is there once."""
    pair = Pair(loaded)
    (_, proxy) = ask(pair, BODY, BODY)
    each = [parse_metrics(text) for text in asyncio.run(pair.metrics()).values()]
    text = asyncio.run(proxy.metrics())
    total = parse_metrics(text)
    assert total["twoscale_tokens_total"] == 12 and total["twoscale_replicas"] == 2
    mean = total['twoscale_loop_steps_total{group="0"}'] / total["twoscale_processed_tokens_total"]
    assert total['twoscale_mean_steps{group="0"}'] == pytest.approx(mean) and mean > 1
    added = {"waiting", "running", "connections", "cache_bytes", "cache_bytes_limit"}
    computed = {"running_ratio", "mean_steps", "speculation_acceptance"}
    gauges = {name.partition("{")[0].removeprefix("twoscale_") for name in each[0] if not is_counter(name)}
    assert gauges == added | computed, "a new gauge: serve/metrics.py must know whether it can be added"
    for name in each[0]:
        base = name.partition("{")[0].removeprefix("twoscale_")
        assert base in computed or total[name] == sum(values[name] for values in each), name
    assert text.count("# TYPE twoscale_tokens_total") == 1 and set(total) == {*each[0], "twoscale_replicas", "twoscale_retried_total"}


def test_shares_of_totals() -> None:
    """Shares come from the totals: replicas with 1 of 2 and 8 of 8 guesses right have 9 of 10 together, not 0.75."""

    def text(drafted: int, accepted: int, running: float) -> str:
        names = ("speculation_drafted_total", "speculation_accepted_total", "speculation_acceptance", "running_ratio")
        return "".join(f"twoscale_{n} {v}\n" for n, v in zip(names, (drafted, accepted, accepted / drafted, running), strict=True))

    total = parse_metrics(ReplicaMetrics().update({"a": text(2, 1, 0.5), "b": text(8, 8, 1.0)}))
    assert total["twoscale_speculation_acceptance"] == 0.9 and total["twoscale_running_ratio"] == 0.75


def test_totals_of_the_dead() -> None:
    """What a dead replica had counted stays in the totals, also while no replica is alive; its gauges do not."""
    metrics = ReplicaMetrics()

    def total(texts: dict[str, tuple[int, int]]) -> tuple[float, float]:
        found = parse_metrics(metrics.update({k: f"twoscale_tokens_total {n}\ntwoscale_running {r}\n" for k, (n, r) in texts.items()}))
        return found["twoscale_tokens_total"], found["twoscale_running"]

    assert total({"a": (100, 3), "b": (50, 2)}) == (150, 5)
    assert total({"b": (60, 1)}) == (160, 1)
    assert total({}) == (160, 0)
    assert total({"b": (70, 1), "c": (5, 4)}) == (175, 5)


@pytest.mark.parametrize(
    ("body", "sequences"),
    [
        (b'{"prompt": "a"}', 1), (b'{"prompt": [1, 2, 3], "n": 2}', 2), (b'{"prompt": ["a", "b"], "n": 3}', 6),
        (b'{"prompt": ["a"], "n": 100000}', 64), (b"", 1), (b"[]", 1), (b"{", 1), (b'{"prompt": [], "n": "x"}', 1),
    ],
)  # fmt: skip
def test_n_sequences(body: bytes, sequences: int) -> None:
    """The proxy counts as many sequences as a request asks for."""
    assert n_sequences(body) == sequences


def test_replica_stops_with_its_client(loaded, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """When the reader of a response goes, the sequences of its request are removed."""
    pair = Pair(loaded)

    async def leave() -> None:
        body = json.dumps({**BODY, "max_tokens": 60, "stream": True}).encode()
        messages = pair.replicas[0].send(HTTPRequest("POST", "/v1/completions", ((b"content-type", b"application/json"),), body))
        assert isinstance(await anext(messages), ResponseStart) and await anext(messages)
        await messages.aclose()
        for _ in range(200):
            if not pair.replicas[0].server.scheduler_thread.scheduler.running:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the sequence goes on")

    asyncio.run(leave())
    pair.stop()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--replicas", "0"), "between 1 and 1000"),
        (("--replicas", "-1"), "between 1 and 1000"),
        (("--ray-address", "head:6379"), "goes with --replicas"),
        (("--replicas", "2", "--engine", "vllm"), "--replicas does not go with --engine vllm"),
        (("--replicas", "2"), "Ray"),
    ],
)
def test_refused(words: tuple[str, ...], line: str, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of replicas that make no sense, and replicas where Ray is not installed: one line and code 2."""
    monkeypatch.setattr("twoscale.serve.ray_cluster.importlib.util.find_spec", lambda name: None)
    code, _, err = cli("serve", "bundled", "--port", "0", *words)
    assert code == 2 and line in err and is_one_line(err)


def test_port_in_use(cli: CommandLine) -> None:
    """A port in use is told before Ray is started."""
    with listen("127.0.0.1", 0) as taken:
        code, _, err = cli("serve", "bundled", "--replicas", "2", "--port", taken.getsockname()[1])
    assert code == 2 and "cannot listen on" in err and is_one_line(err)
