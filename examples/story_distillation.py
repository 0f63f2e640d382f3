"""On-policy distillation: a student tells stories, and a teacher with another tokenizer says how it would go on at every word of them.

    python examples/story_teacher.py package/src/llama2.data teacher/           # with all its tokens
    python examples/story_distillation.py package/src/llama2.data teacher/ named/ distilled/ --student bundled --steps 300

`named/` is a folder of stories (story_names.py); their first sentences are the prompts. The teacher's stories show a student what is right,
but not what to do after a mistake of its own, nor how bad the mistake was: it still writes "Leo and Leo". Here the student writes, and at
each position of its text the loss is the divergence of its next token from what the teacher wants,

    KL(student || wanted) = sum_t p_student(t) (log p_student(t) - log p_teacher(class of t) - log p_reference(t | class of t))

The tokenizers differ. The teacher is asked where a token of both ends, and a reference elsewhere. Tokens have classes: one of the student
and one of the teacher are in the same class if one is how the text of the other begins (" Jill" is " J", "ill" for the teacher). How likely
each token of a class is, and how likely a line or the story ends, is taken from the reference too. By default it is the student as it was:
it has learned short stories and the teacher has not. Some rows are windows of the teacher's stories with the plain cross-entropy. What is
written is a folder that `twoscale.load` reads.

What such a student gets wrong is who is who. --character-weight weighs positions by how likely a character is named there. With
--fault-weight the words at which the rules of story_selection.py find a mistake are not wanted, whatever the teacher says. --reward adds
the policy gradient of a reward, which is 1 for a story that ends and passes these rules, and else 0:

    -sum_i A_i sum_t log p_student(t),  A_i the reward of story i less the mean reward of the step

The teacher's plots are longer than what a small model keeps in mind. --end-bias makes ends of lines and stories likelier.
"""

import argparse
import random
import re
import shutil
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from story_corpus import repeated, sound
from story_names import BOYS, GIRLS, SEPARATOR
from story_selection import BEINGS, faults, first_sentences, misspelled, words_of
from story_teacher import SPECIAL, read_model, read_pieces
from torch import Tensor
from torch.optim import Optimizer

import twoscale
from twoscale import presets
from twoscale.data import Tokenizer
from twoscale.interop import find
from twoscale.model import StateNoise
from twoscale.train.optim import build_optimizers

BEGIN = 1
UNKNOWN = 0
FLOOR = -12.0
"""The least log-probability of a class by the teacher."""


class TeacherTokenizer:
    """llama2.c's tokenizer: the neighbours with the highest score are merged until none are a piece. Spaces are at the beginning of a piece
    alone, so words are encoded one by one."""

    def __init__(self, pieces: list[bytes], scores: list[float]) -> None:
        self.pieces, self.scores = pieces, scores
        self.ids = {piece: i for i, piece in enumerate(pieces)}  # the 256 bytes come first, so a character is not taken for a byte
        self.encode_word = lru_cache(maxsize=1 << 16)(self._encode_word)

    @classmethod
    def read(cls, source: bytes) -> "TeacherTokenizer":
        """The tokenizer behind the model in a file of llama2.c's format."""
        config, _, place = read_model(source)
        return cls(*read_pieces(source, place, int(str(config["vocab_size"]))))

    def _encode_word(self, word: bytes) -> list[int]:
        parts = [word[i : i + 1] for i in range(len(word))]
        while True:
            pairs = [(self.scores[i], -n) for n in range(len(parts) - 1) if (i := self.ids.get(parts[n] + parts[n + 1])) is not None]
            if not pairs:
                return [self.ids.get(part, UNKNOWN) for part in parts]
            n = -max(pairs)[1]
            parts[n : n + 2] = [parts[n] + parts[n + 1]]

    def encode(self, text: bytes) -> list[int]:
        """The tokens of a story: as if a space stood before it."""
        return [token for word in re.findall(rb" ?[^ ]+| ", b" " + text) for token in self.encode_word(word)]

    def ends(self, tokens: list[int]) -> list[int]:
        """Where each token ends in the story, in bytes."""
        place, found = -1, []
        for token in tokens:
            place += len(self.pieces[token]) if token != UNKNOWN else 1
            found.append(place)
        return found


