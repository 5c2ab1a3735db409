"""Pairs feedback that names only a task with its results. Used by scoring and hinting.

- Feedback on a sample belongs to the first result of that sample in log order; feedback on the whole task belongs to
  the first result of every sample. Only results appended at most the horizon before or after the feedback count.
- A pair is returned when the later of the two is read, and again if one is read again: the records made from it must
  have the same id each time.
- Feedback for which no result came within the horizon is returned once it is certain that none can come any more.
"""

import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from schemas import topics
from schemas.records import Feedback, Result
from schemas.wire.codec import Codec
from streams.fold import metrics
from streams.fold.hashing import id_hash
from streams.fold.recent_results import OffsetRef, RecentResults
from streams.runtime.decoding import INVALID, decoded
from streams.runtime.log_reader import KafkaLogReader, LogReader
from streams.runtime.processor import Change, LogRecord
from tentalis.rewards import registry
from tentalis.service.metrics import Exporter
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)

TABLE = "recent"
HORIZON_MS = 3_600_000
SLACK_MS = 10_000
"""Tolerance for the clock difference of two brokers, and for the age of the last fetch of an idle topic."""
REMEMBERED = 10_000
MOST_BYTES = 64 * 2**20


class BatchTooLarge(Exception):
    """The results for a batch do not fit into memory together: its records are processed one by one."""


@dataclass(frozen=True, slots=True)
class Paired:
    """Feedback with its result (in `feedback.result`), and the record of the feedback."""

    record: LogRecord
    feedback: Feedback

    @property
    def result(self) -> Result:
        """The result of the pair."""
        assert self.feedback.result is not None
        return self.feedback.result


@dataclass(frozen=True, slots=True)
class _About:
    """Identity of a result that was read."""

    task_id: str
    sample_index: int


Said = tuple[LogRecord, Feedback]
"""Feedback and its record."""


