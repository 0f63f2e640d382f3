"""Settings of the training objective. The losses themselves are in `twoscale.train.objective`."""

from dataclasses import dataclass
from typing import Literal

from twoscale.config.errors import UserError

ObjectiveName = Literal["last", "every_step", "progress", "gate", "act", "lookahead"]
GATED = ("gate", "act", "lookahead")  # objectives that train an exit gate


@dataclass(frozen=True)
class ObjectiveConfig:
    """Which loop steps the loss reads, and how. L_k is the cross-entropy read from the last group's state after step k of K."""

    name: ObjectiveName = "last"
    """`last`: L_K. `every_step`: a weighted sum of all L_k. `progress`: L_k against the task's own target at step k. `gate` (Ouro),
    `act` (expected loss + ponder cost), `lookahead` (a head predicts whether one more step helps): these train an exit gate."""
    weights: Literal["uniform", "geometric"] = "uniform"
    """Weights of the steps, for every_step and lookahead: 1/K each, or proportional to (1 - rate)^(k-1)."""
    rate: float = 0.3
    """Rate of the geometric weights."""
    stage: Literal[1, 2] = 1
    """Stage of `gate`: 1 trains model and gate together, 2 freezes the model and fits the gate."""
    beta: float = 0.05
    """Weight of the entropy of the exit distribution, for gate in stage 1."""
    slope: float = 50.0
    """Stage 2 of `gate`: the label for going on is sigmoid(slope * (gain - threshold)), with gain = max(0, L_(k-1) - L_k)."""
    threshold: float = 0.005
    """Stage 2 of `gate`: the gain, in nats, at which going on and leaving are labelled alike."""
    ponder: float = 0.01
    """Cost of one expected step in nats, for act."""
    head_weight: float = 1.0
    """Weight of the head's own loss, for lookahead."""
    freeze: bool = False
    """Train the gate alone, for lookahead."""

    def __post_init__(self) -> None:
        for name, allowed in (
            ("name", ("last", "every_step", "progress", *GATED)),
            ("weights", ("uniform", "geometric")),
            ("stage", (1, 2)),
        ):
            if getattr(self, name) not in allowed:
                raise UserError(f"objective.{name} = {getattr(self, name)!r}: choose one of {', '.join(map(str, allowed))}")
        if not 0 < self.rate < 1:
            raise UserError(f"objective.rate = {self.rate}: must lie between 0 and 1, both excluded")
        for name in ("beta", "slope", "threshold", "ponder", "head_weight"):
            if not 0 <= getattr(self, name) < 1e6:
                raise UserError(f"objective.{name} = {getattr(self, name)}: must be a number of at least 0")

    @property
    def trains_gate(self) -> bool:
        return self.name in GATED

    @property
    def gate_only(self) -> bool:
        """Whether all weights but the gate's stay as they are."""
        return (self.name == "gate" and self.stage == 2) or (self.name == "lookahead" and self.freeze)
