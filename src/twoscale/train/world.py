"""The processes of a run: how they join, and how an error in one of them ends all of them with one line."""

import contextlib
import datetime
import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from twoscale.config import UserError
from twoscale.config.errors import ProcessLost

JOIN_SECONDS = 50.0  # for all processes to join; the environment variable below changes it
JOIN_VARIABLE = "TWOSCALE_JOIN_SECONDS"
PATIENCE = datetime.timedelta(hours=2)  # in a collective: the first process may be preparing data meanwhile
ARRIVED = "twoscale/arrived/"
LOST = r"gloo.*(connection|connect|timed out|socket|read|write)|connection (closed|reset|refused)|broken pipe"  # in errors of gloo


@dataclass(frozen=True)
class World:
    """The processes of a run and this one's place among them."""

    rank: int
    size: int
    device: torch.device
    local_rank: int = 0
    """Its number among the processes of its node."""
    local_size: int = 1
    """Processes on its node."""

    @property
    def main(self) -> bool:
        return self.rank == 0

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the processes of a small tensor; the same everywhere."""
        if self.size > 1:
            dist.all_reduce(values)
            values /= self.size
        return values

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """A small value of every process, by rank; the same list everywhere."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def agree(self, error: str | None) -> None:
        """Raise the error of any process in every process, so that none waits for another that has gone."""
        found = [(place, said) for place, said in self.gather((None if self.main else self.place, error)) if said is not None]
        if found:
            place, said = found[0]
            raise UserError(said if place is None else f"{said} ({place})")

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A block without collective calls that every process runs: what is wrong in one of them is raised in all."""
        if self.size == 1:
            yield
            return
        error = None
        try:
            yield
        except UserError as problem:
            error = str(problem)
        self.agree(error)

    def same(self, what: str, values: Mapping[str, object], hint: str) -> None:
        """Refuse to go on where a process has other values than the first one; names the first that differs, and where."""
        (_, first), *others = self.gather((self.place, dict(values)))
        for place, theirs in others:
            for name in dict.fromkeys((*first, *theirs)):
                if first.get(name) != theirs.get(name):
                    here, there = _short(first.get(name)), _short(theirs.get(name))
                    raise UserError(f"{what}: {name} is {here} in the first process and {there} in {place}: {hint}")

    @property
    def place(self) -> str:
        return f"process {self.rank} on {socket.gethostname()}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


@contextlib.contextmanager
def open_world() -> Iterator[World]:
    """Join the processes that torchrun started (RANK, WORLD_SIZE in the environment), or be the only one."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    world = World(rank, size, device, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", size)))
    if size == 1 or dist.is_initialized():
        yield world
        return
    store = _join(world)
    try:
        dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=size, timeout=PATIENCE)
        yield world
        dist.barrier()  # nobody closes while another still waits for an answer
    except (dist.DistError, RuntimeError) as error:
        if not isinstance(error, dist.DistError) and not re.search(LOST, str(error), re.IGNORECASE):
            raise
        first = (str(error).strip().splitlines() or [""])[0][:160]
        raise ProcessLost(
            f"another process has gone ({first}): start the same command again to go on from the newest checkpoint"
        ) from error
    finally:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def _join(world: World) -> Store:
    """The store through which the processes find each other, once all of them are there; UserError where one does not come in time."""
    seconds = join_seconds()
    limit, at = datetime.timedelta(seconds=seconds), f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    hint = f"see what its node says, start all nodes with the same command, or wait longer with {JOIN_VARIABLE}"
    try:
        store: Store = next(rendezvous("env://", timeout=limit))[0]
    except dist.DistError as error:
        if world.main:
            raise UserError(f"not all of the {world.size} processes joined at {at} within {seconds:g} s: {hint}") from error
        raise UserError(f"the first process did not answer at {at} within {seconds:g} s: {hint}") from error
    names = [f"{ARRIVED}{rank}" for rank in range(world.size)]
    store.set(names[world.rank], "")
    try:
        store.wait(names, limit)
    except dist.DistError as error:
        missing = [str(rank) for rank, name in enumerate(names) if not store.check([name])]
        raise UserError(f"process {', '.join(missing)} of {world.size} did not join within {seconds:g} s: {hint}") from error
    return store


def join_seconds() -> float:
    """How long processes and nodes wait for each other at the start."""
    text = os.environ.get(JOIN_VARIABLE, "")
    try:
        seconds = float(text or JOIN_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86_400:
        raise UserError(f"{JOIN_VARIABLE} = {text!r}: give seconds, up to a day")
    return seconds
