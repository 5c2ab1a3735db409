"""Where partitions end, asked of the broker beside whoever reads them."""

import asyncio
import logging
from collections.abc import Collection
from typing import Any

from streams.progress import Place
from tentalis.config import Settings
from tentalis.kafka import client_config

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0


class LogEnds:
    """Asks through a client of its own: a fetcher that stands still, or the thread that it is in, knows nothing new."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client: Any = None

    async def ask(self, places: Collection[Place]) -> dict[Place, int]:
        """The offset after the last record of each; without those that the broker did not tell (a line in the log)."""
        return await asyncio.to_thread(self._ask, places)

    def _ask(self, places: Collection[Place]) -> dict[Place, int]:
        from confluent_kafka import KafkaException, TopicPartition
        from confluent_kafka.admin import AdminClient, OffsetSpec

        if not places:
            return {}
        if self._client is None:
            self._client = AdminClient(client_config(self._settings), logger=logging.getLogger("librdkafka"))
        wanted = {TopicPartition(topic, partition): OffsetSpec.latest() for topic, partition in places}
        ends, untold = {}, dict[Place, str]()
        for place, future in self._client.list_offsets(wanted, request_timeout=TIMEOUT_S).items():
            try:
                ends[str(place.topic), int(place.partition)] = int(future.result().offset)
            except KafkaException as error:
                untold[place.topic, place.partition] = error.args[0].str()
        if untold:
            (topic, partition), reason = next(iter(untold.items()))
            log.warning(
                "where %d of %d partitions end was not told (%s[%d]: %s): until it is, what was fetched last counts",
                *(len(untold), len(places), topic, partition, reason),
            )
        return ends
