"""`twoscale bench quantize`: does quantisation survive the loop? A model with its weights in several dtypes beside fp32, on held-out text.

For each number of loops K: the change of the loss with an interval, and how often the most likely token is the same. For each rule: the
steps taken. For each group: how far the states of the rounded map are from those of the exact map after K steps, beside the length of the
exact map's own step. If the loop contracts the error, that distance settles; if it piles it up, it grows with K.

Shapes: K loop steps, B windows, T tokens, C width.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from twoscale import exits
from twoscale.config.dtypes import KVDtype, WeightDtype
from twoscale.engine.kernels.quantize import quantize
from twoscale.model import LoopedGPT
from twoscale.tracing import trace
from twoscale.tradeoff.evaluate import describe, evaluate
from twoscale.tradeoff.heldout import HeldOut

RULES: dict[str, exits.Rule] = {
    "step norm, relative, 0.05": exits.StepNorm(0.05, relative=True),
    "KL 1e-3": exits.KL(1e-3),
    "acceleration by state, 0.05": exits.Acceleration(0.05, normalize="state"),
}
TRACED = 4  # windows whose states are compared


@dataclass(frozen=True)
class LoopError:
    """Of one group: states of the rounded model against those of the exact one, started at the same states."""

    distance: list[float]
    """Mean over tokens of ||x_q^(k) - x^(k)|| / ||x^(k)||, for k = 1 .. K."""
    step: list[float]
    """The exact map's own step ||x^(k) - x^(k-1)|| / ||x^(k)||, likewise."""
    rounded_step: list[float]
    """The rounded map's own step, likewise."""

    @property
    def grows(self) -> float:
        """The distance after the last step over that after half of them: about 1 where the loop contracts the error."""
        half = self.distance[len(self.distance) // 2 - 1]
        return self.distance[-1] / half if half else 1.0

    @property
    def rates(self) -> tuple[float, float]:
        """By which factor a step shrinks from one step to the next, over the second half: exact and rounded."""
        return contraction(self.step), contraction(self.rounded_step)


@dataclass(frozen=True)
class QuantizeBench:
    """One dtype beside fp32."""

    dtype: str
    """Of the weights; or `kv bf16`: weights in fp32, keys and values in bf16."""
    by_loops: dict[int, dict[str, Any]]
    """K -> the record of `describe` (dce, dce_low, dce_high, agree, ...), against fp32 at the same K."""
    by_rule: dict[str, tuple[dict[str, Any], dict[str, Any]]]
    """Rule -> the records of this dtype and of fp32 with the same rule, both against fp32 with all loops."""
    groups: list[LoopError]
    """Empty for keys and values: no trace reads them from a cache."""


def bench_quantize(
    model: LoopedGPT, text: HeldOut, dtypes: Sequence[WeightDtype], loops: Sequence[int], say: Callable[[str], None], kv_bf16: bool = False
) -> list[QuantizeBench]:
    """Every dtype on the same windows, with `kv_bf16` also keys and values in bf16; the exact model is evaluated once."""
    K = max(loops)
    exact = {k: evaluate(model, text, None, k) for k in sorted({*loops, K})}
    ruled = {name: describe(model.config, text, evaluate(model, text, rule, K), exact[K], rule) for name, rule in RULES.items()}
    states = _states(model, text, K)
    found = []
    kinds: list[tuple[str, WeightDtype, KVDtype]] = [(dtype, dtype, "auto") for dtype in dtypes]
    if kv_bf16:
        kinds.append(("kv bf16", "fp32", "bf16"))
    for name, dtype, kv_dtype in kinds:
        say(name)
        rounded = model if dtype == "fp32" else quantize(model, dtype)
        by_loops = {k: describe(model.config, text, evaluate(rounded, text, None, k, kv_dtype), exact[k], None) for k in loops}
        by_rule = {}
        for words, rule in RULES.items():
            by_rule[words] = describe(model.config, text, evaluate(rounded, text, rule, K, kv_dtype), exact[K], rule), ruled[words]
        groups = [] if kv_dtype != "auto" else [loop_error(a, b) for a, b in zip(states, _states(rounded, text, K), strict=True)]
        found.append(QuantizeBench(name, by_loops, by_rule, groups))
    return found


def _states(model: LoopedGPT, text: HeldOut, loops: int) -> list[Tensor]:
    """(K + 1, B, T, C) of each group."""
    return trace(model, text.ids[:TRACED], loops=loops).states


def loop_error(exact: Tensor, rounded: Tensor) -> LoopError:
    """From states (K + 1, B, T, C)."""
    distance = _mean((rounded[1:] - exact[1:]).norm(dim=-1) / exact[1:].norm(dim=-1))
    step, rounded_step = (_mean((x[1:] - x[:-1]).norm(dim=-1) / x[1:].norm(dim=-1)) for x in (exact, rounded))
    return LoopError(distance, step, rounded_step)


def _mean(values: Tensor) -> list[float]:
    """(K, B, T) -> mean over tokens, for each k."""
    return values.flatten(1).mean(dim=1).tolist()  # type: ignore[no-any-return]


def contraction(steps: Sequence[float]) -> float:
    """The geometric mean of the ratios of successive steps over their second half; 1 with fewer than two steps, or none that moves."""
    first = (len(steps) - 1) // 2
    if len(steps) < 2 or not steps[first]:
        return 1.0
    return float((steps[-1] / steps[first]) ** (1 / (len(steps) - 1 - first)))


def draw(found: Sequence[QuantizeBench], title: str) -> Any:
    """The figure: the change of the loss, and the error of the states, against K."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6), constrained_layout=True)
    for i, one in enumerate(found):
        colour, ks = f"C{i}", list(one.by_loops)
        records = [one.by_loops[k] for k in ks]
        left.plot(ks, [1e3 * r["dce"] for r in records], color=colour, marker="o", markersize=3, label=one.dtype)
        left.fill_between(ks, [1e3 * r["dce_low"] for r in records], [1e3 * r["dce_high"] for r in records], color=colour, alpha=0.2)
        for g, error in enumerate(one.groups):
            k = range(1, len(error.distance) + 1)
            right.plot(k, error.distance, color=colour, alpha=1 - 0.25 * g, label=f"{one.dtype}" if g == 0 else None)
    for g, error in enumerate(found[0].groups):
        right.plot(range(1, len(error.step) + 1), error.step, color="0.5", linestyle=":", label="own step (fp32)" if g == 0 else None)
    left.axhline(0, color="0.7", linewidth=0.8)
    left.set(xlabel="loops K", ylabel="change of the loss, 10$^{-3}$ nats a token", title=title)
    right.set(xlabel="loop step", ylabel="distance / size of the state", yscale="log", title="rounded against exact states, each group")
    for axes in (left, right):
        axes.legend(fontsize=8)
    return figure
