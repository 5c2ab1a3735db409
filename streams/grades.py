"""Grades that were given before the feedback which a reward answers to, so that they can be parts of it.

A thumb on a turn comes while the next message, which its reward answers to, is still to be written. Both lie on one
partition of the feedback topic, so "before" has one meaning: a reward is made of the newest grade of each source that
lies in front of the feedback that it answers to, at most the horizon away. As of results (streams/recent.py), what is
kept is where the grades lie; they are read again when somebody needs them.
"""

import logging
import struct
from collections import deque
from collections.abc import Mapping

from schemas import topics
from schemas.codec import Codec
from schemas.records import Feedback, Source
from streams.intake import decoded
from streams.log_reader import LogReader
from streams.pairing import Paired
from streams.processor import Change, LogRecord, applied_offset, payload_of, stamped
from streams.recent import Fact, task_hash
from tentalis import rewards
from tentalis.rewards import GradingJudge, RewardError

log = logging.getLogger(__name__)

PREFIX = "grades/"
_FACT = struct.Struct(">Qq")


class Graded:
    """Where the recent grades of one partition lie. Pure."""

    def __init__(self, horizon_ms: int, entries: Mapping[str, bytes]) -> None:
        """Raises ValueError for an entry of somebody else's."""
        self._horizon = horizon_ms
        self._time = 0
        self._facts: deque[Fact] = deque()
        self._by_task: dict[int, list[Fact]] = {}
        self._new: list[Fact] = []
        self._deleted: list[str] = []
        for key, value in entries.items():
            try:
                task, time = _FACT.unpack(payload_of(value))
            except struct.error as error:
                raise ValueError(f"state entry {key!r} is no grade: {error}") from error
            self._keep(Fact(applied_offset(value), time, task))
        self._facts = deque(sorted(self._facts))

    def __len__(self) -> int:
        return len(self._facts)

    def passed(self, time: int) -> None:
        """The topic has been read up to this append time (ms)."""
        self._time = max(self._time, time)

    def add(self, fact: Fact) -> None:
        """A grade was read; in offset order."""
        if not self._facts or fact.offset > self._facts[-1].offset:
            self._keep(fact)
            self._new.append(fact)

    def before(self, feedback: Fact) -> list[Fact]:
        """The grades on a task that lie in front of a feedback on it, the newest first."""
        known = self._by_task.get(feedback.task, ())
        near = (each for each in known if abs(feedback.time - each.time) <= self._horizon)
        return sorted((each for each in near if each.offset < feedback.offset), reverse=True)

    def take_changes(self) -> list[list[Change]]:
        """What is to be written after a batch: new grades, then deletions."""
        # Twice the horizon: feedback that waits for its result is judged that much later at most.
        while self._facts and self._facts[0].time + 2 * self._horizon < self._time:
            fact = self._facts.popleft()
            of_task = self._by_task[fact.task]
            of_task.remove(fact)
            if not of_task:
                del self._by_task[fact.task]
            self._deleted.append(f"{PREFIX}{fact.offset}")
        kept: list[Change] = [
            (f"{PREFIX}{fact.offset}", stamped(fact.offset, _FACT.pack(fact.task, fact.time))) for fact in self._new
        ]
        deleted: list[Change] = [(key, None) for key in self._deleted]
        self._new, self._deleted = [], []
        return [wave for wave in (kept, deleted) if wave]

    def _keep(self, fact: Fact) -> None:
        self._facts.append(fact)
        self._by_task.setdefault(fact.task, []).append(fact)


class Grades:
    """The recent grades of the partitions of scoring.

    Args:
        reader: reads feedback again.
        horizon_ms: how far a grade and the feedback that the reward answers to may be apart.
    """

    def __init__(self, codec: Codec, reader: LogReader, horizon_ms: int) -> None:
        self._codec, self._reader, self._horizon = codec, reader, horizon_ms
        self._partitions: dict[int, Graded] = {}

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """Takes the state of a partition over. Raises ValueError."""
        self._partitions[partition] = Graded(self._horizon, entries)

    def revoke(self, partition: int) -> None:
        """Gives the state of a partition up."""
        self._partitions.pop(partition, None)

    def changes(self, partition: int) -> list[list[Change]]:
        """What is to be written after a batch."""
        return self._partitions[partition].take_changes()

    def heard(self, partition: int, record: LogRecord, feedback: Feedback) -> None:
        """Takes feedback in, if it is a grade that a reward may have for a part."""
        graded = self._partitions[partition]
        graded.passed(record.timestamp)
        if rewards.grade(feedback) is not None and (
            rewards.grading() if feedback.result is None else _is_part(feedback)
        ):
            graded.add(Fact(record.offset, record.timestamp, task_hash(feedback.task_id)))

    async def before(self, partition: int, paired: Paired) -> dict[Source, float]:
        """The newest grade of each other source that lies in front of a feedback. Raises Retryable."""
        record, result = paired.record, paired.result
        fact = Fact(record.offset, record.timestamp, task_hash(result.task.task_id))
        found: dict[Source, float] = {}
        for each in self._partitions[partition].before(fact):
            there = (await self._reader.read(topics.FEEDBACK, partition, [each.offset]))[each.offset]
            if there is None:
                log.error("%s[%d]@%d is gone: keep the topic for longer", topics.FEEDBACK, partition, each.offset)
                continue
            feedback = decoded(self._codec, there, Feedback)
            value = rewards.grade(feedback)
            ours = feedback.task_id == result.task.task_id and feedback.sample_index in (None, result.sample_index)
            if ours and value is not None and feedback.source is not paired.feedback.source:
                found.setdefault(feedback.source, value)
        return found


def _is_part(feedback: Feedback) -> bool:
    """Whether the grade in feedback with its result is a part of a reward that answers to somebody else."""
    if feedback.result is None or feedback.source is feedback.result.task.terms.rl:
        return False
    try:
        scorer = rewards.scorer_of(feedback.result.task)
    except RewardError:
        return False  # the task and its result are dead letters for that
    return isinstance(scorer, GradingJudge) and feedback.source in scorer.graders
