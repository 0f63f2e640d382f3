"""Compiles and loads the C kernels. `c_library()` returns the loaded library, or None if no C compiler is found or the build fails.

The compiler is $CC, or the first of cc, gcc and clang. The library is cached in the user's cache folder. Its file name contains a hash of
source, compiler, flags, CPU and torch's version, and the file's own size and hash, which are checked before it is loaded. TWOSCALE_NATIVE=0
disables the C kernels.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from twoscale.config import UserError
from twoscale.config.cpu import usable_cores
from twoscale.config.files import sync

SANITIZE = os.environ.get("TWOSCALE_SANITIZE", "0") not in ("", "0")
"""Whether to build with AddressSanitizer and UndefinedBehaviorSanitizer (`make sanitize`); the process must be started with libasan
preloaded."""

MAX_FUSED_ROWS = 512
"""Up to this many rows a block is one fused call; more rows use one call per operator, which needs less scratch memory."""

ATTEND_ROWS = 8
"""Rows of one sequence that attend together, as in attention.c."""

_NAMES = (
    "team", "vector", "matmul", "rowwise", "attention", "block", "statistics", "loop", "sample_limits", "sample", "decode", "fingerprint",
)  # fmt: skip
SOURCES = tuple(f"{name}.c" for name in _NAMES)
"""One translation unit, in this order."""
_CHECKS = ("-fsanitize=address,undefined",) if SANITIZE else ()
_SPEED = ("-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=undefined") if SANITIZE else ("-O3", "-DNDEBUG")
FLAGS = (*_SPEED, *_CHECKS, "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-pthread", "-w")

Library = ctypes.CDLL

_INT, _PTR, _LONG = ctypes.c_int, ctypes.c_void_p, ctypes.c_long
_SIGNATURES = {
    "embed": [_INT] + [_PTR] * 4,
    "linear": [_INT] * 2 + [_PTR] * 3,
    "silu": [_INT] * 4 + [_PTR] * 2,
    "fill_deeper_levels": [_INT] * 3 + [_LONG] * 5 + [_PTR] * 2,
    "residual_norm": [_INT] * 4 + [_PTR] * 4 + [ctypes.c_float, _PTR],
    "rms_norm": [_INT] * 3 + [_PTR, _PTR, ctypes.c_float, _PTR],
    "attend": [_INT] * 5 + [_PTR] * 3 + [_LONG] * 3 + [_PTR] * 3,
    "update_norms": [_INT] * 3 + [_PTR] * 4,
    "block": [_INT] * 2 + [_PTR] * 7,
    "statistics": [_INT] * 3 + [_PTR] * 7,
    "run_stage": [_INT] + [_PTR] * 8,
    "iterate": [_INT] + [_PTR] * 3 + [_INT] * 2 + [_PTR] * 2,
    "sample": [_INT] * 3 + [_PTR] * 8,
    "run_pass": [_INT, _PTR, _INT, _PTR, ctypes.c_int64] + [_PTR] * 4,
    "decode": [_INT, _PTR, _INT] + [ctypes.c_int64] * 2 + [_PTR] * 4,
    "fingerprints": [_INT] * 2 + [_PTR] * 3,
}
_RETURN_INT = ("embed", "iterate", "run_pass", "decode")


class MatrixStruct(ctypes.Structure):
    """The struct Matrix of matmul.c: a weight matrix in panels, and its format (see panels.py)."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "scales")),
        *((name, ctypes.c_int32) for name in ("O", "I", "format")),
    )


class BlockWeights(ctypes.Structure):
    """The struct Block of block.c: sizes and weights of a block. gain1 .. gain4 are the gains of `Block.norm1` .. `Block.norm4`."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("C", "H", "J", "D", "M", "gated", "norm_after_add")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("gain1", "qk_bias", "gain2", "gain3", "gain4")),
        *((name, MatrixStruct) for name in ("qkv", "out", "up", "down")),
    )


class KVView(ctypes.Structure):
    """The struct KVView of attention.c: where rows write keys and values, and what they attend to."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("part", "capacity", "position", "keys", "values", "format")),
        ("longest", ctypes.c_int64),
    )


class KVPointers(ctypes.Structure):
    """The struct KVPointers of loop.c: where the keys and values of one layer of one sequence are."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("level_size", "max_levels", "n_levels", "format")),
    )


class StageWeights(ctypes.Structure):
    """The struct StageWeights of loop.c: the blocks of a stage; for a loop group also its input projection and norm."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("C", "n_layers")),
        *((name, ctypes.c_void_p) for name in ("blocks", "state_weight", "norm_gain")),
        ("norm_eps", ctypes.c_float),
    )


