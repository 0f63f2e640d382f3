"""The looped GPT against the slow reference, and the laws of its init, noise and gradients."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

import twoscale
from models import loud, small_model
from reference import Reference
from twoscale.config import UserError, presets
from twoscale.model import LoopedGPT, StateNoise

OPTIONS: list[dict[str, object]] = [
    {},
    {"positions": "rotary", "mlp": "gated", "n_kv_head": 2},
    {"norm": "branch", "group_norm": "step", "qk_bias": True},
    {"norm": "pre"},
    {"group_norm": "leave", "share_group_norm": True, "tie_head": False},
    {"group_norm": "step", "share_group_norm": True, "final_norm": False},
    {"inject": "add", "start": "zeros"},
    {"inject": "none", "start": "input", "backprop_steps": None, "groups": ((0, 1, 2, 3, 4),)},
    {"noise": "every_step", "noise_mix": 0.3},
    {"head_size": 12, "mlp_hidden": 20, "scale_embedding": False},
    {"groups": ()},
    {"groups": ((0,), (4,))},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "default")
def test_against_the_reference(options: dict[str, object]) -> None:
    """Every option computes what the plain-loop reference computes from the spec's formulas."""
    model = loud(small_model(**options))
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    loops = tuple(3 + g for g in range(model.config.n_groups))
    logits = twoscale.forward(model, ids, loops=list(loops)).logits
    for b in range(2):
        expected = Reference(model).sequence(ids[b].tolist(), [loops] * 9)
        assert torch.allclose(logits[b].double(), expected, atol=2e-4), (logits[b].double() - expected).abs().max()


def test_init() -> None:
    """Every kind of weight has the std of the spec (cut at three sigma: 0.98658 of the nominal one); gains are 1."""
    config = dataclasses.replace(presets.paper().model, vocab_size=5000, n_embd=384, n_head=6)
    model = LoopedGPT(config)
    std, out = math.sqrt(2 / (5 * 384)), math.sqrt(2 / (5 * 384)) / math.sqrt(2 * 56)
    kinds = set()
    for name, p in model.named_parameters():
        kind = ".".join(part for part in name.split(".") if not part.isdigit())
        kinds.add(kind)
        if p.ndim == 1:
            assert torch.equal(p, torch.ones_like(p)), name
            continue
        wanted = out if kind.endswith(("attn.out.weight", "mlp.down.weight")) else std
        assert abs(float(p.detach().std()) / wanted - 0.98658) < 0.01, name
        assert float(p.detach().abs().max()) <= 3 * wanted * (1 + 1e-5), name
    assert {"wte.weight", "wpe.weight", "stages.adapter.weight", "stages.blocks.attn.qkv.weight", "ln_f.weight"} <= kinds


def test_seed_decides_the_weights() -> None:
    """The same seed builds the same model; another one does not."""
    a, b, c = (LoopedGPT(small_model(), seed=s) for s in (0, 0, 1))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.wte.weight, c.wte.weight)


@given(st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=20), min_size=1, max_size=5), st.integers(0, 4))
@settings(max_examples=25, deadline=None)
def test_a_row_alone_or_in_a_batch(rows: list[list[int]], which: int) -> None:
    """A row's logits are the same alone, in any batch and at any padding, within 1e-5."""
    model = loud(small_model())
    which %= len(rows)
    together = twoscale.forward(model, rows, loops=5)
    alone = twoscale.forward(model, [rows[which]], loops=5)
    n = len(rows[which])
    assert torch.allclose(together.logits[which, :n], alone.logits[0], atol=1e-5)
    assert (together.steps[which, :n] == 5).all() and (together.steps[which, n:] == 0).all()


class Starts:
    """Records start states."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def start(self, group: int, x: torch.Tensor, projected: torch.Tensor) -> None:
        self.seen.append(x.clone())

    def step(self, group: int, k: int, x: torch.Tensor) -> None: ...

    def stage(self, index: int, x: torch.Tensor) -> None: ...


def test_start_states_are_bitwise_the_same() -> None:
    """While evaluating, a position's start state is bitwise the same in any batch, at any length."""
    model = LoopedGPT(small_model())
    seen = []
    for shape in ((1, 5), (4, 5), (3, 32)):
        recorder = Starts()
        model.hidden(torch.zeros(shape, dtype=torch.int64), recorder=recorder)
        seen.append(recorder.seen)
    for group in range(2):
        for other in seen[1:]:
            assert all(torch.equal(row[:5], seen[0][group][0]) for row in other[group])
    assert not torch.equal(seen[0][0], seen[0][1])


