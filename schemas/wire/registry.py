"""The schema registry for Confluent framing, through confluent-kafka's own client: the ids of the schemas that are
written, which must be registered already, and the schemas of the ids that are read."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2  # the HTTP library of confluent-kafka's registry client
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError

from schemas.wire.avro import AvroSchema, all_current
from schemas.wire.codec import SchemasUnavailable

SUBJECT_PREFIX = "tentalis."
TIMEOUT_S = 5
# No retries here: the caller has its own back-off, and must not be blocked for long.
CLIENT: dict[str, Any] = {"timeout": TIMEOUT_S, "max.retries": 0}


class SchemaRefused(Exception):
    """The registry rejects a schema: it cannot read the records of an earlier version of its subject, or the registry
    considers it invalid."""


class ConfluentRegistry:
    """A Confluent-compatible schema registry. Subjects are record names, because one topic may hold several records.

    `login`: further settings of the client: authentication and trusted CA.
    """

    def __init__(
        self, url: str, client: SchemaRegistryClient | None = None, *, login: Mapping[str, str] | None = None
    ) -> None:
        # Only the host names, because a URL may contain credentials.
        self._name = ", ".join(urlsplit(one).hostname or one for one in url.split(","))
        self._client = client or SchemaRegistryClient.new_client({"url": url} | CLIENT | dict(login or {}))
        self._schemas: dict[int, AvroSchema] = {}

    def id_of(self, schema: AvroSchema) -> int:
        """The id under which a schema is registered for its record's name, looked up as confluent-kafka's serializer
        does with auto-register off. Raises SchemasUnavailable if the registry is unreachable or lacks the schema."""
        with self._asking():
            try:
                found = self._client.lookup_schema(SUBJECT_PREFIX + schema.name, as_sent(schema))
            except SchemaRegistryError as error:
                if not _not_there(error):
                    raise
                raise SchemasUnavailable(
                    f"the schema registry {self._name} does not have this version's {schema.name} under "
                    f"{SUBJECT_PREFIX}{schema.name}: {error}. `tentalis schemas register` registers it"
                ) from error
        return int(found.schema_id)

    def schema_by_id(self, schema_id: int) -> AvroSchema:
        """The writer's schema of an id. Raises LookupError if the registry reports that it does not have the id, or if
        its schema is not an Avro record's; SchemasUnavailable if the registry does not answer."""
        if schema_id not in self._schemas:
            with self._asking():
                try:
                    found = self._client.get_schema(schema_id)
                except SchemaRegistryError as error:
                    if not _not_there(error):
                        raise
                    raise LookupError(str(error)) from error
            try:
                self._schemas[schema_id] = AvroSchema.parse(str(found.schema_str))
            except (ValueError, RecursionError) as error:
                raise LookupError(f"{found.schema_type} schema, {error}") from error
        return self._schemas[schema_id]

    def register(self, schema: AvroSchema) -> int:
        """Registers a schema under its record's name and returns its id. Idempotent.

        Raises SchemaRefused, SchemasUnavailable.
        """
        with self._asking():
            try:
                return int(self._client.register_schema(SUBJECT_PREFIX + schema.name, as_sent(schema)))
            except SchemaRegistryError as error:
                if error.http_status_code not in (409, 422):
                    raise
                raise SchemaRefused(
                    f"the schema registry {self._name} refuses {SUBJECT_PREFIX}{schema.name}: {error}"
                ) from error

    def register_all(self) -> dict[str, int]:
        """Registers every current schema and returns name -> id. Raises as `register`."""
        return {schema.name: self.register(schema) for schema in all_current()}

    def versions(self, name: str) -> dict[int, AvroSchema]:
        """The versions of a record's subject by number, empty if the registry does not have the subject.

        Raises SchemasUnavailable, and ValueError for a version that is not an Avro record schema.
        """
        subject = SUBJECT_PREFIX + name
        with self._asking():
            try:
                numbers = self._client.get_versions(subject)
            except SchemaRegistryError as error:
                if not _not_there(error):
                    raise
                return {}
            found = {int(number): self._client.get_version(subject, number) for number in numbers}
        return {number: AvroSchema.parse(str(version.schema.schema_str)) for number, version in found.items()}

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except (SchemaRegistryError, httpx2.HTTPError) as error:
            raise SchemasUnavailable(f"the request to the schema registry {self._name} failed: {error!r}") from error


def as_sent(schema: AvroSchema) -> Schema:
    """The schema as it is registered and looked up: a string's default "{}" is escaped, which is the same JSON.
    Apicurio makes an object of a quoted {} before it parses a schema, and then rejects the schema for that default."""
    return Schema(schema.text.replace('"{}"', r'"\u007b}"'), "AVRO")


def _not_there(error: SchemaRegistryError) -> bool:
    """True if the registry itself reports that the subject or schema does not exist: a 404 from a proxy, or for a wrong
    path, has no such error code."""
    return error.http_status_code == 404 and 40400 <= (error.error_code or 0) < 40500
