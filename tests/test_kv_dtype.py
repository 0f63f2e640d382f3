"""Keys and values in bf16: the kernels, batch invariance, memory, and the commands."""

import ctypes
import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import twoscale
from conftest import CommandLine
from models import LAYOUTS, loud, small_model
from twoscale import exits
from twoscale.config import UserError
from twoscale.config.dtypes import KVDtype
from twoscale.data.tokenizer import byte_tokenizer
from twoscale.engine import Engine, Scheduler, loop_params
from twoscale.engine.kernels.library import KVView, c_library, empty_floats, pointer
from twoscale.engine.request import Request, SamplingParams
from twoscale.model import LoopedGPT
from twoscale.serve.api import CompletionRequest, engine_requests

needs_kernel = pytest.mark.skipif(c_library() is None, reason="no C compiler")
RULES = (None, exits.Acceleration(0.5, normalize="steps"), exits.StepNorm(0.3, relative=True), exits.Fixed(2))


def model_of(layout: str = "default") -> LoopedGPT:
    return loud(dataclasses.replace(small_model(block_size=64), **LAYOUTS[layout]), 0, scale=0.1)


def attend(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, first: int) -> Tensor:
    """Rows (n, H, D) at positions from `first` on, of one sequence whose keys and values (J, T, D) change in place; by the C kernel."""
    (n, H, D), (J, T, _) = q.shape, keys.shape
    part, capacity, form = (ctypes.c_int64 * n)(), (ctypes.c_int64 * 1)(T), (ctypes.c_int32 * 1)(keys.dtype is torch.bfloat16)
    positions = torch.arange(first, first + n)
    addresses = [(ctypes.c_void_p * 1)(x.data_ptr()) for x in (keys, values)]
    view = KVView(
        ctypes.addressof(part), ctypes.addressof(capacity), pointer(positions, n, torch.int64), *map(ctypes.addressof, addresses),
        ctypes.addressof(form), first + n,
    )  # fmt: skip
    out, scores = torch.empty(n, H, D), empty_floats(8 * 2 * (first + n + 7))
    c_library().attend(
        2, n, H, J, D, *(x.data_ptr() for x in (q, k, v)), H * D, J * D, J * D, ctypes.addressof(view), scores.data_ptr(), out.data_ptr()
    )
    return out


@needs_kernel
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("D", [4, 8, 20, 32, 64, 72, 96])
def test_bf16_is_read_exactly(n: int, D: int) -> None:
    """Attention over keys and values in bf16 is, to the bit, attention over the same numbers in fp32; new ones are rounded as by torch."""
    chance = torch.Generator().manual_seed(D + n)
    H, J, T, first = 4, 2, 23, 15
    q, k, v = (torch.randn(n, heads, D, generator=chance) for heads in (H, J, J))
    keys, values = (torch.randn(J, T, D, generator=chance).bfloat16() for _ in range(2))
    as_fp32 = keys.float(), values.float()
    got = attend(q, k, v, keys, values, first)
    want = attend(q, k.bfloat16().float(), v.bfloat16().float(), *as_fp32, first)
    assert torch.equal(got, want)
    for rounded, new, exact in ((keys, k, as_fp32[0]), (values, v, as_fp32[1])):
        assert torch.equal(rounded[:, first : first + n], new.transpose(0, 1).bfloat16()) and torch.equal(rounded.float(), exact)


@needs_kernel
def test_rounding() -> None:
    """Ties go to even, overflow to infinity; NaN of any payload, infinity, zeros and subnormal numbers are what torch makes of them."""
    bits = [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800000, -0x00800000, 0x7F800001, 0x7FFFFFFF, -1, 1, 0x00008000, 0x00018000]
    numbers = torch.tensor([*bits, -0x80000000, 0, 0x00400000, 0x3F7FFFFF], dtype=torch.int32).view(torch.float32).view(1, 1, 16)
    keys, values = (torch.zeros(1, 4, 16, dtype=torch.bfloat16) for _ in range(2))
    attend(torch.ones(1, 1, 16), numbers, numbers, keys, values, 2)
    want = numbers[0].bfloat16()
    assert torch.equal(keys[:, 2].isnan(), want.isnan()) and int(want.isnan().sum()) == 3
    finite = ~want.isnan()
    assert torch.equal(keys[:, 2][finite].view(torch.int16), want[finite].view(torch.int16))
    assert torch.equal(values.view(torch.int16), keys.view(torch.int16)) and not keys[:, [0, 1, 3]].any()


