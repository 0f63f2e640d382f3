"""The HTTP API: OpenAI's own client gets what `generate` gives; bad, large and slow requests are refused in words and harm nobody else."""

import dataclasses
import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import twoscale
from conftest import CommandLine
from http_client import client, metrics_of, openai, post, serving, wait_for
from twoscale import exits
from twoscale.config import UserError
from twoscale.engine.policy import choose_policy, interpolate_cost


@pytest.fixture(scope="module")
def api(loaded):  # type: ignore[no-untyped-def]
    with serving(loaded, max_body=20_000, calibration=({0: exits.Fixed(2)}, 5)) as (address, server):
        yield address, server


@pytest.mark.parametrize("stream", [False, True])
def test_completions(loaded, api, stream: bool) -> None:  # type: ignore[no-untyped-def]
    """Text, steps, log-probabilities and usage of two prompts, twice each, are those of `generate` and of a direct computation."""
    model, tokenizer = loaded
    prompts = ["the loop", "a state that"]
    asked = {"exit": "step-norm", "tau": 2.0, "loops": 6}
    given = client(api[0]).completions.create(
        model="nano", prompt=prompts, max_tokens=8, n=2, temperature=0.7, seed=0, logprobs=2, stream=stream, extra_body=asked,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    )  # fmt: skip
    texts, steps, found, finish, usage = [""] * 4, [[] for _ in range(4)], [[] for _ in range(4)], [None] * 4, None  # type: ignore[var-annotated]
    for part in given if stream else [given]:
        usage = part.usage or usage
        for c in part.choices:
            texts[c.index] += c.text
            steps[c.index] += c.steps
            found[c.index] += c.logprobs.token_logprobs
            finish[c.index] = c.finish_reason or finish[c.index]
    rule = exits.StepNorm(2.0)
    for i, prompt in enumerate(prompts):
        ids = tokenizer.encode(prompt)
        want = twoscale.generate(model, [ids, ids], 8, exit=rule, loops=6, temperature=0.7, stop=(tokenizer.eot,))
        for j in range(2):
            assert texts[2 * i + j] == tokenizer.decode([*ids, *want.tokens[j]])[len(prompt) :].removesuffix("<|endoftext|>")
            assert [tuple(s) for s in steps[2 * i + j]] == want.steps[j]
            assert finish[2 * i + j] == want.finish_reasons[j]
            logits = twoscale.forward(model, [ids + want.tokens[j][:-1]], exit=rule, loops=6).logits[0, len(ids) - 1 :]
            direct = torch.log_softmax(logits, dim=-1)[torch.arange(len(want.tokens[j])), want.tokens[j]]
            assert found[2 * i + j] == pytest.approx(direct.tolist(), abs=1e-4)
    assert usage is not None and usage.prompt_tokens == sum(len(tokenizer.encode(p)) for p in prompts)
    assert usage.completion_tokens == sum(len(s) for s in steps)


def test_rules_and_models(loaded, api) -> None:  # type: ignore[no-untyped-def]
    """Without a word on exits the calibrated rule is used; `none` runs all loops; models and health are found."""
    address = api[0]
    assert [m.id for m in client(address).models.list()] == ["nano"]
    calibrated = post(address, json.dumps({"prompt": "a", "max_tokens": 4}).encode())[1]["choices"][0]["steps"]  # type: ignore[index]
    assert all(s[0] == 2 and s[1] == 5 for s in calibrated)
    full = post(address, json.dumps({"prompt": "a", "max_tokens": 4, "exit": "none", "loops": [3, 4]}).encode())[1]
    assert all(s == [3, 4] for s in full["choices"][0]["steps"]) and full["twoscale"]["work_saved"] == 0.0  # type: ignore[index]
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    connection.request("GET", "/health")
    assert json.loads(connection.getresponse().read()) == {"status": "ok"}
    metrics = metrics_of(address.removeprefix("http://"))
    for name in ("tokens_total", "waiting", "running_ratio", "cache_bytes", 'loop_steps_total{group="1"}', 'mean_steps{group="0"}'):
        assert f"twoscale_{name} " in metrics, name


