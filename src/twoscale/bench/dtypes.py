"""`twoscale bench decode --dtype` and `--kv-dtype`: weights, or keys and values, in several dtypes, in turn."""

from collections.abc import Callable, Sequence

from twoscale.bench.decode import Steps
from twoscale.bench.timing import interleaved
from twoscale.config.dtypes import WeightDtype
from twoscale.engine.kernels.quantize import quantize
from twoscale.model import LoopedGPT


def bench_dtypes(
    model: LoopedGPT, dtypes: Sequence[WeightDtype], batches: Sequence[int], context: int, loops: int, repeats: int
) -> dict[int, dict[str, float]]:
    """Median seconds of one loop step (the mean over groups) for each batch and dtype, fp32 first."""
    models: dict[str, LoopedGPT] = {"fp32": model, **{dtype: quantize(model, dtype) for dtype in dtypes if dtype != "fp32"}}
    shared = Steps(model, max(batches), context, loops).caches
    device = next(model.parameters()).device
    found = {}
    for batch in batches:
        works: dict[str, Callable[[], object]] = {
            dtype: Steps(one, batch, context, loops, caches=shared).loop for dtype, one in models.items()
        }
        seconds = interleaved(works, repeats, device=device)
        found[batch] = {dtype: s / (loops * model.config.n_groups) for dtype, s in seconds.items()}
    return found


def bench_kv_dtypes(model: LoopedGPT, contexts: Sequence[int], loops: int, repeats: int) -> dict[int, dict[str, float]]:
    """Median seconds of a token, one row, for each context with keys and values in fp32 and in bf16."""
    device, found = next(model.parameters()).device, {}
    for context in contexts:
        works: dict[str, Callable[[], object]] = {
            kv_dtype: Steps(model, 1, context, loops, kv_dtype=kv_dtype).token
            for kv_dtype in ("fp32", "bf16")  # type: ignore[arg-type]
        }
        found[context] = interleaved(works, repeats, device=device)
    return found