@needs_kernel
@pytest.mark.parametrize("exit", [exits.Acceleration(1.0, normalize="steps"), None], ids=["exits", "all loops"])
@pytest.mark.parametrize("layout", ["default", "rotary, grouped queries", "odd sizes", "norm on leaving"])
def test_bits(layout: str, exit: exits.Rule | None) -> None:
    """A row's states do not depend, to the bit, on how the text is cut or on the rows beside it, also where those have fp32."""
    model = model_of(layout)
    ids = torch.randint(0, 64, (4, 23), generator=torch.Generator().manual_seed(1)).tolist()

    def states(*pieces: list[int], company: Sequence[KVDtype] = ()) -> Tensor:
        engine, found = Engine(model), []
        mine = engine.new_cache(64, loop_params(model, loops=5, exit=exit, kv_dtype="bf16"))
        others = [engine.new_cache(64, loop_params(model, loops=5, exit=exit, kv_dtype=kv_dtype)) for kv_dtype in company]
        for piece in pieces:
            beside = [(0, cache, other[: 1 + len(piece) // 2]) for cache, other in zip(others, ids[1:], strict=False)]
            found.append(engine.run([*beside, (0, mine, piece)])[0][-len(piece) :])
        return torch.cat(found)

    want = states(ids[0])
    assert torch.equal(states(*([t] for t in ids[0])), want)
    assert torch.equal(states(ids[0][:9], ids[0][9:16], ids[0][16:]), want)
    assert torch.equal(states(ids[0][:7], ids[0][7:8], ids[0][8:], company=("fp32", "bf16", "fp32")), want)


@needs_kernel
@pytest.mark.parametrize("kv", ["exact", "last", "ring:2"])
def test_scheduler(kv: str) -> None:
    """Requests with keys and values in fp32 and bf16 share batches; each has, to the bit, what it gets alone."""
    model = model_of()

    def run(chosen: Sequence[int]) -> list[object]:
        scheduler, found = Scheduler(model), []
        for i in chosen:
            params = loop_params(model, exit=RULES[i % 4], loops=4, kv=kv, kv_dtype=("bf16", "fp32", "auto")[i % 3])  # type: ignore[arg-type]
            found.append(Request([1 + i, 2, 3 + i][: 1 + i % 3], SamplingParams(0.7, seed=i, max_new_tokens=6, logprobs=2), params))
            scheduler.add(found[-1])
        while scheduler.step():
            pass
        return [(request.tokens, request.steps, request.logprobs) for request in found]

    assert run(range(9)) == [run([i])[0] for i in range(9)]


@needs_kernel
def test_more_rows_than_a_fused_call() -> None:
    """A prompt that goes operator by operator gives the bits of one in small pieces."""
    model = loud(small_model(block_size=640, n_layer=3, groups=((1,),)), scale=0.1)
    ids = torch.randint(0, 64, (600,), generator=torch.Generator().manual_seed(2)).tolist()
    engine, params = Engine(model), loop_params(model, loops=2, kv_dtype="bf16")
    whole = engine.run([(0, engine.new_cache(640, params), ids)])[0]
    cache = engine.new_cache(640, params)
    pieces = torch.cat([engine.run([(0, cache, ids[i : i + 200])])[0] for i in range(0, 600, 200)])
    assert torch.equal(whole, pieces)


@pytest.mark.parametrize("kv", ["exact", "last", "ring:2"])
@pytest.mark.parametrize("kernels", ["torch", "packed"])
def test_torch_operators(kernels: str, kv: str) -> None:
    """torch's operators store the same dtype: close to the C kernels, and different from fp32 by rounding alone."""
    model, prompts = model_of("rotary, grouped queries"), [[1, 2, 3], [4], [5] * 9, [7, 8]]

    def scores(kernels: str, kv_dtype: str) -> Tensor:
        gen = twoscale.generate(model, prompts, 1, loops=5, kv=kv, kv_dtype=kv_dtype, kernels=kernels, logprobs=0, exit=exits.Fixed(4))  # type: ignore[arg-type]
        return torch.tensor([new[0][0][1] for new in gen.logprobs or []])

    rounded, exact = scores(kernels, "bf16"), scores(kernels, "fp32")
    assert torch.equal(exact, scores(kernels, "auto")) and not torch.equal(rounded, exact)
    assert torch.allclose(rounded, exact, atol=0.05) and torch.allclose(rounded, scores("auto", "bf16"), atol=0.02)


def test_decoding_by_torch_operators() -> None:
    """Sequences of both dtypes, at different depths and lengths, decode together as they do alone."""
    model = model_of()

    def run(chosen: Sequence[int]) -> list[list[int]]:
        scheduler = Scheduler(model, kernels="torch")
        params = [loop_params(model, exit=RULES[i % 4], loops=4, kv_dtype=("bf16", "fp32")[i % 2]) for i in chosen]  # type: ignore[arg-type]
        found = [Request([1 + i] * (1 + i), SamplingParams(max_new_tokens=6), p) for i, p in zip(chosen, params, strict=True)]
        for request in found:
            scheduler.add(request)
        while scheduler.step():
            pass
        return [request.tokens for request in found]

    assert run(range(6)) == [run([i])[0] for i in range(6)]


@needs_kernel
def test_forward() -> None:
    """`forward` with a kv_dtype reads what `generate` reads: the same tokens, with exits and without."""
    model = model_of()
    for rule in (None, RULES[1]):
        gen = twoscale.generate(model, [[3, 1, 4, 1, 5]], 8, exit=rule, loops=4, kv_dtype="bf16", logprobs=0)
        whole = twoscale.forward(model, [[3, 1, 4, 1, 5, *gen.tokens[0]]], exit=rule, loops=4, kv_dtype="bf16").logits[0, 4:-1]
        assert whole.argmax(dim=-1).tolist() == gen.tokens[0]
        own = torch.tensor([token[0][1] for token in (gen.logprobs or [])[0]])
        assert torch.equal(whole.log_softmax(dim=-1).amax(dim=-1), own)
    fp32 = twoscale.forward(model, [[3, 1, 4, 1, 5]], loops=4).logits
    assert torch.allclose(twoscale.forward(model, [[3, 1, 4, 1, 5]], loops=4, kv_dtype="fp32").logits, fp32, atol=1e-4)
    assert not torch.allclose(twoscale.forward(model, [[3, 1, 4, 1, 5]], loops=4, kv_dtype="bf16").logits, fp32, atol=1e-4)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("kv", ["exact", "last", "ring:2"])
def test_memory(kernels: str, kv: str) -> None:
    """bf16 takes half the bytes, and the scheduler reserves what the cache takes."""
    model, held = model_of(), {}
    for kv_dtype in ("fp32", "bf16"):
        scheduler = Scheduler(model, kernels=kernels)  # type: ignore[arg-type]
        request = Request([1, 2, 3], SamplingParams(max_new_tokens=5), loop_params(model, loops=3, kv=kv, kv_dtype=kv_dtype))  # type: ignore[arg-type]
        scheduler.add(request)
        for _ in range(40):
            scheduler.step()
            if request.cache is not None:
                held[kv_dtype] = scheduler.reserved_bytes
                assert request.cache.nbytes <= scheduler.reserved_bytes
    assert held["fp32"] == 2 * held["bf16"]


@pytest.mark.parametrize("kv_dtype", ["int8", "fp16", "", None, 16])
def test_bad_dtype(kv_dtype: object) -> None:
    """Other dtypes are refused in one line by all that take one."""
    model = model_of()
    for call in (lambda: twoscale.generate(model, [[1]], 1, kv_dtype=kv_dtype), lambda: twoscale.forward(model, [[1]], kv_dtype=kv_dtype)):  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"kv_dtype = .*fp32, bf16"):
            call()


def test_commands(cli: CommandLine) -> None:
    """generate takes it, says how much is held, and refuses other words; so do serve and the benches."""
    words = ("generate", "bundled", "The old man", "--max-new-tokens", 3, "--loops", 3, "--temperature", 0)
    held = {}
    for kv_dtype in ("fp32", "bf16"):
        code, _, err = cli(*words, "--kv-dtype", kv_dtype)
        assert code == 0, err
        held[kv_dtype] = float(err.split("keys and values held ")[1].split()[0])
    assert held["bf16"] <= held["fp32"] / 2 + 0.1
    for command in (words, ("serve", "bundled"), ("bench", "serve"), ("bench", "decode"), ("bench", "quantize")):
        assert cli(*command, "--kv-dtype", "int8")[0] == 2
    code, _, err = cli("serve", "bundled", "--engine", "vllm", "--kv-dtype", "bf16")
    assert code == 2 and "--kv-dtype does not go with --engine vllm" in err
    code, _, err = cli("bench", "serve", "--soak", 1, "--kv-dtype", "bf16")
    assert code == 2 and len(err.strip().splitlines()) == 1


def test_served_requests() -> None:
    """Every request to a server has the server's dtype of keys and values."""
    model, body = model_of(), CompletionRequest(prompt=[1, 2], max_tokens=3, n=2)
    requests = engine_requests(body, [[1, 2]], model, byte_tokenizer().eot, None, 8, kv_dtype="bf16")
    assert [r.loop_params.kv_dtype for r in requests] == ["bf16", "bf16"]
    assert {r.loop_params.kv_dtype for r in engine_requests(body, [[1, 2]], model, byte_tokenizer().eot, None, 8)} == {"auto"}


def test_benches(cli: CommandLine) -> None:
    """Time at long contexts, beyond the preset's own; bytes; change of the loss; the scheduler under load."""
    code, out, err = cli("bench", "decode", "--preset", "nano", "--kv-dtype", "bf16", "--contexts", 8, 100, "--loops", 2, "--repeats", 1)
    assert code == 0 and "context    100" in out and "32 loops  last" in out, err
    assert cli("bench", "decode", "--kv-dtype", "bf16", "--dtype", "int8")[0] == 2
    code, out, err = cli("bench", "quantize", "hops", "--windows", 2, "--loops", 2, "--dtype", "--kv-dtype", "bf16")
    assert code == 0 and "kv bf16 " in out and "step norm" in out, err
    assert cli("bench", "quantize", "hops", "--windows", 2, "--dtype")[0] == 2
    assert "distance" not in out and cli("bench", "quantize", "hops", "--dtype", "--kv-dtype", "bf16", "--figure", "x.png")[0] == 2
    pytest.importorskip("uvicorn", reason="uvicorn is not installed (the extra twoscale[serve])")
    code, out, err = cli(
        "bench", "serve", "--preset", "nano", "--mixed", "--kv-dtype", "bf16", "--rounds", 1, "--seconds", 0.2, "--clients", 2
    )
    assert code == 0 and "eight rules" in out, err
