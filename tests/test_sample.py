"""SamplingParams: keys follow the distribution, the kernel agrees with torch in fp64, and a row's token is its own."""

import random

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from twoscale.config import UserError
from twoscale.engine.kernels.library import c_library
from twoscale.engine.request import SamplingKey, SamplingParams
from twoscale.engine.sample import Sampled, _sample_native, _sample_torch, sample

needs_kernel = pytest.mark.skipif(c_library() is None, reason="no C compiler")
SETTINGS = (
    SamplingParams(),
    SamplingParams(1.0),
    SamplingParams(0.7),
    SamplingParams(1e-40),
    SamplingParams(1000.0),
    SamplingParams(1.0, top_k=1),
    SamplingParams(0.9, top_k=50),
    SamplingParams(0.9, top_k=700),
    SamplingParams(1.0, top_k=10**9),
    SamplingParams(0.8, top_p=0.9),
    SamplingParams(1.3, top_p=0.01),
    SamplingParams(1.0, top_p=0.9999),
    SamplingParams(1.0, top_p=1.0),
    SamplingParams(0.8, top_k=40, top_p=0.5),
    SamplingParams(2.0, top_k=500, top_p=0.95),
)


def by_kernel(logits: Tensor, keys: list[SamplingKey]) -> Sampled:
    return _sample_native(c_library(), logits, keys)


PATHS = [pytest.param(_sample_torch, id="torch"), pytest.param(by_kernel, id="kernel", marks=needs_kernel)]


def distribution(logits: Tensor, s: SamplingParams) -> Tensor:
    """The probabilities that a setting asks for, one token after the other in fp64."""
    p = torch.softmax(logits.double() / s.temperature, dim=0)
    order = sorted(range(len(p)), key=lambda t: (-float(logits[t]), t))[: s.top_k]
    total, reached, kept = float(p[order].sum()), 0.0, []
    for t in order:
        if kept and s.top_p is not None and reached >= s.top_p * total * (1 - 1e-6):
            break
        kept.append(t)
        reached += float(p[t])
    found = torch.zeros_like(p)
    found[kept] = p[kept]
    return found / found.sum()


@pytest.mark.parametrize("by", PATHS)
@pytest.mark.parametrize("setting", [s for s in SETTINGS if 0.5 < s.temperature < 100], ids=str)
def test_draws_follow_the_distribution(by, setting: SamplingParams) -> None:
    """A chi-square test over 20,000 draws does not tell them from the distribution, and no token outside of it is ever drawn."""
    logits = 2.5 * torch.randn(200, generator=torch.Generator().manual_seed(1))
    p, n = distribution(logits, setting), 20_000
    found = by(logits.expand(n, -1), [SamplingKey(setting, sample_index=7, token_index=i) for i in range(n)])
    counts = torch.bincount(torch.tensor(found.tokens), minlength=len(p)).double()
    assert counts[p == 0].sum() == 0
    often = p * n >= 5
    seen, wanted = ([*x[often].tolist(), float(x[~often].sum())] for x in (counts, p * n))
    if wanted[-1] < 5:
        seen, wanted = [*seen[:-2], sum(seen[-2:])], [*wanted[:-2], sum(wanted[-2:])]
    if len(wanted) > 1:
        assert chisquare(seen, wanted).pvalue > 1e-4


@needs_kernel
@pytest.mark.parametrize("V", [1, 7, 64, 65, 1000, 32_000])
def test_kernel_agrees_with_torch(V: int) -> None:
    """The kernel keys the token that fp64 keys, whatever the settings and the shape of the distribution."""
    chance = random.Random(V)
    scales = (0.0, 0.01, 1.0, 3.0, 20.0)
    logits = torch.stack([scales[i % 5] * torch.randn(V, generator=torch.Generator().manual_seed(i)) for i in range(30)])
    logits[::7] = logits[::7].round()  # many equals
    keys = [SamplingKey(SETTINGS[i % len(SETTINGS)], chance.randrange(9), chance.randrange(999)) for i in range(30)]
    ours, theirs = by_kernel(logits, keys), _sample_torch(logits, keys)
    assert ours.finite == theirs.finite
    # A uniform number may fall so near to a boundary that the rounding of fp32 weights decides; then both tokens are neighbours.
    differ = [i for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=True)) if a != b]
    assert len(differ) <= (1 if V >= 1000 else 0), differ


