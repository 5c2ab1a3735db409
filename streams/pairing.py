"""Feedback that names a task and no more, paired with the results that it speaks of. Used by scoring and hinting.

- Feedback on a sample speaks of the first result of that sample in log order, feedback on the whole task of the first
  result of every sample; of results appended at most the horizon before or after it.
- A pair comes out when the later of the two is read, and again when one is read again: what is made of it must have
  the same id each time.
- Feedback for which no result came within the horizon is handed out once it is certain that none can come any more.
"""

import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from schemas import topics
from schemas.codec import Codec, DecodeError
from schemas.records import Feedback, Result
from streams.intake import KeyMismatch, decoded
from streams.log_reader import KafkaLogReader, LogReader
from streams.processor import Change, LogRecord
from streams.recent import Fact, Recent, task_hash
from tentalis import rewards
from tentalis.config import Settings
from tentalis.rewards import RewardError

log = logging.getLogger(__name__)

TABLE = "recent"
HORIZON_MS = 3_600_000
SLACK_MS = 10_000
"""How far the clocks of two brokers, and the age of the last fetch of an idle topic, may be apart."""
REMEMBERED = 10_000
MOST_BYTES = 64 * 2**20


class BatchTooLarge(Exception):
    """The results that a batch speaks of do not fit into memory together: its records are taken one by one."""


@dataclass(frozen=True, slots=True)
class Paired:
    """Feedback with the result it speaks of (in `feedback.result`), and the record that the feedback came in."""

    record: LogRecord
    feedback: Feedback

    @property
    def result(self) -> Result:
        """The result."""
        assert self.feedback.result is not None
        return self.feedback.result


@dataclass(frozen=True, slots=True)
class _About:
    """What is remembered of a result that was read."""

    task_id: str
    sample_index: int


