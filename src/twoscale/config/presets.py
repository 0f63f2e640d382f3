"""Presets: functions that return a full RunConfig. Start from one and change what you need."""

from collections.abc import Callable
from dataclasses import replace

from twoscale.config.errors import UserError
from twoscale.config.model import ModelConfig
from twoscale.config.objective import ObjectiveConfig
from twoscale.config.run import DataConfig, RunConfig, TrainConfig
from twoscale.config.task import CarryConfig, HopsConfig


def nano() -> RunConfig:
    """Two looped layers at width 32 on a slice of the built-in text: seconds, for tests."""
    return RunConfig(
        name="nano",
        model=ModelConfig(vocab_size=257, block_size=64, n_layer=4, n_head=2, n_embd=32, groups=((1,), (2,)), mean_loops=3),
        data=DataConfig(max_documents=60),
        train=TrainConfig(
            steps=20, batch_size=8, optimizer="muon", lr=3e-3, warmup_steps=4,
            eval_interval=10, eval_sequences=8, checkpoint_interval=10, geometry_interval=10, compile="off",
        ),
    )  # fmt: skip


def tiny() -> RunConfig:
    """Bytes, width 128, eight layers, groups 2; 3-4; 5, r = 6: about two minutes on two cores, on the built-in text."""
    return RunConfig(
        name="tiny",
        model=ModelConfig(
            vocab_size=257, block_size=128, n_layer=8, n_head=4, n_embd=128, groups=((2,), (3, 4), (5,)), mean_loops=6, backprop_steps=4
        ),
        data=DataConfig(),
        train=TrainConfig(
            steps=220, batch_size=16, optimizer="muon", lr=3e-3, muon_lr=0.02, warmup_steps=20,
            eval_interval=44, eval_sequences=64, checkpoint_interval=44, geometry_interval=44, milestones=(44, 132),
        ),
    )  # fmt: skip


def huginn() -> RunConfig:
    """Bytes, width 256, Huginn's layout (2 layers, a loop of 4, 2 layers), r = 8: about ten minutes on two cores, on the built-in text."""
    return RunConfig(
        name="huginn",
        model=ModelConfig(
            vocab_size=257, block_size=256, n_layer=8, n_head=4, n_embd=256, groups=((2, 3, 4, 5),), qk_bias=True, positions="rotary",
            rope_base=50_000.0, mlp="gated", mlp_hidden=704, group_norm="leave", share_group_norm=True, mean_loops=8, backprop_steps=4,
        ),
        data=DataConfig(),
        train=TrainConfig(
            steps=300, batch_size=8, optimizer="muon", lr=3e-3, muon_lr=0.02, warmup_steps=20, loops_ramp=150,
            eval_interval=100, eval_sequences=32, checkpoint_interval=100, geometry_interval=0, compile="off",
        ),
    )  # fmt: skip


def small() -> RunConfig:
    """The paper's twelve-layer pattern and head size at width 128, with a 4k BPE: hours on two cores, on a corpus of your own."""
    return RunConfig(
        name="small",
        model=ModelConfig(vocab_size=4096, block_size=256, n_layer=12, n_head=2, n_embd=128, groups=((4,), (5, 6), (7,))),
        data=DataConfig(tokenizer="bpe", bpe_vocab=4096, val_fraction=0.01),
        train=TrainConfig(
            steps=12_000, batch_size=16, micro_batch_size=8, optimizer="muon", lr=3e-3, muon_lr=0.02, warmup_steps=200,
            eval_interval=500, eval_sequences=128, checkpoint_interval=500, geometry_interval=500, milestones=(500, 1000, 2000, 4000, 8000),
        ),
    )  # fmt: skip


def stories() -> RunConfig:
    """Five layers of width 192, three of them loop groups, with a 4k BPE, for simple stories: an hour and a half on two cores.

    The mean number of loops is 3 while the rate is high and grows to 12 while it falls (see the log). bf16 pays on CPUs that have
    instructions for it (AVX512_BF16, AMX); on others choose --train.precision fp32.
    """
    return RunConfig(
        name="stories",
        model=ModelConfig(
            vocab_size=4096, block_size=256, n_layer=5, n_head=3, n_embd=192, groups=((1,), (2,), (3,)), mean_loops=12, backprop_steps=4
        ),
        data=DataConfig(tokenizer="bpe", bpe_vocab=4096, val_fraction=0.01),
        train=TrainConfig(
            steps=2000, batch_size=32, micro_batch_size=16, optimizer="muon", lr=3e-3, muon_lr=0.02, warmup_steps=100, decay_steps=700,
            min_lr_ratio=0.05, loops_start=3, loops_hold=1300, loops_ramp=400, eval_interval=200, eval_sequences=128,
            checkpoint_interval=100, geometry_interval=400, milestones=(100, 400, 1200), precision="bf16",
        ),
    )  # fmt: skip


