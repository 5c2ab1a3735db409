"""Whether a message is the answer before it, edited."""

from difflib import SequenceMatcher

MOST_TOKENS = 600
LEAST_TOKENS = 8
_KEPT = 0.5
_RUN = 3


def edit(answer: str, message: str) -> str | None:
    """What was changed, if the message holds most of the answer in its order and something within it is different.

    Of the answer's words at least half come back in runs of three or more. What stands before or after them is talk
    about the answer; a quotation that is exact is no edit.
    """
    before, after = _tokens(answer), _tokens(message)
    if not LEAST_TOKENS <= len(before) <= MOST_TOKENS or not LEAST_TOKENS <= len(after) <= 2 * MOST_TOKENS:
        return None
    if len(set(before) & set(after)) < _KEPT * len(set(before)):
        return None
    blocks = SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
    runs = [block for block in blocks if block.size >= _RUN]
    if sum(block.size for block in runs) < _KEPT * len(before):
        return None
    first, last = runs[0], runs[-1]
    old = before[first.a : last.a + last.size]
    new = after[first.b : last.b + last.size]
    # Also a beginning or an end that was replaced, where the message has nothing else to say there.
    if old == new and (first.a == 0 or first.b == 0) and (_ends(before, last.a + last.size, after, last.b + last.size)):
        return None
    changed = [
        f"{' '.join(before[a:b]) or '(nothing)'} -> {' '.join(after[c:d]) or '(nothing)'}"
        for tag, a, b, c, d in SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
        if tag != "equal"
    ]
    return "; ".join(changed)


def _ends(before: list[str], a: int, after: list[str], b: int) -> bool:
    return a == len(before) or b == len(after)


def _tokens(text: str) -> list[str]:
    """Words without the punctuation behind them: what stands after a quotation changes that."""
    return [token.rstrip(".,:;!?") or token for token in text.split()]
