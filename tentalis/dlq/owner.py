"""Who dead-letters what, outside the stream applications. Of each topic one consumer group owns the dead letters, and
so at any time one process of it; every other reader of the topic says what it passes over and goes on. The rollouts
have a group per policy: each is its own policy's to judge, and what cannot be decoded is everybody's (its letters are
all of one place, and so one letter with that many copies).
"""

import logging
import time
from collections.abc import Sequence

from schemas import topics
from schemas.codec import Codec, DecodeError
from tentalis.acls import CONTROL
from tentalis.config import Settings
from tentalis.dlq.context import app_version, class_of, context_headers
from tentalis.dlq.limits import DeadLimits
from tentalis.kafka import GroupConsumer, Publisher, Stored

log = logging.getLogger(__name__)


class DeadLetters:
    """Puts what a consumer group cannot read on the dead-letter topics, key and value bytes unchanged."""

    def __init__(self, publisher: Publisher, group: str, limits: DeadLimits | None = None) -> None:
        self._publisher, self._group = publisher, group
        self._limits = limits or DeadLimits()
        self._version = app_version()

    def keep(self, read: Sequence[tuple[Stored, DecodeError | None]]) -> None:
        """Takes what was read, in log order per partition, with what is wrong with each; returns when the dead letters
        are confirmed.

        Raises TooManyDead before anything is sent, and DeliveryFailed.
        """
        self._limits.check(
            (stored, None if error is None else f"at stage {error.stage}: {error.reason}") for stored, error in read
        )
        dead = [(stored, error) for stored, error in read if error is not None]
        for stored, error in dead:
            log.error("dead letter: %s", error)
            headers = context_headers(
                topic=stored.topic,
                partition=stored.partition,
                offset=stored.offset,
                timestamp=stored.timestamp,
                group=self._group,
                error_class=class_of(error),
                error=str(error),
                stage=error.stage,
                attempts=1,
                version=self._version,
                failed_at=time.time(),
            )
            self._publisher.send_bytes(
                topics.dlq(stored.topic),
                stored.raw_key,
                stored.value,
                [*stored.headers, *headers],
                partition=stored.partition,
            )
        if dead:
            self._publisher.flush()


class ControlOwner:
    """Owner of the dead letters of the control topics, which no stream application reads: a member of one group, so
    that of any number of processes with an owner exactly one keeps each."""

    def __init__(self, settings: Settings, codec: Codec, publisher: Publisher, group: str = CONTROL) -> None:
        self._codec = codec
        self._consumer = GroupConsumer(settings, group, topics.CONTROL)
        self._letters = DeadLetters(publisher, group)

    def step(self, timeout: float = 0.0) -> None:
        """Reads on for `timeout` seconds, keeps what is bad, commits. Raises TooManyDead, DeliveryFailed,
        KafkaException, SchemasUnavailable."""
        found = self._consumer.poll(timeout)
        self._letters.keep([(stored, self._wrong(stored)) for stored in found])
        self._consumer.commit(found)

    def _wrong(self, stored: Stored) -> DecodeError | None:
        if stored.value is None:  # a tombstone: compacted topics have them
            return None
        try:
            stored.decode_own(self._codec)
        except DecodeError as error:
            return error
        return None

    def close(self) -> None:
        """Leaves the group."""
        self._consumer.close()
