"""Reads the turns of one session from the log, after they were recorded."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from confluent_kafka import KafkaException

from schemas import topics
from schemas.records import EPISODE_TURN, SessionEvent, SessionEventKind
from schemas.wire.codec import Codec, SchemasUnavailable
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.errors import Forbidden, NoSuchTopic, Unreachable
from tentalis.kafka.offsets import end_offsets
from tentalis.kafka.partitioner import partition_of
from tentalis.kafka.reader import decoded
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)

PATIENCE_S = 300.0
"""Seconds for which reads are tried again while the broker is unavailable."""
_PAUSE_S = 2.0
T = TypeVar("T")


class SessionUnread(Exception):
    """The turns of a session cannot be read. The message has the reason."""


@dataclass(frozen=True, slots=True)
class SessionStart:
    """The end of the log before a session began: the partition of the session, and the offset of its next record."""

    session_id: str
    partition: int
    partitions: int
    offset: int


class SessionLog:
    """Reads sessions. Calls block, and run one at a time. `codec`: not shared."""

    def __init__(self, settings: Settings, codec: Codec, patience_s: float = PATIENCE_S) -> None:
        self._settings, self._codec, self._patience_s = settings, codec, patience_s
        self._turn = threading.Lock()

    def start(self, session_id: str) -> SessionStart:
        """Returns the place from which the session of this name, which has not begun yet, can be read. Raises
        SessionUnread."""
        with self._turn:
            return self._tried(lambda: self._start(session_id))

    def turns(self, start: SessionStart) -> list[SessionEvent]:
        """Returns the turns of an episode's session that are on the log now, in its order, each once. Raises
        SessionUnread."""
        with self._turn:
            return self._tried(lambda: self._turns(start))

    def _start(self, session_id: str) -> SessionStart:
        ends = end_offsets(self._settings, topics.SESSIONS)
        partition = partition_of(session_id.encode(), len(ends))
        return SessionStart(session_id, partition, len(ends), ends[partition])

    def _turns(self, start: SessionStart) -> list[SessionEvent]:
        ends = end_offsets(self._settings, topics.SESSIONS)
        if len(ends) != start.partitions or ends[start.partition] < start.offset:
            raise SessionUnread(f"{topics.SESSIONS} was changed or made again while {start.session_id} was played")
        partition = start.partition
        stored = read_to_end(
            self._settings, topics.SESSIONS, start={partition: start.offset}, end={partition: ends[partition]}
        )
        found: dict[str, SessionEvent] = {}
        for _, record in decoded(stored, self._codec):
            if (
                isinstance(record, SessionEvent)
                and record.session_id == start.session_id
                and record.turn_type == EPISODE_TURN
                and record.kind is SessionEventKind.TURN
            ):
                # A turn whose acknowledgement came too late is there twice, the second time as failed.
                found[record.session_event_id] = record
        return list(found.values())

    def _tried(self, read: Callable[[], T]) -> T:
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return read()
            except (KafkaException, TimeoutError, Unreachable, SchemasUnavailable) as error:
                if time.monotonic() > deadline:
                    raise SessionUnread(f"{topics.SESSIONS} cannot be read: {error}") from error
                log.warning("%s cannot be read now; trying again: %s", topics.SESSIONS, error)
                time.sleep(_PAUSE_S)
            except (Forbidden, NoSuchTopic) as error:
                raise SessionUnread(f"{topics.SESSIONS} cannot be read: {error}") from error
