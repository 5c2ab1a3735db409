"""The content of a dead-letter topic: letters, the marks on them, and the rules for a replay. No Kafka here.

A letter is a record that an application could not process, its bytes unchanged (`tentalis.dlq.context`). An action on
a letter is appended to the same partition as a mark: a record without a value, under the letter's id, with the state
`replaying`, `replayed` or `dropped`. Nothing is deleted before its retention ends, and a mark outlives its letter.

Two people may act at the same time, so a mark counts only if its writer had seen the mark before it (`after`): the
order of the log decides, and all readers agree on the marks that count. A letter is claimed (`replaying`) before its
record is sent and marked `replayed` once that is confirmed. A replay that crashes in between leaves the claim: a person
must then check whether the record was sent, and only an explicit `again` sends it once more.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from schemas.place import RecordPlace
from schemas.topics import PREFIX as GROUPS
from schemas.topics import TopicTable
from schemas.topics import dlq as dlq_of
from tentalis.dlq.context import PREFIX
from tentalis.kafka.partitioner import ADDRESSED, TYPE_HEADER, partition_of
from tentalis.text.timestamps import rfc3339_ms

SUFFIX = dlq_of("")
UNMARKED = -1
MISPLACED = "Misplaced"
"""The error of a record that is not on the partition of its key."""
MARK, AFTER, MARKED_AT, REASON, REPLAYED_TO, REPLAYED_PARTITION = (
    PREFIX + name for name in ("mark", "after", "marked-at", "reason", "replayed-to", "replayed-partition")
)

Headers = tuple[tuple[str, bytes | None], ...]


class LetterState(StrEnum):
    """The state of a letter."""

    OPEN = "open"
    REPLAYING = "replaying"
    REPLAYED = "replayed"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class RawRecord:
    """A record byte for byte as stored on the log. `timestamp` in ms."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter without its value, which may be large. `foreign` is the reason why it is not one of ours; such a
    letter has no `origin` to be replayed to. Times in ms; `size` is None for a tombstone.
    """

    place: RecordPlace
    id: str
    origin: RecordPlace | None
    foreign: str
    key: bytes | None
    size: int | None
    group: str
    stage: str
    error_class: str
    error: str
    attempts: str
    version: str
    failed_at: int


@dataclass(frozen=True, slots=True)
class LetterMark:
    """An action on a letter. `after` is the offset of the last mark that its writer had seen, or UNMARKED.

    `replayed_to`: the offset of the replayed record; `replayed_partition`: its partition, None for the original one.
    """

    id: str
    state: LetterState
    after: int
    offset: int
    at: str = ""
    reason: str = ""
    replayed_to: int | None = None
    replayed_partition: int | None = None


def own_headers(headers: Headers) -> Headers:
    """The headers that the record had before it became a letter."""
    return tuple((name, value) for name, value in headers if not name.startswith(PREFIX))


def context_of(headers: Headers) -> dict[str, str]:
    """The `tentalis.dlq.*` headers by name, without the prefix. If a header occurs several times, the last one
    counts, because applications append theirs after the headers that the record already has."""
    return {
        name.removeprefix(PREFIX): (value or b"").decode("utf-8", "backslashreplace")
        for name, value in headers
        if name.startswith(PREFIX)
    }


def letter_of(raw: RawRecord) -> DeadLetter:
    """Reads a record of a dead-letter topic that is not a mark, from any writer."""
    context = context_of(raw.headers)
    place = RecordPlace(raw.topic, raw.partition, raw.offset)
    origin, timestamp, foreign = _origin(raw, context)
    return DeadLetter(
        place=place,
        id=str(place) if origin is None else f"{origin}/{timestamp}",
        origin=origin,
        foreign=foreign,
        key=raw.key,
        size=None if raw.value is None else len(raw.value),
        group=context.get("consumer-group", ""),
        stage=context.get("error-stage", ""),
        error_class=context.get("error-class", ""),
        error=context.get("error-message", ""),
        attempts=context.get("attempts", ""),
        version=context.get("app-version", ""),
        failed_at=_failed_at(context.get("failed-at", ""), raw.timestamp),
    )


def _origin(raw: RawRecord, context: Mapping[str, str]) -> tuple[RecordPlace | None, int, str]:
    names = ("original-topic", "original-partition", "original-offset", "original-timestamp")
    missing = [name for name in names if name not in context]
    if missing:
        return None, 0, f"it has no {', '.join(missing)}"
    topic, *texts = (context[name] for name in names)
    # At most 18 digits, so that any number fits into Kafka's 64 bits.
    bad = [
        name for name, text in zip(names[1:], texts, strict=True) if not re.fullmatch(r"-1|\d{1,18}", text, re.ASCII)
    ]
    if bad:
        return None, 0, f"its {', '.join(bad)} is not a number"
    partition, offset, timestamp = map(int, texts)
    if dlq_of(topic) != raw.topic:
        return None, 0, f"its original topic is {topic[:100]!r}, whose letters belong on another topic"
    if partition != raw.partition or offset < 0:
        return None, 0, f"its original place is partition {partition}, offset {offset}, but it is on another partition"
    return RecordPlace(topic, partition, offset), timestamp, ""


def _failed_at(text: str, appended: int) -> int:
    """The time of the failure; if it cannot be parsed, the time at which the letter was appended."""
    try:
        return rfc3339_ms(text)
    except ValueError:
        return appended


def mark_of(raw: RawRecord) -> LetterMark | None:
    """Reads a mark, None if the record is not one. A letter stays a letter, whatever mark headers it has."""
    context = context_of(raw.headers)
    state, after = context.get("mark"), context.get("after", "")
    if raw.value is not None or raw.key is None or "original-topic" in context or state not in tuple(LetterState):
        return None
    to, partition = context.get("replayed-to"), context.get("replayed-partition")
    if not re.fullmatch(r"-1|\d{1,18}", after, re.ASCII):
        return None
    if any(each is not None and not re.fullmatch(r"\d{1,18}", each, re.ASCII) for each in (to, partition)):
        return None
    return LetterMark(
        id=raw.key.decode("utf-8", "replace"),
        state=LetterState(state),
        after=int(after),
        offset=raw.offset,
        at=context.get("marked-at", ""),
        reason=context.get("reason", ""),
        replayed_to=None if to is None else int(to),
        replayed_partition=None if partition is None else int(partition),
    )


def mark_headers(
    state: LetterState,
    *,
    after: int,
    at: str,
    reason: str = "",
    replayed_to: int | None = None,
    replayed_partition: int | None = None,
) -> list[tuple[str, bytes]]:
    """The headers of a mark; its key is the letter's id, and it has no value."""
    texts = {MARK: state.value, AFTER: str(after), MARKED_AT: at}
    if reason:
        texts[REASON] = reason
    if replayed_to is not None:
        texts[REPLAYED_TO] = str(replayed_to)
    if replayed_partition is not None:
        texts[REPLAYED_PARTITION] = str(replayed_partition)
    return [(name, text.encode()) for name, text in texts.items()]