def classes(student: Tokenizer, teacher: TeacherTokenizer, used: list[int]) -> tuple[Tensor, Tensor]:
    """The class of each token of the student (V,), and of those of the teacher that are used (K,)."""
    parent: dict[tuple[str, int], tuple[str, int]] = {}

    def root(x: tuple[str, int]) -> tuple[str, int]:
        parent.setdefault(x, x)
        while parent[x] != x:
            x = parent[x] = parent[parent[x]]
        return x

    for token in used:
        text = teacher.pieces[token].decode("utf-8", "replace")
        if token not in SPECIAL and text and "\N{REPLACEMENT CHARACTER}" not in text:
            parent[root(("teacher", token))] = root(("student", student.encode(text)[0]))
    known = set(used)
    for token in range(student.vocab_size):
        text = student.decode([token])
        first = UNKNOWN if token == student.eot or "\N{REPLACEMENT CHARACTER}" in text else teacher.encode_word(text.encode())[0]
        if first != UNKNOWN and first in known:
            parent[root(("student", token))] = root(("teacher", first))
    number: dict[tuple[str, int], int] = {}
    of_student = [number.setdefault(root(("student", token)), len(number)) for token in range(student.vocab_size)]
    of_teacher = [number.setdefault(root(("teacher", token)), len(number)) for token in used]
    return torch.tensor(of_student), torch.tensor(of_teacher)


@dataclass
class Row:
    """One story in tokens of the student."""

    tokens: list[int]
    positions: list[int]
    """Tokens that the student wrote; none in a story of the teacher."""
    wanted: Tensor | None = None
    """Log-probabilities of the classes by the teacher at these positions, if no line ends there; NaN inside a token of the teacher."""
    faults: frozenset[int] = frozenset()
    """Tokens of the student that make a mistake by the rules."""
    prompt: int = 0
    """Tokens of the prompt, which the student did not write."""
    advantage: float = 0.0
    """The story's reward less the mean of its step."""


class Teacher:
    """Log-probabilities of classes of the student's tokens."""

    def __init__(
        self, folder: Path, source: Path, student: Tokenizer, stories: list[str], temperature: float, texts: Iterable[str] = ()
    ) -> None:
        """`texts` have words that are known beside those of the stories."""
        self.model, _ = twoscale.load(folder)
        self.words = {word.lower() for text in (*stories, *texts) for word in words_of(text)}
        self.tokenizer, self.student, self.temperature = TeacherTokenizer.read(source.read_bytes()), student, temperature
        count = Counter(token for story in stories for token in self.tokenizer.encode(story.encode()))
        line_end = self.tokenizer.ids[b"\n"]
        used = sorted({*SPECIAL, line_end, *(token for token, n in count.items() if n > 1)})
        self.number = {token: i for i, token in enumerate(used)}
        self.student_classes, self.teacher_classes = classes(student, self.tokenizer, used)
        self.n_classes = int(max(self.student_classes.max(), self.teacher_classes.max())) + 1
        self.ends = torch.tensor([self.number[token] for token in (*SPECIAL, line_end)])
        self.model.wte.weight = torch.nn.Parameter(self.model.wte.weight[used], requires_grad=False)  # what is not used is never drawn
        self.lengths = student.byte_lengths()

    @torch.no_grad()
    def judge(self, stories: list[tuple[list[int], int, str]]) -> list[Row]:
        """Rows from stories: tokens of the student, how many of them are the prompt, and the text."""
        context = self.model.config.block_size
        rows = []
        for tokens, prompt, text in stories:
            theirs = self.tokenizer.encode(text.encode())[: context - 1]
            at = {end: i for i, end in enumerate(self.tokenizer.ends(theirs), start=1)}
            ends = self.lengths[tokens].cumsum().tolist()
            positions = range(prompt, len(tokens))
            judged = [i for i in positions if ends[i - 1] in at]
            ids = torch.tensor([[BEGIN, *(self.number.get(token, UNKNOWN) for token in theirs)]])
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden, _ = self.model.hidden(ids)
                hidden = hidden[0, [at[ends[i - 1]] for i in judged]]
                logits = self.model.head(hidden).float() / self.temperature
            logits[:, self.ends] = -torch.inf
            p = torch.zeros(len(judged), self.n_classes).index_add_(1, self.teacher_classes, logits.softmax(-1))
            wanted = torch.full((len(positions), self.n_classes), torch.nan)
            wanted[[i - prompt for i in judged]] = p.log().clamp_(min=FLOOR)
            mistakes = {bisect_right(ends, offset) for offset in self.mistakes(text)} & set(positions) if text.isascii() else set()
            rows.append(Row(tokens, list(positions), wanted, frozenset(mistakes), prompt))
        return rows

    def mistakes(self, story: str) -> list[int]:
        """Offsets of all that the rules of story_selection.py find."""
        return [*faults(story), *repeated(story), *misspelled(story, self.words)]

    def share(self, log_p: Tensor, reference: Tensor, end_bias: Tensor | None = None) -> Tensor:
        """Wanted log-probabilities (N, V) of the student's tokens, from those of classes (N, C) and of a reference (N, V): the share of a
        token in its class, how likely a line or the story ends, and all where the teacher is silent (NaN) are the reference's. `end_bias`
        (N,) is added to its log-odds of the end of a line or the story."""
        if end_bias is not None:
            reference = reference.clone()
            reference[:, self.line_ends] += end_bias[:, None]
            reference = reference.log_softmax(-1)
        of_class = torch.zeros(log_p.shape).index_add_(1, self.student_classes, reference.exp()).clamp_(min=1e-12).log_()
        ends = torch.tensor(self.line_ends)
        going_on = (1 - reference[:, ends].exp().sum(1, keepdim=True)).clamp_(min=1e-6).log_()
        wanted = log_p[:, self.student_classes] + going_on + reference - of_class[:, self.student_classes]
        wanted[:, ends] = reference[:, ends]
        return torch.where(wanted.isnan(), reference, wanted).clamp_(min=2 * FLOOR)

    @property
    def characters(self) -> Tensor:
        """Classes (N,) whose tokens begin the name of a child or the word for a being."""
        words = (*GIRLS, *BOYS, *BEINGS.split("|"))
        return self.student_classes[[self.student.encode(f" {word}")[0] for word in words]].unique()

    @property
    def line_ends(self) -> list[int]:
        """The student's tokens that end a line or a story."""
        return [*self.student.encode("\n"), self.student.eot]


