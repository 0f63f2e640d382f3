"""`twoscale bench load`: memory, load time and speed of models at published sizes, in every dtype, beside torch's own operators.

Each way of running the model has a process of its own, so that its peak memory is its own.
"""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from twoscale.bench.family import ListCache, straightforward
from twoscale.bench.timing import timed
from twoscale.config import ModelConfig, UserError
from twoscale.config.dtypes import WeightDtype
from twoscale.engine import Engine, loop_params
from twoscale.engine.cache import bytes_per_token
from twoscale.engine.kernels.native import NativeLinear
from twoscale.engine.request import LoopParams
from twoscale.interop import load
from twoscale.interop.fill import fill_plain
from twoscale.interop.load import read_folder
from twoscale.model import LoopedGPT, LoopGroup
from twoscale.model.group import SplitAdapter

PROMPT = 8  # tokens


@dataclass(frozen=True)
class LoadBench:
    """One way of running a model, measured in a process of its own."""

    load_s: float
    token_s: float
    """Median seconds of a token, one row."""
    peak_load: int
    """Bytes: the most that the process had in memory until the model was loaded."""
    held: int
    """Bytes in memory after loading, of the whole process."""
    peak: int
    """Bytes: the most until the last token."""
    read: int = 0
    """Bytes of weights that a token reads from panels; 0 without the C kernels."""
    plain_read_s: float = 0.0
    """Median seconds of a plain read of as many bytes, of the same memory, between the tokens."""


def bench_load(folder: Path, dtype: WeightDtype, loops: int, tokens: int, device: torch.device) -> LoadBench:
    """Our engine, the weights held in a dtype."""
    return _in_a_process(_ours, folder, dtype, loops, tokens, device)


def bench_plain(folder: Path, dtype: str, loops: int, tokens: int, device: torch.device) -> LoadBench:
    """The same architecture by torch's operators, the whole model in bf16 or fp32: eager layers, keys and values in lists."""
    return _in_a_process(_plain, folder, dtype, loops, tokens, device)


def bench_transformers(folder: Path, dtype: str, loops: int, tokens: int, device: torch.device) -> LoadBench:
    """A folder in Ouro's format by transformers' own operators, the whole model in bf16 or fp32."""
    return _in_a_process(_transformers, folder, dtype, loops, tokens, device)


def _in_a_process(work: Callable[..., LoadBench], *args: object) -> LoadBench:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


def _ours(folder: Path, dtype: WeightDtype, loops: int, tokens: int, device: torch.device) -> LoadBench:
    started = time.perf_counter()
    model, _ = load(folder, dtype, device)
    loaded, peak_load, held = time.perf_counter() - started, memory("VmHWM", device), memory("VmRSS", device)
    engine = Engine(model)
    panels = _panels(engine.model)  # none without the C kernels
    cache = engine.new_cache(PROMPT + tokens, loop_params(model, loops=loops))
    read = bytes_of_a_token(engine.model, loops)
    token_s, read_s = [], []

    def token(new: list[int]) -> None:
        x, _ = engine.run([(0, cache, new)])
        with torch.inference_mode():
            engine.model.head(x[-1:]).argmax().item()

    token(list(range(1, PROMPT + 1)))
    for i in range(tokens):
        token_s.append(timed(lambda i=i: token([i + 1])))  # type: ignore[misc]
        if panels and i % 4 == 0:
            read_s.append(timed(lambda: _read(panels)) * read / sum(p.nbytes for p in panels))
    return LoadBench(loaded, median(token_s), peak_load, held, memory("VmHWM", device), read, median(read_s or [0.0]))


def _plain(folder: Path, dtype: str, loops: int, tokens: int, device: torch.device) -> LoadBench:
    started = time.perf_counter()
    model = fill_plain(read_folder(folder), torch.bfloat16 if dtype == "bf16" else torch.float32, device)
    loaded, peak_load, held = time.perf_counter() - started, memory("VmHWM", device), memory("VmRSS", device)
    cache = ListCache()
    seconds = [timed(lambda i=i: straightforward(model, cache, 1 + i, i, loops).argmax().item()) for i in range(PROMPT + tokens)]  # type: ignore[misc]
    return LoadBench(loaded, median(seconds[PROMPT:]), peak_load, held, memory("VmHWM", device))


def _transformers(folder: Path, dtype: str, loops: int, tokens: int, device: torch.device) -> LoadBench:
    from transformers.cache_utils import DynamicCache

    from twoscale.bench.transformers_loop import TransformersOuro

    started = time.perf_counter()
    model = TransformersOuro(folder, torch.bfloat16 if dtype == "bf16" else torch.float32, device)
    loaded, peak_load, held = time.perf_counter() - started, memory("VmHWM", device), memory("VmRSS", device)
    cache = DynamicCache()
    seconds = [timed(lambda i=i: model(cache, 1 + i, i, loops).argmax().item()) for i in range(PROMPT + tokens)]  # type: ignore[misc]
    return LoadBench(loaded, median(seconds[PROMPT:]), peak_load, held, memory("VmHWM", device))


def memory(field: str, device: torch.device | None = None) -> int:
    """VmRSS or VmHWM (its peak) of this process, in bytes; on a GPU what torch has allocated there, and its peak."""
    if device is not None and device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) if field == "VmHWM" else torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))
    except (OSError, StopIteration):
        raise UserError("this bench reads memory from /proc/self/status, which only Linux has") from None


def _panels(model: LoopedGPT) -> list[Tensor]:
    """All weight matrices in panels."""
    return [m.panels.values for m in model.modules() if isinstance(m, NativeLinear)]


def bytes_of_a_token(model: LoopedGPT, loops: int) -> int:
    """Bytes of panels that one token reads: those of a group once for each loop, but for its projection of the input."""
    times: dict[int, int] = {}
    for stage in model.stages:
        for module in stage.modules():
            if isinstance(module, NativeLinear):
                times[id(module)] = loops if isinstance(stage, LoopGroup) else 1
        if isinstance(stage, LoopGroup) and isinstance(stage.adapter, SplitAdapter):
            times[id(stage.adapter.of_input)] = 1
    linear = [m for m in model.modules() if isinstance(m, NativeLinear)]
    return sum(m.panels.values.nbytes * times.get(id(m), 1) for m in linear)


def _read(panels: list[Tensor]) -> None:
    """Reads all bytes once, by torch's reduction over integers of 32 bits."""
    for p in panels:
        p.view(torch.uint8).flatten()[: p.nbytes // 4 * 4].view(torch.int32).amax()


def kv_bytes(config: ModelConfig, loops: int) -> dict[str, int]:
    """Bytes of keys and values a token, fp32."""
    rules, counts = (None,) * config.n_groups, config.loops_for(loops)
    return {kv: bytes_per_token(config, LoopParams(rules, counts, kv)) for kv in ("last", "ring:4", "exact")}
