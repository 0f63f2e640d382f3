"""Training: resuming bit for bit, several processes, memory, signals, divergence, damaged checkpoints, optimizers."""

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from conftest import CommandLine, nano_run, small_model
from forked import start_process
from training import arguments, finish, losses, wait_for_step
from twoscale.config import TrainConfig, UserError
from twoscale.config.serial import read_jsonl
from twoscale.interop import load
from twoscale.model import LoopedGPT
from twoscale.train import Diverged, checkpoint as ckpt, start_run
from twoscale.train.metrics import ProgressLine, clock
from twoscale.train.optim import build_optimizers, orthogonalize
from twoscale.train.world import World

ONE = World(0, 1, torch.device("cpu"))


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_kill_and_resume(optimizer: str, tmp_path: Path, shards: Path) -> None:
    """A run that is killed with -9 in the middle and started again has bitwise the losses and weights of one that was not."""
    config = nano_run(steps=60, checkpoint_interval=7, eval_interval=20, optimizer=optimizer)
    finish(start_process(arguments(config, tmp_path / "whole", shards)))
    process = start_process(arguments(config, tmp_path / "killed", shards))
    wait_for_step(tmp_path / "killed", 18)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = len(read_jsonl(tmp_path / "killed" / "metrics.jsonl"))
    assert process.returncode == -signal.SIGKILL and 18 <= done < 60
    assert "going on from step" in finish(start_process(arguments(config, tmp_path / "killed", shards)))
    assert losses(tmp_path / "whole") == losses(tmp_path / "killed") and len(losses(tmp_path / "whole")) == 60
    a, b = (ckpt.read_tensors(tmp_path / run / "checkpoints" / "step-000060" / "model.safetensors") for run in ("whole", "killed"))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_processes_agree(optimizer: str, tmp_path: Path, shards: Path) -> None:
    """Two processes, by DDP or FSDP2, have the losses of one with the same global batch within 1e-5, and its loop counts."""
    config = nano_run(steps=20, optimizer=optimizer, lr=1e-3)
    start_run(config, tmp_path / "one", shards)
    for kind in ("ddp", "fsdp"):
        changed = dataclasses.replace(config, train=dataclasses.replace(config.train, parallel=kind))
        finish(start_process(arguments(changed, tmp_path / kind, shards), processes=2))
        assert max(abs(a - b) for a, b in zip(losses(tmp_path / "one"), losses(tmp_path / kind), strict=True)) < 1e-5, kind
        one, other = (read_jsonl(tmp_path / run / "metrics.jsonl") for run in ("one", kind))
        assert [r["loops"] for r in one] == [r["loops"] for r in other]
        assert abs(one[-1]["val_loss"] - other[-1]["val_loss"]) < 1e-5
        a, b = (load(tmp_path / run)[0] for run in ("one", kind))
        assert all(torch.allclose(p, q, atol=1e-4) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_every_rank_draws_the_same_loops(tmp_path: Path) -> None:
    """Loop counts drawn in two processes are equal, step by step."""
    script = (
        "import torch.distributed as dist; from twoscale.config import presets; from twoscale.model import draw_loops\n"
        "dist.init_process_group('gloo'); mine = [draw_loops(presets.small().model, 7, s) for s in range(100)]; box = [None, None]\n"
        "dist.all_gather_object(box, mine); assert box[0] == box[1]; print('equal', flush=True)\n"
        "dist.barrier(); dist.destroy_process_group(); import os; os._exit(0)"
    )
    (tmp_path / "draw.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={21_000 + os.getpid() % 20_000}"]
    out = subprocess.run([*command, str(tmp_path / "draw.py")], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0 and out.stdout.count("equal") == 2, out.stderr


def test_resume_on_other_processes(tmp_path: Path, shards: Path) -> None:
    """A checkpoint of one process goes on in two sharded ones, and the other way round."""
    config = nano_run(steps=20, checkpoint_interval=10, keep_last=5)
    start_run(config, tmp_path / "one", shards)
    words = arguments(dataclasses.replace(config, train=dataclasses.replace(config.train, parallel="fsdp")), tmp_path / "run", shards)
    for first, second in ((1, 2), (2, 1)):
        finish(start_process(words, processes=first))
        ckpt.set_aside_after(tmp_path / "run" / "checkpoints", 10)
        assert "going on from step 10" in finish(start_process(words, processes=second))
        assert max(abs(a - b) for a, b in zip(losses(tmp_path / "one"), losses(tmp_path / "run"), strict=True)) < 1e-5
        shutil.rmtree(tmp_path / "run")


def test_accumulation(tmp_path: Path, shards: Path) -> None:
    """Micro-batches change nothing but rounding."""
    start_run(nano_run(steps=10), tmp_path / "whole", shards)
    start_run(nano_run(steps=10, micro_batch_size=2), tmp_path / "parts", shards)
    assert max(abs(a - b) for a, b in zip(losses(tmp_path / "whole"), losses(tmp_path / "parts"), strict=True)) < 1e-5


MEMORY = """
import sys, torch
from twoscale.config import ModelConfig
from twoscale.model import LoopedGPT, StateNoise
torch.set_num_threads(1)
def high():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1])
model = LoopedGPT(ModelConfig(vocab_size=256, block_size=256, n_layer=3, n_head=4, n_embd=128, groups=((1,),), backprop_steps=8))
ids = torch.randint(0, 256, (24, 256))
def step(loops, rows):
    model(ids[:rows], ids[:rows], loops=loops, noise=StateNoise(0, 0, tuple(range(rows)))).backward()
step(2, 1)
before = high()
step(int(sys.argv[1]), 24)
print(high() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to read the peak of memory")
@pytest.mark.long
def test_memory_does_not_grow_with_loops() -> None:
    """A training step at K = 64 with backprop_steps = 8 peaks at no more than 1.15x the memory of K = 8."""
    peaks = {}
    for loops in (8, 64):
        out = subprocess.run([sys.executable, "-c", MEMORY, str(loops)], capture_output=True, text=True, check=True)
        peaks[loops] = int(out.stdout)
    assert peaks[8] > 200_000, "the step must weigh more than the noise of the measurement"
    assert peaks[64] <= 1.15 * peaks[8], peaks


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_save(number: signal.Signals, tmp_path: Path, shards: Path) -> None:
    """Ctrl-C and SIGTERM finish the step, save, say how to go on, and leave with 128 + the signal."""
    config = nano_run(steps=5000, checkpoint_interval=5000, eval_interval=5000)
    process = start_process(arguments(config, tmp_path / "run", shards))
    wait_for_step(tmp_path / "run", 5)
    process.send_signal(number)
    out = finish(process, 128 + number)
    step = len(losses(tmp_path / "run"))
    assert f"at step {step}" in out and "--resume" in out and "Traceback" not in out
    assert ckpt.read_progress(tmp_path / "run" / "checkpoints" / ckpt.checkpoint_name(step)).step == step


def test_signal_to_several_processes(tmp_path: Path, shards: Path) -> None:
    """Started by torchrun, a signal that reaches one rank stops all of them at the same step, saved."""
    config = nano_run(steps=5000, checkpoint_interval=5000, eval_interval=5000)
    words = [f"--master-port={20_000 + os.getpid() % 20_000}", "-m", "twoscale", *arguments(config, tmp_path / "run", shards)]
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    wait_for_step(tmp_path / "run", 5)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert (step := len(losses(tmp_path / "run"))) >= 5
    assert ckpt.fault(tmp_path / "run" / "checkpoints" / ckpt.checkpoint_name(step)) is None


def test_divergence(tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    """A loss that is no number stops the run with the step, the loop counts and the last good checkpoint; nothing bad is saved."""
    config = nano_run(steps=30, checkpoint_interval=4)
    forward = LoopedGPT.forward

    def poisoned(self: LoopedGPT, *args: object, **kwargs: object) -> torch.Tensor:
        loss = forward(self, *args, **kwargs)  # type: ignore[arg-type]
        noise = kwargs["noise"]
        return loss * math.nan if noise.step == 9 else loss  # type: ignore[attr-defined]

    monkeypatch.setattr(LoopedGPT, "forward", poisoned)
    with pytest.raises(Diverged, match=r"step 10: loss nan.*loops drawn \[\d+, \d+\].*step-000008"):
        start_run(config, tmp_path / "run", shards)
    assert [p.name for p in ckpt.list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-000004", "step-000008"]
    code, _, err = cli(*arguments(config, tmp_path / "run", shards))
    assert code == 3 and "diverged" in err and "Traceback" not in err


def test_damaged_checkpoint(tmp_path: Path, shards: Path, cli: CommandLine) -> None:
    """A truncated, altered or incomplete checkpoint is recognised and the one before it offered; going on from that works."""
    config = nano_run(steps=12, checkpoint_interval=4, keep_last=3)
    run = tmp_path / "run"
    start_run(config, run, shards)
    newest = run / "checkpoints" / "step-000012"
    originals = {name: (newest / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors", "state.json", "config.json")}
    for name, body in originals.items():
        for damaged in (body[: len(body) // 2], body[:-9] + b"\x01" + body[-8:], None):
            if damaged is None:
                (newest / name).unlink()
            else:
                (newest / name).write_bytes(damaged)
            code, _, err = cli("train", "--resume", run, "--data-dir", shards)
            assert code == 2 and "step-000012" in err and "--checkpoint step-000008" in err, (name, err)
            with pytest.raises(UserError, match="step-000012"):
                load(run)
            (newest / name).write_bytes(body)
    (newest / "model.safetensors").write_bytes(b"")
    code, _, err = cli("train", "--resume", run, "--data-dir", shards, "--checkpoint", "step-000008")
    assert code == 0, err
    assert ckpt.fault(newest) is None


def test_going_back(tmp_path: Path, shards: Path, cli: CommandLine) -> None:
    """Going on from an older checkpoint sets the later ones aside: what is saved next is not pruned, and is resumed from."""
    config = nano_run(steps=12, checkpoint_interval=2, keep_last=6)
    start_run(config, tmp_path, shards)
    before = losses(tmp_path)
    changed = dataclasses.replace(config, train=dataclasses.replace(config.train, keep_last=1))
    assert start_run(changed, tmp_path, shards, checkpoint="step-000004").step == 12
    assert losses(tmp_path) == before
    kept = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert kept == ["old-step-000006", "old-step-000008", "old-step-000010", "old-step-000012", "step-000012"]


def test_resume_finds_its_data(tmp_path: Path, corpus: Path, shards: Path, cli: CommandLine) -> None:
    """--resume trains on the shards that the run was started with; other shards and lost ones are refused."""
    config = nano_run(steps=8, checkpoint_interval=4, keep_last=3)
    start_run(config, tmp_path / "run", shards)
    before = losses(tmp_path / "run")
    ckpt.set_aside_after(tmp_path / "run" / "checkpoints", 4)
    assert cli("train", "--resume", tmp_path / "run")[0] == 0
    assert losses(tmp_path / "run") == before and not (tmp_path / "run" / "data").exists()
    assert ckpt.load_config(tmp_path / "run").data.source == str(corpus), "the config names the text that was trained on"
    other = tmp_path / "other"
    assert cli("prepare", "--source", corpus, "--val-fraction", "0.2", "--tokenizer", "bpe", "--bpe-vocab", 257, "--out", other)[0] == 0
    code, _, err = cli("train", "--resume", tmp_path / "run", "--data-dir", other)
    assert code == 2 and "holds a run with other settings (data.tokenizer" in err
    (tmp_path / "run" / "data_dir.json").write_text(json.dumps({"path": str(tmp_path / "gone")}))
    code, _, err = cli("train", "--resume", tmp_path / "run")
    assert code == 2 and "are gone" in err


def test_a_refused_config_leaves_no_trace(tmp_path: Path, shards: Path, cli: CommandLine) -> None:
    """After a config that was refused, the corrected one runs in the same folder."""
    words = ("train", "--preset", "nano", "--data-dir", shards, "--out", tmp_path / "run", "--train.steps", 4)
    assert cli(*words, "--model.block-size", 1_000_000)[0] == 2
    assert cli(*words)[0] == 0


def test_no_groups(tmp_path: Path, cli: CommandLine) -> None:
    """A plain GPT trains and is evaluated too; there is no geometry to report."""
    words = ("--train.steps", 4, "--data.max-documents", 12, "--train.eval-sequences", 4)
    code, out, err = cli("reproduce", "--preset", "nano", "--model.groups", "none", "--out", tmp_path / "run", *words)
    assert code == 0 and "bigram" in out and not (tmp_path / "run" / "geometry.jsonl").exists(), err


def test_hostile_folders(tmp_path: Path, shards: Path) -> None:
    """A config may promise any size: no memory is taken before the weights in the file bear it out."""
    start_run(nano_run(steps=4), tmp_path, shards)
    folder = tmp_path / "checkpoints" / "step-000004"
    config, state = json.loads((folder / "config.json").read_text()), json.loads((folder / "state.json").read_text())
    config["model"] |= {"n_embd": 16384, "n_head": 128, "n_layer": 60}
    (folder / "config.json").write_text(json.dumps(config))
    state["files"]["config.json"] = ckpt._facts(folder / "config.json")
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"lacks|shape"):
        load(folder)
    (folder / "state.json").write_text(json.dumps(state | {"files": {}}))
    with pytest.raises(UserError, match=r"does not list config\.json"):
        load(folder)


def test_which_checkpoints_stay(tmp_path: Path, shards: Path) -> None:
    """The last n and the milestones stay; what a killed save left behind goes."""
    (tmp_path / "checkpoints" / ".step-000002.99.tmp").mkdir(parents=True)
    start_run(nano_run(steps=12, checkpoint_interval=2, keep_last=2, milestones=(3, 4)), tmp_path, shards)
    assert sorted(p.name[-2:] for p in (tmp_path / "checkpoints").iterdir()) == ["03", "04", "10", "12"]


def test_finished_is_finished(tmp_path: Path, shards: Path, cli: CommandLine) -> None:
    """Starting a finished run again trains nothing and changes nothing; other settings in its folder are refused."""
    config = nano_run(steps=4)
    start_run(config, tmp_path / "run", shards)
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    assert cli(*arguments(config, tmp_path / "run", shards))[0] == 0
    assert {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()} == before
    code, _, err = cli(*arguments(nano_run(steps=4, lr=1e-4), tmp_path / "run", shards))
    assert code == 2 and "train.lr is 0.003 there and 0.0001 here" in err


def test_load(tmp_path: Path, shards: Path) -> None:
    """`load` gives the trained weights and the tokenizer of a run or a checkpoint, ready for evaluation."""
    start_run(nano_run(steps=4, checkpoint_interval=2), tmp_path, shards)
    model, tokenizer = load(tmp_path)
    same, _ = load(tmp_path / "checkpoints" / "step-000004")
    assert not model.training and tokenizer.decode(tokenizer.encode("abc")) == "abc"
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), same.parameters(), strict=True))
    earlier, _ = load(tmp_path / "checkpoints" / "step-000002")
    assert not torch.equal(earlier.wte.weight, model.wte.weight)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_optimizer_groups(optimizer: str) -> None:
    """Every parameter is in exactly one group; gains and biases have no decay; Muon takes the layers' matrices alone."""
    model = LoopedGPT(small_model(qk_bias=True, tie_head=False, group_norm="leave"))
    optimizers = build_optimizers(model, TrainConfig(optimizer=optimizer))
    names = {id(p): n for n, p in model.named_parameters()}
    where: dict[str, tuple[str, float]] = {}
    for kind, o in optimizers.items():
        for g in o.param_groups:
            for p in g["params"]:
                assert names[id(p)] not in where
                where[names[id(p)]] = (kind, g["weight_decay"])
    assert set(where) == set(names.values())
    for name, (kind, decay) in where.items():
        vector = model.get_parameter(name).ndim == 1 or name.endswith("_bias")
        assert (decay == 0) == vector, name
        assert (kind == "muon") == (optimizer == "muon" and not vector and name.startswith("stages.")), name


def test_orthogonalize() -> None:
    """Newton-Schulz brings all singular values of a tall, wide or square matrix near 1 and keeps its directions."""
    for shape in ((24, 64), (64, 24), (32, 32)):
        matrix = torch.randn(shape)
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        got = orthogonalize(matrix)
        assert ((s := torch.linalg.svdvals(got)) > 0.3).all() and (s < 1.35).all()
        assert torch.nn.functional.cosine_similarity(got.flatten(), (u @ v).flatten(), dim=0) > 0.95


def test_trackers(tmp_path: Path, shards: Path) -> None:
    """TensorBoard gets the numbers when asked for."""
    start_run(nano_run(steps=4, tracker="tensorboard"), tmp_path, shards)
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_wandb(tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B gets the config and the numbers, loop counts one by one, when asked for."""
    logged: list[tuple[int, dict[str, float]]] = []

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            logged.append((step, values))

        def finish(self) -> None:
            logged.append((-1, {}))

    fake = types.ModuleType("wandb")
    fake.init = lambda **settings: logged.append((0, settings["config"])) or Run()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    start_run(nano_run(steps=4, tracker="wandb"), tmp_path, shards)
    assert [step for step, _ in logged] == [0, 1, 2, 3, 4, -1] and {"loss", "loops/0", "loops/1"} <= set(logged[1][1])


def test_metrics_survive_a_cut_line(tmp_path: Path) -> None:
    """A last line that a kill cut short is left out."""
    (tmp_path / "m.jsonl").write_text(json.dumps({"step": 1}) + "\n" + '{"step": 2, "lo')
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1}]


def test_progress_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal the progress is a line with what is done and what is left."""
    monkeypatch.setattr("twoscale.train.metrics.QUIET_SECONDS", 0.0)
    line = ProgressLine(0, 10, "tiny")
    line.update(5, "loss 1.0  loops 3/4")
    line.close()
    err = capsys.readouterr().err
    assert "tiny 5/10" in err and "loops 3/4" in err and "left" in err
    assert clock(59.6) == "1:00" and clock(3723) == "1:02:03"


@pytest.mark.long
def test_compiled_blocks(tmp_path: Path, shards: Path) -> None:
    """Compiled blocks compute the same losses to rounding, in one compiled program a mode."""
    start_run(nano_run(steps=4, eval_interval=4), tmp_path / "eager", shards)
    start_run(nano_run(steps=4, eval_interval=4, compile="on"), tmp_path / "compiled", shards)
    assert max(abs(a - b) for a, b in zip(losses(tmp_path / "eager"), losses(tmp_path / "compiled"), strict=True)) < 1e-4


def test_full_disk(tmp_path: Path, shards: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    """A checkpoint that cannot be written is one clear line; the one before it stays whole."""
    config = nano_run(steps=8, checkpoint_interval=4)
    save, calls = ckpt.save_file, []

    def full(tensors: object, path: object) -> None:
        calls.append(path)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        save(tensors, path)  # type: ignore[arg-type]

    monkeypatch.setattr(ckpt, "save_file", full)
    code, _, err = cli(*arguments(config, tmp_path / "run", shards))
    assert code == 2 and "No space left" in err
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000004"]
    assert ckpt.fault(tmp_path / "run" / "checkpoints" / "step-000004") is None
