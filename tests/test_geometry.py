"""The statistics on maps with closed-form answers, their bounds, and their behaviour at the edges."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from twoscale import geometry
from twoscale.config import UserError

K = 30
CLOSE = {"atol": 1e-5, "rtol": 1e-5}


def iterate(f: Callable[[Tensor], Tensor], x: Tensor, steps: int = K) -> Tensor:
    states = [x]
    for _ in range(steps):
        states.append(f(states[-1]))
    return torch.stack(states)


def rotation(angle: float, scale: float = 1.0) -> Tensor:
    return scale * torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)


START = torch.tensor([[3.0, 4.0], [-1.0, 2.0], [0.5, 0.1]], dtype=torch.float64)  # three tokens in the plane
R0 = START.norm(dim=-1)


@pytest.mark.parametrize("c", [0.5, 0.9, -0.5])
def test_contraction(c: float) -> None:
    """x <- c x: ||D^k|| = |1-c| |c|^k r, cosine = sign c, normalised acceleration the constant |1-c|/(1+|c|)."""
    x = iterate(lambda s: c * s, START)
    k = torch.arange(K, dtype=torch.float64)[:, None]
    norm = abs(1 - c) * abs(c) ** k * R0
    assert torch.allclose(geometry.step_norms(x), norm, **CLOSE)
    assert torch.allclose(geometry.relative_step_norms(x), torch.full((K, 3), abs(1 - c), dtype=torch.float64), **CLOSE)
    assert torch.allclose(geometry.step_cosines(x), torch.full((K - 1, 3), math.copysign(1, c), dtype=torch.float64), **CLOSE)
    assert torch.allclose(geometry.accelerations(x), abs(1 - c) * norm[:-1], **CLOSE)
    constant = torch.full((K - 1, 3), abs(1 - c) / (1 + abs(c)), dtype=torch.float64)
    assert torch.allclose(geometry.accelerations(x, "steps"), constant, atol=1e-5)
    by_state = abs(1 - c) ** 2 / abs(c)  # ||D^k - D^(k-1)|| = (1-c)^2 |c|^(k-1) r, ||x^k|| = |c|^k r
    assert torch.allclose(geometry.accelerations(x, "state"), torch.full((K - 1, 3), by_state, dtype=torch.float64), **CLOSE)
    radial, tangential = geometry.radial_tangential(x)
    assert torch.allclose(radial, -(1 - c) * abs(c) ** k * R0, **CLOSE) and tangential.abs().max() < 1e-9
    gaps = geometry.distances(x, torch.zeros(2, dtype=torch.float64))
    assert torch.allclose(gaps, abs(c) ** torch.arange(K + 1, dtype=torch.float64)[:, None] * R0, **CLOSE)
    assert torch.allclose(geometry.contraction_rate(gaps), torch.full((3,), abs(c), dtype=torch.float64), **CLOSE)
    assert names(geometry.verdicts(x)) == ["settling"] * 3


@pytest.mark.parametrize("angle", [0.1, 0.7, 2.5])
def test_rotation(angle: float) -> None:
    """x <- R x: steps of constant length 2 r sin(angle/2), cosine cos(angle), no radial growth on the chord's middle; circling."""
    x = iterate(lambda s: s @ rotation(angle).T, START)
    norm = 2 * math.sin(angle / 2) * R0
    assert torch.allclose(geometry.step_norms(x), norm.expand(K, 3), **CLOSE)
    assert torch.allclose(geometry.step_cosines(x), torch.full((K - 1, 3), math.cos(angle), dtype=torch.float64), **CLOSE)
    assert torch.allclose(geometry.accelerations(x), (2 * math.sin(angle / 2) * norm).expand(K - 1, 3), **CLOSE)
    steps = torch.full((K - 1, 3), math.sin(angle / 2), dtype=torch.float64)
    assert torch.allclose(geometry.accelerations(x, "steps"), steps, **CLOSE)
    by_state = torch.full((K - 1, 3), 4 * math.sin(angle / 2) ** 2, dtype=torch.float64)
    assert torch.allclose(geometry.accelerations(x, "state"), by_state, **CLOSE)
    assert torch.allclose(geometry.contraction_rate(geometry.step_norms(x)), torch.ones(3, dtype=torch.float64), **CLOSE)
    radial, tangential = geometry.radial_tangential(x)
    assert torch.allclose(radial, ((math.cos(angle) - 1) * R0).expand(K, 3), **CLOSE)
    assert torch.allclose(tangential, (math.sin(angle) * R0).expand(K, 3), **CLOSE)
    assert names(geometry.verdicts(x)) == ["circling"] * 3


