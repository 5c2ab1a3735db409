"""What lies on a dead-letter topic: letters, what was done about them, and which may be replayed. No Kafka here.

A letter is a record that an application could not process, its bytes unchanged (`tentalis.dlq.context`). What is done
about one is appended to the same partition as a mark: a record without a value, under the letter's id, that says
`replaying`, `replayed` or `dropped`. Nothing is ever taken away before its retention, and a mark outlives its letter.

Two people may act at once, so a mark counts only if it was written in sight of the one before it (`after`): the order
of the log decides, and everyone who has read past a mark agrees on whether it counts. A letter is claimed (`replaying`)
before its record is sent and marked `replayed` once that is confirmed. A replay that dies in between leaves the claim:
whether the record went out is then for a person to look up, and only an explicit `again` sends it once more.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from schemas.place import Place
from schemas.topics import TopicTable
from schemas.topics import dlq as dlq_of
from tentalis.dlq.context import PREFIX
from tentalis.moments import rfc3339_ms

SUFFIX = dlq_of("")
UNMARKED = -1
MISPLACED = "Misplaced"
"""The error of a record on another partition than its key's."""
MARK, AFTER, MARKED_AT, REASON, REPLAYED_TO = (
    PREFIX + name for name in ("mark", "after", "marked-at", "reason", "replayed-to")
)

Headers = tuple[tuple[str, bytes | None], ...]


class State(StrEnum):
    """What has become of a letter."""

    OPEN = "open"
    REPLAYING = "replaying"
    REPLAYED = "replayed"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True)
class Raw:
    """A record byte for byte as it lies on the log. `timestamp` in ms."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter without its value, which may be large. `foreign` says why one is none of ours: it has no `origin`
    to be replayed to. Times in ms; `size` is None for a tombstone.
    """

    place: Place
    id: str
    origin: Place | None
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
class Mark:
    """What someone did about a letter. `after` is the offset of the mark that they had seen last, or UNMARKED."""

    id: str
    state: State
    after: int
    offset: int
    at: str = ""
    reason: str = ""
    replayed_to: int | None = None


def own_headers(headers: Headers) -> Headers:
    """The headers that the record had before it became a letter."""
    return tuple((name, value) for name, value in headers if not name.startswith(PREFIX))


def context_of(headers: Headers) -> dict[str, str]:
    """The `tentalis.dlq.*` headers by what follows the prefix. Of several the last counts: applications append theirs
    to what the record brought along.
    """
    return {
        name.removeprefix(PREFIX): (value or b"").decode("utf-8", "backslashreplace")
        for name, value in headers
        if name.startswith(PREFIX)
    }


