"""Digests of the records of a topic's partitions, to compare a copy with what was to be copied."""

import hashlib
from collections.abc import Iterable
from typing import Any

from confluent_kafka import Message

from tentalis.ops.repartition.placement import Headers


class UnreadableHeaders(Exception):
    """A record has a header name that is not UTF-8, so it cannot be copied unchanged."""


class PartitionDigests:
    """A count and a sha256 per partition, over key, value, headers and timestamp of its records in their order."""

    def __init__(self, partitions: int) -> None:
        self.counts = [0] * partitions
        self._hashes = [hashlib.sha256() for _ in range(partitions)]

    def add(self, partition: int, key: bytes | None, value: bytes | None, headers: Headers, timestamp: int) -> None:
        """Adds the next record of a partition."""
        sha = self._hashes[partition]
        named: Iterable[bytes | None] = (part for name, held in headers for part in (name.encode(), held))
        for part in (key, value, str(timestamp).encode(), *named):
            sha.update(b"-" if part is None else len(part).to_bytes(8, "big") + part)
        sha.update(b".")
        self.counts[partition] += 1

    def hex(self) -> list[str]:
        """Returns the digests by partition."""
        return [each.hexdigest() for each in self._hashes]


def headers_unchanged(message: Message) -> list[tuple[str, Any]]:
    """Returns the headers of a message. Raises UnreadableHeaders."""
    try:
        return list(message.headers() or ())
    except (SystemError, UnicodeDecodeError) as error:
        place = f"{message.topic()}[{message.partition()}]@{message.offset()}"
        raise UnreadableHeaders(
            f"{place} has a header name that is not UTF-8, so it cannot be copied unchanged. `tentalis topics trim` "
            "removes the records before a time"
        ) from error
