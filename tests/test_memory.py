"""The engine's memory: buffers that C code reads and writes, the packed copy of the weights, and threads that share a model."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

import twoscale
from conftest import small_model
from test_model import loud
from twoscale.engine import Engine, cache, fingerprint as fingerprints, loop, quick
from twoscale.engine.native import _whole, input_and_output, native, pointer, row_pointer
from twoscale.engine.rows import Rows, part_of
from twoscale.model import LoopedGPT

HERE = Path(__file__).parent
HEAD = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, twoscale
from conftest import small_model
from test_model import loud
from twoscale import exits
torch.set_num_threads(1)
"""


def run(script: str, *args: str, **env: str) -> str:
    """The output of a script in a process of its own: a crash there is a failed test here, not the end of pytest."""
    command = [sys.executable, "-c", HEAD + script, str(HERE), *args]
    result = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stdout[-2000:]}{result.stderr[-2000:]}"
    return result.stdout


DEFAULTS = """
from copy import deepcopy
used = loud(small_model(positions="rotary", mlp="gated"), scale=0.1)
fresh = deepcopy(used)

def answers(model):
    found = []
    for kernels in ("auto", "packed", "plain"):
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
    engine = Engine(loud(small_model()), loops=2)
    cache = engine.open(3)
    rows = Rows([part_of(0, cache, 3, 1)], torch.tensor([[3], [0], [0]]), engine.library)
    with pytest.raises(IndexError, match="position 3 lies outside a cache for 3 tokens"):
        engine.plain(0, engine.model.embed(rows.tokens, rows.positions), None, rows)


def test_half_precision_model() -> None:
    """A model in bf16 decodes on torch's operators, with states, keys and values in bf16."""
    model = loud(small_model(), scale=0.1).bfloat16()
    engine = Engine(model, loops=3)
    assert engine.library is None and engine.open(4).layers[0].keys.dtype == torch.bfloat16
    assert twoscale.generate(model, [[1, 2, 3]], 4).tokens == twoscale.generate(model, [[1, 2, 3]], 4, kernels="plain").tokens


