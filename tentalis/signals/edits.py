"""Detects a message that is an edited copy of the answer before it."""

from collections import Counter
from difflib import SequenceMatcher

MAX_TOKENS = 600
MIN_TOKENS = 8
MAX_PAIRS = 30_000
"""Limit of pairs of equal words, one of each text: the time of a comparison grows with it."""
_MAX_CHARS = 20 * MAX_TOKENS
_MIN_SHARED = 0.5
_MIN_RUN = 3


def find_edit(answer: str, message: str) -> str | None:
    """Returns the changes, if the message repeats most of the answer in order and differs within it; else None.

    At least half of the answer's words must recur in runs of three or more. Text before or after them is talk about the
    answer; an exact quotation is not an edit. Long texts, and texts that repeat the same words very often, are not
    compared.
    """
    if len(answer) > _MAX_CHARS or len(message) > 2 * _MAX_CHARS:
        return None
    before, after = _tokens(answer), _tokens(message)
    if not MIN_TOKENS <= len(before) <= MAX_TOKENS or not MIN_TOKENS <= len(after) <= 2 * MAX_TOKENS:
        return None
    if len(set(before) & set(after)) < _MIN_SHARED * len(set(before)):
        return None
    counts = Counter(after)
    if sum(counts[token] for token in before) > MAX_PAIRS:
        return None
    blocks = SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    runs = [block for block in blocks if block.size >= _MIN_RUN]
    if sum(block.size for block in runs) < _MIN_SHARED * len(before):
        return None
    first, last = runs[0], runs[-1]
    old = before[first.a : last.a + last.size]
    new = after[first.b : last.b + last.size]
    # An unchanged span still counts as an edit if both texts have other words before it, or both after it.
    if (
        old == new
        and (first.a == 0 or first.b == 0)
        and (_at_an_end(before, last.a + last.size, after, last.b + last.size))
    ):
        return None
    changed = [
        f"{' '.join(before[a:b]) or '(nothing)'} -> {' '.join(after[c:d]) or '(nothing)'}"
        for tag, a, b, c, d in SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        if tag != "equal"
    ]
    return "; ".join(changed)


def _at_an_end(before: list[str], a: int, after: list[str], b: int) -> bool:
    return a == len(before) or b == len(after)


def _tokens(text: str) -> list[str]:
    """Words without trailing punctuation, which depends on the text after a quotation."""
    return [token.rstrip(".,:;!?") or token for token in text.split()]
