"""Keeps keys and values of sequences that were computed, so that a prompt that begins like one of them goes on from
there: the next turn of a session or an episode, or another request with the same instructions."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tentalis.inference.whole_model import ServedVersion

MIN_TOKENS = 16
"""A shorter common beginning costs more to copy than to compute."""


@dataclass(frozen=True, eq=False)
class Prefix:
    """A sequence of n tokens under one version, None: the base model. `keys`, `values`: [layers, heads, n, head_dim].

    It does not keep the version in memory."""

    version: "weakref.ref[ServedVersion] | None"
    tokens: NDArray[np.int64]
    keys: Tensor
    values: Tensor

    @classmethod
    def of(cls, version: ServedVersion | None, tokens: Sequence[int], keys: Tensor, values: Tensor) -> "Prefix":
        """Makes a prefix of tensors that nothing else changes."""
        reference = None if version is None else weakref.ref(version)
        return cls(reference, np.asarray(tokens, dtype=np.int64), keys, values)

    @property
    def n_bytes(self) -> int:
        """Bytes of its keys and values."""
        return 2 * self.keys.numel() * self.keys.element_size()

    @property
    def unloaded(self) -> bool:
        """True if its version is no longer in memory."""
        return self.version is not None and self.version() is None

    def is_of(self, version: ServedVersion | None) -> bool:
        """True if it was computed with this version."""
        if self.version is None or version is None:
            return self.version is None and version is None  # a version that is unloaded is not the base model
        return self.version() is version

    def common(self, tokens: NDArray[np.int64]) -> int:
        """Returns the number of first tokens that both have in common."""
        most = min(len(tokens), len(self.tokens))
        differs = self.tokens[:most] != tokens[:most]
        return int(differs.argmax()) if differs.any() else most


class PrefixStore:
    """The prefixes used last, within `max_bytes`. Owned by the engine's thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._prefixes: list[Prefix] = []  # the one used last is at the end

    @property
    def n_bytes(self) -> int:
        """Bytes of all prefixes."""
        return sum(each.n_bytes for each in self._prefixes)

    def longest(self, version: ServedVersion | None, tokens: Sequence[int]) -> tuple[Prefix, int] | None:
        """Returns the prefix with the most first tokens in common with `tokens`, and their number; None below
        MIN_TOKENS. The last token of `tokens` does not count: it must be computed for its logits."""
        self._prefixes = [each for each in self._prefixes if not each.unloaded]
        wanted = np.asarray(tokens[:-1], dtype=np.int64)
        found = max(
            ((each.common(wanted), at) for at, each in enumerate(self._prefixes) if each.is_of(version)), default=(0, 0)
        )
        if found[0] < MIN_TOKENS:
            return None
        prefix = self._prefixes.pop(found[1])
        self._prefixes.append(prefix)
        return prefix, found[0]

    def room_for(self, n_bytes: int) -> bool:
        """Returns True if a prefix of this size can be kept."""
        return n_bytes <= self._max_bytes

    def put(self, prefix: Prefix) -> None:
        """Keeps a prefix, in place of those that it continues; drops the least recently used ones beyond the limit."""
        self._prefixes = [
            each
            for each in self._prefixes
            if not each.unloaded
            and not (each.version == prefix.version and each.common(prefix.tokens) == len(each.tokens))
        ]
        self._prefixes.append(prefix)
        while self.n_bytes > self._max_bytes:
            del self._prefixes[0]

    def clear(self) -> None:
        """Drops all prefixes."""
        self._prefixes.clear()
