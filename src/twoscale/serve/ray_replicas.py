# mypy: ignore-errors
# Ray is an extra
"""Replicas by Ray Serve (the extra `ray`): it starts them, on this machine or a cluster, and replaces those that die.

    serve run twoscale.serve.ray_replicas:application model=bundled replicas=2

Every replica is one process with a server of its own (`replica.Replica`). `FewestRows` is the router in the front's process: it counts the
rows of the requests that each replica has, and picks the one with the fewest.
"""

import os
import socket
import time
from collections.abc import AsyncGenerator
from dataclasses import replace

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import FIFOMixin, RequestRouter
from starlette.requests import Request
from starlette.responses import Response

from twoscale.config import UserError
from twoscale.config.cpu import usable_cores
from twoscale.serve.build import Settings, build_server
from twoscale.serve.front import Front, ReplicaDied
from twoscale.serve.replica import Asked, Head, Replica

NAME = "twoscale"
START_SECONDS = 600.0
CONNECT_SECONDS = 20.0
METRICS_SECONDS = 10.0


class FewestRows(FIFOMixin, RequestRouter):
    """Routes a request to the replica with the fewest rows, by what this router has sent and what has ended."""

    def initialize_state(self, **settings) -> None:
        self.rows = {}  # replica -> rows that it has
        self.requests = {}  # request -> (replica, its rows)

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        return [[r] for r in sorted(candidate_replicas, key=lambda r: self.rows.get(r.replica_id, 0))]

    def on_request_routed(self, pending_request, replica_id, result) -> None:
        rows = pending_request.kwargs.get("rows", 0)
        self.requests[pending_request.metadata.internal_request_id] = rows
        self.rows[replica_id] = self.rows.get(replica_id, 0) + rows

    def on_request_completed(self, replica_id, internal_request_id) -> None:
        self.rows[replica_id] = self.rows.get(replica_id, 0) - self.requests.pop(internal_request_id, 0)


class ServeReplica:
    """A replica as a deployment of Ray Serve."""

    def __init__(self, settings: Settings) -> None:
        self.replica = Replica(build_server(settings)[0])

    async def ask(self, asked: Asked, rows: int) -> AsyncGenerator[Head | bytes]:
        """`Replica.ask`; the router reads `rows`."""
        async for message in self.replica.ask(asked):
            yield message

    async def metrics(self) -> str:
        return self.replica.server.metrics()

    async def pid(self) -> int:
        return os.getpid()

    def check_health(self) -> None:
        """Ray Serve replaces a replica for which this raises."""
        if (failure := self.replica.server.worker.failure) is not None:
            raise RuntimeError(failure)


class RayReplicas:
    """The replicas behind a handle of Ray Serve (`front.Replicas`)."""

    def __init__(self, handle) -> None:
        self.handle = handle

    async def ask(self, asked: Asked, rows: int) -> AsyncGenerator[Head | bytes]:
        response = self.handle.options(method_name="ask", stream=True).remote(asked, rows=rows)
        try:
            async for message in response:
                yield message
        except RayActorError:
            raise ReplicaDied from None
        finally:
            response.cancel()

    async def metrics(self) -> list[str]:
        """Of those that answer in time."""
        found = await self.handle.broadcast("metrics").results_async(timeout_s=METRICS_SECONDS, return_exceptions=True)
        return [text for text in found if isinstance(text, str)]


class Gateway:
    """The front as a deployment, behind Ray Serve's own HTTP proxies."""

    def __init__(self, handle, settings: Settings) -> None:
        self.front = Front(RayReplicas(handle), settings.limits)

    async def __call__(self, request: Request) -> Response:
        return await self.front.respond(request)


def bind_replicas(settings: Settings, replicas: int, cpus: float):
    """The deployment of the replicas."""
    deployment = serve.deployment(
        name="replica",
        num_replicas=replicas,
        max_ongoing_requests=4096,  # a replica has a queue of its own
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        ray_actor_options={"num_cpus": cpus},
        request_router_config=RequestRouterConfig(request_router_class=FewestRows),
    )(ServeReplica)
    return deployment.bind(settings)


def application(args: dict[str, str]):
    """For `serve run` and Ray Serve's config files: model, replicas, cpus (of each), policy, max_num_seqs, cache_mb."""
    known = {"model", "replicas", "cpus", "policy", "max_num_seqs", "cache_mb"}
    if unknown := sorted(set(args) - known):
        raise UserError(f"unknown argument {unknown[0]}: there are {', '.join(sorted(known))}")
    numbers = {name: int(args[name]) for name in ("max_num_seqs", "cache_mb") if name in args}
    settings = replace(Settings(args.get("model", "bundled"), policy=args.get("policy", "auto")), **numbers)
    gateway = serve.deployment(name="gateway", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0})(Gateway)
    return gateway.bind(bind_replicas(settings, int(args.get("replicas", 2)), float(args.get("cpus", 1))), settings)


def start(settings: Settings, replicas: int, address: str = ""):
    """Start the replicas and return their handle. Without an address on this machine alone, else in the cluster there."""
    connect(replicas, address)
    try:
        return deploy(settings, replicas, 1 if address else max(1, usable_cores() // replicas))
    except BaseException:
        stop(address)
        raise


def connect(replicas: int, address: str = "") -> None:
    """Connect to a cluster, or start Ray on this machine with at least one CPU for each replica."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address:
        _check_reachable(address)
    where = {"address": address} if address else {"num_cpus": max(replicas, usable_cores()), "object_store_memory": 100 << 20}
    try:
        ray.init(**where, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"no Ray cluster at {address or 'this machine'} ({str(error).splitlines()[0]})") from None
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})


def deploy(settings: Settings, replicas: int, cpus: int, name: str = NAME):
    """Start replicas with so many threads each where Ray is connected; returns their handle when all of them run."""
    there = ray.cluster_resources().get("CPU", 0)
    if there < replicas * cpus:
        raise UserError(f"the cluster has {there:g} CPUs, {replicas} replicas need {replicas * cpus}: start fewer")
    target = serve.RunTarget(target=bind_replicas(settings, replicas, cpus), name=name, route_prefix=None)
    [handle] = serve.run_many([target], wait_for_applications_running=False)
    _wait_until_running(name)
    return handle


def _check_reachable(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address == "auto":
        return
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise UserError(f"no Ray cluster at {address} ({error}): start one with `ray start --head`, and give its HOST:PORT") from None


def _wait_until_running(name: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while (state := serve.status().applications[name]).status != "RUNNING":
        if state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            words = [line for line in state.message.splitlines() if line.strip()]
            raise UserError(f"the replicas did not start: {words[-1] if words else state.status}")
        if time.monotonic() > deadline:
            raise UserError(f"the replicas did not start within {START_SECONDS:g} seconds")
        time.sleep(0.2)


def stop(address: str = "") -> None:
    """End the replicas; Ray too, where it was started here."""
    serve.delete(NAME) if address else serve.shutdown()
    ray.shutdown()
