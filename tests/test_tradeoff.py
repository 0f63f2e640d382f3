"""Sweeps, oracles, calibration, the controller: closed forms, properties, a constructed model, kills in the middle."""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.flop_counter import FlopCounterMode

from models import loud
from twoscale import exits, forward, geometry
from twoscale.config import ModelConfig, UserError, presets
from twoscale.data import TokenData, Tokenizer
from twoscale.model import LoopedGPT
from twoscale.model.flops import token_flops
from twoscale.tradeoff.calibrate import DEPTHS, Calibrator, Goal, Texts, fixed_sequence
from twoscale.tradeoff.controller import train_controller
from twoscale.tradeoff.evaluate import counted_flops, evaluate
from twoscale.tradeoff.heldout import HeldOut, heldout_part
from twoscale.tradeoff.points import Table, grid, mixed_depths
from twoscale.tradeoff.signals import exit_steps, record_signals
from twoscale.tradeoff.stats import interval, pareto, ratio_interval, student, upper_bound
from twoscale.tradeoff.sweep import Sweeper
from twoscale.train.world import World

ONE_GROUP = World(0, 1, torch.device("cpu"))

# -- statistics --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("freedom,p,t", [(1, 0.95, 6.3138), (4, 0.975, 2.7764), (10, 0.9, 1.3722), (30, 0.99, 2.4573)])
def test_student(freedom: int, p: float, t: float) -> None:
    """Quantiles as printed in the tables."""
    assert student(freedom, p) == pytest.approx(t, abs=1e-4)


def test_intervals_cover() -> None:
    """Over many draws of clustered data the interval holds the true mean about as often as it says, and the bound is exceeded no
    more often than delta; intervals that took tokens for independent would be far too narrow."""
    generator = np.random.default_rng(0)
    inside = below = naive = 0
    for trial in range(300):
        clusters = np.repeat(np.arange(30), generator.integers(5, 40, 30))
        values = generator.normal(0, 1, 30)[clusters] + generator.normal(0, 0.3, len(clusters))
        low, high = interval(values, clusters, resamples=400, seed=trial)
        inside += low <= 0 <= high
        below += upper_bound(values, clusters, 0.1) < 0
        low, high = interval(values, np.arange(len(values)), resamples=200, seed=trial)
        naive += low <= 0 <= high
    assert inside >= 0.88 * 300 and naive < 0.6 * 300
    assert below <= 0.1 * 300 + 3 * math.sqrt(300 * 0.09)
    assert upper_bound(np.ones(3), np.zeros(3), 0.1) == math.inf
    assert ratio_interval([(2.0, 4.0), (1.0, 2.0)]) == (0.5, 0.5, 0.5)
    ratio, low, high = ratio_interval([(1.0, 2.0), (3.0, 2.0), (2.0, 2.0)])
    assert low < ratio == 1.0 < high


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=20))
def test_pareto(points: list[tuple[int, int]]) -> None:
    """A point is on the front if and only if no other is as good in one and better in the other; of equals one is kept."""
    front = [points[i] for i in pareto(points)]
    for p in points:
        beaten = any(q[0] <= p[0] and q[1] <= p[1] and q != p for q in points)
        assert (p in front) != beaten
    assert len(front) == len(set(front))


# -- oracles -----------------------------------------------------------------------------------------------------

tables = st.integers(0, 2**31).map(lambda seed: torch.rand(5, 1, 3, generator=torch.Generator().manual_seed(seed)).double())


@settings(max_examples=60, deadline=None)
@given(tables, st.floats(0.01, 0.8))
def test_stay_is_least(table: torch.Tensor, eps: float) -> None:
    """No depths at which every token stays within eps of the full run, from there on, take fewer steps."""
    chosen = exits.Oracle.stay(table, eps).depths[0]
    stays = [[all(abs(float(table[j, 0, t] - table[-1, 0, t])) <= eps for j in range(k, 5)) for k in range(5)] for t in range(3)]
    allowed = [sum(depths) for depths in itertools.product(range(1, 6), repeat=3) if all(stays[t][k - 1] for t, k in enumerate(depths))]
    assert int(chosen.sum()) == min(allowed)


