"""Reads the dead-letter topics and acts on letters: replays them to the topic they were on, or marks them as dropped.

`tentalis.dlq.records` defines letters and marks, and which letters may be replayed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from confluent_kafka import KafkaError, Message, Producer

from schemas import topics
from schemas.place import RecordPlace
from tentalis.dlq.records import (
    Case,
    LetterHistory,
    LetterMark,
    LetterState,
    RawRecord,
    ReplayRefusal,
    mark_headers,
    newer_under_key,
    own_headers,
    refusal,
    replay_partition,
)
from tentalis.kafka.admin import KafkaAdmin
from tentalis.kafka.config import producer_config
from tentalis.kafka.consumer import headers_in, messages_to_end
from tentalis.kafka.errors import DeliveryFailed, unconfirmed
from tentalis.service.settings import Settings

CHUNK_RECORDS = 500
"""Letters claimed at a time: the most that can be in doubt after a crash."""
CHUNK_BYTES = 64 * 2**20
"""Bytes of values held at a time; a larger letter is sent alone."""
CONFIRM_TIMEOUT_S = 130.0
"""Longer than the producer's delivery timeout, after which each record has a delivery report."""


class ActionResult(StrEnum):
    """The result of an action on a letter."""

    PLANNED = "planned"
    DONE = "done"
    REFUSED = "refused"
    TAKEN = "taken"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ActionOutcome:
    """One letter and the result of an action on it; `to` is the new position of its record."""

    case: Case
    result: ActionResult
    reason: str = ""
    to: RecordPlace | None = None
    drift: bool = False


@dataclass(slots=True)
class _Delivery:
    offset: int | None = None
    error: KafkaError | None = None