def test_stop_words(loaded, api) -> None:  # type: ignore[no-untyped-def]
    """The text ends where a stop word begins, also one that spans tokens, and none of it is shown on the way."""
    ask = {"model": "nano", "prompt": "the loop", "max_tokens": 30, "temperature": 0.9, "seed": 1}
    whole = client(api[0]).completions.create(**ask).choices[0].text
    stop = whole[5:8]
    cut = client(api[0]).completions.create(**ask, stop=[stop]).choices[0]
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"
    streamed = "".join(p.choices[0].text for p in client(api[0]).completions.create(**ask, stop=stop, stream=True))
    assert streamed == cut.text


def test_after_a_stop_word(loaded, api) -> None:  # type: ignore[no-untyped-def]
    """What the scheduler wrote past a stop word is not in usage, steps or log-probabilities, streamed or whole."""
    ask = {"model": "nano", "prompt": "the loop", "max_tokens": 30, "temperature": 0.9, "seed": 1, "logprobs": 1}
    stop = client(api[0]).completions.create(**ask).choices[0].text[5:8]
    counts = set()
    for stream in (False, True, True):
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        given = client(api[0]).completions.create(**ask, stop=stop, **options)
        parts = list(given) if stream else [given]
        choices = [c for part in parts for c in part.choices]
        steps = sum(len(c.steps) for c in choices)
        for c in choices:
            found = c.logprobs
            assert len(c.steps) == len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset)
            assert all(token in top for token, top in zip(found.tokens, found.top_logprobs, strict=True))
        assert parts[-1].usage.completion_tokens == steps
        counts.add(steps)
    assert len(counts) == 1


def test_as_openai_has_it(loaded, api) -> None:  # type: ignore[no-untyped-def]
    """null is the default, an unknown model is 404, and without a seed texts differ from call to call."""
    nothing = dict.fromkeys(("max_tokens", "n", "stream", "echo", "stop", "suffix", "best_of", "logit_bias", "temperature", "seed"))
    status, body = post(api[0], json.dumps({"prompt": "a", **nothing}).encode())
    assert status == 200 and body["usage"]["completion_tokens"] > 1  # type: ignore[index]
    texts = {client(api[0]).completions.create(model="nano", prompt="the", max_tokens=12).choices[0].text for _ in range(4)}
    assert len(texts) > 1
    assert client(api[0]).models.retrieve("nano").id == "nano"
    with pytest.raises(openai.NotFoundError):
        client(api[0]).models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError):
        client(api[0]).completions.create(model="gpt-9", prompt="a")


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
    "a rule that reads a file, spelt otherwise": b'{"prompt": "a", "exit": " Learned :0.1,file =/etc/passwd"}',
    "a rule with a text for a seed": b'{"prompt": "a", "exit": "random:3,seed=x"}',
    "a rule with huge hits": b'{"prompt": "abc", "exit": "acceleration:1,hits=99999999999999999999"}',
    "a rule with a huge threshold": b'{"prompt": "abc", "exit": "step-norm:99999999999999999999999"}',
    "a rule with a huge depth": b'{"prompt": "abc", "exit": "fixed:99999999999999999999"}',
    "many wrong tokens": b'{"prompt": [' + b"{}," * 5000 + b"{}]}",
    "biased": b'{"prompt": "a", "logit_bias": {"5": 1}}',
    "a penalty": b'{"prompt": "a", "presence_penalty": 0.5}',
    "a suffix": b'{"prompt": "a", "suffix": "b"}',
    "best of more": b'{"prompt": "a", "best_of": 3}',
    "more texts than may be": json.dumps({"prompt": ["a"] * 16, "n": 16}).encode(),
    "gate without one": b'{"prompt": "a", "exit": "gate:0.5"}',
    "many loops": b'{"prompt": "a", "loops": 200}',
    "loops for other groups": b'{"prompt": "a", "loops": [1, 2, 3, 4]}',
    "tau alone": b'{"prompt": "a", "tau": 0.1, "exit": "none"}',
    "unknown cache": b'{"prompt": "a", "kv": "ring:0"}',
    "another model": b'{"prompt": "a", "model": "gpt-9"}',
    "echo": b'{"prompt": "a", "echo": true}',
    "many prompts": json.dumps({"prompt": ["a"] * 40}).encode(),
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "stop token beyond the vocabulary": b'{"prompt": "a", "stop_token_ids": [5000]}',
    "negative top_k": b'{"prompt": "a", "top_k": -2}',
    "deep": b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
}


