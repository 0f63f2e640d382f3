"""Replicas with Ray Serve: answers while one of them is killed, routing, and what is left when all ends. Run by `make test-ray`."""

import concurrent.futures
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import twoscale
from conftest import CommandLine, is_one_line
from models import save_folder, small_model
from processes import descendants, listening_addresses, wait_until_ended

httpx = pytest.importorskip("httpx", reason="httpx is not installed (the extra twoscale[test])")
if importlib.util.find_spec("ray") is None:  # importing it would fix its settings
    pytest.skip("Ray is not installed here: `make test-ray` makes an environment for it", allow_module_level=True)

from twoscale.serve.build import Settings  # noqa: E402
from twoscale.serve.local import listen, run_in_thread  # noqa: E402
from twoscale.serve.metrics import parse_metrics  # noqa: E402
from twoscale.serve.proxy import DIED, Proxy, create_proxy_app  # noqa: E402
from twoscale.serve.ray_cluster import SETTINGS, connected  # noqa: E402

CLIENTS, REQUESTS, NEW = 24, 4, 48
PROMPTS = [f"Client {i} asks" for i in range(CLIENTS)]
MANY: dict[str, Any] = {
    "prompt": "Many",
    "n": 8,
    "max_tokens": 200,
    "temperature": 1,
    "seed": 0,
    "loops": 64,
    "exit": "none",
}  # takes seconds
APPLICATION = """
import sys, ray
from ray import serve
ray.init(address=sys.argv[1], log_to_driver=False)
serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
from twoscale.serve.ray_replicas import application
serve.run(application({"model": sys.argv[3], "replicas": "1", "policy": "lockstep"}), name="app", route_prefix="/")
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}  # IPv4, IPv4 in IPv6, IPv6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(small_model(vocab_size=257, block_size=256, n_embd=128), tmp_path_factory.mktemp("ray") / "model")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[tuple[str, Any]]:
    """The address of a proxy with two replicas, and Ray Serve's handle."""
    with connected(2):
        from twoscale.serve.ray_replicas import deployed

        settings = Settings(str(folder), policy="lockstep", max_num_seqs=8)
        with deployed(settings, 2, 1) as replicas, run_in_thread(create_proxy_app(Proxy(replicas))) as address:
            yield address, replicas.handle


def pids(handle: Any) -> set[int]:
    return {pid for pid in handle.broadcast("pid").results(timeout_s=60, return_exceptions=True) if isinstance(pid, int)}


def metric(address: str, name: str) -> float:
    return parse_metrics(httpx.get(f"{address}/metrics", timeout=60).text)[f"twoscale_{name}"]


def ask(address: str, prompt: str, stream: bool) -> tuple[str, str]:
    """(text, how it ended): `complete`, or the message of the error that ended it."""
    body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0, "loops": 6, "exit": "none", "stream": stream}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=240) as response:
        if response.status_code != 200 or not stream:
            content = json.loads(response.read())
            return (content["choices"][0]["text"], "complete") if response.status_code == 200 else ("", content["error"]["message"])
        text = ""
        for line in response.iter_lines():
            if line == "data: [DONE]":
                return text, "complete"
            if line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    return text, event["error"]["message"]
                text += event["choices"][0]["text"]
        return text, "the stream ended without a word"


def generated(folder: Path, prompts: list[str]) -> list[str]:
    """What the model generates for each prompt alone."""
    model, tokenizer = twoscale.load(folder)
    assert tokenizer is not None
    texts = []
    for prompt in prompts:
        tokens = twoscale.generate(model, [tokenizer.encode(prompt)], NEW, loops=6, stop=(tokenizer.eot,)).tokens[0]
        texts.append(tokenizer.decode([t for t in tokens if t != tokenizer.eot]))
    return texts