def fused_adamw(model: LoopedGPT) -> None:
    """What the Trainer of transformers does by default."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2, 3, 4, 5]])).backward()
    optimizer.step()


def data_in_place(model: LoopedGPT) -> None:
    for p in model.parameters():
        p.data.mul_(-1.3)


def numpy_view(model: LoopedGPT) -> None:
    for p in model.parameters():
        p.detach().numpy()[...] *= -1.3


def other_data(model: LoopedGPT) -> None:
    for p in model.parameters():
        p.data = p.detach() * -1.3


def one_entry(model: LoopedGPT) -> None:
    list(model.parameters())[-2].data.view(-1)[-1] += 30.0


CHANGES = [fused_adamw, data_in_place, numpy_view, other_data, one_entry]


def wide_model() -> LoopedGPT:
    """Wide enough that packing pays."""
    model = LoopedGPT(small_model(n_embd=512, n_head=8, n_layer=2, groups=((1,),)), seed=None)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.03)
    return model.eval()


def states(model: LoopedGPT, kernels: str) -> torch.Tensor:
    engine = Engine(model, loops=3, kernels=kernels)
    cache = engine.open(9)
    return torch.cat([engine.run([(0, cache, ids)])[0] for ids in ([1, 2, 3], [4], [5])])


def same_as_fresh(model: LoopedGPT, kernels: str) -> bool:
    """Whether a model decodes, to the bit, as a new one with the same weights does."""
    fresh = LoopedGPT(model.config, seed=None)
    fresh.load_state_dict(model.state_dict())
    return torch.equal(states(model, kernels), states(fresh, kernels))


@pytest.mark.parametrize("kernels", ["auto", "packed", "plain"])
def test_weights_that_change(kernels: str) -> None:
    """Decoding uses the weights as they are at the call, however they were changed since the last one."""
    stale = []
    for change in CHANGES:
        model = wide_model()
        states(model, kernels)
        change(model)
        if not same_as_fresh(model, kernels):
            stale.append(change.__name__)
    assert stale == []


@pytest.mark.parametrize("kernels", ["auto", "packed", "plain"])
def test_inference_mode_weights_that_change(kernels: str) -> None:
    """The same for a model that was made in inference mode, whose parameters have no version counter."""
    with torch.inference_mode():
        model = wide_model()
        states(model, kernels)
        for p in model.parameters():
            p.mul_(-1.3)
        assert same_as_fresh(model, kernels)


def test_weights_that_change_under_transformers() -> None:
    """A model under transformers generates with its new weights after a step of the fused optimizer."""
    from twoscale.config.serial import to_dict
    from twoscale.interop.hf import TwoscaleConfig, TwoscaleForCausalLM

    config = TwoscaleConfig(twoscale=to_dict(small_model()))
    wrapped, fresh = TwoscaleForCausalLM(config), TwoscaleForCausalLM(config)
    wrapped.model.load_state_dict(loud(small_model(), scale=0.1).state_dict())

    def logits(model: TwoscaleForCausalLM) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([[1, 2, 3, 4]]), use_cache=True, loops=3).logits

    before = logits(wrapped)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.01, fused=True)
    wrapped(torch.tensor([[1, 2, 3, 4]]), labels=torch.tensor([[1, 2, 3, 4]])).loss.backward()
    optimizer.step()
    fresh.load_state_dict(wrapped.state_dict())
    assert torch.equal(logits(wrapped), logits(fresh)) and not torch.equal(logits(wrapped), before)


def changed(data: st.DataObject, weight: torch.Tensor) -> None:
    """Change fp32 weights, given as int32: a bit of one entry, the signs of one or two, swap two, or change two such that the sum stays."""
    bits = weight.view(-1)
    i, j = data.draw(st.lists(st.integers(0, len(bits) - 1), min_size=2, max_size=2, unique=True))
    match data.draw(st.sampled_from(["bit", "sign", "two signs", "swap", "sum"])):
        case "bit":
            bits[i] ^= 1 << data.draw(st.integers(0, 30))
        case "sign":
            bits[i] ^= -(1 << 31)
        case "two signs":
            bits[i] ^= -(1 << 31)
            bits[j] ^= -(1 << 31)
        case "swap":
            bits[i], bits[j] = int(bits[j]), int(bits[i])
        case "sum":
            step = data.draw(st.integers(1, 1000))
            bits[i] += step
            bits[j] -= step


@pytest.mark.parametrize("with_library", [True, False])
def test_fingerprint(with_library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of one entry or two of any weight changes the fingerprint; taken back, it is the old one, for any number of threads."""
    if with_library and native() is None:
        pytest.skip("no C compiler on this machine")
    if not with_library:
        monkeypatch.setattr(fingerprints, "native", lambda: None)
    model = loud(small_model(n_embd=36, n_head=3, mlp_hidden=50, block_size=4000))  # wpe is more than one piece of 2^18 bytes
    weights, want = dict(model.named_parameters()), fingerprints.fingerprint(model)

    @given(st.data())
    @settings(max_examples=200, deadline=None, derandomize=True)
    def check(data: st.DataObject) -> None:
        bits = weights[data.draw(st.sampled_from(sorted(weights)))].detach().view(torch.int32)
        torch.set_num_threads(data.draw(st.integers(1, 3)))
        before = bits.clone()
        try:
            changed(data, bits)
            assert (fingerprints.fingerprint(model) == want) == torch.equal(bits, before)
        finally:
            bits.copy_(before)
        assert fingerprints.fingerprint(model) == want

    check()


@pytest.mark.parametrize("kernels", ["auto", "packed"])
def test_engine_owns_its_weights(kernels: str) -> None:
    """An engine decodes with the weights as they were when it was made, to the bit, though they change or are freed meanwhile."""
    model = wide_model()
    want = states(model, kernels)
    engine = Engine(model, loops=3, kernels=kernels)
    cache = engine.open(9)
    found = [engine.run([(0, cache, [1, 2, 3])])[0]]
    numpy_view(model)
    found.append(engine.run([(0, cache, [4])])[0])
    other_data(model)
    found.append(engine.run([(0, cache, [5])])[0])
    assert torch.equal(torch.cat(found), want)