@needs_kernel
@pytest.mark.parametrize("V", [17, 1000, 5003])
def test_limits_are_exact_where_estimates_mislead(V: int) -> None:
    """The kernel estimates cutoffs from every sixteenth logit. Rows in which these tell nothing of the others keep the same tokens."""
    noise = torch.randn(V, generator=torch.Generator().manual_seed(V))
    sixteenth = torch.arange(V) % 16 == 0
    rows = [
        noise.sort().values, noise.sort(descending=True).values, torch.where(sixteenth, 5 + noise, noise),
        torch.where(sixteenth, noise - 5, noise), torch.where(sixteenth, 0.0, noise), (4 * noise).round(), torch.full((V,), 2.5),
        torch.where(torch.arange(V) == V // 2, 90.0, noise),
    ]  # fmt: skip
    sizes = sorted({2, 3, V // 300 + 2, V // 16, V // 8, V // 3, V // 2, V - 2, V - 1})
    limits = [{"top_k": k} for k in sizes if k > 0] + [{"top_p": p} for p in (0.02, 0.3, 0.5, 0.9, 0.999)]
    limits += [{"top_k": k, "top_p": p} for k in (V // 8 + 1, V // 5 + 1, V // 2) for p in (0.02, 0.7, 0.999)]
    keys = [SamplingKey(SamplingParams(1.5, seed=seed, **limit)) for limit in limits for seed in range(12)]
    for row in rows:
        logits = row.float().expand(len(keys), -1)
        ours, theirs = by_kernel(logits, keys).tokens, _sample_torch(logits, keys).tokens
        assert sum(a != b for a, b in zip(ours, theirs, strict=True)) <= 1


@pytest.mark.parametrize("by", PATHS)
def test_a_row_is_its_own(by) -> None:
    """A row's token is the same alone, in any batch, in any order."""
    logits = 3 * torch.randn(45, 333, generator=torch.Generator().manual_seed(0))
    keys = [SamplingKey(SETTINGS[i % len(SETTINGS)], i % 3, i) for i in range(45)]
    whole = by(logits, keys).tokens
    assert whole == [by(logits[i : i + 1], keys[i : i + 1]).tokens[0] for i in range(45)]
    order = random.Random(0).sample(range(45), 45)
    assert by(logits[order], [keys[i] for i in order]).tokens == [whole[i] for i in order]


@pytest.mark.parametrize("by", PATHS)
def test_edges(by) -> None:
    """Equals go to the smaller token, limits are exact, hopeless tokens are never drawn, and rows that are not finite are said."""
    logits = torch.tensor([0.6, 0.25, 0.1, 0.05]).log()

    def drawn(x: Tensor, s: SamplingParams) -> set[int]:
        return set(by(x.expand(300, -1), [SamplingKey(s, 0, i) for i in range(300)]).tokens)

    assert drawn(logits, SamplingParams(1.0, top_k=2)) == {0, 1}
    assert drawn(logits, SamplingParams(1.0, top_p=0.6)) == {0} and drawn(logits, SamplingParams(1.0, top_p=0.61)) == {0, 1}
    assert drawn(logits, SamplingParams(100.0, top_k=4, top_p=1.0)) == {0, 1, 2, 3}
    assert drawn(torch.zeros(100), SamplingParams()) == {0} and drawn(torch.zeros(100), SamplingParams(1.0, top_k=3)) == {0, 1, 2}
    assert drawn(torch.zeros(100), SamplingParams(1.0, top_p=0.05)) == {0, 1, 2, 3, 4}
    far = torch.full((130,), -500.0)
    far[77] = 0.0
    assert (
        drawn(far, SamplingParams(1.0)) == {77} == drawn(far, SamplingParams(1.0, top_k=5)) == drawn(far, SamplingParams(1.0, top_p=0.99))
    )
    bad = torch.zeros(4, 70)
    bad[1, 69], bad[2, 3], bad[3, 8] = torch.nan, torch.inf, -torch.inf
    for setting in (SamplingParams(), SamplingParams(1.0, top_p=0.9)):
        assert by(bad, [SamplingKey(setting)] * 4).finite == [True, False, False, False]


def test_one_row_for_each_key() -> None:
    """A count that does not fit is refused, and so are settings that mean nothing."""
    with pytest.raises(ValueError, match="2 rows"):
        sample(torch.zeros(2, 5), [SamplingKey(SamplingParams())])
    for bad in ({"temperature": -1}, {"temperature": True}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1.5}, {"seed": 1.5}):
        with pytest.raises(UserError):
            SamplingParams(**bad)