def letter_of(raw: Raw) -> Letter:
    """Any record of a dead-letter topic that is no mark, whoever wrote it."""
    context = context_of(raw.headers)
    place = Place(raw.topic, raw.partition, raw.offset)
    origin, timestamp, foreign = _origin(raw, context)
    return Letter(
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


def _origin(raw: Raw, context: Mapping[str, str]) -> tuple[Place | None, int, str]:
    names = ("original-topic", "original-partition", "original-offset", "original-timestamp")
    missing = [name for name in names if name not in context]
    if missing:
        return None, 0, f"it has no {', '.join(missing)}"
    topic, *texts = (context[name] for name in names)
    # At most 18 digits: what fits into Kafka's 64 bits, whatever somebody wrote there.
    bad = [
        name for name, text in zip(names[1:], texts, strict=True) if not re.fullmatch(r"-1|\d{1,18}", text, re.ASCII)
    ]
    if bad:
        return None, 0, f"its {', '.join(bad)} is no number"
    partition, offset, timestamp = map(int, texts)
    if dlq_of(topic) != raw.topic:
        return None, 0, f"it says that it comes from {topic[:100]!r}, whose letters lie elsewhere"
    if partition != raw.partition or offset < 0:
        return None, 0, f"it says that it comes from partition {partition} at offset {offset}, and lies on another"
    return Place(topic, partition, offset), timestamp, ""


def _failed_at(text: str, appended: int) -> int:
    """A letter whose time cannot be read is as old as its record on the dead-letter topic."""
    try:
        return rfc3339_ms(text)
    except ValueError:
        return appended


def mark_of(raw: Raw) -> Mark | None:
    """The mark that a record is, None if it is none. A letter stays one whatever marks its record brought along."""
    context = context_of(raw.headers)
    state, after = context.get("mark"), context.get("after", "")
    if raw.value is not None or raw.key is None or "original-topic" in context or state not in tuple(State):
        return None
    to = context.get("replayed-to")
    if not re.fullmatch(r"-1|\d{1,18}", after, re.ASCII) or not (to is None or re.fullmatch(r"\d{1,18}", to, re.ASCII)):
        return None
    return Mark(
        id=raw.key.decode("utf-8", "replace"),
        state=State(state),
        after=int(after),
        offset=raw.offset,
        at=context.get("marked-at", ""),
        reason=context.get("reason", ""),
        replayed_to=None if to is None else int(to),
    )


def mark_headers(
    state: State, *, after: int, at: str, reason: str = "", replayed_to: int | None = None
) -> list[tuple[str, bytes]]:
    """The headers of a mark; its key is the letter's id, its value none."""
    texts = {MARK: state.value, AFTER: str(after), MARKED_AT: at}
    if reason:
        texts[REASON] = reason
    if replayed_to is not None:
        texts[REPLAYED_TO] = str(replayed_to)
    return [(name, text.encode()) for name, text in texts.items()]


@dataclass(slots=True)
class Case:
    """A letter and all that is known about it. `copies`: an application that was killed before its commit writes its
    letters again. `earlier`: the failures of the same record before it was replayed, oldest first.
    """

    letter: Letter
    copies: int = 0
    marks: Sequence[Mark] = ()
    earlier: tuple[Letter, ...] = ()

    @property
    def state(self) -> State:
        return self.marks[-1].state if self.marks else State.OPEN

    @property
    def head(self) -> int:
        """Offset of the last mark that counts, UNMARKED if there is none."""
        return self.marks[-1].offset if self.marks else UNMARKED


@dataclass(slots=True)
class Ledger:
    """Folds dead-letter topics; records of one partition in the order of the log, partitions in any."""

    _cases: dict[str, Case] = field(default_factory=dict)
    _marks: dict[str, list[Mark]] = field(default_factory=dict)

    def add(self, raw: Raw) -> None:
        """The next record."""
        mark = mark_of(raw)
        if mark is None:
            letter = letter_of(raw)
            self._cases.setdefault(letter.id, Case(letter)).copies += 1
            return
        marks = self._marks.setdefault(mark.id, [])
        # The first one seen counts whatever it follows: what was before it may be past its retention.
        if not marks or mark.after == marks[-1].offset:
            marks.append(mark)

    def cases(self) -> list[Case]:
        """Every letter, oldest failure first."""
        became: dict[Place, Letter] = {}
        for case in self._cases.values():
            case.marks = tuple(self._marks.get(case.letter.id, ()))
            origin = case.letter.origin
            if origin is None:
                continue
            for mark in case.marks:
                if mark.replayed_to is not None and mark.replayed_to > origin.offset:
                    became[Place(origin.topic, origin.partition, mark.replayed_to)] = case.letter
        for case in self._cases.values():
            case.earlier = tuple(reversed(_before(case.letter, became)))
        return sorted(
            self._cases.values(), key=lambda case: (case.letter.failed_at, case.letter.place.topic, _position(case))
        )


def _position(case: Case) -> tuple[int, int]:
    return case.letter.place.partition, case.letter.place.offset


def _before(letter: Letter, became: Mapping[Place, Letter]) -> list[Letter]:
    """The letters whose replays led to this one, newest first. Offsets fall from one to the next, so it ends."""
    found: list[Letter] = []
    while letter.origin is not None and letter.origin in became:
        letter = became[letter.origin]
        found.append(letter)
    return found


@dataclass(frozen=True, slots=True)
class Filter:
    """Which letters; what is empty or None lets everything through. Times in ms, `until` excluded."""

    states: Collection[State] = ()
    places: Collection[Place] = ()
    error: str = ""
    stage: str = ""
    group: str = ""
    since: int | None = None
    until: int | None = None

    def matches(self, case: Case) -> bool:
        """`error` is part of `class: message`, `group` is the consumer group with or without its prefix, a place is the
        letter's or its record's.
        """
        letter = case.letter
        return (
            (not self.states or case.state in self.states)
            and (not self.places or letter.place in self.places or letter.origin in self.places)
            and self.error.lower() in f"{letter.error_class}: {letter.error}".lower()
            and self.stage in ("", letter.stage)
            and self.group in ("", letter.group, letter.group.removeprefix("tentalis-"))
            and (self.since is None or letter.failed_at >= self.since)
            and (self.until is None or letter.failed_at < self.until)
        )


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a letter is not replayed. `drift`: because the broker is not as the table of topics says."""

    reason: str
    drift: bool = False


def refusal(
    case: Case, table: TopicTable, partitions: Mapping[str, int], newer: Mapping[str, int], *, again: bool
) -> Refusal | None:
    """Why a letter may not be replayed, None if it may.

    Args:
        partitions: how many the broker's topics have.
        newer: by letter id, the offset of a later record under the same key of a compacted topic.
        again: replay what was replayed or dropped already.
    """
    letter, state = case.letter, case.state
    if letter.origin is None:
        return Refusal(f"foreign: {letter.foreign}, so nobody knows where to replay it to")
    if state is State.REPLAYING and not again:
        return Refusal(
            f"a replay of it began at {case.marks[-1].at or 'some time'} and never told of its end: look whether "
            f"{letter.origin.topic}[{letter.origin.partition}] has it by now; --again replays it once more"
        )
    if state is not State.OPEN and not again:
        return Refusal(f"{state} already; --again replays it once more")
    topic, found = letter.origin.topic, partitions.get(letter.origin.topic)
    if topic not in table.topics:
        return Refusal(f"{topic} is not in schemas/topics.yaml", drift=True)
    wanted = table[topic].partitions
    if found is None:
        return Refusal(f"the broker has no topic {topic}; `tentalis topics apply` creates it", drift=True)
    if found != wanted or letter.origin.partition >= found:
        return Refusal(
            f"{topic} has {found} partitions, schemas/topics.yaml says {wanted}, the record lay on "
            f"{letter.origin.partition}: replayed there, its key could be where nobody looks for it",
            drift=True,
        )
    if letter.error_class.rpartition(".")[2] == MISPLACED:
        return Refusal(f"back where it lay it would be refused again: {letter.error}")
    if letter.id in newer:
        return Refusal(f"{topic} is compacted and has a newer record under its key, at offset {newer[letter.id]}")
    return None


def newer_under_key(cases: Iterable[Case], later: Iterable[Raw]) -> dict[str, int]:
    """By letter id, the offset of the last record of `later` with the letter's key behind the place where it lay."""
    wanted: dict[tuple[str, int, bytes | None], list[Letter]] = {}
    for case in cases:
        origin = case.letter.origin
        if origin is not None:
            wanted.setdefault((origin.topic, origin.partition, case.letter.key), []).append(case.letter)
    found: dict[str, int] = {}
    for raw in later:
        for letter in wanted.get((raw.topic, raw.partition, raw.key), ()):
            if letter.origin is not None and raw.offset > letter.origin.offset:
                found[letter.id] = raw.offset
    return found
