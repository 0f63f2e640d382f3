"""Processes, devices, sharding and compilation, applied to the single-device model from outside."""

import contextlib
import ctypes
import datetime
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from twoscale.config import TrainConfig, UserError
from twoscale.model import LoopedGPT, LoopGroup

# Below this many layer applications a compiled run on a CPU does not earn back the time that compiling takes.
WORTH_COMPILING = 20_000

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


@dataclass(frozen=True)
class World:
    """The processes of a run and this one's place among them."""

    rank: int
    size: int
    device: torch.device

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

    def agree(self, error: str | None) -> None:
        """Raise the main process's error in every process, so that none waits for another that has gone."""
        if self.size > 1:
            box = [error]
            dist.broadcast_object_list(box, src=0)
            error = box[0]
        if error is not None:
            raise UserError(error)


@contextlib.contextmanager
def open_world() -> Iterator[World]:
    """Join the processes that torchrun started (RANK, WORLD_SIZE in the environment), or be the only one."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if size == 1 or dist.is_initialized():
        yield World(rank, size, device)
        return
    dist.init_process_group("nccl" if cuda else "gloo", timeout=datetime.timedelta(hours=2))
    try:
        yield World(rank, size, device)
        dist.barrier()  # nobody closes while another still waits for an answer
    finally:
        dist.destroy_process_group()


def reuse_memory(device: torch.device) -> None:
    """Let glibc keep freed tensors instead of returning them: on a CPU, faulting the pages in again costs a sixth of the time."""
    if device.type != "cpu":
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def distribute(model: LoopedGPT, config: TrainConfig, world: World) -> nn.Module:
    """What the training step calls: the model itself, wrapped in DDP, or sharded in place by FSDP2.

    A loop group is one unit: its weights are gathered once a pass, however often they are applied.
    """
    if world.size == 1:
        if config.parallel == "fsdp":
            warnings.warn("parallel=fsdp is ignored: there is one process (start several with torchrun)", stacklevel=2)
        return model
    if config.parallel != "fsdp":
        return DistributedDataParallel(model, device_ids=[world.device.index] if world.device.type == "cuda" else None)
    mesh = init_device_mesh(world.device.type, (world.size,))
    for group in model.groups:
        if group.gate is not None:
            fully_shard(group.gate, mesh=mesh)  # read after the group's own pass, by a training objective
    if not (model.config.share_group_norm and model.config.group_norm != "none"):
        for stage in model.stages:
            for unit in [stage] if isinstance(stage, LoopGroup) else cast(Any, stage.blocks):
                fully_shard(unit, mesh=mesh)
    return cast(nn.Module, fully_shard(model, mesh=mesh))


def place_like(tensor: Tensor, p: Tensor) -> Tensor:
    """A whole tensor on the device, and in the sharding, of a parameter."""
    if isinstance(p, DTensor):
        return distribute_tensor(tensor.to(p.device), p.device_mesh, p.placements)
    return tensor.to(p.device, copy=True)


@contextlib.contextmanager
def gradient_sync(model: nn.Module, now: bool) -> Iterator[None]:
    """Gradients are exchanged only in the last micro-batch of a step."""
    if isinstance(model, DistributedDataParallel) and not now:
        with model.no_sync():
            yield
        return
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
    yield


def reshard(model: nn.Module) -> None:
    """Give back the gathered weights of a pass without a backward one (FSDP2 keeps the root's), so that parameters are the shards again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def compile_blocks(model: LoopedGPT, config: TrainConfig, world: World, batch: int) -> bool:
    """Compile each block in place (all blocks share one compiled program); says whether that was done."""
    if config.compile == "off" or (config.compile == "auto" and not _worth_it(model, config, world)):
        return False
    if config.compile == "auto" and world.device.type == "cpu" and not _compiler():
        warnings.warn("no C++ compiler found: training runs without compiled blocks, up to twice slower", stacklevel=2)
        return False
    torch._dynamo.config.cache_size_limit = 64
    for block in model.blocks():
        block.compile(dynamic=False)
    try:
        _rehearse(model, batch, world.device)
    except Exception as error:  # inductor raises many kinds
        for block in model.blocks():
            block._compiled_call_impl = None
        model.zero_grad(set_to_none=True)
        if config.compile == "on":
            raise UserError(f"compiling the blocks failed ({_first_line(error)}): use --train.compile off") from error
        warnings.warn(f"compiling the blocks failed ({_first_line(error)}): going on without", stacklevel=2)
        return False
    return True


@contextlib.contextmanager
def uncompiled(model: LoopedGPT) -> Iterator[None]:
    """Blocks as they are, for passes of another shape than training's, which would be compiled anew."""
    kept = [block._compiled_call_impl for block in model.blocks()]
    try:
        for block in model.blocks():
            block._compiled_call_impl = None
        yield
    finally:
        for block, compiled in zip(model.blocks(), kept, strict=True):
            block._compiled_call_impl = compiled


def _rehearse(model: LoopedGPT, batch: int, device: torch.device) -> None:
    """One block forwards and backwards at the real shape, so that a broken compiler shows before training starts."""
    c = model.config
    x = torch.zeros(batch, c.block_size, c.n_embd, device=device, requires_grad=True)
    block = next(model.blocks())
    block(x, model.rope(torch.arange(c.block_size, device=device))).sum().backward()
    model.zero_grad(set_to_none=True)


def _worth_it(model: LoopedGPT, config: TrainConfig, world: World) -> bool:
    return world.device.type == "cuda" or config.steps * model.config.effective_depth >= WORTH_COMPILING


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
