"""The spectral radius of a loop map at a state: does a small push die out (below 1) or grow (above 1)?"""

from collections.abc import Callable

import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.model import LoopedGPT
from twoscale.model.noise import fold, keyed_normal
from twoscale.tracing import Trace


def spectral_radius(step: Callable[[Tensor], Tensor], x: Tensor, iterations: int = 60, warm: int = 20) -> Tensor:
    """Power iteration on the Jacobian of `step` at x (B, ..., C), each row of the batch by itself: (B,).

    The growth of a pushed direction is averaged (geometrically) over the iterations after the first `warm` ones, so that a
    rotating pair of eigenvalues gives its modulus.
    """
    keys = [fold(0, row) for row in range(x.shape[0])]
    direction = keyed_normal(keys, torch.arange(x[0].numel()).expand(x.shape[0], -1), 1).view(x.shape).to(x)
    flat = tuple(range(1, x.dim()))
    warm = min(warm, iterations // 2)
    logs = []
    for i in range(iterations):
        direction = direction / torch.linalg.vector_norm(direction, dim=flat, keepdim=True).clamp(min=1e-30)
        direction = torch.func.jvp(step, (x,), (direction,))[1]
        if i >= warm:
            logs.append(torch.linalg.vector_norm(direction, dim=flat).clamp(min=1e-30).log())
    return torch.stack(logs).mean(dim=0).exp()


@torch.no_grad()
def loop_spectral_radius(model: LoopedGPT, trace: Trace, group: int, iterations: int = 60) -> Tensor:
    """The spectral radius of a group's map on whole sequences at the last traced state: (B,).

    Attention is causal, so the Jacobian is block-triangular over positions and this is the largest of its tokens' radii.
    """
    trace.check_model(model)
    if model.weight_dtype != "fp32":
        raise UserError(
            f"a spectral radius needs derivatives, which weights in {model.weight_dtype} have not: load the model with dtype='fp32'"
        )
    module, device = model.groups[group], next(model.parameters()).device
    rope = model.rope(torch.arange(trace.ids.shape[1], device=device))
    injected = module.inject(trace.inputs[group].to(device))
    x = trace.states[group][-1].to(device)

    def step(state: Tensor) -> Tensor:
        return module.step(state, injected, rope)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # the only kernel with forward derivatives
        return spectral_radius(step, x, iterations).cpu()
