"""The vLLM plugin: looped folders in vLLM answer as our engine does. Run by `make test-vllm`, in an environment of its own."""

import gc
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import twoscale
from conftest import ROOT
from models import save_folder, small_model
from twoscale.config import ModelConfig
from twoscale.interop.export import export
from twoscale.interop.vllm_plugin import installed_vllm

if installed_vllm() is None:
    pytest.skip("vLLM is not installed here: `make test-vllm` makes an environment for it", allow_module_level=True)

import httpx

from twoscale.serve.local import listen

# In this process, without the network, without threads that spin or are bound to cores, and without torch's compiler, which vLLM calls for
# a function of the logprobs and which takes longer than all tests.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "KMP_BLOCKTIME": "0",
    "TORCH_COMPILE_DISABLE": "1",
}

GOLDEN = ROOT / "tests" / "golden"
NEW = 64
THREE = small_model(vocab_size=257, block_size=128, groups=((0,), (1, 2), (4,)))  # the paper's block, learned positions, tied head
OTHER = small_model(
    vocab_size=257, block_size=128, groups=((1,), (2, 3)), positions="rotary", n_kv_head=2, mlp="gated", qk_bias=True, inject="add",
    noise="every_step", norm="branch", group_norm="leave", tie_head=False,
)  # fmt: skip


def exported(config: ModelConfig, root: Path) -> Path:
    """An export of a model with random weights."""
    return export(save_folder(config, root / "source"), root / "export")


@pytest.fixture(autouse=True)
def _two_threads() -> None:
    """One thread: models this small spend their time waiting for a second one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def three_groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(THREE, tmp_path_factory.mktemp("three"))


@contextmanager
def vllm_engine(folder: Path, ranks: int = 1, **overrides: Any) -> Iterator[Any]:
    """A folder in vLLM; a step takes at most 96 tokens, so prompts are cut."""
    from vllm import LLM

    engine = LLM(
        model=str(folder), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, hf_overrides=overrides, max_num_seqs=16,
        max_num_batched_tokens=96, max_model_len=128, kv_cache_memory_bytes=1 << 28, max_logprobs=8, disable_log_stats=True,
        tensor_parallel_size=ranks,
    )  # fmt: skip
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()


def prompts(vocab_size: int) -> list[list[int]]:
    """16 prompts of 3 to 48 tokens."""
    g = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab_size, (3 * i + 3,), generator=g).tolist() for i in range(16)]


def complete(engine: Any, ids: list[list[int]], new: int, **more: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False, **more)
    return engine.generate([{"prompt_token_ids": row} for row in ids], params, use_tqdm=False)


def assert_same_answers(engine: Any, folder: Path, **params: Any) -> None:
    """Greedy tokens of 16 ragged prompts are those of our engine, and logprobs of the eight likeliest are within 1e-3."""
    model, _ = twoscale.load(folder)
    ids = prompts(model.config.vocab_size)
    answers, ours = complete(engine, ids, NEW, logprobs=8), twoscale.generate(model, ids, NEW, **params).tokens
    assert [list(a.outputs[0].token_ids) for a in answers] == ours
    for row, new, answer in zip(ids, ours, answers, strict=True):
        want = twoscale.forward(model, [row + new], **params).logits[0].log_softmax(-1)[len(row) - 1 : -1]
        for at, found in zip(want, answer.outputs[0].logprobs, strict=True):
            assert max(abs(at[token].item() - entry.logprob) for token, entry in found.items()) < 1e-3


def prompt_logprobs(answer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(position of the next token, token, logprob) of all entries that vLLM gives for the prompt."""
    entries = [(i, t, e.logprob) for i, found in enumerate(answer.prompt_logprobs) if found for t, e in found.items()]
    return tuple(torch.tensor(column) for column in zip(*entries, strict=True))  # type: ignore[return-value]


def test_ouro() -> None:
    """An Ouro folder: its own code's logprobs and greedy tokens (golden file); ours over 64 tokens, 16 ragged prompts."""
    expected = load_file(GOLDEN / "ouro-tiny" / "expected.safetensors")
    with vllm_engine(GOLDEN / "ouro-tiny", loops=4) as engine:
        rows = expected["input_ids"].tolist()
        for row, want, answer in zip(rows, expected["logits"], complete(engine, rows, 1, prompt_logprobs=8), strict=True):
            at, token, found = prompt_logprobs(answer)
            assert len(at) >= 8 * (len(row) - 1) and torch.allclose(want.log_softmax(-1)[at - 1, token], found, atol=1e-3)
        greedy = expected["greedy"][0].tolist()
        assert list(complete(engine, [greedy[:12]], len(greedy) - 12)[0].outputs[0].token_ids) == greedy[12:]
        assert_same_answers(engine, GOLDEN / "ouro-tiny", loops=4)