@dataclass(slots=True)
class Case:
    """A letter and all that is known about it. `copies` counts its writes: an application that was killed before its
    commit writes its letters again. `earlier`: the failures of the same record before its replays, oldest first.
    """

    letter: DeadLetter
    copies: int = 0
    marks: Sequence[LetterMark] = ()
    earlier: tuple[DeadLetter, ...] = ()

    @property
    def state(self) -> LetterState:
        return self.marks[-1].state if self.marks else LetterState.OPEN

    @property
    def last_mark_offset(self) -> int:
        """Offset of the last mark that counts, UNMARKED if there is none."""
        return self.marks[-1].offset if self.marks else UNMARKED


@dataclass(slots=True)
class LetterHistory:
    """Folds dead-letter topics; records of one partition in log order, partitions in any order."""

    _cases: dict[str, Case] = field(default_factory=dict)
    _marks: dict[str, list[LetterMark]] = field(default_factory=dict)

    def add(self, raw: RawRecord) -> None:
        """Adds the next record."""
        mark = mark_of(raw)
        if mark is None:
            letter = letter_of(raw)
            self._cases.setdefault(letter.id, Case(letter)).copies += 1
            return
        marks = self._marks.setdefault(mark.id, [])
        # The first mark seen always counts: retention may have deleted the one before it.
        if not marks or mark.after == marks[-1].offset:
            marks.append(mark)

    def cases(self) -> list[Case]:
        """Every letter, oldest failure first."""
        letter_by_replay: dict[RecordPlace, DeadLetter] = {}
        for case in self._cases.values():
            case.marks = tuple(self._marks.get(case.letter.id, ()))
            origin = case.letter.origin
            if origin is None:
                continue
            for mark in case.marks:
                moved = mark.replayed_partition is not None
                if mark.replayed_to is not None and (moved or mark.replayed_to > origin.offset):
                    partition = origin.partition if mark.replayed_partition is None else mark.replayed_partition
                    letter_by_replay[RecordPlace(origin.topic, partition, mark.replayed_to)] = case.letter
        for case in self._cases.values():
            case.earlier = tuple(reversed(_earlier_letters(case.letter, letter_by_replay)))
        return sorted(
            self._cases.values(), key=lambda case: (case.letter.failed_at, case.letter.place.topic, _position(case))
        )


def _position(case: Case) -> tuple[int, int]:
    return case.letter.place.partition, case.letter.place.offset


