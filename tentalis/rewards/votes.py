r"""Votes of a model: parses one, decides from several, detects an early decision, and counts unreadable ones."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_BOX = re.compile(r"\\boxed\s*\{([^{}]*)\}")
_SCORES = {"-1": -1, "0": 0, "1": 1, "+1": 1}


class NoVote(Exception):
    """A judge model gave no vote, although its endpoint is reachable: each request failed or took too long. The
    caller tries again."""


def boxed_score(text: str) -> int | None:
    r"""Returns the score in the last `\boxed{}` of a text: -1, 0 or 1; None for other content or without a box.

    >>> boxed_score(r"At first \boxed{1}, but no: \boxed{-1}"), boxed_score(r"\boxed{1} or \boxed{2}"), boxed_score("1")
    (-1, None, None)
    """
    at = text.rfind("\\boxed")
    found = _BOX.match(text, at) if at >= 0 else None
    return None if found is None else _SCORES.get(found.group(1).strip().replace("−", "-"))


@dataclass(frozen=True, slots=True)
class VoteDecision:
    """The decision of several votes. `score` is -1, 0 or 1; `reason` is agreed, tie, none (no readable vote) or
    no_consensus; `share` is the share of the most common score among all votes asked for."""

    score: int
    reason: str
    share: float


def decide(votes: Sequence[int | None], consensus: float = 0.0) -> VoteDecision:
    """Returns the most common vote; 0 for a tie, without a vote, or if less than `consensus` of the votes agree.

    The share is of *all* votes asked for: a vote without an answer agrees with none.

    >>> decide([1, 1, -1]).score, decide([1, -1]).reason, decide([None]).reason
    (1, 'tie', 'none')
    >>> decide([1, None, None], 0.5).reason
    'no_consensus'
    """
    counts = Counter(vote for vote in votes if vote is not None).most_common()
    if not counts:
        return VoteDecision(0, "none", 0.0)
    score, agreeing = counts[0]
    share = agreeing / len(votes)
    if len(counts) > 1 and counts[1][1] == agreeing:
        return VoteDecision(0, "tie", share)
    return VoteDecision(score, "agreed", share) if share >= consensus else VoteDecision(0, "no_consensus", share)


def is_decided(votes: Sequence[int | None], pending: int, consensus: float = 0.0) -> bool:
    """Returns True if no outcome of the open votes can change the score.

    It suffices to test four cases: all open votes stay unanswered, or all give the same score (-1, 0 or 1). Nothing
    helps a score more than all open votes, and nothing hurts it more than all open votes for one other score.

    >>> is_decided([1, 1], 1), is_decided([1, 1], 1, 0.9), is_decided([1, 1], 2), is_decided([0], 1)
    (True, False, False, True)
    """
    return len({decide([*votes, *[vote] * pending], consensus).score for vote in (None, -1, 0, 1)}) == 1


class VoteCounts:
    """Counts the votes of one judge: read, unparsable, missing (failed, too late or cut off), cancelled (the other
    votes had decided)."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("read", "unparsable", "missing", "cancelled"), 0)

    def add(self, answers: Sequence[str | None], parsed: Sequence[object | None], cancelled: int = 0) -> None:
        """Adds the votes on one question with their parsed values, and the number of cancelled votes.

        Raises NoVote if no vote was answered.
        """
        self.counts["cancelled"] += cancelled
        for answer, value in zip(answers, parsed, strict=True):
            kind = "missing" if answer is None else "unparsable" if value is None else "read"
            self.counts[kind] += 1
        if all(answer is None for answer in answers):
            raise NoVote(f"none of {len(answers)} votes was answered")

    @property
    def unparsable_ratio(self) -> float:
        """Share of unparsable answers, 0 without answers. Missing and cancelled votes are not answers."""
        answered = self.counts["read"] + self.counts["unparsable"]
        return self.counts["unparsable"] / answered if answered else 0.0
