"""Reads the dead-letter topics and acts on letters: replays them to where their records lay, or marks them as dropped.

`tentalis.dlq.letters` says what a letter and a mark are, and what may be replayed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from confluent_kafka import KafkaError, Message, Producer

from schemas import topics
from schemas.place import Place
from tentalis.admin import KafkaAdmin
from tentalis.config import Settings
from tentalis.dlq.letters import (
    Case,
    Ledger,
    Mark,
    Raw,
    Refusal,
    State,
    mark_headers,
    newer_under_key,
    own_headers,
    refusal,
)
from tentalis.kafka import DeliveryFailed, headers_in, messages_to_end, producer_config, unconfirmed

CHUNK = 500
"""Letters claimed at a time: so many at most are in doubt after a crash."""
CHUNK_BYTES = 64 * 2**20
"""Bytes of values held at a time; a letter that is larger goes alone."""
CONFIRM_S = 130.0
"""Longer than the producer's delivery timeout, after which each record has its answer."""


class Result(StrEnum):
    """What came of acting on a letter."""

    PLANNED = "planned"
    DONE = "done"
    REFUSED = "refused"
    TAKEN = "taken"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Done:
    """One letter and what came of acting on it; `to` is where its record lies now."""

    case: Case
    result: Result
    reason: str = ""
    to: Place | None = None
    drift: bool = False


@dataclass(slots=True)
class _Sent:
    offset: int | None = None
    error: KafkaError | None = None


