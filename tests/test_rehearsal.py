"""A run on two nodes with two processes each, rehearsed on one machine: agreement with one process, and nodes that are killed."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conftest import CommandLine, is_one_line, nano_run
from rehearsal import Node, free_port, kill_node, two_nodes
from training import arguments, losses
from twoscale.config import UserError
from twoscale.config.serial import read_jsonl
from twoscale.train import checkpoint as ckpt, start_run

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the processes of a node")

KILLS = 5
STEPS = 20


def settings(**more: object):  # type: ignore[no-untyped-def]
    return nano_run(steps=STEPS, lr=1e-3, eval_interval=STEPS, geometry_interval=0, **more)


@pytest.mark.long
def test_two_nodes(tmp_path: Path, shards: Path) -> None:
    """2 x 2 processes have the losses of 1 within 1e-5; with a node killed five times at random the final weights are bit-equal."""
    start_run(settings(), tmp_path / "one", shards)
    sharded = settings(parallel="hsdp", checkpoint_interval=1)
    with two_nodes() as nodes:
        head, port = nodes[0].address, free_port()
        words = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={head}:{port}"]
        agents = []
        for i, node in enumerate(nodes):
            host = f"--rdzv-conf=is_host={int(i == 0)}"
            run = [*words, host, f"--local-addr={node.address}", "-m", "twoscale", *arguments(sharded, tmp_path / "calm", shards)]
            agents.append(node.start(run, tmp_path / f"calm-{i}.log"))
        for i, agent in enumerate(agents):
            assert agent.wait(timeout=500) == 0, (tmp_path / f"calm-{i}.log").read_text()[-4000:]
        assert max(abs(a - b) for a, b in zip(losses(tmp_path / "one"), losses(tmp_path / "calm"), strict=True)) < 1e-5
        launch = ["twoscale", "launch", "--nodes", "2", "--processes", "2", "--head", f"{head}:{free_port()}"]
        run = [*launch, *arguments(sharded, tmp_path / "killed", shards)]
        cluster, chance = Cluster(nodes, run, [tmp_path / f"killed-{i}.log" for i in range(2)]), random.Random(7)
        for kill in range(KILLS):
            cluster.wait_for_step(tmp_path / "killed", chance.randint(1, 3) + 3 * kill)
            kill_node(cluster.agents[chance.randrange(2)])
        cluster.wait(lambda: all(agent.poll() == 0 for agent in cluster.agents))
    assert losses(tmp_path / "killed") == losses(tmp_path / "calm")
    a, b = (ckpt.load_model(tmp_path / run / "checkpoints" / f"step-0000{STEPS}")[0] for run in ("calm", "killed"))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


class Cluster:
    """Does what a cluster's scheduler does: a node that has ended before the run was finished is started again.

    Where the nodes met at the killed one, the other one ends too.
    """

    def __init__(self, nodes: tuple[Node, Node], command: list[str], logs: list[Path]) -> None:
        self.nodes, self.command, self.logs = nodes, command, logs
        self.agents = [node.start(command, log) for node, log in zip(nodes, logs, strict=True)]

    def wait(self, until: Callable[[], bool], seconds: float = 400) -> None:
        limit = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < limit, "".join(log.read_text()[-3000:] for log in self.logs)
            for i, agent in enumerate(self.agents):
                if agent.poll() not in (None, 0):
                    self.agents[i] = self.nodes[i].start(self.command, self.logs[i])
            time.sleep(0.02)

    def wait_for_step(self, run: Path, step: int) -> None:
        self.wait(lambda: len(read_jsonl(run / "metrics.jsonl")) >= step)


def test_launch_without_the_other_node(tmp_path: Path, shards: Path) -> None:
    """`twoscale launch` on one of two nodes ends with one line and exit code 2 when the other one does not come in time."""
    words = arguments(nano_run(steps=4), tmp_path / "run", shards)
    launch = [sys.executable, "-m", "twoscale", "launch", "--nodes", "2", "--head", f"127.0.0.1:{free_port()}", *words]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=100, env={**os.environ, "TWOSCALE_JOIN_SECONDS": "2"})
    lines = [line for line in done.stderr.splitlines() if line.startswith("twoscale ")]
    assert done.returncode == 2 and len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    assert "not all of the 2 nodes came" in lines[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", 2), "say what to run"),
        (("--nodes", 0, "train"), "--nodes lies between"),
        (("--head", "nowhere", "train"), "give HOST:PORT"),
    ],
    ids=str,
)
def test_bad_launch(words: tuple[object, ...], said: str, cli: CommandLine) -> None:
    """Settings of `launch` that make no sense are one line and exit code 2."""
    code, _, err = cli("launch", *words)
    assert code == 2 and is_one_line(err) and said in err


def test_lost_process(cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that loses the others says so in one line and leaves with the code that means "try again"."""
    from twoscale.cli import train
    from twoscale.config.errors import ProcessLost

    def lost(args: list[str]) -> int:
        raise ProcessLost("another process has gone")

    monkeypatch.setattr(train, "run", lost)
    code, _, err = cli("train")
    assert code == 75 and is_one_line(err)
    assert not issubclass(ProcessLost, UserError)
