"""Training beyond one machine: what a pass gathers, sharded checkpoints, and what ends a run whose nodes do not fit together."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch

from conftest import CommandLine, is_one_line, nano_run
from forked import Forked, environments, start_process, start_script
from training import arguments, finish, losses
from twoscale.config import DataConfig, RunConfig, UserError
from twoscale.data import prepare
from twoscale.interop import load
from twoscale.train import checkpoint as ckpt, start_run
from twoscale.train.sharded import load_parts, read_manifest

GATHERED = """
import dataclasses, json, torch
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from twoscale.config import presets
from twoscale.model import LoopedGPT, StateNoise
from twoscale.train import parallel
from twoscale.train.objective import EveryStep
from twoscale.train.world import open_world

class Gathered(TorchDispatchMode):
    bytes = 0
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        if str(f).startswith("c10d._allgather_base_"):
            self.bytes += args[0].nbytes
        return f(*args, **(kwargs or {}))

def layer_by_layer(model, config):
    return list(model.blocks())

c, found = presets.nano(), {}
units = parallel.sharded_units
with open_world() as world:
    for name, objective in (("last", None), ("every_step", EveryStep())):
        for layout in (layer_by_layer, units):
            parallel.sharded_units = layout
            for loops in (2, 12):
                train = dataclasses.replace(c.train, parallel="fsdp", objective=dataclasses.replace(c.train.objective, name=name))
                config, ids = dataclasses.replace(c, train=train), torch.zeros(1, 8, dtype=torch.int64)
                model = parallel.build_model(config, world)
                wrapped = parallel.distribute(model, train, world)
                parallel.fill_shards(model, config, world)
                with Gathered() as gathered:
                    wrapped(ids, ids, loops=(loops, loops), noise=StateNoise(0, 0, (0,)), objective=objective).backward()
                found[f"{name} {'before' if layout is layer_by_layer else 'now'} {loops}"] = gathered.bytes
    if world.main:
        print(json.dumps(found | {"weights": 4 * sum(p.numel() for p in model.parameters())}))
"""


def test_gathered_bytes() -> None:
    """FSDP2 gathers the same bytes in a step with 2 loops and with 12, at most the weights forwards and backwards, with every objective."""
    process = start_script(GATHERED, 2)
    finish(process)
    found = json.loads(process.output)
    print(found)
    for name in ("last", "every_step"):
        assert 0 < found[f"{name} now 2"] == found[f"{name} now 12"] <= 2 * found["weights"] + 4096
        assert found[f"{name} before 12"] > 3 * found[f"{name} now 12"], "a layout that gathers once a loop step is noticed"


STEPS = """
import sys
from pathlib import Path
from twoscale.config.run_file import load_config
from twoscale.train.state import save_state
from twoscale.train.trainer import Interrupts, Trainer
from twoscale.train.world import open_world
run, data, steps, again = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
with open_world() as world:
    t = Trainer(load_config(run), run, data, world)
    if t.last_saved is not None:
        save_state(again, t.config, t.progress, t.model, t.optimizers, t.source.tokenizer, world)
    losses = [t._step(Interrupts())[0]["loss"] for _ in range(steps)]
    t.save()
    if world.main:
        print(*losses)
"""


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a sharded checkpoint, put together in one process."""
    entries = read_manifest(folder)
    kinds = {"F32": torch.float32, "U8": torch.uint8}
    tensors = {name: torch.empty(e.shape, dtype=kinds[e.dtype]) for name, e in entries.items()}
    load_parts(folder, entries, tensors, alone=True)
    return tensors


def start_folder(folder: Path, config: RunConfig, shards: Path) -> RunConfig:
    folder.mkdir()
    ckpt.save_config(folder, config)
    return config