@pytest.mark.parametrize("name", BAD)
def test_malformed(api, name: str) -> None:  # type: ignore[no-untyped-def]
    """4xx with a reason, never 5xx, and the next request is served."""
    status, body = post(api[0], BAD[name])
    assert 400 <= status < 500 and body["error"]["message"], body  # type: ignore[index]
    assert post(api[0], b'{"prompt": "a", "max_tokens": 1}')[0] == 200


@pytest.mark.parametrize(
    "field,settings",
    [
        ("kv", {"kv": "ring:0"}),
        ("kv", {"kv": "none", "exit": "step-norm:0.5", "loops": 4}),
        ("loops", {"loops": 200}),
        ("loops", {"loops": [1, 2, 3, 4], "exit": "step-norm:0.5"}),
        ("exit", {"exit": "whatever", "loops": 4}),
        ("exit", {"exit": "gate:0.5"}),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value),
)
def test_param_of_a_refusal(api, field: str, settings: dict[str, object]) -> None:  # type: ignore[no-untyped-def]
    """A request with one invalid loop parameter is refused with 400 and the name of that parameter."""
    status, body = post(api[0], json.dumps({"prompt": "a", **settings}).encode())
    assert (status, body["error"]["param"]) == (400, field), body  # type: ignore[index]


def test_limits(loaded, api) -> None:  # type: ignore[no-untyped-def]
    """Large bodies, a full queue, a request that takes too long, a wrong key."""
    assert post(api[0], b" " * 30_000)[0] == 413
    with serving(loaded, key="secret", max_queue=1, max_num_seqs=1, timeout=0.2) as (address, server):
        assert post(address, b'{"prompt": "a"}')[0] == 401
        assert post(address, b'{"prompt": "a"}', {"Authorization": "Bearer wrong"})[0] == 401
        mine = {"Authorization": "Bearer secret"}
        assert post(address, b'{"prompt": "a", "max_tokens": 2}', mine)[0] == 200
        assert post(address, b'{"prompt": "a", "n": 4}', mine)[0] == 400  # more than can ever wait
        step = server.scheduler_thread.scheduler.step  # type: ignore[attr-defined]
        server.scheduler_thread.scheduler.step = lambda: time.sleep(0.1) or step()  # type: ignore[attr-defined]
        status, body = post(address, b'{"prompt": "a", "max_tokens": 60}', mine)
        assert status == 504 or body["choices"][0]["timed_out"]  # type: ignore[index]
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(lambda _: post(address, b'{"prompt": "a", "max_tokens": 60}', mine), range(6)))
        refused = [body for status, body in answers if status == 429]
        assert refused and all("waiting" in body["error"]["message"] for body in refused)  # type: ignore[index]
        wait_for(lambda: not server.scheduler_thread.scheduler.running)  # type: ignore[attr-defined]


def test_time_limit(loaded) -> None:  # type: ignore[no-untyped-def]
    """When the time is up the answer ends with what there is and says so, streamed or whole; without one token it is 504."""
    with serving(loaded, max_num_seqs=1, timeout=1.0) as (address, server):
        scheduler = server.scheduler_thread.scheduler  # type: ignore[attr-defined]
        step = scheduler.step
        scheduler.step = lambda: time.sleep(0.25) or step()  # a step has at most 16 tokens
        ask = {"prompt": "the loop", "max_tokens": 60, "n": 2, "temperature": 0}
        status, body = post(address, json.dumps(ask).encode())
        whole = client(address).completions.create(model="nano", prompt="the loop", max_tokens=60, temperature=0, stream=True)
        parts = [choice for part in whole for choice in part.choices]
        first, second = body["choices"]  # type: ignore[misc]
        assert (
            status == 200 and 0 < len(first["steps"]) < 60 and first["text"] and body["usage"]["completion_tokens"] == len(first["steps"])
        )  # type: ignore[index]
        assert second["text"] == "" and {first["finish_reason"], second["finish_reason"]} == {"length"} and first["timed_out"]
        assert parts[-1].finish_reason == "length" and parts[-1].timed_out and 0 < sum(len(c.steps) for c in parts) < 60
        idle: list[float] = []
        scheduler.step = lambda: idle.append(time.sleep(0.04)) or False  # type: ignore[func-returns-value]
        wait_for(lambda: len(idle) > 0)
        assert post(address, json.dumps(ask).encode())[0] == 504


UNKNOWN = {
    "exits": "exit",
    "loop": "loops",
    "max_new_tokens": "max_tokens",
    "stop_tokens_ids": "stop_token_ids",
    "repetition_penalty": "presence_penalty",
}


