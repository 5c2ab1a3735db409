"""The requests of the codec and of `tentalis schemas` to a schema registry, a real one where there is one; and the join
through a registry that is away for a while."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from schemas import topics
from schemas.records import Score, Tick
from schemas.wire.avro import AvroSchema, all_current
from schemas.wire.codec import CONFLUENT, Codec, SchemasUnavailable
from schemas.wire.registry import ConfluentRegistry, SchemaRefused
from tentalis.cli.main import app
from tentalis.cli.shared.record_json import to_plain
from tentalis.kafka.codec import make_codec
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.offsets import end_offsets
from tentalis.kafka.producer import Publisher
from tentalis.local.broker import EmbeddedBroker
from tentalis.service.settings import Settings
from tentalis.text.timestamps import now_ms
from tests.integration.streams import test_join_broker as join
from tests.support.join_support import head, hint, open_, sample, score
from tests.support.join_worker import JoinWorker
from tests.support.kafka_fixture import ensure_topics, eventually
from tests.support.loop_records import feedback_on, result, task
from tests.support.next_version import NextVersion, both_ways
from tests.support.registry_fixture import Door, Registry, door

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


@pytest.fixture
def way(registry: Registry) -> Iterator[Door]:
    """The way to the registry, which can be shut."""
    with door(registry.url) as found:
        yield found


@pytest.mark.usefixtures("few_partitions")
def test_schema_versions_mix_through_a_registry_too(
    own_broker: EmbeddedBroker,
    way: Door,
    workers: list[JoinWorker],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings(bootstrap=own_broker.bootstrap, schema_registry=way.url)
    ensure_topics(settings)
    both_ways(settings, tmp_path, "t1", CONFLUENT)
    assert len(ConfluentRegistry(way.url).versions("Feedback")) >= 2

    samples = join.produce(settings, random.Random(3), "task")
    # A score of the next version meets halves of this one.
    late = head("mixed", deadline_ms=60_000, opd_window_ms=60_000)
    publisher = Publisher(settings, "test", make_codec(settings))
    for record in (open_(late, now_ms()), hint(sample(late), at=now_ms())):
        publisher.send(topics.HALVES, record)
    publisher.flush()
    ahead = NextVersion(tmp_path / "again", own_broker.bootstrap, way.url)
    plain = {
        name: value for name, value in to_plain(score(sample(late), 0.5, at=now_ms())).items() if name != "feedback_id"
    }
    ahead.writes(topics.HALVES, "Score", plain | {"judge": "somebody"})

    # While the registry is away nothing can be read, and nothing is condemned.
    way.shut, asked = True, way.knocks
    monkeypatch.setenv("SCHEMA_REGISTRY_URL", way.url)
    workers.append(JoinWorker(own_broker.bootstrap, tmp_path, "join"))
    log = workers[0].log
    eventually(lambda: "trying again" in log.read_text(), 60, message=lambda: log.read_text()[-2000:])
    assert way.knocks > asked
    way.shut = False

    def complete() -> bool:
        return samples | {"mixed/0"} <= {key for topic, key in join.written(settings)[1] if topic == topics.OUTCOMES}

    eventually(complete, 60, interval=0.5, message=lambda: log.read_text()[-2000:])
    assert workers[0].end() == 0
    stored, values = join.written(settings)
    assert all(each.value is not None and each.value.startswith(CONFLUENT) for each in stored)
    assert values == join.folded(settings)
    assert sum(end_offsets(settings, topics.dlq(topics.HALVES)).values()) == 0
    codec = make_codec(settings)
    scores = [each.decode_own(codec) for each in read_to_end(settings, topics.HALVES) if each.key == "mixed"]
    assert [each.reward for each in scores if isinstance(each, Score)] == [0.5]
    (rollout,) = [each.decode_own(codec) for each in stored if (each.topic, each.key) == (topics.ROLLOUTS, "mixed/0")]
    assert (rollout.has_rl, rollout.has_opd, rollout.reward) == (True, True, 0.5)  # type: ignore[attr-defined]
