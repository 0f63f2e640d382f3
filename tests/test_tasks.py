"""Tasks whose depth is known: samples against slow references, their vocabulary and file, accuracy by depth and steps, bad input."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

import twoscale
from conftest import CommandLine, small_model
from training import tiny_hops
from twoscale.cli.train import TrainArgs, parse_train
from twoscale.config import HopsConfig, ObjectiveConfig, RunConfig, UserError, presets
from twoscale.tasks import Carry, Hops, Staircase
from twoscale.tasks.file import load_task, save_task, task_of
from twoscale.tasks.measure import measure_staircase
from twoscale.tasks.staircase import load_staircase
from twoscale.tasks.task import HELD_OUT, Task
from twoscale.train import start_run

TASKS: list[Task] = [Hops(6, 4, 3), Hops(5, 5, 4, edges="pairs"), Carry(7), Carry(5, nines=0.1)]


def follow(words: list[str], task: Hops) -> list[tuple[int, int, int, list[int]]]:
    """Position, answer, depth and targets of every step for each query of a hops sample, read from its words."""
    pairs = task.edges == "pairs"
    edges = [tuple(words[2 * i : 2 * i + 2]) if pairs else tuple(words[i].split(">")) for i in range(task.nodes)]
    f = {int(a): int(b) for a, b in edges}
    assert set(f) == set(f.values()) == set(range(task.nodes)), "a permutation, every edge once"
    found = []
    for at in range(task.nodes * (2 if pairs else 1), len(words), 3):
        p, node = int(words[at].strip("<>")), int(words[at + 1])
        path = []
        for _ in range(p):
            node = f[node]
            path.append(node)
        assert int(words[at + 2]) == node and 1 <= p <= task.hops
        found.append((at + 1, node, p, path + [node] * (task.hops - p)))
    return found


def add(words: list[str], task: Carry) -> list[tuple[int, int, int, list[int]]]:
    """The same for a carry sample: every place looks at its neighbour's carry of the round before, until nothing changes."""
    D = task.digits
    a, b = ([int(w) for w in words[first : first + D]] for first in (0, D))
    assert words[2 * D :] == ["_"] * D
    total = sum(10**i * (x + y) for i, (x, y) in enumerate(zip(a, b, strict=True))) % 10**D
    carries, rounds = [0] * D, []
    for _ in range(D):
        rounds.append([(x + y + c) % 10 for x, y, c in zip(a, b, carries, strict=True)])
        carries = [0] + [int(a[i] + b[i] + carries[i] > 9) for i in range(D - 1)]
    found = []
    for i in range(D):
        digit = total // 10**i % 10
        depth = next(k for k in range(1, D + 1) if all(r[i] == digit for r in rounds[k - 1 :]))
        found.append((2 * D + i, digit, depth, [r[i] for r in rounds]))
    return found


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_slow_reference(task: Task) -> None:
    """Answers, true depths and the targets of every step are those of a reading of the words, and nothing else is asked."""
    batch, tokenizer = task.batch(range(40), seed=3), task.tokenizer()
    assert batch.ids.shape == (40, task.length) and int(batch.ids.max()) < task.vocab_size == tokenizer.vocab_size
    for row in range(40):
        words = tokenizer.decode(batch.ids[row].tolist()).split()
        assert tokenizer.encode(" ".join(words)) == batch.ids[row].tolist()
        wanted = follow(words, task) if isinstance(task, Hops) else add(words, task)  # type: ignore[arg-type]
        assert [at for at, *_ in wanted] == (batch.targets[row] >= 0).nonzero().flatten().tolist()
        for at, answer, depth, path in wanted:
            assert int(batch.targets[row, at]) == answer and int(batch.depth[row, at]) == depth
            assert batch.progress[row, at].tolist() == path
    asked = batch.targets >= 0
    assert bool((batch.progress[~asked] == -1).all()) and bool((batch.depth[~asked] == 0).all())


@given(st.lists(st.integers(0, HELD_OUT + 5), min_size=1, max_size=6), st.integers(0, 2**31 - 1))
@settings(max_examples=25, deadline=None)
def test_a_sample_is_a_function_of_its_number(numbers: list[int], seed: int) -> None:
    """A sample depends on (seed, number) alone, not on the batch that it is in."""
    for task in TASKS:
        together = task.batch(numbers, seed)
        alone = [task.batch([n], seed) for n in numbers]
        assert torch.equal(together.ids, torch.cat([b.ids for b in alone]))
        assert torch.equal(together.progress, torch.cat([b.progress for b in alone]))


