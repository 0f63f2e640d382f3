"""Exit rules: what each compares, on maps with known answers; what the command line calls them; and rules of one's own."""

import dataclasses
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import twoscale
from conftest import small_model
from models import loud
from twoscale import UserError, exits, geometry
from twoscale.exits.rule import RuleState


@dataclass
class Who:
    """Tokens 0 .. n-1 of one sequence after k steps."""

    n: int
    steps: int

    @property
    def same_k(self) -> int:
        return self.steps

    @property
    def k(self) -> Tensor:
        return torch.full((self.n,), self.steps)

    @property
    def prompt_indices(self) -> Tensor:
        return torch.zeros(self.n, dtype=torch.int64)

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.n)

    tokens = positions


def stops(rule: exits.Rule, states: Tensor, head: Tensor | None = None, gate: Tensor | None = None) -> list[int]:
    """After how many applications each token of states (K+1, N, C) leaves by the rule; 0 for never."""
    left = [0] * states.shape[1]
    rule_state = RuleState(rule)
    for k in range(1, states.shape[0]):

        def read(x: Tensor, how: str, k: int = k) -> Tensor:
            if how == "gate":
                assert gate is not None
                return gate[k - 1]
            assert head is not None, "a rule on states must not touch the head"
            return x @ head.T

        passed = rule_state.update(0, Who(states.shape[1], k), states[k - 1], states[k], read)
        each = [passed] * len(left) if isinstance(passed, bool) else passed.tolist()
        left = [n or k * p for n, p in zip(left, each, strict=True)]
    return left


def contraction(c: float, K: int = 12, size: float = 1.0) -> Tensor:
    """x^(k) = size * c^k along one axis: ||D^(k)|| = size |1 - c| |c|^k."""
    x = torch.zeros(K + 1, 1, 8)
    x[:, 0, 0] = size * torch.tensor([c**k for k in range(K + 1)])
    x[:, 0, 1] = 5.0
    return x


def test_step_norm() -> None:
    """||D^(k)|| = .5 * .5^k falls below .1 at k = 3, the fourth application; relative to a state of length 5, below .1 / 5 too."""
    assert stops(exits.StepNorm(0.1), contraction(0.5)) == [4]
    assert stops(exits.StepNorm(0.1 / 5, relative=True), contraction(0.5)) == [4]
    assert stops(exits.StepNorm(0.1, hits=3), contraction(0.5)) == [6]
    assert stops(exits.StepNorm(0.1, min_steps=7), contraction(0.5)) == [7]
    assert stops(exits.StepNorm(1e-9), contraction(0.5)) == [0]


def test_acceleration() -> None:
    """a^(k) = .25 * .5^(k-1): below .1 from k = 3 on, so the fourth application is the first hit and the fifth the exit."""
    assert stops(exits.Acceleration(0.1), contraction(0.5)) == [5]
    assert stops(exits.Acceleration(math.inf), contraction(0.5)) == [3], "the earliest stop is application 3"
    assert stops(exits.Acceleration(0.1, hits=1), contraction(0.5)) == [4]


@pytest.mark.parametrize("c", [0.5, 0.9, -0.5])
def test_normalised_acceleration_never_falls(c: float) -> None:
    """Beside the steps, a plain contraction has the constant |1-c| / (1+|c|): just above it all leave at 3, just below nobody does."""
    constant = abs(1 - c) / (1 + abs(c))
    assert stops(exits.Acceleration(constant * 1.001, normalize="steps"), contraction(c)) == [3]
    assert stops(exits.Acceleration(constant * 0.999, normalize="steps"), contraction(c)) == [0]
    assert stops(exits.Acceleration(0.05, normalize="state"), contraction(c)) != [0]


def listing(states: Tensor, tau: float) -> tuple[int, Tensor]:
    """The paper's listing, line for line, on one token's states: applications until it breaks, and the state it returns."""
    x, delta_prev, streak = states[0], None, 0
    for k in range(1, len(states)):
        x_new = states[k]
        delta = x_new - x
        if delta_prev is not None:
            a = (delta - delta_prev).norm()
            streak = streak + 1 if a < tau else 0
            if streak == 2:
                return k, x
        x, delta_prev = x_new, delta
    return len(states) - 1, x