class Letterbox:
    """The dead-letter topics of a broker, read up to where they end now.

    Args:
        names: of dead-letter topics.
        clock: seconds since the epoch, stamped on marks.
    Raises:
        NoSuchTopic: the broker does not have one of them.
    """

    def __init__(self, settings: Settings, names: Iterable[str], clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self._ledger = Ledger()
        self._next: dict[str, dict[int, int]] = {name: {} for name in names}
        self._refresh(self._next)

    def _refresh(self, names: Iterable[str]) -> None:
        """Reads what was written since."""
        for name in names:
            begin = self._next[name]
            for message in messages_to_end(self._settings, name, start=begin):
                raw = raw_of(message)
                begin[raw.partition] = raw.offset + 1
                self._ledger.add(raw)

    def cases(self) -> list[Case]:
        """Every letter, oldest failure first."""
        return self._ledger.cases()

    def raw(self, cases: Iterable[Case]) -> dict[Place, Raw]:
        """Letters byte for byte, by their place; one that reached its retention since is missing."""
        places = {case.letter.place for case in cases}
        found: dict[Place, Raw] = {}
        for topic in {place.topic for place in places}:
            offsets: dict[int, list[int]] = defaultdict(list)
            for place in places:
                if place.topic == topic:
                    offsets[place.partition].append(place.offset)
            start = {p: min(some) for p, some in offsets.items()}
            end = {p: max(some) + 1 for p, some in offsets.items()}
            for message in messages_to_end(self._settings, topic, start=start, end=end):
                place = Place(topic, int(message.partition()), int(message.offset()))
                if place in places:
                    found[place] = raw_of(message)
        return found

    def plan(self, cases: Sequence[Case], *, again: bool) -> list[Done]:
        """Which of the letters would be replayed, and why the others not."""
        partitions = KafkaAdmin(self._settings).partitions()
        newer = newer_under_key(cases, self._later(cases, partitions))
        reasons = [refusal(case, topics.table(), partitions, newer, again=again) for case in cases]
        return [_planned(case, reason) for case, reason in zip(cases, reasons, strict=True)]

    def _later(self, cases: Sequence[Case], partitions: Mapping[str, int]) -> Iterator[Raw]:
        """The records behind the letters' own on the compacted ones of their topics."""
        start: dict[str, dict[int, int]] = defaultdict(dict)
        table = topics.table().topics
        for origin in (case.letter.origin for case in cases):
            known = None if origin is None else table.get(origin.topic)
            if known is None or origin is None or "compact" not in known.config.get("cleanup.policy", ""):
                continue
            if origin.partition < partitions.get(origin.topic, 0):
                begin = start[origin.topic]
                begin[origin.partition] = min(begin.get(origin.partition, origin.offset), origin.offset)
        for topic, begin in start.items():
            end = dict.fromkeys(begin, 1 << 62)
            yield from map(raw_of, messages_to_end(self._settings, topic, start=begin, end=end))

    def replay(self, planned: Sequence[Done], reason: str = "") -> Iterator[Done]:
        """Carries a plan out: claims each letter, sends its record to where it lay, waits for both to be confirmed.

        A letter whose claim comes second to somebody else's is TAKEN. One whose record was not confirmed is FAILED and
        stays claimed: it may have arrived all the same.

        Raises:
            DeliveryFailed: a mark was not confirmed; letters claimed so far stay in doubt.
        """
        todo = [done.case for done in planned if done.result is Result.PLANNED]
        yield from (done for done in planned if done.result is not Result.PLANNED)
        producer = Producer(producer_config(self._settings))
        for chunk in _chunks(todo):
            yield from self._replay(producer, chunk, reason)

    def _replay(self, producer: Producer, cases: Sequence[Case], reason: str) -> Iterator[Done]:
        raws = self.raw(cases)
        gone = [case for case in cases if case.letter.place not in raws]
        yield from (Done(case, Result.FAILED, "it reached its retention meanwhile") for case in gone)
        claimed, lost = self._mark(producer, [case for case in cases if case not in gone], State.REPLAYING, reason)
        yield from lost
        sent: list[tuple[Case, Place, _Sent]] = []
        for case in claimed:
            raw, origin = raws[case.letter.place], case.letter.origin
            assert origin is not None  # the plan has refused it
            record = replace(raw, topic=origin.topic, partition=origin.partition, headers=own_headers(raw.headers))
            sent.append((case, origin, _send(producer, record)))
        producer.flush(CONFIRM_S)
        arrived = {case.letter.id: Place(o.topic, o.partition, s.offset) for case, o, s in sent if s.offset is not None}
        self._mark(producer, [case for case in claimed if case.letter.id in arrived], State.REPLAYED, reason, arrived)
        for case, _, answer in sent:
            if case.letter.id in arrived:
                yield Done(case, Result.DONE, to=arrived[case.letter.id])
            else:
                why = answer.error.str() if answer.error is not None else f"no answer within {CONFIRM_S:g} s"
                yield Done(case, Result.FAILED, f"not confirmed: {why}; it may have been written all the same")

    def drop(self, cases: Sequence[Case], reason: str) -> list[Done]:
        """Marks letters as dropped. Their bytes stay until their retention. Raises DeliveryFailed."""
        open_ones = [case for case in cases if case.state in (State.OPEN, State.REPLAYING)]
        others = [case for case in cases if case.state not in (State.OPEN, State.REPLAYING)]
        dropped, lost = self._mark(Producer(producer_config(self._settings)), open_ones, State.DROPPED, reason)
        return [
            *(Done(case, Result.REFUSED, f"{case.state} already") for case in others),
            *lost,
            *(Done(case, Result.DONE) for case in dropped),
        ]

    def _mark(
        self,
        producer: Producer,
        cases: Sequence[Case],
        state: State,
        reason: str,
        arrived: Mapping[str, Place] | None = None,
    ) -> tuple[list[Case], list[Done]]:
        """Appends a mark to each letter; those whose mark counts, and those that somebody else was faster with."""
        at = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        sent = []
        for case in cases:
            to = (arrived or {}).get(case.letter.id)
            headers = mark_headers(
                state, after=case.head, at=at, reason=reason, replayed_to=None if to is None else to.offset
            )
            place = case.letter.place
            mark = Raw(place.topic, place.partition, 0, 0, case.letter.id.encode(), None, tuple(headers))
            sent.append((case, _send(producer, mark)))
        producer.flush(CONFIRM_S)
        for case, answer in sent:
            if answer.offset is None:
                why = answer.error.str() if answer.error is not None else "no answer"
                raise DeliveryFailed(f"the mark `{state}` of the letter {case.letter.place} was not confirmed: {why}")
        self._refresh({case.letter.place.topic for case in cases})
        marks = {case.letter.id: case.marks for case in self.cases()}
        counting: list[Case] = []
        lost: list[Done] = []
        for case, answer in sent:
            last: Mark = marks[case.letter.id][-1]
            if last.offset == answer.offset:
                counting.append(case)
            else:
                lost.append(Done(case, Result.TAKEN, f"somebody else marked it `{last.state}` at {last.at}"))
        return counting, lost


def raw_of(message: Message) -> Raw:
    """A message byte for byte."""
    return Raw(
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
    held = 0
    for case in cases:
        size = case.letter.size or 0
        if chunk and (len(chunk) == CHUNK or held + size > CHUNK_BYTES):
            yield chunk
            chunk, held = [], 0
        chunk.append(case)
        held += size
    if chunk:
        yield chunk


def _planned(case: Case, refused: Refusal | None) -> Done:
    if refused is None:
        return Done(case, Result.PLANNED, to=case.letter.origin)
    return Done(case, Result.REFUSED, refused.reason, drift=refused.drift)


def _send(producer: Producer, record: Raw) -> _Sent:
    """Queues a record for its partition; what the broker answers is in the result after a flush."""
    sent = _Sent()

    def delivered(error: KafkaError | None, message: Message) -> None:
        sent.error = unconfirmed(error, message)
        if sent.error is None:
            sent.offset = int(message.offset())

    arguments: dict[str, Any] = {"partition": record.partition, "on_delivery": delivered}
    while True:
        try:
            producer.produce(record.topic, record.value, record.key, headers=list(record.headers), **arguments)
        except BufferError:
            producer.poll(0.1)
        else:
            return sent
