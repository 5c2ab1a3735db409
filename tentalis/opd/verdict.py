"""Parses a hint judge's answer: accepted with a hint, declined, or unreadable. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from tentalis.opd.select import long_enough, one_line
from tentalis.rewards.votes import boxed_score

START, END = "[HINT_START]", "[HINT_END]"
MAX_CHARS = 1000
"""Three sentences are shorter. A longer text is a retelling, not a hint, and would crowd the teacher's prompt."""


class VoteStatus(StrEnum):
    """The verdict of a vote. `too_short`, `too_long`: accepted, but the hint's length is out of bounds; `unreadable`:
    no box with 1 or -1 in it, or accepted without a hint between the marks; `lost`: no answer arrived."""

    ACCEPTED = "accepted"
    DECLINED = "declined"
    TOO_SHORT = "too_short"
    TOO_LONG = "too_long"
    UNREADABLE = "unreadable"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class HintVote:
    """One vote; `hint` is set, as one line, only if it is accepted."""

    status: VoteStatus
    hint: str = ""


def last_block(text: str, begin: str = START, finish: str = END) -> str | None:
    """The text between the last start mark that has an end mark, and that end mark; None if there is none.

    >>> last_block("[HINT_START]a[HINT_END] or rather [HINT_START]b[HINT_END]")
    'b'
    """
    start = text.rfind(begin, 0, max(text.rfind(finish), 0))
    return None if start < 0 else text[start + len(begin) : text.find(finish, start)]


def vote_of(answer: str | None) -> HintVote:
    """The vote in a judge's answer: the last box decides; if it accepts, the last block is the hint. An acceptance
    without a hint, or an answer without a readable box, counts for neither side."""
    if answer is None:
        return HintVote(VoteStatus.LOST)
    box = boxed_score(answer)
    if box == -1:
        return HintVote(VoteStatus.DECLINED)
    block = last_block(answer) if box == 1 else None
    if block is None:
        return HintVote(VoteStatus.UNREADABLE)
    hint = one_line(block)
    if not long_enough(hint):
        return HintVote(VoteStatus.TOO_SHORT)
    return HintVote(VoteStatus.TOO_LONG) if len(hint) > MAX_CHARS else HintVote(VoteStatus.ACCEPTED, hint)
