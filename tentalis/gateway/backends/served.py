"""The gateway's view of the versions that backends serve and of assignments, kept current from the log."""

import logging
import threading
import time

from confluent_kafka import KafkaException

from schemas import topics
from schemas.records import PolicyAck, Record
from schemas.wire.codec import Codec, SchemasUnavailable
from tentalis.kafka.consumer import Lags
from tentalis.kafka.errors import Forbidden, NoSuchTopic, Unreachable
from tentalis.kafka.reader import Reader
from tentalis.policies.assignments import AssignedVersions
from tentalis.policies.served import ServedVersions
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)

_POLL_S = 0.2
_RETRY_S = 1.0


class ServedView:
    """Follows tentalis.policies.v1 and tentalis.policy-acks.v1 on a separate thread. While the broker is unreachable,
    the last known versions stay in use."""

    def __init__(self) -> None:
        self._by_server: dict[str, ServedVersions] = {}
        self._assigned = AssignedVersions()
        self.caught_up = False
        self.lag: Lags = {}

    def name(self, server_id: str, policy: str) -> str | None:
        """`policy@vN` as that server serves it, or None if it serves no version."""
        served = self._by_server.get(server_id)
        return None if served is None else served.name(policy)

    def assigned(self, server_id: str, policy: str, *, worker_id: str, environment: str, unit: str) -> str | None:
        """`policy@vN` that an assignment chooses at that server for a call of `unit` (its session), or None."""
        return self._assigned.name(
            server_id,
            policy,
            served=lambda name: self.name(server_id, name),
            worker_id=worker_id,
            environment=environment,
            unit=unit,
        )

    def apply(self, record: Record) -> None:
        """Applies a record of a policy or of a server; call in log order."""
        if not isinstance(record, PolicyAck):
            self._assigned.apply(record)
        elif self._by_server.setdefault(record.server_id, ServedVersions(record.server_id)).apply(record):
            log.info("%s serves %s", record.server_id, self.name(record.server_id, record.policy))

    def follow(self, settings: Settings, codec: Codec, stop: threading.Event) -> None:
        """Reads both topics until `stop`; starts over if reading fails."""
        while not stop.is_set():
            try:
                reader = Reader(settings, [topics.POLICIES, topics.POLICY_ACKS], codec)
                try:
                    while not stop.is_set():
                        for _, record in reader.poll(_POLL_S):
                            self.apply(record)
                        self.caught_up = self.caught_up or reader.caught_up
                        self.lag = reader.lag()
                finally:
                    reader.close()
            except (KafkaException, NoSuchTopic, SchemasUnavailable, Forbidden, Unreachable) as error:
                log.warning("the served versions cannot be read now; retrying: %s", error)
                time.sleep(_RETRY_S)