class Pairing:
    """The recent results and the waiting feedback of the partitions of one application.

    Args:
        reader: reads results and feedback again.
        horizon_ms: see the module docstring.
    """

    def __init__(self, codec: Codec, reader: LogReader, horizon_ms: int = HORIZON_MS) -> None:
        self._codec = codec
        self._reader = reader
        self._horizon = horizon_ms
        self._partitions: dict[int, RecentResults] = {}
        self._time = 0
        self._about: OrderedDict[tuple[int, int], _About | None] = OrderedDict()

    def restore(self, partition: int, entries: Mapping[str, bytes]) -> None:
        """Restores the state of a partition. Raises ValueError for an entry that this code did not write."""
        recent = self._partitions[partition] = RecentResults(self._horizon)
        recent.restore(entries)
        self._time = max(self._time, recent.newest)

    def revoke(self, partition: int) -> None:
        """Drops the state of a partition from memory."""
        self._partitions.pop(partition, None)

    def changes(self, partition: int) -> list[list[Change]]:
        """Returns the state changes to write after a batch."""
        while len(self._about) > REMEMBERED:
            self._about.popitem(last=False)
        return self._partitions[partition].take_changes()

    @property
    def waiting(self) -> int:
        """Number of feedback records that wait for a result."""
        return sum(recent.waiting for recent in self._partitions.values())

    @property
    def remembered(self) -> int:
        """Number of results with which feedback can still be paired."""
        return sum(recent.results for recent in self._partitions.values())

    # --- input --------------------------------------------------------------------------------------------------------

    async def with_results(self, partition: int, records: Sequence[LogRecord]) -> list[Paired]:
        """Adds a batch of results; returns the waiting feedback paired with them."""
        recent, paired, size = self._partitions[partition], list[Paired](), 0
        refs = {
            record.offset: OffsetRef(record.offset, record.timestamp, id_hash(record.key))
            for record in records
            if record.key is not None and not record.tombstone
        }
        waiting = {offset: recent.feedback_for(ref) for offset, ref in refs.items()}
        heard = await self._heard(partition, [other for others in waiting.values() for other in others], records)
        for record in records:
            self._time = max(self._time, record.timestamp)
            recent.read_results(record.timestamp)
            ref = refs.get(record.offset)
            if ref is None:
                continue
            recent.add_result(ref)
            result = self._result(record) if waiting[record.offset] else None
            if result is None:
                continue
            for other in waiting[record.offset]:
                if other.offset in heard and await self._is_first(recent, partition, other, ref, result):
                    said, feedback = heard[other.offset]
                    if _speaks_of(feedback, result.task.task_id, result.sample_index):
                        paired.append(_paired(said, feedback, result))
                        size = _bounded(size + len(record.value), records)
        return paired

    async def with_feedback(
        self, partition: int, said: Sequence[Said], batch: Sequence[LogRecord]
    ) -> tuple[list[Paired], list[Said]]:
        """Adds a batch of feedback, with or without results; returns the pairs so far, and the feedback too late for
        any result.

        Args:
            batch: all records of the batch, including those without feedback.
        """
        recent = self._partitions[partition]
        refs = {
            record.offset: OffsetRef(record.offset, record.timestamp, id_hash(feedback.task_id))
            for record, feedback in said
            if feedback.result is None
        }
        found = await self._found(partition, [(refs[r.offset], f) for r, f in said if r.offset in refs], batch)
        pairs, too_late = list[Paired](), list[Said]()
        for record, feedback in said:
            ref = refs.get(record.offset)
            if ref is None:
                pairs.append(Paired(record, feedback))
                continue
            results = found[record.offset]
            everything = next(iter(results.values())).task.n_samples if results else 1
            answered = len(results) == (everything if feedback.sample_index is None else 1)
            overdue = recent.add_feedback(ref, answered=answered)
            pairs += [_paired(record, feedback, result) for result in results.values()]
            if overdue and not results:
                too_late.append((record, feedback))
        return pairs, too_late

    def passed_feedback(self, partition: int, record: LogRecord) -> None:
        """Moves time to a record of the feedback topic, readable or not."""
        self._time = max(self._time, record.timestamp)
        self._partitions[partition].read_feedback(record.timestamp)

    # --- time ---------------------------------------------------------------------------------------------------------

    def due(self, partition: int, at_end: Collection[str]) -> bool:
        """Returns true if there is feedback to give up or there are results to forget.

        A topic that is read to its end can bring nothing older than what was read elsewhere: its time is the newest
        append time known, less SLACK_MS. So a partition without input needs no clock but the log's.

        Args:
            at_end: topics whose records in this partition are all processed.
        """
        recent, time = self._partitions[partition], self._time - min(SLACK_MS, self._horizon)
        if topics.RESULTS in at_end:
            recent.read_results(time)
        if topics.FEEDBACK in at_end:
            recent.read_feedback(time)
        return recent.overdue

    def dispose(self, partition: int) -> list[OffsetRef]:
        """Removes and returns the feedback that no longer waits. Call it before `changes`."""
        return self._partitions[partition].dispose()

    async def unanswered(self, partition: int, gone: Sequence[OffsetRef]) -> list[Said]:
        """Returns the disposed feedback for which no result came. Call it before `changes`."""
        recent, found = self._partitions[partition], list[Said]()
        heard = await self._heard(partition, gone)
        for ref in gone:
            known = await self._known(partition, recent.results_for(ref))
            said = heard.get(ref.offset)
            if said is not None and not any(
                about and _speaks_of(said[1], about.task_id, about.sample_index) for about in known
            ):
                found.append(said)
        return found

    # --- reading again ------------------------------------------------------------------------------------------------

    async def _is_first(
        self, recent: RecentResults, partition: int, feedback: OffsetRef, ref: OffsetRef, result: Result
    ) -> bool:
        earlier = [each for each in recent.results_for(feedback) if each.offset < ref.offset]
        this = _About(result.task.task_id, result.sample_index)
        return this not in await self._known(partition, earlier)

    async def _known(self, partition: int, refs: Sequence[OffsetRef]) -> list[_About | None]:
        places = [(partition, ref.offset) for ref in refs]
        missing = [offset for _, offset in places if (partition, offset) not in self._about]
        async for record in self._sweep(topics.RESULTS, partition, missing):
            self._result(record)
        return [self._about.get(place) for place in places]

    def _result(self, record: LogRecord) -> Result | None:
        """Returns the result in a record, None if it is invalid: scoring owns its dead letter."""
        about, result = None, None
        try:
            result = decoded(self._codec, record, Result)
            registry.check_environment(result.task.environment)
            about = _About(result.task.task_id, result.sample_index)
        except INVALID as error:
            log.debug("%s is not a valid result and is not paired: %s", record, error)
            result = None
        self._about[record.partition, record.offset] = about
        return result

    async def _found(
        self, partition: int, bare: Sequence[tuple[OffsetRef, Feedback]], batch: Sequence[LogRecord]
    ) -> dict[int, dict[int, Result]]:
        """Returns the first results of each feedback, by offset of the feedback and sample."""
        recent, size = self._partitions[partition], 0
        found: dict[int, dict[int, Result]] = {ref.offset: {} for ref, _ in bare}
        asking: dict[int, list[tuple[OffsetRef, Feedback]]] = {}
        for ref, feedback in bare:
            for each in recent.results_for(ref):
                asking.setdefault(each.offset, []).append((ref, feedback))
        async for record in self._sweep(topics.RESULTS, partition, asking):
            result = self._result(record)
            if result is None:
                continue
            for ref, feedback in asking[record.offset]:
                results = found[ref.offset]
                if result.sample_index not in results and _speaks_of(
                    feedback, result.task.task_id, result.sample_index
                ):
                    results[result.sample_index] = result
                    size = _bounded(size + len(record.value), batch)
        return found

    async def _heard(
        self, partition: int, refs: Collection[OffsetRef], batch: Sequence[LogRecord] = ()
    ) -> dict[int, Said]:
        """Returns the feedback at these references by offset, without records that the log has lost. Also reads the
        identities of its results."""
        heard: dict[int, Said] = {}
        size = 0
        async for record in self._sweep(topics.FEEDBACK, partition, [ref.offset for ref in refs]):
            heard[record.offset] = record, decoded(self._codec, record, Feedback)
            size = _bounded(size + len(record.value), batch)
        for offset in {ref.offset for ref in refs} - heard.keys():
            log.error(
                "%s[%d]@%d is no longer on the log, though within the horizon: extend the topic's retention",
                topics.FEEDBACK,
                partition,
                offset,
            )
        recent = self._partitions[partition]
        await self._known(partition, [each for ref in set(refs) for each in recent.results_for(ref)])
        return heard

    async def _sweep(self, topic: str, partition: int, offsets: Iterable[int]) -> AsyncIterator[LogRecord]:
        """Yields the records at these offsets in order, without records that the log has lost."""
        left = sorted(set(offsets))
        while left:
            read = await self._reader.read(topic, partition, left)
            for record in read.values():
                if record is not None:
                    yield record
            left = [offset for offset in left if offset not in read]


