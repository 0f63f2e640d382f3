"""Sharded checkpoints: every process writes its own part of every tensor, by torch.distributed.checkpoint's planner.

    model-00003-000.safetensors, optimizer-00003-000.safetensors, ...   parts of tensors, named TENSOR@OFFSET, written by process 3
    shards.json                                                         for every tensor dtype, shape, and which part lies in which file

torch's own storage keeps its plan in a pickle; this one keeps it in JSON, and the parts in safetensors. Reading takes any number of
processes and any sharding: a process reads the slices that it needs, and no more.
"""

import contextlib
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from twoscale.config import UserError
from twoscale.config.files import write_json
from twoscale.config.run_folder import SHARDS
from twoscale.config.serial import from_dict, read_json

FILE_BYTES = 512 << 20  # parts that are brought to the CPU and written at a time
MODEL_PREFIX, OPTIMIZER_PREFIX = "model/", "optimizer/"
DTYPES = {"F32": torch.float32, "F64": torch.float64, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "U8": torch.uint8}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Part:
    """A box of a tensor, and the file that holds it."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str

    def key(self, tensor: str) -> str:
        return f"{tensor}@{','.join(map(str, self.offset))}"


@dataclass(frozen=True)
class Entry:
    """A tensor of a sharded checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def check(self, name: str, path: Path) -> None:
        """The parts must lie inside of the tensor and have its size together."""
        inside = all(
            len(part.offset) == len(part.shape) == len(self.shape)
            and all(o >= 0 and n > 0 and o + n <= whole for o, n, whole in zip(part.offset, part.shape, self.shape, strict=True))
            for part in self.parts
        )
        if not inside or sum(prod(part.shape) for part in self.parts) != prod(self.shape) or self.dtype not in DTYPES:
            raise UserError(f"{path}: the parts of {name} do not make a tensor of shape {self.shape} and a known dtype: it is damaged")
        if len({part.offset for part in self.parts}) < len(self.parts) or any(Path(p.file).name != p.file for p in self.parts):
            raise UserError(f"{path}: {name} has a part twice, or one outside of its folder: it is damaged")


def read_manifest(folder: Path) -> dict[str, Entry]:
    """The tensors of a sharded checkpoint by name, checked."""
    path = folder / SHARDS
    values = read_json(path)
    tensors = values.get("tensors") if isinstance(values, dict) else None
    if not isinstance(tensors, dict):
        raise UserError(f"{path} does not list tensors: it is damaged")
    entries = {name: from_dict(Entry, entry, f"{path}, {name}") for name, entry in tensors.items()}
    promised: dict[str, int] = {}
    for name, entry in entries.items():
        entry.check(name, path)
        for part in entry.parts:
            promised[part.file] = promised.get(part.file, 0) + prod(part.shape) * DTYPES[entry.dtype].itemsize
    for file, size in promised.items():  # so that nobody takes more memory than the files hold
        if not (folder / file).is_file() or (folder / file).stat().st_size < size:
            raise UserError(f"{folder / file} does not hold the {size} bytes that {SHARDS} promises: the checkpoint is damaged")
    return entries


