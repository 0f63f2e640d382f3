"""The examples that made the bundled model: rules by which stories are chosen, and distillation."""

import lzma
import math
import re
import struct
import sys
from argparse import Namespace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import story_bits
import story_distillation
import story_teacher
import torch
from story_corpus import sound
from story_distillation import Row, Teacher, TeacherTokenizer, classes, losses, reward
from story_selection import first_sentences, keeps_characters, misspelled

import twoscale
from twoscale import LoopedGPT, ModelConfig
from twoscale.data.tokenizer import byte_tokenizer
from twoscale.model import StateNoise

GOOD = """Once upon a time, there was a big dog named Johnny. Johnny saw a little girl named Daisy. Daisy was sad.
Johnny asked, "Why are you sad, Daisy?" Daisy said, "I lost my ball." Johnny wanted to help Daisy, so they looked everywhere.
The girl was happy. Daisy and Johnny played all day."""


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (("Daisy and Johnny played", "Daisy and her dog played"), True),
        (("Daisy and Johnny played", "Daisy and Daisy played"), False),  # doubled
        (("Daisy and Johnny played", "The dog and the dog played"), False),
        (("help Daisy, so", "help Johnny, so"), False),  # acts on himself
        (("Johnny asked", "Daisy asked"), False),  # speaks to herself
        (("The girl was happy", "The kind lady was happy"), False),  # never introduced
        (("Daisy and Johnny played", "Lucy played"), False),
        (("Daisy and Johnny played", "Their friend, Lucy, played"), True),
        (('my ball."', 'my ball, Lucy."'), False),  # nobody has that name
        (('my ball."', 'my ball. My name is Lucy."'), True),
        (("Daisy was sad", "Daisy had a big, old dog"), False),  # there is a dog already
        (("Daisy was sad", "Johnny was a big, old dog"), True),
        (('my ball."', 'my ball, Mom."'), False),  # there is no mother
        (("played all day", "played with a ball and a ball all day"), False),
        (("looked everywhere", "looked and looked"), True),
    ],
)
def test_characters(change: tuple[str, str], kept: bool) -> None:
    """A story is kept while nobody in it is doubled, acts on himself or appears as known without having been introduced."""
    assert keeps_characters(GOOD) and change[0] in GOOD
    assert keeps_characters(GOOD.replace(*change)) == kept


def test_sound() -> None:
    """A story ends like a sentence and says nothing of five words or more twice."""
    assert sound(GOOD) and not sound(GOOD[:-1]) and not sound(GOOD + " Daisy and Johnny played all day.")
    assert first_sentences([GOOD, GOOD, "No end"]) == ["Once upon a time, there was a big dog named Johnny."]


@pytest.mark.parametrize(
    ("story", "kept"),
    [
        ("Tom saw Zigzag. Zigzag's ball was red.", True),
        ("Tom saw Zigzag. Tom's ball was red.", False),
        ("Tom saw a zigzag and a zigzag.", False),
    ],
)
def test_misspelled(story: str, kept: bool) -> None:
    """Every word is a known one, except for names that occur twice."""
    found = misspelled(story, {"tom", "saw", "a", "and", "ball", "was", "red"})
    assert found == ([] if kept else [m.end() - 1 for m in re.finditer("zigzag", story, re.I)])


PIECES = [b"<unk>", b"<s>", b"</s>", b".", b"\n", b" ", b"a", b"b", b"c", b".", b" a", b" ab", b"bc"]
SCORES = [0.0] * 10 + [-2.0, -1.0, -3.0]


def test_teacher_tokens() -> None:
    """The pair with the highest score is merged first; a character is not taken for the byte of the same spelling; ends are in bytes."""
    tokenizer = TeacherTokenizer(PIECES, SCORES)
    tokens = tokenizer.encode(b"abc bc.\nbc")
    assert [PIECES[token] for token in tokens] == [b" ab", b"c", b" ", b"bc", b".", b"\n", b"bc"] and tokens[4] == 9
    assert tokenizer.ends(tokens) == [2, 3, 4, 6, 7, 8, 10]  # in the story itself, which has no space before it


def test_classes() -> None:
    """Tokens of two vocabularies are in one class if one is how the text of the other begins."""
    student, teacher = byte_tokenizer(), TeacherTokenizer(PIECES, SCORES)
    used = [0, 1, 2, 4, 6, 7, 9, 10, 11, 12]
    of_student, of_teacher = classes(student, teacher, used)
    found = dict(zip(used, of_teacher.tolist(), strict=True))
    assert found[10] == found[11] == of_student[ord(" ")] and found[7] == found[12] == of_student[ord("b")]
    assert found[9] == of_student[ord(".")] and len({found[10], found[7], found[6], found[9], found[4]}) == 5
    assert len({found[0], found[1], found[2], *of_student.tolist()}) == 257 + 3  # bytes keep their classes, special tokens have their own


