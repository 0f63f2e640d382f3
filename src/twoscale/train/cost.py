"""What a training run costs: FLOPs, bytes and hours, by arithmetic (docs/scale-training.md shows the table)."""

from dataclasses import dataclass
from functools import lru_cache

from twoscale.config import ModelConfig
from twoscale.model.flops import training_flops
from twoscale.model.start import draw_loops

WORD = 4  # bytes of a weight or a gradient: they are gathered and reduced in fp32
STATE_WORDS = 4  # weight, gradient, and AdamW's two moments
SAVED_WORDS = 3  # the same without the gradient
ACTIVATION = 34  # bytes that a layer keeps for its gradient, a token and unit of width (bf16, attention recomputed by its kernel)
DRAWS = 4096


@dataclass(frozen=True)
class Machine:
    """Stated figures of a device and of its links, all of them a device."""

    name: str
    flops: float
    """FLOP/s of a large matrix product, in theory."""
    matmul: float
    """Share of it that a large matrix product reaches."""
    node: int
    """Devices in a node."""
    link: float
    """Bytes/s to the devices of its node, in one direction."""
    network: float
    """Bytes/s to other nodes, in one direction."""
    memory: float
    """Bytes."""


H100 = Machine("H100 SXM", flops=989e12, matmul=0.70, node=8, link=450e9, network=50e9, memory=80e9)


@dataclass(frozen=True)
class Cost:
    """Of a whole run; bytes are a device's."""

    steps: int
    flops: float
    compute_hours: float
    communication_hours: float
    """If no byte of it is hidden behind computing."""
    gathered: float
    """Bytes of weights that a device receives in a step."""
    exchanged: float
    """All bytes that it receives in a step: weights and gradients."""
    state: float
    """Weights, gradients and optimizer state that it holds."""
    activations: float
    """Of one sequence."""
    checkpoint: float
    """Bytes of one checkpoint, all parts together."""

    @property
    def hours(self) -> tuple[float, float]:
        """With all communication hidden, and with none."""
        return max(self.compute_hours, self.communication_hours), self.compute_hours + self.communication_hours


@lru_cache
def _draws(model: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Loop counts of many training steps."""
    return tuple(draw_loops(model, 0, step) for step in range(DRAWS))


def expected_flops(model: ModelConfig) -> float:
    """Training FLOPs a token at full context, the mean over the loop counts that are drawn; the causal half of attention is counted."""
    return sum(training_flops(model, model.block_size, loops, causal=True) for loops in _draws(model)) / DRAWS


def tracked_layers(model: ModelConfig) -> float:
    """Mean layer applications of a pass that keep their activations."""
    plain = model.n_layer - sum(len(g) for g in model.groups)
    deepest = model.backprop_steps
    kept = [[k if deepest is None else min(k, deepest) for k in loops] for loops in _draws(model)]
    return plain + sum(len(g) * k for loops in kept for g, k in zip(model.groups, loops, strict=True)) / DRAWS


def cost(
    model: ModelConfig, tokens: float, batch_size: int, machine: Machine, devices: int, share: float, parallel: str, micro_batches: int = 1
) -> Cost:
    """A run over so many tokens; `share`: of the FLOP/s of a large matrix product on that machine, as `bench train` measures it."""
    steps = round(tokens / (batch_size * model.block_size))
    flops = tokens * expected_flops(model)
    near, far, gathered = _exchange(WORD * model.matrix_parameters, machine, devices, parallel, micro_batches)
    holders = {"ddp": 1, "fsdp": devices, "hsdp": min(devices, machine.node)}[parallel]
    return Cost(
        steps=steps,
        flops=flops,
        compute_hours=flops / (devices * machine.flops * machine.matmul * share) / 3600,
        communication_hours=steps * (near / machine.link + far / machine.network) / 3600,
        gathered=gathered,
        exchanged=near + far,
        state=WORD * STATE_WORDS * model.matrix_parameters / holders,
        activations=ACTIVATION * tracked_layers(model) * model.block_size * model.n_embd,
        checkpoint=WORD * SAVED_WORDS * model.matrix_parameters,
    )


def _exchange(weights: float, machine: Machine, devices: int, parallel: str, micro_batches: int) -> tuple[float, float, float]:
    """Bytes that a device receives in a step from its node and from others, and how many of them are gathered weights.

    A ring of n devices: gathering or scattering takes (n - 1)/n of the weights, an all-reduce both. Weights are gathered forwards and
    backwards in every micro-batch, gradients scattered in the last one. A ring that spans nodes runs at the network's speed.
    """
    ring = {"ddp": devices, "fsdp": devices, "hsdp": min(devices, machine.node)}[parallel]
    once = (ring - 1) / ring * weights
    gathered = 0.0 if parallel == "ddp" else 2 * micro_batches * once
    inside = gathered + (2 * once if parallel == "ddp" else once)
    if parallel != "hsdp":
        return (inside, 0.0, gathered) if devices <= machine.node else (0.0, inside, gathered)
    copies = devices // ring
    return inside, 2 * (copies - 1) / copies * weights / ring, gathered