def test_huginn() -> None:
    """A Huginn folder: its own code's greedy tokens from a zero state (golden file); ours from the keyed noise."""
    greedy = load_file(GOLDEN / "huginn-tiny" / "expected.safetensors")["greedy_zero_state_8"][0].tolist()
    with vllm_engine(GOLDEN / "huginn-tiny", loops=8, state_init="zero") as engine:
        assert list(complete(engine, [greedy[:12]], len(greedy) - 12)[0].outputs[0].token_ids) == greedy[12:]
    with vllm_engine(GOLDEN / "huginn-tiny", loops=8) as engine:
        assert_same_answers(engine, GOLDEN / "huginn-tiny", loops=8)


def test_three_groups(three_groups: Path) -> None:
    """An export with three groups, each with its own depth."""
    with vllm_engine(three_groups, loops=[2, 5, 3]) as engine:
        assert_same_answers(engine, three_groups, loops=[2, 5, 3])


def test_other_blocks(tmp_path: Path) -> None:
    """Rotary positions, grouped queries with a bias, gated MLP, other norms, noise at every step, a head of its own; default depth."""
    folder = exported(OTHER, tmp_path)
    with vllm_engine(folder) as engine:
        assert_same_answers(engine, folder)


def test_exits(three_groups: Path) -> None:
    """With exit rules vLLM's tokens and logprobs are those of our engine, though tokens leave at different steps, and no row that has
    left is computed: the rows of all looped layers add up to the steps that our engine counts."""
    rules = ["acceleration:3.0", "step-norm:1.5", "fixed:3"]
    params: dict[str, Any] = {"exit": dict(enumerate(rules)), "loops": 9}
    model, _ = twoscale.load(three_groups)
    ids = prompts(257)
    with vllm_engine(three_groups, exit=rules, loops=9) as engine:
        assert_same_answers(engine, three_groups, **params)
        engine.apply_model(_count_rows)
        complete(engine, [row[::-1] for row in ids], 8)
        [rows] = engine.apply_model(lambda module: module.rows)
    gen = twoscale.generate(model, [row[::-1] for row in ids], 8, **params)
    # the last token of a text is never run through the model, neither here nor there
    assert rows == list(gen.work)
    taken = [steps for row in gen.prompt_steps for steps in row]
    assert all(len({steps[g] for steps in taken}) > 2 for g in (0, 1)), "the rules should spread the tokens"


def test_two_ranks(tmp_path: Path) -> None:
    """Two ranks that share heads, inner channels and vocabulary: the answers of our engine, in one group at a fixed depth, in one with a
    rule. The ranks are processes of their own."""
    folder = exported(OTHER, tmp_path)
    with vllm_engine(folder, ranks=2, loops=4, exit=[None, "acceleration:3.0"]) as engine:
        assert_same_answers(engine, folder, loops=4, exit={1: "acceleration:3.0"})


def test_server(three_groups: Path) -> None:
    """`twoscale serve --engine vllm` answers over HTTP as our engine does."""
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    words = ["serve", str(three_groups), "--engine", "vllm", "--port", str(port), "--cache-mb", "64", "--hf-overrides", '{"loops": 3}']
    body = {"model": three_groups.name, "prompt": [3, 1, 4, 1, 5], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with subprocess.Popen([sys.executable, "-m", "twoscale", *words], stdout=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 300
            while True:
                assert process.poll() is None and time.monotonic() < deadline, "vLLM's server did not start"
                with suppress(httpx.TransportError):
                    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={**body, "return_token_ids": True}, timeout=60)
                    break
                time.sleep(0.5)
        finally:
            process.terminate()
    model, _ = twoscale.load(three_groups)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == twoscale.generate(model, [body["prompt"]], 8, loops=3).tokens[0]


def _count_rows(module: Any) -> None:
    groups = [stage for stage in module.stages if hasattr(stage, "rule")]
    module.rows = [0] * len(groups)

    def hook(g: int) -> Any:
        def count(qkv: Any, inputs: tuple[Tensor, ...]) -> None:
            module.rows[g] += len(inputs[0])

        return count

    for g, group in enumerate(groups):
        group.blocks[0].attn.qkv.register_forward_pre_hook(hook(g))


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ({"loops": [2, 5]}, "loops has 2 entries, the model has 3 groups"),
        ({"loops": 0}, "a group takes an integer number of steps, at least 1"),
        ({"loops": 20_000}, "at most 10000 steps"),
        ({"exit": "kl:0.01"}, "exit rule KL of group 0 does not run in vLLM"),
    ],
)
def test_bad_depth(three_groups: Path, overrides: dict[str, Any], line: str) -> None:
    """A depth that the folder cannot do is refused in vLLM's first process, before weights are read."""
    with pytest.raises(ValueError, match=line), vllm_engine(three_groups, **overrides):
        pass
