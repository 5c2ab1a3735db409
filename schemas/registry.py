"""Confluent framing through confluent-kafka's own serializer; auto-register is off, so the registry must know them."""

from collections.abc import Mapping
from typing import Any

from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, record_subject_name_strategy
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.serialization import MessageField, SerializationContext

from schemas.avro import AvroSchema, all_current

SUBJECT_PREFIX = "tentalis."


class ConfluentRegistry:
    """A Confluent-compatible schema registry. Subjects are record names, because one topic may hold several records.

    `login`: further settings of the client, how to authenticate and whom to trust.
    """

    def __init__(
        self, url: str, client: SchemaRegistryClient | None = None, *, login: Mapping[str, str] | None = None
    ) -> None:
        self._client = client or SchemaRegistryClient.new_client({"url": url, **(login or {})})
        self._serializers: dict[str, AvroSerializer] = {}
        self._schemas: dict[int, AvroSchema] = {}

    def serialize(self, topic: str, schema: AvroSchema, datum: dict[str, Any]) -> bytes:
        """The datum in Confluent framing. Raises SchemaRegistryError if the registry does not know the schema."""
        serializer = self._serializers.get(schema.name)
        if serializer is None:
            conf = {"auto.register.schemas": False, "subject.name.strategy": record_subject_name_strategy}
            serializer = self._serializers[schema.name] = AvroSerializer(self._client, schema.text, conf=conf)
        return bytes(serializer(datum, SerializationContext(topic, MessageField.VALUE)))

    def schema_by_id(self, schema_id: int) -> AvroSchema:
        """The writer's schema of an id. Raises LookupError for an unknown id."""
        if schema_id not in self._schemas:
            try:
                found = self._client.get_schema(schema_id)
            except SchemaRegistryError as error:
                raise LookupError(str(error)) from error
            self._schemas[schema_id] = AvroSchema.parse(str(found.schema_str))
        return self._schemas[schema_id]

    def register_all(self) -> dict[str, int]:
        """Registers every current schema under its record name; name -> id. Registering again is harmless."""
        return {
            schema.name: int(self._client.register_schema(SUBJECT_PREFIX + schema.name, Schema(schema.text, "AVRO")))
            for schema in all_current()
        }
