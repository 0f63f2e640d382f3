"""What a task's sweep measures: statistics against slow references, real exits against single samples, settings in their order."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import twoscale
from conftest import small_model
from models import loud
from twoscale import exits
from twoscale.config import UserError
from twoscale.tasks import Carry, Hops
from twoscale.tasks.task import HELD_OUT, Task
from twoscale.tradeoff.depth import depth_record, drop_bound, true_depths
from twoscale.tradeoff.evaluate import evaluate
from twoscale.tradeoff.heldout import HeldOut, task_part
from twoscale.tradeoff.stats import spearman
from twoscale.tradeoff.task_points import TASK_RULES, boundary, path_around, rule_family, rule_settings

TASK = Hops(5, 4, 3)


def a_model(task: Task = TASK, **changes: Any) -> twoscale.LoopedGPT:
    return loud(small_model(vocab_size=task.vocab_size, block_size=task.length, **changes))


# -- statistics --------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=2, max_size=30))
def test_spearman(pairs: list[tuple[int, int]]) -> None:
    """The correlation is Pearson's of the ranks, equal values sharing their mean rank; a constant has none."""
    x, y = (np.array(values, dtype=float) for values in zip(*pairs, strict=True))
    found = spearman(x, y, np.arange(len(x)) // 3, resamples=50)
    ranks = [np.array([(v < w).sum() + (v == w).sum() / 2 for w in v]) for v in (x, y)]
    if min(r.std() for r in ranks) == 0:
        assert found is None
    else:
        assert found is not None and found[0] == pytest.approx(np.corrcoef(*ranks)[0, 1]) and -1 - 1e-9 <= found[1] <= found[2] <= 1 + 1e-9


def test_spearman_interval() -> None:
    """The interval is that of the correlation over resampled samples, answers of one sample together."""
    generator = np.random.default_rng(1)
    depth = generator.integers(1, 6, 240)
    steps, clusters = depth + generator.integers(0, 4, 240), np.arange(240) // 8
    found = spearman(steps, depth, clusters, resamples=400, seed=3)
    assert found is not None
    drawn = []
    for weights in np.random.default_rng(3).multinomial(30, np.full(30, 1 / 30), size=400):
        places = np.concatenate([np.flatnonzero(clusters == c) for c in range(30) for _ in range(weights[c])])
        ranks = [np.array([(v < w).sum() + (v == w).sum() / 2 for w in v]) for v in (steps[places], depth[places])]
        drawn.append(np.corrcoef(*ranks)[0, 1])
    assert found[1:] == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])))


def test_bound_of_unchanged_answers() -> None:
    """Where no answer has changed the bound is that of A independent answers, ln(1/delta)/A; it rises with every answer that is lost."""
    text = task_part(TASK, "certify", 40)
    full = evaluate(a_model(), text, None, 3)
    right = dataclasses.replace(full, choices=text.targets.clamp(min=0))
    assert drop_bound(text, right, right, 0.05) == pytest.approx(-math.log(0.05) / 120)
    bounds = []
    for lost in (2, 6, 12):
        places = text.asked.nonzero()[::9][:lost]
        choices = right.choices.clone()
        choices[places[:, 0], places[:, 1]] += 1
        bounds.append(drop_bound(text, dataclasses.replace(right, choices=choices), right, 0.05))
        assert bounds[-1] > lost / 120, "above the drop itself"
    assert bounds == sorted(bounds)


# -- samples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [TASK, Carry(4)], ids=["hops", "carry"])
def test_parts(task: Task) -> None:
    """The parts share no sample, with each other or with training's validation, and a part of more samples begins with that of fewer."""
    parts = [task_part(task, role, 20) for role in ("fit", "certify", "report")]
    seen = [set(map(tuple, ids.tolist())) for ids in (*(p.ids for p in parts), task.batch(range(HELD_OUT, HELD_OUT + 20)).ids)]
    assert all(not a & b for i, a in enumerate(seen) for b in seen[i + 1 :]), "random samples are not equal by chance at this size"
    more = task_part(task, "report", 30)
    assert torch.equal(more.ids[:20], parts[2].ids) and more.by == "samples" and more.n_clusters == 30
    assert more.depth is not None and torch.equal(more.depth > 0, more.asked) and bool(more.asked[:, more.first_asked].all())


# -- real exits --------------------------------------------------------------------------------------------------

RULES = ("step-norm:relative=true", "acceleration", "acceleration:hits=1", "kl", "argmax-stable", "confidence", "cosine")


