"""Training objectives: which loop steps the loss reads, and how.

Shapes: B batch, T position, C width, V vocabulary, K loop steps of the last group, A positions that are asked, M depth of a task.

L_k is the cross-entropy read from the last group's state x^(k), through the layers behind it and the head. Groups before the last one take
the steps that were drawn for them. On a task only the answers' positions are read. `last` is the model's own loss and has no class here.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from twoscale.config import RunConfig, UserError
from twoscale.config.objective import ObjectiveConfig
from twoscale.model import LoopedGPT, LoopGroup, StateNoise

# -- the distribution of the exit step ---------------------------------------------------------------------------


def step_weights(steps: int, config: ObjectiveConfig) -> Tensor:
    """pi (K,), summing to 1: uniform 1/K, or geometric pi_k proportional to (1 - rate)^(k-1)."""
    if config.weights == "uniform":
        return torch.full((steps,), 1 / steps)
    weights = (1 - config.rate) ** torch.arange(steps, dtype=torch.float64)
    return (weights / weights.sum()).float()


def exit_log_probabilities(gates: Tensor) -> Tensor:
    """log p (K, ...) from gate logits g (K, ...): p_k = s_k prod_{j<k} (1 - s_j) with s = sigmoid(g); p_K takes what is left."""
    survived = F.logsigmoid(-gates[:-1]).cumsum(0)  # log prod_{j<=k} (1 - s_j), k < K
    before = torch.cat((torch.zeros_like(gates[:1]), survived))
    leaving = torch.cat((F.logsigmoid(gates[:-1]), torch.zeros_like(gates[:1])))  # at step K all that are left leave
    return before + leaving


def expected_steps(log_p: Tensor) -> Tensor:
    """E[k] (...) = sum_k k p_k."""
    k = torch.arange(1, len(log_p) + 1, device=log_p.device, dtype=log_p.dtype)
    return (log_p.exp() * k.view(-1, *[1] * (log_p.dim() - 1))).sum(0)


# -- reading every step --------------------------------------------------------------------------------------------


@dataclass
class _States:
    """A recorder that keeps the last group's states, with their gradients."""

    group: LoopGroup
    taken: list[Tensor] = field(default_factory=list)
    """x^(k) (B, T, C), k = 1 to K."""
    left: list[Tensor] = field(default_factory=list)
    """The same as the next stage would see them."""

    def start(self, group: int, x: Tensor, projected: Tensor) -> None:
        pass

    def step(self, group: int, k: int, x: Tensor) -> None:
        if group == self.group.index:
            self.taken.append(x)
            self.left.append(self.group.output(x))

    def stage(self, index: int, x: Tensor) -> None:
        pass


@dataclass(frozen=True)
class Steps:
    """What an objective sees of a pass."""

    losses: Tensor
    """L_k, (K, A)."""
    gates: Tensor | None
    """Gate logits, (K, A); None for a model without a gate."""


def read_steps(
    model: LoopedGPT, ids: Tensor, targets: Tensor, loops: tuple[int, ...], noise: StateNoise, detach_gate: bool = False
) -> Steps:
    """One pass of the model with every step of the last group read. Targets are (B, T), or (B, T, M) with one for each step; -1: not asked.

    With `detach_gate` the gate's gradient ends at the gate.
    """
    group = model.groups[-1]
    seen = _States(group)
    # The last step is read from the pass itself: sharded weights are gathered for its gradient before those of the steps below need them.
    final, _ = model.hidden(ids, loops=loops, noise=noise, backprop_steps=model.config.backprop_steps, recorder=seen)
    behind = list(model.stages)[list(model.stages).index(group) + 1 :]
    rope = model.rope(torch.arange(ids.shape[1], device=ids.device)) if behind else None
    asked = targets if targets.dim() == 2 else targets[..., 0]
    places = asked.flatten().ge(0).nonzero().flatten()
    read = []
    for k, x in enumerate(seen.left, start=1):
        if k == len(seen.left):
            x = final
        else:
            for stage in behind:
                x = stage(x, rope)
        read.append(x.flatten(0, 1).index_select(0, places))
    logits = model.head(torch.stack(read)).float()  # (K, A, V)
    wanted = _wanted(targets, places, len(read))
    losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)
    gates = None
    if group.gate is not None:
        states = torch.stack([x.flatten(0, 1).index_select(0, places) for x in seen.taken])
        gates = group.gate(states.detach() if detach_gate else states).float().squeeze(-1)
    return Steps(losses, gates)


def _wanted(targets: Tensor, places: Tensor, steps: int) -> Tensor:
    """Targets (K, A) of every step at the places that are asked."""
    if targets.dim() == 2:
        return targets.flatten()[places].expand(steps, -1)
    at = torch.arange(steps, device=targets.device).clamp(max=targets.shape[-1] - 1)
    return targets.flatten(0, 1)[places][:, at].T


def read_answers(model: LoopedGPT, ids: Tensor, targets: Tensor, loops: tuple[int, ...], noise: StateNoise) -> Tensor:
    """For evaluation on a task: mean cross-entropy after the last step and share of right answers, (2,)."""
    places = targets.flatten().ge(0).nonzero().flatten()
    hidden, _ = model.hidden(ids, loops=loops, noise=noise)
    logits, wanted = model.head(hidden.flatten(0, 1).index_select(0, places)).float(), targets.flatten()[places]
    return torch.stack((F.cross_entropy(logits, wanted), (logits.argmax(-1) == wanted).float().mean()))


