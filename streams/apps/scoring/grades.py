"""Grades given before the feedback from which a reward comes, so that they can be parts of the reward.

A thumb on a turn comes before the next message, from which the turn's reward comes. Both lie on one partition of the
feedback topic, so "before" has one meaning: the reward uses the newest grade of each source that precedes its feedback
on the log, at most the horizon away. As for results (`recent_results`), only offset references are kept; the grades
are read again when needed.
"""

import logging
import struct
from collections import deque
from collections.abc import Mapping

from schemas import topics
from schemas.records import Feedback, Source
from schemas.wire.codec import Codec
from streams.fold.hashing import id_hash
from streams.fold.pairing import Paired
from streams.fold.recent_results import OffsetRef
from streams.runtime.decoding import decoded
from streams.runtime.log_reader import LogReader
from streams.runtime.processor import Change, LogRecord, applied_offset, payload_of, stamped
from tentalis.rewards import registry
from tentalis.rewards.grade import grade
from tentalis.rewards.verdict import GradingJudge, RewardError

log = logging.getLogger(__name__)

GRADE_HORIZON_MS = 30 * 3_600_000
"""Least horizon of grades: a lone thumb counts when its session ends, which an idle one does after 23 hours."""
PREFIX = "grades/"
_REF = struct.Struct(">Qq")


class GradeRefs:
    """Offset references to the recent grades of one partition. Pure."""

    def __init__(self, horizon_ms: int, entries: Mapping[str, bytes]) -> None:
        """Raises ValueError for an entry that this code did not write."""
        self._horizon = horizon_ms
        self._time = 0
        self._refs: deque[OffsetRef] = deque()
        self._by_task: dict[int, list[OffsetRef]] = {}
        self._new: list[OffsetRef] = []
        self._deleted: list[str] = []
        for key, value in entries.items():
            try:
                task, time = _REF.unpack(payload_of(value))
            except struct.error as error:
                raise ValueError(f"state entry {key!r} is not a valid grade: {error}") from error
            self._keep(OffsetRef(applied_offset(value), time, task))
        self._refs = deque(sorted(self._refs))

    def __len__(self) -> int:
        return len(self._refs)

    def passed(self, time: int) -> None:
        """Marks the topic as read up to this append time (ms)."""
        self._time = max(self._time, time)

    def add(self, ref: OffsetRef) -> None:
        """Adds a grade that was read. Call it in offset order."""
        if not self._refs or ref.offset > self._refs[-1].offset:
            self._keep(ref)
            self._new.append(ref)

    def before(self, feedback: OffsetRef) -> list[OffsetRef]:
        """Returns the grades on a task that precede a feedback on it, the newest first."""
        known = self._by_task.get(feedback.task, ())
        near = (each for each in known if abs(feedback.time - each.time) <= self._horizon)
        return sorted((each for each in near if each.offset < feedback.offset), reverse=True)

    def take_changes(self) -> list[list[Change]]:
        """Returns the state changes to write after a batch, in waves: new grades, then deletions."""
        # Twice the horizon: feedback that waits for its result is judged up to one horizon later.
        while self._refs and self._refs[0].time + 2 * self._horizon < self._time:
            ref = self._refs.popleft()
            of_task = self._by_task[ref.task]
            of_task.remove(ref)
            if not of_task:
                del self._by_task[ref.task]
            self._deleted.append(f"{PREFIX}{ref.offset}")
        kept: list[Change] = [
            (f"{PREFIX}{ref.offset}", stamped(ref.offset, _REF.pack(ref.task, ref.time))) for ref in self._new
        ]
        deleted: list[Change] = [(key, None) for key in self._deleted]
        self._new, self._deleted = [], []
        return [wave for wave in (kept, deleted) if wave]

    def _keep(self, ref: OffsetRef) -> None:
        self._refs.append(ref)
        self._by_task.setdefault(ref.task, []).append(ref)


class Grades:
    """The recent grades of the partitions of scoring.

    Args:
        reader: reads feedback again.
        horizon_ms: the longest time between a grade and the feedback from which the reward comes.
    """

    def __init__(self, codec: Codec, reader: LogReader, horizon_ms: int) -> None:
        self._codec, self._reader, self._horizon = codec, reader, horizon_ms
        self._partitions: dict[int, GradeRefs] = {}

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """Restores the state of a partition. Raises ValueError for an entry that this code did not write."""
        self._partitions[partition] = GradeRefs(self._horizon, entries)

    def revoke(self, partition: int) -> None:
        """Drops the state of a partition from memory."""
        self._partitions.pop(partition, None)

    def changes(self, partition: int) -> list[list[Change]]:
        """Returns the state changes to write after a batch."""
        return self._partitions[partition].take_changes()

    def heard(self, partition: int, record: LogRecord, feedback: Feedback) -> None:
        """Adds feedback if it is a grade that a reward may have as a part."""
        graded = self._partitions[partition]
        graded.passed(record.timestamp)
        if grade(feedback) is not None and (
            registry.has_grading_judge() if feedback.result is None else _is_part(feedback)
        ):
            graded.add(OffsetRef(record.offset, record.timestamp, id_hash(feedback.task_id)))

    async def before(self, partition: int, paired: Paired) -> dict[Source, float]:
        """Returns the newest grade of each other source that precedes a feedback. Raises Retryable."""
        record, result = paired.record, paired.result
        ref = OffsetRef(record.offset, record.timestamp, id_hash(result.task.task_id))
        found: dict[Source, float] = {}
        for each in self._partitions[partition].before(ref):
            there = (await self._reader.read(topics.FEEDBACK, partition, [each.offset]))[each.offset]
            if there is None:
                log.error("%s[%d]@%d is lost: extend its retention", topics.FEEDBACK, partition, each.offset)
                continue
            feedback = decoded(self._codec, there, Feedback)
            value = grade(feedback)
            ours = feedback.task_id == result.task.task_id and feedback.sample_index in (None, result.sample_index)
            if ours and value is not None and feedback.source is not paired.feedback.source:
                found.setdefault(feedback.source, value)
        return found


def _is_part(feedback: Feedback) -> bool:
    """Returns true if the grade in feedback with its result is a part of a reward that comes from another source."""
    if feedback.result is None or feedback.source is feedback.result.task.terms.rl:
        return False
    try:
        scorer = registry.scorer_of(feedback.result.task)
    except RewardError:
        return False  # the dead letters of the task and its result report the error
    return isinstance(scorer, GradingJudge) and feedback.source in scorer.graders
