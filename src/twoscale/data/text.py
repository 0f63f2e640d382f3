"""Text where token ids are asked for: a caller that has a tokenizer may hand over strings."""

from collections.abc import Sequence

from torch import Tensor

from twoscale.config import UserError
from twoscale.data.tokenizer import Tokenizer

Tokens = Tensor | Sequence[Sequence[int]] | str | Sequence[str]
"""ids (B, T), a ragged list of lists, one text, or a list of texts."""


def as_token_ids(prompts: Tokens, tokenizer: Tokenizer | None) -> Tensor | Sequence[Sequence[int]]:
    """Texts become a list of lists of ids, one for each text; ids are returned as they are."""
    if isinstance(prompts, Tensor):
        return prompts
    texts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(texts, Sequence) or not any(isinstance(text, str) for text in texts):
        return texts  # type: ignore[return-value]
    if not all(isinstance(text, str) for text in texts):
        raise UserError("texts and token ids are mixed: give one or the other")
    if tokenizer is None:
        raise UserError("text needs a tokenizer: give the one that twoscale.load returned, tokenizer=...")
    for i, text in enumerate(texts):
        if not text:
            raise UserError(f"text {i} is empty: give at least one character")
    return [tokenizer.encode(str(text)) for text in texts]
