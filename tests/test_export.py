"""`twoscale export`: what transformers opens answers as `twoscale.load` does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import twoscale
from conftest import CommandLine, nano_run
from twoscale.interop.load import BUNDLED
from twoscale.train import start_run

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra twoscale[hf])")

PROMPTS = ["The loop", "A state that", "until", "no step changes the"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, shards: Path) -> tuple[Path, Path]:
    """A run and its export."""
    from twoscale.cli.main import main

    root = tmp_path_factory.mktemp("export")
    start_run(nano_run(steps=8), root / "run", shards)
    assert main(["calibrate", str(root / "run"), "--max-dce", "0.05", "--loops", "6", "--windows", "6"]) == 0
    assert main(["export", str(root / "run"), "--out", str(root / "out")]) == 0
    return root / "run", root / "out"


@pytest.fixture(scope="module")
def opened(exported: tuple[Path, Path]):  # type: ignore[no-untyped-def]
    model = transformers.AutoModelForCausalLM.from_pretrained(exported[1], trust_remote_code=True)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(exported[1])


def test_round_trip(exported: tuple[Path, Path], opened) -> None:  # type: ignore[no-untyped-def]
    """run -> export -> transformers, and run -> export -> twoscale.load: the same logits; the same tokens of a text."""
    model, tokenizer = opened
    ours, our_tokenizer = twoscale.load(exported[0])
    again, _ = twoscale.load(exported[1])
    ids = our_tokenizer.encode("The loop turns and a state moves")
    assert tokenizer("The loop turns and a state moves").input_ids == ids and tokenizer.decode(ids) == "The loop turns and a state moves"
    for loops in (1, 4, 9):
        want = twoscale.forward(ours, [ids], loops=loops).logits
        with torch.no_grad():
            assert torch.allclose(model(torch.tensor([ids]), loops=loops).logits, want, atol=1e-5)
        assert torch.equal(twoscale.forward(again, [ids], loops=loops).logits, want)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(side: str, exported: tuple[Path, Path], opened) -> None:  # type: ignore[no-untyped-def]
    """Padding on either side changes no row's answers; a rule leaves as it does in twoscale.forward."""
    model, tokenizer = opened
    ours, our_tokenizer = twoscale.load(exported[0])
    tokenizer.padding_side = side
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    rule = twoscale.exits.StepNorm(2.0)
    for exit in (None, rule, "step-norm:2.0", "auto"):
        logits = model(batch.input_ids, batch.attention_mask, exit=exit, loops=5).logits
        for b, prompt in enumerate(PROMPTS):
            want = twoscale.forward(ours, [our_tokenizer.encode(prompt)], exit=exit, loops=5).logits[0]
            assert torch.allclose(logits[b][batch.attention_mask[b].bool()], want, atol=1e-5)


def test_generate(exported: tuple[Path, Path], opened) -> None:  # type: ignore[no-untyped-def]
    """generate() through its cache writes what twoscale.generate writes: four ragged prompts, fixed loops and a rule; beams run."""
    model, tokenizer = opened
    ours, our_tokenizer = twoscale.load(exported[0])
    tokenizer.padding_side = "left"
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True, return_token_type_ids=False)
    ids = [our_tokenizer.encode(p) for p in PROMPTS]
    for exit in (None, "acceleration:1.0"):
        out = model.generate(**batch, max_new_tokens=12, do_sample=False, loops=4, exit=exit)
        want = twoscale.generate(ours, ids, 12, loops=4, exit=exit, stop=(our_tokenizer.eot,)).tokens
        for b in range(4):
            assert out[b, batch.input_ids.shape[1] :].tolist()[: len(want[b])] == want[b]
        slow = model.generate(**batch, max_new_tokens=12, do_sample=False, loops=4, exit=exit, use_cache=False)
        assert torch.equal(out, slow)
    beams = model.generate(**batch, max_new_tokens=6, num_beams=3, do_sample=False, loops=3)
    slow = model.generate(**batch, max_new_tokens=6, num_beams=3, do_sample=False, loops=3, use_cache=False)
    assert torch.equal(beams, slow)


def states_of(model, ids: list[int], **how: object) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    """The embedding and the states after each stage for one text, by tracing: a group's output is its state after the last step."""
    trace = twoscale.trace(model, [ids], **how)  # type: ignore[arg-type]
    return [x[0] for x in trace.stages]