def in_the_middle(model: twoscale.LoopedGPT, text: HeldOut, word: str) -> exits.Rule:
    """A setting at which some tokens leave early and some do not."""
    found = rule_settings(model, text, rule_family(word), 6)
    return found[3 * len(found) // 5]


@pytest.mark.parametrize("word", RULES)
@pytest.mark.parametrize(
    "changes", [{}, {"groups": ((3, 4),), "start": "input", "inject": "none", "backprop_steps": None}], ids=["two", "one"]
)
def test_record_is_of_live_exits(word: str, changes: dict[str, Any]) -> None:
    """Accuracy, steps and both by true depth are those of `twoscale.forward` on one sample after the other, read at the answers alone."""
    model, text = a_model(**changes), task_part(TASK, "report", 20)
    rule = in_the_middle(model, text, word)
    full, found = evaluate(model, text, None, 6), evaluate(model, text, rule, 6)
    record = depth_record(text, found, full)
    assert text.depth is not None
    rows = []  # depth, right, right in the full run, steps
    for b in range(20):
        out, all_loops = (twoscale.forward(model, text.ids[b : b + 1], exit=exit, loops=6) for exit in (rule, None))
        for t in text.asked[b].nonzero().flatten().tolist():
            right = [float(o.logits[0, t].argmax() == text.targets[b, t]) for o in (out, all_loops)]
            rows.append((int(text.depth[b, t]), *right, float(out.steps[0, t].double().mean())))
    table = np.array(rows)
    assert record["accuracy"] == pytest.approx(table[:, 1].mean()) and record["mean_steps"] == pytest.approx(table[:, 3].mean())
    assert record["drop"] == pytest.approx((table[:, 2] - table[:, 1]).mean())
    for row in record["by_depth"]:
        mine = table[table[:, 0] == row["depth"]]
        assert (row["answers"], row["accuracy"], row["steps"]) == pytest.approx((len(mine), mine[:, 1].mean(), mine[:, 3].mean()))
    assert 1 < record["mean_steps"] < 6, "the rule does something here"


@pytest.mark.parametrize("word", RULES)
def test_answers_only(word: str) -> None:
    """With a rule for the answers alone every other token takes all loops; for all tokens as answers it is the rule itself."""
    model, text = a_model(), task_part(TASK, "report", 20)
    rule = in_the_middle(model, text, word)
    alone = evaluate(model, text, exits.AnswersOnly.of(rule, text.asked), 6)
    assert int(alone.steps[~text.asked].min()) == 6 > float(alone.steps[text.asked].double().mean())
    everywhere = evaluate(model, text, exits.AnswersOnly.of(rule, torch.ones_like(text.asked)), 6)
    plain = evaluate(model, text, rule, 6)
    assert torch.equal(everywhere.steps, plain.steps) and torch.equal(everywhere.choices, plain.choices)


def test_true_depths() -> None:
    """With the true depths every answer takes its depth, at most all loops, and every other token all loops."""
    text = task_part(TASK, "report", 12)
    found = evaluate(a_model(), text, true_depths(text, 3), 3)
    assert text.depth is not None
    wanted = torch.where(text.asked, text.depth.clamp(max=3), 3)
    assert torch.equal(found.steps, wanted[..., None].expand_as(found.steps))
    record = depth_record(text, found, found)
    assert record["spearman"] == pytest.approx(spearman(np.minimum(d := text.depth[text.asked].numpy(), 3), d, np.zeros(36))[0])  # type: ignore[index]


# -- settings ----------------------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.integers(-1, 299))
def test_boundary(n: int, last: int) -> None:
    """Bisection finds the last setting that keeps the accuracy, and what is certified comes nearer and nearer to it, in order."""
    rules: list[exits.Rule] = [exits.StepNorm(float(i)) for i in range(n)]
    last = min(last, n - 1)
    assert boundary(rules, lambda rule: rule.tau <= last) == last  # type: ignore[attr-defined]
    path = [int(rule.tau) for rule in path_around(rules, last)]  # type: ignore[attr-defined]
    assert path == sorted(set(path)) and min(max(last, 0), n - 1) in path


@pytest.mark.parametrize("word", [*TASK_RULES[:-1]])
def test_settings_go_from_most_steps_to_fewest(word: str) -> None:
    """The settings of every rule are in the order of the steps that answers would take in a full run."""
    from twoscale.tradeoff.signals import exit_steps, record_signals

    model, text = a_model(groups=((2,),)), task_part(TASK, "fit", 6)
    rule = rule_family(word)
    found = rule_settings(model, text, rule, 5)
    [seen] = record_signals(model, text, rule, 5)
    steps = [float(exit_steps(setting, seen[..., 0]).double().mean()) for setting in found[:: max(1, len(found) // 12)]]
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("fixed", "always there"), ("learned", "always there"), ("kl:0.1", "write kl without one"), ("kl:tau=0.1", "write kl without one"),
        ("kl:read=coda", "read by the lens"), ("nothing", "there is no exit rule"), ("kl:hops=2", "no setting 'hops'"),
    ],
)  # fmt: skip
def test_bad_rules(word: str, said: str) -> None:
    """A rule that cannot be swept on a task is refused with the reason."""
    with pytest.raises(UserError, match=said):
        rule_family(word)


def test_text_is_as_before() -> None:
    """In text every token is asked."""
    text = HeldOut(
        torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64), "windows"
    )
    assert bool(text.asked.all()) and text.n_asked == 6
