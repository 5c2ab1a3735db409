"""Requests the end offsets of partitions from the broker, independently of the consumer that reads them."""

import asyncio
import logging
from collections.abc import Collection
from typing import Any

from streams.runtime.progress import Place
from tentalis.kafka.config import client_config
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0


class LogEnds:
    """Requests end offsets through a separate client: a stalled fetcher, or its thread, sees no new records."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client: Any = None

    async def ask(self, places: Collection[Place]) -> dict[Place, int]:
        """The offset after the last record of each place, without those that the broker did not return (logged)."""
        return await asyncio.to_thread(self._ask, places)

    def _ask(self, places: Collection[Place]) -> dict[Place, int]:
        from confluent_kafka import KafkaException, TopicPartition
        from confluent_kafka.admin import AdminClient, OffsetSpec

        from tentalis.kafka.topic_client import known_offset

        if not places:
            return {}
        if self._client is None:
            self._client = AdminClient(client_config(self._settings))
        wanted = {TopicPartition(topic, partition): OffsetSpec.latest() for topic, partition in places}
        ends, untold = {}, dict[Place, str]()
        for place, future in self._client.list_offsets(wanted, request_timeout=TIMEOUT_S).items():
            try:
                ends[str(place.topic), int(place.partition)] = known_offset(future.result().offset)
            except KafkaException as error:
                untold[place.topic, place.partition] = error.args[0].str()
        if untold:
            (topic, partition), reason = next(iter(untold.items()))
            log.warning(
                "the end offsets of %d of %d partitions are not available (%s[%d]: %s): until they are, the lag is "
                "computed from the last fetch",
                *(len(untold), len(places), topic, partition, reason),
            )
        return ends