class ShardWriter(StorageWriter):
    """torch.distributed.checkpoint's storage for saving. Where the folder is, all processes must see it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this process's parts, some at a time: no more than FILE_BYTES (or one part) are copied."""
        results: list[WriteResult] = []
        for prefix in (MODEL_PREFIX, OPTIMIZER_PREFIX):
            waiting: dict[str, tuple[MetadataIndex, Part, Tensor]] = {}
            number = size = 0
            for item in (item for item in plan.items if item.index.fqn.startswith(prefix)):
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                if waiting and size + tensor.nbytes > FILE_BYTES:
                    results += self._write(waiting)
                    waiting, number, size = {}, number + 1, 0
                if tensor.numel():
                    file = f"{prefix.strip('/')}-{self.rank:05d}-{number:03d}.safetensors"
                    part = Part(tuple(item.index.offset or (0,) * tensor.dim()), tuple(tensor.shape), file)
                    waiting[part.key(item.index.fqn)] = item.index, part, tensor.detach().cpu().contiguous()
                    size += tensor.nbytes
            results += self._write(waiting)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write(self, parts: Mapping[str, tuple[MetadataIndex, Part, Tensor]]) -> Iterable[WriteResult]:
        if not parts:
            return []
        path = self.folder / next(iter(parts.values()))[1].file
        save_file({key: tensor for key, (_, _, tensor) in parts.items()}, path)
        with open(path, "rb") as f:
            os.fsync(f.fileno())
        return [WriteResult(index, tensor.nbytes, part) for index, part, tensor in parts.values()]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """In the first process: write shards.json."""
        parts: dict[str, list[Part]] = {}
        for result in (result for of_process in results for result in of_process):
            if not (self.folder / result.storage_data.file).exists():
                raise UserError(f"{self.folder} is not the same folder in all processes: put the run on a file system that all nodes share")
            parts.setdefault(result.index.fqn, []).append(result.storage_data)
        tensors = {}
        for name, found in sorted(metadata.state_dict_metadata.items()):
            assert isinstance(found, TensorStorageMetadata)
            tensors[name] = {
                "dtype": NAMES[found.properties.dtype],
                "shape": list(found.size),
                "parts": [{"offset": list(p.offset), "shape": list(p.shape), "file": p.file} for p in parts.get(name, [])],
            }
        write_json(self.folder / SHARDS, {"tensors": tensors})

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class ShardReader(StorageReader):
    """The same for loading."""

    def __init__(self, folder: Path, entries: dict[str, Entry]) -> None:
        self.folder, self.entries = folder, entries
        self.parts = {MetadataIndex(name, part.offset): part for name, entry in entries.items() for part in entry.parts}

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        for name, entry in self.entries.items():
            chunks = [ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.shape)) for part in entry.parts]
            tensors[name] = TensorStorageMetadata(TensorProperties(dtype=DTYPES[entry.dtype]), torch.Size(entry.shape), chunks)
        return Metadata(tensors, storage_data=self.parts, storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[ReadItem, Part]]] = {}
        for item in plan.items:
            part = self.parts[item.storage_index]
            by_file.setdefault(part.file, []).append((item, part))
        for file, wanted in sorted(by_file.items()):
            try:
                with safe_open(self.folder / file, framework="pt") as f:
                    for item, part in wanted:
                        self._read(f, item, part, planner)
            except (SafetensorError, OSError) as error:
                raise UserError(f"{self.folder / file} cannot be read: {error}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, f: Any, item: ReadItem, part: Part, planner: LoadPlanner) -> None:
        name = item.storage_index.fqn
        stored = f.get_slice(part.key(name))
        if tuple(stored.get_shape()) != part.shape or stored.get_dtype() != self.entries[name].dtype:
            raise UserError(f"{self.folder / part.file}: {name} is not what {SHARDS} says: the checkpoint is damaged")
        box = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
        target = planner.resolve_tensor(item).detach()
        target.copy_(stored[box] if box else f.get_tensor(part.key(name)))
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def save_parts(folder: Path, tensors: dict[str, Tensor], rank: int, alone: bool) -> None:
    """Write the parts and shards.json; a collective call unless this process is alone. Errors are raised in every process."""
    planner = DefaultSavePlanner(flatten_state_dict=False)
    with _one_error(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # alone is what was asked for
        save(tensors, storage_writer=ShardWriter(folder, rank), planner=planner, no_dist=alone)


def load_parts(folder: Path, entries: dict[str, Entry], tensors: dict[str, Tensor], alone: bool) -> None:
    """Fill the tensors, sharded ones too, from the parts; a collective call unless this process is alone."""
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    with _one_error(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # alone is what was asked for
        load(tensors, storage_reader=ShardReader(folder, entries), planner=planner, no_dist=alone)


@contextlib.contextmanager
def _one_error() -> Iterator[None]:
    """torch's CheckpointException holds an error of each process: the first that a user can mend is raised instead."""
    try:
        yield
    except CheckpointException as error:
        for _, (problem, _) in sorted(error.failures.items()):
            if isinstance(problem, UserError | OSError | SafetensorError):
                raise UserError(str(problem)) from error
        raise
