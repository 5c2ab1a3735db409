"""What the join remembers of a task, and the bytes of it on the changelog.

Four kinds of keys, each value behind its applied offset (8 bytes, see `streams.processor`):

- `half/<partition>/<offset>`: a half that is in and waits for the rest of its group, its bytes as they came. Written
  once, under a key that is never used again.
- `task/<task_id>`: the header of a task, open or not. Rewritten whenever something changes.
- `forget/<partition>/<offset>`: a request to forget somebody (see `streams.join.forgotten`).
- `clock/<partition>`: the stream time, and with its applied offset how far the partition was folded completely.

A header is a function of the log up to its applied offset and of nothing else, so two workers that fold the same
records write the same bytes. All integers are big-endian.
"""

import hashlib
import struct
from dataclasses import dataclass, field
from enum import IntEnum

from schemas.records import Hint, Score, TaskHead
from streams.processor import OFFSET_BYTES, StateError, applied_offset, stamped

CLOCK, HALF, TASK = "clock/", "half/", "task/"
VERSION = 1

_FIXED = struct.Struct(">BBBIq")  # version, phase, flags, n_samples, since
_OPEN = struct.Struct(">qqI")  # deadline, opd window, length of the head
_COUNT = struct.Struct(">I")
_SLOT = struct.Struct(">IB8s8s")  # sample index, flags, result, digest
_SCORE = struct.Struct(">qq")  # offset, stream time at which it came
_HINT = struct.Struct(">q")  # offset
_CLOCK = struct.Struct(">q")

_FORGOTTEN = 1
_CLOSED, _OPD_TAKEN, _HAS_SCORE, _HAS_HINT = 1, 2, 4, 8
HASH_BYTES = 8


class Phase(IntEnum):
    """UNOPENED: only late halves were seen. OPEN: waits for halves. CLOSED: its outcomes are written."""

    UNOPENED = 0
    OPEN = 1
    CLOSED = 2


@dataclass(slots=True)
class Payload:
    """A half that is in: where it lies, its bytes on the log, and the record, or its state value until somebody needs
    the record."""

    offset: int
    record: Score | Hint | None = None
    value: bytes = b""
    size: int = 0


@dataclass(slots=True)
class Slot:
    """One sample of a task, bound to the first result heard of it. `result` and `digest` are `short` hashes."""

    result: bytes
    digest: bytes
    closed: bool = False
    opd_taken: bool = False  # an accepted hint of this slot is joined, or was emitted by itself
    score: Payload | None = None
    score_at: int = 0
    hint: Payload | None = None


@dataclass(slots=True)
class Task:
    """What the join knows of a task. `head` and `head_json` are made of each other on demand, both empty unless
    OPEN.

    `since` is in ms: of an open task its opening, of a closed one the stream time of its closing, of an unopened one
    that of its first half. `due` is the next stream time after which something must be given up. `seen` holds the
    hashes of the event ids (and superseded results) that had their effect.
    """

    applied: int
    phase: Phase
    since: int
    n_samples: int = 0
    forgotten: bool = False
    head: TaskHead | None = None
    head_json: bytes = b""
    deadline: int = 0
    window: int = 0
    due: int = 0
    n_closed: int = 0
    slots: dict[int, Slot] = field(default_factory=dict)
    seen: dict[bytes, None] = field(default_factory=dict)

    def next_due(self) -> int:
        """The earliest of the deadline and the ends of the waits for hints, ms of stream time."""
        waiting = (slot for slot in self.slots.values() if slot.score is not None and not slot.closed)
        return min([self.deadline, *(slot.score_at + self.window for slot in waiting)])

    def parsed_head(self) -> TaskHead:
        """The head of an open task. Raises StateError."""
        if self.head is None:
            try:
                self.head = TaskHead.model_validate_json(self.head_json)
            except ValueError as error:
                raise StateError(f"not the head of a task: {self.head_json[:64]!r}") from error
        return self.head


def short(*parts: object) -> bytes:
    """8 bytes that stand for an id inside one task."""
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=HASH_BYTES).digest()


def half_key(partition: int, offset: int) -> str:
    """State key of a half."""
    return f"{HALF}{partition}/{offset}"


def half_offset(key: str) -> int:
    """The offset in a half's state key. Raises StateError."""
    try:
        return int(key.rpartition("/")[2])
    except ValueError as error:
        raise StateError(f"state key {key!r} is not of the form {HALF}<partition>/<offset>") from error