@pytest.mark.parametrize("tau", [0.5, 1.0, 2.0, 4.0])
def test_the_papers_listing(tau: float) -> None:
    """keep="previous" follows the listing step for step: same applications, and the state from before the last one."""
    model = loud(small_model(groups=((0, 1),), n_layer=2), scale=0.1)  # nothing after the group: logits are the head's of its state
    ids = torch.randint(0, 64, (6, 1), generator=torch.Generator().manual_seed(0))
    states = twoscale.trace(model, ids, loops=10).states[0]
    previous = twoscale.forward(model, ids, exit=exits.Acceleration(tau, keep="previous"), loops=10)
    newest = twoscale.forward(model, ids, exit=exits.Acceleration(tau), loops=10)
    assert torch.equal(previous.steps, newest.steps)
    for b in range(6):
        steps, x = listing(states[:, b, 0], tau)
        assert previous.steps[b, 0, 0] == steps >= 3
        assert torch.allclose(previous.logits[b, 0], model.head(x), atol=1e-4)
        assert torch.allclose(newest.logits[b, 0], model.head(states[steps, b, 0]), atol=1e-4)


def test_rules_equal_geometry() -> None:
    """What the rules compare is what geometry measures: thresholds halfway between measured values split them exactly."""
    states = torch.randn(9, 5, 16, generator=torch.Generator().manual_seed(0)).cumsum(dim=0)
    cases = [
        (exits.StepNorm, {}, geometry.step_norms(states), 1),
        (exits.StepNorm, {"relative": True}, geometry.relative_step_norms(states), 1),
        (exits.Acceleration, {"hits": 1}, geometry.accelerations(states), 2),
        (exits.Acceleration, {"hits": 1, "normalize": "steps"}, geometry.accelerations(states, "steps"), 2),
        (exits.Acceleration, {"hits": 1, "normalize": "state"}, geometry.accelerations(states, "state"), 2),
    ]
    for kind, settings, values, first in cases:
        tau = float(values.median()) * 1.00001
        wanted = [next((k + first for k, v in enumerate(row) if v < tau), 0) for row in values.T.tolist()]
        assert stops(kind(tau, **settings), states) == wanted


def test_logit_rules() -> None:
    """Hand-made logits: each rule stops where its definition says."""
    V = 4
    states = torch.zeros(8, 1, V)
    states[1:, 0] = torch.tensor(
        [[0.0, 0, 0, 0], [1.0, 0, 0, 0], [1.0, 0.5, 0, 0], [1.0, 0.6, 0, 0], [1.0, 0.6, 0, 0], [1.0, 0.6, 0, 0], [3.0, 0.6, 0, 0]]
    )
    head = torch.eye(V)
    assert stops(exits.KL(1e-6), states, head) == [5], "p^(5) is the first that equals its predecessor"
    assert stops(exits.KL(0.01), states, head) == [4]
    assert stops(exits.Entropy(1e-6), states, head) == [5]
    assert stops(exits.ArgmaxStable(hits=2), states, head) == [3], "argmax 0 at the uniform first step too"
    assert stops(exits.MinPKL(1e-6), states, head) == [5]
    assert stops(exits.Confidence(0.2), states, head) == [2]
    assert stops(exits.Confidence(0.7), states, head) == [7]


def test_huginns_min_p() -> None:
    """Below a tenth of the maximum, probabilities become 1/V before renormalising, in Huginn's direction."""
    a, b = torch.tensor([3.0, 0.0, -1.0, 2.0]), torch.tensor([3.0, 1.0, -2.0, 2.0])

    def filtered(x: Tensor) -> Tensor:
        p = torch.softmax(x, dim=-1)
        p[p < 0.1 * p.max()] = 1 / 4
        return p / p.sum()

    p, q = filtered(a), filtered(b)
    value = float((p * (p.log() - q.log())).sum())
    states = torch.stack((torch.zeros(4), a, b))[:, None]
    assert stops(exits.MinPKL(value * 1.001), states, torch.eye(4)) == [2]
    assert stops(exits.MinPKL(value * 0.999), states, torch.eye(4)) == [0]


