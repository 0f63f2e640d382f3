"""What a calibration tests, and what its certificates say of several paths at once; the front of a sweep."""

import itertools
import math

import numpy as np

from constructed import a_point, a_sweep
from twoscale.tradeoff.calibrate import best_path
from twoscale.tradeoff.stats import pareto, upper_bound
from twoscale.tradeoff.summary import PRINTED


def test_bound_holds_for_the_better_of_several_paths() -> None:
    """Of three paths tested on the same documents, each at a third of delta, the chance that any kept setting costs more than was asked is
    delta at most; at the whole delta each it would be more."""
    limit, generator = 0.05, np.random.default_rng(5)
    wrong = {0.1: 0, 0.1 / 3: 0}
    documents = np.repeat(np.arange(25), 20)
    for _ in range(300):
        values = [0.051 + np.repeat(generator.normal(0, 0.15, 25), 20) + generator.normal(0, 0.3, len(documents)) for _ in range(3)]
        for delta in wrong:
            wrong[delta] += any(upper_bound(v, documents, delta) <= limit for v in values)
    assert wrong[0.1 / 3] <= 0.1 * 300 + 2.5 * math.sqrt(300 * 0.1 * 0.9) < wrong[0.1], wrong


def test_path_is_best() -> None:
    """Where costs add up, every setting of the path is the cheapest for its steps among all combinations, and steps fall along it."""
    generator = np.random.default_rng(0)
    costs = []
    for _ in range(3):
        rises = np.concatenate(([0.0], np.cumsum(np.sort(generator.uniform(0, 0.1, 5)))))
        costs.append(list(zip([30.0, 16.0, 8.0, 5.0, 3.0, 2.0], rises.tolist(), strict=True)))
    weights = [0.5, 1.0, 1.5]
    path = best_path(costs, weights, longest=100)

    def both(choice: tuple[int, ...]) -> tuple[float, float]:
        return sum(w * costs[g][j][0] for g, (j, w) in enumerate(zip(choice, weights, strict=True))), sum(
            costs[g][j][1] for g, j in enumerate(choice)
        )

    everything = [both(choice) for choice in itertools.product(range(6), repeat=3)]
    start = next(i for i, c in enumerate(path) if not any(s <= both(c)[0] and k < both(c)[1] - 1e-9 for s, k in everything))
    assert start <= 2, "at most two milder settings come first"
    for choice in path[start:]:
        steps, cost = both(choice)
        assert not any(s <= steps and c < cost - 1e-9 for s, c in everything)
    assert [both(c)[0] for c in path] == sorted((both(c)[0] for c in path), reverse=True)
    assert best_path([[(4.0, 0.0), (2.0, -0.3), (1.0, 0.1)]], [1.0])[0] == (1,), "a gain counts as no cost, not as a reason to stop"
    free = [[(30.0 - 5 * j, -0.01) if j else (30.0, 0.0) for j in range(6)]] * 2
    assert best_path(free, [1.0, 1.0])[:3] == [(1, 1), (3, 3), (5, 5)], "where leaving seems free, milder settings are tested first"


def test_a_front_without_differences_that_cannot_be_printed() -> None:
    """A point that costs more and wins by less than half of the last printed digit is not on the front; one that wins by more is."""
    points = [(1.0, 2.0), (2.0, 2.0 - 7e-8), (3.0, 1.9999), (4.0, 1.9999 - 4e-5)]
    assert pareto(points) == [0, 1, 2, 3] and pareto(points, PRINTED) == [0, 2]
    sweep = a_sweep(a_point("fixed:4", (3.9, 4.0, 4.1), 4.0, 7e-8), a_point("step-norm:1", (4.9, 5.0, 5.1), 5.0))
    assert [p["id"] for p in sweep.front("ms")] == ["fixed:4"]