@pytest.mark.parametrize("side", ["left", "right"])
def test_hidden_states(side: str, exported: tuple[Path, Path], opened) -> None:  # type: ignore[no-untyped-def]
    """output_hidden_states gives the embedding, then the state after each stage, in every path: plain, cached, padded, with exits."""
    model, tokenizer = opened
    ours, our_tokenizer = twoscale.load(exported[0])
    tokenizer.padding_side = side
    batch = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    assert model(batch.input_ids, batch.attention_mask, loops=5).hidden_states is None
    for how in ({}, {"use_cache": True}, {"exit": "fixed:5"}, {"exit": "kl:0,read=coda"}):
        states = model(batch.input_ids, batch.attention_mask, loops=5, output_hidden_states=True, **how).hidden_states
        assert len(states) == len(ours.config.stages) + 1 and all(x.shape == (*batch.input_ids.shape, ours.config.n_embd) for x in states)
        for b, prompt in enumerate(PROMPTS):
            want = states_of(ours, our_tokenizer.encode(prompt), loops=5)
            for got, x in zip(states, want, strict=True):
                assert torch.allclose(got[b][batch.attention_mask[b].bool()], x, atol=1e-4), how
    loss = model(batch.input_ids[:, -2:], loops=3, output_hidden_states=True).hidden_states[1].square().mean()
    loss.backward()
    assert model.model.wte.weight.grad.abs().sum() > 0
    model.zero_grad(set_to_none=True)


def test_hidden_states_of_generate(exported: tuple[Path, Path], opened) -> None:  # type: ignore[no-untyped-def]
    """generate(output_hidden_states=True) gives the states of the prompt, then of each new token."""
    model, tokenizer = opened
    tokenizer.padding_side = "left"
    batch = tokenizer(PROMPTS[:1], return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**batch, max_new_tokens=3, do_sample=False, loops=4, output_hidden_states=True, return_dict_in_generate=True)
    ours, _ = twoscale.load(exported[0])
    want = states_of(ours, out.sequences[0, :-1].tolist(), loops=4)
    for i, x in enumerate(want):
        got = torch.cat([step[i][0] for step in out.hidden_states])
        assert torch.allclose(got, x, atol=1e-4)


def test_return_dict(opened) -> None:  # type: ignore[no-untyped-def]
    """return_dict=False gives the same values as a tuple, those that are None left out."""
    model, _ = opened
    ids = torch.tensor([[5, 6, 7]])
    (logits,) = model(ids, loops=3, return_dict=False)
    loss, again, states = model(ids, loops=3, labels=ids, output_hidden_states=True, return_dict=False)
    assert torch.equal(logits, again) and loss.ndim == 0 and isinstance(states, tuple)
    assert torch.equal(model(ids, loops=3).logits, logits)


CARD = """
import builtins, os, re, sys
def asked(*words):
    os.write(2, b"asked: " + " ".join(words).encode())
    os._exit(1)
builtins.input = asked
os.environ["HF_HUB_OFFLINE"] = "1"
folder = sys.argv[1]
if sys.argv[2:] == ["tokenizer"]:  # without our package
    sys.modules["twoscale"] = None
    from transformers import AutoTokenizer
    print(AutoTokenizer.from_pretrained(folder, trust_remote_code=False)("The loop").input_ids)
else:
    code = re.search(r"```python\\n(.*?)```", open(folder + "/README.md").read(), re.S)[1]
    assert "trust_remote_code" not in code
    exec(code.replace("FOLDER", folder))
"""


