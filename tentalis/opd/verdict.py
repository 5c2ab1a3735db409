"""What a hint judge's answer says: accepted with a hint, declined, or nothing that can be read. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from tentalis.opd.select import long_enough, plain
from tentalis.rewards.votes import boxed_score

START, END = "[HINT_START]", "[HINT_END]"
MAX_CHARS = 1000
"""Three sentences are shorter. What is longer is no hint but a retelling, and would crowd the teacher's prompt."""


class Said(StrEnum):
    """How a vote is counted. `too_short`, `too_long`: accepted, with a hint that is none by its length; `unreadable`:
    no box with 1 or -1 in it, or accepted without a hint between the marks; `lost`: no answer came."""

    ACCEPTED = "accepted"
    DECLINED = "declined"
    TOO_SHORT = "too_short"
    TOO_LONG = "too_long"
    UNREADABLE = "unreadable"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Vote:
    """One vote; `hint` only where it is accepted, in one line."""

    said: Said
    hint: str = ""


def last_block(text: str, begin: str = START, finish: str = END) -> str | None:
    """What stands between the last start that has an end, and its end; None if there is none.

    >>> last_block("[HINT_START]a[HINT_END] or rather [HINT_START]b[HINT_END]")
    'b'
    """
    start = text.rfind(begin, 0, max(text.rfind(finish), 0))
    return None if start < 0 else text[start + len(begin) : text.find(finish, start)]


def vote_of(answer: str | None) -> Vote:
    """The vote in a judge's answer: its last box decides, and of an accepted one the last block is the hint. Nothing is
    made up: an answer that does not say both is not counted for either side."""
    if answer is None:
        return Vote(Said.LOST)
    box = boxed_score(answer)
    if box == -1:
        return Vote(Said.DECLINED)
    block = last_block(answer) if box == 1 else None
    if block is None:
        return Vote(Said.UNREADABLE)
    hint = plain(block)
    if not long_enough(hint):
        return Vote(Said.TOO_SHORT)
    return Vote(Said.TOO_LONG) if len(hint) > MAX_CHARS else Vote(Said.ACCEPTED, hint)
