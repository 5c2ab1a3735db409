"""Asks the broker for the ids, partitions and offsets of topics, and for the notes of committed offsets."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import GroupAuthorizationFailedError
from aiokafka.errors import KafkaError as AIOKafkaError
from aiokafka.structs import TopicPartition as AIOTopicPartition
from confluent_kafka import OFFSET_END, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from tentalis.kafka.acls import READERS, Operation, Resource
from tentalis.kafka.config import client_config
from tentalis.kafka.errors import DENIED, ELECTING, forbidden, passes, refused
from tentalis.kafka.identity import CommitNote, CommittedOffset, OffsetRange, TopicIdentity
from tentalis.service.security import aiokafka
from tentalis.service.settings import Settings

T = TypeVar("T")

TIMEOUT_S = 15.0
PATIENCE_S = 30.0
RETRY_S = 0.2
TOPIC_PATIENCE_S = 5.0
"""Seconds within which a broker must know a topic that exists: one that has just started does not know it
immediately."""


class CommitsUnknown(Exception):
    """The committed offsets of a group cannot be read at present."""


def known_offset(answer: int) -> int:
    """The offset that librdkafka gave as the answer for one partition.

    While a broker restarts, librdkafka may report a partition that the broker's response left out with the offset -1001
    and without an error. Read as the end of a log, it would look like a log that was cut. Raises KafkaException, for
    which `asked_again` asks again.
    """
    if answer < 0:
        raise KafkaException(KafkaError(KafkaError.OFFSET_NOT_AVAILABLE, f"the broker's response lacks it ({answer})"))
    return int(answer)


def offset_of_time(answer: int) -> int | None:
    """The offset that librdkafka gave for a time, None if no record is that recent. Raises as `known_offset`."""
    return None if answer == OFFSET_END else known_offset(answer)


def asked_again(ask: Callable[[], T], patience: float = PATIENCE_S) -> T:
    """Returns the answer to a question about partitions, which a broker that has just started does not know
    immediately: for `patience` seconds it is asked again. Raises KafkaException."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return ask()
        except KafkaException as error:
            reason: KafkaError = error.args[0]
            if not (passes(reason) or reason.code() in ELECTING) or time.monotonic() > deadline:
                raise
        time.sleep(RETRY_S)


class TopicClient:
    """A client for topic ids and offsets. Its methods block; one client may be used from any thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client = AdminClient(client_config(settings), logger=logging.getLogger("librdkafka"))

    def identities(self, names: Collection[str]) -> dict[str, TopicIdentity]:
        """The named topics that the broker knows now. Raises Forbidden, KafkaException."""
        if not names:
            return {}
        found = {}
        asked = self._client.describe_topics(TopicCollection(sorted(names)), request_timeout=TIMEOUT_S)
        for name, future in asked.items():
            try:
                description = future.result(TIMEOUT_S + 1)
            except KafkaException as error:
                if error.args[0].code() in DENIED:
                    raise refused(self._settings, error.args[0], Operation.DESCRIBE, name) from error
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise
                continue
            found[name] = TopicIdentity(str(description.topic_id), len(description.partitions))
        return found

    def known_identities(self, names: Collection[str]) -> dict[str, TopicIdentity]:
        """The named topics that exist, asked again for TOPIC_PATIENCE_S seconds while the broker does not know some.
        Raises Forbidden, KafkaException."""
        deadline = time.monotonic() + TOPIC_PATIENCE_S
        while len(found := self.identities(names)) < len(set(names)) and time.monotonic() < deadline:
            time.sleep(RETRY_S)
        return found

    def ranges(self, places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], OffsetRange]:
        """The offsets of partitions that exist. Raises KafkaException."""
        wanted = [TopicPartition(topic, partition) for topic, partition in places]
        if not wanted:
            return {}
        begins, ends = (self._offsets(wanted, spec) for spec in (OffsetSpec.earliest(), OffsetSpec.latest()))
        return {place: OffsetRange(begins[place], ends[place]) for place in begins}

    def _offsets(self, wanted: list[TopicPartition], spec: Any) -> dict[tuple[str, int], int]:
        def ask() -> dict[tuple[str, int], int]:
            asked = self._client.list_offsets(dict.fromkeys(wanted, spec), request_timeout=TIMEOUT_S)
            return {
                (str(place.topic), int(place.partition)): known_offset(future.result(TIMEOUT_S + 1).offset)
                for place, future in asked.items()
            }

        return asked_again(ask)


def committed_notes(
    settings: Settings, group: str, places: Iterable[tuple[str, int]]
) -> dict[tuple[str, int], CommittedOffset]:
    """The committed offsets of a group with their notes; partitions without one are left out.

    Asked through aiokafka: confluent-kafka reads the metadata of an offset past its end. Raises CommitsUnknown.
    """
    wanted = [AIOTopicPartition(topic, partition) for topic, partition in places]
    if not wanted:
        return {}
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return asyncio.run(_committed_notes(settings, group, wanted))
        except GroupAuthorizationFailedError as error:
            raise forbidden(settings, [(Operation.DESCRIBE, Resource.GROUP, group)]) from error
        except AIOKafkaError as error:
            # On a new cluster the first question creates the topic of the offsets.
            if not error.retriable or time.monotonic() > deadline:
                raise CommitsUnknown(f"the committed offsets of group {group} are not available: {error}") from error
        time.sleep(RETRY_S)


async def _committed_notes(settings: Settings, group: str, wanted: list[Any]) -> dict[tuple[str, int], CommittedOffset]:
    client = AIOKafkaAdminClient(
        bootstrap_servers=settings.require_bootstrap().split(","),
        client_id=READERS,
        request_timeout_ms=round(1000 * TIMEOUT_S),
        **aiokafka(settings.security),
    )
    try:
        await client.start()
        found = await client.list_consumer_group_offsets(group, partitions=wanted)
    finally:
        await client.close()
    if missing := set(wanted) - found.keys():
        raise CommitsUnknown(f"the broker did not return {len(missing)} committed offsets of group {group}")
    return {tuple(place): committed_offset(each) for place, each in found.items() if each.offset >= 0}


def committed_offset(found: Any) -> CommittedOffset:
    """Converts an OffsetAndMetadata of aiokafka."""
    return CommittedOffset(int(found.offset), CommitNote.of(found.metadata))
