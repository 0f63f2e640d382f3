"""Optimizers: AdamW for everything, or Muon for the matrices of the layers with AdamW for the rest.

torch's own Muon iterates in bf16, which is several times slower than fp32 on most CPUs, and does not take sharded
parameters; the few lines here do both.
"""

from collections.abc import Sequence

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


def optimizer_tensors(model: LoopedGPT, optimizers: dict[str, Optimizer]) -> dict[str, Tensor]:
    """The optimizers' state as whole tensors named PARAMETER::KEY. A collective call where parameters are sharded."""
    names = {id(p): name for name, p in model.named_parameters()}
    tensors = {}
    for optimizer in optimizers.values():
        for p, state in optimizer.state.items():
            for key, value in state.items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                tensors[f"{names[id(p)]}::{key}"] = whole.detach().cpu().contiguous()
    return tensors


def restore_optimizers(model: LoopedGPT, optimizers: dict[str, Optimizer], tensors: dict[str, Tensor]) -> None:
    """The reverse, onto whatever sharding the model has now."""
    owners = {id(p): o for o in optimizers.values() for g in o.param_groups for p in g["params"]}
    parameters = dict(model.named_parameters())
    for full_name, tensor in tensors.items():
        name, _, key = full_name.partition("::")
        if name not in parameters or not key:
            raise UserError(f"the checkpoint's optimizer state names {full_name!r}, which the model does not have")
        p = parameters[name]
        value = place_like(tensor, p) if tensor.shape == p.shape else tensor.to(p.device)
        owners[id(p)].state[p][key] = value
