"""Weights and optimizer state of a run, to a checkpoint and back, onto whatever sharding the model has."""

from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Optimizer

from twoscale.config import RunConfig, UserError
from twoscale.data import Tokenizer
from twoscale.model import LoopedGPT
from twoscale.train import checkpoint as ckpt
from twoscale.train.optim import empty_state, optimizer_state, optimizer_tensors, restore_optimizers
from twoscale.train.world import World

GENERATOR = "generator::cpu"


def save_state(
    root: Path,
    config: RunConfig,
    progress: ckpt.Progress,
    model: LoopedGPT,
    optimizers: dict[str, Optimizer],
    tokenizer: Tokenizer,
    world: World,
) -> Path:
    """Write a checkpoint, whole or sharded as the config says, and return its folder. A collective call."""
    c = config.train
    if c.checkpoint_format == "sharded" or (c.checkpoint_format == "auto" and c.sharded and world.size > 1):
        return ckpt.save_sharded(root, config, progress, _parts(model, optimizers, world), tokenizer, world)
    tensors, state = ckpt.model_tensors(model), optimizer_tensors(model, optimizers)
    with world.together():
        if world.main:
            ckpt.save_checkpoint(root, config, progress, tensors, state, tokenizer)
    return root / ckpt.checkpoint_name(progress.step)


def load_state(folder: Path, model: LoopedGPT, optimizers: dict[str, Optimizer], world: World) -> None:
    """Fill model and optimizers from a checkpoint. A collective call where it is sharded."""
    if ckpt.is_sharded(folder):
        _load_sharded(folder, model, optimizers, world)
        return
    with world.together():
        ckpt.load_weights(model, ckpt.read_tensors(folder / ckpt.MODEL), folder / ckpt.MODEL)
        tensors = ckpt.read_tensors(folder / ckpt.OPTIMIZER)
        if (state := tensors.pop(GENERATOR, None)) is not None:
            torch.set_rng_state(state)
        restore_optimizers(model, optimizers, tensors)


def _parts(model: LoopedGPT, optimizers: dict[str, Optimizer], world: World) -> dict[str, Tensor]:
    """All tensors of this process under their names in a sharded checkpoint; nothing is copied."""
    from twoscale.train.sharded import MODEL_PREFIX, OPTIMIZER_PREFIX

    parts = {MODEL_PREFIX + name: p.detach() for name, p in model.named_parameters()}
    parts |= {OPTIMIZER_PREFIX + name: value.detach() for name, value in optimizer_state(model, optimizers).items()}
    return parts | ({OPTIMIZER_PREFIX + GENERATOR: torch.get_rng_state()} if world.main else {})


def _load_sharded(folder: Path, model: LoopedGPT, optimizers: dict[str, Optimizer], world: World) -> None:
    from twoscale.train.sharded import DTYPES, MODEL_PREFIX, OPTIMIZER_PREFIX, load_parts, read_manifest

    tensors: dict[str, Tensor] = {}
    with world.together():
        entries = read_manifest(folder)
        weights = {name.removeprefix(MODEL_PREFIX): e for name, e in entries.items() if name.startswith(MODEL_PREFIX)}
        state = {name.removeprefix(OPTIMIZER_PREFIX): e for name, e in entries.items() if name.startswith(OPTIMIZER_PREFIX)}
        ckpt.check_shapes(model, {name: e.shape for name, e in weights.items()}, folder / ckpt.SHARDS)
        ckpt.check_dtypes({name: e.dtype for name, e in weights.items()}, folder / ckpt.SHARDS)
        generator = state.pop(GENERATOR, None)
        if generator is None:
            raise UserError(f"{folder / ckpt.SHARDS} lacks the generator's state: the checkpoint is damaged")
        tensors = {MODEL_PREFIX + name: p.detach() for name, p in model.named_parameters()}
        made = empty_state(model, optimizers, {name: (e.shape, DTYPES[e.dtype]) for name, e in state.items()})
        tensors |= {OPTIMIZER_PREFIX + name: value for name, value in made.items()}
        tensors[OPTIMIZER_PREFIX + GENERATOR] = torch.empty(generator.shape, dtype=DTYPES[generator.dtype])
    load_parts(folder, entries, tensors, alone=world.size == 1)
    torch.set_rng_state(tensors[OPTIMIZER_PREFIX + GENERATOR])