@pytest.mark.parametrize("scale,verdict", [(0.8, "settling"), (1.05, "drifting")])
def test_spiral(scale: float, verdict: str) -> None:
    """x <- s R x: cosine cos(angle), steps shrink or grow by s; an inward spiral settles, an outward one drifts."""
    x = iterate(lambda s: s @ rotation(0.6, scale).T, START)
    chord = math.sqrt(1 + scale**2 - 2 * scale * math.cos(0.6))
    k = torch.arange(K, dtype=torch.float64)[:, None]
    assert torch.allclose(geometry.step_norms(x), chord * scale**k * R0, **CLOSE)
    assert torch.allclose(geometry.step_cosines(x), torch.full((K - 1, 3), math.cos(0.6), dtype=torch.float64), **CLOSE)
    wanted = torch.full((K - 1, 3), chord / (1 + scale), dtype=torch.float64)
    assert torch.allclose(geometry.accelerations(x, "steps"), wanted, **CLOSE)
    plain = chord**2 * scale ** (k[1:] - 1) * R0
    assert torch.allclose(geometry.accelerations(x), plain, **CLOSE)
    assert torch.allclose(geometry.accelerations(x, "state"), torch.full((K - 1, 3), chord**2 / scale, dtype=torch.float64), **CLOSE)
    assert torch.allclose(geometry.relative_step_norms(x), torch.full((K, 3), chord, dtype=torch.float64), **CLOSE)
    radial, tangential = geometry.radial_tangential(x)
    assert torch.allclose(radial, (scale * math.cos(0.6) - 1) * scale**k * R0, **CLOSE)
    assert torch.allclose(tangential, scale * math.sin(0.6) * scale**k * R0, **CLOSE)
    assert torch.allclose(geometry.contraction_rate(geometry.step_norms(x)), torch.full((3,), scale, dtype=torch.float64), **CLOSE)
    assert torch.allclose(geometry.distances(x, torch.zeros(2).double()), scale ** torch.arange(K + 1.0).double()[:, None] * R0, **CLOSE)
    assert names(geometry.verdicts(x)) == [verdict] * 3


def test_translation() -> None:
    """x <- x + v: constant steps, cosine 1, no acceleration in any form; drifting."""
    v = torch.tensor([0.3, -0.4], dtype=torch.float64)
    x = iterate(lambda s: s + v, START)
    assert torch.allclose(geometry.step_norms(x), torch.full((K, 3), 0.5, dtype=torch.float64), **CLOSE)
    assert torch.allclose(geometry.step_cosines(x), torch.ones(K - 1, 3, dtype=torch.float64), **CLOSE)
    for normalize in (None, "steps", "state"):
        assert geometry.accelerations(x, normalize).abs().max() < 1e-5
    radial, tangential = geometry.radial_tangential(x)
    assert torch.allclose(radial**2 + tangential**2, torch.full((K, 3), 0.25, dtype=torch.float64), **CLOSE)
    assert torch.allclose(geometry.contraction_rate(geometry.step_norms(x)), torch.ones(3, dtype=torch.float64), **CLOSE)
    assert names(geometry.verdicts(x)) == ["drifting"] * 3


def test_two_cycle() -> None:
    """x <- 2 m - x: steps alternate, cosine -1, normalised acceleration stuck at 1; circling."""
    m = torch.tensor([1.0, 1.0], dtype=torch.float64)
    x = iterate(lambda s: 2 * m - s, START)
    norm = 2 * (START - m).norm(dim=-1)
    assert torch.allclose(geometry.step_norms(x), norm.expand(K, 3), **CLOSE)
    assert torch.allclose(geometry.step_cosines(x), -torch.ones(K - 1, 3, dtype=torch.float64), **CLOSE)
    assert torch.allclose(geometry.accelerations(x), (2 * norm).expand(K - 1, 3), **CLOSE)
    assert torch.allclose(geometry.accelerations(x, "steps"), torch.ones(K - 1, 3, dtype=torch.float64), **CLOSE)
    by_state = 2 * norm / x[1:-1].norm(dim=-1)
    assert torch.allclose(geometry.accelerations(x, "state"), by_state, **CLOSE)
    assert names(geometry.verdicts(x)) == ["circling"] * 3


