"""The topic table on a real broker: applied, in line, drifted, repaired."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from typer.testing import CliRunner

from schemas import topics
from schemas.wire.avro import AvroSchema, all_current
from tentalis.cli.main import app
from tentalis.kafka import acls
from tentalis.kafka.acls import Grant, Operation, Resource
from tentalis.kafka.admin import Change, ChangeKind, KafkaAdmin, apply, ensure, missing_schemas, plan
from tentalis.kafka.codec import SchemaLookup, make_codec
from tentalis.kafka.config import client_config
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.errors import Unreachable
from tentalis.kafka.preflight import TopicsMissing, wait_for_topics
from tentalis.kafka.producer import Publisher
from tentalis.kafka.topology import topic_table
from tentalis.service.exit_codes import ExitCode
from tentalis.service.settings import Settings
from tests.support.kafka_fixture import Kafka

pytestmark = pytest.mark.broker
runner = CliRunner()


@pytest.fixture
def settings(kafka: Kafka) -> Settings:
    found = Settings(bootstrap=kafka.bootstrap)
    ensure(found)
    return found


@pytest.fixture
def invoke(settings: Settings) -> Iterator[Callable[..., tuple[int, str]]]:
    def run(*arguments: str) -> tuple[int, str]:
        done = runner.invoke(app, [*arguments, "--bootstrap-server", str(settings.bootstrap)])
        return done.exit_code, done.stdout

    yield run


def test_schemas_are_found_when_they_come_and_what_is_none_is_passed_over(settings: Settings, unique: str) -> None:
    def schema(name: str) -> AvroSchema:
        return AvroSchema.parse(json.dumps({"type": "record", "name": name, "fields": []}))

    early, late = (schema(f"{kind}_{unique.replace('-', '_')}") for kind in ("Early", "Late"))
    publisher = Publisher(settings, "test", make_codec(settings))
    for value in (b"\xff", b"[]", b"[" * 100_000, early.text.encode()):
        publisher.send_bytes(topics.SCHEMAS, unique.encode(), value)
    publisher.flush()
    lookup = SchemaLookup(settings)
    assert lookup(early.fingerprint) == early
    assert lookup(late.fingerprint) is None
    publisher.send_bytes(topics.SCHEMAS, unique.encode(), late.text.encode())
    publisher.flush()
    assert lookup(late.fingerprint) == late


def retention(settings: Settings, topic: str, value: str) -> None:
    KafkaAdmin(settings).update([Change(ChangeKind.UPDATE, topic, 0, {"retention.ms": (None, value)})], False)


def test_applying_again_changes_nothing(settings: Settings) -> None:
    assert ensure(settings) == []
    assert missing_schemas(settings) == []


def test_every_topic_is_there_as_the_table_says(settings: Settings) -> None:
    found = {topic.name: topic for topic in KafkaAdmin(settings).describe(topic_table().topics)}
    for name, wanted in topic_table().topics.items():
        assert len(found[name].partitions) == wanted.partitions
        assert found[name].managed
        assert found[name].config["min.insync.replicas"] == "1"


def test_the_schemas_topic_explains_every_record(settings: Settings) -> None:
    published = {s.key: s.value for s in read_to_end(settings, topics.SCHEMAS)}
    for schema in all_current():
        value = published[schema.fingerprint.hex()]
        assert value is not None
        assert AvroSchema.parse(value.decode()).fingerprint == schema.fingerprint


def test_drift_is_shown_exits_with_3_and_is_repaired(
    settings: Settings, invoke: Callable[..., tuple[int, str]]
) -> None:
    retention(settings, topics.EVALS, "12345")
    code, out = invoke("topics", "diff", "-o", "json")
    (change,) = json.loads(out)
    assert (code, change["change"], change["topic"]) == (3, "update", topics.EVALS)
    assert change["config"] == {"retention.ms": {"is": "12345", "wanted": "2592000000"}}
    assert invoke("topics", "apply", "--dry-run")[0] == 0
    assert invoke("topics", "diff")[0] == 3
    assert invoke("topics", "apply", "--yes")[0] == 0
    code, out = invoke("topics", "diff")
    assert (code, "nothing to do" in out) == (0, True)


def test_without_a_yes_nothing_is_applied(settings: Settings, invoke: Callable[..., tuple[int, str]]) -> None:
    retention(settings, topics.EVALS, "12345")
    assert invoke("topics", "apply")[0] == 2
    assert invoke("topics", "diff")[0] == 3
    ensure(settings)


def test_another_partition_count_is_refused_with_3(settings: Settings, unique: str) -> None:
    admin = KafkaAdmin(settings)
    apply(admin, [Change(ChangeKind.CREATE, unique, 2)], dry_run=False)
    table = topics.TopicTable({unique: topics.Topic(unique, (), 3, {})}, 1, 3)
    (change,) = plan(table, admin.current([unique]))
    assert change.kind is ChangeKind.IMPOSSIBLE


def test_a_dry_run_of_a_creation_creates_nothing(settings: Settings, unique: str) -> None:
    apply(KafkaAdmin(settings), [Change(ChangeKind.CREATE, unique, 2)], dry_run=True)
    assert unique not in KafkaAdmin(settings).names()


def test_creating_what_exists_is_no_error(settings: Settings, unique: str) -> None:
    for _ in range(2):
        apply(KafkaAdmin(settings), [Change(ChangeKind.CREATE, unique, 2)], dry_run=False)


def test_a_setting_that_the_broker_does_not_know_is_an_error(settings: Settings, unique: str) -> None:
    from confluent_kafka import KafkaException

    change = Change(ChangeKind.CREATE, unique, 1, {"no.such.setting": (None, "1")})
    with pytest.raises(KafkaException, match=r"no\.such\.setting|Unknown topic config"):
        apply(KafkaAdmin(settings), [change], dry_run=False)


def test_list_and_describe(settings: Settings, invoke: Callable[..., tuple[int, str]]) -> None:
    code, out = invoke("topics", "list", "-o", "json")
    rows = {row["topic"]: row for row in json.loads(out)}
    assert code == 0
    assert rows[topics.HALVES]["partitions"] == 8
    assert rows[topics.SCHEMAS]["records"] >= len(all_current())
    code, out = invoke("topics", "describe", topics.RUNS)
    assert (code, "cleanup.policy" in out) == (0, True)
    assert invoke("topics", "describe", "no-such-topic")[0] == 3


def test_a_change_that_may_lose_records_stops_or_is_skipped_unless_it_is_wanted(
    settings: Settings, invoke: Callable[..., tuple[int, str]]
) -> None:
    retention(settings, topics.EVALS, "-1")
    try:
        assert "needs a person" in invoke("topics", "plan")[1]
        assert invoke("topics", "apply", "--yes", "--on-risk", "stop")[0] == ExitCode.NEEDS_OPERATOR
        assert invoke("topics", "apply", "--yes", "--on-risk", "skip")[0] == ExitCode.OK
        (kept,) = KafkaAdmin(settings).describe([topics.EVALS])
        assert kept.config["retention.ms"] == "-1"
    finally:
        assert invoke("topics", "apply", "--yes")[0] == ExitCode.OK
    (corrected,) = KafkaAdmin(settings).describe([topics.EVALS])
    assert corrected.config["retention.ms"] == topic_table()[topics.EVALS].config["retention.ms"]


def test_wait_returns_when_the_topics_of_a_role_are_there_and_names_those_that_do_not_come(
    settings: Settings, invoke: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, unique: str
) -> None:
    assert invoke("topics", "wait", "--role", "join", "--timeout", "5")[0] == ExitCode.OK
    assert invoke("topics", "wait", "--role", "joiner")[0] == ExitCode.USAGE
    missing = Grant(Resource.TOPIC, f"tentalis.{unique}.v1", Operation.READ)
    monkeypatch.setitem(acls.ROLES, "join", replace(acls.ROLES["join"], grants=(missing,)))
    assert invoke("topics", "wait", "--role", "join", "--timeout", "0")[0] == ExitCode.DRIFT
    with pytest.raises(TopicsMissing, match=missing.name):
        wait_for_topics(settings, [missing.name], 0.0)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait_for_topics, settings, [missing.name], 30.0)
        admin = AdminClient(client_config(settings))  # its end would cancel the request
        admin.create_topics([NewTopic(missing.name, 1)])[missing.name].result(10)
        assert waiting.result(30) is None


def test_wait_outlasts_a_broker_that_is_not_there_yet() -> None:
    nobody = Settings(bootstrap="127.0.0.1:1")
    with pytest.raises(Unreachable):
        wait_for_topics(nobody, (), 0.0)
