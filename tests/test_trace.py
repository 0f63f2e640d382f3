"""Tracing a model, on disk and back, and measuring a long text in constant memory."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import twoscale
from conftest import small_model
from models import loud
from twoscale import geometry
from twoscale.config import UserError
from twoscale.geometry import record as record_module
from twoscale.geometry.online import Moments
from twoscale.model import LoopedGPT
from twoscale.tracing import Trace


def some_ids(rows: int = 3, length: int = 12) -> torch.Tensor:
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(5))


def test_trace_is_the_pass() -> None:
    """Traced states iterate the group's map, start where the pass starts, and end in what the pass computes."""
    model = loud(small_model())
    ids = some_ids()
    t = twoscale.trace(model, ids, loops=(4, 6))
    assert [x.shape for x in t.states] == [(5, 3, 12, 32), (7, 3, 12, 32)] and len(t.stages) == 5
    with torch.no_grad():
        for g, group in enumerate(model.groups):
            injected = group.inject(t.inputs[g])
            assert torch.allclose(group.project(t.states[g][0], injected), t.projected[g], atol=1e-5)
            for k in range(len(t.states[g]) - 1):
                assert torch.allclose(group.step(t.states[g][k], injected), t.states[g][k + 1], atol=1e-5)
        logits = model.head(t.stages[-1])
    assert torch.allclose(logits, twoscale.forward(model, ids, loops=(4, 6)).logits, atol=1e-5)
    assert torch.equal(t.stages[2], t.states[0][-1]) and torch.equal(t.inputs[1], t.states[0][-1]), "the groups touch"


def test_ragged(tmp_path: Path) -> None:
    """A row traced in a ragged batch has the states it has alone; padding is masked."""
    model = loud(small_model())
    rows = [[1, 2, 3, 4, 5], [6, 7]]
    both, alone = twoscale.trace(model, rows, loops=5), twoscale.trace(model, [rows[1]], loops=5)
    assert both.mask.tolist() == [[True] * 5, [True, True, False, False, False]]
    assert torch.allclose(both.states[1][:, 1, :2], alone.states[1][:, 0], atol=1e-5)
    a = geometry.GeometryStats()
    a.add(both)
    assert a.as_json()["tokens"] == 7


def test_on_disk(tmp_path: Path) -> None:
    """A saved trace comes back whole; another file, a cut file and another model's trace are refused."""
    model = loud(small_model())
    t = twoscale.trace(model, some_ids(), loops=3)
    path = tmp_path / "t.safetensors"
    t.save(path)
    again = Trace.load(path)
    assert again.layers == t.layers and again.model == t.model and torch.equal(again.ids, t.ids)
    assert all(torch.equal(x, y) for x, y in zip(t.states + t.stages, again.states + again.stages, strict=True))
    again.check_model(model)
    with pytest.raises(UserError, match="another model"):
        again.check_model(LoopedGPT(small_model()))
    with pytest.raises(UserError, match="another model"):
        geometry.loop_spectral_radius(LoopedGPT(small_model()), again, 0)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match="truncated"):
        Trace.load(path)
    with pytest.raises(UserError, match="does not exist"):
        Trace.load(tmp_path / "none")


def test_broken_models() -> None:
    """NaN weights and a model without loops get a clear error."""
    model = LoopedGPT(small_model())
    with torch.no_grad():
        model.groups[1].blocks[0].mlp.down.weight[0, 0] = math.nan  # type: ignore[union-attr]
    with pytest.raises(UserError, match=r"group 2 \(layers 2-3\): .* step 1 is not finite"):
        twoscale.trace(model, some_ids(), loops=3)
    with pytest.raises(UserError, match="no loop groups"):
        geometry.measure(LoopedGPT(small_model(groups=())), some_ids())
    with pytest.raises(UserError, match="no loop groups"):
        twoscale.trace(LoopedGPT(small_model(groups=())), some_ids())


