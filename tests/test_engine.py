"""The engine keeps the spec's laws: prefill = decode, batch invariance, honest cost; and agrees with a slow reference."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import twoscale
from conftest import small_model
from models import LAYOUTS, loud
from reference import Reference
from reference_rules import leaves
from twoscale import exits
from twoscale.config import ModelConfig
from twoscale.config.dtypes import WEIGHT_DTYPES, WeightDtype
from twoscale.engine import Engine, LoopRows, loop_params
from twoscale.engine.kernels.library import c_library
from twoscale.engine.kernels.quantize import quantize
from twoscale.engine.rows import Rows, make_part
from twoscale.model import LoopedGPT

NEAR = 1e-5  # a compared value this close to its threshold, relative, may fall on either side

RULES: list[exits.Rule] = [
    exits.StepNorm(1.5),
    exits.StepNorm(0.3, relative=True),
    exits.Acceleration(3.0),
    exits.Acceleration(0.9, normalize="steps"),
    exits.Acceleration(0.4, normalize="state", hits=1, min_steps=4),
    exits.Acceleration(3.0, keep="previous"),
    exits.KL(0.05),
    exits.KL(0.02, reverse=True, hits=2),
    exits.KL(0.05, read="coda"),
    exits.Entropy(0.02),
    exits.MinPKL(0.02),
    exits.ArgmaxStable(hits=2),
    exits.Cosine(0.05),
    exits.Confidence(0.08),
    exits.Confidence(0.08, read="coda"),
    exits.Fixed(3),
]


@pytest.fixture(autouse=True)
def _nan_in_fresh_memory() -> Iterator[None]:
    """Memory that nobody has written reads as NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True, eq=False)
class Noting(exits.Rule):
    """A rule that notes the values which another one compares."""

    rule: exits.Rule
    notes: dict[tuple[int, int, int, int], float] = field(default_factory=dict)

    @classmethod
    def of(cls, rule: exits.Rule) -> "Noting":
        return cls(rule, hits=rule.hits, min_steps=rule.min_steps, keep=rule.keep)

    @property
    def token_by_token(self) -> bool:  # type: ignore[override]
        return self.rule.token_by_token

    @property
    def needs_previous_update(self) -> bool:  # type: ignore[override]
        return self.rule.needs_previous_update

    def measure(self, view: exits.StepView) -> Tensor:
        value = torch.as_tensor(self.rule.measure(view)).expand(len(view.rows.positions))
        keys = zip(view.rows.prompt_indices.tolist(), view.rows.positions.tolist(), view.rows.k.tolist(), strict=True)
        self.notes.update({(b, t, view.group, k): v for (b, t, k), v in zip(keys, value.tolist(), strict=True)})
        return value

    def passes(self, value: Tensor) -> Tensor:
        return self.rule.passes(value)

    def remember(self, view: exits.StepView) -> Tensor | None:
        return self.rule.remember(view)


def agree(sequence: int, got: Tensor, steps: list[list[int]], expected: Tensor, wanted: list[list[int]], rule: Noting) -> None:
    """Steps are equal and logits within 1e-4, up to the first token whose compared value is a near tie (which is named)."""
    for t, (a, b) in enumerate(zip(steps, wanted, strict=True)):
        if a != b:
            tau = getattr(rule.rule, "tau", float("nan"))
            near = [(key, value) for key, value in rule.notes.items() if key[:2] == (sequence, t) and abs(value - tau) <= NEAR * abs(tau)]
            assert near, f"{rule.rule}: sequence {sequence}, token {t} took {a}, not {b}"
            print(f"near tie: {rule.rule}, {near}")
            return
        assert torch.allclose(got[t].double(), expected[t].double(), atol=1e-4), f"{rule.rule}: sequence {sequence}, token {t}"


def token_by_token(engine: Engine, rows: list[list[int]], **params: Any) -> tuple[list[Tensor], list[list[list[int]]]]:
    """Every sequence through the cache, one token a pass, all sequences together."""
    caches = [engine.new_cache(len(row), loop_params(engine.model, **params)) for row in rows]
    logits: list[list[Tensor]] = [[] for _ in rows]
    steps: list[list[list[int]]] = [[] for _ in rows]
    for t in range(max(map(len, rows))):
        live = [b for b, row in enumerate(rows) if t < len(row)]
        x, taken = engine.run([(b, caches[b], [rows[b][t]]) for b in live])
        for i, b in enumerate(live):
            logits[b].append(engine.model.head(x[i]))
            steps[b].append(taken[i].tolist())
    return [torch.stack(row) for row in logits], steps


