"""Threads: results do not depend on them, quotas and affinity are respected, and the user's own settings stay."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import twoscale
from conftest import small_model
from twoscale import exits
from twoscale.config.cpu import usable_cores
from twoscale.config.dtypes import WEIGHT_DTYPES, WeightDtype
from twoscale.engine.kernels import library as kernels
from twoscale.engine.kernels.library import c_library, threads_to_use
from twoscale.engine.kernels.panels import Panels, to_panels
from twoscale.model import LoopedGPT
from twoscale.model.quantized import QuantizedLinear, quantize_matrix

needs_kernel = pytest.mark.skipif(c_library() is None, reason="no C compiler")


def product(threads: int, x: torch.Tensor, w: Panels) -> torch.Tensor:
    y = torch.full((len(x), w.shape[0]), torch.nan)
    c_library().linear(threads, len(x), w.address, x.data_ptr(), y.data_ptr())
    return y


@needs_kernel
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES)
def test_any_number_of_threads(dtype: WeightDtype) -> None:
    """A product has the same bits with any number of threads, more than cores included, call after call."""
    chance = torch.Generator().manual_seed(0)
    x, w = torch.randn(7, 300, generator=chance), torch.randn(1000, 300, generator=chance)
    matrix = quantize_matrix(w, dtype)
    inside = to_panels(matrix, dtype)
    expected = product(1, x, inside)
    assert torch.allclose(expected, QuantizedLinear(matrix, dtype)(x), atol=1e-3)
    for i in range(500):
        assert product((2, 3, 8, 64, 1000)[i % 5], x, inside).equal(expected), i


@needs_kernel
def test_calls_from_many_threads() -> None:
    """Calls that meet do not disturb each other: one has the team, the others compute alone."""
    chance = torch.Generator().manual_seed(1)
    x, w = torch.randn(3, 64, generator=chance), torch.randn(400, 64, generator=chance)
    inside = [to_panels(quantize_matrix(w, dtype), dtype) for dtype in WEIGHT_DTYPES]
    expected = [product(1, x, w) for w in inside]
    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(lambda i: product(1 + i % 3, x, inside[i % 4]).equal(expected[i % 4]), range(3000)))


@needs_kernel
def test_generation_does_not_depend_on_threads() -> None:
    """Tokens and steps are the same with one thread and with several."""
    model = LoopedGPT(small_model(n_embd=64), seed=3).eval()
    found = []
    for n in (1, 2, 4):
        torch.set_num_threads(n)
        gen = twoscale.generate(model, [[1, 2, 3], [4]], 12, exit=exits.Acceleration(0.5), loops=8, temperature=1.0)
        found.append((gen.tokens, gen.steps))
    assert found[0] == found[1] == found[2]


@needs_kernel
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_after_a_fork() -> None:
    """A forked child, which has none of its parent's threads, computes all the same."""
    code = (
        "import os, torch, twoscale\n"
        "torch.set_num_threads(2)\n"
        "model = twoscale.LoopedGPT(twoscale.presets.nano().model).eval()\n"
        "said = twoscale.generate(model, [[1, 2]], 4).tokens\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if twoscale.generate(model, [[1, 2]], 4).tokens == said else 1)\n"
        "raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def _cgroup(tmp_path: Path, lines: str, files: dict[str, str]) -> int:
    (tmp_path / "self").write_text(lines)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    return usable_cores(tmp_path / "fs", tmp_path / "self")


@pytest.mark.parametrize(
    ("lines", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/a/b\n", {"a/cpu.max": "100000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1),
        ("0::/host/only\n", {"cpu.max": "100000 100000\n"}, 1),
        ("2:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "30000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ("2:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ("7:memory:/x\n", {"cpu.max": "50000 100000\n"}, None),
        ("garbage\n0::/\n", {"cpu.max": "many words\n"}, None),
    ],
)
def test_quotas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, files: dict[str, str], quota: int | None) -> None:
    """The usable cores are those of the affinity mask, and no more than the smallest quota above the process, rounded up."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert _cgroup(tmp_path, lines, files) == (8 if quota is None else quota)


def test_no_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take torch's number of threads, and no more than the usable cores."""
    monkeypatch.setattr(kernels, "_cores", lambda: 3)
    for asked, used in ((1, 1), (2, 2), (8, 3)):
        torch.set_num_threads(asked)
        assert threads_to_use() == used


def _environment(code: str, **given: str) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    done = subprocess.run([sys.executable, "-c", code], env=clean | given, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


def test_openmp_defaults() -> None:
    """Waiting OpenMP threads sleep soon, unless the user has said otherwise or torch is loaded already."""
    tell = "import os; print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'), os.environ.get('OMP_NUM_THREADS'))"
    spin, policy, _ = _environment(f"import twoscale; {tell}").split()
    assert int(spin) < 10_000 and policy == "None"
    assert _environment(f"import twoscale; {tell}", OMP_WAIT_POLICY="ACTIVE", OMP_NUM_THREADS="3") == "None ACTIVE 3"
    assert _environment(f"import twoscale; {tell}", GOMP_SPINCOUNT="7").split()[0] == "7"
    assert _environment(f"import torch, twoscale; {tell}").split()[0] == "None"