class RowSet(ctypes.Structure):
    """The struct RowSet of loop.c: the rows of a batch."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("n", "n_parts")),
        *((name, ctypes.c_void_p) for name in ("part", "capacity", "position")),
        ("longest", ctypes.c_int64),
    )


class ConditionStruct(ctypes.Structure):
    """The struct Condition of statistics.c: the condition of an exit rule."""

    _fields_ = (
        ("tau", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("parameters", "remembered")),
        *((name, ctypes.c_int64) for name in ("remembered_size", "hits", "min_steps")),
        *((name, ctypes.c_int32) for name in ("statistic", "above", "return_previous")),
    )


class OutputHead(ctypes.Structure):
    """The struct OutputHead of loop.c: final norm and head."""

    _fields_ = (("V", ctypes.c_int32), *((name, ctypes.c_void_p) for name in ("gain", "head")), ("eps", ctypes.c_float))


class LoopRowsStruct(ctypes.Structure):
    """The struct LoopRows of loop.c: rows inside a loop group."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "x", "buffer_a", "buffer_b", "injected", "cos", "sin", "previous_update", "norms", "kv", "loop_step", "step_limit",
            "conditions", "condition_index", "index_in_condition", "lens", "lens_scratch", "statistics", "streak", "fired", "exits",
            "scratch", "filled", "result", "kept_inputs", "kept_rows",
        )),
        ("rope_size", ctypes.c_int64),
    )  # fmt: skip


class Embedding(ctypes.Structure):
    """The struct Embedding of rowwise.c: the embeddings of tokens, fp32 or in panels, and of positions."""

    _fields_ = (
        ("C", ctypes.c_int32),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int64) for name in ("n_tokens", "n_positions")),
        *((name, ctypes.c_void_p) for name in ("wte", "panels", "wpe")),
    )


class DecodeStage(ctypes.Structure):
    """The struct DecodeStage of decode.c: a stage of the network."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "kv")),
        *((name, ctypes.c_int32) for name in ("max_steps", "is_draft", "needs_updates", "adds_input", "starts_with_input")),
        ("norm_eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("input_weight", "start_states", "norm_gain", "condition", "lens")),
    )


class SequenceStruct(ctypes.Structure):
    """The struct Sequence of decode.c: the network, one sequence and its sampling parameters."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rope_size", "n_stages", "n_stops", "top_k")),
        *((name, ctypes.c_void_p) for name in ("embedding", "cos", "sin", "stages", "output_head", "stops")),
        *((name, ctypes.c_int64) for name in ("capacity", "max_rows")),
        ("scratch", ctypes.c_void_p),
        ("top_p", ctypes.c_double),
        ("temperature", ctypes.c_float),
    )


T = TypeVar("T")


class Once(Generic[T]):
    """A thread-safe functools.cache for a function without arguments: other threads wait for the first call."""

    def __init__(self, make: Callable[[], T]) -> None:
        self.__doc__ = make.__doc__
        self._make, self._result, self._lock = make, list[T](), threading.Lock()

    def __call__(self) -> T:
        if not self._result:
            with self._lock:
                if not self._result:
                    self._result.append(self._make())
        return self._result[0]

    def cache_clear(self) -> None:
        self._result = []


@Once
def c_library() -> Library | None:
    """The loaded library, or None if it is not available."""
    if os.environ.get("TWOSCALE_NATIVE", "1") == "0":
        return None
    try:
        return load_library()
    except (OSError, subprocess.SubprocessError, AttributeError) as error:
        if not isinstance(error, NoCompiler):
            warnings.warn(f"the C kernels cannot be used, decoding is several times slower: {error}", stacklevel=3)
        return None


class NoCompiler(OSError):
    """No C compiler was found."""


def threads_to_use() -> int:
    """The number of threads of a kernel call: torch's (OMP_NUM_THREADS, torch.set_num_threads), at most the usable cores."""
    return min(torch.get_num_threads(), _cores())


@functools.cache
def _cores() -> int:
    """Cached because every kernel call asks for it. Concurrent first calls return the same number."""
    return usable_cores()


