# mypy: ignore-errors
# Ray is an extra
"""Replicas as a deployment of Ray Serve (the extra `ray`), which starts them, on this machine or in a cluster, and replaces those that die.

    serve run twoscale.serve.ray_replicas:application model=bundled replicas=2

Every replica is one process with a server of its own (`replica.Replica`).
"""

import logging
import os
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import ray
import torch
from ray import serve
from ray.exceptions import RayActorError, TaskCancelledError
from ray.serve._private import replica as serve_replica
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from starlette.requests import Request
from starlette.responses import Response

from twoscale.config import UserError
from twoscale.serve.build import Settings, build_server
from twoscale.serve.proxy import Proxy, ReplicaDied, create_proxy_app
from twoscale.serve.ray_router import FewestSequences
from twoscale.serve.replica import HTTPRequest, Replica, ResponseStart

START_SECONDS = 600.0  # large models take minutes to load
METRICS_SECONDS = 10.0
MAX_REQUESTS = 4096  # open requests of one process in Ray Serve. High, because a replica has its own queue and limits
LOOPBACK = "127.0.0.1"
ARGUMENTS = ("model", "replicas", "cpus", "policy", "max_num_seqs", "cache_mb")


class ServeReplica:
    """A replica as a deployment of Ray Serve."""

    def __init__(self, settings: Settings, threads: int) -> None:
        if ray.util.get_node_ip_address() == LOOPBACK:
            listen_on_loopback()
        torch.set_num_threads(min(threads, torch.get_num_threads()))
        self.id = uuid.uuid4().hex
        self.replica = Replica(build_server(settings)[0])

    async def send(self, request: HTTPRequest, sequences: int) -> AsyncGenerator[ResponseStart | bytes]:
        """`Replica.send`; the router reads `sequences`."""
        messages = self.replica.send(request)
        try:
            async for message in messages:
                yield message
        finally:
            await messages.aclose()

    async def metrics(self) -> tuple[str, str]:
        """Its id and its metrics."""
        return self.id, self.replica.server.metrics()

    async def pid(self) -> int:
        return os.getpid()

    def check_health(self) -> None:
        """Ray Serve replaces a replica for which this raises."""
        if (failure := self.replica.server.scheduler_thread.failure) is not None:
            raise RuntimeError(failure)


def listen_on_loopback() -> None:
    """Patch Ray Serve 2.60, which listens for calls of other deployments on all addresses of the machine: in this process on 127.0.0.1."""
    add_port = serve_replica.add_port_to_grpc_server
    serve_replica.add_port_to_grpc_server = lambda server, address: add_port(server, address.replace("[::]", LOOPBACK))


class RayReplicas:
    """The replicas behind a deployment handle of Ray Serve. Implements `proxy.Replicas`."""

    def __init__(self, handle) -> None:
        self.handle, self.streaming = handle, handle.options(method_name="send", stream=True)

    async def send(self, request: HTTPRequest, sequences: int) -> AsyncGenerator[ResponseStart | bytes]:
        response = self.streaming.remote(request, sequences=sequences)
        try:
            async for message in response:
                yield message
        except (RayActorError, TaskCancelledError):  # it is dead, or is being stopped
            raise ReplicaDied from None
        finally:
            response.cancel()

    async def metrics(self) -> dict[str, str]:
        try:
            found = await self.handle.broadcast("metrics").results_async(timeout_s=METRICS_SECONDS, return_exceptions=True)
        except DeploymentUnavailableError:  # none is alive
            return {}
        return dict(pair for pair in found if isinstance(pair, tuple))


class Gateway:
    """The same proxy as a Ray Serve deployment, for `serve run`. Ray Serve's own HTTP proxies pass requests to it."""

    def __init__(self, handle, settings: Settings) -> None:
        key = os.environ.get("TWOSCALE_API_KEY") or None
        self.app = create_proxy_app(Proxy(RayReplicas(handle), settings.limits, key))

    async def __call__(self, request: Request) -> Response:
        return AppResponse(self.app)


class AppResponse(Response):
    """The response of an ASGI application to the request."""

    def __init__(self, app) -> None:
        super().__init__()
        self.app = app

    async def __call__(self, scope, receive, send) -> None:
        await self.app(scope, receive, send)


def bind_replicas(settings: Settings, replicas: int, cpus: int):
    """The deployment of `replicas` replicas, each with `cpus` CPUs and as many threads."""
    deployment = serve.deployment(
        name="replica",
        num_replicas=replicas,
        max_ongoing_requests=MAX_REQUESTS,
        max_constructor_retry_count=2,
        health_check_period_s=2.0,
        health_check_timeout_s=30.0,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=5.0,
        ray_actor_options={"num_cpus": cpus, "num_gpus": int(settings.device != "cpu")},
        request_router_config=RequestRouterConfig(request_router_class=FewestSequences),
    )(ServeReplica)
    return deployment.bind(replace(settings, key=None), cpus)  # the proxy has checked the key


def application(args: dict[str, str]):
    """The application builder for `serve run` and Ray Serve's config files. Its arguments are ARGUMENTS; `cpus` is for each replica."""
    if unknown := sorted(set(args) - set(ARGUMENTS)):
        raise UserError(f"unknown argument {unknown[0]}: there are {', '.join(ARGUMENTS)}")
    numbers = {name: int(args[name]) for name in ("max_num_seqs", "cache_mb") if name in args}
    settings = replace(Settings(args.get("model", "bundled"), policy=args.get("policy", "auto")), **numbers)
    gateway = serve.deployment(name="gateway", max_ongoing_requests=MAX_REQUESTS, ray_actor_options={"num_cpus": 0})(Gateway)
    return gateway.bind(bind_replicas(settings, int(args.get("replicas", 2)), int(args.get("cpus", 1))), settings)


@contextmanager
def deployed(settings: Settings, replicas: int, cpus: int) -> Iterator[RayReplicas]:
    """Start replicas in the connected Ray cluster (`ray_cluster.connected`) and wait until all of them run. They are stopped at the end of
    the `with` block."""
    free = ray.available_resources()
    for unit, each in (("CPU", cpus), ("GPU", int(settings.device != "cpu"))):
        if free.get(unit, 0) < replicas * each:  # otherwise Ray would wait until machines are added to the cluster
            raise UserError(
                f"the cluster has {free.get(unit, 0):g} of the {replicas * each} {unit}s that {replicas} replicas need: start fewer"
            )
    name = f"twoscale-{uuid.uuid4().hex[:8]}"
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # it warns of a dead replica once for every request; the proxy does so itself
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
    target = serve.RunTarget(target=bind_replicas(settings, replicas, cpus), name=name, route_prefix=None)
    [handle] = serve.run_many([target], wait_for_applications_running=False)
    try:
        _wait_until_running(name)
        yield RayReplicas(handle)
    finally:
        with suppress(Exception):  # the cluster may have gone
            serve.delete(name)


def _wait_until_running(name: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while (state := serve.status().applications[name]).status != "RUNNING":
        if state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            reasons = [d.message for d in state.deployments.values() if d.message]
            raise UserError(f"the replicas did not start: {_reason(reasons[0] if reasons else state.message)}")
        if time.monotonic() > deadline:
            raise UserError(f"the replicas did not start within {START_SECONDS:g} seconds")
        time.sleep(0.2)


def _reason(message: str) -> str:
    """The message of the error at the end of a traceback, without the name of its class."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    problems = [line for line in lines if "Error: " in line]
    return problems[-1].partition("Error: ")[2] if problems else (lines[-1] if lines else "no reason was given")