@pytest.mark.parametrize("name", [*UNKNOWN, "min_p", "response_format", "ignore_eos", "messages", "x" * 3000])
def test_unknown_fields(api, name: str) -> None:  # type: ignore[no-untyped-def]
    """A field that is not known is refused by its name, with the one that is nearest; those without effect at OpenAI are accepted."""
    status, body = post(api[0], json.dumps({"prompt": "a", "max_tokens": 1, name: None}).encode())
    found = body["error"]
    assert status == 400 and found["param"] == name[:100] and f"unknown field {name[:100]!r}" in found["message"]  # type: ignore[index]
    assert (f"did you mean {UNKNOWN[name]!r}" if name in UNKNOWN else "known are ") in found["message"]  # type: ignore[index]
    status, body = post(api[0], b'{"prompt": "a", "stream": true, "stream_options": {"include_usages": true}}')
    assert status == 400 and "include_usage" in body["error"]["message"]  # type: ignore[index]
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "stream_options": {"include_obfuscation": False}}
    assert post(api[0], json.dumps({"prompt": "a", "max_tokens": 1, **harmless}).encode())[0] == 200


def test_top_k_and_stop_tokens(loaded, api) -> None:  # type: ignore[no-untyped-def]
    """`top_k` and `stop_token_ids` do what they do in `generate`; a stop token is counted and not shown."""
    model, tokenizer = loaded
    ids = tokenizer.encode("the loop")
    ask = {"prompt": ids, "max_tokens": 12, "temperature": 1.5, "seed": 0, "exit": "none", "loops": 3}
    free = twoscale.generate(model, [ids], 12, loops=3, temperature=1.5, stop=(tokenizer.eot,))
    few = twoscale.generate(model, [ids], 12, loops=3, temperature=1.5, top_k=3, stop=(tokenizer.eot,))
    assert free.tokens != few.tokens
    end = few.tokens[0][5]
    want = few.tokens[0][: few.tokens[0].index(end) + 1]
    for top_k, tokens in ((3, few.tokens[0]), (0, free.tokens[0]), (-1, free.tokens[0])):
        found = post(api[0], json.dumps({**ask, "top_k": top_k}).encode())[1]["choices"][0]  # type: ignore[index]
        assert found["text"] == tokenizer.decode([*ids, *tokens])[len("the loop") :].removesuffix("<|endoftext|>")
    found = post(api[0], json.dumps({**ask, "top_k": 3, "stop_token_ids": [end]}).encode())[1]["choices"][0]  # type: ignore[index]
    assert found["finish_reason"] == "stop" and len(found["steps"]) == len(want)
    assert found["text"] == tokenizer.decode([*ids, *want[:-1]])[len("the loop") :]


def ask_path(address: str, method: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=30)
    connection.request(method, path, b"{}" if method == "POST" else None, headers or {})
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def test_unknown_paths(api) -> None:  # type: ignore[no-untyped-def]
    """What is not served is answered in OpenAI's shape, with what there is instead."""
    for method, path, status, word in (("POST", "/v1/chat/completions", 404, "chat template"), ("GET", "/v2", 404, "/v1/models"),
                                       ("GET", "/v1/completions", 405, "POST /v1/completions")):  # fmt: skip
        found, text = ask_path(api[0], method, path)
        assert found == status and word in json.loads(text)["error"]["message"] and "/v1/completions" in text
    with pytest.raises(openai.NotFoundError, match="chat template"):
        client(api[0]).chat.completions.create(model="nano", messages=[{"role": "user", "content": "hello"}])


def test_key(loaded) -> None:  # type: ignore[no-untyped-def]
    """Where a key is set everything but /health needs it; the name of the scheme may be in any case."""
    with serving(loaded, key="sécret") as (address, _):
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            assert ask_path(address, "GET", path)[0] == 401
            for given in ("Bearer wrong", "Basic sécret", "sécret", "Bearer", "Bearer sécre"):
                assert ask_path(address, "GET", path, {"Authorization": given.encode()})[0] == 401  # type: ignore[dict-item]
            for scheme in ("Bearer", "bearer", "BEARER"):
                found = ask_path(address, "GET", path, {"Authorization": f"{scheme} sécret".encode()})[0]  # type: ignore[dict-item]
                assert found == (404 if path == "/nothing" else 200)
        assert ask_path(address, "GET", "/health")[0] == 200


