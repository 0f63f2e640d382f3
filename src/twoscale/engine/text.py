"""Tokens become text as they come: whole characters only, cut where a stop string begins."""

from collections.abc import Sequence

from twoscale.data import Pieces, Tokenizer


class TextStream:
    """The text of one answer, token by token."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = (), hidden: frozenset[int] = frozenset()) -> None:
        """`prompt` are the tokens before the answer; tokens of `hidden` (stop tokens) have no text."""
        self.pieces, self.stop, self.hidden = Pieces(tokenizer, prompt), stop, hidden
        self.text = ""
        """All that may be shown so far."""
        self.pending = ""
        """What might be the beginning of a stop string."""
        self.offsets: list[int] = []
        """Where the text of each token begins; tokens after a stop string are not counted."""
        self.stopped = False
        """Whether a stop string has ended the text."""

    def add(self, token: int) -> str:
        """The text that a token adds."""
        if self.stopped:
            return ""
        before = len(self.text)
        self.offsets.append(before + len(self.pending))
        if token not in self.hidden:
            self._add(self.pieces.add(token))
        return self.text[before:]

    def finish(self) -> str:
        """The text that was held back, now that no more tokens come."""
        before = len(self.text)
        if not self.stopped:
            self._add(self.pieces.rest())
        if not self.stopped:
            self.text, self.pending = self.text + self.pending, ""
        return self.text[before:]

    def _add(self, piece: str) -> None:
        text = self.pending + piece
        found = [at for word in self.stop if (at := text.find(word)) >= 0]
        if found:
            self.text, self.pending, self.stopped = self.text + text[: min(found)], "", True
            return
        keep = max((n for word in self.stop for n in range(1, len(word)) if text.endswith(word[:n])), default=0)
        self.text, self.pending = self.text + text[: len(text) - keep], text[len(text) - keep :]