def test_unknown_carry() -> None:
    """With `unknown="either"` questions, answers and depths stay; a target is a coin's until the places seen tell the carry."""
    D = 8
    plain, unsure = (Carry(D, unknown=unknown).batch(range(400)) for unknown in ("no_carry", "either"))  # type: ignore[arg-type]
    assert torch.equal(plain.ids, unsure.ids) and torch.equal(plain.targets, unsure.targets) and torch.equal(plain.depth, unsure.depth)
    heads, flips = 0, 0
    for ids, targets in zip(plain.ids.tolist(), unsure.progress[:, 2 * D :].tolist(), strict=True):
        sums = [a + b for a, b in zip(ids[:D], ids[D : 2 * D], strict=True)]
        for i, steps in enumerate(targets):
            coins = set()
            for k, target in enumerate(steps, start=1):
                seen = range(max(0, i - k + 1), i)  # the k - 1 places below
                outcomes = set()  # of the digit, over both carries into the lowest place that is seen
                for carry in (0,) if seen.start == 0 else (0, 1):
                    for place in seen:
                        carry = int(sums[place] + carry > 9)
                    outcomes.add((sums[i] + carry) % 10)
                assert target in outcomes
                if len(outcomes) == 2:
                    coins.add(target == (sums[i] + 1) % 10)
            assert len(coins) < 2  # one coin for a digit
            flips += len(coins)
            heads += sum(coins)
    assert abs(heads - flips / 2) < 4 * (flips / 4) ** 0.5


def test_samples_differ() -> None:
    """Other numbers, other seeds and held-out samples are other samples; hop counts, nodes and digits are drawn evenly."""
    task = Hops(16, 12, 8)
    batch = task.batch(range(3000))
    assert len(torch.unique(batch.ids, dim=0)) == 3000
    assert not torch.equal(batch.ids[:9], task.batch(range(9), seed=1).ids) and not torch.equal(batch.ids[:9], task.heldout(9).ids)
    for values, kinds in ((batch.depth[batch.depth > 0], 12), (batch.ids[:, 17::3], 16), (batch.ids[:, 18::3], 16)):
        share = torch.bincount(values.flatten(), minlength=kinds).double()
        share = share[share > 0] / values.numel()
        assert len(share) == kinds and float((share * kinds - 1).abs().max()) < 0.08  # 24,000 draws: 4 sigma are about .08
    sums = Carry(12, nines=0.1).batch(range(2000)).ids
    pairs = torch.bincount((10 * sums[:, :12] + sums[:, 12:24]).flatten(), minlength=100)
    assert float(((pairs - 240.0) ** 2 / 240).sum()) < 160  # chi-square, 99 degrees of freedom: p below 1e-4


@pytest.mark.parametrize("task", TASKS, ids=repr)
def test_task_file(task: Task, tmp_path: Path) -> None:
    """task.json gives the task back; another version, another task and no task are told apart."""
    assert load_task(tmp_path) is None
    save_task(tmp_path, task)
    assert load_task(tmp_path) == task
    found = json.loads((tmp_path / "task.json").read_text())
    for changed, word in (({"version": 2}, "version 2"), ({"task": "chess"}, "no known task"), ({"settings": {"depth": 3}}, "depth")):
        (tmp_path / "task.json").write_text(json.dumps(found | changed))
        with pytest.raises(UserError, match=word):
            load_task(tmp_path)


def test_task_of_a_config() -> None:
    """A run's config names its task; a text run has none."""
    assert task_of(RunConfig()) is None
    assert task_of(presets.hops()) == Hops(16, 12, 8) and task_of(presets.carry()) == Carry(12, unknown="either")
    config = RunConfig(task="hops", hops=HopsConfig(nodes=5, hops=2, queries=1, edges="pairs"))
    assert task_of(config) == Hops(5, 2, 1, "pairs")


@pytest.mark.parametrize(
    "changes",
    [{}, {"groups": ((2,),)}, {"groups": ((3, 4),), "start": "input", "inject": "none", "backprop_steps": None}],
    ids=["two groups", "layers behind", "one group at the end"],
)
def test_staircase(changes: dict[str, object]) -> None:
    """Accuracy by depth and steps is that of twoscale.forward at 1, 2, ... loops in every group."""
    task = Hops(5, 4, 3)
    model = twoscale.LoopedGPT(small_model(vocab_size=task.vocab_size, block_size=task.length, **changes)).eval()
    found = measure_staircase(model, task, loops=3, samples=150, seed=1, step=7)
    batch = task.heldout(150, seed=1)
    for k in (1, 2, 3):
        right = twoscale.forward(model, batch.ids, loops=k).logits.argmax(-1) == batch.targets
        for d, n, row in zip(found.depths, found.count, found.accuracy, strict=True):
            assert n == int((batch.depth == d).sum()) and row[k - 1] == pytest.approx(float(right[batch.depth == d].double().mean()))
        assert found.overall[k - 1] == pytest.approx(float(right[batch.depth > 0].double().mean()))
    assert found.step == 7 and found.depths == (1, 2, 3, 4) and sum(found.count) == 450