def encode_clock(applied: int, time: int) -> bytes:
    """The value of a partition's clock."""
    return stamped(applied, _CLOCK.pack(time))


def decode_clock(value: bytes) -> tuple[int, int]:
    """-> (applied offset, stream time in ms). Raises StateError."""
    try:
        return applied_offset(value), int(_CLOCK.unpack_from(value, OFFSET_BYTES)[0])
    except (ValueError, struct.error) as error:
        raise StateError(f"not the value of a clock: {value.hex()}") from error


def encode_task(task: Task) -> bytes:
    """The value of a task's header; payloads are named by their offsets."""
    flags = _FORGOTTEN if task.forgotten else 0
    parts = [_FIXED.pack(VERSION, task.phase, flags, task.n_samples, task.since)]
    if task.phase is Phase.OPEN:
        if task.head is not None and not task.head_json:
            task.head_json = task.head.model_dump_json().encode()
        parts += [_OPEN.pack(task.deadline, task.window, len(task.head_json)), task.head_json]
    parts.append(_COUNT.pack(len(task.slots)))
    for index, slot in task.slots.items():
        flags = (
            _CLOSED * slot.closed
            | _OPD_TAKEN * slot.opd_taken
            | _HAS_SCORE * (slot.score is not None)
            | _HAS_HINT * (slot.hint is not None)
        )
        parts.append(_SLOT.pack(index, flags, slot.result, slot.digest))
        if slot.score is not None:
            parts.append(_SCORE.pack(slot.score.offset, slot.score_at))
        if slot.hint is not None:
            parts.append(_HINT.pack(slot.hint.offset))
    parts.append(_COUNT.pack(len(task.seen)))
    parts += task.seen
    return stamped(task.applied, b"".join(parts))


def phase_and_since(value: bytes) -> tuple[Phase, int]:
    """The two fields that recovery needs of every header, without decoding the rest. Raises StateError."""
    try:
        version, phase, _, _, since = _FIXED.unpack_from(value, OFFSET_BYTES)
        if version != VERSION:
            raise StateError(
                f"a task header of version {version}; this code reads version {VERSION}. Let the version of the join "
                "that wrote it close its tasks first"
            )
        return Phase(phase), int(since)
    except (ValueError, struct.error) as error:
        raise StateError(f"not a task header: {value[:64].hex()}") from error


def decode_task(value: bytes) -> Task:
    """A task from its header; payloads know only their offsets, `due` is computed. Raises StateError."""
    phase, since = phase_and_since(value)
    try:
        _, _, flags, n_samples, _ = _FIXED.unpack_from(value, OFFSET_BYTES)
        task = Task(applied_offset(value), phase, since, n_samples, forgotten=bool(flags & _FORGOTTEN))
        at = OFFSET_BYTES + _FIXED.size
        if phase is Phase.OPEN:
            task.deadline, task.window, size = _OPEN.unpack_from(value, at)
            at += _OPEN.size
            task.head_json = value[at : at + size]
            at += size
        (count,) = _COUNT.unpack_from(value, at)
        at += _COUNT.size
        for _ in range(count):
            index, flags, result, digest = _SLOT.unpack_from(value, at)
            at += _SLOT.size
            slot = Slot(result, digest, closed=bool(flags & _CLOSED), opd_taken=bool(flags & _OPD_TAKEN))
            if flags & _HAS_SCORE:
                offset, slot.score_at = _SCORE.unpack_from(value, at)
                slot.score = Payload(offset)
                at += _SCORE.size
            if flags & _HAS_HINT:
                (offset,) = _HINT.unpack_from(value, at)
                slot.hint = Payload(offset)
                at += _HINT.size
            task.slots[index] = slot
        (count,) = _COUNT.unpack_from(value, at)
        at += _COUNT.size
        if len(value) != at + HASH_BYTES * count:
            raise StateError(f"a task header of {len(value)} bytes where {at + HASH_BYTES * count} were expected")
        task.seen = dict.fromkeys(value[i : i + HASH_BYTES] for i in range(at, len(value), HASH_BYTES))
    except struct.error as error:
        raise StateError(f"a task header that ends too early: {value[:64].hex()}") from error
    task.n_closed = sum(slot.closed for slot in task.slots.values())
    if phase is Phase.OPEN:
        task.due = task.next_due()
    return task
