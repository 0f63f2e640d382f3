"""The sanitizers of `make sanitize` are really at work: a kernel that leaves its memory is reported and ends the process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPT = """
import sys
import torch
from twoscale.engine.kernels.library import c_library, empty_floats, pointer
torch.set_num_threads(1)
library = c_library()
assert library is not None
x, gain, y = empty_floats(4 * 64).zero_(), empty_floats(64).zero_(), empty_floats(4 * 64)
rows = int(sys.argv[1])
library.rms_norm(1, rows, 64, pointer(x, 4 * 64), pointer(gain, 64), 1e-6, pointer(y, 4 * 64))
if "overflow" in sys.argv:  # no memory is touched, but an index overflows
    library.fill_deeper_levels(1, 4, 0, 1, 1 << 62, 0, 0, 0, pointer(x, 4 * 64), pointer(y, 4 * 64))
print("done")
"""


def preload() -> str | None:
    """What must be loaded before Python for the sanitizers to work: libasan, and libstdc++, whose exceptions it watches."""
    try:
        ask = ["cc", "-print-file-name=libasan.so"], ["cc", "-print-file-name=libstdc++.so"]
        paths = [subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() for words in ask]
    except (OSError, subprocess.SubprocessError):
        return None
    return " ".join(paths) if all(Path(path).is_absolute() for path in paths) else None


def run(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    options = {"ASAN_OPTIONS": "detect_leaks=0", "TWOSCALE_SANITIZE": "1", "PYTHONMALLOC": "malloc", **env}
    return subprocess.run([sys.executable, "-c", SCRIPT, *args], env={**os.environ, **options}, capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_misuse_is_reported() -> None:
    """A call with its right number of rows ends well; a row too many, and an index that overflows, are reported and end the process."""
    if (libraries := preload()) is None:
        pytest.skip("the compiler has no AddressSanitizer")
    good = run("4", LD_PRELOAD=libraries)
    assert good.returncode == 0 and good.stdout == "done\n", good.stderr[-2000:]
    bad = run("5", LD_PRELOAD=libraries)
    assert bad.returncode != 0 and "heap-buffer-overflow" in bad.stderr and "native.c" in bad.stderr, bad.stderr[-2000:]
    bad = run("4", "overflow", LD_PRELOAD=libraries)
    assert bad.returncode != 0 and "signed integer overflow" in bad.stderr and "native.c" in bad.stderr, bad.stderr[-2000:]


def test_without_the_library() -> None:
    """Without libasan preloaded the setting is refused in one line, and nothing is loaded."""
    result = run("4", LD_PRELOAD="")
    assert result.returncode != 0 and "TWOSCALE_SANITIZE=1 needs a process with libasan preloaded" in result.stderr