def test_kill(served: tuple[str, Any], folder: Path) -> None:
    """kill -9 of a replica under 24 clients: every request has the answer that it has alone, or its stream ends with an error that says
    so; none hangs and none is doubled. The replica is replaced, both serve, and the totals have not decreased."""
    address, handle = served
    want = generated(folder, PROMPTS)
    before = pids(handle)
    assert len(before) == 2

    def client(i: int) -> list[tuple[str, str]]:
        return [ask(address, PROMPTS[i], stream=(i + j) % 2 == 0) for j in range(REQUESTS)]

    with concurrent.futures.ThreadPoolExecutor(CLIENTS) as pool:
        answers = [pool.submit(client, i) for i in range(CLIENTS)]
        while (tokens := metric(address, "tokens_total")) < CLIENTS * NEW / 2:
            time.sleep(0.1)
        os.kill(killed := min(before), signal.SIGKILL)
        found = [future.result(timeout=400) for future in answers]
    assert [len(each) for each in found] == [REQUESTS] * CLIENTS
    broken = 0
    for i, each in enumerate(found):
        for text, end in each:
            assert (end == "complete" and text == want[i]) or (end == DIED and want[i].startswith(text)), (end, text, want[i])
            broken += end == DIED
    retried = metric(address, "retried_total")
    print(f"{CLIENTS * REQUESTS} requests, {broken} streams ended with an error, {retried:g} requests were sent again")
    assert broken + retried >= 1, "the killed replica should have had requests"
    deadline = time.monotonic() + 200
    while len(now := pids(handle)) < 2 or killed in now:
        assert time.monotonic() < deadline, "the replica was not replaced"
        time.sleep(1)
    assert [ask(address, prompt, False) for prompt in PROMPTS[:4]] == [(text, "complete") for text in want[:4]]
    assert metric(address, "tokens_total") >= tokens and metric(address, "replicas") == 2


def test_fewest_sequences(served: tuple[str, Any]) -> None:
    """Requests that come together go to the replica with the fewest sequences: one with 8 here, eight with 1 there; totals add up."""
    address, handle = served

    def finished() -> dict[str, float]:
        each = handle.broadcast("metrics").results(timeout_s=60)
        return {replica: parse_metrics(text)["twoscale_finished_total"] for replica, text in each}

    before, total = finished(), metric(address, "finished_total")
    assert len(before) == 2
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        first = pool.submit(httpx.post, f"{address}/v1/completions", json=MANY, timeout=240)
        while not metric(address, "running"):
            time.sleep(0.02)
        rest = [pool.submit(ask, address, f"One {i}", False) for i in range(8)]
        assert all(future.result()[1] == "complete" for future in rest) and first.result().status_code == 200
    after = finished()
    assert sorted(after[replica] - before[replica] for replica in before) == [8, 8]
    assert metric(address, "finished_total") - total == 16


def test_disconnect(served: tuple[str, Any]) -> None:
    """When a client disconnects, its sequences are removed from the replica."""
    address, _ = served
    tokens = metric(address, "tokens_total")
    with httpx.stream("POST", f"{address}/v1/completions", json={**MANY, "stream": True}, timeout=60) as response:
        lines = response.iter_lines()  # httpx closes the connection when the iterator goes
        assert next(lines) and metric(address, "running") > 0
    deadline = time.monotonic() + 20
    while metric(address, "running"):
        assert time.monotonic() < deadline, "the sequences go on"
        time.sleep(0.05)
    assert metric(address, "tokens_total") - tokens < MANY["n"] * MANY["max_tokens"] / 2, "they went on to the end"


def test_loopback(served: tuple[str, Any]) -> None:
    """No process of Ray listens on an address that other machines can reach, and none answers without its token."""
    import ray

    found = listening_addresses(descendants(os.getpid()))
    assert found and found <= LOOPBACK, found
    gcs = ray.get_runtime_context().gcs_address
    words = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", gcs]
    without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    assert subprocess.run(words, capture_output=True, timeout=60).returncode == 0
    assert subprocess.run(words, capture_output=True, timeout=60, env={**without, "RAY_AUTH_MODE": "disabled"}).returncode != 0


def kill_all(process: subprocess.Popen[str], started: Iterable[int] = ()) -> None:
    """End a process and those that it has started."""
    for pid in {process.pid, *started, *descendants(process.pid)}:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


@contextmanager
def command(*words: object, ends_alone: bool = False) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`twoscale serve ...` in a session of its own, and its address. SIGINT has its default effect, as in a terminal. At the end all of
    its processes are killed, unless they are to end by themselves."""
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); from twoscale.cli.main import main; sys.exit(main())"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", *map(str, words), "--port", "0"],
        stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    started = set[int]()
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("http://"):
                break
        else:
            raise AssertionError("".join(lines))
        started = descendants(process.pid)
        yield process, line.strip().removesuffix("/v1")
    finally:
        kill_all(process, () if ends_alone else started)


LEFT: list[int] = []
"""Processes that were left after kill -9; the last test looks at them again."""
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # they try for a minute to tell their cluster that it has gone


def process_name(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode().strip()
    return ""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_nothing_is_left(sent: signal.Signals, code: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C and SIGTERM: running requests are finished, then every process of Ray ends and its files are removed. kill -9: all
    processes but two agents end within seconds; see test_agents_end."""
    short = tempfile.mkdtemp(prefix="twoscale-", dir="/tmp")  # pytest's folders are too deep for Ray's sockets
    monkeypatch.setenv("TMPDIR", short)
    killed = sent == signal.SIGKILL
    with command(folder, "--replicas", 1, "--policy", "lockstep", ends_alone=killed) as (process, address):
        started = descendants(process.pid)
        agents = {pid for pid in started if process_name(pid) in AGENTS}
        assert len(started) > 4 and list(Path(short).glob("twoscale-ray-*"))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(httpx.post, f"{address}/v1/completions", json=MANY, timeout=240)
            while not metric(address, "running"):
                time.sleep(0.02)
            os.killpg(process.pid, sent) if sent == signal.SIGINT else os.kill(process.pid, sent)
            assert process.wait(timeout=100) == code
            assert isinstance(answer.exception(), httpx.HTTPError) if killed else len(answer.result().json()["choices"]) == 8
        assert len(agents) == 2 and wait_until_ended(started - agents if killed else started, 60) == []
        LEFT.extend(agents if killed else ())
        assert killed or list(Path(short).iterdir()) == []
    shutil.rmtree(short, ignore_errors=True)