@pytest.mark.parametrize("what", ["card", "tokenizer"])
def test_card_runs(what: str, exported: tuple[Path, Path]) -> None:
    """The card's example runs in a fresh process without a question about custom code; the tokenizer loads even without our package."""
    words = [sys.executable, "-c", CARD, str(exported[1]), *(["tokenizer"] if what == "tokenizer" else [])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ids = twoscale.load(exported[0])[1].encode("The loop")
    assert (str(ids) if what == "tokenizer" else "The loop") in done.stdout


def test_gradients(opened) -> None:  # type: ignore[no-untyped-def]
    """With labels there is a loss that trains."""
    model, tokenizer = opened
    ids = tokenizer("The loop turns", return_tensors="pt").input_ids
    batch = tokenizer(["The loop turns", "A"], return_tensors="pt", padding=True, padding_side="right")
    padded = model(batch.input_ids, batch.attention_mask, labels=batch.input_ids, loops=3)
    padded.loss.backward()
    assert padded.loss > 0 and model.model.wte.weight.grad.abs().sum() > 0
    out = model(ids, labels=ids, loops=3)
    out.loss.backward()
    assert out.loss > 0 and model.model.wte.weight.grad.abs().sum() > 0
    model.zero_grad(set_to_none=True)


def test_card_and_files(exported: tuple[Path, Path], tmp_path: Path, cli: CommandLine) -> None:
    """The card tells what was trained; the calibration goes along; half precision is half as large; a stranger's folder is left alone."""
    run, out = exported
    text = (out / "README.md").read_text()
    assert "8 steps" in text and "validation loss" in text and "AutoModelForCausalLM" in text and "muon" in text
    code, said, err = cli("generate", out, "The", "--exit", "auto", "--max-new-tokens", "4")
    assert code == 0 and said.startswith("The"), err
    code, said, _ = cli("export", run, "--out", tmp_path / "half", "--dtype", "float16")
    assert code == 0 and said.strip() == str(tmp_path / "half")
    whole, half = ((p / "model.safetensors").stat().st_size for p in (out, tmp_path / "half"))
    assert half < 0.6 * whole
    assert cli("export", run, "--out", out)[0] == 0, "an older export is replaced"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    code, _, err = cli("export", run, "--out", tmp_path / "mine")
    assert code == 2 and "not empty" in err and sorted(p.name for p in (tmp_path / "mine").iterdir()) == ["notes.txt"]
    config = json.loads((out / "config.json").read_text())
    config["twoscale"]["n_layer"] = 10**9
    (tmp_path / "half" / "config.json").write_text(json.dumps(config))
    code, _, err = cli("generate", tmp_path / "half", "The")
    assert code == 2 and "at most 4096" in err


def test_bundled(tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`export bundled` writes the model in the package for transformers, with calibration and card; an export can be exported."""
    monkeypatch.chdir(tmp_path)
    code, said, err = cli("export", "bundled", "--dtype", "float16")
    assert code == 0 and said.strip() == "exported/bundled", err
    assert cli("export", "exported/bundled", "--out", "again")[0] == 0 == cli("export", "again", "--out", "again")[0]
    want, tokenizer = twoscale.load("bundled")
    ids = [tokenizer.encode("The old man looked at the sea")]
    for folder in ("exported/bundled", "again"):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, trust_remote_code=True, dtype=torch.float32)
        ours, _ = twoscale.load(folder)
        assert torch.equal(twoscale.forward(ours, ids, exit="auto").steps, twoscale.forward(want, ids, exit="auto").steps)
        with torch.no_grad():
            assert torch.allclose(model(torch.tensor(ids)).logits, twoscale.forward(want, ids).logits, atol=1e-5)
        text, prompts = (Path("heldout") / "stories.txt.xz"), "prompts.json"
        assert (tmp_path / folder / text).read_bytes() == (BUNDLED / text).read_bytes()
        assert json.loads((tmp_path / folder / prompts).read_text()) == json.loads((BUNDLED / prompts).read_text())
        notes = [json.loads((place / "config.json").read_text())["training"]["text"] for place in (tmp_path / folder, BUNDLED)]
        assert notes[0] == notes[1]
    card = (tmp_path / "again" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n") and card.count("# The model in the box") == card.count("AutoModelForCausalLM") // 2 == 1
    code, _, err = cli("export", "bundled", "--checkpoint", "step-000001")
    assert code == 2 and "--checkpoint" in err
    code, _, err = cli("export", "nowhere")
    assert code == 2 and "nowhere is no folder" in err


BARE = """
import sys
class Away:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "datasets", "lm_eval", "gradio", "huggingface_hub", "pyarrow", "wandb", "tensorboard"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Away())
import twoscale
from twoscale.cli.main import main
model, tokenizer = twoscale.load(sys.argv[1])
for words in (["--help"], ["generate", sys.argv[1], "The", "--max-new-tokens", "3"], ["eval", sys.argv[1], "--windows", "2"],
              ["export", sys.argv[1], "--out", sys.argv[2]], ["bench", "--help"]):
    assert main(words) == 0, words
assert not {"transformers", "datasets", "lm_eval", "gradio"} & {m.split(".")[0] for m in sys.modules}
"""


def test_without_the_extras(exported: tuple[Path, Path], tmp_path: Path) -> None:
    """Importing and the core commands need none of the extras."""
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(exported[0]), str(tmp_path / "out")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
