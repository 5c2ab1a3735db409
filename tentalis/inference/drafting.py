"""Drafts the next tokens of a sequence from the sequence itself (prompt lookup): text is often repeated."""

from collections.abc import Sequence

import numpy as np

# The numbers of last tokens that are looked for, in this order.
_NGRAMS = (3, 2)


class NgramDrafter:
    """A prompt and its answer so far, in memory for `max_tokens` tokens of answer."""

    def __init__(self, prompt: Sequence[int], max_tokens: int) -> None:
        self._tokens = np.empty(len(prompt) + max_tokens, dtype=np.int64)
        self._tokens[: len(prompt)] = prompt
        self._length = len(prompt)

    def append(self, token: int) -> None:
        """Adds a token of the answer. Raises IndexError beyond `max_tokens`."""
        self._tokens[self._length] = token
        self._length += 1

    def draft(self, most: int) -> list[int]:
        """Returns `most` tokens: those after the latest earlier place that has the last tokens, repeated where the
        sequence ends before. Returns none if there is no such place."""
        if most <= 0:
            return []
        tokens = self._tokens[: self._length]
        for size in _NGRAMS:
            places = self._length - size  # the last one is that of the last tokens themselves
            if places <= 0:
                continue
            same = np.ones(places, dtype=np.bool_)
            for offset, token in enumerate(tokens[-size:]):
                same &= tokens[offset : offset + places] == token
            found = np.flatnonzero(same)
            if len(found):
                after = int(found[-1]) + size
                return np.resize(tokens[after : after + most], most).tolist()
        return []
