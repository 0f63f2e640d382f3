"""The engine's memory: buffers that C code reads and writes, threads that share a model, and the cache of built kernels."""

import time
from pathlib import Path

import pytest
import torch

import twoscale
from concurrency import at_once
from forked import run_script
from models import loud, small_model
from twoscale.engine import Engine, cache, engine as engine_module, loop_params
from twoscale.engine.kernels.library import _is_intact, c_library, input_and_output, pointer, row_pointer
from twoscale.engine.rows import Rows, make_part

HERE = Path(__file__).parent
HEAD = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, twoscale
from models import loud, small_model
from twoscale import exits
torch.set_num_threads(1)
"""


def run(script: str, *args: str, **env: str) -> str:
    return run_script(HEAD + script, str(HERE), *args, **env)


DEFAULTS = """
from copy import deepcopy
used = loud(small_model(positions="rotary", mlp="gated"), scale=0.1)
fresh = deepcopy(used)

def answers(model):
    found = []
    for kernels in ("auto", "packed", "torch"):
        for rule in (None, exits.Acceleration(3.0), exits.KL(0.05)):
            gen = twoscale.generate(model, [[1, 2, 3], [4, 5]], 8, loops=6, exit=rule, kernels=kernels)
            found.append((gen.tokens, gen.steps))
    out = twoscale.forward(model, [[1, 2, 3], [4, 5]], loops=6, exit=exits.Acceleration(3.0))
    return [*found, out.logits.tolist(), out.steps.tolist()]

if "late" in sys.argv:  # the kernels are loaded and one model's weights are packed before the default changes
    answers(used)
exec(sys.argv[2])
rounds = [answers(model) for _ in range(4) for model in (used, fresh)]
assert all(found == rounds[0] for found in rounds)
print(rounds[0])
"""


@pytest.fixture(scope="module")
def plain_answers() -> str:
    return run(DEFAULTS, "")


@pytest.mark.parametrize("when", ["early", "late"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_default_dtype(dtype: str, when: str, plain_answers: str) -> None:
    """Answers are the same to the bit whatever torch's default dtype is, and no memory is overwritten."""
    assert run(DEFAULTS, f"torch.set_default_dtype(torch.{dtype})", when) == plain_answers


@pytest.mark.parametrize("when", ["early", "late"])
def test_default_device(when: str, plain_answers: str) -> None:
    """Answers are the same to the bit whatever torch's default device is."""
    assert run(DEFAULTS, 'torch.set_default_device("meta")', when) == plain_answers


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(8, dtype=torch.float64), torch.zeros(7), torch.zeros(9), torch.zeros(16)[::2], torch.zeros(8, device="meta")],
    ids=["dtype", "short", "long", "strided", "device"],
)
def test_pointer(tensor: torch.Tensor) -> None:
    """No address is given to C of memory with another dtype, size, layout or device than the kernel expects."""
    assert pointer(torch.zeros(2, 4), 8) != 0
    with pytest.raises(TypeError, match="memory for a C kernel must be 8 contiguous entries"):
        pointer(tensor, 8)


def test_input_and_output() -> None:
    """A strided input is copied, and the copy is handed back, to live as long as C reads it; another dtype, size or device is refused."""
    strided = torch.arange(16.0).view(2, 8)[:, ::2]
    x, at, y, at_y = input_and_output(strided, 8, (2, 3))
    assert torch.equal(x, strided) and x.is_contiguous() and at == x.data_ptr()
    assert y.shape == (2, 3) and y.dtype == torch.float32 and at_y == y.data_ptr()
    for bad in (strided.double(), strided[:1], strided.to("meta")):
        with pytest.raises(TypeError, match="memory for a C kernel must be 8 entries"):
            input_and_output(bad, 8)


def test_row_pointer() -> None:
    """Rows may lie apart, as slices of one tensor do; entries of a row may not."""
    heads = torch.zeros(1, 3, 6, 4)
    assert row_pointer(heads[:, :, 2:4], 3, 2, 4) == heads.data_ptr() + 4 * 8
    for bad in (heads[..., :2], heads.transpose(2, 3), heads.double(), heads[:, :2], heads[:, :, ::2]):
        with pytest.raises(TypeError, match="memory for a C kernel"):
            row_pointer(bad, 3, 6, 4)


def test_position_outside_the_cache() -> None:
    """Rows whose positions lie outside their cache never reach a kernel."""
    engine = Engine(loud(small_model()))
    cache = engine.new_cache(3, loop_params(engine.model, loops=2))
    rows = Rows([make_part(0, cache, 3, 1)], torch.tensor([[3], [0]]), engine.kernels)
    with pytest.raises(IndexError, match="position 3 lies outside a cache for 3 tokens"):
        engine.run_plain_stage(0, engine.embed(rows), rows)


def test_half_precision_model() -> None:
    """A model in bf16 decodes on torch's operators, with states, keys and values in bf16."""
    model = loud(small_model(), scale=0.1).bfloat16()
    engine = Engine(model)
    assert engine.kernels.name == "torch" and engine.new_cache(4, loop_params(model)).layers[0].keys.dtype == torch.bfloat16
    assert twoscale.generate(model, [[1, 2, 3]], 4).tokens == twoscale.generate(model, [[1, 2, 3]], 4, kernels="torch").tokens