def test_kl_direction() -> None:
    """KL(p^(k) || p^(k-1)), and with reverse=True the other way round."""
    a, b = torch.tensor([2.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0])
    p, q = torch.softmax(a, -1), torch.softmax(b, -1)
    states = torch.stack((torch.zeros(3), a, b))[:, None]
    for reverse, value in ((False, (q * (q / p).log()).sum()), (True, (p * (p / q).log()).sum())):
        assert stops(exits.KL(float(value) * 1.001, reverse=reverse), states, torch.eye(3)) == [2]
        assert stops(exits.KL(float(value) * 0.999, reverse=reverse), states, torch.eye(3)) == [0]


def test_gate() -> None:
    """1 - prod(1 - p_i) reaches q: with p = .3 each, .51 after two steps, .657 after three."""
    states, gate = torch.zeros(6, 1, 4), torch.full((5, 1), 0.3)
    assert stops(exits.Gate(0.5), states, gate=gate) == [2]
    assert stops(exits.Gate(0.6), states, gate=gate) == [3]
    assert stops(exits.Gate(0.99), states, gate=gate) == [0]


def test_random_exit() -> None:
    """Depths have the mean asked for, stay within their bounds, and are the same in any batch."""
    model = loud(small_model(block_size=256))
    ids = torch.randint(0, 64, (8, 256))
    out = twoscale.forward(model, ids, exit=exits.RandomExit(5.5, least=2), loops=12)
    assert abs(float(out.steps.double().mean()) - 5.5) < 0.1 and out.steps.min() == 2 and out.steps.max() == 9
    again = twoscale.forward(model, ids[3:4, :50], exit=exits.RandomExit(5.5, least=2), loops=12)
    assert torch.equal(again.steps[0], out.steps[3, :50])
    other = twoscale.forward(model, ids, exit=exits.RandomExit(5.5, least=2, seed=1), loops=12)
    assert not torch.equal(other.steps, out.steps)


def test_oracle() -> None:
    """stay: the fewest steps after which the loss stays near the full run's; lagrange: the cheapest loss + price x steps."""
    losses = torch.tensor([3.0, 1.0, 2.0, 1.05, 1.0])[:, None, None]
    assert int(exits.Oracle.stay(losses, 0.1).depths) == 4
    assert int(exits.Oracle.stay(losses, 5.0).depths) == 1
    assert int(exits.Oracle.stay(losses, 0.0).depths) == 5
    assert int(exits.Oracle.lagrange(losses, 0.0).depths) == 2
    assert int(exits.Oracle.lagrange(losses, 9.0).depths) == 1
    model = loud(small_model())
    depths = torch.randint(1, 6, (2, 5, 2))
    assert torch.equal(twoscale.forward(model, torch.zeros(2, 5, dtype=torch.int64), exit=exits.Oracle(depths), loops=5).steps, depths)
    with pytest.raises(UserError, match="beyond its labels"):
        twoscale.forward(model, torch.zeros(3, 5, dtype=torch.int64), exit=exits.Oracle(depths), loops=5)


