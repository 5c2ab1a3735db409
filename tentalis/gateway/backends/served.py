"""The gateway's view of the versions that backends serve, kept current from their acknowledgements on the log."""

import logging
import threading
import time

from confluent_kafka import KafkaException

from schemas import topics
from schemas.records import PolicyAck
from schemas.wire.codec import Codec, SchemasUnavailable
from tentalis.kafka.consumer import Lags
from tentalis.kafka.errors import Forbidden, NoSuchTopic, Unreachable
from tentalis.kafka.reader import Reader
from tentalis.policies.served import ServedVersions
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)

_POLL_S = 0.2
_RETRY_S = 1.0


class ServedView:
    """Follows tentalis.policy-acks.v1 on a separate thread. While the broker is unreachable, the last known versions
    stay in use."""

    def __init__(self) -> None:
        self._by_server: dict[str, ServedVersions] = {}
        self.caught_up = False
        self.lag: Lags = {}

    def name(self, server_id: str, policy: str) -> str | None:
        """`policy@vN` as that server serves it, or None if it serves no version."""
        served = self._by_server.get(server_id)
        return None if served is None else served.name(policy)

    def apply(self, ack: PolicyAck) -> None:
        """Applies an acknowledgement; call in log order."""
        if self._by_server.setdefault(ack.server_id, ServedVersions(ack.server_id)).apply(ack):
            log.info("%s serves %s", ack.server_id, self.name(ack.server_id, ack.policy))

    def follow(self, settings: Settings, codec: Codec, stop: threading.Event) -> None:
        """Reads acknowledgements until `stop`; starts over if reading fails."""
        while not stop.is_set():
            try:
                reader = Reader(settings, [topics.POLICY_ACKS], codec)
                try:
                    while not stop.is_set():
                        for _, record in reader.poll(_POLL_S):
                            assert isinstance(record, PolicyAck)
                            self.apply(record)
                        self.caught_up = self.caught_up or reader.caught_up
                        self.lag = reader.lag()
                finally:
                    reader.close()
            except (KafkaException, NoSuchTopic, SchemasUnavailable, Forbidden, Unreachable) as error:
                log.warning("the served versions cannot be read now; retrying: %s", error)
                time.sleep(_RETRY_S)
