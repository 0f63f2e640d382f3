"""`twoscale.load` on folders of published families: single and sharded, and everything that a hostile or broken folder may hold."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import twoscale
from families import HUGINN, OURO, folder, huginn_tensors, ouro_tensors
from twoscale.config import UserError
from twoscale.interop.weights import INDEX, SINGLE


@pytest.mark.parametrize("config,tensors", [(OURO, ouro_tensors), (HUGINN, huginn_tensors)], ids=["ouro", "huginn"])
def test_sharded(config: dict[str, Any], tensors: Callable[[], dict[str, Tensor]], tmp_path: Path) -> None:
    """Weights in one file or in several give the same model, which decodes, traces and leaves early."""
    single, tokenizer = twoscale.load(folder(tmp_path / "single", config, tensors()))
    assert tokenizer is None
    shards = folder(tmp_path / "shards", config, None)
    names = sorted(tensors())
    placed = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(names)}
    for file in set(placed.values()):
        save_file({name: tensors()[name] for name in names if placed[name] == file}, shards / file)
    (shards / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    several, _ = twoscale.load(shards)
    ids = [[1, 5, 9, 3], [2, 4]]
    assert torch.equal(twoscale.forward(single, ids).logits, twoscale.forward(several, ids).logits)
    assert single.config.vocab_size == (70 if config is OURO else 64) and twoscale.trace(single, ids, loops=3).states[0].shape[0] == 4
    gen = twoscale.generate(single, ids, 5, exit=twoscale.exits.StepNorm(3.0), loops=6)
    assert len(gen.tokens[1]) == 5
    if config is OURO:
        assert twoscale.generate(single, ids, 5, exit=twoscale.exits.Gate(0.5), loops=4).work[0] < 4 * 14


class Bomb:
    """Runs when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.write_text, (self.mark, "boom")


def without(name: str) -> dict[str, Tensor]:
    return {k: v for k, v in ouro_tensors().items() if k != name}


