r"""Votes of a model: what one says, what several decide and when that is certain, and how many could not be read."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_BOX = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_SCORES = {"-1": -1, "0": 0, "1": 1, "+1": 1}


class NoVote(Exception):
    """Nobody answered, though the endpoint is there: every vote failed or took too long. To be asked again."""


def boxed_score(text: str) -> int | None:
    r"""The score in the last `\boxed{}` of a text, -1, 0 or 1; None if that holds anything else, or there is none.

    >>> boxed_score(r"At first \boxed{1}, but no: \boxed{-1}"), boxed_score(r"\boxed{1} or \boxed{2}"), boxed_score("1")
    (-1, None, None)
    """
    at = text.rfind("\\boxed")
    found = _BOX.match(text, at) if at >= 0 else None
    return None if found is None else _SCORES.get(found.group(1).strip().replace("−", "-"))


@dataclass(frozen=True, slots=True)
class Decision:
    """What votes decided. `score` is -1, 0 or 1; `why`: agreed, tie, none (no vote could be read) or no_consensus.
    `share`: of the votes asked for those that are for the commonest score."""

    score: int
    why: str
    share: float


def decide(votes: Sequence[int | None], consensus: float = 0.0) -> Decision:
    """The commonest of the votes; 0 if there is a tie, no vote, or less than `consensus` of *all* that were asked for
    agree: who did not answer agrees with nobody.

    >>> decide([1, 1, -1]).score, decide([1, -1]).why, decide([None]).why, decide([1, None, None], 0.5).why
    (1, 'tie', 'none', 'no_consensus')
    """
    counts = Counter(vote for vote in votes if vote is not None).most_common()
    if not counts:
        return Decision(0, "none", 0.0)
    score, most = counts[0]
    share = most / len(votes)
    if len(counts) > 1 and counts[1][1] == most:
        return Decision(0, "tie", share)
    return Decision(score, "agreed", share) if share >= consensus else Decision(0, "no_consensus", share)


def certain(votes: Sequence[int | None], still_open: int, consensus: float = 0.0) -> bool:
    """Whether the score is decided whatever the open votes say.

    It is, if it is the same when they all say nothing and when they all say the same, whichever that is: nothing helps
    a score more than all of them, and nothing hurts it more than all of them for one other score.

    >>> certain([1, 1], 1), certain([1, 1], 1, 0.9), certain([1, 1], 2), certain([0], 1)
    (True, False, False, True)
    """
    return len({decide([*votes, *[said] * still_open], consensus).score for said in (None, -1, 0, 1)}) == 1


class Tally:
    """Votes of one judge by what became of them: read, unparsable, missing (failed, too late or cut off), cancelled
    (the others had decided)."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("read", "unparsable", "missing", "cancelled"), 0)

    def add(self, answers: Sequence[str | None], parsed: Sequence[object | None], cancelled: int = 0) -> None:
        """The votes on one question, what was read from each, and how many more were asked for and not awaited. Raises
        NoVote if there is no answer at all."""
        self.counts["cancelled"] += cancelled
        for answer, value in zip(answers, parsed, strict=True):
            kind = "missing" if answer is None else "unparsable" if value is None else "read"
            self.counts[kind] += 1
        if all(answer is None for answer in answers):
            raise NoVote(f"none of {len(answers)} votes was answered")

    @property
    def unparsable_ratio(self) -> float:
        """Share of the answers that could not be read, 0 of none. Votes that were cancelled are no answers."""
        answered = self.counts["read"] + self.counts["unparsable"]
        return self.counts["unparsable"] / answered if answered else 0.0
