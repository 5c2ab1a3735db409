"""The state of the application experience, moved to topics with more partitions. Pure."""

from collections import defaultdict
from collections.abc import Iterator

from schemas import topics
from schemas.place import RecordPlace
from streams.apps.experience.core import SESSION, decode_session, encode_session
from streams.fold.forgotten import FORGET
from streams.fold.moved_requests import known_requests, moved_requests
from streams.fold.recent_events import SEEN
from streams.runtime.moving import Move, State, States


def places(states: States) -> Iterator[RecordPlace]:
    """Yields the turns of open sessions."""
    for partition, state in states.items():
        for key, value in state.items():
            if key.startswith(SESSION):
                for turn in decode_session(key, value).turns:
                    yield RecordPlace(topics.SESSIONS, partition, turn.offset)


def moved(states: States, move: Move) -> dict[int, State]:
    """Returns the state of each new partition. See `streams.apps.sessions.moved` for state kept under a hash."""
    found: dict[int, dict[str, bytes]] = defaultdict(dict)
    for partition, state in states.items():
        for key, value in state.items():
            if key.startswith(SESSION):
                session = decode_session(key, value)
                targets = (move.partition_of(session.session_id),) if session.open else move.candidates(partition)
                for target in targets:
                    there = decode_session(key, move.stamp(topics.SESSIONS, partition, target, value))
                    there.turns = [
                        turn._replace(offset=move.place(topics.SESSIONS, partition, turn.offset).offset)
                        for turn in there.turns
                    ]
                    found[target][key] = encode_session(there)
            elif key.startswith(SEEN):
                for target in move.candidates(partition):
                    found[target][key] = move.stamp(topics.SESSIONS, partition, target, value)
            else:
                assert key.startswith(FORGET), key
    requests = known_requests(states)
    for target in range(move.after):
        found[target] |= moved_requests(requests, target, move.begin[topics.SESSIONS, target])
    return dict(found)
