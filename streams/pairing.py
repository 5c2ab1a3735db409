"""Feedback that names a task and no more, paired with the results that it speaks of. Used by scoring and hinting.

- Feedback on a sample speaks of the first result of that sample in log order, feedback on the whole task of the first
  result of every sample; of results appended at most the horizon before or after it.
- A pair comes out when the later of the two is read, and again when one is read again: what is made of it must have
  the same id each time.
- Feedback for which no result came within the horizon is handed out once it is certain that none can come any more.
"""

import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from schemas import topics
from schemas.codec import Codec
from schemas.records import Feedback, Result
from streams.intake import INVALID, decoded
from streams.log_reader import KafkaLogReader, LogReader
from streams.processor import Change, LogRecord
from streams.recent import Fact, Recent, task_hash
from tentalis import metrics, rewards
from tentalis.config import Settings
from tentalis.metrics import Exporter

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


Said = tuple[LogRecord, Feedback]
"""Feedback and the record it came in."""


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
        while len(self._about) > REMEMBERED:
            self._about.popitem(last=False)
        return self._partitions[partition].take_changes()

    @property
    def waiting(self) -> int:
        """Feedback that waits for a result."""
        return sum(recent.waiting for recent in self._partitions.values())

    @property
    def remembered(self) -> int:
        """Results that feedback can still be paired with."""
        return sum(recent.results for recent in self._partitions.values())

    # --- input --------------------------------------------------------------------------------------------------------

    async def with_results(self, partition: int, records: Sequence[LogRecord]) -> list[Paired]:
        """Takes a batch of results in: the waiting feedback that they belong to."""
        recent, paired, size = self._partitions[partition], list[Paired](), 0
        facts = {
            record.offset: Fact(record.offset, record.timestamp, task_hash(record.key))
            for record in records
            if record.key is not None and not record.tombstone
        }
        waiting = {offset: recent.feedback_for(fact) for offset, fact in facts.items()}
        heard = await self._heard(partition, [other for others in waiting.values() for other in others], records)
        for record in records:
            self._time = max(self._time, record.timestamp)
            recent.read_results(record.timestamp)
            fact = facts.get(record.offset)
            if fact is None:
                continue
            recent.add_result(fact)
            result = self._result(record) if waiting[record.offset] else None
            if result is None:
                continue
            for other in waiting[record.offset]:
                if other.offset in heard and await self._is_first(recent, partition, other, fact, result):
                    said, feedback = heard[other.offset]
                    if _speaks_of(feedback, result.task.task_id, result.sample_index):
                        paired.append(_paired(said, feedback, result))
                        size = _bounded(size + len(record.value), records)
        return paired

    async def with_feedback(
        self, partition: int, said: Sequence[Said], batch: Sequence[LogRecord]
    ) -> tuple[list[Paired], list[Said]]:
        """Takes a batch of feedback in, with its results or without: the pairs so far, and what is too late for any.

        Args:
            batch: all of its records, also those in which there is no feedback.
        """
        recent = self._partitions[partition]
        facts = {
            record.offset: Fact(record.offset, record.timestamp, task_hash(feedback.task_id))
            for record, feedback in said
            if feedback.result is None
        }
        found = await self._found(partition, [(facts[r.offset], f) for r, f in said if r.offset in facts], batch)
        pairs, too_late = list[Paired](), list[Said]()
        for record, feedback in said:
            fact = facts.get(record.offset)
            if fact is None:
                pairs.append(Paired(record, feedback))
                continue
            results = found[record.offset]
            everything = next(iter(results.values())).task.n_samples if results else 1
            answered = len(results) == (everything if feedback.sample_index is None else 1)
            overdue = recent.add_feedback(fact, answered=answered)
            pairs += [_paired(record, feedback, result) for result in results.values()]
            if overdue and not results:
                too_late.append((record, feedback))
        return pairs, too_late

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

    async def unanswered(self, partition: int, gone: Sequence[Fact]) -> list[Said]:
        """Those of the feedback disposed of for which no result came; to be called before `changes`."""
        recent, found = self._partitions[partition], list[Said]()
        heard = await self._heard(partition, gone)
        for fact in gone:
            known = await self._known(partition, recent.results_for(fact))
            said = heard.get(fact.offset)
            if said is not None and not any(
                about and _speaks_of(said[1], about.task_id, about.sample_index) for about in known
            ):
                found.append(said)
        return found

    # --- reading again ------------------------------------------------------------------------------------------------

    async def _is_first(self, recent: Recent, partition: int, feedback: Fact, fact: Fact, result: Result) -> bool:
        earlier = [each for each in recent.results_for(feedback) if each.offset < fact.offset]
        this = _About(result.task.task_id, result.sample_index)
        return this not in await self._known(partition, earlier)

    async def _known(self, partition: int, facts: Sequence[Fact]) -> list[_About | None]:
        places = [(partition, fact.offset) for fact in facts]
        missing = [offset for _, offset in places if (partition, offset) not in self._about]
        async for record in self._sweep(topics.RESULTS, partition, missing):
            self._result(record)
        return [self._about.get(place) for place in places]

    def _result(self, record: LogRecord) -> Result | None:
        """The result in a record, None if there is none: its dead letter is scoring's."""
        about, result = None, None
        try:
            result = decoded(self._codec, record, Result)
            rewards.check_environment(result.task.environment)
            about = _About(result.task.task_id, result.sample_index)
        except INVALID as error:
            log.debug("%s is no result for feedback to speak of: %s", record, error)
            result = None
        self._about[record.partition, record.offset] = about
        return result

    async def _found(
        self, partition: int, bare: Sequence[tuple[Fact, Feedback]], batch: Sequence[LogRecord]
    ) -> dict[int, dict[int, Result]]:
        """By offset of the feedback and sample, the first results that feedback speaks of."""
        recent, size = self._partitions[partition], 0
        found: dict[int, dict[int, Result]] = {fact.offset: {} for fact, _ in bare}
        asking: dict[int, list[tuple[Fact, Feedback]]] = {}
        for fact, feedback in bare:
            for each in recent.results_for(fact):
                asking.setdefault(each.offset, []).append((fact, feedback))
        async for record in self._sweep(topics.RESULTS, partition, asking):
            result = self._result(record)
            if result is None:
                continue
            for fact, feedback in asking[record.offset]:
                results = found[fact.offset]
                if result.sample_index not in results and _speaks_of(
                    feedback, result.task.task_id, result.sample_index
                ):
                    results[result.sample_index] = result
                    size = _bounded(size + len(record.value), batch)
        return found

    async def _heard(self, partition: int, facts: Collection[Fact], batch: Sequence[LogRecord] = ()) -> dict[int, Said]:
        """By offset, the feedback at these facts, without what the log has lost. What is to be known of its results is
        read along with it."""
        heard: dict[int, Said] = {}
        size = 0
        async for record in self._sweep(topics.FEEDBACK, partition, [fact.offset for fact in facts]):
            heard[record.offset] = record, decoded(self._codec, record, Feedback)
            size = _bounded(size + len(record.value), batch)
        for offset in {fact.offset for fact in facts} - heard.keys():
            log.error(
                "%s[%d]@%d is gone from the log before its horizon was over: keep the topic for longer",
                topics.FEEDBACK,
                partition,
                offset,
            )
        recent = self._partitions[partition]
        await self._known(partition, [each for fact in set(facts) for each in recent.results_for(fact)])
        return heard

    async def _sweep(self, topic: str, partition: int, offsets: Iterable[int]) -> AsyncIterator[LogRecord]:
        """The records at these offsets in their order; one that is gone is left out."""
        left = sorted(set(offsets))
        while left:
            read = await self._reader.read(topic, partition, left)
            for record in read.values():
                if record is not None:
                    yield record
            left = [offset for offset in left if offset not in read]


def measure_pairing(pairing: Pairing | None, exporter: Exporter) -> None:
    """The metrics of pairing, also where it is switched off."""
    exporter.read(metrics.PAIRING_WAITING, lambda: 0 if pairing is None else pairing.waiting)
    exporter.read(metrics.PAIRING_REMEMBERED, lambda: 0 if pairing is None else pairing.remembered)


def said_in(
    codec: Codec,
    pairing: "Pairing | None",
    partition: int,
    records: Sequence[LogRecord],
    refuse: Callable[[LogRecord, Exception], None],
) -> list[Said]:
    """The feedback of a batch; `refuse` is told of what is none."""
    said: list[Said] = []
    for record in records:
        if pairing is not None:
            pairing.passed_feedback(partition, record)
        try:
            feedback = decoded(codec, record, Feedback)
            if feedback.result is not None:
                rewards.check_environment(feedback.result.task.environment)
            said.append((record, feedback))
        except INVALID as error:
            refuse(record, error)
    return said


def carried(said: Iterable[Said]) -> list[Paired]:
    """The feedback that has its result with it."""
    return [Paired(record, feedback) for record, feedback in said if feedback.result is not None]


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
