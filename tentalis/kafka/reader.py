"""Reads records of several topics as they arrive, each topic from its start and without a consumer group."""

from collections.abc import Iterable, Iterator

from schemas.records import Record
from schemas.wire.codec import Codec, DecodeError
from tentalis.kafka.consumer import IDLE_WAIT_MS, TO_END_WAIT_MS, Follower, Lags, Stored
from tentalis.kafka.skipped import SKIPPED
from tentalis.service.settings import Settings


class Reader:
    """Follows topics and decodes their records. Bad records are logged and counted; their owners dead-letter them.

    `wait_ms`: see Follower. One consumer reads all topics: each would send the broker requests of its own."""

    def __init__(
        self, settings: Settings, topic_names: Iterable[str], codec: Codec, *, wait_ms: int = IDLE_WAIT_MS
    ) -> None:
        self._order = {name: number for number, name in enumerate(topic_names)}
        self._follower = Follower(settings, *self._order, wait_ms=wait_ms)
        self._codec = codec
        self.skipped = 0

    @property
    def caught_up(self) -> bool:
        """True once every topic has been read to the end that it had when reading began."""
        return self._follower.caught_up

    def poll(self, timeout: float) -> list[tuple[Stored, Record]]:
        """New records, topic by topic in the given order. If there are none, waits up to `timeout` seconds for the
        first."""
        stored = sorted(self._follower.poll(timeout), key=lambda each: self._order[each.topic])
        pairs = list(decoded(stored, self._codec))
        self.skipped += sum(each.value is not None for each in stored) - len(pairs)
        return pairs

    def lag(self) -> Lags:
        """The records behind, of all topics. Call it on the thread that polls."""
        return self._follower.lag()

    def close(self) -> None:
        """Closes the consumer."""
        self._follower.close()


def decoded(found: Iterable[Stored], codec: Codec) -> Iterator[tuple[Stored, Record]]:
    """Yields records with what they hold. Tombstones are left out, and bad records, which are logged: their owners
    dead-letter them."""
    for stored in found:
        if stored.value is None:
            continue
        try:
            record = stored.decode_own(codec)
        except DecodeError as error:
            SKIPPED.add(error)
        else:
            yield stored, record


def records_to_end(settings: Settings, topic_names: Iterable[str], codec: Codec) -> Iterator[Record]:
    """Yields the records of topics up to the ends that they have now. Raises NoSuchTopic, KafkaException."""
    reader = Reader(settings, topic_names, codec, wait_ms=TO_END_WAIT_MS)
    try:
        while not reader.caught_up:
            for _, record in reader.poll(0.1):
                yield record
    finally:
        reader.close()
