"""Records of several topics as they come, each topic followed from its start without a consumer group."""

import logging
from collections.abc import Iterable

from schemas.codec import Codec, DecodeError
from schemas.records import Record
from tentalis.config import Settings
from tentalis.kafka import Follower, Stored

log = logging.getLogger(__name__)


class Reader:
    """Follows topics and decodes them. Bad ones are their owners' to dead-letter: here they are named and counted."""

    def __init__(self, settings: Settings, topic_names: Iterable[str], codec: Codec) -> None:
        self._followers = {name: Follower(settings, name) for name in topic_names}
        self._codec = codec
        self.skipped = 0

    @property
    def caught_up(self) -> bool:
        """Whether every topic was read to the end that it had when the reading began, or further."""
        return all(follower.caught_up for follower in self._followers.values())

    def poll(self, timeout: float) -> list[tuple[Stored, Record]]:
        """What has arrived, topic by topic in the order given. Waits up to `timeout` seconds if nothing has."""
        found = self._take(0.0)
        if not found and timeout > 0:
            first = next(iter(self._followers))
            found = self._decoded(self._followers[first].poll(timeout)) + self._take(0.0)
        return found

    def close(self) -> None:
        """Leaves."""
        for follower in self._followers.values():
            follower.close()

    def _take(self, timeout: float) -> list[tuple[Stored, Record]]:
        return [pair for follower in self._followers.values() for pair in self._decoded(follower.poll(timeout))]

    def _decoded(self, stored: list[Stored]) -> list[tuple[Stored, Record]]:
        pairs = []
        for each in stored:
            if each.value is None:  # a tombstone
                continue
            try:
                pairs.append((each, each.decode_own(self._codec)))
            except DecodeError as error:
                self.skipped += 1
                log.warning("skipped (%d so far): %s", self.skipped, error)
        return pairs
