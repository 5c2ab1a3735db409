"""Prepares the prompts of a run: reads a source as a stream and writes the file of prompts, with its index."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tentalis.agents.scenarios.prompt_file import Prompt, PromptWriter
from tentalis.learning.columns import UnusableRow, prompt_of
from tentalis.learning.errors import LearnError
from tentalis.learning.sources import line_word, read_rows

SHOWN = 10
TENTH = 10
_CHUNK = 2**20


@dataclass(frozen=True, slots=True)
class PreparedPrompts:
    """The prompts that were written, as number and digest, and the unusable rows: their number, and the first SHOWN."""

    prompts: int
    sha256: str
    unusable: int
    reasons: tuple[str, ...]

    def remark(self, source: str, file: Path | None) -> str | None:
        """Returns the remark on the unusable rows, None without one. `file`: has all of them, None if it is removed."""
        if not self.unusable:
            return None
        rest = self.unusable - len(self.reasons)
        more = [f"  and {rest} more" + ("" if file is None else f", in {file}")] if rest else []
        head = f"{source}: {self.unusable} of {self.unusable + self.prompts} rows cannot be used:"
        return "\n".join([head, *(f"  {reason}" for reason in self.reasons), *more])


def write_prompts(
    source: Path,
    folder: Path,
    name: str,
    names: Mapping[str, str],
    refusal: Callable[[Prompt], str | None] = lambda prompt: None,
) -> PreparedPrompts:
    """Writes the prompts of a source into a folder as `name`, and all unusable rows into `name.unusable.jsonl`.

    `refusal` returns the reason why a prompt cannot be used, or None. Raises LearnError if no row can be used.
    """
    reasons: list[str] = []
    unusable = 0
    word = line_word(source)
    with PromptWriter(folder, name) as writer, unusable_file(folder, name).open("w", encoding="utf-8") as refused:
        for row in read_rows(source):
            problem: str | None = row.problem
            if row.values is not None:
                try:
                    prompt, line = prompt_of(row.values, row.number, names)
                    problem = refusal(prompt)
                except UnusableRow as error:
                    problem = str(error)
                else:
                    if problem is None:
                        writer.add(line)
            if problem:
                unusable += 1
                refused.write(json.dumps({word: row.number, "problem": problem}) + "\n")
                if len(reasons) < SHOWN:
                    reasons.append(f"{word} {row.number}: {problem}")
    if not writer.count:
        listed = "".join(f"\n  {reason}" for reason in reasons)
        raise LearnError(
            f"{source}: none of its {unusable} rows can be used as a prompt{':' if listed else ''}{listed}"
        )
    return PreparedPrompts(writer.count, writer.sha256, unusable, tuple(reasons))


def unusable_file(folder: Path, name: str) -> Path:
    """Returns the place of the list of unusable rows."""
    return folder / f"{name}.unusable.jsonl"


def held_out_count(prompts: int, source: Path) -> int:
    """Returns the number of prompts to hold out where no file of held-out prompts is given. Raises LearnError."""
    if prompts < 2:
        raise LearnError(
            f"{source} has one usable prompt: a tenth of the prompts is held out for the comparison, so it needs two. "
            "Or name a file of held-out prompts with --eval"
        )
    return max(1, prompts // TENTH)


def source_digest(source: Path) -> str:
    """Returns the sha256 of a file; of a folder, that of its files with their names."""
    digest = hashlib.sha256()
    if source.is_dir():
        for file in sorted(each for each in source.rglob("*") if each.is_file()):
            digest.update(f"{file.relative_to(source)}\0{file.stat().st_size}\0".encode())
            _update(digest, file)
    else:
        _update(digest, source)
    return digest.hexdigest()


def _update(digest: "hashlib._Hash", path: Path) -> None:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)


def copy_stdin(to: Path, stdin: BinaryIO | None = None) -> Path:
    """Copies standard input, which is JSONL, into a file. Raises LearnError if it is a terminal."""
    given = sys.stdin.buffer if stdin is None else stdin
    if given.isatty():
        raise LearnError("`-` reads prompts from standard input, which is a terminal here: pipe JSONL into the command")
    with to.open("wb") as file:
        shutil.copyfileobj(given, file, _CHUNK)
    return to
