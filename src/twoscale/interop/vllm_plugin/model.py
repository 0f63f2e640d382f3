# mypy: ignore-errors
# vLLM is an extra
"""A looped GPT in vLLM: stages, loop groups, head, and weights from the folder. See `model/gpt.py` for the same on whole sequences.

A group takes a fixed number of loop steps, or its tokens leave one by one by an exit rule (`--hf-overrides`). A token that leaves is not
computed again; its last keys and values go to the slots of all deeper steps, as in our own cache with kv="exact". So a result depends
neither on the batch nor on how a prompt is cut, and blocks of the cache may be shared between requests with the same prefix.

Shapes: N tokens of all sequences of a step, C width, V vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from twoscale.config import ModelConfig, UserError
from twoscale.engine.request import LoopParams
from twoscale.exits import RuleState
from twoscale.interop.families import FAMILIES
from twoscale.interop.load import PREFIX
from twoscale.interop.vllm_plugin.layers import Block, Live, Slots
from twoscale.model.start import StateNoise, start_state


@dataclass
class LiveTokens:
    """Tokens in a loop as an exit rule sees them (`exits.rule.RowInfo`). All have taken the same number of steps."""

    same_k: int
    positions: Tensor
    tokens: Tensor

    @property
    def k(self) -> Tensor:
        return torch.full_like(self.positions, self.same_k)

    @property
    def prompt_indices(self) -> Tensor:
        return torch.zeros_like(self.positions)

    def take(self, rows: Tensor) -> None:
        self.positions, self.tokens = self.positions.index_select(0, rows), self.tokens.index_select(0, rows)


class PlainStage(nn.Module):
    """Layers that each run once."""

    def __init__(self, c: ModelConfig, config: VllmConfig, slots: Slots, layers: int, prefix: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(c, config, slots, 1, f"{prefix}.blocks.{i}") for i in range(layers))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, positions)
        return x


class LoopGroup(nn.Module):
    """Layers that run up to K times on a state x, with the group's input e injected at every step."""

    def __init__(
        self, c: ModelConfig, config: VllmConfig, slots: Slots, index: int, params: LoopParams, final_norm: RMSNorm | None, prefix: str
    ) -> None:
        super().__init__()
        self.config, self.index, self.loops, self.rule = c, index, params.loops[index], params.rules[index]
        self.noise = StateNoise(params.seed)
        self.blocks = nn.ModuleList(Block(c, config, slots, self.loops, f"{prefix}.blocks.{i}") for i in range(len(c.groups[index])))
        if c.inject == "concat":
            self.of_state, self.of_input = (
                ReplicatedLinear(c.n_embd, c.n_embd, bias=False, prefix=f"{prefix}.{half}") for half in ("of_state", "of_input")
            )
        self.gate = nn.Linear(c.n_embd, 1) if c.exit_gate and index == c.n_groups - 1 else None
        self.norm = None
        if c.group_norm != "none":
            self.norm = final_norm if c.share_group_norm else RMSNorm(c.n_embd, c.norm_eps)

    def forward(self, e: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        """The group's output for its input e (N, C)."""
        c = self.config
        x = start_state(c, self.index, e, positions, self.noise)
        injected = self.of_input(e)[0] if c.inject == "concat" else e if c.inject == "add" else None
        if self.rule is None:
            for k in range(self.loops):
                x = self.step(x, injected, positions, k)
        else:
            x = self._until_exit(x, injected, LiveTokens(0, positions, ids))
        return self.norm(x) if c.group_norm == "leave" else x

    def step(self, x: Tensor, injected: Tensor | None, positions: Tensor, k: int, live: Live | None = None) -> Tensor:
        """The group's map, applied once; `k` counts from 0."""
        c = self.config
        if c.noise == "every_step":
            x = torch.lerp(x, self.noise(self.index, positions, c.n_embd, k + 1).to(x.dtype), c.noise_mix)
        if c.inject == "concat":
            x = self.of_state(x)[0]
        if injected is not None:
            x = x + injected
        for block in self.blocks:
            x = block(x, positions, k, live)
        return self.norm(x) if c.group_norm == "step" else x

    def _until_exit(self, x: Tensor, injected: Tensor | None, rows: LiveTokens) -> Tensor:
        """States (N, C) with which the tokens leave: when the rule fires, or after all loops."""
        out, live, state = torch.empty_like(x), Live(len(x)), RuleState(self.rule)
        for k in range(self.loops):
            after = self.step(x, injected, rows.positions, k, live)
            rows.same_k = k + 1
            fired = torch.as_tensor(state.update(self.index, rows, x, after, self._read), device=x.device).expand(len(x))
            states = torch.where(fired[:, None], x, after) if self.rule.keep == "previous" else after
            staying = (~fired).nonzero().flatten()
            if live.index is None:
                out.copy_(states)
            else:
                out.index_copy_(0, live.index, states)  # those that stay are written again
            if not len(staying):
                for block in self.blocks:
                    block.attn.fill(k + 1, live)
                break
            if len(staying) < len(x):
                live.take(staying)
                rows.take(staying)
                state.take(staying)
                states, injected = (None if t is None else t.index_select(0, staying) for t in (states, injected))
            x = states
        return out

    def _read(self, x: Tensor, kind: str) -> Tensor:
        """How likely the gate makes it that a token leaves now, (n,)."""
        assert kind == "gate" and self.gate is not None
        return self.gate(x).sigmoid().squeeze(-1)


class TwoscaleForCausalLM(nn.Module):
    """Embedding, stages, final norm, head."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        settings, folder = vllm_config.model_config.hf_config, Path(vllm_config.model_config.model)
        c, params = settings.model_config, settings.depth(folder if folder.is_dir() else None)
        if any(rule is not None for rule in params.rules) and not vllm_config.model_config.enforce_eager:
            raise UserError("tokens that leave a loop change the shapes of a step: exit rules need --enforce-eager")
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise UserError("looped models do not run with pipeline parallelism: use --tensor-parallel-size")
        self.config, self.family, self.params = c, settings.model_type, params
        self.wte = VocabParallelEmbedding(c.vocab_size, c.n_embd, quant_config=vllm_config.quant_config, prefix=f"{prefix}.wte")
        self.wpe = nn.Embedding(c.block_size, c.n_embd) if c.positions == "learned" else None
        needed = c.final_norm or (c.share_group_norm and c.group_norm != "none")
        self.ln_f = RMSNorm(c.n_embd, c.norm_eps) if needed else None
        slots = Slots(prefix or "model")
        self.stages = nn.ModuleList(
            PlainStage(c, vllm_config, slots, len(layers), f"{prefix}.stages.{i}")
            if group is None
            else LoopGroup(c, vllm_config, slots, group, params, self.ln_f, f"{prefix}.stages.{i}")
            for i, (layers, group) in enumerate(c.stages)
        )
        self.lm_head = ParallelLMHead(c.vocab_size, c.n_embd, quant_config=vllm_config.quant_config, prefix=f"{prefix}.lm_head")
        if c.tie_head:
            self.lm_head = self.lm_head.tie_weights(self.wte)
        self.logits_processor = LogitsProcessor(c.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.wte(input_ids)

    def forward(self, input_ids: Tensor, positions: Tensor, intermediate_tensors=None, inputs_embeds: Tensor | None = None) -> Tensor:
        """States (N, C) that the head reads."""
        c = self.config
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        if self.wpe is not None:
            x = x + self.wpe(positions)
        if c.scale_embedding:
            x = x * c.n_embd**0.5
        for stage in self.stages:
            x = stage(x, positions, input_ids) if isinstance(stage, LoopGroup) else stage(x, positions)
        return self.ln_f(x) if c.final_norm else x

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    # -- weights -------------------------------------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Fill the parameters from a folder's weights; returns the names of those that were filled."""
        raw = dict(weights)
        try:
            ours = self._by_our_names(raw)
        except KeyError as error:
            raise UserError(f"the folder lacks the weight {error.args[0]}") from None
        parameters = dict(self.named_parameters())
        if unknown := sorted(ours.keys() - parameters.keys()):
            raise UserError(f"the folder has {unknown[0]}, which vLLM has no place for: export it in float32 or bfloat16")
        for name, tensor in ours.items():
            parameter = parameters[name]
            getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
        return set(ours)

    def _by_our_names(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights by the names and in the shapes of this module's parameters."""
        c = self.config
        if self.family == "twoscale":
            found = {name.removeprefix(PREFIX): tensor for name, tensor in raw.items()}
        else:
            found = {name: made() for name, made in FAMILIES[self.family][1](raw, c).items()}
        ours = {}
        for name, tensor in found.items():
            if name in ("wte.weight", "lm_head.weight"):
                tensor = tensor[: c.vocab_size]
            if name.endswith("adapter.weight"):
                stem = name.removesuffix("adapter.weight")
                ours[f"{stem}of_state.weight"], ours[f"{stem}of_input.weight"] = tensor.chunk(2, dim=1)
            elif name.endswith("attn.qk_bias"):  # values have none
                none = tensor.new_zeros(c.kv_heads * c.head_dim)
                ours[name.removesuffix("qk_bias") + "qkv.bias"] = torch.cat((tensor.flatten(), none))
            else:
                ours[name] = tensor
        return ours
