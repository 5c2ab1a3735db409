"""Splits an answer into steps and maps each step to its tokens."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from schemas.ids import sha256_hex
from schemas.records import Result
from schemas.tensors import int32_view
from tentalis.inference.text import TextStream

_PARAGRAPHS = re.compile(r"\n\s*\n")


class TokenDecoder(Protocol):
    """The part of a tokenizer's interface that this module uses."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of token ids."""
        ...


class NoTokenizer(Exception):
    """The tokenizer that a scorer names cannot be read."""


def load_tokenizer(path: Path) -> tuple[TokenDecoder, str]:
    """Loads the tokenizer from a model's folder or a tokenizer.json, with its sha256. Raises NoTokenizer."""
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        data = file.read_bytes()
        tokenizer: TokenDecoder = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises nothing narrower
        raise NoTokenizer(f"{file}: no tokenizer can be read from this file: {error}") from error
    return tokenizer, sha256_hex(data)


def steps_of(result: Result, max_steps: int) -> list[str]:
    """Returns the worker's steps, else the paragraphs of the answer; the last of `max_steps` steps takes the
    remainder."""
    steps = [step for step in result.steps or _PARAGRAPHS.split(result.text) if step.strip()]
    if len(steps) > max_steps:
        steps = [*steps[: max_steps - 1], "\n\n".join(steps[max_steps - 1 :])]
    return steps


def step_starts(text: str, steps: Sequence[str]) -> list[int] | None:
    """Returns the position in the text at which each step begins, in order.

    None if a step does not occur in the text (a worker may have rewritten it). Of a step that was joined from several,
    only the first paragraph is searched for.

    >>> step_starts("One. Two. One.", ["One.", "Two.", "One."]), step_starts("One.", ["Two."])
    ([0, 5, 10], None)
    """
    starts, position = [], 0
    for step in steps:
        begin = _PARAGRAPHS.split(step.strip(), maxsplit=1)[0]
        position = text.find(begin, position)
        if position < 0:
            return None
        starts.append(position)
        position += len(begin)
    return starts


def partition(offsets: Sequence[int], begins: Sequence[int]) -> list[tuple[int, int]]:
    """Returns one span [start, end) of tokens per step; together they cover all tokens.

    A token belongs to the step in which its text begins. Tokens before the first step belong to the first step.

    Args:
        offsets: the character at which the text of each token begins, non-decreasing.
        begins: the character at which each step begins, increasing.

    >>> partition([0, 3, 4, 9], [1, 4])
    [(0, 2), (2, 4)]
    """
    starts = [0]
    for begin in begins[1:]:
        after = next((index for index, offset in enumerate(offsets) if offset >= begin), len(offsets))
        starts.append(max(after, starts[-1]))
    return list(zip(starts, [*starts[1:], len(offsets)], strict=True))


def spans_of(result: Result, steps: Sequence[str], tokenizer: TokenDecoder) -> list[tuple[int, int]] | None:
    """Returns the span [start, end) of tokens of each step; together the spans cover the answer.

    Positions count from the beginning of the prompt. None if there are no tokens, or if they do not decode to the
    answer's text because another tokenizer produced them.
    """
    ids = int32_view(result.response_token_ids).tolist()
    stream: Any = TextStream(tokenizer)
    offsets = []
    for token in ids:
        offsets.append(len(stream.text))
        stream.push(token)
    stream.finish()
    base = stream.text.find(result.text) if result.text else -1
    begins = step_starts(result.text, steps)
    if not ids or base < 0 or not begins:
        return None
    first = len(result.prompt_token_ids) // 4
    spans = partition(offsets, [base + begin for begin in begins])
    return [(first + start, first + end) for start, end in spans]
