"""Optimizers: AdamW for everything, or Muon for the matrices of the layers with AdamW for the rest.

torch's own Muon iterates in bf16, which is several times slower than fp32 on most CPUs, and does not take sharded
parameters; the few lines here do both.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from twoscale.config import TrainConfig, UserError
from twoscale.model import LoopedGPT
from twoscale.train.parallel import place_like

# Quintic Newton-Schulz coefficients of Keller Jordan's Muon: steep at zero, singular values end in about [0.7, 1.2].
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5


def orthogonalize(matrix: Tensor) -> Tensor:
    """Roughly U V^T of a matrix with SVD U S V^T, by Newton-Schulz; bf16 on CUDA, fp32 elsewhere."""
    a, b, c = NS_COEFFICIENTS
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(NS_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)


class Muon(Optimizer):
    """Momentum, orthogonalised; rate scaled by sqrt(max(1, rows / columns)); decoupled weight decay."""

    def __init__(self, params: Sequence[Tensor], lr: float, momentum: float, weight_decay: float) -> None:
        assert all(p.ndim == 2 for p in params)
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(p.grad)
                momentum = state["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
                update = _whole(p.grad.lerp(momentum, group["momentum"]), orthogonalize)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def _whole(x: Tensor, f) -> Tensor:  # type: ignore[no-untyped-def]
    """f of the whole matrix, also where each process holds a shard of it: gathered, computed everywhere, cut again."""
    if not isinstance(x, DTensor):
        return f(x)
    whole = DTensor.from_local(f(x.full_tensor()), x.device_mesh, [Replicate()] * x.device_mesh.ndim)
    return whole.redistribute(placements=x.placements)


def build_optimizers(model: LoopedGPT, config: TrainConfig) -> dict[str, Optimizer]:
    """The optimizers by name. Every parameter is in exactly one of their groups.

    | group           | optimizer=adamw              | optimizer=muon                                 |
    |-----------------|------------------------------|------------------------------------------------|
    | layer matrices  | AdamW with decay             | Muon with decay                                |
    | embeddings, head, gate | AdamW with decay      | AdamW with decay                               |
    | gains, biases   | AdamW without                | AdamW without                                  |
    """
    matrices, tables, vectors = [], [], []
    for name, p in model.named_parameters():
        if p.ndim < 2 or name.endswith("_bias"):
            vectors.append(p)
        elif name.startswith("stages.") and ".gate." not in name:
            matrices.append(p)
        else:
            tables.append(p)
    muon = config.optimizer == "muon"
    decayed = tables if muon else matrices + tables
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizers: dict[str, Optimizer] = {
        "adamw": torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=1e-8, fused=True)
    }
    if muon and matrices:
        optimizers["muon"] = Muon(matrices, config.muon_lr, config.muon_momentum, config.weight_decay)
    grouped = [id(p) for o in optimizers.values() for g in o.param_groups for p in g["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters()), "every parameter belongs to exactly one group"
    return optimizers


def set_rates(optimizers: dict[str, Optimizer], config: TrainConfig, step: int) -> float:
    """Set the rates of a step; returns their share of the peak."""
    scale = config.lr_scale(step)
    peaks = {"adamw": config.lr, "muon": config.muon_lr}
    for name, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            group["lr"] = peaks[name] * scale
    return scale


def optimizer_state(model: LoopedGPT, optimizers: dict[str, Optimizer]) -> dict[str, Tensor]:
    """The optimizers' state named PARAMETER::KEY, each tensor as it is: of a sharded parameter the shard of this process."""
    names = {id(p): name for name, p in model.named_parameters()}
    return {f"{names[id(p)]}::{key}": value for o in optimizers.values() for p, state in o.state.items() for key, value in state.items()}


def optimizer_tensors(model: LoopedGPT, optimizers: dict[str, Optimizer]) -> dict[str, Tensor]:
    """The same as whole tensors on the CPU. A collective call where parameters are sharded."""
    found = optimizer_state(model, optimizers)
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}
    return {name: value.detach().cpu().contiguous() for name, value in whole.items()}


def restore_optimizers(model: LoopedGPT, optimizers: dict[str, Optimizer], tensors: dict[str, Tensor]) -> None:
    """The reverse, onto whatever sharding the model has now."""
    owners = _owners(model, optimizers, tensors)
    for name, tensor in tensors.items():
        optimizer, p, key = owners[name]
        optimizer.state[p][key] = place_like(tensor, p) if tensor.shape == p.shape else tensor.to(p.device)


def empty_state(
    model: LoopedGPT, optimizers: dict[str, Optimizer], kinds: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, Tensor]:
    """State of these names, shapes and dtypes, put into the optimizers in the sharding of the parameters, for a caller who fills it."""
    made = {}
    for name, (optimizer, p, key) in _owners(model, optimizers, kinds).items():
        shape, dtype = kinds[name]
        like = shape == tuple(p.shape)
        made[name] = torch.empty_like(p, dtype=dtype, requires_grad=False) if like else torch.empty(shape, dtype=dtype, device=p.device)
        optimizer.state[p][key] = made[name]
    return made


def _owners(model: LoopedGPT, optimizers: dict[str, Optimizer], names: Iterable[str]) -> dict[str, tuple[Optimizer, Tensor, str]]:
    """For each PARAMETER::KEY the optimizer, the parameter and the key."""
    owners = {id(p): o for o in optimizers.values() for g in o.param_groups for p in g["params"]}
    parameters = dict(model.named_parameters())
    found: dict[str, tuple[Optimizer, Tensor, str]] = {}
    for full_name in names:
        name, _, key = full_name.partition("::")
        if name not in parameters or not key:
            raise UserError(f"the checkpoint's optimizer state names {full_name!r}, which the model does not have")
        found[full_name] = owners[id(parameters[name])], parameters[name], key
    return found