def draw_rows(data: st.DataObject, max_rows: int = 4, longest: int = 14) -> list[list[int]]:
    return data.draw(st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=longest), min_size=1, max_size=max_rows))


def model_of(layout: str, seed: int = 0) -> LoopedGPT:
    """Loud, but with maps that contract: an expanding one blows rounding up past any tolerance within eight steps."""
    return loud(dataclasses.replace(small_model(), **LAYOUTS[layout]), seed, scale=0.1)


@given(st.data())
@settings(max_examples=120, deadline=None, derandomize=True)
def test_prefill_is_decode(data: st.DataObject) -> None:
    """A whole batch in parallel gives the same steps and logits as token by token through the cache; work is the sum of steps."""
    model = model_of(data.draw(st.sampled_from(sorted(LAYOUTS))), data.draw(st.integers(0, 3)))
    rule = Noting.of(data.draw(st.sampled_from(RULES)))
    rows, kernels = draw_rows(data), data.draw(st.sampled_from(["auto", "torch"]))
    out = twoscale.forward(model, rows, exit=rule, loops=8)
    engine = Engine(model, kernels=kernels)
    logits, steps = token_by_token(engine, rows, exit=rule, loops=8)
    for b, row in enumerate(rows):
        agree(b, logits[b], steps[b], out.logits[b, : len(row)], out.steps[b, : len(row)].tolist(), rule)
    assert engine.loop_steps == [sum(s[g] for row in steps for s in row) for g in range(model.config.n_groups)]


@given(st.data())
@settings(max_examples=80, deadline=None, derandomize=True)
def test_batch_invariance(data: st.DataObject) -> None:
    """A row's logits and steps are the same alone, in any batch and beside longer rows, in parallel and through the cache."""
    model = model_of(data.draw(st.sampled_from(sorted(LAYOUTS))))
    rule = Noting.of(data.draw(st.sampled_from(RULES)))
    rows = draw_rows(data)
    b = data.draw(st.integers(0, len(rows) - 1))
    together, alone = (twoscale.forward(model, r, exit=rule, loops=8) for r in (rows, [rows[b]]))
    n = len(rows[b])
    agree(b, alone.logits[0], alone.steps[0].tolist(), together.logits[b, :n], together.steps[b, :n].tolist(), rule)
    crowd, single = (token_by_token(Engine(model), r, exit=rule, loops=8) for r in (rows, [rows[b]]))
    agree(b, single[0][0], single[1][0], crowd[0][b], crowd[1][b], rule)


@pytest.mark.parametrize(
    ("rule", "layout"),
    [(r, name) for r in RULES for name in LAYOUTS if name in ("default", "norm on leaving") or r in RULES[:6]],
    ids=str,
)
def test_reference(rule: exits.Rule, layout: str) -> None:
    """Steps and logits agree with one token, one step, Python lists, in fp64."""
    model, noting = model_of(layout), Noting.of(rule)
    ids = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(1)).tolist()
    out = twoscale.forward(model, ids, exit=noting, loops=7)
    cached = token_by_token(Engine(model), ids, exit=noting, loops=7)
    for b, row in enumerate(ids):
        reference = Reference(model)
        logits, steps = reference.leaving(row, leaves(rule, reference), 7)
        agree(b, out.logits[b], out.steps[b].tolist(), logits, steps, noting)
        agree(b, cached[0][b], cached[1][b], logits, steps, noting)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rules_bite(rule: exits.Rule) -> None:
    """Every rule of these tests lets some tokens go early; so the laws above are about something."""
    ids = torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(0))
    steps = twoscale.forward(model_of("default"), ids, exit=rule, loops=8).steps
    assert steps.min() < 8 and (isinstance(rule, exits.Fixed) or len(steps.unique()) > 2)


def test_rules_of_their_own() -> None:
    """{group: rule} gives each group its own; a group without one runs all its loops."""
    model = loud(small_model())
    ids = torch.randint(0, 64, (2, 9))
    steps = twoscale.forward(model, ids, exit={1: exits.Fixed(2)}, loops=(5, 6)).steps
    assert (steps[..., 0] == 5).all() and (steps[..., 1] == 2).all()