def sample_floats(V: int) -> int:
    """Floats of scratch memory that `sample` needs for each thread, as in sample.c."""
    return 3 * V + 2 * -(-V // 64) + 16


def score_floats(threads: int, longest: int) -> int:
    """Scratch floats of attention: the scores of ATTEND_ROWS rows in each thread, as in attention.c."""
    return ATTEND_ROWS * threads * (longest + 7 & ~7)


def pointer(tensor: Tensor, size: int, dtype: torch.dtype = torch.float32) -> int:
    """The address of a tensor's memory, for C. Every tensor that C code reads or writes is checked here, or in `input_and_output` or
    `row_pointer`.

    The tensor must have exactly `size` entries of `dtype`, contiguous and on the CPU. About 0.3 us.
    """
    if tensor.dtype is not dtype or not tensor.is_cpu or tensor.numel() != size or not tensor.is_contiguous():
        raise _refusal(tensor, f"{size} contiguous entries of {dtype} on the CPU")
    return tensor.data_ptr()


def input_and_output(x: Tensor, size: int, shape: tuple[int, ...] | None = None) -> tuple[Tensor, int, Tensor, int]:
    """(x contiguous, its checked address, an empty output tensor, its address). The output has the shape of x by default.

    The caller must keep both tensors until the C call returns."""
    x = x.contiguous()
    if x.dtype is not torch.float32 or not x.is_cpu or x.numel() != size:
        raise _refusal(x, f"{size} entries of torch.float32 on the CPU")
    y = torch.empty_like(x) if shape is None else x.new_empty(*shape)  # unpacked: passing a tuple costs half a microsecond more
    return x, x.data_ptr(), y, y.data_ptr()


def row_pointer(heads: Tensor, n: int, H: int, D: int) -> int:
    """Like `pointer`, for queries, keys or values (1, n, H, D) whose rows may have a stride, such as slices of a larger tensor."""
    shape, strides = heads.shape, heads.stride()
    dense = shape == (1, n, H, D) and strides[3] == 1 and strides[2] == D and (n == 1 or strides[1] >= H * D)
    if heads.dtype is not torch.float32 or not heads.is_cpu or not dense:
        raise _refusal(heads, f"float32 of shape {(1, n, H, D)} on the CPU, each row contiguous")
    return heads.data_ptr()


def _refusal(tensor: Tensor, wanted: str) -> TypeError:
    actual = f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()} on {tensor.device}"
    return TypeError(f"memory for a C kernel must be {wanted}; this is {actual}")


def empty_floats(size: int) -> Tensor:
    """An empty tensor (size,), fp32 on the CPU even if torch's defaults are different."""
    return torch.empty(size, dtype=torch.float32, device="cpu")


def load_library() -> Library:
    """The library from the cache folder if it is there and intact, else newly compiled."""
    if SANITIZE and not hasattr(ctypes.CDLL(None), "__asan_init"):
        raise UserError("TWOSCALE_SANITIZE=1 needs a process with libasan preloaded: use make sanitize, or unset it")
    source = b"\n".join(resources.files("twoscale.engine.kernels").joinpath(name).read_bytes() for name in SOURCES)
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None or shutil.which(compiler) is None:
        raise NoCompiler("no C compiler")
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=30, check=True).stdout
    key = hashlib.sha256(b"|".join((source, " ".join(FLAGS).encode(), compiler.encode(), version, _cpu_description()))).hexdigest()[:24]
    folder = _cache_folder()
    for path in sorted(folder.glob(f"native-{key}-*.so")):
        if _is_intact(path):
            with contextlib.suppress(OSError, AttributeError):
                return _open_library(path)
    return _open_library(_compile(compiler, source, folder, key))


def _is_intact(path: Path) -> bool:
    """Whether a file has the size and hash in its name native-KEY-SIZE-SHA256.so. Loading a truncated one would end in SIGBUS."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return path.stem.split("-")[2:] == [str(len(data)), hashlib.sha256(data).hexdigest()]


def _open_library(path: Path) -> Library:
    library = ctypes.CDLL(str(path))
    for name, types in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, _INT if name in _RETURN_INT else None
    if not _self_test(library):
        raise OSError("the self-test failed: a matrix product is wrong")
    return library


def _self_test(library: Library) -> bool:
    """Whether small matrix products agree with torch in every format."""
    from twoscale.engine.kernels.panels import agrees_with_torch

    return agrees_with_torch(library)


def _compile(compiler: str, source: bytes, folder: Path, key: str) -> Path:
    """Compile into a temporary folder, then rename: other processes never see an incomplete file, and two may build at once."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        code, built = (Path(temporary) / f"native.{end}" for end in ("c", "so"))
        code.write_bytes(source)
        try:
            _run_compiler(compiler, *FLAGS, "-shared", str(code), "-o", str(built), "-lm")
        except subprocess.SubprocessError as error:
            output = (getattr(error, "stderr", None) or b"").decode(errors="replace")[-300:]
            raise OSError(f"the kernels did not compile: {error} {output}".strip()) from None
        data = built.read_bytes()
        library = folder / f"native-{key}-{len(data)}-{hashlib.sha256(data).hexdigest()}.so"
        sync(built)
        os.replace(built, library)
        sync(folder)
        return library


def _run_compiler(*argv: str) -> None:
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    subprocess.run(argv, capture_output=True, timeout=120, check=True, env=env)


def _cache_folder() -> Path:
    """A folder that only this user can write to; a temporary one if there is none in the user's cache folder."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twoscale"
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(root, os.W_OK):
            return root
    except (OSError, RuntimeError):
        pass
    return Path(tempfile.mkdtemp(prefix="twoscale-"))


def _cpu_description() -> bytes:
    """The CPU features that -march=native depends on, and torch's version."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        described = sorted({line for line in lines if line.startswith(("flags", "model name", "Features", "CPU part"))})
    except OSError:
        described = [platform.processor()]
    return "|".join([platform.machine(), torch.__version__, *described]).encode()