@pytest.mark.parametrize("width", [2, 128])
def test_single_precision(width: int) -> None:
    """In fp32, as models run, a contraction's statistics keep their formulas as long as its steps are above rounding."""
    x = iterate(lambda s: 0.7 * s, torch.randn(5, width), 20)
    assert torch.allclose(geometry.step_cosines(x), torch.ones(19, 5), atol=1e-5)
    assert torch.allclose(geometry.accelerations(x, "steps"), torch.full((19, 5), 0.3 / 1.7), atol=1e-5)
    assert torch.allclose(geometry.step_norms(x), 0.3 * 0.7 ** torch.arange(20.0)[:, None] * x[0].norm(dim=-1), rtol=1e-5, atol=1e-6)
    assert torch.allclose(geometry.contraction_rate(geometry.step_norms(x)), torch.full((5,), 0.7), atol=1e-5)


def names(codes: Tensor) -> list[str]:
    return [geometry.VERDICTS[i] for i in codes.tolist()]


@given(st.integers(0, 10_000), st.integers(2, 12), st.integers(1, 6))
@settings(max_examples=50, deadline=None)
def test_bounds(seed: int, steps: int, width: int) -> None:
    """For any states: normalised acceleration in [0, 1], cosines in [-1, 1], radial and tangential parts make up the step."""
    x = torch.randn(steps + 1, 4, width, generator=torch.Generator().manual_seed(seed)) * 10
    a = geometry.accelerations(x, "steps")
    assert (a >= 0).all() and (a <= 1 + 1e-6).all()
    assert (geometry.step_cosines(x).abs() <= 1).all()
    radial, tangential = geometry.radial_tangential(x)
    assert torch.allclose((radial**2 + tangential**2).sqrt(), geometry.step_norms(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "matrix,radius", [(rotation(0.7, 0.8), 0.8), (torch.diag(torch.tensor([0.3, -1.2])).double(), 1.2), (rotation(1.9), 1.0)]
)
def test_spectral_radius(matrix: Tensor, radius: float) -> None:
    """Power iteration finds the largest modulus of the map's eigenvalues, complex pairs and negative ones included."""
    found = geometry.spectral_radius(lambda s: s @ matrix.T, START, iterations=400, warm=100)
    assert torch.allclose(found, torch.full((3,), radius, dtype=torch.float64), atol=1e-5)


def test_spectral_radius_of_a_curved_map() -> None:
    """The Jacobian is taken at the state: tanh(w x) at its fixed point 0 has radius w, elsewhere less."""
    at_zero = geometry.spectral_radius(lambda s: torch.tanh(0.9 * s), torch.zeros(1, 3))
    elsewhere = geometry.spectral_radius(lambda s: torch.tanh(0.9 * s), torch.ones(1, 3))
    assert abs(float(at_zero) - 0.9) < 1e-5
    assert abs(float(elsewhere) - 0.9 * (1 - math.tanh(0.9) ** 2)) < 1e-5


def test_drift_to_loop_by_hand() -> None:
    """All variants on a hand-made pair of groups: steps of 4, 1, 1; the next group starts, is projected, moves and ends elsewhere."""
    x = torch.tensor([[0.0, 0.0], [4.0, 0.0], [5.0, 0.0], [6.0, 0.0]])[:, None]
    nxt = torch.tensor([[6.0, 10.0], [6.0, 3.0], [6.0, 6.0]])[:, None]
    ratios = geometry.drift_to_loop(x, nxt, projected=torch.tensor([[6.0, 1.0]]), next_input=torch.tensor([[6.0, 0.0]]))
    wanted = {"initial": 10, "projected": 1, "first": 3, "settled": 6, "input": 0}
    for name, drift in wanted.items():
        assert float(ratios[name]) == pytest.approx(drift / 2) and float(ratios[name + "_k1"]) == pytest.approx(drift / 1)
    assert set(ratios) == {n + s for n in wanted for s in ("", "_k1")}
    assert "projected" not in geometry.drift_to_loop(x, nxt) and "settled_k1" in geometry.drift_to_loop(x, nxt)


def test_edges() -> None:
    """One step, no movement at all, and too few states: defined results or a clear error."""
    one = torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]]])
    assert geometry.step_norms(one).tolist() == [[5.0]] and geometry.step_cosines(one).shape == (0, 1)
    assert geometry.accelerations(one).shape == (0, 1) and names(geometry.verdicts(one)) == ["undecided"]
    assert math.isnan(float(geometry.drift_to_loop(one, one)["settled_k1"])) and float(geometry.drift_to_loop(one, one)["settled"]) == 0
    still = torch.ones(8, 2, 3)
    assert geometry.step_norms(still).abs().max() == 0 and geometry.step_cosines(still).isnan().all()
    assert names(geometry.verdicts(still)) == ["settling"] * 2
    assert geometry.drift_to_loop(still, still + 1)["settled"].isnan().all()
    assert geometry.contraction_rate(torch.zeros(5, 2)).isnan().all()
    assert set(geometry.token_statistics(one)) == {"step_norm", "relative_step_norm", "radial", "tangential"}
    broken = torch.randn(8, 2, 3)
    broken[3, 1] = math.nan
    assert names(geometry.verdicts(broken))[1] == "undecided" and names(geometry.verdicts(broken * math.inf)) == ["undecided"] * 2
    assert geometry.step_norms(broken)[:, 0].isfinite().all() and geometry.step_norms(broken)[2:4, 1].isnan().all()
    assert float(geometry.spectral_radius(lambda s: 0.5 * s, torch.ones(1, 3), iterations=4)) == pytest.approx(0.5, abs=1e-5)
    with pytest.raises(UserError, match="at least 1 step"):
        geometry.step_norms(torch.zeros(1, 2, 3))
    with pytest.raises(UserError, match="choose None"):
        geometry.accelerations(still, "other")  # type: ignore[arg-type]