@pytest.mark.parametrize("kernels", ["auto", "packed", "torch"])
def test_nobody_leaves(kernels: str) -> None:
    """Where no rule fires, parallel, through the cache and the model's own loop are the same."""
    model = loud(small_model())
    ids = torch.randint(0, 64, (3, 12))
    plain = twoscale.forward(model, ids, loops=4)
    rows = twoscale.forward(model, ids, loops=4, exit=exits.StepNorm(0.0))
    cached = token_by_token(Engine(model, kernels=kernels), ids.tolist(), loops=4)[0]
    assert (rows.steps == 4).all() and torch.allclose(rows.logits, plain.logits, atol=1e-4)
    assert torch.allclose(torch.stack(cached), plain.logits, atol=1e-4)


@pytest.mark.parametrize("pieces", [[5, 4, 1, 2], [1, 11], [3, 3, 3, 3]])
@pytest.mark.parametrize("rule", [exits.Acceleration(3.0), exits.KL(0.05)], ids=str)
def test_chunked_prefill(rule: exits.Rule, pieces: list[int]) -> None:
    """With kv="exact" it does not matter how a prompt is cut into pieces."""
    model, noting = loud(small_model()), Noting.of(rule)
    ids = torch.randint(0, 64, (1, 12)).tolist()[0]
    whole = twoscale.forward(model, [ids], exit=noting, loops=8)
    engine, done, steps = Engine(model), 0, []
    cache = engine.new_cache(12, loop_params(model, exit=noting, loops=8))
    for n in pieces:
        x, taken = engine.run([(0, cache, ids[done : done + n])])
        done, steps = done + n, steps + taken.tolist()
    agree(0, engine.model.head(x[-1:]), steps[-1:], whole.logits[0, -1:], whole.steps[0, -1:].tolist(), noting)
    assert steps == whole.steps[0].tolist()


def test_rows_of_different_depths_share_calls() -> None:
    """Rows that join a group while others are deep inside it get what they get alone."""
    model = loud(small_model(groups=((0, 1),)))
    rule = exits.Acceleration(3.0)
    ids = [[3], [9], [27], [50]]
    wanted = [token_by_token(Engine(model), [row], exit=rule, loops=8) for row in ids]
    engine, params = Engine(model), loop_params(model, exit=rule, loops=8)
    loop, results = LoopRows(engine, 0), {}
    waiting = list(range(len(ids)))
    with torch.inference_mode():
        while waiting or len(loop):
            if waiting:
                b = waiting.pop(0)
                cache = engine.new_cache(1, params)
                cache.extend(1)
                rows = Rows([make_part(b, cache, 0, 1)], torch.tensor([[0], ids[b]]), engine.kernels)
                loop.admit(rows, engine.embed(rows))
            finished = loop.advance()
            if finished is not None:
                results.update({part.prompt_index: (x, part.loop_step) for part, x in zip(finished.rows.parts, finished.x, strict=True)})
    assert len({n for _, n in results.values()}) > 1, "the rows should differ in depth"
    for b in range(len(ids)):
        x, n = results[b]
        for layers in (model.stages[1].blocks,):
            y = x[None, None]
            for block in layers:
                y = block(y)
        assert n == wanted[b][1][0][0][0]
        assert torch.allclose(model.head(y[0, 0]), wanted[b][0][0][0], atol=1e-4)


@pytest.mark.parametrize("kv", ["last", "ring:1", "ring:2", "ring:3", "ring:99"])
def test_what_the_cache_keeps(kv: str) -> None:
    """kv="last" and "ring:n" read what their words say: checked against lists of every key and value; ring:loops is exact."""
    model = loud(small_model(groups=((0,), (1, 2))))
    ids = torch.randint(0, 64, (10,)).tolist()
    kept = {"last": 1}.get(kv) or int(kv.split(":")[1])

    class Kept(Reference):
        """Token t at step k finds, of j's newest `kept` steps, the one congruent to k; where there is none, j's last."""

        def seen(self, layer: int, j: int, t: int, k: int) -> tuple[Tensor, Tensor]:
            last = self.last[layer, j]
            if j == t:
                return self.keys[layer, j, k]
            newest = [s for s in range(max(1, last - kept + 1), last + 1) if (s - k) % kept == 0] if last >= kept or k <= last else []
            return self.keys[layer, j, newest[-1] if newest else last]

    rule = Noting.of(exits.Acceleration(3.0))
    reference = Kept(model)
    logits, steps = reference.leaving(ids, leaves(rule.rule, reference), 7)
    got, taken = token_by_token(Engine(model), [ids], exit=rule, loops=7, kv=kv)
    agree(0, got[0], taken[0], logits, steps, rule)
    if kv == "ring:99":
        exact = token_by_token(Engine(model), [ids], exit=rule, loops=7)
        assert exact[1] == taken and torch.equal(exact[0][0], got[0])