def test_staircase_file(tmp_path: Path) -> None:
    """staircase.json gives the staircase back; the steps that a depth needs are those from which on it stays right."""
    stairs = Staircase("hops", 5, 9, 0, (1, 2, 3), (4, 4, 1), ((1.0, 0.5, 1.0), (0.0, 1.0, 1.0), (0.0, 0.0, 0.5)), {"nodes": 3})
    assert load_staircase(tmp_path) is None
    stairs.save(tmp_path)
    assert load_staircase(tmp_path) == stairs
    assert stairs.needed(0.9) == (3, 2, None) and stairs.overall == pytest.approx((4 / 9, 6 / 9, 8.5 / 9))
    assert stairs.table().splitlines()[2].split() == ["1", "4", "100.0", "50.0", "100.0"]
    found = json.loads((tmp_path / "staircase.json").read_text())
    for changed, word in (({"version": 0}, "not of version 1"), ({"settings": None}, "settings")):
        (tmp_path / "staircase.json").write_text(json.dumps(found | changed))
        with pytest.raises(UserError, match=word):
            load_staircase(tmp_path)


TINY = ("--hops.nodes", 4, "--hops.hops", 3, "--hops.queries", 2, "--model.n-embd", 16, "--model.n-head", 2, "--model.mean-loops", 3)
QUICK = (
    "--train.steps", 3, "--train.batch-size", 4, "--train.eval-sequences", 4, "--train.staircase-samples", 16, "--train.staircase-loops", 4,
    "--train.geometry-interval", 0,
)  # fmt: skip


def test_train_command(tmp_path: Path, cli: CommandLine) -> None:
    """`train --task hops` fits vocabulary and context to the task, prints the staircase and writes it; the run loads and goes on."""
    code, out, err = cli("train", "--task", "hops", *TINY, *QUICK, "--out", tmp_path / "run")
    assert code == 0 and "percent right by true depth" in out, err
    assert "val: 8 answers of 4 held-out samples of the task hops, at 3 loops" in err
    stairs = load_staircase(tmp_path / "run")
    assert stairs is not None and stairs.depths == (1, 2, 3) and stairs.loops == 4 and stairs.step == 3
    assert load_task(tmp_path / "run") == Hops(4, 3, 2)
    model, tokenizer = twoscale.load(tmp_path / "run")
    assert (model.config.vocab_size, model.config.block_size) == (24, 10) and tokenizer.encode("3>1 <2> 3") == [20, 5, 3]
    (tmp_path / "run" / "staircase.json").unlink()
    code, out, _ = cli("train", "--resume", tmp_path / "run")
    assert code == 0 and load_staircase(tmp_path / "run") == stairs