FIRST_USE = """
import time
from concurrency import at_once
from twoscale.engine.kernels import native
from twoscale.engine.kernels.library import c_library

if c_library() is not None:
    to_panels, calls = native.to_panels, []

    def slow_to_panels(matrix, dtype):
        calls.append(matrix.values.shape)
        time.sleep(0.005)  # the others get here meanwhile, if they may
        return to_panels(matrix, dtype)

    native.to_panels = slow_to_panels
    want = twoscale.generate(loud(small_model(), scale=0.1), [[1, 2, 3]], 8).tokens
    packed, model = len(calls), loud(small_model(), scale=0.1)
    found = at_once(lambda i: twoscale.generate(model, [[1, 2, 3]], 8).tokens)
    assert len(calls) == 2 * packed and found == [want] * 4
"""


def test_first_use_by_threads() -> None:
    """Threads that decode with one fresh model at the same time share one packed copy of each weight, and get the right answers."""
    run(FIRST_USE)


def test_seeds_by_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that decode with one model and different seeds at the same time each get their own seed's start states."""
    model = loud(small_model(), scale=0.1)

    class Slow(dict[object, object]):
        """Lets other threads run between two lines of whoever sets an item."""

        def __setitem__(self, key: object, value: object) -> None:
            super().__setitem__(key, value)
            time.sleep(0.01)

    monkeypatch.setattr(engine_module, "_TABLES", Slow())
    want = [twoscale.generate(model, [[1, 2, 3]], 8, seed=i).tokens for i in range(4)]
    for _ in range(3):
        assert at_once(lambda i: twoscale.generate(model, [[1, 2, 3]], 8, seed=i).tokens) == want


def test_library_by_threads() -> None:
    """The kernels are loaded once, whoever asks first."""
    if c_library() is None:
        pytest.skip("no C compiler on this machine")
    c_library.cache_clear()
    assert len({id(library) for library in at_once(lambda i: c_library())}) == 1


KERNELS = """
from pathlib import Path
from twoscale.engine.kernels.library import c_library
model = loud(small_model(), scale=0.1)
print(c_library() is not None, twoscale.generate(model, [[1, 2, 3]], 8).tokens)
"""


@pytest.fixture(scope="module")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A folder with a library that was just built, and the library's content."""
    folder = tmp_path_factory.mktemp("kernels")
    if not run(KERNELS, XDG_CACHE_HOME=str(folder)).startswith("True"):
        pytest.skip("no C compiler on this machine")
    (library,) = folder.glob("twoscale/native-*.so")
    return folder, library.read_bytes()


@pytest.mark.parametrize("damage", ["cut", "empty", "one byte"])
def test_damaged_kernel_cache(damage: str, kernel_cache: tuple[Path, bytes]) -> None:
    """A library in the cache folder that is cut, empty or changed is never loaded: it is built again, and decoding goes on."""
    folder, whole = kernel_cache
    middle = len(whole) // 2
    damaged = {"cut": whole[:middle], "empty": b"", "one byte": whole[:middle] + b"?" + whole[middle + 1 :]}
    for library in folder.glob("twoscale/native-*.so"):
        library.write_bytes(damaged[damage])
    assert run(KERNELS, XDG_CACHE_HOME=str(folder)).startswith("True")
    assert any(_is_intact(path) for path in folder.glob("twoscale/native-*.so"))


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    """Two processes that need the kernels at the same time both get them, and leave only whole libraries behind."""
    if c_library() is None:
        pytest.skip("no C compiler on this machine")
    found = at_once(lambda i: run(KERNELS, XDG_CACHE_HOME=str(tmp_path)), 2)
    assert found[0] == found[1] and str(found[0]).startswith("True")
    names = [path.name for path in (tmp_path / "twoscale").iterdir()]
    assert names and all(_is_intact(tmp_path / "twoscale" / name) for name in names), names


@pytest.mark.parametrize("loops", [10**9, 10_001, (3, 10_001)])
def test_too_many_loops(loops: int | tuple[int, ...]) -> None:
    """More loops than anybody can want are refused before anything is computed; the bound itself is not."""
    model = loud(small_model())
    for call in (lambda: twoscale.generate(model, [[1]], 1, loops=loops), lambda: twoscale.forward(model, [[1]], loops=loops)):
        with pytest.raises(twoscale.UserError, match="a group takes at most 10000 steps"):
            call()
    assert model.config.loops_for(10_000) == (10_000, 10_000)
    with pytest.raises(twoscale.UserError, match="mean_loops = 10001: at most 10000"):
        small_model(mean_loops=10_001)


def test_cache_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that would grow past the memory at hand is refused; one that needs fewer levels, or leaves early, is not."""
    monkeypatch.setattr(cache, "MIN_CHECKED_BYTES", 1 << 14)
    monkeypatch.setattr(cache, "free_memory", lambda: 1 << 16)
    model = loud(small_model(), scale=0.1)
    with pytest.raises(
        twoscale.UserError, match=r"keys and values of \d+ loop steps and 10 tokens need .* GB are free: ask for fewer loops"
    ):
        twoscale.generate(model, [[1, 2, 3]], 8, loops=100)
    for options in ({"kv": "last"}, {"kv": "ring:4"}, {"exit": twoscale.exits.Fixed(4)}):
        assert len(twoscale.generate(model, [[1, 2, 3]], 8, loops=100, **options).tokens[0]) == 8
