"""A codec that finds the schemas of records on the log or in a registry."""

import logging

from confluent_kafka import Consumer, KafkaException

from schemas import topics
from schemas.wire.avro import AvroSchema
from schemas.wire.codec import Codec, SchemasUnavailable
from tentalis.kafka.acls import READERS
from tentalis.kafka.config import consumer_config
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.errors import NoSuchTopic
from tentalis.kafka.offsets import _partitions, _watermarks
from tentalis.service.settings import Settings

log = logging.getLogger(__name__)


# How long a process waits for an unreachable registry or broker at the look-up of a schema, before it fails.
SCHEMA_PATIENCE_S = 60.0


class SchemaLookup:
    """Finds writer schemas on tentalis.schemas.v1 for a codec. Each new fingerprint reads the topic on from the last
    position: corrupt records have arbitrary fingerprints, and a schema may be published right after it was missed.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._consumer: Consumer | None = None
        self._found: dict[bytes, AvroSchema] = {}
        self._next: dict[int, int] = {}

    def __call__(self, fingerprint: bytes) -> AvroSchema | None:
        """The schema of a fingerprint, or None. Raises SchemasUnavailable while the topic cannot be read; Forbidden."""
        if fingerprint not in self._found:
            try:
                self._read_on()
            except (KafkaException, NoSuchTopic, TimeoutError) as error:
                raise SchemasUnavailable(f"schemas cannot be looked up on {topics.SCHEMAS}: {error}") from error
        return self._found.get(fingerprint)

    def _read_on(self) -> None:
        if self._consumer is None:
            consumer = Consumer(consumer_config(self._settings, READERS))
            self._next = dict.fromkeys(_partitions(self._settings, consumer, topics.SCHEMAS), 0)
            self._consumer = consumer
        ends = {p: _watermarks(self._settings, self._consumer, topics.SCHEMAS, p, patience=0.0)[1] for p in self._next}
        if ends == self._next:
            return
        for stored in read_to_end(self._settings, topics.SCHEMAS, start=self._next, end=ends):
            if stored.value is None:
                continue
            try:
                schema = AvroSchema.parse(stored.value.decode())
            except (ValueError, RecursionError) as error:
                log.warning("%s is skipped: %s", stored, error)
            else:
                self._found[schema.fingerprint] = schema
        self._next = ends


def make_codec(settings: Settings, *, patience: float = SCHEMA_PATIENCE_S) -> Codec:
    """The codec of a process: Confluent framing if SCHEMA_REGISTRY_URL is set, else single-object encoding.

    `patience`: seconds for which it blocks while the registry or broker is unreachable; 0 if the caller retries itself.
    """
    if settings.schema_registry:
        from schemas.wire.registry import ConfluentRegistry

        login = settings.registry_login.client_config()
        return Codec(ConfluentRegistry(settings.schema_registry, login=login), SchemaLookup(settings), patience)
    return Codec(None, SchemaLookup(settings), patience)