def test_shorter_schedule() -> None:
    """Fewer steps of a task's preset keep the shares of warm-up, growing loops and falling rate; a setting that is given stays."""
    c = parse_train(["--task", "hops", "--train.steps", "360", "--train.loops-ramp", "7"], "twoscale train", TrainArgs).config.train
    full = presets.hops().train
    assert (c.steps, c.warmup_steps, c.decay_steps, c.loops_ramp) == (360, full.warmup_steps // 10, (full.decay_steps or 0) // 10, 7)


@pytest.mark.parametrize("name", ["hops", "carry", "hops-paper"])
def test_presets_train(name: str, tmp_path: Path) -> None:
    """Every task preset trains, and its weights take less than a megabyte in half precision."""
    config = presets.get(name)
    short = dataclasses.replace(
        config.train, steps=2, warmup_steps=1, decay_steps=1, loops_ramp=0, batch_size=2, eval_sequences=2, staircase_samples=4
    )
    result = start_run(dataclasses.replace(config, train=short), tmp_path)
    assert result.finished and load_staircase(tmp_path) is not None
    assert 2 * sum(p.numel() for p in twoscale.load(tmp_path)[0].parameters()) < 1_000_000


@pytest.fixture(scope="module")
def task_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps on a tiny hops."""
    run = tmp_path_factory.mktemp("task") / "run"
    start_run(tiny_hops(objective=ObjectiveConfig("every_step")), run)
    return run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--hops.nodes", 8, "--hops.hops", 9), "hops.hops = 9 is above hops.nodes = 8"),
        (("--hops.edges", "words"), "invalid choice 'words'"),
        (("--carry.nines", 2), "carry.nines = 2.0"),
        (("--carry.unknown", "both"), "no_carry"),
        (("--model.block-size", 9, *TINY), "a sample of hops has 10 tokens, model.block_size is 9"),
        (("--model.vocab-size", 9, *TINY), "the task hops has 24 tokens, model.vocab_size is 9"),
        (("--data-dir", "."), "makes its own samples"),
        (("--init", "bundled"), "is not of the task hops"),
        (("--train.objective.name", "gate"), "trains an exit gate and the model has none: add --model.exit-gate"),
        (("--train.objective.name", "last", "--model.exit-gate"), "does not train it"),
        (("--train.objective.name", "progress", "--task", "none"), "needs a task"),
        (("--train.objective.name", "every_step", "--model.groups", "none"), "no loop groups"),
        (("--train.objective.rate", 1.0), "objective.rate = 1.0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input(words: tuple[object, ...], said: str, tmp_path: Path, cli: CommandLine) -> None:
    """What a user can mend is one line and exit code 2, and leaves nothing behind that stops the corrected command."""
    given_task = () if "--task" in words else ("--task", "hops")
    code, _, err = cli("train", "--preset", "hops", *given_task, *QUICK, "--out", tmp_path / "run", *words)
    assert code == 2 and said in err and "Traceback" not in err and len(err.strip().splitlines()) == 1, err


def test_task_and_text_do_not_mix(task_run: Path, trained: Path, tmp_path: Path, cli: CommandLine) -> None:
    """A text run's folder takes no task, a task's folder takes no text, and commands on text say that a task's run has none."""
    code, _, err = cli("train", "--preset", "hops", *QUICK, "--out", trained)
    assert code == 2 and "task is 'none' there and 'hops' here" in err
    code, _, err = cli("train", "--preset", "nano", "--out", task_run)
    assert code == 2 and "was trained on the task hops and has no text" in err
    code, _, err = cli("train", "--task", "hops", "--init", trained, *QUICK, "--out", tmp_path / "a")
    assert code == 2 and "is not of the task hops" in err
    code, _, err = cli("reproduce", "--preset", "hops", "--out", tmp_path / "b")
    assert code == 2 and "works on text" in err
    code, _, err = cli("eval", task_run)
    assert code == 2 and "trained on the task hops" in err


def test_task_file_of_another_version(task_run: Path, cli: CommandLine) -> None:
    """A run whose task.json is of another version is not gone on with."""
    path = task_run / "task.json"
    body = path.read_text()
    path.write_text(json.dumps(json.loads(body) | {"version": 7}))
    code, _, err = cli("train", "--resume", task_run)
    path.write_text(body)
    assert code == 2 and "is of version 7" in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("words", [("gate", "--train.objective.stage", 2), ("act", "--train.objective.freeze")], ids=["stage 2", "freeze"])
def test_from_one_task_run_to_the_next(words: tuple[object, ...], task_run: Path, tmp_path: Path, cli: CommandLine) -> None:
    """--init takes the weights, the shape and the task of a task's run, and gives it a gate that is fitted while the rest stays."""
    words = ("--train.objective.name", *words, "--model.exit-gate")
    code, _, err = cli("train", "--init", task_run, *words, *QUICK, "--out", tmp_path / "run")
    assert code == 0, err
    before, after = (dict(twoscale.load(run)[0].named_parameters()) for run in (task_run, tmp_path / "run"))
    assert {name for name in after if ".gate." in name} == after.keys() - before.keys() != set()
    assert all(torch.equal(p, after[name]) for name, p in before.items())
    gate = after["stages.1.gate.bias"]
    assert float(gate.detach().abs().sum()) > 0, "the gate was fitted"
    out = twoscale.forward(twoscale.load(tmp_path / "run")[0], Hops(4, 3, 2).batch(range(3)).ids, exit=twoscale.exits.Gate(0.9), loops=4)
    assert 1 <= int(out.steps.min()) <= int(out.steps.max()) <= 4


def test_export(task_run: Path, tmp_path: Path, cli: CommandLine) -> None:
    """An exported model of a task takes its task and its staircase along, and answers as the run does."""
    assert cli("export", task_run, "--out", tmp_path / "out", "--dtype", "float32")[0] == 0
    assert load_task(tmp_path / "out") == Hops(4, 3, 2) and load_staircase(tmp_path / "out") == load_staircase(task_run)
    assert "Hops(nodes=4, hops=3, queries=2" in (tmp_path / "out" / "README.md").read_text()
    ids = Hops(4, 3, 2).batch(range(2)).ids
    a, b = (twoscale.forward(twoscale.load(folder)[0], ids, loops=3).logits for folder in (task_run, tmp_path / "out"))
    assert torch.equal(a, b)