@pytest.mark.parametrize("parallel", ["fsdp", pytest.param("hsdp", marks=pytest.mark.long)])
def test_resharding(parallel: str, tmp_path: Path, shards: Path) -> None:
    """A checkpoint of 4 processes goes on in 2, that in 1: weights and optimizer state are bit-equal after each, losses those of 1."""
    settings = {"steps": 9, "optimizer": "muon" if parallel == "fsdp" else "adamw", "lr": 1e-3, "keep_last": 9, "geometry_interval": 0}
    start_run(nano_run(**settings), tmp_path / "one", shards)
    run, seen = tmp_path / "run", []
    start_folder(run, nano_run(parallel=parallel, checkpoint_format="sharded", **settings), shards)
    for processes in (4, 2, 1):
        process = start_script(
            STEPS, processes, str(run), str(shards), "3", str(tmp_path / f"again-{processes}"), nodes=max(1, processes // 2)
        )
        finish(process)
        seen += [float(word) for word in process.output.split()]
    assert max(abs(a - b) for a, b in zip(seen, losses(tmp_path / "one"), strict=True)) < 1e-5
    for step, processes in ((3, 2), (6, 1)):
        name = ckpt.checkpoint_name(step)
        before, after = whole(run / "checkpoints" / name), whole(tmp_path / f"again-{processes}" / name)
        assert before.keys() == after.keys() and any(name.startswith("optimizer/") for name in before)
        assert all(torch.equal(before[name], after[name]) for name in before)
    written = {p.name.split("-")[1] for p in (run / "checkpoints" / "step-000003").glob("*.safetensors")}
    assert written == {"00000", "00001", "00002", "00003"}, "every process writes"
    model, _ = load(run)
    one, _ = load(tmp_path / "one")
    assert all(torch.allclose(p, q, atol=1e-4) for p, q in zip(model.parameters(), one.parameters(), strict=True))


MEMORY = """
import ctypes, dataclasses, os, sys
from pathlib import Path
import torch
from twoscale.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from twoscale.data.tokenizer import byte_tokenizer
from twoscale.train import checkpoint, parallel, state
from twoscale.train.optim import build_optimizers
from twoscale.train.world import open_world

def status(name):
    return 1024 * int(next(l for l in open("/proc/self/status") if l.startswith(name)).split()[1])

model = ModelConfig(vocab_size=257, block_size=64, n_layer=6, n_head=8, n_embd=768, groups=((2, 3),))
config = RunConfig(model=model, train=TrainConfig(parallel="fsdp", optimizer="adamw", checkpoint_format=sys.argv[2]))
with open_world() as world:
    built = parallel.build_model(config, world)
    parallel.distribute(built, config.train, world)
    parallel.fill_shards(built, config, world)
    optimizers = build_optimizers(built, config.train)
    for p in built.parameters():
        p.grad = torch.ones_like(p)
    optimizers["adamw"].step()
    optimizers["adamw"].zero_grad(set_to_none=True)
    tensors = state._parts(built, optimizers, world).values()
    share = sum(getattr(t, "_local_tensor", t).nbytes for t in tensors)
    progress = checkpoint.Progress(1, 1, 1, 0)
    for _ in range(2):  # the first save also imports, and opens files
        ctypes.CDLL(None).malloc_trim(0)  # what the allocator kept of the first save would hide the second one's peak
        open("/proc/self/clear_refs", "w").write("5")
        before = status("VmRSS")
        state.save_state(Path(sys.argv[1]), config, progress, built, optimizers, byte_tokenizer(), world)
        peak = status("VmHWM") - before
    os.write(1, f"{share} {peak}\\n".encode())  # at once: print writes the line end by itself, and both processes share the pipe
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc to read the peak of memory")
def test_memory_of_saving(tmp_path: Path) -> None:
    """Saving a sharded checkpoint peaks at no more than 1.3x of a process's share of weights and optimizer state; a whole one at more."""
    worst = {}
    for kind in ("sharded", "whole"):
        process = start_script(MEMORY, 2, str(tmp_path / kind), kind)
        finish(process)
        found = [tuple(map(int, line.split())) for line in process.output.splitlines()]
        assert len(found) == 2 and min(share for share, _ in found) > 150_000_000
        worst[kind] = max((share + peak) / share for share, peak in found)
    print(worst)
    assert worst["sharded"] <= 1.3 < worst["whole"]


KILLED = """
import os, sys
from twoscale.train import checkpoint, sharded
place, saves = sys.argv.pop(1), []
def killed(f):
    def call(*args, **kwargs):
        saves.append(0)
        if len(saves) > {calls}:
            os.kill(os.getpid(), 9)
        return f(*args, **kwargs)
    return call
if place == "parts":
    sharded.save_file = killed(sharded.save_file)
elif place == "manifest":
    sharded.write_json = killed(sharded.write_json)
else:
    checkpoint.write_json = killed(checkpoint.write_json)
from twoscale.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("place", "calls"), [("parts", 3), ("manifest", 1), ("state", 1)])
def test_killed_while_saving(place: str, calls: int, tmp_path: Path, shards: Path) -> None:
    """A kill at any point of saving a sharded checkpoint leaves the last whole one, and the run goes on from it."""
    config = nano_run(steps=6, checkpoint_interval=2, checkpoint_format="sharded", geometry_interval=0)
    words = arguments(config, tmp_path / "run", shards)
    process = Forked([place, *words], [{}], KILLED.format(calls=calls))
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert [p.name for p in ckpt.list_checkpoints(tmp_path / "run" / "checkpoints")] == ["step-000002"]
    assert list((tmp_path / "run" / "checkpoints").glob(".step-000004.*.tmp"))
    assert "going on from step 2" in finish(start_process(words))
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-000004", "step-000006"]


def test_damaged_parts(tmp_path: Path, shards: Path, cli: CommandLine) -> None:
    """A sharded checkpoint with a missing, cut or altered part, or a manifest that its files do not bear out, is refused in one line."""
    run = tmp_path / "run"
    start_run(nano_run(steps=4, checkpoint_interval=2, checkpoint_format="sharded", geometry_interval=0), run, shards)
    newest = run / "checkpoints" / "step-000004"
    assert not (newest / "model.safetensors").exists()
    model, _ = load(run)
    assert cli("export", run, "--out", tmp_path / "export")[0] == 0 and (tmp_path / "export" / "model.safetensors").exists()
    assert all(torch.equal(p, q) for p, q in zip(load(tmp_path / "export")[0].parameters(), model.parameters(), strict=True))
    for name in ("model-00000-000.safetensors", "shards.json"):
        body = (newest / name).read_bytes()
        for damaged in (body[: len(body) // 2], body[:-9] + b"\\x01" + body[-8:], None):
            (newest / name).unlink()
            if damaged is not None:
                (newest / name).write_bytes(damaged)
            code, _, err = cli("train", "--resume", run)
            assert code == 2 and is_one_line(err) and "--checkpoint step-000002" in err, err
        (newest / name).write_bytes(body)
    manifest, state = json.loads((newest / "shards.json").read_text()), json.loads((newest / "state.json").read_text())
    for change, said in (
        ({"shape": [1 << 40, 1 << 20]}, "do not make a tensor"),
        (
            {"parts": [{"offset": [0, 0], "shape": manifest["tensors"]["model/wte.weight"]["shape"], "file": "../x"}]},
            "outside of its folder",
        ),
        (
            {
                "shape": [1 << 20, 1 << 12],
                "parts": [{"offset": [0, 0], "shape": [1 << 20, 1 << 12], "file": "model-00000-000.safetensors"}],
            },
            "promises",
        ),
    ):
        changed = {"tensors": manifest["tensors"] | {"model/wte.weight": manifest["tensors"]["model/wte.weight"] | change}}
        (newest / "shards.json").write_text(json.dumps(changed))
        (newest / "state.json").write_text(
            json.dumps(state | {"files": state["files"] | {"shards.json": ckpt._facts(newest / "shards.json")}})
        )
        with pytest.raises(UserError, match=said):
            load(newest)


NOT_ALIKE = {
    "settings": ({}, {"lr": 1e-4}, r"train.lr is 0.003 in the first process and 0.0001 in process 1 on .*same command"),
    "data": ("shards", "others", r"number of train tokens is \d+ in the first process and \d+ in process 1 on .*--data-dir"),
    "shard": ("shards", "missing", r"train-00000.bin: No such file.*\(process 1 on "),
}


@pytest.mark.parametrize("case", NOT_ALIKE)
def test_nodes_that_do_not_fit(case: str, tmp_path: Path, shards: Path, corpus: Path) -> None:
    """Nodes with other settings, other data or a missing shard: one line that names the difference and the node, and nothing is written."""
    a, b, said = NOT_ALIKE[case]
    folders = {"shards": shards, "others": tmp_path / "others", "missing": tmp_path / "missing"}
    prepare(DataConfig(source=str(corpus), val_fraction=0.2, max_documents=30), folders["others"])
    shutil.copytree(shards, folders["missing"])
    (folders["missing"] / "train-00000.bin").unlink()
    words = [
        arguments(nano_run(steps=4, **(x if isinstance(x, dict) else {})), tmp_path / "run", folders[x if isinstance(x, str) else "shards"])
        for x in (a, b)
    ]
    nodes = [Forked(w, [e]) for w, e in zip(words, environments(2, nodes=2), strict=True)]
    for node in nodes:
        err = finish(node, 2)
        lines = [line for line in err.splitlines() if line.startswith("twoscale ")]
        assert len(lines) == 1 and re.search(said, lines[0]) and "Traceback" not in err, err
    assert not ckpt.list_checkpoints(tmp_path / "run" / "checkpoints") and not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("missing", [0, 1])
def test_a_node_that_never_comes(missing: int, tmp_path: Path, shards: Path) -> None:
    """Where a process does not join in time, the others end with one line and exit code 2."""
    there = environments(2, nodes=2)[1 - missing] | {"TWOSCALE_JOIN_SECONDS": "1"}
    err = finish(Forked(arguments(nano_run(steps=4), tmp_path / "run", shards), [there]), 2)
    lines = [line for line in err.splitlines() if line.startswith("twoscale ")]
    assert len(lines) == 1 and "within 1 s" in lines[0] and "Traceback" not in err, err
    assert ("first process did not answer" if missing == 0 else "not all of the 2 processes joined") in lines[0]


def test_errors_of_one_process() -> None:
    """What is wrong in one process is raised in all, with its place; a bad time limit is refused."""
    script = (
        "import os\nfrom twoscale.config import UserError\nfrom twoscale.train.world import open_world\n"
        "with open_world() as world:\n"
        "    try:\n        with world.together():\n            if world.rank == 1: raise UserError('no such file')\n"
        "    except UserError as error:\n        print(error, flush=True)\n"
        "os.environ['TWOSCALE_JOIN_SECONDS'] = 'soon'\n"
        "try:\n    with open_world(): pass\nexcept UserError as error: print(error, flush=True)\n"
    )
    process = start_script(script, 2)
    finish(process)
    assert process.output.count("no such file (process 1 on ") == 2
    assert process.output.count("TWOSCALE_JOIN_SECONDS = 'soon': give seconds") == 2
