"""The geometry of a model on a text: all statistics, per group and loop step, in constant memory.

    record = measure(model, ids, loops=30)          # a plain dictionary, one line of geometry.jsonl

Sequences are traced a few at a time; each chunk's states go through the pure functions of this folder and into running
moments, and are forgotten. Stored traces go through the very same functions.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twoscale.config import UserError
from twoscale.config.groups import format_groups
from twoscale.geometry.drift import drift_to_loop
from twoscale.geometry.online import Moments
from twoscale.geometry.spectrum import loop_spectral_radius
from twoscale.geometry.steps import VERDICTS, Steps, contraction_rate, distances, verdicts
from twoscale.model import LoopedGPT
from twoscale.tracing import Trace, trace

CHUNK_FLOATS = 40_000_000  # states of one traced chunk, over all groups: 160 MB
BLOCK_FLOATS = 1_000_000  # states of the tokens that statistics are taken of at once: 4 MB
ROUNDING = 1e-6  # steps below this share of the state are rounding: their direction is noise and is not counted
LIMIT_LOOPS = 64
LIMIT_SEQUENCES = 4
LIMIT_FLOATS = 1 << 29  # entries of all states of these sequences


class GeometryStats:
    """Running statistics of any number of traces of one model."""

    def __init__(self) -> None:
        self.groups: list[dict[str, Moments]] = []
        self.verdicts: list[Tensor] = []
        self.boundaries: list[dict[str, Moments]] = []
        self.layers: list[list[int]] = []
        self.loops: list[int] = []
        self.tokens = 0

    def add(self, traced: Trace) -> None:
        if not self.groups:
            n = len(traced.states)
            self.groups = [defaultdict(Moments) for _ in range(n)]
            self.boundaries = [defaultdict(Moments) for _ in range(n - 1)]
            self.verdicts = [torch.zeros(len(VERDICTS), dtype=torch.int64) for _ in range(n)]
            self.layers, self.loops = traced.layers, [len(x) - 1 for x in traced.states]
        mask = traced.mask.flatten()
        self.tokens += int(mask.sum())
        rows = max(8, BLOCK_FLOATS // (max(len(x) for x in traced.states) * traced.states[0].shape[-1]))
        found: dict[tuple[str, int, str], list[Tensor]] = defaultdict(list)
        for first in range(0, len(mask), rows):  # few enough tokens at once that all of this happens in the processor's cache
            part = mask[first : first + rows]
            block = slice(first, first + rows) if part.all() else first + part.nonzero()[:, 0]
            steps = [Steps(x.flatten(1, 2)[:, block]) for x in traced.states]
            for g, of in enumerate(steps):
                for name, values in token_statistics(of).items():
                    found["group", g, name].append(values)
                self.verdicts[g] += torch.bincount(verdicts(of), minlength=len(VERDICTS))
            for g in range(len(steps) - 1):
                ends = [x[g + 1].flatten(0, 1)[block] for x in (traced.projected, traced.inputs)]
                for name, ratio in drift_to_loop(steps[g], steps[g + 1].states, *ends).items():
                    found["boundary", g, name].append(ratio[None])
        for (kind, g, name), parts in found.items():
            (self.groups if kind == "group" else self.boundaries)[g][name].add(torch.cat(parts, dim=1))

    def as_json(self) -> dict[str, Any]:
        names = group_names(self.layers)
        groups = []
        for g, moments in enumerate(self.groups):
            shares: dict[str, float] = {v: float(n) / max(1, self.tokens) for v, n in zip(VERDICTS, self.verdicts[g].tolist(), strict=True)}
            record: dict[str, Any] = {"name": names[g], "layers": self.layers[g], "loops": self.loops[g]}
            record |= {name: m.as_json() for name, m in moments.items()}
            groups.append(record | {"verdict": max(shares.items(), key=lambda item: item[1])[0], "verdict_shares": shares})
        boundaries = [
            {"from": names[g], "to": names[g + 1], "dlr": {k: _flat(m.as_json()) for k, m in moments.items()}}
            for g, moments in enumerate(self.boundaries)
        ]
        return {"tokens": self.tokens, "groups": groups, "boundaries": boundaries}


def token_statistics(states: Tensor | Steps) -> dict[str, Tensor]:
    """Every statistic of the steps of states (K+1, tokens, C): name to (K or K-1, tokens).

    Cosines, and accelerations beside the steps, of steps that are rounding are NaN.
    """
    of = states if isinstance(states, Steps) else Steps(states)
    radial, tangential = of.radial_tangential
    stats = {"step_norm": of.norms, "relative_step_norm": of.relative, "radial": radial, "tangential": tangential}
    if len(of.norms) > 1:
        rounding = (of.relative[1:] < ROUNDING) | (of.relative[:-1] < ROUNDING)
        stats["step_cosine"] = of.cosines.masked_fill(rounding, torch.nan)
        stats["acceleration"] = of.accelerations
        stats["acceleration_steps"] = of.normalized_accelerations("steps").masked_fill(rounding, torch.nan)
        stats["acceleration_state"] = of.normalized_accelerations("state")
    return stats


@torch.no_grad()
def measure(
    model: LoopedGPT, ids: Tensor | Iterable[Tensor], loops: int | Sequence[int] = 30, *, seed: int = 0, run: nn.Module | None = None
) -> dict[str, Any]:
    """The statistics of all windows ids (N, T), or of a stream of such; memory does not grow with their number."""
    stats = GeometryStats()
    for chunk in _chunks(model, [ids] if isinstance(ids, Tensor) else ids, loops):
        stats.add(trace(model, chunk, loops=loops, seed=seed, run=run))
    return stats.as_json()


def measure_limit(model: LoopedGPT, ids: Tensor, loops: int = LIMIT_LOOPS, *, seed: int = 0, iterations: int = 60) -> list[dict[str, Any]]:
    """For each group, on a few sequences: distance to the state at step `loops`, its contraction rate, the spectral radius there."""
    floats = (loops + 1) * ids.shape[1] * model.config.n_embd * model.config.n_groups
    traced = trace(model, ids[: max(1, min(LIMIT_SEQUENCES, LIMIT_FLOATS // floats))], loops=loops, seed=seed)
    records = []
    for g, x in enumerate(traced.states):
        x = x[:, traced.mask]
        gaps = distances(x, x[-1])[:-1]
        # Fitted to the steps, not to the distances: those end in zero at the last state whatever the map does.
        steps = Steps(x)
        rate = contraction_rate(steps.norms, floor=10 * ROUNDING * steps.state_norms[-1])
        gap_moments, rate_moments = Moments(), Moments()
        gap_moments.add(gaps)
        rate_moments.add(rate[None])
        radius = loop_spectral_radius(model, traced, g, iterations)
        records.append(
            {
                "loops": loops,
                "distance": gap_moments.as_json(),
                "contraction_rate": _flat(rate_moments.as_json()),
                "spectral_radius": {"mean": float(radius.mean()), "max": float(radius.max()), "sequences": len(radius)},
            }
        )
    return records


def group_names(layers: Sequence[Sequence[int]]) -> list[str]:
    """`4`, `5-6`, `7`: what figures and tables call the groups."""
    return [format_groups((tuple(g),)) for g in layers]


def _flat(moments: dict[str, list[Any]]) -> dict[str, Any]:
    """Moments of a single entry without the list around it."""
    return {key: values[0] for key, values in moments.items()}


def _chunks(model: LoopedGPT, batches: Iterable[Tensor], loops: int | Sequence[int]) -> Iterator[Tensor]:
    """Windows a few at a time, so that the states of all groups stay within CHUNK_FLOATS."""
    c = model.config
    if not c.n_groups:
        raise UserError("this model has no loop groups: there is nothing to measure")
    per_token = (sum(c.loops_for(loops)) + c.n_groups) * c.n_embd
    for ids in batches:
        rows = max(1, CHUNK_FLOATS // (per_token * ids.shape[1]))
        yield from torch.split(ids, rows)