def test_causal() -> None:
    """What comes later changes nothing before it."""
    model = loud(small_model())
    ids = torch.randint(0, 64, (1, 12))
    changed = ids.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 64
    a, b = twoscale.forward(model, ids).logits, twoscale.forward(model, changed).logits
    assert torch.allclose(a[0, :8], b[0, :8], atol=1e-6) and not torch.allclose(a[0, 8:], b[0, 8:], atol=1e-2)


def test_backprop_through_the_last_steps() -> None:
    """With backprop_steps = n, gradients equal those of a loop whose state is cut n steps before its end."""
    config = small_model(groups=((1,),), backprop_steps=2)
    ids, targets = torch.randint(0, 64, (2, 16)), torch.randint(0, 64, (2, 16))
    noise = StateNoise(0, 3, (0, 1))
    cut = LoopedGPT(config)
    cut(ids, targets, loops=5, noise=noise).backward()

    by_hand = LoopedGPT(config)
    positions = torch.arange(16)
    e = by_hand.stages[0](by_hand.embed(ids, positions), None)
    group = by_hand.groups[0]
    injected = group.inject(e)
    x = noise(0, positions, 32)
    for k in range(5):
        x = group.step(x.detach() if k <= 3 else x, injected)
    logits = by_hand.head(by_hand.stages[2](x, None))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    for (name, p), q in zip(cut.named_parameters(), by_hand.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, name
        assert torch.allclose(p.grad, q.grad, atol=1e-6), name


def test_targets_of_minus_one_do_not_count() -> None:
    """The loss is the mean over the targets that are not -1."""
    model = LoopedGPT(small_model())
    ids, targets = torch.randint(0, 64, (1, 8)), torch.randint(0, 64, (1, 8))
    half = targets.clone()
    half[0, 4:] = -1
    with torch.no_grad():
        wanted = torch.nn.functional.cross_entropy(model(ids)[0, :4], targets[0, :4])
        assert torch.allclose(model(ids, half), wanted, atol=1e-6)


def test_noise_mix_extremes() -> None:
    """every_step noise with share 0 is the plain loop; with share 1 the state is forgotten at every step."""
    ids = torch.randint(0, 64, (1, 6))
    plain = loud(small_model())
    still = loud(small_model(noise="every_step", noise_mix=0.0))
    assert torch.equal(twoscale.forward(plain, ids).logits, twoscale.forward(still, ids).logits)
    forgetful = loud(small_model(noise="every_step", noise_mix=1.0))
    starts = [torch.randn(1, 6, 32) for _ in range(2)]
    a, b = (twoscale.forward(forgetful, ids, start=s).logits for s in (starts, [10 * s for s in starts]))
    assert torch.equal(a, b)


def test_paper_preset_steps() -> None:
    """The paper preset builds, counts its parameters and takes a training step."""
    config = presets.paper().model
    model = LoopedGPT(config)
    gains = 12 * 4 * 768 + 768
    assert sum(p.numel() for p in model.parameters()) == config.matrix_parameters + gains
    ids = torch.randint(0, 50257, (1, 32))
    loss = model(ids, ids, loops=2, noise=StateNoise(0, 0, (0,)))
    loss.backward()
    # Head and embedding are one matrix, and the sandwich keeps much of the token in the state: the first loss is not ln V.
    assert math.isfinite(float(loss.detach())) and all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    "ids,loops,word",
    [
        ([[]], None, "empty"),
        ([], None, "no sequence"),
        ([[64]], None, "token 64"),
        ([[-1]], None, "token -1"),
        ([[0] * 33], None, "does not fit"),
        (torch.zeros(2, 2), None, "integers"),
        ([["a"]], None, "integers"),
        ([[1]], 0, "at least 1"),
        ([[1]], [1, 2, 3], "one for each"),
        ([[1]], 2.5, "integer"),
        ([[1]], [1, 2.5], "integer"),
    ],
)
def test_bad_calls(ids: object, loops: object, word: str) -> None:
    """Wrong ids and loops get one clear error."""
    with pytest.raises(UserError, match=word):
        twoscale.forward(LoopedGPT(small_model()), ids, loops=loops)  # type: ignore[arg-type]


def test_bad_start_states() -> None:
    """Start states must be one for each group, of the right shape."""
    model = LoopedGPT(small_model())
    with pytest.raises(UserError, match="2 groups"):
        twoscale.forward(model, [[1, 2]], start=[torch.zeros(1, 2, 32)])
    with pytest.raises(UserError, match="shape"):
        twoscale.forward(model, [[1, 2]], start=[torch.zeros(1, 2, 32), torch.zeros(1, 3, 32)])