# -- the objectives ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Objective(ABC):
    """A loss over every step of the last group. `model(ids, targets, objective=self)` calls it inside the model's own forward pass."""

    config: ObjectiveConfig = field(default_factory=ObjectiveConfig)

    def __call__(self, model: LoopedGPT, ids: Tensor, targets: Tensor, loops: tuple[int, ...], noise: StateNoise) -> Tensor:
        return self.loss(read_steps(model, ids, targets, loops, noise))

    @abstractmethod
    def loss(self, steps: Steps) -> Tensor:
        """The scalar to minimise."""


class EveryStep(Objective):
    """sum_k pi_k L_k, with pi uniform or geometric."""

    def loss(self, steps: Steps) -> Tensor:
        pi = step_weights(len(steps.losses), self.config).to(steps.losses.device)
        return (pi @ steps.losses).mean()


class ProgressSteps(Objective):
    """1/K sum_k L_k, each against the task's own target after k steps (hops: f^min(k, p)(x))."""

    def loss(self, steps: Steps) -> Tensor:
        return steps.losses.mean()


class Gate(Objective):
    """Ouro, stage I: sum_k p_k L_k - beta H(p), with p from the gate's survival products and H(p) = -sum_k p_k ln p_k."""

    def loss(self, steps: Steps) -> Tensor:
        log_p = exit_log_probabilities(_gates(steps))
        p = log_p.exp()
        return (p * steps.losses + self.config.beta * p * log_p).sum(0).mean()


class GateFit(Objective):
    """Ouro, stage II: the model is frozen and the gate s_k = sigmoid(g_k) is fitted to "did this step lower the loss".

    gain_k = max(0, L_(k-1) - L_k), w_k = sigmoid(slope (gain_k - threshold)), and the loss is the mean over k = 2 to K of
    -w_k ln(1 - s_k) - (1 - w_k) ln s_k.
    """

    def __call__(self, model: LoopedGPT, ids: Tensor, targets: Tensor, loops: tuple[int, ...], noise: StateNoise) -> Tensor:
        return self.loss(read_steps(model, ids, targets, loops, noise, detach_gate=True))

    def loss(self, steps: Steps) -> Tensor:
        gates, losses = _gates(steps), steps.losses.detach()
        if len(gates) == 1:  # no step before it to compare with
            return gates.sum() * 0.0
        gain = (losses[:-1] - losses[1:]).clamp(min=0)
        go_on = torch.sigmoid(self.config.slope * (gain - self.config.threshold))
        return F.binary_cross_entropy_with_logits(-gates[1:], go_on)


class Act(Objective):
    """sum_k p_k L_k + ponder sum_k k p_k: expected loss + ponder cost x expected steps."""

    def loss(self, steps: Steps) -> Tensor:
        log_p = exit_log_probabilities(_gates(steps))
        return ((log_p.exp() * steps.losses).sum(0) + self.config.ponder * expected_steps(log_p)).mean()


class Lookahead(Objective):
    """sum_k pi_k L_k + head_weight * 1/(K-1) sum_k |d_k| bce_k, with d_k = L_k - L_(k+1), the gain of one more step, k = 1 to K - 1.

    bce_k = -[d_k > 0] ln(1 - s_k) - [d_k <= 0] ln s_k: the gate learns to let a token leave where one more step does not lower its loss.
    Its gradient does not reach the states, and the gains are constants. With `freeze` the first sum is left out.
    """

    def __call__(self, model: LoopedGPT, ids: Tensor, targets: Tensor, loops: tuple[int, ...], noise: StateNoise) -> Tensor:
        return self.loss(read_steps(model, ids, targets, loops, noise, detach_gate=True))

    def loss(self, steps: Steps) -> Tensor:
        gates, losses = _gates(steps), steps.losses
        gain = (losses[:-1] - losses[1:]).detach()
        each = F.binary_cross_entropy_with_logits(-gates[:-1], (gain > 0).to(gates.dtype), weight=gain.abs(), reduction="sum")
        head = self.config.head_weight * each / max(1, gain.numel()) + gates.sum() * 0.0  # the gate has a gradient also where K = 1
        if self.config.freeze:
            return head
        pi = step_weights(len(losses), self.config).to(losses.device)
        return (pi @ losses).mean() + head


def _gates(steps: Steps) -> Tensor:
    assert steps.gates is not None, "checked by build_objective"
    return steps.gates


# -- choosing one --------------------------------------------------------------------------------------------------


def build_objective(config: RunConfig) -> Objective | None:
    """The objective of a run; None for `last`. UserError where model or task do not fit it."""
    objective, model = config.train.objective, config.model
    name = objective.name
    if objective.trains_gate and not model.exit_gate:
        raise UserError(f"train.objective.name = {name!r} trains an exit gate and the model has none: add --model.exit-gate")
    if model.exit_gate and not objective.trains_gate:
        raise UserError(
            f"model.exit_gate: train.objective.name = {name!r} does not train it: choose gate, act or lookahead, or a model without a gate"
        )
    if name == "last":
        return None
    if not model.groups:
        raise UserError(f"train.objective.name = {name!r} reads loop steps and the model has no loop groups: use last")
    if name == "progress" and config.task == "none":
        raise UserError(
            "train.objective.name = 'progress' needs a task, which knows the target of each step: add --task hops or --task carry"
        )
    if name == "gate":
        return Gate(objective) if objective.stage == 1 else GateFit(objective)
    kinds: dict[str, type[Objective]] = {"every_step": EveryStep, "progress": ProgressSteps, "act": Act, "lookahead": Lookahead}
    return kinds[name](objective)
