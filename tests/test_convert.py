"""`twoscale convert` and `train --init`: plain decoders become looped ones that compute the same, foreign models become runs."""

import dataclasses
import json
from pathlib import Path

import pytest
import tokenizers
import torch

import twoscale
from conftest import CommandLine, nano_run
from families import llama, with_tokenizer
from twoscale.config import DataConfig, ModelConfig, UserError
from twoscale.config.groups import parse_groups
from twoscale.data import IncrementalDecoder, Tokenizer, source_name
from twoscale.interop.convert import convert, looped, suggested_groups
from twoscale.interop.export import export
from twoscale.train import start_run

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra twoscale[hf])")
IDS = torch.tensor([[5, 17, 3, 70, 41, 9, 9, 2]])


@pytest.mark.parametrize("settings", [{}, {"tie_word_embeddings": True, "head_dim": 16}], ids=["plain", "tied, wide heads"])
def test_exact_start(tmp_path: Path, settings: dict[str, object]) -> None:
    """One loop, or with the identity injected any number of loops, gives the plain model's logits; several groups, first layer included."""
    with torch.no_grad():
        want = llama(tmp_path, **settings)(IDS).logits
    plain, tokenizer = twoscale.load(tmp_path)
    assert tokenizer is None and torch.allclose(twoscale.forward(plain, IDS).logits, want, atol=1e-5)
    for groups in (((1, 2),), ((0,), (2, 3)), ((0, 1, 2, 3),)):
        model = looped(plain, groups, loops=3)
        for loops in (1, 2, 7):
            with torch.no_grad():
                assert torch.allclose(model(IDS, loops=loops), want, atol=1e-5)
            assert torch.allclose(twoscale.forward(model, IDS, loops=loops).logits, want, atol=1e-5)
        repeated = looped(plain, groups, loops=3, inject="none")
        assert torch.allclose(twoscale.forward(repeated, IDS, loops=1).logits, want, atol=1e-5)
        assert not torch.allclose(twoscale.forward(repeated, IDS, loops=3).logits, want, atol=1e-2)


def test_retrofit(tmp_path: Path, cli: CommandLine) -> None:
    """Convert, train on from there with the model's own tokenizer, measure and export: every command takes the run."""
    plain, run, trained = tmp_path / "llama", tmp_path / "run", tmp_path / "trained"
    llama(plain)
    with_tokenizer(plain)
    corpus = tmp_path / "text.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"the loop {i} turns until no step changes the state " * 12}) + "\n" for i in range(60)))
    ours = ("--data.source", str(corpus), "--data.val-fraction", "0.3")
    outcome = cli("convert", str(plain), "--groups", "1-2", "--loops", "2", "--out", str(run), *ours)
    assert outcome[0] == 0, outcome[2]
    tokenizer = Tokenizer.load(run / "data")
    assert tokenizer.pipeline.id_to_token(tokenizer.eot) == "</s>"
    assert twoscale.load(run)[1].eot == tokenizer.eot and tokenizer.byte_lengths()[tokenizer.eot] == 0
    words = ("--init", str(run), "--out", str(trained), *ours, "--train.steps", "4", "--train.warmup-steps", "1", "--train.compile", "off")
    more = ("--model.block-size", "32", "--train.batch-size", "4", "--train.geometry-interval", "0", "--train.eval-sequences", "4")
    result = cli("train", *words, *more)
    assert result[0] == 0, result[2]
    assert cli("train", *words, *more)[0] == 0  # again: there is nothing left to do
    start, end = twoscale.load(run)[0], twoscale.load(trained)[0]
    assert end.config.block_size == 32 and end.config.groups == ((1, 2),)
    adapter = end.groups[0].adapter
    assert adapter is not None and adapter.weight[:, :32].abs().max() > 0  # the state has a say now
    ids = tokenizer.encode("the loop turns until no step changes the state")
    with torch.no_grad():
        losses = [float(m(torch.tensor([ids[:-1]]), torch.tensor([ids[1:]]))) for m in (start, end)]
    assert losses[1] < losses[0]
    assert cli("trace", str(trained), "--loops", "4", "--limit-loops", "6")[0] == 0
    assert cli("eval", str(trained), "--windows", "4")[0] == 0
    assert cli("export", str(trained), "--out", str(tmp_path / "out"))[0] == 0
    again, exported = twoscale.load(tmp_path / "out")
    assert exported.eot == tokenizer.eot
    assert torch.equal(twoscale.forward(again, [ids]).logits, twoscale.forward(end, [ids]).logits)


