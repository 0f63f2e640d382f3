"""Training objectives: closed forms, slow references, what they leave alone, resuming bit for bit, several processes."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

from conftest import nano_run, small_model
from training import losses, wait_for_step
from twoscale.config import HopsConfig, ModelConfig, ObjectiveConfig, RunConfig, UserError, presets
from twoscale.config.run_file import save_config
from twoscale.config.serial import read_jsonl
from twoscale.data import Batches, TokenData
from twoscale.engine import forward
from twoscale.exits import Gate as GateRule
from twoscale.model import LoopedGPT, StateNoise, draw_loops
from twoscale.tasks import Hops
from twoscale.train import checkpoint as ckpt, start_run
from twoscale.train.objective import build_objective, exit_log_probabilities, expected_steps, read_steps, step_weights
from twoscale.train.optim import build_optimizers, set_rates

OBJECTIVES = {
    "every_step": ObjectiveConfig("every_step"),
    "geometric": ObjectiveConfig("every_step", weights="geometric"),
    "progress": ObjectiveConfig("progress"),
    "gate": ObjectiveConfig("gate", beta=0.1),
    "gate2": ObjectiveConfig("gate", stage=2, slope=3.0, threshold=0.1),
    "act": ObjectiveConfig("act", ponder=0.2),
    "lookahead": ObjectiveConfig("lookahead", head_weight=0.7, weights="geometric"),
}
TASK = Hops(4, 3, 2)


# -- closed forms --------------------------------------------------------------------------------------------------


@given(st.integers(1, 40), st.floats(0.01, 0.99))
@settings(max_examples=60, deadline=None)
def test_geometric_weights(steps: int, rate: float) -> None:
    """Geometric weights are rate (1 - rate)^(k-1) / (1 - (1 - rate)^K) and sum to 1; uniform ones are 1/K."""
    got = step_weights(steps, ObjectiveConfig("every_step", weights="geometric", rate=rate))
    wanted = [rate * (1 - rate) ** k / (1 - (1 - rate) ** steps) for k in range(steps)]
    assert got.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-7) and float(got.sum()) == pytest.approx(1, abs=1e-5)
    assert step_weights(steps, ObjectiveConfig("every_step")).tolist() == pytest.approx([1 / steps] * steps)


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_exit_probabilities(logits: list[float]) -> None:
    """The gate's exit probabilities are s_k prod_{j<k} (1 - s_j), the last one takes the rest, and they sum to 1."""
    p = exit_log_probabilities(torch.tensor(logits, dtype=torch.float64)[:, None]).exp().flatten().tolist()
    staying, wanted = 1.0, []
    for k, g in enumerate(logits):
        s = 1.0 if k == len(logits) - 1 else 1 / (1 + math.exp(-g))
        wanted.append(staying * s)
        staying *= 1 - s
    assert p == pytest.approx(wanted, abs=1e-12) and sum(p) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("s", [0.05, 0.5, 0.9])
def test_expected_steps(s: float) -> None:
    """A gate that is s at every step leaves after (1 - (1 - s)^K) / s steps on average, ACT's expectation."""
    steps = 12
    gates = torch.full((steps, 3), math.log(s / (1 - s)), dtype=torch.float64)
    assert expected_steps(exit_log_probabilities(gates)).tolist() == pytest.approx([(1 - (1 - s) ** steps) / s] * 3)
    entropy = -sum(p * math.log(p) for p in (s * (1 - s) ** k for k in range(steps - 1)))
    rest = (1 - s) ** (steps - 1)
    log_p = exit_log_probabilities(gates)[:, 0]
    assert float(-(log_p.exp() * log_p).sum()) == pytest.approx(entropy - rest * math.log(rest))


def test_the_rule_reads_what_was_trained() -> None:
    """exits.Gate's probability of having left by step k is the sum of the exit probabilities up to k that training uses."""
    gates = torch.randn(6, 5, dtype=torch.float64)
    trained = exit_log_probabilities(gates).exp().cumsum(0)
    rule, last = GateRule(0.5), torch.full((5,), math.nan, dtype=torch.float64)
    for k in range(5):  # at the last step everything that is left leaves by the limit, not by the rule
        view = SimpleNamespace(last=last, gate=gates[k].sigmoid())
        assert torch.allclose(rule.measure(view), trained[k])  # type: ignore[arg-type]
        last = rule.remember(view)  # type: ignore[arg-type]