def test_more_rows_than_the_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows beyond what the C kernels take go through a copy made from theirs, so that all rows see the same weights."""
    monkeypatch.setattr(quick, "ROWS", 4)
    model = wide_model()
    engine = Engine(model, loops=3)
    data_in_place(model)
    data_in_place(model)
    before = wide_model()
    for p, q in zip(before.parameters(), model.parameters(), strict=True):
        p.data.copy_(q.detach() / 1.69)
    x, weight = torch.randn(5, 512), before.stages[0].blocks[0].attn.qkv.weight
    linear = engine.model.stages[0].blocks[0]
    linear = getattr(linear, "block", linear).attn.qkv
    for n in (1, 4, 5):
        assert torch.allclose(linear(x[:n]), torch.nn.functional.linear(x[:n], weight), atol=1e-4)


def test_scheduler_reads_the_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler serves the weights as they were when it was made; requests do not read all weights again."""
    from twoscale.serve.job import Job, Settings
    from twoscale.serve.scheduler import Scheduler

    model = loud(small_model(), scale=0.1)
    want = twoscale.generate(model, [[1, 2, 3]], 6, loops=3).tokens[0]
    scheduler, reads = Scheduler(model), []
    monkeypatch.setattr(quick, "fingerprint", lambda model: reads.append(model))
    data_in_place(model)
    for seed in (0, 0, 1):
        job = Job([1, 2, 3], 6, Settings((None, None), (3, 3), seed=seed))
        scheduler.submit(job)
        while scheduler.step():
            pass
        assert job.tokens == want or seed
    assert reads == []


def at_once(work: Callable[[int], object], n: int = 4) -> list[object]:
    """work(0) .. work(n - 1) by n threads that start together."""
    barrier = threading.Barrier(n)

    def one(i: int) -> object:
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(one, range(n)))


FIRST_USE = """
import time
from collections import Counter
from test_memory import at_once
from twoscale.engine import quick

if quick.native() is not None:
    panels, packed = quick.panels, Counter()

    def slow_panels(weight):
        packed[weight.data_ptr()] += 1
        time.sleep(0.005)  # the others get here meanwhile, if they may
        return panels(weight)

    quick.panels = slow_panels
    model = loud(small_model(), scale=0.1)
    found = at_once(lambda i: twoscale.generate(model, [[1, 2, 3]], 8).tokens)
    assert max(packed.values()) == 1, packed
    assert found == [twoscale.generate(model, [[1, 2, 3]], 8).tokens] * 4
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

    monkeypatch.setattr(loop, "_TABLES", Slow())
    want = [twoscale.generate(model, [[1, 2, 3]], 8, seed=i).tokens for i in range(4)]
    for _ in range(3):
        assert at_once(lambda i: twoscale.generate(model, [[1, 2, 3]], 8, seed=i).tokens) == want


def test_library_by_threads() -> None:
    """The kernels are loaded once, whoever asks first."""
    if native() is None:
        pytest.skip("no C compiler on this machine")
    native.cache_clear()
    assert len({id(library) for library in at_once(lambda i: native())}) == 1


KERNELS = """
from pathlib import Path
from twoscale.engine.native import native
model = loud(small_model(), scale=0.1)
print(native() is not None, twoscale.generate(model, [[1, 2, 3]], 8).tokens)
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
    assert any(_whole(path) for path in folder.glob("twoscale/native-*.so"))


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    """Two processes that need the kernels at the same time both get them, and leave only whole libraries behind."""
    if native() is None:
        pytest.skip("no C compiler on this machine")
    found = at_once(lambda i: run(KERNELS, XDG_CACHE_HOME=str(tmp_path)), 2)
    assert found[0] == found[1] and str(found[0]).startswith("True")
    names = [path.name for path in (tmp_path / "twoscale").iterdir()]
    assert names and all(_whole(tmp_path / "twoscale" / name) for name in names), names


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
    monkeypatch.setattr(cache, "LARGE", 1 << 14)
    monkeypatch.setattr(cache, "free_memory", lambda: 1 << 16)
    model = loud(small_model(), scale=0.1)
    with pytest.raises(
        twoscale.UserError, match=r"keys and values of \d+ loop steps and 10 tokens need .* GB are free: ask for fewer loops"
    ):
        twoscale.generate(model, [[1, 2, 3]], 8, loops=100)
    for options in ({"kv": "last"}, {"kv": "ring:4"}, {"exit": twoscale.exits.Fixed(4)}):
        assert len(twoscale.generate(model, [[1, 2, 3]], 8, loops=100, **options).tokens[0]) == 8
