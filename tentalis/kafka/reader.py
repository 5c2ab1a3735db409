"""Reads records of several topics as they arrive, each topic from its start and without a consumer group."""

from collections.abc import Iterable, Iterator

from schemas.records import Record
from schemas.wire.codec import Codec, DecodeError
from tentalis.kafka.consumer import IDLE_WAIT_MS, TO_END_WAIT_MS, Follower, Lags, Stored
from tentalis.kafka.skipped import SKIPPED
from tentalis.service.settings import Settings


class Reader:
    """Follows topics and decodes their records. Bad records are logged and counted; their owners dead-letter them.

    `wait_ms`: see Follower."""

    def __init__(
        self, settings: Settings, topic_names: Iterable[str], codec: Codec, *, wait_ms: int = IDLE_WAIT_MS
    ) -> None:
        self._followers = {name: Follower(settings, name, wait_ms=wait_ms) for name in topic_names}
        self._codec = codec
        self.skipped = 0

    @property
    def caught_up(self) -> bool:
        """True once every topic has been read to the end that it had when reading began."""
        return all(follower.caught_up for follower in self._followers.values())

    def poll(self, timeout: float) -> list[tuple[Stored, Record]]:
        """New records, topic by topic in the given order. Waits up to `timeout` seconds if there are none."""
        found = self._take(0.0)
        if not found and timeout > 0:
            first = next(iter(self._followers))
            found = self._decoded(self._followers[first].poll(timeout)) + self._take(0.0)
        return found

    def lag(self) -> Lags:
        """The records behind, of all topics. Call it on the thread that polls."""
        return {place: behind for follower in self._followers.values() for place, behind in follower.lag().items()}

    def close(self) -> None:
        """Closes the consumers."""
        for follower in self._followers.values():
            follower.close()

    def _take(self, timeout: float) -> list[tuple[Stored, Record]]:
        return [pair for follower in self._followers.values() for pair in self._decoded(follower.poll(timeout))]

    def _decoded(self, stored: list[Stored]) -> list[tuple[Stored, Record]]:
        pairs = list(decoded(stored, self._codec))
        self.skipped += sum(each.value is not None for each in stored) - len(pairs)
        return pairs


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