def paper() -> RunConfig:
    """The paper's model and budget: 12 layers, width 768, GPT-2 BPE, 60,000 steps, 300M tokens of FineWeb. For GPUs.

    300M tokens over 60,000 steps are 5,000 tokens a step: ten sequences of 512 (307M in all).
    """
    return RunConfig(
        name="paper",
        model=ModelConfig(),
        data=DataConfig(
            source="hf:HuggingFaceFW/fineweb", subset="sample-10BT", tokenizer="gpt2", val_fraction=0.005, max_tokens=310_000_000
        ),
        train=TrainConfig(
            steps=60_000, batch_size=10, lr=6e-4, warmup_steps=2000,
            eval_interval=1000, eval_sequences=200, checkpoint_interval=1000, milestones=(1000, 5000, 10_000, 20_000, 40_000),
        ),
    )  # fmt: skip


def hops() -> RunConfig:
    """The task hops with P = 12 on one plain layer and a group of two at width 64: about a quarter of an hour on two cores.

    The mean number of loops grows slowly: the second hop is found while a sample takes two to six steps, and not where most of the loss
    comes from steps that are out of reach. Accuracy comes with the falling rate of the last 1,300 steps.
    """
    task = HopsConfig()
    return RunConfig(
        name="hops",
        model=ModelConfig(
            vocab_size=task.vocab_size, block_size=task.length, n_layer=3, n_head=4, n_embd=64, groups=((1, 2),), positions="rotary",
            norm="pre", start="input", inject="none", mean_loops=12, loop_sigma=0.2, backprop_steps=None,
        ),
        train=TrainConfig(
            steps=3600, batch_size=48, optimizer="muon", lr=3e-3, muon_lr=0.02, warmup_steps=50, decay_steps=1300, min_lr_ratio=0.02,
            objective=ObjectiveConfig("progress"), loops_ramp=2000, eval_interval=200, eval_sequences=128, checkpoint_interval=200,
            geometry_interval=600, geometry_sequences=16, geometry_loops=20, compile="off",
        ),
        task="hops",
        hops=task,
    )  # fmt: skip


def carry() -> RunConfig:
    """The task carry with 12 digits on one plain layer and a group of two at width 64: about five minutes on two cores."""
    base, task = hops(), CarryConfig(unknown="either")
    model = replace(base.model, vocab_size=task.vocab_size, block_size=task.length, mean_loops=8)
    train = replace(base.train, steps=1000, loops_ramp=600, decay_steps=300, eval_interval=100, geometry_interval=200)
    return replace(base, name="carry", model=model, train=train, task="carry", carry=task)


def hops_paper() -> RunConfig:
    """The task hops on the paper's layout: noise as start, learned projection of [state; input], sandwich norms on the sum.

    It learns more slowly than `hops`, so the task is smaller: N = 8, P = 6. Its loops do not grow.
    """
    base, task = hops(), HopsConfig(nodes=8, hops=6)
    model = replace(
        base.model, vocab_size=task.vocab_size, block_size=task.length, norm="sum", start="noise", inject="concat", mean_loops=8
    )
    train = replace(base.train, steps=2500, loops_ramp=0, decay_steps=800, geometry_interval=500, geometry_loops=16)
    return replace(base, name="hops-paper", model=model, train=train, hops=task)


PRESETS: dict[str, Callable[[], RunConfig]] = {
    "nano": nano, "tiny": tiny, "huginn": huginn, "small": small, "stories": stories, "paper": paper, "hops": hops, "carry": carry,
    "hops-paper": hops_paper,
}  # fmt: skip


def get(name: str) -> RunConfig:
    """The preset of that name."""
    if name not in PRESETS:
        raise UserError(f"preset {name!r} does not exist: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]()
