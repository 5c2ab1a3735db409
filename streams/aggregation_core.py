"""Event-time buckets per manager, worker and environment, as a pure fold over one partition of one input topic.

Each input topic has state keys of its own, so the applied offset in front of a value is an offset of one topic and
grows with every change: recovery by the greatest offset is then right also after a zombie's late flush. (With one
bucket for both topics no single number orders its versions: a zombie further on in outcomes would beat a successor
further on in feedback.) Outcomes and feedback meet only with whoever combines the signals: one topic may be read an
hour behind the other, whose windows are closed by then.

Exactly once, as far as anyone can see:
- a record delivered again is known by the lane's applied offset, which is written after all that it stands for, or, if
  the worker was killed before that, by the applied offset of its bucket;
- a record *produced* again (the join restarted between output and commit) has another offset but the same event id: ids
  are kept with their first offset until their window is closed, in one state value per batch;
- after that the window takes nothing more: `window end + retention <= stream time` is late, by the log's clock alone.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from streams.processor import Change, applied_offset, payload_of, stamped
from tentalis.rewards.moments import Moments

_PAIR = struct.Struct(">Qq")
_INT = struct.Struct(">q")


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """A bucket's identity: [start, start + length) in ms of event time."""

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
    """What one input record adds. Times in ms; `timestamp` is the append time; `value` None adds a kind only."""

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
    """What a window holds of one input topic."""

    applied: int = -1
    moments: Moments = field(default_factory=Moments)
    kinds: Mapping[str, int] = field(default_factory=dict)

    def add(self, event: Event) -> "Bucket":
        """With one more event."""
        kinds = dict(self.kinds)
        if event.kind is not None:
            kinds[event.kind] = kinds.get(event.kind, 0) + 1
        moments = self.moments if event.value is None else self.moments.add(event.value)
        return Bucket(event.offset, moments, kinds)


@dataclass(frozen=True, slots=True)
class Seen:
    """The event ids (64-bit hashes) first met in one batch, each with its offset; kept until `expires` (ms)."""

    expires: int
    ids: Mapping[int, int]


@dataclass(slots=True)
class Lane:
    """The state of one input topic in one partition; `applied` is the last offset whose effects are all in it."""

    applied: int = -1
    stream_time: int = 0
    buckets: dict[Window, Bucket] = field(default_factory=dict)
    chunks: dict[int, Seen] = field(default_factory=dict)
    ids: dict[int, int] = field(default_factory=dict)

    def learn(self, first: int, seen: Seen) -> None:
        """Takes a chunk of event ids in."""
        self.chunks[first] = seen
        for identity, offset in seen.ids.items():
            self.ids[identity] = min(offset, self.ids.get(identity, offset))

    def forget(self, first: int) -> None:
        """Gives a chunk of event ids up."""
        for identity in self.chunks.pop(first).ids:
            self.ids.pop(identity, None)


@dataclass(frozen=True, slots=True)
class Step:
    """What a batch changes in a lane; nothing is changed until `commit`."""

    applied: int
    stream_time: int
    buckets: dict[Window, Bucket]
    seen: tuple[int, Seen] | None
    closed: tuple[Window, ...]
    expired: tuple[int, ...]
    late: int
    duplicates: int


def identity(event_id: str) -> int:
    """64 bits of an event id."""
    return int.from_bytes(blake2b(event_id.encode(), digest_size=8).digest(), "big")


