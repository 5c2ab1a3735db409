"""The requests of the codec and of `tentalis schemas` to a schema registry; to a real one where there is one."""

import json

import pytest
from typer.testing import CliRunner

from schemas import topics
from schemas.records import Tick
from schemas.wire.avro import AvroSchema, all_current
from schemas.wire.codec import CONFLUENT, Codec, SchemasUnavailable
from schemas.wire.registry import ConfluentRegistry, SchemaRefused
from tentalis.cli.main import app
from tests.support.loop_records import feedback_on, result, task
from tests.support.registry_fixture import Registry

pytestmark = pytest.mark.broker


def made_up(name: str, **fields: str) -> AvroSchema:
    """A schema of no record of ours: field to type."""
    listed = [{"name": field, "type": kind, "default": "{}"} for field, kind in fields.items()]
    text = json.dumps({"type": "record", "name": name, "namespace": "tentalis", "fields": listed})
    return AvroSchema.parse(text)


def test_every_schema_is_registered_once_and_found_by_text_and_by_id(registry: Registry) -> None:
    first = ConfluentRegistry(registry.url).register_all()
    again = ConfluentRegistry(registry.url)
    assert again.register_all() == first and len(set(first.values())) == len(first)
    for schema in all_current():
        assert again.id_of(schema) == first[schema.name]
        assert again.schema_by_id(first[schema.name]).fingerprint == schema.fingerprint
        assert schema.fingerprint in {known.fingerprint for known in again.versions(schema.name).values()}


def test_an_unregistered_schema_or_id_is_an_error(registry: Registry, unique: str) -> None:
    client, nobody = ConfluentRegistry(registry.url), made_up(f"R{unique.replace('-', '')}", n="string")
    assert client.versions(nobody.name) == {}
    with pytest.raises(SchemasUnavailable, match="`tentalis schemas register` registers it"):
        client.id_of(nobody)
    with pytest.raises(LookupError):
        client.schema_by_id(2_000_000_000)


def test_it_refuses_what_cannot_read_an_earlier_version(registry: Registry, unique: str) -> None:
    client, name = ConfluentRegistry(registry.url), f"R{unique.replace('-', '')}"
    client.register(made_up(name, n="string"))
    client.register(made_up(name, n="string", more="string"))
    with pytest.raises(SchemaRefused, match=rf"refuses tentalis\.{name}"):
        client.register(
            AvroSchema.parse(made_up(name, n="string").text.replace('"string"', '"long"').replace('"{}"', "0"))
        )
    with pytest.raises(SchemaRefused, match=rf"refuses tentalis\.{name}"):
        client.register(AvroSchema.parse(made_up(name, z="string").text.replace(', "default": "{}"', "")))
    assert list(client.versions(name)) == [1, 2]


def test_records_go_there_and_back(registry: Registry) -> None:
    ConfluentRegistry(registry.url).register_all()
    writer, reader = Codec(ConfluentRegistry(registry.url)), Codec(ConfluentRegistry(registry.url))
    answer = result(task("t"))
    records = ((topics.HALVES, Tick(event_time=1, partition=2)), (topics.FEEDBACK, feedback_on(answer, "f")))
    for topic, record in records:
        wire = writer.encode(topic, record)
        assert wire.startswith(CONFLUENT) and reader.decode(wire, topic=topic, partition=0, offset=0) == record


def test_the_commands_register_list_and_check(registry: Registry) -> None:
    def run(*arguments: str) -> object:
        done = CliRunner().invoke(app, ["schemas", *arguments, "--registry", registry.url, "-o", "json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    run("register")
    again = run("register")
    assert isinstance(again, list) and {row["change"] for row in again} == {"there"}
    listed = run("list")
    assert isinstance(listed, list) and all(row["registry"] for row in listed)
    checked = run("check")
    assert isinstance(checked, dict) and checked["incompatible"] == []