def test_looped_models_become_runs(tmp_path: Path, shards: Path, cli: CommandLine) -> None:
    """An export is taken as it is, on text of its own or on shards that are there; the text must have its tokenizer."""
    start_run(nano_run(steps=4), tmp_path / "run", shards)
    assert cli("export", str(tmp_path / "run"), "--out", str(tmp_path / "out"))[0] == 0
    outcome = cli("convert", str(tmp_path / "out"), "--out", str(tmp_path / "again"), "--data-dir", str(shards))
    assert outcome[0] == 0, outcome[2]
    first, second = (cli("eval", str(tmp_path / name), "--windows", "4") for name in ("run", "again"))
    assert first[0] == 0 and first[1].splitlines()[1:] == second[1].splitlines()[1:]
    other = tmp_path / "other"
    assert cli("prepare", "--source", "builtin", "--max-documents", "8", "--tokenizer", "bpe", "--bpe-vocab", "257", "--out", other)[0] == 0
    for command in (("convert", tmp_path / "out"), ("train", "--init", tmp_path / "out")):
        code, _, err = cli(*command, "--out", tmp_path / "wrong", "--data-dir", other)
        assert code == 2 and "another tokenizer" in err and not (tmp_path / "wrong" / "checkpoints").exists()
    code, _, err = cli("train", "--resume", tmp_path / "again")
    assert code == 2 and "--init" in err


def test_text_that_comes_with_a_model(tmp_path: Path, trained: Path) -> None:
    """A model that comes with held-out text of its kind is measured on it, unless another text is asked for."""
    folder = export(trained, tmp_path / "model", code=False)
    settings = json.loads((folder / "config.json").read_text())
    settings["training"]["text"] = "letters"
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "heldout").mkdir()
    letters = "".join(f"Dear friend {i}, the sea is calm and the ship is late. Yours, {i}\n<|endoftext|>\n" for i in range(400))
    (folder / "heldout" / "letters.txt").write_text(letters)
    own = convert(folder, tmp_path / "own")
    assert source_name(own / "data") == "letters.txt"
    about = json.loads((own / "source.json").read_text())
    assert (about["trained_on"], about["same_kind"]) == ("letters", True)
    other = convert(folder, tmp_path / "other", data=DataConfig(max_documents=40))
    about = json.loads((other / "source.json").read_text())
    assert source_name(other / "data") == "builtin" and about["same_kind"] is False


