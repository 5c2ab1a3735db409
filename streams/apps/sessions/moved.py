"""The state of the application sessions, moved to topics with more partitions. Pure."""

from collections import defaultdict
from collections.abc import Iterator

from schemas import topics
from schemas.place import RecordPlace
from streams.apps.sessions.state import SESSION, TURN, decode_session, encode_session
from streams.fold.clock import CLOCK
from streams.fold.forgotten import FORGET
from streams.fold.moved_clock import moved_clock
from streams.fold.moved_requests import known_requests, moved_requests
from streams.fold.recent_events import SEEN
from streams.runtime.moving import Move, State, States
from streams.runtime.processor import applied_offset, payload_of, stamped


def places(states: States) -> Iterator[RecordPlace]:
    """Yields the turns that wait."""
    for partition, state in states.items():
        for key, value in state.items():
            if key.startswith(TURN):
                yield RecordPlace(topics.SESSIONS, partition, applied_offset(value))


def moved(states: States, move: Move) -> dict[int, State]:
    """Returns the state of each new partition.

    An open session is on the partition of its id. An ended session and the mark of an event are kept under a hash: they
    are on each partition to which their keys can have moved.
    """
    found: dict[int, dict[str, bytes]] = defaultdict(dict)
    for partition, state in states.items():
        for key, value in state.items():
            if key.startswith(SESSION):
                _move_session(key, value, partition, state, move, found)
            elif key.startswith(SEEN):
                for target in move.candidates(partition):
                    found[target][key] = move.stamp(topics.SESSIONS, partition, target, value)
            else:
                assert key.startswith((TURN, FORGET, CLOCK)), key
    requests = known_requests(states)
    for target in range(move.after):
        begin = move.begin[topics.SESSIONS, target]
        found[target] |= moved_requests(requests, target, begin)
        found[target] |= moved_clock(states, move, target, begin)
    return dict(found)


def _move_session(
    key: str, value: bytes, partition: int, state: State, move: Move, found: dict[int, dict[str, bytes]]
) -> None:
    session = decode_session(value)
    known = session.session_id
    for target in move.candidates(partition) if known is None else (move.partition_of(known),):
        there = decode_session(move.stamp(topics.SESSIONS, partition, target, value))
        if there.pending is not None:
            turn = state[f"{TURN}{partition}/{there.pending.offset}"]
            there.pending.offset = move.place(topics.SESSIONS, partition, there.pending.offset).offset
            found[target][f"{TURN}{target}/{there.pending.offset}"] = stamped(there.pending.offset, payload_of(turn))
        found[target][key] = encode_session(there)