def settings(**changed: float) -> Namespace:
    """Settings of the loss: plain divergence at a temperature of 0.8, except for what is named."""
    return Namespace(**{"temperature": 0.8, "character_weight": 0.0, "end_bias": 0.0, "end_after": 0, "fault_weight": 0.0} | changed)


def test_end_bias() -> None:
    """The bias is added to the log-odds of the end of a line or the story; what is wanted stays a distribution."""
    teacher = Teacher.__new__(Teacher)
    teacher.student_classes, teacher.student = torch.arange(257), byte_tokenizer()
    reference = torch.randn(3, 257, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    log_p = torch.zeros(3, 257).index_fill(1, torch.tensor([10, 256]), -torch.inf).log_softmax(-1)
    plain, more = teacher.share(log_p, reference), teacher.share(log_p, reference, torch.tensor([0.0, 1.5, 1.5]))
    assert torch.allclose(plain.exp().sum(1), torch.ones(3), atol=1e-4) and torch.allclose(more.exp().sum(1), torch.ones(3), atol=1e-4)
    log_odds = [wanted[:, [10, 256]].exp().sum(1).logit() for wanted in (plain, more)]
    assert torch.allclose(log_odds[1] - log_odds[0], torch.tensor([0.0, 1.5, 1.5]), atol=1e-4)
    log_p[1] = torch.nan  # inside a token of the teacher
    assert torch.equal(teacher.share(log_p, reference)[1], reference[1]) and torch.equal(teacher.share(log_p, reference)[2], plain[2])


def test_divergence() -> None:
    """It is zero if the teacher says what the student says, whatever the classes; positive otherwise; and only the positions count."""
    config = ModelConfig(vocab_size=257, block_size=32, n_layer=3, n_head=2, n_embd=16, groups=((1,),), mean_loops=2)
    model, noise, temperature = LoopedGPT(config, seed=1), StateNoise(0, 0, (0, 1)), 0.8
    of_classes = torch.arange(257) // 2
    of_classes[[10, 256]] = torch.tensor([129, 130])  # the ends of lines and stories alone
    teacher = Teacher.__new__(Teacher)  # without a model of its own
    teacher.student_classes, teacher.student = of_classes, byte_tokenizer()
    rows = [Row(list(range(40, 60)), [3, 7, 8, 19]), Row(list(range(80, 90)), [5])]
    for row in rows:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            hidden, _ = model.hidden(torch.tensor([row.tokens]), loops=(2,), noise=StateNoise(0, 0, (rows.index(row),)))
        logits = model.head(hidden[0, torch.tensor(row.positions) - 1].float()).detach() / temperature
        p = logits.index_fill(1, torch.tensor([10, 256]), -torch.inf).softmax(-1)
        row.wanted = torch.zeros(len(p), 131).index_add(1, of_classes, p).log().clamp(min=-12)
    found = [losses(m, model, rows, teacher, (2,), noise, settings()) for m in (model, LoopedGPT(config, seed=2))]
    assert abs(found[0][0].item()) < 1e-3 < 0.1 < found[1][0].item() and found[0][1] == 0
    story = Row(list(range(40, 60)), [])
    _, cross_entropy, _ = losses(model, model, [story], teacher, (2,), StateNoise(0, 0, (0,)), settings())
    assert cross_entropy.item() == pytest.approx(19 * torch.tensor(257.0).log().item(), rel=0.1)  # fresh weights know nothing
    other = LoopedGPT(config, seed=2)
    plain, weighed = (
        losses(other, model, rows[:1], teacher, (2,), StateNoise(0, 0, (0,)), settings(character_weight=w))[0].item() for w in (0.0, 9.0)
    )
    assert weighed > 0 and weighed != plain, "positions have weights of their own"
    rows[0].faults = frozenset({7})
    hidden, _ = other.hidden(torch.tensor([rows[0].tokens]), loops=(2,), noise=StateNoise(0, 0, (0,)))
    before = other.head(hidden)[0, 6].log_softmax(-1)[rows[0].tokens[7]].item()
    losses(other, model, rows[:1], teacher, (2,), StateNoise(0, 0, (0,)), settings(fault_weight=9.0))[0].backward()
    with torch.no_grad():
        for p in other.parameters():
            p -= 0.001 * p.grad if p.grad is not None else 0.0
    hidden, _ = other.hidden(torch.tensor([rows[0].tokens]), loops=(2,), noise=StateNoise(0, 0, (0,)))
    assert other.head(hidden)[0, 6].log_softmax(-1)[rows[0].tokens[7]].item() < before, "a mistake becomes less likely"


def test_reward() -> None:
    """A step along the gradient of the reward makes a kept story likelier and a refused one less likely; equal rewards change nothing."""
    config = ModelConfig(vocab_size=257, block_size=32, n_layer=3, n_head=2, n_embd=16, groups=((1,),), mean_loops=2)
    teacher = Teacher.__new__(Teacher)
    teacher.student_classes, teacher.student = torch.arange(257), byte_tokenizer()

    def likelihoods(model: LoopedGPT) -> list[float]:
        found = []
        for tokens in ([1, 2, 3, 4, 5], [9, 8, 7, 6, 5]):
            with torch.no_grad():
                hidden, _ = model.hidden(torch.tensor([tokens]), loops=(2,), noise=StateNoise(0, 0, (0,)))
                log_p = model.head(hidden).log_softmax(-1)[0]
            found.append(sum(log_p[i - 1, tokens[i]].item() for i in (2, 3, 4)))
        return found

    for kept in ([True, False], [True, True]):
        model, rows = LoopedGPT(config, seed=1), [Row([1, 2, 3, 4, 5], [], prompt=2), Row([9, 8, 7, 6, 5], [], prompt=2)]
        for row in rows:
            row.wanted = torch.zeros(0, 257)
        reward(rows, kept)
        assert sum(row.advantage for row in rows) == 0
        before = likelihoods(model)
        *_, regret = losses(model, model, rows, teacher, (2,), StateNoise(0, 0, (0, 1)), settings(temperature=1.0))
        if kept[1]:
            assert not regret.requires_grad and regret == 0
            continue
        regret.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad if p.grad is not None else 0.0
        good, bad = (after - was for after, was in zip(likelihoods(model), before, strict=True))
        assert good > 0 > bad


def llama2_file(pieces: list[bytes]) -> bytes:
    """A model with random weights in llama2.c's format, and its tokenizer: the longer a piece, the higher its score."""
    dim, hidden, layers, heads, context = 16, 32, 1, 2, 64
    sizes = [
        len(pieces) * dim,
        layers * dim,
        *[layers * dim * dim] * 4,
        layers * dim,
        *[layers * dim * hidden] * 3,
        dim,
        context * dim // heads,
    ]
    weights = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(0)) / 4
    header = story_teacher.HEADER.pack(dim, hidden, layers, heads, heads, len(pieces), context)
    tokens = b"".join(struct.pack("<fi", float(len(piece)), len(piece)) + piece for piece in pieces)
    return header + weights.numpy().tobytes() + struct.pack("<i", max(map(len, pieces))) + tokens


