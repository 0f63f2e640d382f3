"""Documents to token arrays in bounded memory.

`tokenizers` needs some 200 bytes of memory for a byte of text. A long document is therefore encoded in pieces that are cut where
GPT-2's pre-tokenizer splits in any case: between a character that is no white space and a space or line break. No pattern of it
matches across such a place or looks across it, so the pieces' tokens are the document's.
"""

import json
import re
from collections.abc import Iterator, Sequence

import numpy as np

from twoscale.config import UserError
from twoscale.data.tokenizer import Tokenizer, byte_tokenizer

PIECE = 1 << 18  # characters
LONGEST_WORD = 2_000_000  # characters without a place to cut; a BPE of them takes 400 MB
BATCH = 1_000_000  # characters that are encoded at once

_CUT = re.compile(r"\S(?=[ \n])")


def pieces(text: str, size: int = PIECE, longest: int = LONGEST_WORD) -> Iterator[str]:
    """The text in pieces of about `size` characters whose pre-tokens are the text's; UserError where it cannot be cut for too long."""
    start = 0
    while len(text) - start > size:
        found = _CUT.search(text, start + size - 1, start + size + longest)
        if found is None:
            if len(text) - start <= size + longest:
                break
            raise UserError(
                f"a document has more than {longest:,} characters in a row without a space or line break: "
                "break it into lines, or use --tokenizer bytes"
            )
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


def splits_at_spaces(tokenizer: Tokenizer) -> bool:
    """Whether the tokens of a text are those of its `pieces`: GPT-2's pre-tokenizer, and nothing before or after it."""
    p = tokenizer.pipeline
    split, after = (json.loads(part.__getstate__()) if part is not None else None for part in (p.pre_tokenizer, p.post_processor))
    return (
        p.normalizer is None
        and isinstance(split, dict)
        and (split.get("type"), split.get("add_prefix_space"), split.get("use_regex")) == ("ByteLevel", False, True)
        and (after is None or after.get("type") == "ByteLevel")
        and all(token.special for token in p.get_added_tokens_decoder().values())
    )


class DocumentEncoder:
    """Encodes documents, each with the end of text behind it."""

    def __init__(self, tokenizer: Tokenizer, dtype: str, piece: int = PIECE) -> None:
        self.tokenizer, self.dtype, self.piece = tokenizer, dtype, piece
        self.bytes = tokenizer.fingerprint == byte_tokenizer().fingerprint
        self.splits = splits_at_spaces(tokenizer)

    def __call__(self, texts: Sequence[str]) -> list[np.ndarray]:
        if self.bytes:
            return [self._bytes(text) for text in texts]
        long = [self.splits and len(text) > self.piece for text in texts]
        short = iter(self._encode([text for text, is_long in zip(texts, long, strict=True) if not is_long]))
        return [self._long(text) if is_long else self._ended([next(short)]) for text, is_long in zip(texts, long, strict=True)]

    def _bytes(self, text: str) -> np.ndarray:
        raw = np.frombuffer(text.encode(), dtype=np.uint8)
        ids = np.empty(len(raw) + 1, dtype=self.dtype)
        ids[:-1], ids[-1] = raw, self.tokenizer.eot
        return ids

    def _long(self, text: str) -> np.ndarray:
        parts: list[np.ndarray] = []
        batch: list[str] = []
        for piece in pieces(text, self.piece):
            batch.append(piece)
            if sum(map(len, batch)) >= BATCH:
                parts += self._encode(batch)
                batch = []
        return self._ended(parts + self._encode(batch))

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array(ids, dtype=self.dtype) for ids in self.tokenizer.encode_batch(texts)]

    def _ended(self, parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([*parts, np.array([self.tokenizer.eot], dtype=self.dtype)])