@settings(max_examples=60, deadline=None)
@given(tables, st.floats(0.0, 0.5))
def test_lagrange_is_least(table: torch.Tensor, price: float) -> None:
    """No policy at all has a lower loss + price x steps; also where the entries stand for depths of two groups."""
    vectors = torch.tensor([[1, 1], [3, 3], [1, 3], [3, 1], [2, 2]])
    for depths, cost in ((None, torch.arange(1.0, 6.0).double()), (vectors, vectors.double().mean(dim=1))):
        found = exits.Oracle.lagrange(table, price, depths).depths[0]
        losses = table[:, 0] + price * cost[:, None]
        least = min(sum(float(losses[k, t]) for t, k in enumerate(choice)) for choice in itertools.product(range(5), repeat=3))
        place = [
            (int(found[t]) - 1 if depths is None else next(i for i in range(5) if torch.equal(vectors[i], found[t]))) for t in range(3)
        ]
        assert sum(float(losses[k, t]) for t, k in enumerate(place)) == pytest.approx(least, abs=1e-12)


def test_table() -> None:
    """The table finds each token's depths among its rows."""
    assert set(mixed_depths(2, 3)) == {(1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2)}
    assert mixed_depths(1, 5) == [] and len(mixed_depths(9, 4)) == 18 and mixed_depths(2, 1) == []
    table = Table(torch.tensor([[1, 1], [2, 2], [1, 2]]), 2, torch.arange(6.0).view(3, 1, 2))
    assert table.at(torch.tensor([[[1, 2], [2, 2]]])).tolist() == [[4.0, 3.0]]


# -- FLOPs -------------------------------------------------------------------------------------------------------


def test_flops_of_the_paper() -> None:
    """By hand, paper size: layers of 12 C^2 weights, an adapter of 2 C^2 in each of three groups, V = 50304, 12 loops."""
    c, T, k = presets.paper().model, 512, 12
    C = 768
    layer = 2 * 12 * C * C
    seen = sum(4 * C * t for t in range(1, T + 1)) / T  # scores and their sum over values, for t tokens in sight
    by_hand = 8 * (layer + seen) + 4 * k * (layer + seen) + 3 * (2 * C * C + k * 2 * C * C) + 2 * C * 50304
    steps = torch.full((1, T, 3), k)
    assert counted_flops(c, steps)[0] == pytest.approx(by_hand, rel=1e-12)
    total, looks = counted_flops(c, steps, exits.KL(1e-3))
    assert looks == pytest.approx(3 * k * 2 * C * 50304) and total == pytest.approx(by_hand + looks)
    assert counted_flops(c, steps, exits.StepNorm(1e-3))[1] == 0


def test_flops_as_torch_counts() -> None:
    """torch counts attention over the whole context; otherwise the same as ours, at different depths of the groups."""
    c = dataclasses.replace(presets.tiny().model, block_size=32)
    model, loops = LoopedGPT(c, seed=0), (2, 5, 3)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        forward(model, torch.zeros(1, 32, dtype=torch.int64), loops=loops)
    assert counter.get_total_flops() == pytest.approx(32 * token_flops(c, 32, loops))
    ours = counted_flops(c, torch.tensor(loops).expand(1, 32, 3))[0]
    layers = c.n_layer - 4 + 2 + 2 * 5 + 3
    assert ours == pytest.approx(token_flops(c, 32, loops) - layers * 4 * c.n_embd * (32 - 16.5))


# -- held-out text -----------------------------------------------------------------------------------------------


