"""The state of the join, moved to topics with more partitions. Pure."""

from collections import defaultdict
from collections.abc import Iterator

from schemas import topics
from schemas.place import RecordPlace
from streams.apps.join.state import HALF, TASK, JoinState, Payload, decode_task, encode_task
from streams.fold.clock import CLOCK
from streams.fold.forgotten import FORGET
from streams.fold.moved_clock import moved_clock
from streams.fold.moved_requests import known_requests, moved_requests
from streams.runtime.moving import Move, State, States
from streams.runtime.processor import applied_offset, payload_of, stamped


def places(states: States) -> Iterator[RecordPlace]:
    """Yields the halves that wait."""
    for partition, state in states.items():
        for key, value in state.items():
            if key.startswith(HALF):
                yield RecordPlace(topics.HALVES, partition, applied_offset(value))


def moved(states: States, move: Move) -> dict[int, State]:
    """Returns the state of each new partition: a task is on its id's partition, with its halves."""
    found: dict[int, dict[str, bytes]] = defaultdict(dict)
    for partition, state in states.items():
        for key, value in state.items():
            if key.startswith(TASK):
                _move_task(key.removeprefix(TASK), value, partition, state, move, found)
            else:
                assert key.startswith((HALF, FORGET, CLOCK)), key
    requests = known_requests(states)
    for target in range(move.after):
        begin = move.begin[topics.HALVES, target]
        found[target] |= moved_requests(requests, target, begin)
        found[target] |= moved_clock(states, move, target, begin)
    return dict(found)


def _move_task(
    task_id: str, value: bytes, partition: int, state: State, move: Move, found: dict[int, dict[str, bytes]]
) -> None:
    target = move.partition_of(task_id)
    task = decode_task(move.stamp(topics.HALVES, partition, target, value))
    for payload in _payloads(task):
        half = state[f"{HALF}{partition}/{payload.offset}"]
        there = move.place(topics.HALVES, partition, payload.offset)
        payload.offset = there.offset
        found[target][f"{HALF}{target}/{there.offset}"] = stamped(there.offset, payload_of(half))
    found[target][TASK + task_id] = encode_task(task)


def _payloads(task: JoinState) -> Iterator[Payload]:
    for slot in task.slots.values():
        yield from (payload for payload in (slot.score, slot.hint) if payload is not None)
