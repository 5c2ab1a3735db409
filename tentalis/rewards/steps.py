"""The steps of an answer, and which of its tokens each is made of."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from schemas.ids import sha256_hex
from schemas.records import Result
from schemas.tensors import int32_view
from tentalis.inference.text import TextStream

_PARAGRAPHS = re.compile(r"\n\s*\n")


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        ...


class NoTokenizer(Exception):
    """The tokenizer that a scorer names is not there."""


def load_tokenizer(path: Path) -> tuple[Decoder, str]:
    """The tokenizer in a model's folder, or in a tokenizer.json, and its sha256. Raises NoTokenizer."""
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        data = file.read_bytes()
        tokenizer: Decoder = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises nothing narrower
        raise NoTokenizer(f"{file}: no tokenizer can be read from it: {error}") from error
    return tokenizer, sha256_hex(data)


def steps_of(result: Result, most: int) -> list[str]:
    """The steps as the worker gave them, else the paragraphs of the answer; what is beyond `most` is one last step."""
    steps = [step for step in result.steps or _PARAGRAPHS.split(result.text) if step.strip()]
    if len(steps) > most:
        steps = [*steps[: most - 1], "\n\n".join(steps[most - 1 :])]
    return steps


def places(text: str, steps: Sequence[str]) -> list[int] | None:
    """Where in the text each step begins, in order; None if one of them is not there (a worker may have rewritten it).

    Of a step that was put together from several the beginning is looked for.

    >>> places("One. Two. One.", ["One.", "Two.", "One."]), places("One.", ["Two."])
    ([0, 5, 10], None)
    """
    found, at = [], 0
    for step in steps:
        begin = _PARAGRAPHS.split(step.strip(), maxsplit=1)[0]
        at = text.find(begin, at)
        if at < 0:
            return None
        found.append(at)
        at += len(begin)
    return found


def partition(offsets: Sequence[int], begins: Sequence[int]) -> list[tuple[int, int]]:
    """Spans [start, end) of tokens that cover all of them, one for each step: a token belongs to the step in which its
    text begins, what is before the first step to the first.

    Args:
        offsets: the character at which the text of each token begins, not falling.
        begins: the character at which each step begins, rising.

    >>> partition([0, 3, 4, 9], [1, 4])
    [(0, 2), (2, 4)]
    """
    starts = [0]
    for begin in begins[1:]:
        after = next((index for index, offset in enumerate(offsets) if offset >= begin), len(offsets))
        starts.append(max(after, starts[-1]))
    return list(zip(starts, [*starts[1:], len(offsets)], strict=True))


def spans_of(result: Result, steps: Sequence[str], tokenizer: Decoder) -> list[tuple[int, int]] | None:
    """The tokens of each step, [start, end) in prompt and answer as one sequence; together they are the answer.

    None if there are no tokens, or they do not read as the text does: another tokenizer wrote them.
    """
    ids = int32_view(result.response_token_ids).tolist()
    stream: Any = TextStream(tokenizer)
    offsets = []
    for token in ids:
        offsets.append(len(stream.text))
        stream.push(token)
    stream.finish()
    base = stream.text.find(result.text) if result.text else -1
    begins = places(result.text, steps)
    if not ids or base < 0 or not begins:
        return None
    first = len(result.prompt_token_ids) // 4
    spans = partition(offsets, [base + begin for begin in begins])
    return [(first + start, first + end) for start, end in spans]