def test_weights_that_change() -> None:
    """The inference copy follows the model's weights: after a change in place, results are the new ones."""
    model = loud(small_model())
    first = twoscale.generate(model, [[1, 2, 3]], 6).tokens
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-1.3)
    changed = twoscale.generate(model, [[1, 2, 3]], 6)
    fresh = LoopedGPT(model.config)
    fresh.load_state_dict(model.state_dict())
    assert changed.tokens == twoscale.generate(fresh, [[1, 2, 3]], 6).tokens != first


def test_deltas_under_autocast() -> None:
    """Under bf16 autocast states stay fp32, so that steps far below bf16's resolution are seen."""
    model = loud(small_model(groups=((1,),)))
    seen: list[float] = []

    @dataclass(frozen=True)
    class Small(exits.Rule):
        def measure(self, view: exits.StepView) -> Tensor:
            assert view.step.dtype == torch.float32
            seen.append(float((view.step.norm(dim=-1) / view.after.norm(dim=-1)).min()))
            return view.step[:, 0]

        def passes(self, value: Tensor) -> Tensor:
            return torch.zeros_like(value, dtype=torch.bool)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = twoscale.forward(model, [[1, 2, 3]], exit=Small(), loops=3)
        assert torch.allclose(out.logits, twoscale.forward(model, [[1, 2, 3]], loops=3).logits, atol=0.1)
    state = twoscale.trace(model, torch.tensor([[1, 2, 3]]), loops=3).states[0]
    assert len(seen) == 3 and state.dtype == torch.float32


def test_config_without_groups() -> None:
    """A plain GPT decodes too; it has no steps to count."""
    model = loud(ModelConfig(vocab_size=64, block_size=32, n_layer=2, n_head=4, n_embd=32, groups=()))
    gen = twoscale.generate(model, [[1, 2, 3]], 5)
    assert twoscale.forward(model, [[1, 2, 3, *gen.tokens[0]]]).logits[0, 2:-1].argmax(-1).tolist() == gen.tokens[0]
    assert gen.steps == [[()] * 5]


BITS = [(2, 16, "fp32"), (3, 32, "fp32"), (2, 48, "fp32"), (1, 64, "fp32"), (2, 72, "fp32"), (1, 96, "fp32")]
BITS += [(heads, head, dtype) for dtype in WEIGHT_DTYPES[1:] for heads, head in ((3, 32), (4, 72))]


@pytest.mark.parametrize("heads, head, dtype", BITS)
@pytest.mark.parametrize("exit", [exits.Acceleration(1.0, normalize="steps"), None], ids=["exits", "all loops"])
def test_bits(heads: int, head: int, dtype: WeightDtype, exit: exits.Rule | None) -> None:
    """With the C kernels a row's states do not depend, to the bit, on the rows beside it: whole, in pieces, one by one, in company, with
    weights in any dtype, with exits and without."""
    if c_library() is None:
        pytest.skip("no C compiler on this machine")
    config = dataclasses.replace(small_model(block_size=64), n_head=heads, n_embd=heads * head)
    model = loud(config, 0, scale=0.1)
    model = model if dtype == "fp32" else quantize(model, dtype)
    chance = torch.Generator().manual_seed(1)
    ids = torch.randint(0, config.vocab_size, (4, 23), generator=chance).tolist()

    def states(*pieces: list[int], company: int = 0) -> torch.Tensor:
        engine, params = Engine(model), loop_params(model, loops=5, exit=exit)
        mine, others, found = engine.new_cache(64, params), [engine.new_cache(64, params) for _ in range(company)], []
        for piece in pieces:
            x, _ = engine.run(
                [*((0, cache, other[: 1 + len(piece) // 2]) for cache, other in zip(others, ids[1:], strict=False)), (0, mine, piece)]
            )
            found.append(x[-len(piece) :])
        return torch.cat(found)

    want = states(ids[0])
    assert torch.equal(states(*([t] for t in ids[0])), want)
    assert torch.equal(states(ids[0][:9], ids[0][9:16], ids[0][16:]), want)
    assert torch.equal(states(ids[0][:7], ids[0][7:8], ids[0][8:], company=3), want)
