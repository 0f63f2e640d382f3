"""Sharding and compilation, applied to the single-device model from outside."""

import contextlib
import ctypes
import os
import shutil
import warnings
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from twoscale.config import RunConfig, TrainConfig, UserError
from twoscale.model import LoopedGPT, LoopGroup, init_weights
from twoscale.model.layers import Block
from twoscale.train.world import World

# Below this many layer applications a compiled run on a CPU does not earn back the time that compiling takes.
WORTH_COMPILING = 20_000

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def reuse_memory(device: torch.device) -> None:
    """Let glibc keep freed tensors instead of returning them: on a CPU, faulting the pages in again costs a sixth of the time."""
    if device.type != "cpu":
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def distribute(model: LoopedGPT, config: TrainConfig, world: World) -> nn.Module:
    """What the training step calls: the model itself, wrapped in DDP, or sharded in place by FSDP2."""
    if world.size == 1:
        if config.sharded:
            warnings.warn(f"parallel={config.parallel} is ignored: there is one process (start several with torchrun)", stacklevel=2)
        return model
    if not config.sharded:
        return DistributedDataParallel(model, device_ids=[world.device.index] if world.device.type == "cuda" else None)
    mesh = device_mesh(config, world)
    for group in model.groups:
        if group.gate is not None:
            fully_shard(group.gate, mesh=mesh)  # read after the group's own pass, by a training objective
    units = [fully_shard(unit, mesh=mesh) for unit in sharded_units(model, config)]
    whole = fully_shard(model, mesh=mesh)
    for unit, following in pairwise([whole, *units]):
        unit.set_modules_to_forward_prefetch([following])  # arrives while a group loops
    return cast(nn.Module, whole)


def build_model(config: RunConfig, world: World) -> LoopedGPT:
    """The model with its initial weights; where it will be sharded it has none yet, so that no process ever holds all of it."""
    if world.size > 1 and config.train.sharded:
        with torch.device("meta"):
            return LoopedGPT(config.model, seed=None)
    return LoopedGPT(config.model, seed=config.train.seed).to(world.device)


def fill_shards(model: LoopedGPT, config: RunConfig, world: World) -> None:
    """Memory and initial weights for the shards of a model of `build_model`, made one whole tensor at a time."""
    if any(p.is_meta for p in model.parameters()):
        model.to_empty(device=world.device)
        init_weights(model, config.train.seed, place_like)


def sharded_units(model: LoopedGPT, config: TrainConfig) -> list[nn.Module]:
    """What FSDP2 gathers at a time, in the order of the pass; all other weights belong to the whole model and are gathered once a pass.

    A loop group is one unit: its weights are gathered once forwards and once backwards, however often they are applied. Layers behind the
    last group are applied after every loop step by an objective that reads every step; they are then no units of their own.
    """
    if model.config.share_group_norm and model.config.group_norm != "none":
        return []
    stages = list(model.stages)
    if config.objective.name != "last":
        while stages and not isinstance(stages[-1], LoopGroup):
            stages.pop()
    return [unit for stage in stages for unit in ([stage] if isinstance(stage, LoopGroup) else cast(Any, stage.blocks))]


def device_mesh(config: TrainConfig, world: World) -> DeviceMesh:
    """All processes in one row (fsdp), or one row for each copy of the model (hsdp), the processes of a row side by side."""
    if config.parallel == "fsdp":
        return init_device_mesh(world.device.type, (world.size,))
    row = config.shard_degree or world.local_size
    if world.size % row:
        raise UserError(f"train.shard_degree = {row} does not divide the {world.size} processes: choose a divisor")
    return init_device_mesh(world.device.type, (world.size // row, row), mesh_dim_names=("replicate", "shard"))


def place_like(tensor: Tensor, p: Tensor) -> Tensor:
    """A whole tensor, the same in every process, on the device and in the sharding of a parameter."""
    if isinstance(p, DTensor):
        return distribute_tensor(tensor.to(p.device), p.device_mesh, p.placements, src_data_rank=None)
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
    """A block like the model's forwards and backwards at the real shape, so that a broken compiler shows before training starts."""
    c = model.config
    block = Block(c).to(device)
    block.compile(dynamic=False)
    x = torch.zeros(batch, c.block_size, c.n_embd, device=device, requires_grad=True)
    block(x, model.rope(torch.arange(c.block_size, device=device))).sum().backward()


def _worth_it(model: LoopedGPT, config: TrainConfig, world: World) -> bool:
    return world.device.type == "cuda" or config.steps * model.config.effective_depth >= WORTH_COMPILING


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