def test_only_the_last_group_has_a_gate() -> None:
    """A model of several groups has one gate, on the last; the rule works there and is refused elsewhere in one line."""
    model = LoopedGPT(tiny_model(gate=True)).eval()
    assert [name for name, _ in model.named_parameters() if ".gate." in name] == ["stages.2.gate.weight", "stages.2.gate.bias"]
    assert sum(p.numel() for p in model.parameters() if p.ndim == 2) == model.config.matrix_parameters
    ids = TASK.batch(range(2)).ids
    for exit in (GateRule(0.5), {0: GateRule(0.5)}):
        with pytest.raises(UserError, match="only the last group has a gate"):
            forward(model, ids, exit=exit, loops=3)
    assert forward(model, ids, exit={1: GateRule(0.0)}, loops=3).steps[..., 1].unique().tolist() == [1]


# -- slow references -----------------------------------------------------------------------------------------------


def tiny_model(gate: bool, **changes: object) -> ModelConfig:
    """Two groups and a layer behind them, or what `changes` says."""
    return small_model(vocab_size=TASK.vocab_size, block_size=TASK.length, n_embd=16, n_head=2, exit_gate=gate, **changes)


Each = tuple[list[Tensor], list[Tensor]]


def slow_losses(model: LoopedGPT, ids: Tensor, targets: Tensor, loops: tuple[int, ...], noise: StateNoise) -> Each:
    """L_k and gate logits at the positions asked, in plain loops: one whole pass of the model for every number of steps."""
    each, gates = [], []
    for k in range(1, loops[-1] + 1):
        hidden, _ = model.hidden(ids, loops=(*loops[:-1], k), noise=noise)
        log_p = torch.log_softmax(model.head(hidden), dim=-1)
        state = last_state(model, ids, (*loops[:-1], k), noise)
        found, gate = [], []
        for b in range(ids.shape[0]):
            for t in range(ids.shape[1]):
                wanted = int(targets[b, t]) if targets.dim() == 2 else int(targets[b, t, min(k, targets.shape[-1]) - 1])
                if wanted >= 0:
                    found.append(-log_p[b, t, wanted])
                    if (layer := model.groups[-1].gate) is not None:
                        gate.append((layer.weight[0] * state[b, t]).sum() + layer.bias[0])
        each.append(torch.stack(found).detach())
        gates.append(torch.stack(gate).detach() if gate else torch.zeros(0))
    return each, gates


def last_state(model: LoopedGPT, ids: Tensor, loops: tuple[int, ...], noise: StateNoise) -> Tensor:
    """The last group's state (B, T, C) after its last step."""
    kept: list[Tensor] = []

    class Keep:
        def start(self, group: int, x: Tensor, projected: Tensor) -> None: ...

        def stage(self, index: int, x: Tensor) -> None: ...

        def step(self, group: int, k: int, x: Tensor) -> None:
            kept.append(x)

    model.hidden(ids, loops=loops, noise=noise, recorder=Keep())
    return kept[-1]


def slow_objective(c: ObjectiveConfig, each: list[Tensor], gates: list[Tensor]) -> float:
    """The formulas of the docstrings, position by position, in Python floats."""
    K, total = len(each), 0.0
    L, g = [[float(v) for v in row] for row in each], [[float(v) for v in row] for row in gates]
    for a in range(len(L[0])):
        s = [1 / (1 + math.exp(-row[a])) for row in g] if g[0] else []
        pi = [1 / K] * K if c.weights == "uniform" else [(1 - c.rate) ** k / sum((1 - c.rate) ** j for j in range(K)) for k in range(K)]
        p = [(s[k] if k < K - 1 else 1.0) * math.prod(1 - s[j] for j in range(k)) for k in range(K)] if s else []
        read = sum(w * L[k][a] for k, w in enumerate(pi))
        if c.name in ("every_step", "progress"):
            total += read
        elif c.name == "gate" and c.stage == 1:
            total += sum(p[k] * L[k][a] + c.beta * p[k] * math.log(p[k]) for k in range(K))
        elif c.name == "act":
            total += sum(p[k] * L[k][a] + c.ponder * (k + 1) * p[k] for k in range(K))
        elif c.name == "gate":
            for k in range(1, K):
                w = 1 / (1 + math.exp(-c.slope * (max(0.0, L[k - 1][a] - L[k][a]) - c.threshold)))
                total += (-w * math.log(1 - s[k]) - (1 - w) * math.log(s[k])) / (K - 1)
        else:
            total += read
            for k in range(K - 1):
                d = L[k][a] - L[k + 1][a]
                total += c.head_weight * abs(d) / (K - 1) * -math.log(1 - s[k] if d > 0 else s[k])
    return total / len(L[0])