def test_rules_on_states_never_touch_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step norm, acceleration and cosine call the head once for the answer, never for an exit."""
    model = loud(small_model())
    calls = []
    original = type(model).head
    monkeypatch.setattr(type(model), "head", lambda self, x: calls.append(x.shape) or original(self, x))
    for rule in (exits.StepNorm(1.0), exits.Acceleration(1.0), exits.Cosine(), exits.RandomExit(3), exits.Fixed(2)):
        calls.clear()
        twoscale.forward(model, [[1, 2, 3]], exit=rule, loops=6)
        assert len(calls) == 1
    twoscale.forward(model, [[1, 2, 3]], exit=exits.KL(0.01, read="coda"), loops=6)
    assert len(calls) > 3


@dataclass(frozen=True)
class Turned(exits.Rule):
    """Leave once the step has turned away from the one before."""

    tau: float = 0.0

    def remember(self, view: exits.StepView) -> Tensor:
        return view.step

    def measure(self, view: exits.StepView) -> Tensor:
        return torch.cosine_similarity(view.step, view.last.expand_as(view.step), dim=-1)

    def passes(self, value: Tensor) -> Tensor:
        return value < self.tau


def test_a_rule_of_ones_own() -> None:
    """A user's rule works in forward and generate with no change to the engine."""
    model = loud(small_model())
    ids = torch.randint(0, 64, (2, 8))
    out = twoscale.forward(model, ids, exit=Turned(), loops=9)
    cosines = geometry.step_cosines(twoscale.trace(model, ids[:, :1], loops=9).states[0])  # (K-1, B, 1)
    for b in range(2):  # the first token sees nobody else, so its states are those of the trace
        wanted = next((k + 2 for k, c in enumerate(cosines[:, b, 0].tolist()) if c < 0), 9)
        assert out.steps[b, 0, 0] == wanted
    gen = twoscale.generate(model, ids.tolist(), 3, exit=Turned(), loops=9)
    assert gen.prompt_steps[0] == [tuple(s) for s in out.steps[0].tolist()]


def test_frozen_and_printable() -> None:
    """Rules are values: frozen, equal when their settings are, and made again from their text."""
    assert exits.KL(1e-3) == exits.KL(1e-3) != exits.KL(1e-2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        exits.StepNorm(1.0).tau = 2.0  # type: ignore[misc]
    assert exits.parse("kl:1e-3,reverse=true,read=coda") == exits.KL(1e-3, reverse=True, read="coda")
    assert exits.parse("acceleration:0.01,normalize=steps") == exits.Acceleration(0.01, normalize="steps")
    assert exits.parse("argmax-stable") == exits.ArgmaxStable() and exits.parse("fixed:4") == exits.Fixed(4)
    assert exits.parse("step_norm:1,hits=2") == exits.StepNorm(1, hits=2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: exits.Acceleration(-1.0), "tau = -1.0"),
        (lambda: exits.StepNorm(math.nan), "tau = nan"),
        (lambda: exits.StepNorm("1"), "tau = '1'"),  # type: ignore[arg-type]
        (lambda: exits.Acceleration(1.0, hits=0), "hits = 0"),
        (lambda: exits.Acceleration(1.0, normalize="both"), "normalize = 'both'"),  # type: ignore[arg-type]
        (lambda: exits.KL(1.0, read="eyes"), "read = 'eyes'"),  # type: ignore[arg-type]
        (lambda: exits.KL(1.0, keep="oldest"), "keep = 'oldest'"),  # type: ignore[arg-type]
        (lambda: exits.Confidence(1.5), "tau = 1.5"),
        (lambda: exits.Gate(2.0), "q = 2.0"),
        (lambda: exits.Fixed(0), "k = 0"),
        (lambda: exits.RandomExit(0.5), "mean = 0.5"),
        (lambda: exits.parse("acceleration"), "tau is missing"),
        (lambda: exits.parse("speed:1"), "no exit rule 'speed'"),
        (lambda: exits.parse("kl:1,mass=2"), "no setting 'mass'"),
        (lambda: exits.parse("kl:1,2"), "setting=value"),
        (lambda: exits.rules_per_group({3: exits.Fixed(1)}, 2), "groups run from 0 to 1"),
        (lambda: exits.rules_per_group({"a": exits.Fixed(1)}, 2), "group 'a'"),  # type: ignore[dict-item]
        (lambda: exits.rules_per_group(exits.Fixed, 2), "Fixed(...)"),  # type: ignore[arg-type]
        (lambda: exits.rules_per_group(7, 2), "exit = 7"),  # type: ignore[arg-type]
    ],
)
def test_bad_rules(make, words: str) -> None:  # type: ignore[no-untyped-def]
    """A rule that makes no sense is refused in one clear line."""
    with pytest.raises(UserError) as error:
        make()
    assert words in str(error.value) and "\n" not in str(error.value)
