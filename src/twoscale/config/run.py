"""RunConfig: a model, its data (or its task) and its training, all that a run folder's `config.json` holds."""

import math
from dataclasses import dataclass, field
from typing import Literal

from twoscale.config.errors import UserError
from twoscale.config.model import ModelConfig
from twoscale.config.objective import ObjectiveConfig
from twoscale.config.task import CarryConfig, HopsConfig, TaskName


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes tokens."""

    source: str = "builtin"
    """`builtin` (English that ships with Python), a .txt/.md/.jsonl/.parquet file (or .gz, .xz), a folder of those, or hf:OWNER/NAME."""
    tokenizer: str = "bytes"
    """`bytes`, `bpe` (trained on the corpus), `gpt2` (the extra twoscale[gpt2]), or a folder with the tokenizer.json of another model."""
    bpe_vocab: int = 4096
    """Vocabulary of the trained BPE, the end-of-text token included."""
    val_fraction: float = 0.05
    """Share of the documents held out for validation."""
    text_column: str = "text"
    """Column or key that holds the text in .parquet and .jsonl."""
    subset: str | None = None
    """Configuration of an hf: data set, for example sample-10BT."""
    max_documents: int | None = None
    """Stop after so many documents."""
    max_tokens: int | None = None
    """Stop after so many training tokens."""
    max_document_mb: int = 256
    """Refuse a longer document, in megabytes of text (a line of .jsonl: an eighth of it); each byte takes about 8 bytes of memory."""
    shard_tokens: int = 50_000_000
    """Training tokens in one shard file; a killed `prepare` goes on from the last whole shard."""
    seed: int = 0
    """Decides which documents are held out."""

    def __post_init__(self) -> None:
        if self.tokenizer not in ("bytes", "bpe", "gpt2") and "/" not in self.tokenizer:
            raise UserError(f"tokenizer = {self.tokenizer!r}: choose bytes, bpe, gpt2, or a folder (./NAME) that holds a tokenizer.json")
        _range("bpe_vocab", self.bpe_vocab, 257, 1_000_000)
        _range("val_fraction", self.val_fraction, 0.0001, 0.5)
        _range("shard_tokens", self.shard_tokens, 1000, 2**33)
        _range("max_document_mb", self.max_document_mb, 1, 2**20)
        for name in ("max_documents", "max_tokens"):
            if getattr(self, name) is not None:
                _range(name, getattr(self, name), 1, 2**60)
        _range("seed", self.seed, 0, 2**31 - 1)

    @property
    def vocab_size(self) -> int | None:
        """The vocabulary the tokenizer will have (a trained BPE may stay below it on a small corpus); None where a folder decides."""
        return {"bytes": 257, "bpe": self.bpe_vocab, "gpt2": 50257}.get(self.tokenizer)


@dataclass(frozen=True)
class TrainConfig:
    """How the model is trained."""

    steps: int = 60_000
    """Optimizer steps."""
    batch_size: int = 16
    """Sequences in one optimizer step, over all processes and micro-batches."""
    micro_batch_size: int | None = None
    """Sequences in one forward pass of one process; None means the whole share of the process."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`adamw` for everything (the paper's recipe), or `muon` for the matrices with AdamW for the rest."""
    lr: float = 6e-4
    """Peak rate of AdamW."""
    muon_lr: float = 0.02
    """Peak rate of Muon; only read with optimizer=muon."""
    muon_momentum: float = 0.95
    """Momentum of Muon."""
    beta1: float = 0.9
    """AdamW's first beta."""
    beta2: float = 0.95
    """AdamW's second beta."""
    weight_decay: float = 0.1
    """Decoupled decay of the matrices; norm gains and biases have none."""
    clip: float = 1.0
    """Largest gradient norm; 0 switches clipping off."""
    warmup_steps: int = 600
    """Steps of linear warm-up."""
    min_lr_ratio: float = 0.1
    """The rate ends at this share of its peak."""
    decay_steps: int | None = None
    """None: a cosine over the whole run. A number: the rate stays at its peak and falls linearly in the last so many steps."""
    loops_start: int = 1
    """The mean number of loops at the start; only read with loops_hold or loops_ramp."""
    loops_hold: int = 0
    """The mean number of loops stays at loops_start for so many steps before it grows."""
    loops_ramp: int = 0
    """The mean number of loops grows from loops_start to model.mean_loops over so many steps; early steps are then cheap."""
    seed: int = 0
    """Seeds the weights, the data order, the loop counts and the start states."""
    eval_interval: int = 1000
    """Validate every so many steps, and at the end."""
    eval_sequences: int = 64
    """Validation sequences of one such look."""
    geometry_interval: int = 1000
    """Measure the loops' geometry on held-out text every so many steps, at the start and at the end; 0 switches it off."""
    geometry_sequences: int = 4
    """Validation sequences of one such measurement."""
    geometry_loops: int = 30
    """Loop steps of one such measurement."""
    staircase_loops: int = 16
    """On a task: at the end of the run accuracy is measured by true depth after 1 to so many loop steps."""
    staircase_samples: int = 1024
    """Held-out samples of that measurement."""
    checkpoint_interval: int = 1000
    """Save every so many steps, and at the end."""
    keep_last: int = 2
    """Older checkpoints are removed, except milestones."""
    milestones: tuple[int, ...] = ()
    """Steps whose checkpoints are kept for good."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """`auto`: bf16 autocast on CUDA, fp32 elsewhere."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the blocks; `auto`: where it pays (runs of some length, with a compiler at hand)."""
    parallel: Literal["auto", "ddp", "fsdp", "hsdp"] = "auto"
    """How several processes share the work; `auto` is ddp. `fsdp`: weights and optimizer state are sharded over all of them; `hsdp`: over
    those of a node, and every node has a copy. One process ignores it."""
    shard_degree: int | None = None
    """With hsdp: so many processes share one copy of the model; None means those of a node."""
    checkpoint_format: Literal["auto", "whole", "sharded"] = "auto"
    """`whole`: the first process gathers and writes all. `sharded`: every process writes its own part. `auto`: as the weights are."""
    tracker: Literal["none", "tensorboard", "wandb"] = "none"
    """Send the metrics there too; metrics.jsonl is always written."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)

    def __post_init__(self) -> None:
        for name, allowed in {
            "optimizer": ("adamw", "muon"),
            "precision": ("auto", "fp32", "bf16"),
            "compile": ("auto", "on", "off"),
            "parallel": ("auto", "ddp", "fsdp", "hsdp"),
            "checkpoint_format": ("auto", "whole", "sharded"),
            "tracker": ("none", "tensorboard", "wandb"),
        }.items():
            _choice(name, getattr(self, name), allowed)
        for name in ("steps", "batch_size", "eval_interval", "eval_sequences", "checkpoint_interval", "keep_last", "geometry_sequences"):
            _range(name, getattr(self, name), 1, 2**40)
        if self.shard_degree is not None:
            _range("shard_degree", self.shard_degree, 1, 2**20)
        if self.micro_batch_size is not None:
            _range("micro_batch_size", self.micro_batch_size, 1, self.batch_size)
        for name in ("lr", "muon_lr"):
            if not 0 < getattr(self, name) < 10:
                raise UserError(f"{name} = {getattr(self, name)}: a learning rate lies between 0 and 10")
        for name in ("beta1", "beta2", "muon_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} = {getattr(self, name)}: must lie in [0, 1)")
        _range("weight_decay", self.weight_decay, 0, 10)
        _range("min_lr_ratio", self.min_lr_ratio, 0, 1)
        _range("clip", self.clip, 0, 1e6)
        _range("seed", self.seed, 0, 2**31 - 1)
        _range("loops_start", self.loops_start, 1, 1000)
        _range("loops_hold", self.loops_hold, 0, self.steps)
        _range("loops_ramp", self.loops_ramp, 0, self.steps - self.loops_hold)
        _range("geometry_interval", self.geometry_interval, 0, 2**40)
        _range("geometry_loops", self.geometry_loops, 1, 1000)
        _range("staircase_loops", self.staircase_loops, 1, 1000)
        _range("staircase_samples", self.staircase_samples, 1, 2**30)
        if not 0 <= self.warmup_steps <= self.steps:
            raise UserError(f"warmup_steps = {self.warmup_steps}: must lie between 0 and steps = {self.steps}")
        if self.decay_steps is not None:
            _range("decay_steps", self.decay_steps, 1, self.steps)

    @property
    def sharded(self) -> bool:
        """Whether several processes share one copy of the weights."""
        return self.parallel in ("fsdp", "hsdp")

    def mean_loops(self, step: int, full: int) -> float:
        """The mean number of loops at a step, where `full` is the model's own."""
        grown = step - self.loops_hold
        if grown >= self.loops_ramp:
            return full
        return self.loops_start + (full - self.loops_start) * max(0, grown) / max(1, self.loops_ramp)

    def lr_scale(self, step: int) -> float:
        """The share of the peak rate at a step: linear warm-up, then down to min_lr_ratio by a cosine, or late and in a line."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        first = self.warmup_steps if self.decay_steps is None else max(self.warmup_steps, self.steps - self.decay_steps)
        progress = min(1.0, max(0.0, (step - first) / max(1, self.steps - first)))
        left = 1 - progress if self.decay_steps is not None else 0.5 * (1 + math.cos(math.pi * progress))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * left


@dataclass(frozen=True)
class RunConfig:
    """Everything that defines a run; loading it again gives the same run."""

    name: str = "run"
    """Name of the run; its folder is runs/NAME unless --out says otherwise."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    task: TaskName = "none"
    """Train on a task whose true depth is known instead of text; the model's vocabulary and context follow it."""
    hops: HopsConfig = field(default_factory=HopsConfig)
    carry: CarryConfig = field(default_factory=CarryConfig)

    def __post_init__(self) -> None:
        _choice("task", self.task, ("none", "hops", "carry"))
        if self.task == "none" and (self.data.vocab_size or 0) > self.model.vocab_size:
            raise UserError(
                f"the {self.data.tokenizer} tokenizer has {self.data.vocab_size} tokens, model.vocab_size is "
                f"{self.model.vocab_size}: raise it"
            )


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{name} = {value!r}: choose one of {', '.join(allowed)}")


def _range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UserError(f"{name} = {value}: must lie between {low} and {high}")
