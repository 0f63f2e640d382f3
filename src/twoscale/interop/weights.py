"""Weights in safetensors, in one file or several with an index. Nothing is unpickled, and no file outside the folder is opened."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from twoscale.config import UserError
from twoscale.config.run_folder import MODEL, SHARDS
from twoscale.config.serial import read_json
from twoscale.train.checkpoint import read_header

SINGLE, INDEX = MODEL, f"{MODEL}.index.json"
MAX_FILES = 10_000


class Weights(Mapping[str, Tensor]):
    """Tensors by name, read from disk when asked for; `used` notes which were."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.used: set[str] = set()
        listed = self._listed()
        for file in sorted(set(listed.values())) if listed else [folder / SINGLE]:
            shapes, dtypes = read_header(file)
            for name, shape in shapes.items():
                if listed and listed.get(name) != file:
                    raise UserError(f"{file} holds {name}, which {INDEX} does not place there")
                self.places[name], self.shapes[name], self.dtypes[name] = file, shape, dtypes[name]
        if listed and (missing := sorted(listed.keys() - self.places.keys())):
            raise UserError(f"{folder / INDEX} lists {missing[0]}, which no file holds ({len(missing)} weights in all)")

    def _listed(self) -> dict[str, Path]:
        """What the index says, if there is one."""
        folder = self.folder
        if (folder / SINGLE).is_file():
            return {}
        if not (folder / INDEX).is_file():
            pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
            if pickled:
                raise UserError(f"{folder} has its weights in {pickled[0]}, a pickle, which is never read: convert it to safetensors")
            raise UserError(f"{folder} has no {SINGLE} and no {INDEX}")
        index = read_json(folder / INDEX)
        listed = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(listed, dict) or not listed or not all(isinstance(f, str) for f in listed.values()):
            raise UserError(f"{folder / INDEX} has no weight_map from names to files")
        for file in set(listed.values()):
            if Path(file).name != file or not file.endswith(".safetensors") or not file.isprintable():  # half a character is no name
                raise UserError(f"{folder / INDEX} names {file!r}: only .safetensors files of the folder itself are read")
        if len(set(listed.values())) > MAX_FILES:
            raise UserError(f"{folder / INDEX} names more than {MAX_FILES} files")
        return {name: folder / file for name, file in listed.items()}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.places:
            raise KeyError(name)
        self.used.add(name)
        return self._read(name)

    def _read(self, name: str) -> Tensor:
        try:
            with safe_open(self.places[name], framework="pt") as f:
                tensor: Tensor = f.get_tensor(name)
                return tensor
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.places[name]} is truncated or no safetensors file: {error}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


class ShardedWeights(Weights):
    """The same of a sharded checkpoint; a tensor is put together from its parts when it is asked for."""

    def __init__(self, folder: Path) -> None:
        from twoscale.train.sharded import MODEL_PREFIX, read_manifest

        self.folder, self.used = folder, set()
        entries = {name: entry for name, entry in read_manifest(folder).items() if name.startswith(MODEL_PREFIX)}
        self.entries = {name.removeprefix(MODEL_PREFIX): (name, entry) for name, entry in entries.items()}
        self.places = dict.fromkeys(self.entries, folder / SHARDS)
        self.shapes = {name: entry.shape for name, (_, entry) in self.entries.items()}
        self.dtypes = {name: entry.dtype for name, (_, entry) in self.entries.items()}

    def _read(self, name: str) -> Tensor:
        from twoscale.train.sharded import DTYPES, load_parts

        stored, entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        load_parts(self.folder, {stored: entry}, {stored: tensor}, alone=True)
        return tensor


class Outline(Mapping[str, Tensor]):
    """Tensors without memory: what a mapping of names makes of them shows whether the real ones would fit."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes, self.used = shapes, set[str]()

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        self.used.add(name)
        return torch.empty(shape, device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)
