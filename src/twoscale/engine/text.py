"""Incremental detokenization: complete characters only, cut before a stop string."""

from collections.abc import Sequence

from twoscale.data import IncrementalDecoder, Tokenizer


class TextStream:
    """The generated text of one sequence, token by token."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = (), no_text_ids: frozenset[int] = frozenset()
    ) -> None:
        """`prompt` are the tokens before the generated ones; tokens of `no_text_ids` (stop tokens) add no text."""
        self.decoder, self.stop, self.no_text_ids = IncrementalDecoder(tokenizer, prompt), stop, no_text_ids
        self.text = ""
        """The text so far, without `pending`."""
        self.pending = ""
        """The end of the text that may be the beginning of a stop string."""
        self.offsets: list[int] = []
        """Offset in the text at which each token begins; tokens after a stop string have none."""
        self.stopped = False
        """Whether a stop string was found."""

    def add(self, token: int) -> str:
        """Append a token; returns the new text."""
        if self.stopped:
            return ""
        before = len(self.text)
        self.offsets.append(before + len(self.pending))
        if token not in self.no_text_ids:
            self._add(self.decoder.add(token))
        return self.text[before:]

    def finish(self) -> str:
        """No more tokens will come; returns the pending text."""
        before = len(self.text)
        if not self.stopped:
            self._add(self.decoder.rest())
        if not self.stopped:
            self.text, self.pending = self.text + self.pending, ""
        return self.text[before:]

    def _add(self, new_text: str) -> None:
        text = self.pending + new_text
        stop_indices = [index for stop_string in self.stop if (index := text.find(stop_string)) >= 0]
        if stop_indices:
            self.text, self.pending, self.stopped = self.text + text[: min(stop_indices)], "", True
            return
        keep = max((n for stop_string in self.stop for n in range(1, len(stop_string)) if text.endswith(stop_string[:n])), default=0)
        self.text, self.pending = self.text + text[: len(text) - keep], text[len(text) - keep :]