def test_distillation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """From the teacher's file to a folder with other weights that loads, with a teacher that knows letters and a few words."""
    words = [b" upon", b" a", b" time", b" dog", b" was", b" the"]
    pieces = [b"<unk>", b"<s>", b"</s>", *(bytes([b]) for b in range(256)), *(word[:n] for word in words for n in range(2, len(word) + 1))]
    (tmp_path / "model.bin").write_bytes(llama2_file(list(dict.fromkeys(pieces))))
    (tmp_path / "stories").mkdir()
    text = "".join(story + "\n<|endoftext|>\n" for story in (GOOD, "Once upon a time, there was a dog. The dog was big."))
    (tmp_path / "stories" / "stories-0.txt").write_text(text)
    source, teacher, stories, out = (str(tmp_path / name) for name in ("model.bin", "teacher", "stories", "out"))
    monkeypatch.setattr(sys, "argv", ["story_teacher", source, teacher])
    story_teacher.main()
    small = ["--steps", "1", "--rows", "2", "--teacher-rows", "1", "--micro", "2", "--max-tokens", "40", "--loops", "2", "--warmup", "1"]
    small += ["--reward", "1", "--character-weight", "1", "--end-bias", "1", "--fault-weight", "2"]
    monkeypatch.setattr(sys, "argv", ["story_distillation", source, teacher, stories, out, *small])
    story_distillation.main()
    assert "1/1: divergence" in capsys.readouterr().out
    (model, tokenizer), (bundled, _) = twoscale.load(f"{out}/step-0001"), twoscale.load("bundled")
    assert tokenizer is not None and model.config == bundled.config
    pairs = list(zip(model.parameters(), bundled.parameters(), strict=True))
    assert all(torch.isfinite(a).all() for a, _ in pairs) and any(not torch.equal(a, b) for a, b in pairs)
    story = "Once upon a time, there was a dog."
    (tmp_path / "one.xz").write_bytes(lzma.compress(f"{story}\n<|endoftext|>\n".encode()))
    monkeypatch.setattr(sys, "argv", ["story_bits", source, teacher, "--stories", str(tmp_path / "one.xz")])
    story_bits.main()
    found = re.fullmatch(r"1 stories, 34 bytes: student ([\d.]+) bits per byte, teacher ([\d.]+)\n", capsys.readouterr().out)
    assert found is not None
    tokens = [tokenizer.eot, *tokenizer.encode(story)]
    logits = [twoscale.forward(bundled, [tokens[:i]]).logits[0, -1] for i in range(1, len(tokens))]
    nats = -sum(row.log_softmax(-1)[token].item() for row, token in zip(logits, tokens[1:], strict=True))
    assert float(found[1]) == pytest.approx(nats / math.log(2) / 34, abs=1e-4) and 2 < float(found[2]) < 12
