"""The front of several replicas, with replicas in this process that can be made to die. Ray's own part is in test_ray.py."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from twoscale.engine.scheduler import Scheduler

pytest.importorskip("fastapi", reason="fastapi is not installed (the extra twoscale[serve])")
httpx = pytest.importorskip("httpx", reason="httpx is not installed (the extra twoscale[test])")

from twoscale.serve.front import DIED, Front, ReplicaDied, add_metrics, create_front, rows_of  # noqa: E402
from twoscale.serve.limits import Limits  # noqa: E402
from twoscale.serve.replica import Asked, Head, Replica  # noqa: E402
from twoscale.serve.server import Server  # noqa: E402


class Pair:
    """Two replicas that are asked in turn. One dies after so many messages of a response; dead ones are not asked again."""

    def __init__(self, loaded, dies_after: int | None = None) -> None:  # type: ignore[no-untyped-def]
        model, tokenizer = loaded
        self.replicas = [Replica(Server(model, tokenizer, "nano", Scheduler(model, "lockstep", max_num_seqs=4))) for _ in range(2)]
        self.dies_after, self.dead, self.n_asked = dies_after, False, 0

    async def ask(self, asked: Asked, rows: int) -> AsyncGenerator[Head | bytes]:
        mortal = self.dies_after is not None and not self.dead
        self.n_asked += 1
        n = 0
        messages = self.replicas[0 if mortal else 1].ask(asked)
        try:
            async for message in messages:
                if mortal and n == self.dies_after:
                    self.dead = True
                    raise ReplicaDied
                n += 1
                yield message
        finally:
            await messages.aclose()

    async def metrics(self) -> list[str]:
        return [replica.server.metrics() for replica in self.replicas]

    def stop(self) -> None:
        for replica in self.replicas:
            replica.server.worker.stop()


def ask(pair: Pair, *bodies: dict[str, object], path: str = "/v1/completions", key: str | None = None):  # type: ignore[no-untyped-def]
    """The responses of a front to requests at the same time, and the front."""
    front = Front(pair, Limits(timeout=30.0), key)

    async def run():  # type: ignore[no-untyped-def]
        transport = httpx.ASGITransport(app=create_front(front))
        async with httpx.AsyncClient(transport=transport, base_url="http://front", timeout=60) as client:
            if not bodies:
                return [await client.get(path)]
            return await asyncio.gather(*(client.post(path, json=body) for body in bodies))

    try:
        return asyncio.run(run()), front
    finally:
        pair.stop()


BODY: dict[str, object] = {"prompt": "The loop", "max_tokens": 6, "temperature": 0, "loops": 3, "exit": "none"}


def texts_of(stream: str) -> list[dict[str, object]]:
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]


def test_same_answer(loaded) -> None:  # type: ignore[no-untyped-def]
    """Through a front a request has the answer of a server alone; errors, unknown paths and the model list are the server's own."""
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
def test_asked_again(dies_after: int, stream: bool, loaded) -> None:  # type: ignore[no-untyped-def]
    """A replica that dies before anything was sent to the client: another one answers, once."""
    pair = Pair(loaded, dies_after)
    ([response], front) = ask(pair, {**BODY, "stream": stream})
    assert response.status_code == 200 and pair.n_asked == 2 and front.n_asked_again == 1
    assert response.text.count('"finish_reason": "length"' if stream else '"finish_reason":"length"') == 1


def test_dies_while_streaming(loaded) -> None:  # type: ignore[no-untyped-def]
    """A replica that dies after the first events: the stream ends with an error event and without [DONE], and is not asked again."""
    pair = Pair(loaded, 3)
    ([response], _) = ask(pair, {**BODY, "stream": True})
    events = texts_of(response.text)
    assert events[-1] == {"error": {"message": DIED, "type": "server_error"}} and len(events) == 3 and "[DONE]" not in response.text
    assert pair.n_asked == 1


def test_all_die(loaded) -> None:  # type: ignore[no-untyped-def]
    """A request whose replicas all die ends with 503."""
    pair = Pair(loaded, 0)
    pair.ask = _always_dying  # type: ignore[assignment, method-assign]
    ([response], _) = ask(pair, BODY)
    assert response.status_code == 503 and "replicas died" in response.text


async def _always_dying(asked: Asked, rows: int) -> AsyncGenerator[Head | bytes]:
    raise ReplicaDied
    yield b""


def test_metrics_add_up(loaded) -> None:  # type: ignore[no-untyped-def]
    """Counters of all replicas are added, means are taken anew from the sums, and every metric of one server is there once."""
    pair = Pair(loaded)
    (_, front) = ask(pair, BODY, BODY)
    each = asyncio.run(pair.metrics())
    text = asyncio.run(front.metrics())
    value = dict(line.rpartition(" ")[::2] for line in text.splitlines() if not line.startswith("#"))
    assert float(value["twoscale_tokens_total"]) == 12 and float(value["twoscale_replicas"]) == 2
    mean = float(value['twoscale_loop_steps_total{group="0"}']) / float(value["twoscale_processed_tokens_total"])
    assert float(value['twoscale_mean_steps{group="0"}']) == pytest.approx(mean) and mean > 1
    assert text.count("# TYPE twoscale_tokens_total") == 1 and add_metrics(each).splitlines()[0] == each[0].splitlines()[0]


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        (b'{"prompt": "a"}', 1), (b'{"prompt": [1, 2, 3], "n": 2}', 2), (b'{"prompt": ["a", "b"], "n": 3}', 6),
        (b'{"prompt": ["a"], "n": 100000}', 64), (b"", 1), (b"[]", 1), (b"{", 1), (b'{"prompt": [], "n": "x"}', 1),
    ],
)  # fmt: skip
def test_rows(body: bytes, rows: int) -> None:
    """A request counts as many rows as it asks for sequences."""
    assert rows_of(body) == rows


def test_replica_stops_with_its_client(loaded, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """When the reader of a response goes, the sequences of its request are removed."""
    pair = Pair(loaded)

    async def leave() -> None:
        body = json.dumps({**BODY, "max_tokens": 60, "stream": True}).encode()
        messages = pair.replicas[0].ask(Asked("POST", "/v1/completions", ((b"content-type", b"application/json"),), body))
        assert isinstance(await anext(messages), Head) and await anext(messages)
        await messages.aclose()
        for _ in range(200):
            if not pair.replicas[0].server.worker.scheduler.running:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the sequence goes on")

    asyncio.run(leave())
    pair.stop()