def fold(lane: Lane, events: Sequence[Event], last: int, *, window_ms: int, retention_ms: int) -> Step:
    """A batch of events of one topic-partition in offset order, `last` being the batch's last offset.

    An event that claims to be later than its append time is taken at its append time.
    """
    stream_time = lane.stream_time
    buckets: dict[Window, Bucket] = {}
    new: dict[int, int] = {}
    expires = late = duplicates = 0
    for event in events:
        if event.offset <= lane.applied:
            continue
        stream_time = max(stream_time, event.timestamp)
        at = min(event.event_time, event.timestamp)
        window = Window(event.manager_id, event.worker_id, event.environment, at - at % window_ms, window_ms)
        if window.end + retention_ms <= stream_time:
            late += 1
            continue
        known = identity(event.event_id)
        first = lane.ids.get(known, new.get(known))
        if first is not None and first < event.offset:
            duplicates += 1
            continue
        if first is None:
            new[known] = event.offset
            expires = max(expires, window.end + retention_ms)
        bucket = buckets.get(window) or lane.buckets.get(window) or Bucket()
        if bucket.applied < event.offset:
            buckets[window] = bucket.add(event)
    present = lane.buckets.keys() | buckets.keys()
    return Step(
        applied=max(last, lane.applied),
        stream_time=stream_time,
        buckets=buckets,
        seen=(min(new.values()), Seen(expires, new)) if new else None,
        closed=tuple(sorted(window for window in present if window.end + retention_ms <= stream_time)),
        expired=tuple(sorted(first for first, seen in lane.chunks.items() if seen.expires <= stream_time)),
        late=late,
        duplicates=duplicates,
    )


def commit(lane: Lane, step: Step) -> None:
    """Applies a step to the state in memory."""
    lane.applied = step.applied
    lane.stream_time = step.stream_time
    lane.buckets.update(step.buckets)
    for window in step.closed:
        lane.buckets.pop(window, None)
    for first in step.expired:
        lane.forget(first)
    if step.seen is not None:
        lane.learn(*step.seen)


# --- as state values --------------------------------------------------------------------------------------------------


def changes(tag: str, step: Step) -> list[list[Change]]:
    """The state changes of a step, wave by wave: buckets and ids, then stream time, then deletions.

    Deletions come after the stream time that justifies them: were they first and the worker killed in between, records
    delivered again would start the deleted bucket anew, below what was already emitted.
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


def lanes(tags: Iterable[str], entries: Mapping[str, bytes]) -> dict[str, Lane]:
    """The state of a partition, read back. Raises ValueError for an entry that this application did not write."""
    found = {tag: Lane() for tag in tags}
    for key, value in entries.items():
        try:
            tag, what, *rest = json.loads(key)
            lane = found[tag]
            payload = payload_of(value)
            if what == "clock":
                (lane.stream_time,) = _INT.unpack(payload)
                lane.applied = applied_offset(value)
            elif what == "seen":
                (expires,) = _INT.unpack_from(payload)
                lane.learn(int(rest[0]), Seen(expires, dict(_PAIR.iter_unpack(payload[_INT.size :]))))
            elif what == "bucket":
                n, mean, m2, kinds = json.loads(payload)
                lane.buckets[Window(*rest)] = Bucket(applied_offset(value), Moments(n, mean, m2), kinds)
            else:
                raise ValueError(f"unknown kind {what!r}")
        except (ValueError, KeyError, TypeError, struct.error) as error:
            raise ValueError(f"state entry {key!r} is not one of the aggregation's: {error!r}") from error
    return found


def _key(*parts: str | int) -> str:
    return json.dumps(parts, separators=(",", ":"), ensure_ascii=True)


def _bucket_key(tag: str, window: Window) -> str:
    return _key(tag, "bucket", window.manager_id, window.worker_id, window.environment, window.start, window.length)


def _bucket_value(bucket: Bucket) -> bytes:
    moments = bucket.moments
    body = [moments.n, moments.mean, moments.m2, dict(sorted(bucket.kinds.items()))]
    return stamped(bucket.applied, json.dumps(body, separators=(",", ":")).encode())


def _seen_value(seen: Seen) -> bytes:
    pairs = b"".join(_PAIR.pack(identity, offset) for identity, offset in seen.ids.items())
    return stamped(max(seen.ids.values()), _INT.pack(seen.expires) + pairs)
