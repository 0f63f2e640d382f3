"""Intervals and bounds on means over tokens that come in clusters (documents): tokens of one document are not independent.

Every draw is seeded, so the same measurements give the same intervals.

Shapes: D clusters, R resamples, n tokens.
"""

from collections.abc import Sequence

import numpy as np

Array = np.ndarray
RESAMPLES = 2000


def by_cluster(values: Array, clusters: Array) -> tuple[Array, Array]:
    """Sums of the values and counts of the tokens of each cluster, (D,) each."""
    _, place = np.unique(clusters.ravel(), return_inverse=True)
    counts = np.bincount(place).astype(float)
    return np.bincount(place, weights=values.ravel().astype(float)), counts


def interval(values: Array, clusters: Array, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """A bootstrap interval for the mean over tokens, resampling whole clusters."""
    sums, counts = by_cluster(values, clusters)
    weights = resampled(len(sums), resamples, seed)
    means = (weights @ sums) / (weights @ counts)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def resampled(clusters: int, resamples: int, seed: int) -> Array:
    """How often each cluster is drawn in each resample: (R, D)."""
    return np.random.default_rng(seed).multinomial(clusters, np.full(clusters, 1 / clusters), size=resamples)


def spearman(
    x: Array, y: Array, clusters: Array, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float] | None:
    """Spearman's rank correlation of x and y (n,), equal values sharing their mean rank, with a bootstrap interval over clusters.

    None where one of the two is constant. Both take few different values: counts of the pairs are resampled, not the tokens.
    """
    kinds = [np.unique(values.ravel(), return_inverse=True) for values in (x, y, clusters)]
    shape = tuple(len(values) for values, _ in kinds)
    place = np.ravel_multi_index(tuple(where.ravel() for _, where in kinds), shape)
    counts = np.bincount(place, minlength=int(np.prod(shape))).reshape(-1, shape[2]).astype(float)  # (pairs, D)
    tables = np.concatenate((np.ones((1, shape[2])), resampled(shape[2], resamples, seed))) @ counts.T  # the sample itself comes first
    found = _rank_correlation(tables.reshape(-1, *shape[:2]))
    if np.isnan(found[0]):
        return None
    drawn = found[1:][np.isfinite(found[1:])]
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2]) if len(drawn) else (found[0], found[0])
    return float(found[0]), float(low), float(high)


def _rank_correlation(tables: Array) -> Array:
    """Spearman's correlation for each table of counts (R, X, Y), values ascending: (R,); NaN where one of the two is constant."""
    total = tables.sum(axis=(1, 2))
    ranks = []
    for axis in (2, 1):
        margin = tables.sum(axis=axis)  # (R, X) or (R, Y)
        ranks.append(np.cumsum(margin, axis=1) - margin / 2 - total[:, None] / 2)  # mean rank of a value, centred
    a, b = ranks
    covariance = np.einsum("rxy,rx,ry->r", tables, a, b)
    spread = (tables.sum(axis=2) * a**2).sum(axis=1) * (tables.sum(axis=1) * b**2).sum(axis=1)
    return np.where(spread > 0, covariance / np.sqrt(np.where(spread > 0, spread, 1.0)), np.nan)


def upper_bound(values: Array, clusters: Array, delta: float) -> float:
    """A bound that the true mean over tokens exceeds with probability delta at most, by Student's t over clusters.

    The mean is a ratio (sum of values over number of tokens), linearised; with one cluster there is no bound.
    """
    sums, counts = by_cluster(values, clusters)
    n = len(sums)
    if n < 2:
        return float("inf")
    mean = sums.sum() / counts.sum()
    residual = (sums - mean * counts) / counts.mean()
    error = np.sqrt((residual**2).sum() / (n - 1) / n)
    return float(mean + student(n - 1, 1 - delta) * error)


def student(freedom: int, p: float) -> float:
    """The p-quantile of Student's t, p from 0.5 on: with t = sqrt(n) tan(a) its distribution is the integral of cos(a)^(n - 1)."""
    angles = np.linspace(0, np.pi / 2, 20_001)
    density = np.cos(angles) ** (freedom - 1)
    mass = np.concatenate(([0.0], np.cumsum((density[1:] + density[:-1]) / 2)))
    return float(np.sqrt(freedom) * np.tan(np.interp(2 * p - 1, mass / mass[-1], angles)))


def ratio_interval(
    pairs: Sequence[tuple[float, float]], level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float, float]:
    """Sum over sum of repeats (value, reference), with a bootstrap interval over the repeats."""
    x = np.asarray(pairs, dtype=float)
    draws = np.random.default_rng(seed).integers(0, len(x), size=(resamples, len(x)))
    sums = x[draws].sum(axis=1)
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [(1 - level) / 2, (1 + level) / 2])
    ratio = float(x[:, 0].sum() / x[:, 1].sum())
    return ratio, min(ratio, float(low)), max(ratio, float(high))


def pareto(points: Sequence[tuple[float, float]], tolerance: float = 0.0) -> list[int]:
    """Places of the points (cost, loss) that no other beats in both, by rising cost; a loss is lower only by more than the tolerance."""
    front, best = [], np.inf
    for i in sorted(range(len(points)), key=lambda i: points[i]):
        if points[i][1] < best - tolerance:
            front.append(i)
            best = points[i][1]
    return front
