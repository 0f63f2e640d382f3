"""Published looped models as LoopedGPT: what their config.json says, and where their weights go.

Huginn (model_type huginn_raven): 2 plain layers, 4 that loop, 2 plain ones; [state; input] is injected by a learned map; the final norm
is also what the loop is left through; rotary pairs lie side by side, (0, 1), (2, 3), ..., ours half a head apart.

Ouro (model_type ouro): the whole stack loops; norms on the branch; the final norm after every loop; a gate says when to leave.

Llama and what is shaped like it (model_type llama, mistral): a plain decoder, no loops; `twoscale convert` makes groups of its layers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from twoscale.config import ModelConfig, UserError
from twoscale.config.model import MAX_LAYERS

Raw = Mapping[str, Tensor]
Ours = dict[
    str, Callable[[], Tensor]
]  # our weights by name, each made of theirs when it is asked for: a folder may be larger than the memory


def huginn_config(settings: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a Huginn folder's config.json."""
    _only(
        settings,
        block_class_name=("SandwichBlock",), norm_class_name=("RMSNorm_llama",), mlp_class_name=("GatedMLP",), nonlin_name=("SiLU",),
        injection_type=("linear",), state_init=("like-init", "zero"), bias=(False,), tie_embeddings=(True,), test_time_noise=(0, 0.0, None),
        num_key_value_heads=(None, settings.get("n_heads")), tie_word_embeddings=(True,),
    )  # fmt: skip
    values = settings.get("init_values")
    if isinstance(values, dict) and isinstance(values.get("embed_scale"), int | float):
        _close("init_values.embed_scale", values["embed_scale"], _whole(settings, "n_embd") ** 0.5)
    prelude, core, coda = (_whole(settings, f"n_layers_in_{part}", MAX_LAYERS) for part in ("prelude", "recurrent_block", "coda"))
    if "n_layers" in settings and _whole(settings, "n_layers") != prelude + core + coda:
        raise UserError(
            f"config.json: n_layers = {settings['n_layers']}, but prelude, recurrent block and coda have {prelude + core + coda}"
        )
    return ModelConfig(
        vocab_size=_whole(settings, "padded_vocab_size" if "padded_vocab_size" in settings else "vocab_size"),
        block_size=_whole(settings, "block_size"), n_layer=prelude + core + coda,
        n_head=_whole(settings, "n_heads"), n_embd=_whole(settings, "n_embd"),
        groups=(tuple(range(prelude, prelude + core)),), qk_bias=bool(settings.get("qk_bias", False)),
        positions="rotary", rope_base=_number(settings, "rope_base"), mlp="gated", mlp_hidden=_whole(settings, "intermediate_size"),
        norm_eps=_number(settings, "norm_eps"), group_norm="leave", share_group_norm=True, mean_loops=_whole(settings, "mean_recurrence"),
        start="zeros" if settings.get("state_init") == "zero" else "noise",
    )  # fmt: skip


def huginn_weights(raw: Raw, c: ModelConfig) -> Ours:
    """Our weights from Huginn's."""
    t: Ours = {"wte.weight": _embedding(raw, "transformer.wte.weight", c), "ln_f.weight": _same(raw, "transformer.ln_f.weight")}
    (loop,) = c.groups
    parts = (("prelude", loop[0]), ("core_block", len(loop)), ("coda", c.n_layer - loop[-1] - 1))
    used = [(part, n) for part, n in parts if n]
    for stage, (part, n) in enumerate(used):
        if part == "core_block":
            t[f"stages.{stage}.adapter.weight"] = _same(raw, "transformer.adapter.weight")
        for i in range(n):
            t |= _huginn_layer(raw, c, f"transformer.{part}.{i}.", f"stages.{stage}.blocks.{i}.")
    return t


def _huginn_layer(raw: Raw, c: ModelConfig, old: str, new: str) -> Ours:
    def qkv() -> Tensor:
        q, k, v = raw[old + "attn.Wqkv.weight"].chunk(3)
        return torch.cat((_unpaired(q, c.n_head), _unpaired(k, c.n_head), v))

    def qk_bias() -> Tensor:
        bias = raw[old + "attn.qk_bias"].squeeze(1)
        return torch.cat([_unpaired(b.flatten(), c.n_head).view(c.n_head, c.head_dim) for b in bias])

    names = {"attn.out": "attn.proj", "mlp.up": "mlp.fc", "mlp.down": "mlp.proj", **{f"norm{j}": f"norm_{j}" for j in (1, 2, 3, 4)}}
    t: Ours = {f"{new}{ours}.weight": _same(raw, f"{old}{theirs}.weight") for ours, theirs in names.items()}
    return t | {new + "attn.qkv.weight": qkv} | ({new + "attn.qk_bias": qk_bias} if c.qk_bias else {})