def test_silent_cluster(folder: Path, cli: CommandLine) -> None:
    """No cluster at an address, one that accepts connections and never answers, and an address that is none: one line, code 2, 60 s."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for address, line in (
            (f"127.0.0.1:{silent.getsockname()[1]}", "no Ray cluster"), ("127.0.0.1:1", "no Ray cluster at 127.0.0.1:1"),
            ("nowhere", "write HOST:PORT"), ("ray://127.0.0.1:1", "write HOST:PORT"), ("127.0.0.1:99999", "no Ray cluster"),
        ):  # fmt: skip
            began = time.monotonic()
            code, _, err = cli("serve", folder, "--replicas", "2", "--port", "0", "--ray-address", address)
            assert code == 2 and line in err and is_one_line(err) and time.monotonic() - began < 60, err


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster with two CPUs, which runs by itself."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**SETTINGS, "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN", "0" * 64)}.items():
            patch.setenv(name, value)
        with started_cluster() as address:
            yield address


@contextmanager
def started_cluster() -> Iterator[str]:
    port = free_port()
    words = ["start", "--head", "--block", f"--port={port}", "--num-cpus=2", "--include-dashboard=false", "--object-store-memory=100000000"]
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="twoscale-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *words, f"--temp-dir={folder}"], stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            assert any("Ray runtime started" in line for line in process.stdout)
            yield f"127.0.0.1:{port}"
        finally:
            kill_all(process)


def free_port() -> int:
    with listen("127.0.0.1", 0) as free:
        return int(free.getsockname()[1])


def test_cluster(cluster: str, folder: Path) -> None:
    """A cluster takes replicas with their proxy outside, and with their proxy as a deployment; too few CPUs or GPUs: one line."""
    [want] = generated(folder, ["In a cluster"])
    port = free_port()
    subprocess.run([sys.executable, "-c", APPLICATION, cluster, str(port), str(folder)], check=True, timeout=200)
    inside = f"http://127.0.0.1:{port}"
    assert [ask(inside, "In a cluster", stream) for stream in (False, True)] == [(want, "complete")] * 2
    words = [sys.executable, "-m", "twoscale", "serve", str(folder), "--port", "0", "--ray-address", cluster, "--replicas"]
    for more, line in (
        (("2",), "1 of the 2 CPUs that 2 replicas need"),
        (("1", "--device", "cuda"), "0 of the 1 GPUs that 1 replicas need"),
    ):
        done = subprocess.run([*words, *more], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and f"the cluster has {line}" in done.stderr and is_one_line(done.stderr), done.stderr
    with command(folder, "--replicas", 1, "--policy", "lockstep", "--ray-address", cluster) as (process, address):
        assert ask(address, "In a cluster", True) == (want, "complete")
        process.terminate()
        assert process.wait(timeout=60) == 0
    assert ask(inside, "In a cluster", False) == (want, "complete")


def test_cannot_start(cluster: str, tmp_path: Path) -> None:
    """A replica that cannot open its model: its reason in one line, code 2."""
    broken = tmp_path / "broken"
    save_folder(small_model(vocab_size=257, block_size=128), broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    words = [sys.executable, "-m", "twoscale", "serve", str(broken), "--replicas", "1", "--port", "0", "--ray-address", cluster]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "the replicas did not start" in done.stderr and is_one_line(done.stderr), done.stderr


def test_agents_end() -> None:
    """After kill -9 the last processes of Ray end too. Here at the end, because they take a minute."""
    assert wait_until_ended(LEFT, 90) == []