@pytest.mark.parametrize("layout", ["layers behind", "one group", "norm on leaving"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_slow_reference(name: str, layout: str) -> None:
    """Every objective equals its formula on losses from one whole pass for each number of steps, groups before the last one included."""
    c = OBJECTIVES[name]
    changes: dict[str, dict[str, object]] = {
        "layers behind": {},
        "one group": {"groups": ((3, 4),), "norm": "pre", "start": "input", "inject": "none", "backprop_steps": None},
        "norm on leaving": {"group_norm": "leave"},
    }
    model = LoopedGPT(tiny_model(c.trains_gate, **changes[layout]), seed=2)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)  # away from the small initial values, so that steps and positions differ
    batch, noise = TASK.batch(range(3)), StateNoise(5, 1, (0, 1, 2))
    targets = batch.progress if name == "progress" else batch.targets
    loops = (2, 5)[-model.config.n_groups :]
    config = RunConfig(model=model.config, task="hops", train=dataclasses.replace(presets.nano().train, objective=c))
    got = model(batch.ids, targets, loops=loops, noise=noise, objective=build_objective(config))
    assert float(got.detach()) == pytest.approx(slow_objective(c, *slow_losses(model, batch.ids, targets, loops, noise)), rel=2e-5)


def test_text_reads_every_position() -> None:
    """Where every position has a target, the last step's mean loss is the model's own; earlier ones are those of fewer loops."""
    model = LoopedGPT(small_model(), seed=1)
    ids, noise = torch.randint(0, 64, (2, 9)), StateNoise()
    steps = read_steps(model, ids[:, :-1], ids[:, 1:], (3, 4), noise)
    assert steps.losses.shape == (4, 16) and steps.gates is None
    for k in (1, 2, 3, 4):
        assert torch.allclose(steps.losses[k - 1].mean(), model(ids[:, :-1], ids[:, 1:], loops=(3, k), noise=noise), atol=1e-6)


# -- what is left alone --------------------------------------------------------------------------------------------


def test_gradients_end_where_they_should() -> None:
    """The lookahead head's loss does not move the model, and what lookahead adds to every_step moves the gate alone."""
    batch, noise = TASK.batch(range(3)), StateNoise(0, 0, (0, 1, 2))
    grads = {}
    for name, c in (("lookahead", ObjectiveConfig("lookahead")), ("every_step", ObjectiveConfig("every_step"))):
        model = LoopedGPT(tiny_model(gate=True), seed=3)
        kind = dataclasses.replace(presets.nano().train, objective=c)
        config = RunConfig(model=tiny_model(c.trains_gate), task="hops", train=kind)
        model(batch.ids, batch.targets, loops=(2, 4), noise=noise, objective=build_objective(config)).backward()
        grads[name] = {n: p.grad for n, p in model.named_parameters()}
    assert grads["lookahead"]["stages.2.gate.weight"] is not None and grads["every_step"]["stages.2.gate.weight"] is None
    for n, g in grads["every_step"].items():
        if g is not None:
            assert torch.equal(g, grads["lookahead"][n]), n


def test_default_is_unchanged(tmp_path: Path, shards: Path) -> None:
    """A run with the default objective has bitwise the losses of a plain loop: model's own loss, clip, optimizers."""
    config = nano_run(steps=6, eval_interval=3)
    start_run(config, tmp_path, shards)
    c, model = config.train, LoopedGPT(config.model, seed=config.train.seed)
    optimizers, batches = build_optimizers(model, c), Batches(TokenData(shards, "train"), config.model.block_size, c.seed)
    plain = []
    for step in range(c.steps):
        set_rates(optimizers, c, step)
        ids, targets = batches(range(step * c.batch_size, (step + 1) * c.batch_size))
        noise = StateNoise(c.seed, step, tuple(range(c.batch_size)))
        model.zero_grad(set_to_none=True)
        loss = model(ids, targets, loops=draw_loops(config.model, c.seed, step, c.mean_loops(step, config.model.mean_loops)), noise=noise)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), c.clip)
        for optimizer in optimizers.values():
            optimizer.step()
        plain.append(float(loss.detach()))
    assert plain == losses(tmp_path)
    trained = ckpt.read_tensors(ckpt.find_checkpoint(tmp_path, None) / ckpt.MODEL)
    assert all(torch.equal(p, trained[name]) for name, p in model.named_parameters())


# -- runs ----------------------------------------------------------------------------------------------------------