def own_stories(
    model: twoscale.LoopedGPT, tokenizer: Tokenizer, prompts: list[str], seed: int, args: argparse.Namespace
) -> list[tuple[list[int], int, str]]:
    """Stories that the student tells now."""
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    room = min(args.max_tokens, model.config.block_size) - max(map(len, encoded))
    gen = twoscale.generate(model, encoded, room, temperature=args.temperature, seed=seed, loops=args.loops, stop=(tokenizer.eot,))
    stories = []
    for prompt, tokens in zip(encoded, gen.tokens, strict=True):
        text = tokenizer.decode([token for token in prompt + tokens if token != tokenizer.eot])
        stories.append((prompt + tokens, len(prompt), text))
    return stories


def window(stories: list[str], tokenizer: Tokenizer, draw: random.Random, size: int) -> list[int]:
    """So many tokens of stories one after another, from a random place in the first of them."""
    tokens: list[int] = []
    skipped = None
    while skipped is None or len(tokens) < skipped + size:
        tokens += [*tokenizer.encode(draw.choice(stories) + "\n"), tokenizer.eot]
        skipped = draw.randrange(len(tokens)) if skipped is None else skipped
    return tokens[skipped : skipped + size]


def losses(
    model: twoscale.LoopedGPT,
    reference: twoscale.LoopedGPT,
    rows: list[Row],
    teacher: Teacher,
    loops: tuple[int, ...],
    noise: StateNoise,
    args: argparse.Namespace,
) -> tuple[Tensor, Tensor, Tensor]:
    """The divergence on the student's stories, the cross-entropy on the teacher's, each summed over positions, and the loss whose gradient
    is the reward's: minus the log-probability of what the student wrote, times its advantage."""
    length = max(len(row.tokens) for row in rows)
    ids = torch.tensor([row.tokens + [0] * (length - len(row.tokens)) for row in rows])

    def states(student: twoscale.LoopedGPT) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x, _ = student.hidden(ids[:, :-1], loops=loops, noise=noise, backprop_steps=student.config.backprop_steps)
        return x.float()

    hidden = states(model)
    divergence, cross_entropy, regret = torch.zeros(()), torch.zeros(()), torch.zeros(())
    own = [(i, torch.tensor(row.positions) - 1, row.wanted) for i, row in enumerate(rows) if row.wanted is not None and row.positions]
    if own:
        with torch.no_grad():
            x = states(reference)
            logits = reference.head(torch.cat([x[i, positions] for i, positions, _ in own])) / args.temperature
            classes_wanted = torch.cat([log_p for *_, log_p in own])
            bias = args.end_bias * (torch.cat([positions for _, positions, _ in own]) >= args.end_after)
            wanted = teacher.share(classes_wanted, logits.log_softmax(-1), bias)
            weight = 1 + args.character_weight * classes_wanted[:, teacher.characters].exp().sum(1).nan_to_num(0.0)
            if args.fault_weight:
                written = torch.cat([ids[i, positions + 1] for i, positions, _ in own])
                faulty = torch.tensor([position in rows[i].faults for i, *_ in own for position in rows[i].positions])
                wanted[faulty, written[faulty]] = 2 * FLOOR
                wanted = wanted.log_softmax(-1)
                weight = torch.where(faulty, args.fault_weight, weight)
        log_p = (model.head(torch.cat([hidden[i, positions] for i, positions, _ in own])) / args.temperature).log_softmax(-1)
        divergence = weight / weight.mean() @ (log_p.exp() * (log_p - wanted)).sum(1)
    for i, row in enumerate(rows):
        if row.advantage:
            logits = model.head(hidden[i, row.prompt - 1 : len(row.tokens) - 1]) / args.temperature
            regret = regret + row.advantage * F.cross_entropy(logits, ids[i, row.prompt : len(row.tokens)], reduction="sum")
        if row.wanted is None:
            logits = model.head(hidden[i, : len(row.tokens) - 1])
            cross_entropy = cross_entropy + F.cross_entropy(logits, ids[i, 1 : len(row.tokens)], reduction="sum")
    return divergence, cross_entropy, regret


