"""The lm-evaluation-harness through our model: its numbers equal a direct computation."""

import json
import lzma
import math
import zipfile
from pathlib import Path

import pytest
import torch

import twoscale
from conftest import SHARED, CommandLine, nano_run
from twoscale.train import start_run

lm_eval = pytest.importorskip("lm_eval", reason="the lm-evaluation-harness is not installed (the extra twoscale[eval])")

TASK = """
task: twoscale_words
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""

LAMBADA = """
task: local_lambada
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{text.rsplit(' ', 1)[0]}}}}"
doc_to_target: "{{{{' ' + text.rsplit(' ', 1)[1]}}}}"
metric_list:
  - metric: perplexity
  - metric: acc
"""

BLIMP = """
task: local_blimp
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: ""
doc_to_choice: "{{{{[sentence_good, sentence_bad]}}}}"
doc_to_target: 0
metric_list:
  - metric: acc
"""

DOCUMENTS = [
    {"prompt": "the loop turns and a", "choices": [" state", " zebra"], "answer": 0},
    {"prompt": "no step", "choices": [" qqqq", " changes"], "answer": 1},
    {"prompt": "until it", "choices": [" settles near", " xyz"], "answer": 0},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> Path:
    out = tmp_path_factory.mktemp("harness") / "run"
    start_run(nano_run(steps=20), out, shards)
    return out


def direct(model: twoscale.LoopedGPT, context: list[int], continuation: list[int], **how: object) -> float:
    """log p(continuation | context), one whole pass, added up."""
    logits = twoscale.forward(model, [context + continuation], **how).logits[0].double()  # type: ignore[arg-type]
    printed = torch.log_softmax(logits, dim=-1)
    return sum(float(printed[len(context) - 1 + i, token]) for i, token in enumerate(continuation))


@pytest.mark.parametrize("how", [{"loops": 4}, {"loops": 8, "exit": twoscale.exits.StepNorm(2.0)}], ids=["fixed", "exit"])
def test_loglikelihood(how: dict[str, object], run: Path) -> None:
    """The harness's own loglikelihood, ragged and batched, an empty context and a rolling one included, equals a direct computation."""
    from lm_eval.api.instance import Instance

    from twoscale.interop.harness import HarnessModel

    model, tokenizer = twoscale.load(run)
    lm = HarnessModel(model, tokenizer, batch=2, **how)
    pairs = [("the loop", " turns"), ("a", " state moves until"), ("", "no step"), ("until it settles ", "near")]
    found = lm.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)], disable_tqdm=True)
    for (context, continuation), (value, _) in zip(pairs, found, strict=True):
        context, continuation = context.rstrip(), context[len(context.rstrip()) :] + continuation
        start = tokenizer.encode(context) or [tokenizer.eot]
        assert value == pytest.approx(direct(model, start, tokenizer.encode(continuation), **how), abs=1e-4)
    assert 0 < lm.mean_steps[0] <= 8 and lm.tokens > 0
    text = "the loop turns and a state moves until it settles near a point no step changes the loop turns"
    (total,) = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True)
    ids, room = tokenizer.encode(text), model.config.block_size
    assert len(ids) > room
    first = direct(model, [tokenizer.eot], ids[: room - 1], **how) if room > 1 else 0.0
    assert total < first < 0


def test_tasks(run: Path, tmp_path: Path, cli: CommandLine) -> None:
    """A local task gives the accuracy that the direct computation gives, beside mean steps; what cannot be run is told in one line."""
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(d) + "\n" for d in DOCUMENTS))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "words.yaml").write_text(TASK.format(data=data))
    model, tokenizer = twoscale.load(run)
    right = 0
    for d in DOCUMENTS:
        scores = [direct(model, tokenizer.encode(d["prompt"]), tokenizer.encode(c), loops=4) for c in d["choices"]]  # type: ignore[arg-type, union-attr]
        right += scores.index(max(scores)) == d["answer"]
    code, out, err = cli("eval", run, "--tasks", "twoscale_words", "--include", tmp_path / "tasks", "--loops", "4")
    assert code == 0 and f"acc {right / 3:.4f}" in out and "4.00 of 4" in out, out + err
    more = ("--num-fewshot", "1", "--batch-size", "2", "--limit", "2", "--output", tmp_path / "found" / "words.json")
    code, shot, err = cli("eval", run, "--tasks", "twoscale_words", "--include", tmp_path / "tasks", "--loops", "4", *more)
    assert code == 0, err
    found = json.loads((tmp_path / "found" / "words.json").read_text())
    assert found["num_fewshot"] == 1 and found["limit"] == 2 and found["batch_size"] == 2 and found["loops"] == [4, 4]
    assert f"acc {found['results']['twoscale_words']['acc']:.4f}" in shot and found["mean_steps"] == [4.0, 4.0]
    assert found["tokens"] > 2 * 2 * 8, "the examples before a question are read too"
    code, _, err = cli("eval", run, "--tasks", "no_such_task_at_all")
    assert code == 2 and "no_such_task_at_all" in err.strip().splitlines()[-1]


@pytest.mark.skipif(not (SHARED / "data" / "eval").is_dir(), reason="the evaluation sets LAMBADA and BLiMP are not here")
def test_lambada_and_blimp(run: Path, tmp_path: Path, cli: CommandLine) -> None:
    """Published sets as local task files: the last word of a passage, and pairs of sentences, judged as directly computed."""
    model, tokenizer = twoscale.load(run)
    (tmp_path / "tasks").mkdir()
    with lzma.open(SHARED / "data" / "eval" / "lambada_test_openai.jsonl.xz", "rt") as f:
        passages = [json.loads(next(f))["text"][-60:] for _ in range(6)]  # what the small context holds
    with zipfile.ZipFile(SHARED / "data" / "eval" / "BLiMP.zip") as archive:
        name = next(n for n in sorted(archive.namelist()) if n.endswith("causative.jsonl"))
        pairs = [json.loads(line) for line in archive.read(name).splitlines()[:8]]
    pairs = [{key: pair[key][:40] for key in ("sentence_good", "sentence_bad")} for pair in pairs]
    for task, rows in ((LAMBADA, [{"text": t} for t in passages]), (BLIMP, pairs)):
        data = tmp_path / f"{len(rows)}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "tasks" / f"{len(rows)}.yaml").write_text(task.format(data=data))
    how = {"exit": twoscale.exits.StepNorm(2.0), "loops": 6}
    words = ("--exit", "step-norm:2.0", "--loops", "6")
    code, out, err = cli("eval", run, "--tasks", "local_lambada", "local_blimp", "--include", tmp_path / "tasks", *words)
    assert code == 0, err

    def score(context: list[int], text: str) -> float:
        return direct(model, context or [tokenizer.eot], tokenizer.encode(text), **how)

    better = [score([], p["sentence_good"]) > score([], p["sentence_bad"]) for p in pairs]
    last = [score(tokenizer.encode(t.rsplit(" ", 1)[0]), " " + t.rsplit(" ", 1)[1]) for t in passages]
    numbers = {line.split()[0]: line for line in out.splitlines()}
    assert f"acc {sum(better) / len(better):.4f}" in numbers["local_blimp"], out
    printed = float(numbers["local_lambada"].split("perplexity ")[1].split()[0])
    assert math.log(printed) == pytest.approx(-sum(last) / len(last), rel=1e-3) and "6.00 of 6" not in out, out