def measure_pairing(pairing: Pairing | None, exporter: Exporter) -> None:
    """Registers the metrics of pairing, even if pairing is switched off."""
    exporter.read(metrics.PAIRING_WAITING, lambda: 0 if pairing is None else pairing.waiting)
    exporter.read(metrics.PAIRING_REMEMBERED, lambda: 0 if pairing is None else pairing.remembered)


def said_in(
    codec: Codec,
    pairing: "Pairing | None",
    partition: int,
    records: Sequence[LogRecord],
    refuse: Callable[[LogRecord, Exception], None],
) -> list[Said]:
    """Returns the feedback of a batch; calls `refuse` for every other record."""
    said: list[Said] = []
    for record in records:
        if pairing is not None:
            pairing.passed_feedback(partition, record)
        try:
            feedback = decoded(codec, record, Feedback)
            if feedback.result is not None:
                registry.check_environment(feedback.result.task.environment)
            said.append((record, feedback))
        except INVALID as error:
            refuse(record, error)
    return said


def carried(said: Iterable[Said]) -> list[Paired]:
    """Returns the feedback that carries its result."""
    return [Paired(record, feedback) for record, feedback in said if feedback.result is not None]


def _speaks_of(feedback: Feedback, task_id: str, sample_index: int) -> bool:
    return feedback.task_id == task_id and feedback.sample_index in (None, sample_index)


def _paired(record: LogRecord, feedback: Feedback, result: Result) -> Paired:
    return Paired(record, feedback.model_copy(update={"result": result, "sample_index": result.sample_index}))


def _bounded(size: int, batch: Sequence[LogRecord]) -> int:
    if size > MOST_BYTES and len(batch) > 1:
        raise BatchTooLarge(f"the results for a batch of {len(batch)} records take more than {MOST_BYTES:,} bytes")
    return size


def make_pairing(settings: Settings, codec: Codec, horizon_ms: int) -> Pairing | None:
    """Builds the pairing of a process; None for a horizon of 0."""
    return Pairing(codec, KafkaLogReader(settings), horizon_ms) if horizon_ms else None