class Pairing:
    """The recent results and the waiting feedback of the partitions of one application.

    Args:
        reader: reads results and feedback again.
        horizon_ms: see the module's text.
    """

    def __init__(self, codec: Codec, reader: LogReader, horizon_ms: int = HORIZON_MS) -> None:
        self._codec = codec
        self._reader = reader
        self._horizon = horizon_ms
        self._partitions: dict[int, Recent] = {}
        self._time = 0
        self._about: OrderedDict[tuple[int, int], _About | None] = OrderedDict()

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """Takes the state of a partition over. Raises ValueError for an entry of somebody else's."""
        recent = self._partitions[partition] = Recent(self._horizon)
        recent.restore(entries)
        self._time = max(self._time, recent.newest)

    def revoke(self, partition: int) -> None:
        """Gives the state of a partition up."""
        self._partitions.pop(partition, None)

    def changes(self, partition: int) -> list[list[Change]]:
        """What is to be written after a batch."""
        return self._partitions[partition].take_changes()

    # --- input --------------------------------------------------------------------------------------------------------

    async def with_results(self, partition: int, records: Sequence[LogRecord]) -> list[Paired]:
        """Takes a batch of results in: the waiting feedback that they belong to."""
        recent, paired, size = self._partitions[partition], list[Paired](), 0
        for record in records:
            self._time = max(self._time, record.timestamp)
            recent.read_results(record.timestamp)
            if record.key is None or record.tombstone:
                continue
            fact = Fact(record.offset, record.timestamp, task_hash(record.key))
            recent.add_result(fact)
            waiting = recent.feedback_for(fact)
            result = self._result(record) if waiting else None
            if result is None:
                continue
            for other in waiting:
                if await self._is_first(recent, partition, other, fact, result):
                    paired += await self._with_feedback(partition, other, result)
                    size = _bounded(size + len(record.value), records)
        return paired

    async def with_feedback(
        self, partition: int, record: LogRecord, feedback: Feedback, batch: Sequence[LogRecord]
    ) -> tuple[list[Paired], bool]:
        """Takes feedback without its result in: its pairs so far, and whether it is too late for any.

        Args:
            batch: the batch that the record is of.
        """
        recent = self._partitions[partition]
        fact = Fact(record.offset, record.timestamp, task_hash(feedback.task_id))
        offsets = [each.offset for each in recent.results_for(fact)]
        found: dict[int, Result] = {}
        size = 0
        for again in (await self._reader.read(topics.RESULTS, partition, offsets)).values():
            result = self._result(again)
            if result is not None and _speaks_of(feedback, result.task.task_id, result.sample_index):
                found.setdefault(result.sample_index, result)
                size = _bounded(size + len(again.value), batch)
        everything = next(iter(found.values())).task.n_samples if found else 1
        answered = len(found) == (everything if feedback.sample_index is None else 1)
        overdue = recent.add_feedback(fact, answered=answered)
        return [_paired(record, feedback, result) for result in found.values()], overdue and not found

    def passed_feedback(self, partition: int, record: LogRecord) -> None:
        """A record of the feedback topic was read, whatever it is."""
        self._time = max(self._time, record.timestamp)
        self._partitions[partition].read_feedback(record.timestamp)

    # --- time ---------------------------------------------------------------------------------------------------------

    def due(self, partition: int, at_end: Collection[str]) -> bool:
        """Whether there is feedback to give up, or results to forget.

        A topic of which everything was read can bring nothing older than what was read elsewhere: its time is the
        newest append time known, less SLACK_MS. So a partition without input needs no clock but the log's.

        Args:
            at_end: topics of which everything in this partition is processed.
        """
        recent, time = self._partitions[partition], self._time - min(SLACK_MS, self._horizon)
        if topics.RESULTS in at_end:
            recent.read_results(time)
        if topics.FEEDBACK in at_end:
            recent.read_feedback(time)
        return recent.overdue

    def dispose(self, partition: int) -> list[Fact]:
        """The feedback that waits no more; to be called before `changes`."""
        return self._partitions[partition].dispose()

    async def unanswered(self, partition: int, gone: Sequence[Fact]) -> list[tuple[LogRecord, Feedback]]:
        """Those of the feedback disposed of for which no result came; to be called before `changes`."""
        recent, found = self._partitions[partition], []
        for fact in gone:
            for record, feedback in await self._feedback(partition, fact):
                known = await self._known(partition, recent.results_for(fact))
                if not any(about and _speaks_of(feedback, about.task_id, about.sample_index) for about in known):
                    found.append((record, feedback))
        return found

    # --- reading again ------------------------------------------------------------------------------------------------

    async def _is_first(self, recent: Recent, partition: int, feedback: Fact, fact: Fact, result: Result) -> bool:
        earlier = [each for each in recent.results_for(feedback) if each.offset < fact.offset]
        this = _About(result.task.task_id, result.sample_index)
        return this not in await self._known(partition, earlier)

    async def _known(self, partition: int, facts: Sequence[Fact]) -> list[_About | None]:
        places = [(partition, fact.offset) for fact in facts]
        missing = [offset for _, offset in places if (partition, offset) not in self._about]
        read = await self._reader.read(topics.RESULTS, partition, missing)
        for offset in missing:
            if offset in read:
                self._result(read[offset])
        known = [self._about.get(place) for place in places]
        while len(self._about) > REMEMBERED:
            self._about.popitem(last=False)
        return known

    def _result(self, record: LogRecord) -> Result | None:
        """The result in a record, None if there is none: its dead letter is scoring's."""
        about, result = None, None
        try:
            result = decoded(self._codec, record, Result)
            rewards.check_environment(result.task.environment)
            about = _About(result.task.task_id, result.sample_index)
        except (DecodeError, KeyMismatch, RewardError) as error:
            log.debug("%s is no result for feedback to speak of: %s", record, error)
            result = None
        self._about[record.partition, record.offset] = about
        return result

    async def _with_feedback(self, partition: int, fact: Fact, result: Result) -> list[Paired]:
        return [
            _paired(record, feedback, result)
            for record, feedback in await self._feedback(partition, fact)
            if _speaks_of(feedback, result.task.task_id, result.sample_index)
        ]

    async def _feedback(self, partition: int, fact: Fact) -> list[tuple[LogRecord, Feedback]]:
        """The feedback at a fact; nothing if the log has lost it."""
        record = (await self._reader.read(topics.FEEDBACK, partition, [fact.offset])).get(fact.offset)
        if record is None:
            log.error(
                "%s[%d]@%d is gone from the log before its horizon was over: keep the topic for longer",
                topics.FEEDBACK,
                partition,
                fact.offset,
            )
            return []
        return [(record, decoded(self._codec, record, Feedback))]


def _speaks_of(feedback: Feedback, task_id: str, sample_index: int) -> bool:
    return feedback.task_id == task_id and feedback.sample_index in (None, sample_index)


def _paired(record: LogRecord, feedback: Feedback, result: Result) -> Paired:
    return Paired(record, feedback.model_copy(update={"result": result, "sample_index": result.sample_index}))


def _bounded(size: int, batch: Sequence[LogRecord]) -> int:
    if size > MOST_BYTES and len(batch) > 1:
        raise BatchTooLarge(f"the results that a batch of {len(batch)} speaks of take more than {MOST_BYTES:,} bytes")
    return size


def make_pairing(settings: Settings, codec: Codec, horizon_ms: int) -> Pairing | None:
    """The pairing of a process, None for a horizon of 0."""
    return Pairing(codec, KafkaLogReader(settings), horizon_ms) if horizon_ms else None