def _earlier_letters(letter: DeadLetter, letter_by_replay: Mapping[RecordPlace, DeadLetter]) -> list[DeadLetter]:
    """The letters whose replays led to this one, newest first. A forged mark may lead back: each counts once."""
    found: list[DeadLetter] = []
    while letter.origin is not None and letter.origin in letter_by_replay:
        letter = letter_by_replay[letter.origin]
        if letter in found:
            break
        found.append(letter)
    return found


@dataclass(frozen=True, slots=True)
class Filter:
    """A filter on letters; an empty or None field matches everything. Times in ms, `until` excluded."""

    states: Collection[LetterState] = ()
    places: Collection[RecordPlace] = ()
    error: str = ""
    stage: str = ""
    group: str = ""
    since: int | None = None
    until: int | None = None

    def matches(self, case: Case) -> bool:
        """True if the letter matches. `error` is a substring of `class: message`, `group` is the consumer group with or
        without its prefix, a place is the letter's or its record's.
        """
        letter = case.letter
        return (
            (not self.states or case.state in self.states)
            and (not self.places or letter.place in self.places or letter.origin in self.places)
            and self.error.lower() in f"{letter.error_class}: {letter.error}".lower()
            and self.stage in ("", letter.stage)
            and self.group in ("", letter.group, letter.group.removeprefix(f"{GROUPS}-"))
            and (self.since is None or letter.failed_at >= self.since)
            and (self.until is None or letter.failed_at < self.until)
        )


@dataclass(frozen=True, slots=True)
class ReplayRefusal:
    """The reason why a letter is not replayed. `drift`: the broker differs from the table of topics."""

    reason: str
    drift: bool = False


def replay_partition(raw: RawRecord, partitions: int) -> int:
    """Returns the partition to which a letter's record is sent, of a keyed topic with `partitions` partitions: that of
    its key, which is another one than before if the topic was moved to more partitions since. A tick or a request to
    forget is for the partition that it was on."""
    kind = next((value for name, value in raw.headers if name == TYPE_HEADER), None)
    return raw.partition if raw.key is None or kind in ADDRESSED else partition_of(raw.key, partitions)


def _placed_by_key(letter: DeadLetter, partitions: int) -> bool:
    """True if the original partition is that of the key now, although it was not when the record failed."""
    assert letter.origin is not None
    return letter.key is not None and partition_of(letter.key, partitions) == letter.origin.partition


def refusal(
    case: Case, table: TopicTable, partitions: Mapping[str, int], newer: Mapping[str, int], *, again: bool
) -> ReplayRefusal | None:
    """The reason why a letter may not be replayed, None if it may.

    Args:
        partitions: the number of partitions of each topic of the broker.
        newer: by letter id, the offset of a later record under the same key of a compacted topic.
        again: also replay letters that were already replayed or dropped.
    """
    letter, state = case.letter, case.state
    if letter.origin is None:
        return ReplayRefusal(f"foreign: {letter.foreign}, so its original partition is unknown")
    if state is LetterState.REPLAYING and not again:
        return ReplayRefusal(
            f"a replay of it began at {case.marks[-1].at or 'an unknown time'} and did not finish: check whether "
            f"{letter.origin.topic}[{letter.origin.partition}] has the record; --again replays it once more"
        )
    if state is not LetterState.OPEN and not again:
        return ReplayRefusal(f"already {state}; --again replays it once more")
    topic, found = letter.origin.topic, partitions.get(letter.origin.topic)
    if topic not in table.topics:
        return ReplayRefusal(f"{topic} is not in schemas/topics.yaml", drift=True)
    expected = table[topic].partitions
    if found is None:
        return ReplayRefusal(f"the broker has no topic {topic}; `tentalis topics apply` creates it", drift=True)
    if found != expected or letter.origin.partition >= found:
        return ReplayRefusal(
            f"{topic} has {found} partitions, schemas/topics.yaml says {expected}, the record was on "
            f"{letter.origin.partition}: after a replay its key could be on the wrong partition",
            drift=True,
        )
    if letter.error_class.rpartition(".")[2] == MISPLACED and not _placed_by_key(letter, found):
        return ReplayRefusal(f"on its original partition it would be rejected again: {letter.error}")
    if letter.id in newer:
        return ReplayRefusal(f"{topic} is compacted and has a newer record under its key, at offset {newer[letter.id]}")
    return None


def newer_under_key(cases: Iterable[Case], later: Iterable[RawRecord]) -> dict[str, int]:
    """By letter id, the offset of the last record of `later` with the letter's key, behind its original position."""
    by_key: dict[tuple[str, int, bytes | None], list[DeadLetter]] = {}
    for case in cases:
        origin = case.letter.origin
        if origin is not None:
            by_key.setdefault((origin.topic, origin.partition, case.letter.key), []).append(case.letter)
    found: dict[str, int] = {}
    for raw in later:
        for letter in by_key.get((raw.topic, raw.partition, raw.key), ()):
            if letter.origin is not None and raw.offset > letter.origin.offset:
                found[letter.id] = raw.offset
    return found