def task_config(objective: ObjectiveConfig, **train: object) -> RunConfig:
    """A small run on hops: two groups and a layer behind."""
    base = dataclasses.replace(
        presets.nano().train, steps=14, batch_size=4, warmup_steps=2, eval_interval=7, eval_sequences=4, checkpoint_interval=3, lr=1e-3,
        geometry_interval=0, staircase_samples=8, staircase_loops=3, objective=objective,
    )  # fmt: skip
    task = HopsConfig(TASK.nodes, TASK.hops, TASK.queries)
    return RunConfig(name="task", model=tiny_model(objective.trains_gate), train=dataclasses.replace(base, **train), task="hops", hops=task)  # type: ignore[arg-type]


FORKS = """
import os, sys, time
from pathlib import Path
import torch
from twoscale.config.run_file import load_config
from twoscale.train import start_run
from twoscale.train.trainer import Trainer
step = Trainer._step
Trainer._step = lambda self, i: (time.sleep(0.05), step(self, i))[1]  # so that the signal comes before the end
for folder in map(Path, sys.argv[1:]):
    if (child := os.fork()) == 0:  # one import of torch for all runs
        torch.set_num_threads(1)
        start_run(load_config(folder), folder)
        os._exit(0)
    print(child, flush=True)
for _ in sys.argv[1:]:
    os.wait()
"""


@pytest.mark.long
def test_kill_and_resume(tmp_path: Path) -> None:
    """With every objective a run that is killed with -9 and started again has bitwise the losses and weights of one that was not."""
    torch.set_num_threads(1)  # as in the children; sums of other threads are other sums
    runs = {name: tmp_path / name for name in OBJECTIVES}
    for name, objective in OBJECTIVES.items():
        runs[name].mkdir()
        save_config(runs[name], task_config(objective))
    with subprocess.Popen([sys.executable, "-c", FORKS, *map(str, runs.values())], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        children = dict(zip(runs, map(int, (parent.stdout.readline() for _ in runs)), strict=True))
        for name, run in runs.items():
            wait_for_step(run, 4)
            os.kill(children[name], signal.SIGKILL)
    for name, run in runs.items():
        assert 4 <= len(read_jsonl(run / "metrics.jsonl")) < 14 and not (run / "staircase.json").exists(), name
        config = task_config(OBJECTIVES[name])
        assert start_run(config, run).finished
        start_run(task_config(OBJECTIVES[name], checkpoint_interval=100), whole := tmp_path / f"{name}-whole")
        assert losses(run) == losses(whole) and len(losses(run)) == 14
        a, b = (ckpt.read_tensors(path / "checkpoints" / "step-000014" / ckpt.MODEL) for path in (run, whole))
        assert all(torch.equal(a[key], b[key]) for key in a), name


PROCESSES = """
import dataclasses, json, sys
from pathlib import Path
import torch, torch.distributed as dist
from twoscale.config.run_file import load_config
from twoscale.train import start_run
torch.set_num_threads(1)
dist.init_process_group("gloo")
for folder in sorted(Path(sys.argv[1]).iterdir()):
    start_run(load_config(folder), folder)
dist.barrier()
dist.destroy_process_group()
import os; os._exit(0)
"""


@pytest.mark.long
def test_processes_agree(tmp_path: Path) -> None:
    """With every objective two processes, by DDP or FSDP2, have the losses and weights of one within rounding."""
    (tmp_path / "script.py").write_text(PROCESSES)
    for name, objective in OBJECTIVES.items():
        for kind in ("ddp", "fsdp"):
            (tmp_path / "two" / f"{name}-{kind}").mkdir(parents=True)
            save_config(tmp_path / "two" / f"{name}-{kind}", task_config(objective, parallel=kind, steps=6))
    port = 22_000 + os.getpid() % 20_000
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}", str(tmp_path / "script.py")]
    done = subprocess.run([*command, str(tmp_path / "two")], capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    for name, objective in OBJECTIVES.items():
        start_run(task_config(objective, steps=6), tmp_path / name)
        for kind in ("ddp", "fsdp"):
            other = tmp_path / "two" / f"{name}-{kind}"
            assert max(abs(a - b) for a, b in zip(losses(tmp_path / name), losses(other), strict=True)) < 1e-5, (name, kind)
            one, two = (ckpt.load_model(run / "checkpoints" / "step-000006")[0].state_dict() for run in (tmp_path / name, other))
            assert all(torch.allclose(one[key], two[key], atol=1e-4) for key in one), (name, kind)
            here, elsewhere = (read_jsonl(run / "metrics.jsonl")[-1]["val_accuracy"] for run in (tmp_path / name, other))
            assert here == pytest.approx(elsewhere, abs=1e-6)
            assert json.loads((other / "staircase.json").read_text())["step"] == 6
