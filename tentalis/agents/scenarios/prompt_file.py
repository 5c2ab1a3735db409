"""A file of prompts with an index of their places, so that any prompt is read without the others.

`NAME.jsonl` has one prompt per line; `NAME.offsets` has the offset of each line and of the end, as unsigned 64-bit
integers in little-endian order. Memory does not depend on the number of prompts.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from tentalis.service.lifecycle import Unmendable

OFFSET = struct.Struct("<Q")
_CHUNK = 2**20


class BadPrompts(Unmendable):
    """A file of prompts that is damaged or missing; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt: its chat messages (role, content), and the other columns of its row, which the reward receives.

    `line`: its line or row in the source, from 1.
    """

    messages: Sequence[tuple[str, str]]
    columns: Mapping[str, Any] = field(default_factory=dict)
    line: int = 0

    def as_line(self) -> bytes:
        """Returns the line of the file. Raises ValueError for text that is not valid Unicode."""
        row = {"line": self.line, "messages": self.messages, "columns": self.columns}
        return json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def of_line(cls, line: bytes) -> Self:
        """Returns the prompt of a line of the file."""
        row = json.loads(line)
        return cls(tuple((role, content) for role, content in row["messages"]), row["columns"], row["line"])


class PromptWriter:
    """Writes a file of prompts and its index; `count` and `sha256` describe what is written."""

    def __init__(self, folder: Path, name: str) -> None:
        self.count = 0
        self._at = 0
        self._digest = hashlib.sha256()
        self._data: BinaryIO = _data(folder, name).open("wb")
        self._offsets: BinaryIO = _offsets(folder, name).open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._data, self._offsets:
            self._offsets.write(OFFSET.pack(self._at))

    def add(self, line: bytes) -> None:
        """Appends a prompt, as `Prompt.as_line` returns it."""
        self._offsets.write(OFFSET.pack(self._at))
        self._data.write(line)
        self._digest.update(line)
        self._at += len(line)
        self.count += 1

    @property
    def sha256(self) -> str:
        """The digest of the lines."""
        return self._digest.hexdigest()


class PromptFile:
    """Reads a file of prompts; `prompt(i)` reads one. Raises BadPrompts if the file or its index is damaged."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = _data(folder, name)
        try:
            self._data = self.path.open("rb")
            self._offsets = _offsets(folder, name).open("rb")
        except FileNotFoundError as error:
            raise BadPrompts(f"{error.filename} is missing: begin a new run with `tentalis learn --new`") from error
        self.count = _offsets(folder, name).stat().st_size // OFFSET.size - 1
        if self.count < 0 or self._offset(self.count) != self.path.stat().st_size:
            raise BadPrompts(
                f"{self.path} does not fit its index {_offsets(folder, name).name}: one of them was changed. "
                "Begin a new run with `tentalis learn --new`"
            )

    def _offset(self, number: int) -> int:
        self._offsets.seek(number * OFFSET.size)
        return int(OFFSET.unpack(self._offsets.read(OFFSET.size))[0])

    def prompt(self, number: int) -> Prompt:
        """Returns the prompt at position `number` of the file, from 0."""
        if not 0 <= number < self.count:
            raise IndexError(f"{self.path} has {self.count} prompts, no number {number}")
        begin, end = self._offset(number), self._offset(number + 1)
        self._data.seek(begin)
        try:
            return Prompt.of_line(self._data.read(end - begin))
        except (ValueError, KeyError, TypeError) as error:
            raise BadPrompts(f"{self.path}, line {number + 1}, is damaged: {error}. Begin a new run") from error

    def close(self) -> None:
        """Closes the files."""
        self._data.close()
        self._offsets.close()


def file_digest(path: Path) -> str:
    """Returns the sha256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _data(folder: Path, name: str) -> Path:
    return folder / f"{name}.jsonl"


def _offsets(folder: Path, name: str) -> Path:
    return folder / f"{name}.offsets"
