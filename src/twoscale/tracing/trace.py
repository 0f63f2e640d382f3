"""`twoscale.trace`: every state of every loop group on a batch of sequences.

Shapes: B batch, T position, C width, G group, K loop step.

    trace = twoscale.trace(model, ids, loops=30)
    trace.states[0]      # (31, B, T, C): x^(0) .. x^(30) of the first group
    trace = twoscale.trace(model, "The old man", tokenizer=tokenizer)
    trace.save("trace.safetensors")
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from twoscale.config import UserError
from twoscale.config.files import atomic_write
from twoscale.config.show import ShortRepr
from twoscale.config.words import group_label
from twoscale.data import Tokenizer
from twoscale.data.text import Tokens, as_token_ids
from twoscale.model import LoopedGPT, StateNoise
from twoscale.model.input import as_batch, check_start

VERSION = "1"


@dataclass(frozen=True, repr=False)
class Trace(ShortRepr):
    """The states of one pass, all fp32."""

    states: list[Tensor]
    """One (K+1, B, T, C) for each group: x^(0) .. x^(K)."""
    projected: list[Tensor]
    """One (B, T, C) for each group: A_g [x^(0); e]."""
    stages: list[Tensor]
    """The embedding, then the output of every stage, each (B, T, C)."""
    ids: Tensor
    """(B, T) int64."""
    lengths: Tensor
    """(B,) int64: tokens of each row; what lies behind is padding."""
    layers: list[list[int]]
    """The layer ids of each group."""
    stage_of_group: list[int]
    """Where in `stages` each group's output is."""
    model: str
    """Fingerprint of the model that was traced."""

    def __post_init__(self) -> None:
        B, T = self.ids.shape
        assert self.lengths.shape == (B,) and len(self.states) == len(self.projected) == len(self.layers) == len(self.stage_of_group)
        for g, (x, projected) in enumerate(zip(self.states, self.projected, strict=True)):
            assert x.dtype == torch.float32 and x.shape[1:3] == (B, T) and projected.shape == x.shape[1:]
            finite = x.flatten(1).sum(dim=1).isfinite()  # a sum is one pass, and no NaN or infinity gets lost in it
            if not finite.all():
                where = f"{group_label(g, self.layers[g])}: the state after step {int((~finite).nonzero()[0])}"
                raise UserError(f"{where} is not finite; the model's weights are broken")
        assert all(x.shape[:2] == (B, T) for x in self.stages)

    @property
    def positions(self) -> Tensor:
        """(B, T) int64."""
        return torch.arange(self.ids.shape[1]).expand_as(self.ids)

    @property
    def mask(self) -> Tensor:
        """(B, T): True where there is a token, False in the padding."""
        return self.positions < self.lengths[:, None]

    @property
    def inputs(self) -> list[Tensor]:
        """The input e of each group (B, T, C): the output of the stage before it."""
        return [self.stages[i - 1] for i in self.stage_of_group]

    def check_model(self, model: LoopedGPT) -> None:
        """Refuse to mix a trace with a model that it does not come from."""
        if fingerprint(model) != self.model:
            raise UserError("this trace comes from another model: trace this one")

    def save(self, path: str | Path) -> None:
        tensors = {"ids": self.ids, "lengths": self.lengths}
        for kind in ("states", "projected", "stages"):
            tensors |= {f"{kind}.{i}": x.contiguous() for i, x in enumerate(getattr(self, kind))}
        about = {"layers": self.layers, "stage_of_group": self.stage_of_group, "model": self.model}
        with atomic_write(Path(path)) as f:
            f.write(save(tensors, metadata={"twoscale_trace": VERSION, "about": json.dumps(about)}))

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        try:
            with safe_open(path, framework="pt") as f:
                metadata = f.metadata() or {}
                if metadata.get("twoscale_trace") != VERSION:
                    raise UserError(f"{path} is no trace of this program")
                about = json.loads(metadata["about"])
                names = set(f.keys())
                lists: dict[str, Any] = {
                    kind: [f.get_tensor(f"{kind}.{i}") for i in range(sum(n.startswith(kind + ".") for n in names))]
                    for kind in ("states", "projected", "stages")
                }
                return cls(**lists, ids=f.get_tensor("ids"), lengths=f.get_tensor("lengths"), **about)
        except FileNotFoundError:
            raise UserError(f"{path} does not exist") from None
        except (SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError, AssertionError) as error:
            raise UserError(f"{path} is truncated or no trace: {error}") from None


@dataclass
class TraceRecorder:
    """Copies what a pass shows it: states into one tensor a group, stages into a list."""

    loops: tuple[int, ...]
    states: list[Tensor] = field(default_factory=list)
    projected: list[Tensor] = field(default_factory=list)
    stages: list[Tensor] = field(default_factory=list)

    def start(self, group: int, x: Tensor, projected: Tensor) -> None:
        self.states.append(torch.empty(self.loops[group] + 1, *x.shape, dtype=torch.float32, device=x.device))
        self.states[group][0] = x
        self.projected.append(projected.detach().float().clone())

    def step(self, group: int, k: int, x: Tensor) -> None:
        self.states[group][k] = x

    def stage(self, index: int, x: Tensor) -> None:
        self.stages.append(x.detach().float().clone())


@torch.no_grad()
def trace(
    model: LoopedGPT,
    ids: Tokens,
    *,
    tokenizer: Tokenizer | None = None,
    loops: int | Sequence[int] = 30,
    start: Sequence[Tensor] | None = None,
    seed: int = 0,
    run: nn.Module | None = None,
) -> Trace:
    """All states of one pass over ids (B, T), a ragged list of lists, or with a `tokenizer` one text or a list of texts.

    `run` is what to call where the model is wrapped or sharded; by default the model itself.
    """
    c = model.config
    if not c.n_groups:
        raise UserError("this model has no loop groups: there is nothing to trace")
    tokens, lengths = as_batch(as_token_ids(ids, tokenizer), c.vocab_size, c.block_size)
    if start is not None:
        check_start(start, c, tokens)
    recorder = TraceRecorder(c.loops_for(loops))
    on_device = tokens.to(next(model.parameters()).device)
    if run is None:
        model.hidden(on_device, loops=loops, noise=StateNoise(seed), start=start, recorder=recorder)
    else:
        run(on_device, loops=loops, noise=StateNoise(seed), recorder=recorder)
    places = [i + 1 for i, (_, group) in enumerate(c.stages) if group is not None]
    parts = {kind: [x.cpu() for x in getattr(recorder, kind)] for kind in ("states", "projected", "stages")}
    return Trace(**parts, ids=tokens, lengths=lengths, layers=[list(g) for g in c.groups], stage_of_group=places, model=fingerprint(model))


def fingerprint(model: LoopedGPT) -> str:
    """Tells one model from another: its config, how its weights are stored, and the first entries of every parameter."""
    crc = zlib.crc32(f"{model.config!r} {model.weight_dtype}".encode())
    for p in model.parameters():
        local = p.to_local() if hasattr(p, "to_local") else p
        crc = zlib.crc32(local.detach().flatten()[:64].float().cpu().clone().numpy().tobytes(), crc)
    return f"{crc:08x}"