CONFIGS = [
    ("a billion layers", OURO | {"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ("a billion looped layers", HUGINN | {"n_layers_in_recurrent_block": 10**9}, "n_layers_in_recurrent_block"),
    ("too wide", OURO | {"hidden_size": 10**9}, "parameters"),
    ("too many words", HUGINN | {"padded_vocab_size": 10**12}, "parameters"),
    ("another vocabulary", OURO | {"vocab_size": 10**6}, "shape"),
    ("another activation", OURO | {"hidden_act": "gelu"}, "hidden_act"),
    ("scaled rotary", OURO | {"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
    ("scaled rotary, new way", OURO | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}}, "rope_type"),
    ("sliding windows", OURO | {"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
    ("no number", OURO | {"rope_theta": "big"}, "rope_theta"),
    ("heads that do not divide", OURO | {"num_attention_heads": 5}, "n_embd = 32"),
    ("a missing setting", {k: v for k, v in OURO.items() if k != "total_ut_steps"}, "total_ut_steps"),
    ("another injection", HUGINN | {"injection_type": "add"}, "injection_type"),
    ("another start", HUGINN | {"state_init": "embed"}, "state_init"),
    ("noise while testing", HUGINN | {"test_time_noise": 0.3}, "test_time_noise"),
    ("layers that do not add up", HUGINN | {"n_layers": 9}, "n_layers = 9"),
    ("another scale of the embedding", HUGINN | {"init_values": {"embed_scale": 3.0}}, "embed_scale"),
    ("an untied head", HUGINN | {"tie_word_embeddings": False}, "tie_word_embeddings"),
    ("a sliding window", OURO | {"use_sliding_window": True}, "use_sliding_window"),
    ("a number of many digits", OURO | {"rope_theta": 10**400}, "rope_theta"),
    ("kinds that are lists", OURO | {"layer_types": [[1]]}, "layer_types"),
    ("a family that is a list", {"model_type": ["ouro"]}, "neither a run nor a checkpoint"),
    ("another family", {"model_type": "gpt_neox"}, "gpt_neox"),
    ("no family", [], "neither a run nor a checkpoint"),
]


@pytest.mark.parametrize("config,word", [c[1:] for c in CONFIGS], ids=[c[0] for c in CONFIGS])
def test_bad_configs(config: Any, word: str, tmp_path: Path) -> None:
    """A setting that is not supported, or cannot be meant, is named; nothing of that size is ever made."""
    kind = config.get("model_type") if isinstance(config, dict) else None
    tensors = huginn_tensors() if kind == "huginn_raven" else ouro_tensors() if kind == "ouro" else None  # a list is neither
    with pytest.raises(UserError, match=word) as error:
        twoscale.load(folder(tmp_path, config, tensors))
    assert "\n" not in str(error.value)


WEIGHTS = [
    ("a weight is missing", without("model.norm.weight"), "lacks the weight model.norm.weight"),
    ("one more weight", ouro_tensors() | {"model.layers.7.mlp.up_proj.weight": torch.zeros(2, 2)}, "model.layers.7.mlp.up_proj.weight"),
    ("a wrong shape", ouro_tensors() | {"model.layers.0.self_attn.o_proj.weight": torch.zeros(32, 31)}, "attn.out.weight"),
    ("a shape that cannot be joined", ouro_tensors() | {"model.layers.0.self_attn.q_proj.weight": torch.zeros(32, 31)}, "another shape"),
    ("a scalar", ouro_tensors() | {"model.embed_tokens.weight": torch.zeros(())}, "shape"),
]


@pytest.mark.parametrize("tensors,word", [w[1:] for w in WEIGHTS], ids=[w[0] for w in WEIGHTS])
def test_bad_weights(tensors: dict[str, Tensor], word: str, tmp_path: Path) -> None:
    """Missing, unknown and misshapen weights are named."""
    with pytest.raises(UserError, match=word) as error:
        twoscale.load(folder(tmp_path, OURO, tensors))
    assert "\n" not in str(error.value)


def test_pickles_are_never_read(tmp_path: Path) -> None:
    """A folder that only has a pickle is refused, and what the pickle would have done is not done."""
    mark = tmp_path / "mark"
    target = folder(tmp_path / "model", OURO, None)
    (target / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    (target / "modeling_ouro.py").write_text(f"open({str(mark)!r}, 'w').write('boom')\n")
    with pytest.raises(UserError, match="pickle"):
        twoscale.load(target)
    assert not mark.exists()


@pytest.mark.parametrize(
    "index,word",
    [
        ({"weight_map": {"model.norm.weight": "../outside.safetensors"}}, "outside"),
        ({"weight_map": {"model.norm.weight": "/etc/passwd"}}, "passwd"),
        ({"weight_map": {"model.norm.weight": "pytorch_model.bin"}}, "pytorch_model.bin"),
        ({"weight_map": {"model.norm.weight": "gone.safetensors"}}, "does not exist"),
        ({"weight_map": {"model.norm.weight": "part.safetensors", "model.other": "part.safetensors"}}, "model.other"),
        ({"weight_map": {"model.other": "part.safetensors"}}, "does not place there"),
        ({"weight_map": {"model.norm.weight": 3}}, "weight_map"),
        ({"weight_map": {}}, "weight_map"),
        ([], "weight_map"),
    ],
)
def test_bad_index(index: object, word: str, tmp_path: Path) -> None:
    """An index reaches no file outside its folder, and must tell the truth."""
    target = folder(tmp_path / "model", OURO, None)
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "outside.safetensors")
    save_file({"model.norm.weight": torch.ones(32)}, target / "part.safetensors")
    (target / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=word):
        twoscale.load(target)


@pytest.mark.parametrize("size", [0, 5, 60, 5000])
def test_truncated(size: int, tmp_path: Path) -> None:
    """A file that was cut anywhere is named."""
    target = folder(tmp_path, OURO, ouro_tensors())
    data = (target / SINGLE).read_bytes()
    (target / SINGLE).write_bytes(data[:size])
    with pytest.raises(UserError, match="truncated or no safetensors"):
        twoscale.load(target)


def test_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A name that is no folder is fetched: safetensors and JSON alone; where that fails the reason is told in one line."""
    asked: list[Any] = []
    target = folder(tmp_path / "model", OURO, ouro_tensors())
    import huggingface_hub

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "no/such":
            raise OSError("401 Client Error\nand much more")
        return str(target)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert twoscale.load("ByteDance/Ouro-tiny")[0].config.n_layer == 2 and asked[0][1] == ["*.safetensors", "*.json"]
    with pytest.raises(UserError, match=r"the hub did not give it: 401 Client Error$"):
        twoscale.load("no/such")
    with pytest.raises(UserError, match="is no folder"):
        twoscale.load(tmp_path / "nothing")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_default_dtype(dtype: torch.dtype) -> None:
    """A model is loaded in fp32 whatever torch's default dtype is."""
    torch.set_default_dtype(dtype)
    try:
        model, _ = twoscale.load("bundled")
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