def test_clients_that_vanish(loaded) -> None:  # type: ignore[no-untyped-def]
    """Whoever hangs up, streaming or waiting, is cancelled within a token; the others get all of theirs."""
    model, tokenizer = loaded
    with serving(loaded, max_num_seqs=4) as (address, server):
        scheduler = server.scheduler_thread.scheduler  # type: ignore[attr-defined]
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
                wait_for(lambda: len(scheduler.running) > 0)
            connection.close()
            wait_for(lambda: not scheduler.running, 5.0)
        written = scheduler.counters.tokens
        assert written < 50
        got = client(address).completions.create(model="nano", prompt="a state", max_tokens=20, temperature=0)
        want = twoscale.generate(model, [tokenizer.encode("a state")], 20, stop=(tokenizer.eot,))
        assert [tuple(s) for s in got.choices[0].steps] == want.steps[0]
        wait_for(lambda: not scheduler.running)
        assert scheduler.reserved_bytes == 0 and scheduler.counters.tokens == written + len(got.choices[0].steps)


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
    """Mixing depths pays where it makes calls fuller: with one group and flat costs. Among several groups rows scatter, and lockstep is
    fuller; the measured choice says why."""
    policy, why = choose_policy(loaded[0], 4)
    assert policy in ("lockstep", "depth") and policy in why and "time of a loop step" in why
    sizes = (1, 2, 4, 8, 16, 32)
    flat, steep = {n: 1.0 + 0.001 * n for n in sizes}, {n: 0.1 * n for n in sizes}
    one = twoscale.LoopedGPT(dataclasses.replace(loaded[0].config, groups=((1, 2),)))
    assert [choose_policy(one, 32, curve)[0] for curve in (flat, steep)] == ["depth", "lockstep"]
    assert [choose_policy(loaded[0], 32, curve)[0] for curve in (flat, steep)] == ["lockstep", "lockstep"]
    assert (
        interpolate_cost(2, {1: 1.0, 4: 4.0}) == 2.0
        and interpolate_cost(8, {1: 1.0, 4: 4.0}) == 8.0
        and interpolate_cost(0.5, {1: 1.0, 4: 4.0}) == 1.0
    )


def test_model_without_loops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plain Llama folder is served like any other; what concerns loops is refused in a request, and by the explorer."""
    pytest.importorskip("transformers", reason="transformers is not installed (the extra twoscale[hf])")
    from families import llama, with_tokenizer
    from twoscale.cli.explore import open_session
    from twoscale.serve.build import Settings, build_server

    folder = tmp_path / "plain"
    llama(folder)
    with_tokenizer(folder)
    server, _ = build_server(Settings(str(folder)))
    model, tokenizer = server.model, server.tokenizer
    assert server.name == "plain" and server.calibration is None and not model.config.n_groups
    assert choose_policy(model, 4)[0] == "lockstep"
    want = twoscale.generate(model, [tokenizer.encode("the loop")], 6, stop=(tokenizer.eot,)).tokens[0]
    for policy in ("lockstep", "depth"):
        with serving((model, tokenizer), policy=policy) as (address, _):
            body = post(address, b'{"prompt": "the loop", "max_tokens": 6, "temperature": 0}')[1]
            assert body["usage"]["completion_tokens"] == len(want)  # type: ignore[index]
            assert body["choices"][0]["text"] == tokenizer.decode([*tokenizer.encode("the loop"), *want])[len("the loop") :]  # type: ignore[index]
            for more in ('"loops": 3', '"exit": "step-norm:1.0"', '"tau": 1.0'):
                status, body = post(address, b'{"prompt": "a", %s}' % more.encode())
                assert status == 400 and "no loops" in body["error"]["message"]  # type: ignore[index]
            assert "twoscale_tokens_total" in metrics_of(address.removeprefix("http://"))
    with pytest.raises(UserError, match="nothing to explore"):
        open_session(str(folder))


def test_bad_flags(cli: CommandLine, tmp_path: Path) -> None:
    flags = {"--port": 99999, "--max-num-seqs": 0, "--max-connections": 0, "--read-timeout": 0, "--timeout": -1}
    for words, says in (*(((flag, value), flag) for flag, value in flags.items()), ((), "no folder")):
        code, _, err = cli("serve", tmp_path / "nothing", *words)
        assert code == 2 and says in err and err.count("\n") == 1
