"""What the backends serve now, as their acknowledgements on the log say: the gateway's own copy, kept up to date."""

import logging
import threading
import time

from confluent_kafka import KafkaException

from schemas import topics
from schemas.codec import Codec, SchemasUnavailable
from schemas.records import PolicyAck
from tentalis.config import Settings
from tentalis.kafka import NoSuchTopic
from tentalis.reading import Reader
from tentalis.refusal import Forbidden, Unreachable
from tentalis.served import Served

log = logging.getLogger(__name__)

_POLL_S = 0.2
_AGAIN_S = 1.0


class ServedView:
    """Follows tentalis.policy-acks.v1 on a thread of its own. While the broker is away, what was served last goes on
    being asked for."""

    def __init__(self) -> None:
        self._by_server: dict[str, Served] = {}
        self.caught_up = False

    def name(self, server_id: str, policy: str) -> str | None:
        """`policy@vN` as that server serves it, None if it serves none."""
        served = self._by_server.get(server_id)
        return None if served is None else served.name(policy)

    def apply(self, ack: PolicyAck) -> None:
        """Takes in an acknowledgement, in log order."""
        if self._by_server.setdefault(ack.server_id, Served(ack.server_id)).apply(ack):
            log.info("%s serves %s", ack.server_id, self.name(ack.server_id, ack.policy))

    def follow(self, settings: Settings, codec: Codec, stop: threading.Event) -> None:
        """Until `stop`; begins anew where reading fails."""
        while not stop.is_set():
            try:
                reader = Reader(settings, [topics.POLICY_ACKS], codec)
                try:
                    while not stop.is_set():
                        for _, record in reader.poll(_POLL_S):
                            assert isinstance(record, PolicyAck)
                            self.apply(record)
                        self.caught_up = self.caught_up or reader.caught_up
                finally:
                    reader.close()
            except (KafkaException, NoSuchTopic, SchemasUnavailable, Forbidden, Unreachable) as error:
                log.warning("what is served cannot be read now, trying again: %s", error)
                time.sleep(_AGAIN_S)