def test_streaming_equals_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics measured chunk by chunk equal those of one stored trace within 1e-5, whatever the chunks."""
    model = loud(small_model())
    ids = some_ids(rows=10)
    t = twoscale.trace(model, ids, loops=6)
    stored = {}
    for g, x in enumerate(t.states):
        stored |= {(g, name): v for name, v in geometry.token_statistics(x.flatten(1, 2)).items()}
    for floats in (1, 20_000, 10**9):
        monkeypatch.setattr("twoscale.geometry.record.CHUNK_FLOATS", floats)
        record = geometry.measure(model, ids, loops=6)
        assert record["tokens"] == 120
        for (g, name), values in stored.items():
            got = record["groups"][g][name]
            assert torch.allclose(torch.tensor(got["mean"]), values.nanmean(dim=1), atol=1e-5), name
            assert torch.allclose(torch.tensor(got["std"]), values.std(dim=1, correction=0), atol=1e-5), name
        ratios = geometry.drift_to_loop(t.states[0], t.states[1], t.projected[1], t.inputs[1])
        for name, ratio in ratios.items():
            assert record["boundaries"][0]["dlr"][name]["mean"] == pytest.approx(float(ratio.mean()), rel=1e-5, abs=1e-5)
    assert record["boundaries"][0]["dlr"]["input_k1"]["mean"] == 0, "where groups touch, the reading by the input is zero"


MEMORY = """
import sys, torch
from twoscale.config import ModelConfig
from twoscale.geometry import measure
from twoscale.model import LoopedGPT
torch.set_num_threads(1)
model = LoopedGPT(ModelConfig(vocab_size=64, block_size=64, n_layer=1, n_head=1, n_embd=16, groups=((0,),)))
windows = (torch.randint(0, 64, (64, 64)) for _ in range(int(sys.argv[1]) // 4096))
record = measure(model, windows, loops=8)
high = next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]
print(record["tokens"], high)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to read the peak of memory")
def test_constant_memory() -> None:
    """A million tokens need no more memory than ten thousand."""
    peaks = {}
    for tokens in (12_288, 1_003_520):
        out = subprocess.run([sys.executable, "-c", MEMORY, str(tokens)], capture_output=True, text=True, check=True)
        counted, peak = map(int, out.stdout.split())
        assert counted == tokens
        peaks[tokens] = peak
    assert peaks[1_003_520] <= 1.05 * peaks[12_288], peaks


def test_moments() -> None:
    """Running moments equal those of the whole, leave out what is not finite, and say None where nothing was counted."""
    values = torch.randn(3, 1000, dtype=torch.float64) * 5 + 100
    values[1, ::7] = math.nan
    values[2] = math.inf
    m = Moments()
    for part in values.split((1, 99, 400, 500), dim=1):
        m.add(part)
    result = m.as_json()
    assert result["mean"][0] == pytest.approx(float(values[0].mean())) and result["std"][0] == pytest.approx(
        float(values[0].std(correction=0))
    )
    assert result["mean"][1] == pytest.approx(float(values[1].nanmean())) and result["count"] == [1000, 857, 0]
    assert result["mean"][2] is None and result["std"][2] is None


def test_limit() -> None:
    """Distance to the state at the last step falls to it, and the spectral radius of a settled group is below one."""
    model = LoopedGPT(small_model())
    record = geometry.measure_limit(model, some_ids(), loops=16, iterations=25)
    for group in record:
        assert group["distance"]["mean"][0] > group["distance"]["mean"][5] and 0.05 < group["spectral_radius"]["max"] < 1.5
        assert 0.05 < group["contraction_rate"]["mean"] < 1


def test_rate_of_a_map_that_does_not_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fitted rate of measure_limit is the map's own, also where it grows or only drifts: 1.02 and 1."""
    model = LoopedGPT(small_model(groups=((1,),)))
    monkeypatch.setattr(record_module, "loop_spectral_radius", lambda *a: torch.ones(3))
    for grow, rate in ((lambda x, *a: 1.02 * x, 1.02), (lambda x, *a: x + 1, 1.0), (lambda x, *a: 0.9 * x, 0.9)):
        monkeypatch.setattr(model.groups[0], "step", grow)
        [group] = geometry.measure_limit(model, some_ids(), loops=64)
        assert group["contraction_rate"]["mean"] == pytest.approx(rate, abs=1e-4)