def ouro_config(settings: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of an Ouro folder's config.json."""
    layers = _whole(settings, "num_hidden_layers", MAX_LAYERS)
    return ModelConfig(
        **_decoder(settings), groups=(tuple(range(layers)),), norm="branch", group_norm="step", share_group_norm=True, final_norm=False,
        inject="none", start="input", backprop_steps=None, mean_loops=_whole(settings, "total_ut_steps"), exit_gate=True,
    )  # fmt: skip


def llama_config(settings: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a folder shaped like Llama's: every layer runs once."""
    _only(settings, pretraining_tp=(1,), sliding_window=(None,))
    return ModelConfig(**_decoder(settings), groups=(), norm="pre")


def _decoder(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What Ouro and Llama have in common, as settings of ModelConfig."""
    _only(
        settings,
        hidden_act=("silu",),
        rope_scaling=(None,),
        attention_bias=(None, False),
        mlp_bias=(None, False),
        use_sliding_window=(None, False),
    )
    kinds = settings.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise UserError("config.json: layer_types other than full_attention are not supported")
    rope = settings.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("rope_type", "default") != "default":
        raise UserError(f"config.json: rope_type = {rope['rope_type']!r} is not supported, only default")
    theta = _number(rope if isinstance(rope, dict) and "rope_theta" in rope else settings, "rope_theta")
    return {
        "vocab_size": _whole(settings, "vocab_size"), "block_size": _whole(settings, "max_position_embeddings"),
        "n_layer": _whole(settings, "num_hidden_layers", MAX_LAYERS), "n_embd": _whole(settings, "hidden_size"),
        "n_head": _whole(settings, "num_attention_heads"),
        "n_kv_head": _whole(settings, "num_key_value_heads") if settings.get("num_key_value_heads") is not None else None,
        "head_size": _whole(settings, "head_dim") if settings.get("head_dim") is not None else None,
        "positions": "rotary", "rope_base": theta, "scale_embedding": False,
        "mlp": "gated", "mlp_hidden": _whole(settings, "intermediate_size"),
        "norm_eps": _number(settings, "rms_norm_eps"), "tie_head": bool(settings.get("tie_word_embeddings", False)),
    }  # fmt: skip


def ouro_weights(raw: Raw, c: ModelConfig) -> Ours:
    """Our weights from Ouro's."""
    norms = ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2")
    gate = {f"stages.0.gate.{x}": _same(raw, f"model.early_exit_gate.{x}") for x in ("weight", "bias")}
    return gate | _decoder_weights(raw, c, dict(enumerate(norms, start=1)))


def llama_weights(raw: Raw, c: ModelConfig) -> Ours:
    """Our weights from Llama's."""
    return _decoder_weights(raw, c, {1: "input_layernorm", 3: "post_attention_layernorm"})


def _decoder_weights(raw: Raw, c: ModelConfig, norms: Mapping[int, str]) -> Ours:
    """One stage of layers; `norms` says what each of our norms is called."""
    t: Ours = {"wte.weight": _embedding(raw, "model.embed_tokens.weight", c), "ln_f.weight": _same(raw, "model.norm.weight")}
    if not c.tie_head:
        t["lm_head.weight"] = _embedding(raw, "lm_head.weight", c)
    for i in range(c.n_layer):
        old, new = f"model.layers.{i}.", f"stages.0.blocks.{i}."
        t[new + "attn.qkv.weight"] = _joined(raw, *(f"{old}self_attn.{x}_proj.weight" for x in "qkv"))
        t[new + "attn.out.weight"] = _same(raw, old + "self_attn.o_proj.weight")
        t[new + "mlp.up.weight"] = _joined(raw, old + "mlp.gate_proj.weight", old + "mlp.up_proj.weight")
        t[new + "mlp.down.weight"] = _same(raw, old + "mlp.down_proj.weight")
        t |= {f"{new}norm{j}.weight": _same(raw, f"{old}{name}.weight") for j, name in norms.items()}
    return t


# model_type -> (config, weights, names that may be there and are not needed)
FAMILIES: dict[str, tuple[Callable[[Mapping[str, Any]], ModelConfig], Callable[[Raw, ModelConfig], Ours], tuple[str, ...]]] = {
    "huginn_raven": (huginn_config, huginn_weights, ("freqs_cis", "lm_head.weight")),
    "ouro": (ouro_config, ouro_weights, ("lm_head.weight",)),
    "llama": (llama_config, llama_weights, ("lm_head.weight",)),
    "mistral": (llama_config, llama_weights, ("lm_head.weight",)),
}


def _same(raw: Raw, name: str) -> Callable[[], Tensor]:
    return lambda: raw[name]


def _joined(raw: Raw, *names: str) -> Callable[[], Tensor]:
    """Several weights as one, along the outputs."""
    return lambda: torch.cat([raw[name] for name in names])


def _embedding(raw: Raw, name: str, c: ModelConfig) -> Callable[[], Tensor]:
    return lambda: _padded(raw[name], c)


def _unpaired(w: Tensor, heads: int) -> Tensor:
    """Rows of a projection for rotary pairs (0, 1), (2, 3), ... to ours, (0, D/2), (1, D/2 + 1), ..."""
    return w.reshape(heads, -1, 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


def _padded(w: Tensor, c: ModelConfig) -> Tensor:
    """An embedding (V, C) with rows of zeros up to our padding."""
    if w.shape[0] != c.vocab_size:
        return w  # refused by its shape
    return torch.cat((w, w.new_zeros(c.padded_vocab_size - len(w), *w.shape[1:]))) if c.padded_vocab_size > len(w) else w


def _whole(settings: Mapping[str, Any], name: str, high: int = 2**40) -> int:
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
        raise UserError(f"config.json: {name} = {value!r}, but it must be an integer from 1 to {high}")
    return value


def _number(settings: Mapping[str, Any], name: str) -> float:
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise UserError(f"config.json: {name} = {str(value)[:40]}, but it must be a number")
    return float(value)


def _close(name: str, value: float, wanted: float) -> None:
    if not abs(value - wanted) <= 1e-3 * wanted:
        raise UserError(f"config.json: {name} = {value}, but only {wanted:g} is supported")


def _only(settings: Mapping[str, Any], **allowed: tuple[Any, ...]) -> None:
    """Settings that are there must have a supported value."""
    for name, values in allowed.items():
        if name in settings and settings[name] not in values:
            shown = ", ".join(str(v) for v in values if v is not None)
            raise UserError(f"config.json: {name} = {settings[name]!r} is not supported, only {shown or 'its absence'}")