def test_rounding_is_not_geometry() -> None:
    """Cosines of steps that are nothing but rounding are not counted."""
    x = iterate(lambda s: 0.3 * s + 7, START.float(), 40)
    cosines = geometry.token_statistics(x)["step_cosine"]
    assert (cosines[:5] > 0.99).all() and cosines[-10:].isnan().all()


def test_pca() -> None:
    """PCA recovers a plane that the states lie in, keeps distances there, and is the same whatever the order of the sets."""
    frame = torch.linalg.qr(torch.randn(10, 10))[0][:2]
    flat = torch.randn(5, 7, 2) * torch.tensor([3.0, 1.0])
    sets = [flat[:2] @ frame + 4, flat[2:] @ frame + 4]
    result = geometry.pca(sets, n=2)
    assert [p.shape for p in result.points] == [p.shape for p in result] == [(2, 7, 2), (3, 7, 2)]
    assert len(result) == 2 and torch.equal(result[1], result.points[1])
    together, wanted = torch.cat([p.reshape(-1, 2) for p in result.points]).double(), flat.reshape(-1, 2).double()
    assert torch.allclose(torch.cdist(together, together), torch.cdist(wanted, wanted), atol=1e-4)
    assert float(result.explained.sum()) == pytest.approx(1, abs=1e-5) and result.explained[0] > result.explained[1]
    assert torch.allclose(result.project(sets[0]), result.points[0], atol=1e-5)
    other = geometry.pca(sets[::-1], n=2)
    assert torch.allclose(other.points[1], result.points[0], atol=1e-4)
    assert geometry.pca(sets, n=3).points[0].shape == (2, 7, 3)
    with pytest.raises(UserError, match="not finite"):
        geometry.pca([torch.full((2, 3), math.nan)])
    assert geometry.pca([torch.ones(4, 3)]).explained.tolist() == [0.0, 0.0]
