"""Event-time buckets per manager, worker and environment, as a pure fold over one partition of one input topic.

Each input topic has its own state keys, so the applied offset in front of a value is an offset of one topic and grows
with every change. Recovery by the greatest offset is therefore right even after a zombie's late flush. (With one bucket
for both topics, no single number orders its versions: a zombie ahead in outcomes would beat a successor ahead in
feedback.) Outcomes and feedback are combined only by the reader of the signals: one topic may be read an hour behind
the other, whose windows are closed by then.

Effects are exactly once:
- A record delivered again is recognised by the applied offset of its topic, which is written after all its effects, or,
  if the worker was killed before that, by the applied offset of its bucket.
- A record *produced* again (the join restarted between output and commit) has another offset but the same event id. Ids
  are kept with their first offset until their window is closed, in one state value per batch.
- A closed window takes nothing more: an event is late if `window end + retention <= stream time`, by the log's clock
  alone.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from streams.fold.hashing import id_hash
from streams.runtime.processor import Change, applied_offset, payload_of, stamped
from tentalis.rewards.moments import Moments

_PAIR = struct.Struct(">Qq")
_INT = struct.Struct(">q")


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """Identity of a bucket: [start, start + length) in ms of event time."""

    manager_id: str
    worker_id: str
    environment: str
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class Event:
    """Contribution of one input record. Times in ms; `timestamp` is the append time; `value` None adds a kind only."""

    offset: int
    timestamp: int
    event_time: int
    event_id: str
    manager_id: str
    worker_id: str
    environment: str
    value: float | None
    kind: str | None = None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Contents of a window from one input topic."""

    applied: int = -1
    moments: Moments = field(default_factory=Moments)
    kinds: Mapping[str, int] = field(default_factory=dict)

    def add(self, event: Event) -> "Bucket":
        """Returns the bucket with one more event."""
        kinds = dict(self.kinds)
        if event.kind is not None:
            kinds[event.kind] = kinds.get(event.kind, 0) + 1
        moments = self.moments if event.value is None else self.moments.add(event.value)
        return Bucket(event.offset, moments, kinds)


@dataclass(frozen=True, slots=True)
class SeenEvents:
    """The event ids (64-bit hashes) first seen in one batch, each with its offset; kept until `expires` (ms)."""

    expires: int
    ids: Mapping[int, int]


@dataclass(slots=True)
class TopicFold:
    """The state of one input topic in one partition; `applied` is the last offset whose effects are all included."""

    applied: int = -1
    stream_time: int = 0
    buckets: dict[Window, Bucket] = field(default_factory=dict)
    chunks: dict[int, SeenEvents] = field(default_factory=dict)
    ids: dict[int, int] = field(default_factory=dict)

    def learn(self, first: int, seen: SeenEvents) -> None:
        """Adds a chunk of event ids."""
        self.chunks[first] = seen
        for identity, offset in seen.ids.items():
            self.ids[identity] = min(offset, self.ids.get(identity, offset))

    def forget(self, first: int) -> None:
        """Drops a chunk of event ids."""
        for identity in self.chunks.pop(first).ids:
            self.ids.pop(identity, None)


@dataclass(frozen=True, slots=True)
class FoldStep:
    """The changes of a batch to the state of an input topic; `commit` applies them."""

    applied: int
    stream_time: int
    buckets: dict[Window, Bucket]
    seen: tuple[int, SeenEvents] | None
    closed: tuple[Window, ...]
    expired: tuple[int, ...]
    late: int
    duplicates: int


def fold(topic_fold: TopicFold, events: Sequence[Event], last: int, *, window_ms: int, retention_ms: int) -> FoldStep:
    """Folds a batch of events of one topic partition, in offset order; `last` is the batch's last offset.

    An event time later than the append time is replaced by the append time.
    """
    stream_time = topic_fold.stream_time
    buckets: dict[Window, Bucket] = {}
    new: dict[int, int] = {}
    expires = late = duplicates = 0
    for event in events:
        if event.offset <= topic_fold.applied:
            continue
        stream_time = max(stream_time, event.timestamp)
        at = min(event.event_time, event.timestamp)
        window = Window(event.manager_id, event.worker_id, event.environment, at - at % window_ms, window_ms)
        if window.end + retention_ms <= stream_time:
            late += 1
            continue
        known = id_hash(event.event_id)
        first = topic_fold.ids.get(known, new.get(known))
        if first is not None and first < event.offset:
            duplicates += 1
            continue
        if first is None:
            new[known] = event.offset
            expires = max(expires, window.end + retention_ms)
        bucket = buckets.get(window) or topic_fold.buckets.get(window) or Bucket()
        if bucket.applied < event.offset:
            buckets[window] = bucket.add(event)
    present = topic_fold.buckets.keys() | buckets.keys()
    return FoldStep(
        applied=max(last, topic_fold.applied),
        stream_time=stream_time,
        buckets=buckets,
        seen=(min(new.values()), SeenEvents(expires, new)) if new else None,
        closed=tuple(sorted(window for window in present if window.end + retention_ms <= stream_time)),
        expired=tuple(sorted(first for first, seen in topic_fold.chunks.items() if seen.expires <= stream_time)),
        late=late,
        duplicates=duplicates,
    )


