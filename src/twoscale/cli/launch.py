"""`twoscale launch`: a command in several processes, on one node or many; the same line on every node.

twoscale launch --processes 8 train --preset paper --data-dir data/fineweb --train.batch-size 80
twoscale launch --nodes 2 --processes 8 --head first-node:29500 train --preset paper --data-dir data/fineweb --train.batch-size 80

It is torchrun's elastic agent with time limits of minutes, errors in one line, and no second try after an error that only a user can mend.
"""

import os
import socket
from dataclasses import dataclass

from twoscale.cli.parse import parse
from twoscale.config import UserError

LAUNCHED = ("train", "sweep", "calibrate", "trace", "eval")


@dataclass(frozen=True)
class LaunchArgs:
    """Run a command in several processes: twoscale launch [options] train ... A node that was lost may come back: the others wait for it
    and all go on from the newest checkpoint."""

    nodes: int = 1
    """Nodes; the same command is started on each."""
    processes: int = 1
    """Processes on each node, one for each GPU."""
    head: str = "127.0.0.1:29500"
    """HOST:PORT at which the nodes meet; HOST is one of them."""
    max_restarts: int = 100
    """How often the processes are started again after one of them was lost."""


def run(args: list[str]) -> int:
    place = next((i for i, word in enumerate(args) if word in LAUNCHED), len(args))
    parsed = parse(LaunchArgs, args[:place], "twoscale launch")
    if place == len(args):
        raise UserError(f"say what to run: twoscale launch [options] {' | '.join(LAUNCHED)} ...")
    host, _, port = parsed.head.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise UserError(f"--head {parsed.head}: give HOST:PORT")
    if not 1 <= parsed.nodes <= 4096 or not 1 <= parsed.processes <= 256 or not 0 <= parsed.max_restarts <= 10**6:
        raise UserError("--nodes lies between 1 and 4096, --processes between 1 and 256, --max-restarts between 0 and 1,000,000")
    if parsed.processes > 1:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    return _launch(parsed, host, int(port), args[place:])


def _launch(args: LaunchArgs, host: str, port: int, words: list[str]) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError, RendezvousTimeoutError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from twoscale.train.world import JOIN_VARIABLE, join_seconds

    seconds = join_seconds()
    limits = {"join_timeout": seconds, "read_timeout": max(1, int(seconds)), "last_call_timeout": 1, "is_host": str(_is_here(host))}
    limits |= {"keep_alive_interval": 2, "keep_alive_max_attempt": 3}
    config = LaunchConfig(
        min_nodes=args.nodes,
        max_nodes=args.nodes,
        nproc_per_node=args.processes,
        run_id="twoscale",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{host}:{port}",
        rdzv_configs=limits,
        max_restarts=args.max_restarts,
        monitor_interval=0.2,
        start_method="spawn",
        local_addr=_address_towards(host, port),
    )
    hint = f"start the same command on every node, or wait longer with {JOIN_VARIABLE}"
    try:
        codes = elastic_launch(config, _worker)(words)
    except RendezvousTimeoutError:
        raise UserError(f"not all of the {args.nodes} nodes came to {args.head} within {seconds:g} s: {hint}") from None
    except RendezvousClosedError:
        raise UserError(f"the processes that met at {args.head} have ended: start the same command on every node again") from None
    except RendezvousError as error:
        raise UserError(f"{args.head} cannot be reached ({error}): start the first node, or {hint}") from None
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        raise UserError(f"the processes were lost {args.max_restarts + 1} times, at last with exit code {failure.exitcode}") from None
    return next((code for _, code in sorted(codes.items()) if code), 0)


def _worker(words: list[str]) -> int:
    """In a new process: run the command. What a user can mend is a result; what may go away by itself ends the process, and the agent
    starts all of them again."""
    from twoscale.cli.main import LOST, main

    code = main(words)
    if code == LOST:
        os._exit(LOST)
    return code


def _is_here(host: str) -> bool:
    """Whether an address is this node's."""
    try:
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as test:
                test.bind(address)
                return True
    except OSError:
        return False
    return False


def _address_towards(host: str, port: int) -> str | None:
    """This node's own address on the way to another."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None