def test_whole_or_not_at_all(tmp_path: Path, cli: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes wrong on the way leaves nothing behind, so that the same command works once it is mended."""
    llama(tmp_path / "llama")
    with_tokenizer(tmp_path / "llama")
    words = ("convert", tmp_path / "llama", "--groups", "1", "--out", tmp_path / "runs" / "run")
    code, _, err = cli(*words, "--data.source", tmp_path / "nowhere.txt")
    assert code == 2 and "nowhere.txt" in err
    with monkeypatch.context() as patch:
        patch.setattr("twoscale.interop.convert.ckpt.save_checkpoint", lambda *a: (_ for _ in ()).throw(KeyboardInterrupt))
        assert cli(*words, "--data.max-documents", "8")[0] == 130
    assert not list((tmp_path / "runs").iterdir())
    assert cli(*words, "--data.max-documents", "8")[0] == 0
    (tmp_path / "file").write_text("")
    assert cli(*words[:-1], tmp_path / "file")[0] == 2


def test_killed_before_the_first_checkpoint(tmp_path: Path, shards: Path) -> None:
    """A run that starts from given weights has them on disk before its first step."""
    start_run(nano_run(steps=4), tmp_path / "run", shards)
    given = twoscale.load(tmp_path / "run")

    def kill(trainer: object) -> None:
        raise KeyboardInterrupt

    config = dataclasses.replace(nano_run(steps=4), train=dataclasses.replace(nano_run(steps=4).train, geometry_interval=1))
    with pytest.raises(KeyboardInterrupt):
        start_run(config, tmp_path / "next", shards, probes=[kill], init=given)
    assert torch.equal(twoscale.load(tmp_path / "next")[0].wte.weight, given[0].wte.weight)


def test_sentencepiece(tmp_path: Path) -> None:
    """A vocabulary with ▁ for spaces and bytes as <0x..>: sizes in bytes, and a space before the first new word is not lost."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "<0x0A>": 3, "▁the": 4, "▁man": 5, "é": 6, "▁caf": 7, "▁": 8}
    pipeline = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    d = tokenizers.decoders
    pipeline.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
    pipeline.add_special_tokens(["<s>", "</s>"])
    (tmp_path / "tokenizer.json").write_text(pipeline.to_str())
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eot == 2
    sizes = tokenizer.byte_lengths()
    assert [int(sizes[i]) for i in (1, 2, 3, 4, 6, 7)] == [0, 0, 1, 4, 2, 4]
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.add(t) for t in (4, 5, 7, 6)] == ["the", " man", " caf", "é"]
    for bad in (-1, 10**12, 99):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": bad}))
        with pytest.raises(UserError, match="endoftext"):
            Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    "settings,words,says",
    [
        ({}, (), "--groups 1-2"),
        ({}, ("--groups", "3-9"), "layers run from 0 to 3"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, ("--groups", "1"), "rope_type"),
        ({"attention_bias": True}, ("--groups", "1"), "attention_bias"),
        ({"hidden_act": "gelu"}, ("--groups", "1"), "hidden_act"),
    ],
)
def test_bad_folders(tmp_path: Path, cli: CommandLine, settings: dict[str, object], words: tuple[str, ...], says: str) -> None:
    """What cannot be exact is refused in one line, and nothing is left behind."""
    llama(tmp_path / "llama", **settings)
    with_tokenizer(tmp_path / "llama")
    result = cli("convert", str(tmp_path / "llama"), "--out", str(tmp_path / "run"), *words)
    assert result[0] == 2 and says in result[2] and result[2].count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 32])
def test_suggested_groups(layers: int) -> None:
    """The loop groups that `convert` suggests for a plain model are ones that it takes."""
    groups = suggested_groups(layers)
    assert ModelConfig(n_layer=layers, groups=parse_groups(groups)).groups


def test_bad_init(tmp_path: Path, cli: CommandLine) -> None:
    """A model without tokenizer, a folder in use, a shape that was changed, groups for a model that has them."""
    llama(tmp_path / "llama")
    missing = cli("convert", str(tmp_path / "llama"), "--groups", "1", "--out", str(tmp_path / "run"))
    assert missing[0] == 2 and "tokenizer.json" in missing[2]
    with_tokenizer(tmp_path / "llama")
    used = cli("convert", str(tmp_path / "llama"), "--groups", "1", "--out", str(tmp_path / "llama"))
    assert used[0] == 2 and "not empty" in used[2]
    wider = cli("train", "--init", str(tmp_path / "llama"), "--model.n-embd", "64", "--out", str(tmp_path / "t"))
    assert wider[0] == 2 and "shape" in wider[2]
    nowhere = cli("train", "--init", str(tmp_path / "nothing"))
    assert nowhere[0] == 2 and "no folder" in nowhere[2]
    plain, _ = twoscale.load(tmp_path / "llama")
    with pytest.raises(UserError, match="already"):
        looped(looped(plain, ((1,),), 2), ((2,),), 2)
