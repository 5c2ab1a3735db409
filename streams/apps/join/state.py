"""The state of a task in the join, and its encoding on the changelog.

Four kinds of keys; each value begins with its applied offset (8 bytes, see `streams.runtime.processor`):

- `half/<partition>/<offset>`: a half that waits for the rest of its group, bytes as received. Written once, under a key
  that is never reused.
- `task/<task_id>`: the header of a task, open or not. Rewritten on every change.
- `forget/<partition>/<offset>`: a request to forget (see `streams.fold.forgotten`).
- `clock/<partition>`: the stream time; its applied offset is the last one that was folded completely (see
  `streams.fold.clock`).

A header depends only on the log up to its applied offset, so two workers that fold the same records write the same
bytes. All integers are big-endian.
"""

import struct
from dataclasses import dataclass, field
from enum import IntEnum

from schemas.records import Hint, Score, TaskHead
from streams.fold.hashing import HASH_BYTES
from streams.runtime.processor import OFFSET_BYTES, DamagedState, applied_offset, stamped

HALF, TASK = "half/", "task/"
VERSION = 1

_FIXED = struct.Struct(">BBBIq")  # version, phase, flags, n_samples, since
_OPEN = struct.Struct(">qqI")  # deadline, opd window, length of the head
_COUNT = struct.Struct(">I")
_SLOT = struct.Struct(">IB8s8s")  # sample index, flags, result, digest
_SCORE = struct.Struct(">qq")  # offset, stream time of arrival
_HINT = struct.Struct(">q")  # offset

_FORGOTTEN = 1
_CLOSED, _OPD_TAKEN, _HAS_SCORE, _HAS_HINT = 1, 2, 4, 8


class Phase(IntEnum):
    """Phase of a task. UNOPENED: only late halves were seen. OPEN: waits for halves. CLOSED: its outcomes are
    written."""

    UNOPENED = 0
    OPEN = 1
    CLOSED = 2


@dataclass(slots=True)
class Payload:
    """A half in a slot: its offset, its size on the log in bytes, and its record, or its state value until the record
    is needed."""

    offset: int
    record: Score | Hint | None = None
    value: bytes = b""
    size: int = 0


@dataclass(slots=True)
class Slot:
    """One sample of a task, bound to the first result seen for it. `result` and `digest` are `short` hashes."""

    result: bytes
    digest: bytes
    closed: bool = False
    opd_taken: bool = False  # an accepted hint of this slot is joined, or was emitted as a separate rollout
    score: Payload | None = None
    score_at: int = 0
    hint: Payload | None = None


@dataclass(slots=True)
class JoinState:
    """The state of a task. `head` and `head_json` are made from each other on demand; both are empty unless OPEN.

    `since` is in ms: the opening of an open task, the stream time at which a closed task closed, or at which the first
    half of an unopened task came. `due` is the next stream time after which a wait ends. `seen` holds the hashes of the
    event ids (and superseded results) that have taken effect.
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
        """Returns the earliest of the deadline and the ends of the waits for hints, in ms of stream time."""
        waiting = (slot for slot in self.slots.values() if slot.score is not None and not slot.closed)
        return min([self.deadline, *(slot.score_at + self.window for slot in waiting)])

    def parsed_head(self) -> TaskHead:
        """Returns the head of an open task. Raises DamagedState."""
        if self.head is None:
            try:
                self.head = TaskHead.model_validate_json(self.head_json)
            except ValueError as error:
                raise DamagedState(f"the state has an invalid task head: {self.head_json[:64]!r}") from error
        return self.head


def answers_terms(half: Score | Hint) -> bool:
    """Returns true if the half comes from the source that its task's terms name for it."""
    terms = half.sample.head.terms
    return half.source is (terms.rl if isinstance(half, Score) else terms.opd)


def encode_task(task: JoinState) -> bytes:
    """Encodes the header of a task; its halves are stored as offsets."""
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
    """Decodes only the two header fields that recovery needs. Raises DamagedState."""
    try:
        version, phase, _, _, since = _FIXED.unpack_from(value, OFFSET_BYTES)
        if version != VERSION:
            raise DamagedState(
                f"the state has a task header of version {version}, but this code reads version {VERSION}. Run the "
                "version of the join that wrote it until its tasks are closed"
            )
        return Phase(phase), int(since)
    except (ValueError, struct.error) as error:
        raise DamagedState(f"the state has an invalid task header: {value[:64].hex()}") from error


def decode_task(value: bytes) -> JoinState:
    """Decodes a task from its header. Its halves have only their offsets; `due` is computed. Raises DamagedState."""
    phase, since = phase_and_since(value)
    try:
        _, _, flags, n_samples, _ = _FIXED.unpack_from(value, OFFSET_BYTES)
        task = JoinState(applied_offset(value), phase, since, n_samples, forgotten=bool(flags & _FORGOTTEN))
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
            raise DamagedState(f"the task header has {len(value)} bytes, expected {at + HASH_BYTES * count}")
        task.seen = dict.fromkeys(value[i : i + HASH_BYTES] for i in range(at, len(value), HASH_BYTES))
    except struct.error as error:
        raise DamagedState(f"the task header is truncated: {value[:64].hex()}") from error
    task.n_closed = sum(slot.closed for slot in task.slots.values())
    if phase is Phase.OPEN:
        task.due = task.next_due()
    return task