def test_parts_share_no_document(shards: Path, tmp_path: Path) -> None:
    """The three parts are made of different documents, together all of them, the same every time; too little text is refused."""
    data, eot = TokenData(shards, "val"), Tokenizer.load(shards).eot
    stream = data.read(0, len(data)).tolist()
    parts = {role: heldout_part(data, eot, 8, role, 10_000) for role in ("fit", "certify", "report")}  # type: ignore[arg-type]
    again = heldout_part(data, eot, 8, "fit", 10_000)
    assert torch.equal(parts["fit"].ids, again.ids) and torch.equal(parts["fit"].clusters, again.clusters)
    owners = [set(p.clusters.flatten().tolist()) for p in parts.values()]
    assert not owners[0] & owners[1] and not owners[0] & owners[2] and not owners[1] & owners[2]
    total = sum(p.targets.numel() for p in parts.values())
    assert total >= len(stream) - 3 * 16
    few = Path(tmp_path / "few")
    from twoscale.config import DataConfig
    from twoscale.data import prepare

    (tmp_path / "text.txt").write_text("a b\n<|endoftext|>\nc d\n<|endoftext|>\ne f\n<|endoftext|>\ng h\n")
    prepare(DataConfig(source=str(tmp_path / "text.txt"), val_fraction=0.3), few)
    with pytest.raises(UserError, match="too few"):
        heldout_part(TokenData(few, "val"), eot, 8, "fit", 4)


# -- a constructed model -----------------------------------------------------------------------------------------