class DeadLetterActions:
    """The dead-letter topics of a broker, read to their current end.

    Args:
        names: the dead-letter topics.
        clock: seconds since the epoch, stamped on marks.
    Raises:
        NoSuchTopic: the broker does not have one of them.
    """

    def __init__(self, settings: Settings, names: Iterable[str], clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._history = LetterHistory()
        self._next: dict[str, dict[int, int]] = {name: {} for name in names}
        self._read_new(self._next)

    def _read_new(self, names: Iterable[str]) -> None:
        """Reads the records written since the last call."""
        for name in names:
            begin = self._next[name]
            for message in messages_to_end(self._settings, name, start=begin):
                raw = raw_of(message)
                begin[raw.partition] = raw.offset + 1
                self._history.add(raw)

    def cases(self) -> list[Case]:
        """Every letter, oldest failure first."""
        return self._history.cases()

    def raw(self, cases: Iterable[Case]) -> dict[RecordPlace, RawRecord]:
        """The letters byte for byte, by place; one that retention has deleted since is missing."""
        places = {case.letter.place for case in cases}
        found: dict[RecordPlace, RawRecord] = {}
        for topic in {place.topic for place in places}:
            offsets: dict[int, list[int]] = defaultdict(list)
            for place in places:
                if place.topic == topic:
                    offsets[place.partition].append(place.offset)
            start = {p: min(numbers) for p, numbers in offsets.items()}
            end = {p: max(numbers) + 1 for p, numbers in offsets.items()}
            for message in messages_to_end(self._settings, topic, start=start, end=end):
                place = RecordPlace(topic, int(message.partition()), int(message.offset()))
                if place in places:
                    found[place] = raw_of(message)
        return found

    def plan(self, cases: Sequence[Case], *, again: bool) -> list[ActionOutcome]:
        """Plans a replay: for each letter its target, or the reason why it is not replayed."""
        partitions = KafkaAdmin(self._settings).partitions()
        newer = newer_under_key(cases, self._later(cases, partitions))
        reasons = [refusal(case, topics.table(), partitions, newer, again=again) for case in cases]
        return [_planned(case, reason) for case, reason in zip(cases, reasons, strict=True)]

    def _later(self, cases: Sequence[Case], partitions: Mapping[str, int]) -> Iterator[RawRecord]:
        """The records from the letters' original positions on, of those original topics that are compacted."""
        start: dict[str, dict[int, int]] = defaultdict(dict)
        table = topics.table().topics
        for origin in (case.letter.origin for case in cases):
            topic_config = None if origin is None else table.get(origin.topic)
            if topic_config is None or origin is None or "compact" not in topic_config.config.get("cleanup.policy", ""):
                continue
            if origin.partition < partitions.get(origin.topic, 0):
                begin = start[origin.topic]
                begin[origin.partition] = min(begin.get(origin.partition, origin.offset), origin.offset)
        for topic, begin in start.items():
            end = dict.fromkeys(begin, 1 << 62)
            yield from map(raw_of, messages_to_end(self._settings, topic, start=begin, end=end))

    def replay(self, planned: Sequence[ActionOutcome], reason: str = "") -> Iterator[ActionOutcome]:
        """Carries out a plan: claims each letter, sends its record to its partition, waits for both to be confirmed.

        A letter that another user claimed first is TAKEN. One whose record was not confirmed is FAILED and stays
        claimed: it may have been written anyway.

        Raises:
            DeliveryFailed: a mark was not confirmed; letters claimed so far stay in doubt.
        """
        todo = [done.case for done in planned if done.result is ActionResult.PLANNED]
        yield from (done for done in planned if done.result is not ActionResult.PLANNED)
        producer, partitions = Producer(producer_config(self._settings)), KafkaAdmin(self._settings).partitions()
        for chunk in _chunks(todo):
            yield from self._replay(producer, chunk, partitions, reason)

    def _replay(
        self, producer: Producer, cases: Sequence[Case], partitions: Mapping[str, int], reason: str
    ) -> Iterator[ActionOutcome]:
        raws = self.raw(cases)
        deleted = [case for case in cases if case.letter.place not in raws]
        yield from (
            ActionOutcome(case, ActionResult.FAILED, "it was deleted by retention in the meantime") for case in deleted
        )
        claimed, lost = self._mark(
            producer, [case for case in cases if case not in deleted], LetterState.REPLAYING, reason
        )
        yield from lost
        sent: list[tuple[Case, RecordPlace, _Delivery]] = []
        for case in claimed:
            raw, origin = raws[case.letter.place], case.letter.origin
            assert origin is not None  # the plan refuses letters without an origin
            partition = origin.partition
            if origin.topic in topics.table().co_partitioned:
                partition = replay_partition(raw, partitions[origin.topic])
            record = replace(raw, topic=origin.topic, partition=partition, headers=own_headers(raw.headers))
            sent.append((case, origin._replace(partition=partition), _send(producer, record)))
        producer.flush(CONFIRM_TIMEOUT_S)
        arrived = {
            case.letter.id: RecordPlace(origin_place.topic, origin_place.partition, delivery.offset)
            for case, origin_place, delivery in sent
            if delivery.offset is not None
        }
        self._mark(
            producer, [case for case in claimed if case.letter.id in arrived], LetterState.REPLAYED, reason, arrived
        )
        for case, _, delivery_report in sent:
            if case.letter.id in arrived:
                yield ActionOutcome(case, ActionResult.DONE, to=arrived[case.letter.id])
            else:
                error = (
                    delivery_report.error.str()
                    if delivery_report.error is not None
                    else f"no answer within {CONFIRM_TIMEOUT_S:g} s"
                )
                yield ActionOutcome(
                    case, ActionResult.FAILED, f"not confirmed: {error}; it may have been written anyway"
                )

    def drop(self, cases: Sequence[Case], reason: str) -> list[ActionOutcome]:
        """Marks letters as dropped. Their bytes stay until the end of their retention. Raises DeliveryFailed."""
        open_cases = [case for case in cases if case.state in (LetterState.OPEN, LetterState.REPLAYING)]
        others = [case for case in cases if case.state not in (LetterState.OPEN, LetterState.REPLAYING)]
        dropped, lost = self._mark(Producer(producer_config(self._settings)), open_cases, LetterState.DROPPED, reason)
        return [
            *(ActionOutcome(case, ActionResult.REFUSED, f"already {case.state}") for case in others),
            *lost,
            *(ActionOutcome(case, ActionResult.DONE) for case in dropped),
        ]

    def _mark(
        self,
        producer: Producer,
        cases: Sequence[Case],
        state: LetterState,
        reason: str,
        arrived: Mapping[str, RecordPlace] | None = None,
    ) -> tuple[list[Case], list[ActionOutcome]]:
        """Appends a mark to each letter. Returns the letters whose mark counts, and those that another user marked
        first."""
        marked_at = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        sent = []
        for case in cases:
            to, origin = (arrived or {}).get(case.letter.id), case.letter.origin
            same = to is None or origin is None or to.partition == origin.partition
            headers = mark_headers(
                state,
                after=case.last_mark_offset,
                at=marked_at,
                reason=reason,
                replayed_to=None if to is None else to.offset,
                replayed_partition=None if to is None or same else to.partition,
            )
            place = case.letter.place
            mark = RawRecord(place.topic, place.partition, 0, 0, case.letter.id.encode(), None, tuple(headers))
            sent.append((case, _send(producer, mark)))
        producer.flush(CONFIRM_TIMEOUT_S)
        for case, delivery in sent:
            if delivery.offset is None:
                error = delivery.error.str() if delivery.error is not None else "no answer"
                raise DeliveryFailed(f"the mark `{state}` of the letter {case.letter.place} was not confirmed: {error}")
        self._read_new({case.letter.place.topic for case in cases})
        marks = {case.letter.id: case.marks for case in self.cases()}
        marked: list[Case] = []
        lost: list[ActionOutcome] = []
        for case, delivery in sent:
            last: LetterMark = marks[case.letter.id][-1]
            if last.offset == delivery.offset:
                marked.append(case)
            else:
                lost.append(
                    ActionOutcome(case, ActionResult.TAKEN, f"another user marked it `{last.state}` at {last.at}")
                )
        return marked, lost


def raw_of(message: Message) -> RawRecord:
    """Copies a message byte for byte."""
    return RawRecord(
        str(message.topic()),
        int(message.partition()),
        int(message.offset()),
        int(message.timestamp()[1]),
        message.key(),
        message.value(),
        headers_in(message),
    )


def _chunks(cases: Sequence[Case]) -> Iterator[list[Case]]:
    chunk: list[Case] = []
    chunk_bytes = 0
    for case in cases:
        size = case.letter.size or 0
        if chunk and (len(chunk) == CHUNK_RECORDS or chunk_bytes + size > CHUNK_BYTES):
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append(case)
        chunk_bytes += size
    if chunk:
        yield chunk


def _planned(case: Case, refused: ReplayRefusal | None) -> ActionOutcome:
    if refused is None:
        return ActionOutcome(case, ActionResult.PLANNED, to=case.letter.origin)
    return ActionOutcome(case, ActionResult.REFUSED, refused.reason, drift=refused.drift)


def _send(producer: Producer, record: RawRecord) -> _Delivery:
    """Queues a record for its partition; the returned object holds the broker's answer after a flush."""
    delivery = _Delivery()

    def delivered(error: KafkaError | None, message: Message) -> None:
        delivery.error = unconfirmed(error, message)
        if delivery.error is None:
            delivery.offset = int(message.offset())

    arguments: dict[str, Any] = {"partition": record.partition, "on_delivery": delivered}
    while True:
        try:
            producer.produce(record.topic, record.value, record.key, headers=list(record.headers), **arguments)
        except BufferError:
            producer.poll(0.1)
        else:
            return delivery