def reward(rows: list[Row], kept: list[bool]) -> None:
    """Set the advantage of each of the student's stories."""
    mean = sum(kept) / len(kept)
    for row, good in zip(rows, kept, strict=True):
        row.advantage = good - mean


def update(
    model: twoscale.LoopedGPT,
    reference: twoscale.LoopedGPT,
    optimizers: dict[str, Optimizer],
    rows: list[Row],
    teacher: Teacher,
    step: int,
    args: argparse.Namespace,
) -> tuple[list[float], float]:
    """One step on rows of both kinds: mean divergence and cross-entropy, and the norm of the gradient."""
    n_positions, n_tokens = sum(len(row.positions) for row in rows), sum(len(row.tokens) - 1 for row in rows if row.wanted is None)
    share = args.teacher_rows / (args.rows + args.teacher_rows)
    draw = random.Random(f"loops {args.seed} {step}")
    loops = tuple(draw.randint(max(1, args.loops - 2), args.loops + 2) for _ in model.groups)
    totals = torch.zeros(2)
    model.train()
    for optimizer in optimizers.values():
        optimizer.zero_grad(set_to_none=True)
    ordered = sorted(rows, key=lambda row: len(row.tokens))  # rows of similar length together
    for first in range(0, len(rows), args.micro):
        part = ordered[first : first + args.micro]
        noise = StateNoise(args.seed, step, tuple(range(first, first + len(part))))
        divergence, cross_entropy, regret = losses(model, reference, part, teacher, loops, noise, args)
        means = torch.stack((divergence / max(1, n_positions), cross_entropy / max(1, n_tokens)))
        (means @ torch.tensor([1 - share, share]) + (1 - share) * args.reward * regret / max(1, n_positions)).backward()
        totals += means.detach()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    scale = min(1.0, (step + 1) / args.warmup) * max(0.05, 1 - step / args.steps)
    for name, optimizer in optimizers.items():
        for group in optimizer.param_groups:
            group["lr"] = scale * {"adamw": args.lr, "muon": args.muon_lr}[name]
        optimizer.step()
    model.eval()
    return totals.tolist(), norm