def two_speeds() -> tuple[LoopedGPT, HeldOut]:
    """A model in which half of the tokens have settled by step 2 and half by about step 10, and a text of both.

    Layers do nothing, so the group's map is x <- a x + (1 - a) e, channel by channel, from zero. An easy token lies in the quick channels;
    a hard one has a false answer there, and its true one in slow channels, where it takes some ten steps to outgrow the false one.
    """
    V, C, slow, quick = 32, 64, 0.86, 0.05
    c = ModelConfig(
        vocab_size=V, block_size=32, n_layer=1, n_head=2, n_embd=C, groups=((0,),), norm="branch", start="zeros", scale_embedding=False,
        tie_head=False, mean_loops=20,
    )  # fmt: skip
    model = LoopedGPT(c, seed=0)
    rate = torch.cat((torch.full((C // 2,), quick), torch.full((C // 2,), slow)))
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.zero_()
        adapter = model.groups[0].adapter
        assert adapter is not None and model.lm_head is not None and model.wpe is not None
        adapter.weight[:, :C], adapter.weight[:, C:] = torch.diag(rate), torch.diag(1 - rate)
        directions = torch.eye(C // 2)
        for token in range(V):
            target = (token * 7 + 3) % V
            if token % 2 == 0:
                model.wte.weight[token, : C // 2] = directions[target]
            else:
                model.wte.weight[token, : C // 2] = directions[(target + 1) % V]
                model.wte.weight[token, C // 2 :] = 1.35 * directions[target]
        model.lm_head.weight[:V, : C // 2] = directions[:V]
        model.lm_head.weight[:V, C // 2 :] = directions[:V]
    ids = torch.randint(0, V, (90, 32), generator=torch.Generator().manual_seed(1))
    targets = (ids * 7 + 3) % V
    return model.eval(), HeldOut(ids, targets, torch.arange(90)[:, None].expand(90, 32).contiguous(), "windows")


def test_sharpness(tmp_path: Path) -> None:
    """At the calibrated rule's budget of steps the sweep puts oracle, calibrated, rule on a coarse grid, fixed and random in this order,
    intervals apart. A token's loss is convex in its depth here, so depths drawn at random cost more than their mean (Jensen)."""
    model, text = two_speeds()
    texts = Texts(*(HeldOut(text.ids[i::3], text.targets[i::3], text.clusters[i::3], "windows") for i in range(3)))
    found = Calibrator(model, exits.StepNorm(0.1), texts, 20, 0.05).run(Goal(max_dce=0.12))
    rules = {g: exits.parse(word) for g, word in enumerate(found["rules"])}
    points = grid(model.config, 20, ("step-norm",), (0.0005, 0.005, 0.05, 0.5), None, rules)
    sweep = Sweeper(model, text, 20, tmp_path / "sweep.jsonl", {"checkpoint": "made", "weights": "x"}, ONE_GROUP, 1, 24).run(points)
    calibrated = sweep.family("calibrated")[0]
    budget = calibrated["mean_steps"]
    assert 5 < budget < 9, "about (2 + 11) / 2"

    def at_most(family: str) -> dict[str, Any]:
        return min((p for p in sweep.family(family) if p["mean_steps"] <= budget + 1e-9), key=lambda p: p["ce"])

    random = next(p for p in sweep.family("random") if p["id"].startswith("random~calibrated"))
    assert random["mean_steps"] == pytest.approx(budget, rel=0.06)
    ranked = [at_most("oracle-lagrange"), calibrated, at_most("step-norm"), at_most("fixed"), random]
    for better, worse in itertools.pairwise(ranked):
        assert better["dce_high"] < worse["dce_low"], [(p["id"], p["mean_steps"], p["dce_low"], p["dce_high"]) for p in ranked]
    front = [p["family"] for p in sweep.front("flops")]
    assert "calibrated" in front and "random" not in front


# -- calibration -------------------------------------------------------------------------------------------------


def test_bound_holds() -> None:
    """Over 300 random splits the setting that fixed-sequence testing keeps costs more than was asked no more often than delta."""
    delta, limit, generator = 0.1, 0.05, np.random.default_rng(3)
    true = np.linspace(0.0, 0.12, 13)  # the rise that each setting of a path really costs
    wrong = 0
    for _ in range(300):
        documents = np.repeat(np.arange(25), 20)
        shared = generator.normal(0, 0.15, (25, 1)) + generator.normal(0, 0.05, (25, len(true)))

        def bound(setting: Any, shared: np.ndarray = shared, documents: np.ndarray = documents) -> float:
            values = true[setting] + shared[documents, setting] + generator.normal(0, 0.3, len(documents))
            return upper_bound(values, documents, delta)

        kept = [c for c in fixed_sequence(list(range(len(true))), bound, limit) if c.passed]  # type: ignore[arg-type]
        wrong += bool(kept) and true[kept[-1].setting] > limit  # type: ignore[index]
    assert wrong <= delta * 300 + 2.5 * math.sqrt(300 * delta * (1 - delta)), wrong
    assert wrong > 0, "the test must be able to fail"


def test_goals() -> None:
    """So many steps on average; what cannot be reached or is asked twice is refused."""
    model, text = two_speeds()
    texts = Texts(text, text, text)
    found = Calibrator(model, exits.StepNorm(0.1), texts, 20, 0.05).run(Goal(mean_steps=6.5))
    assert found["report"]["calibrated"]["mean_steps"] <= 6.5 and found["bound"] > 0
    with pytest.raises(UserError, match="the quickest takes"):
        Calibrator(model, exits.StepNorm(0.1), texts, 20, 0.05).run(Goal(mean_steps=0.5))
    for wrong in ({}, {"max_dce": 0.1, "ms": 3.0}, {"max_dce": -1.0}, {"mean_steps": math.nan}):
        with pytest.raises(UserError, match="ask for one thing"):
            Goal(**wrong)
    with pytest.raises(UserError, match="no threshold"):
        Calibrator(model, exits.Fixed(3), texts, 20, 0.05)
    with pytest.raises(UserError, match="delta"):
        Calibrator(model, exits.StepNorm(0.1), texts, 20, 0.7)


def test_rivals_are_certified_alike() -> None:
    """The fixed depth beside the result is the last of its path whose bound keeps the limit, and the difference in steps is paired: where
    tokens need different depths its whole interval lies below zero."""
    model, text = two_speeds()
    texts = Texts(*(HeldOut(text.ids[i::9], text.targets[i::9], text.clusters[i::9], "windows") for i in range(3)))
    limit, found = 0.12, Calibrator(model, exits.StepNorm(0.1), texts, 20, 0.05).run(Goal(max_dce=0.12))
    report = found["report"]
    full = evaluate(model, texts.certify, None, 20).losses
    depths = [k for k in DEPTHS if k < 20]
    bounds = [
        upper_bound((evaluate(model, texts.certify, None, k).losses - full).numpy(), texts.certify.clusters.numpy(), 0.05 / 3)
        for k in depths
    ]
    last = next(i for i, bound in enumerate(bounds) if bound > limit) - 1
    assert found["delta"] == 0.05 and found["delta_each"] == 0.05 / 3, "three paths share the chance of error"
    told = [(t["rule"], t["passed"]) for t in found["tested"]["fixed"]]
    assert told == [(f"fixed:{k}", i <= last) for i, k in enumerate(depths[: last + 2])], "all that was tested is written down"
    assert [t["bound"] for t in found["tested"]["fixed"]] == pytest.approx(bounds[: last + 2])
    assert all(t["bound"] <= limit for path in ("calibrated", "single") for t in found["tested"][path] if t["passed"])
    assert found["by"] == dict.fromkeys(("fit", "certify", "report"), "windows") and found["version"] == 2
    assert found["window_fingerprints"]["report"] == texts.report.window_fingerprints and len(texts.report.window_fingerprints) == len(
        texts.report.ids
    )
    assert report["fixed"]["rule"] == f"fixed:{depths[last]}" and report["fixed"]["mean_steps"] == depths[last]
    assert report["default"]["rule"] == "fixed:20" and report["default"]["dce"] == 0
    d = report["differences"]["fixed"]
    assert (
        d["steps"] == pytest.approx(report["calibrated"]["mean_steps"] - depths[last])
        and d["steps_low"] <= d["steps"] <= d["steps_high"] < 0
    )


def test_notes_foretell() -> None:
    """What one pass noted tells when every token leaves, where tokens do not see each other; for rules that want two hits as well."""
    model, text = two_speeds()
    for rule in (exits.StepNorm(0.03), exits.Acceleration(0.02), exits.Acceleration(0.02, min_steps=9), exits.Confidence(0.3)):
        values = record_signals(model, text, rule, 20)[0][..., 0]
        assert values.shape == (20, text.ids.numel())
        assert torch.equal(exit_steps(rule, values), evaluate(model, text, rule, 20).steps.flatten())


# -- the controller ----------------------------------------------------------------------------------------------


def test_learned_rule() -> None:
    """Its features are those of the definitions, its choice the same for one row and for many."""
    config = ModelConfig(vocab_size=40, block_size=16, n_layer=3, n_head=2, n_embd=32, groups=((1,),), mean_loops=8)
    model = loud(config, seed=3, scale=0.1)
    ids = torch.randint(0, 40, (2, 12), generator=torch.Generator().manual_seed(0))
    seen = record_signals(model, HeldOut(ids, ids, ids, "windows"), exits.Acceleration(0.0), 6, exits.learned.features)[0]  # (K, n, F)
    from twoscale import trace

    states = trace(model, ids, loops=6).states[0].flatten(1, 2)
    norms, cosines, turns = geometry.step_norms(states), geometry.step_cosines(states), geometry.accelerations(states)
    size = states[:-1].norm(dim=-1)
    for k in range(1, 6):
        assert torch.allclose(seen[k, :, 1], (norms[k] / size[k]).log(), atol=1e-3)
        assert torch.allclose(seen[k, :, 2], (turns[k - 1] / size[k]).log(), atol=1e-3)
        assert torch.allclose(seen[k, :, 3], (norms[k] / norms[k - 1]).log(), atol=1e-3)
        assert torch.allclose(seen[k, :, 4], cosines[k - 1], atol=1e-2)
    slopes = torch.tensor([0.0, 1.0, 0.5, -0.4, 1.5, 0.3, 0.2])
    bias = -float((seen[3] @ slopes).median())  # so that about half of the tokens leave after the fourth step
    rule = exits.Learned(0.5, weights=((bias, *slopes[1:].tolist()),))
    together = forward(model, ids, exit=rule, loops=12).steps
    alone = torch.stack([forward(model, row[None], exit=rule, loops=12).steps[0] for row in ids])
    assert torch.equal(together, alone) and len(together.unique()) > 1


def test_learned_rule_on_states() -> None:
    """A head on the state sees the state and the step of the definitions, from the first step on; its choice is the same for one row and
    for many; one of another width is refused."""
    from twoscale import trace
    from twoscale.exits.learned import HIDDEN, score_of_state, state_features

    config = ModelConfig(vocab_size=40, block_size=16, n_layer=3, n_head=2, n_embd=32, groups=((1,),), mean_loops=8)
    model, chance = loud(config, seed=3, scale=0.1), torch.Generator().manual_seed(0)
    ids = torch.randint(0, 40, (3, 12), generator=chance)
    seen = record_signals(model, HeldOut(ids, ids, ids, "windows"), exits.Acceleration(0.0), 6, state_features)[0]  # (K, n, F)
    states = trace(model, ids, loops=6).states[0].flatten(1, 2)
    for k in range(6):
        expected = torch.cat((torch.tensor([1.0, math.log(k + 1)]).expand(36, 2), states[k + 1], states[k + 1] - states[k]), dim=1)
        assert torch.allclose(seen[k], expected, atol=1e-4)
    weights = torch.randn(HIDDEN * (3 + 64) + 1, generator=chance) * 0.3
    hidden, out, bias = weights[: HIDDEN * 66].view(HIDDEN, 66), weights[HIDDEN * 66 : -1], weights[-1]
    by_hand = (torch.nn.functional.gelu(seen[3] @ hidden.T) * out).sum(dim=1) + bias
    assert torch.allclose(score_of_state(weights, seen[3]), by_hand, atol=1e-4)
    weights[-1] -= by_hand.median()  # so that about half of the tokens leave after the fourth step
    rule = exits.Learned(0.5, weights=(tuple(weights.tolist()),), min_steps=4)
    together = forward(model, ids, exit=rule, loops=12).steps
    alone = torch.stack([forward(model, row[None], exit=rule, loops=12).steps[0] for row in ids])
    assert torch.equal(together, alone) and len(together.unique()) > 1
    assert (forward(model, ids, exit=exits.Learned(1.1, weights=rule.weights), loops=12).steps == 1).all()
    with pytest.raises(UserError, match="width 16"):
        forward(LoopedGPT(dataclasses.replace(config, n_embd=16), seed=0), ids, exit=rule, loops=4)
    with pytest.raises(UserError, match="finite weights"):
        exits.Learned(0.5, weights=(tuple(weights.tolist()[:-1]),))


def test_controller_learns() -> None:
    """On the constructed model it tells easy tokens from hard ones, which base rates cannot."""
    model, text = two_speeds()
    found = train_controller(model, text, 20)
    assert found["told"][0]["right"] > found["told"][0]["base"] + 0.05, found["told"]
    rule = exits.Learned(0.3, weights=tuple(map(tuple, found["heads"])))
    steps = evaluate(model, text, rule, 20).steps[..., 0].double()
    easy = text.ids % 2 == 0
    assert steps[~easy].mean() > steps[easy].mean() + 4
    with pytest.raises(UserError, match="another model"):
        forward(LoopedGPT(presets.nano().model, seed=0), [[1, 2]], exit=rule, loops=4)


@pytest.mark.parametrize("text", ["{}", '{"heads": [[1, 2]]}', '{"heads": [["a"]]}', "[", '{"heads": []}'])
def test_bad_controller(text: str, tmp_path: Path) -> None:
    """A file that is no controller is refused in one line."""
    (tmp_path / "controller.json").write_text(text)
    with pytest.raises(UserError):
        exits.parse(f"learned:0.1,file={tmp_path / 'controller.json'}")
    with pytest.raises(UserError, match="name the run's controller"):
        exits.parse("learned:0.1")


WORDS = (
    "acceleration:0.01,normalize=steps", "step-norm:1e-05,relative=true", "kl:0.001,read=coda,hits=2", "fixed:3", "random:4.5,least=2",
    "argmax-stable:4", "confidence:0.5", "gate:0.3,min_steps=2",
)  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
def test_spell(word: str) -> None:
    """A rule's words make the same rule again."""
    rule = exits.parse(word)
    assert exits.parse(exits.spell(rule)) == rule
