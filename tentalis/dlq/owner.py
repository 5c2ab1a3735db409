"""Dead-lettering outside the stream applications.

One consumer group owns the dead letters of a topic, so at any time one process per partition writes them; every other
reader of the topic logs and skips bad records. The rollouts topic has one consumer group per policy. Each dead-letters
the bad rollouts of its policy, and all of them dead-letter a record that cannot be decoded: these letters have the same
origin, so they count as copies of one letter.
"""

import logging
import time
from collections.abc import Sequence

from schemas import topics
from schemas.wire.codec import Codec, DecodeError
from tentalis.dlq.context import class_of, context_headers
from tentalis.dlq.limits import DeadLetterLimits
from tentalis.dlq.written import WrittenLetters
from tentalis.kafka.consumer import GroupConsumer, Stored
from tentalis.kafka.producer import Publisher
from tentalis.kafka.topology import CONTROL_GROUP
from tentalis.service.settings import Settings
from tentalis.service.version import app_version

log = logging.getLogger(__name__)


class DeadLetterWriter:
    """Writes records that a consumer group cannot read to the dead-letter topics, key and value bytes unchanged. A
    record that has a letter counts towards the limits, and is not written again; one that an operator skipped does
    neither."""

    def __init__(self, publisher: Publisher, group: str, letters: WrittenLetters, limits: DeadLetterLimits) -> None:
        self._publisher, self._group, self._letters, self._limits = publisher, group, letters, limits
        self._version = app_version()

    def write(self, outcomes: Sequence[tuple[Stored, DecodeError | None]]) -> int:
        """Dead-letters the records with an error, and returns the number of letters when they are confirmed. `outcomes`
        holds all records read, in log order per partition.

        Raises TooManyDead before anything is sent, DeliveryFailed, and the errors of `WrittenLetters.look_up`.
        """
        outcomes = [each for each in outcomes if each[1] is None or not self._letters.skipped(each[0])]
        self._limits.check(
            (stored, None if error is None else f"at stage {error.stage}: {error.reason}", None)
            for stored, error in outcomes
        )
        failed = [(stored, error) for stored, error in outcomes if error is not None and not self._letters.has(stored)]
        for stored, error in failed:
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
        if failed:
            self._publisher.flush()
        return len(failed)


class ControlDeadLetters:
    """Owner of the dead letters of the control topics, which no stream application reads. It is a member of one
    consumer group, so that exactly one of several processes with an owner keeps each letter."""

    def __init__(self, settings: Settings, codec: Codec, publisher: Publisher, group: str = CONTROL_GROUP) -> None:
        self._codec = codec
        letters = WrittenLetters(settings)
        self._consumer = GroupConsumer(settings, group, topics.CONTROL, on_assign=lambda _: letters.forget())
        limits = DeadLetterLimits.of(settings.dead_letters, group)
        self._writer = DeadLetterWriter(publisher, group, letters, limits)

    def step(self, timeout: float = 0.0) -> None:
        """Reads for `timeout` seconds, dead-letters bad records, commits. Raises TooManyDead, DeliveryFailed,
        KafkaException, SchemasUnavailable."""
        found = self._consumer.poll(timeout)
        self._writer.write([(stored, self._decode_error(stored)) for stored in found])
        self._consumer.commit(found)

    def _decode_error(self, stored: Stored) -> DecodeError | None:
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