def commit(topic_fold: TopicFold, step: FoldStep) -> None:
    """Applies a step to the state in memory."""
    topic_fold.applied = step.applied
    topic_fold.stream_time = step.stream_time
    topic_fold.buckets.update(step.buckets)
    for window in step.closed:
        topic_fold.buckets.pop(window, None)
    for first in step.expired:
        topic_fold.forget(first)
    if step.seen is not None:
        topic_fold.learn(*step.seen)


# --- as state values --------------------------------------------------------------------------------------------------


def changes(tag: str, step: FoldStep) -> list[list[Change]]:
    """Returns the state changes of a step in waves: buckets and ids, then stream time, then deletions.

    Deletions come after the stream time that justifies them. If they came first and the worker was killed in between,
    redelivered records would restart the deleted bucket, below the counts already emitted.
    """
    written: list[Change] = [
        (_bucket_key(tag, window), _bucket_value(bucket)) for window, bucket in step.buckets.items()
    ]
    if step.seen is not None:
        first, seen = step.seen
        written.append((_key(tag, "seen", first), _seen_value(seen)))
    deleted: list[Change] = [(_bucket_key(tag, window), None) for window in step.closed]
    deleted += [(_key(tag, "seen", first), None) for first in step.expired]
    clock: list[Change] = [(_key(tag, "clock"), stamped(step.applied, _INT.pack(step.stream_time)))]
    return [wave for wave in (written, clock, deleted) if wave]


def topic_folds(tags: Iterable[str], entries: Mapping[str, bytes]) -> dict[str, TopicFold]:
    """Decodes the state of a partition. Raises ValueError for an entry that this application did not write."""
    found = {tag: TopicFold() for tag in tags}
    for key, value in entries.items():
        try:
            tag, what, *rest = json.loads(key)
            topic_fold = found[tag]
            payload = payload_of(value)
            if what == "clock":
                (topic_fold.stream_time,) = _INT.unpack(payload)
                topic_fold.applied = applied_offset(value)
            elif what == "seen":
                (expires,) = _INT.unpack_from(payload)
                topic_fold.learn(int(rest[0]), SeenEvents(expires, dict(_PAIR.iter_unpack(payload[_INT.size :]))))
            elif what == "bucket":
                n, mean, m2, kinds = json.loads(payload)
                topic_fold.buckets[Window(*rest)] = Bucket(applied_offset(value), Moments(n, mean, m2), kinds)
            else:
                raise ValueError(f"unknown kind {what!r}")
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise ValueError(f"state entry {key!r} is not a valid aggregation entry: {error!r}") from error
    return found


def entries_of(tag: str, topic_fold: TopicFold) -> dict[str, bytes]:
    """Encodes the state of one input topic in one partition; `topic_folds` decodes it."""
    found = {_bucket_key(tag, window): _bucket_value(bucket) for window, bucket in topic_fold.buckets.items()}
    found |= {_key(tag, "seen", first): _seen_value(seen) for first, seen in topic_fold.chunks.items()}
    return found | {_key(tag, "clock"): stamped(topic_fold.applied, _INT.pack(topic_fold.stream_time))}


def _key(*parts: str | int) -> str:
    return json.dumps(parts, separators=(",", ":"), ensure_ascii=True)


def _bucket_key(tag: str, window: Window) -> str:
    return _key(tag, "bucket", window.manager_id, window.worker_id, window.environment, window.start, window.length)


def _bucket_value(bucket: Bucket) -> bytes:
    moments = bucket.moments
    body = [moments.n, moments.mean, moments.m2, dict(sorted(bucket.kinds.items()))]
    return stamped(bucket.applied, json.dumps(body, separators=(",", ":")).encode())


def _seen_value(seen: SeenEvents) -> bytes:
    pairs = b"".join(_PAIR.pack(identity, offset) for identity, offset in seen.ids.items())
    return stamped(max(seen.ids.values()), _INT.pack(seen.expires) + pairs)