def write(model: twoscale.LoopedGPT, student: Path, out: Path) -> None:
    """The student's folder with these weights."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        if (student / name).exists():
            shutil.copy(student / name, out / name)
    kinds = {name: w.dtype for name, w in load_file(student / "model.safetensors").items()}
    weights = {f"model.{name}": p.detach().to(kinds[f"model.{name}"]).contiguous() for name, p in model.named_parameters()}
    assert weights.keys() == kinds.keys()
    save_file(weights, out / "model.part", metadata={"format": "pt"})
    (out / "model.part").rename(out / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the file in llama2.c's format: its tokenizer has the scores of the merges")
    parser.add_argument("teacher", type=Path)
    parser.add_argument("stories", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--student", default="bundled")
    parser.add_argument("--reference", default=None, help="by default the student")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rows", type=int, default=64, help="the student's stories of a step")
    parser.add_argument("--teacher-rows", type=int, default=16)
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=0.8, help="of the student")
    parser.add_argument("--teacher-temperature", type=float, default=0.6)
    parser.add_argument(
        "--character-weight", type=float, default=0.0, help="weight of a position at which the teacher names a character, less 1"
    )
    parser.add_argument("--end-bias", type=float, default=0.0, help="what is added to the log-odds of the end of a line or the story")
    parser.add_argument("--end-after", type=int, default=80, help="tokens of a story after which --end-bias counts")
    parser.add_argument(
        "--fault-weight", type=float, default=0.0, help="weight of a position with a mistake by the rules, whose token is then not wanted"
    )
    parser.add_argument("--reward", type=float, default=0.0, help="weight of the reward beside the divergence")
    parser.add_argument("--words", type=Path, nargs="*", default=(), help="texts whose words are known too, beside those of the stories")
    parser.add_argument("--max-tokens", type=int, default=220, help="of a story, with its prompt")
    parser.add_argument("--loops", type=int, default=6, help="while the student writes, and about as many in training")
    parser.add_argument("--lr", type=float, default=0.0008)
    parser.add_argument("--muon-lr", type=float, default=0.005)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=25, help="steps between two saved states")
    args = parser.parse_args()
    student = find(args.student)
    (model, tokenizer), (reference, _) = twoscale.load(student), twoscale.load(args.reference or student)
    assert tokenizer is not None
    stories = [story for file in sorted(args.stories.glob("*.txt")) for story in file.read_text().split(SEPARATOR)[:-1]]
    prompts = first_sentences(stories)
    texts = (file.read_text() for file in args.words)
    teacher = Teacher(args.teacher, args.source, tokenizer, stories, args.teacher_temperature, texts)
    print(f"{len(prompts):,} prompts, {len(teacher.number):,} tokens of the teacher, {teacher.n_classes:,} classes", flush=True)
    optimizers = build_optimizers(model, replace(presets.stories().train, weight_decay=0.0))
    for step in range(args.steps):
        started = time.perf_counter()
        draw = random.Random(f"{args.seed} {step}")
        told = own_stories(model, tokenizer, draw.sample(prompts, args.rows), args.seed * 1_000_000 + step, args)
        windows = [window(stories, tokenizer, draw, model.config.block_size + 1) for _ in range(args.teacher_rows)]
        kept = [tokens[-1] == tokenizer.eot and sound(text.rstrip("\n")) and not teacher.mistakes(text) for tokens, _, text in told]
        rows = teacher.judge(told)
        if args.reward:
            reward(rows, kept)
        rows += [Row(tokens, []) for tokens in windows]
        (divergence, cross_entropy), norm = update(model, reference, optimizers, rows, teacher, step, args)
        print(
            f"{step + 1}/{args.steps}: divergence {divergence:.4f}, cross-entropy {cross_entropy:.3f}, "
            f"keep characters {sum(kept)}/{args.rows}, {sum(len(tokens) for tokens, *_ in told) / args.rows:.0f} tokens a story, "
            f"gradient {norm:.2f}, {time.perf_counter() - started:.1f} s",
            flush=True,
        )
        if (step + 1) % args.every == 0 or step + 1 == args.steps:
            write(model, student, args.out / f"step-{step + 1:04}")


if __name__ == "__main__":
    main()
