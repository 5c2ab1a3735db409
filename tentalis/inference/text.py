"""Incremental detokenisation with stop strings, and the size of texts in bytes."""

from collections.abc import Sequence
from typing import Any


def longest_token_bytes(tokenizer: Any) -> int:
    """An upper bound on the UTF-8 bytes of text that one token of the vocabulary stands for. (Byte-level vocabularies
    write some bytes with two bytes: the bound is then up to twice too large.)"""
    return max(len(token.encode("utf-8", "surrogatepass")) for token in tokenizer.get_vocab())


def text_bytes(value: Any) -> int:
    """UTF-8 bytes of all strings in a JSON value. Raises UnicodeEncodeError for a lone surrogate."""
    match value:
        case str():
            return len(value.encode())
        case dict():
            return sum(text_bytes(key) + text_bytes(item) for key, item in value.items())
        case list():
            return sum(map(text_bytes, value))
        case _:
            return 0


class TextStream:
    """The text of a completion as its tokens arrive.

    A character or a stop string may span tokens, so the end of the text is held back until it is certain.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), include_stop: bool = False) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held_chars = max((len(text) for text in self._stop), default=1) - 1
        self._tokens: list[int] = []
        # tokens[prefix:read] are decoded together with the tokens after them, because a token's text may depend on the
        # token before it (a leading space, for instance).
        self._prefix = 0
        self._read = 0
        self._sent = 0
        self.text = ""
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        """Add a token; returns the text that is now certain and was not returned before."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._prefix : self._read])
        after = self._decode(self._tokens[self._prefix :])
        if len(after) > len(before) and not after.endswith("�"):
            start = max(0, len(self.text) - self._held_chars)
            self.text += after[len(before) :]
            self._prefix, self._read = self._read, len(self._tokens)
            self._find_stop(start)
        return self._take_until(
            len(self.text) if self.stopped_by else max(self._sent, len(self.text) - self._held_chars)
        )

    def finish(self) -> str:
        """Returns the text that was still held back."""
        if self.stopped_by is None:
            before = self._decode(self._tokens[self._prefix : self._read])
            self.text += self._decode(self._tokens[self._prefix :])[len(before) :]
            self._prefix = self._read = len(self._tokens)
        return self._take_until(len(self.text))

    def _take_until(self, end: int) -> str:
        delta, self._sent = self.text[self._sent : end], end
        return delta

    def _find_stop(self, start: int) -> None:
        found = [(at, stop) for stop in self._stop if (at := self.text.find(stop, start)) >= 0]
        if found:
            at, stop = min(found)
            self.stopped_by = stop
            self.text = self.text[: at + len(stop) if self._include_stop else at]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))
