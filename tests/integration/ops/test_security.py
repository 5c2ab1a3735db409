"""A broker that lets in only whom it knows, and only to what ACLs allow: every way in, every role, and closed doors."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from typer.testing import CliRunner

from schemas import topics
from schemas.records import Promotion
from tentalis.cli.main import app
from tentalis.kafka.acls import ROLES, Resource
from tentalis.kafka.admin import bindings, ensure, grant
from tentalis.kafka.codec import make_codec
from tentalis.kafka.config import client_config, producer_config
from tentalis.kafka.consumer import Follower, GroupConsumer, read_to_end
from tentalis.kafka.errors import Forbidden, Unreachable
from tentalis.kafka.preflight import connect
from tentalis.kafka.producer import Publisher
from tentalis.service.security import BadSecurity, aiokafka
from tentalis.service.settings import Security, Settings
from tentalis.text.timestamps import now_ms
from tests.support.kafka_fixture import eventually
from tests.support.security_lab import (
    KEY_PASSWORD,
    PASSWORD,
    Application,
    Authority,
    SafeBroker,
    environment,
    safe_broker,
)
from tests.support.stream_records import make_feedback, make_result, make_task
from trainer.run.publish import TransactionalWriter

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SafeBroker]:
    with safe_broker(tmp_path_factory.mktemp("safe")) as broker:
        yield broker


@pytest.fixture
def started() -> Iterator[list[Application]]:
    started: list[Application] = []
    yield started
    for application in started:
        application.end()


WAYS = {
    "tls": (lambda lab: lab.tls(), "User:ANONYMOUS"),
    "mtls": (lambda lab: lab.certified("carol"), "User:carol"),
    "mtls-encrypted-key": (lambda lab: lab.certified("dave", KEY_PASSWORD), "User:dave"),
    "plain": (lambda lab: lab.login("plain-user", "PLAIN"), "User:plain-user"),
    "scram": (lambda lab: lab.login("scram-user"), "User:scram-user"),
}


@pytest.mark.parametrize("way", WAYS)
def test_both_client_libraries_connect_with_every_security_protocol(lab: SafeBroker, way: str) -> None:
    make, principal = WAYS[way]
    settings = make(lab)
    if way == "scram":
        lab.add_users(["scram-user"])
    topic = f"way-{way}"
    lab.allow(principal, "TOPIC", topic, "CREATE", "READ", "WRITE")
    lab.allow(principal, "GROUP", "tentalis-reader", "DESCRIBE")
    lab.allow(principal, "GROUP", topic, "READ")

    connect(settings, 10.0)
    admin = AdminClient(client_config(settings))
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(20)
    publisher = Publisher(settings, "test", make_codec(settings))
    publisher.send_bytes(topic, b"key", b"from librdkafka")
    publisher.flush(20.0)
    asyncio.run(_with_aiokafka(settings, topic))
    assert [stored.value for stored in read_to_end(settings, topic)] == [b"from librdkafka", b"from aiokafka"]
    member = GroupConsumer(settings, topic, [topic])
    try:
        found = eventually(lambda: member.poll(0.5), 20)
        member.commit(found)
    finally:
        member.close()


async def _with_aiokafka(settings: Settings, topic: str) -> None:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

    client = {"bootstrap_servers": settings.require_bootstrap(), **aiokafka(settings.security)}
    async with AIOKafkaProducer(**client, enable_idempotence=True) as producer:
        await producer.send_and_wait(topic, b"from aiokafka", b"key")
    async with AIOKafkaConsumer(topic, **client, auto_offset_reset="earliest") as consumer:
        records = await consumer.getmany(timeout_ms=10_000)
        assert [record.value for found in records.values() for record in found][:1] == [b"from librdkafka"]


class Connections:
    """A producer that closes idle connections, and counts those that it opened and lost."""

    def __init__(self, settings: Settings, topic: str) -> None:
        self._opened = self._lost = 0
        self._topic = topic
        often = {"connections.max.idle.ms": 1000, "statistics.interval.ms": 100, "stats_cb": self._count}
        self._producer = Producer(producer_config(settings) | often)

    def _count(self, text: str) -> None:
        brokers = json.loads(text)["brokers"].values()
        self._opened, self._lost = (sum(each[name] for each in brokers) for name in ("connects", "disconnects"))

    def send(self) -> None:
        """Sends a record and waits for its confirmation."""
        errors: list[object] = []
        self._producer.produce(self._topic, b"value", on_delivery=lambda error, _: errors.append(error))
        assert self._producer.flush(30) == 0 and errors == [None]

    def send_over_another(self) -> None:
        """Waits until the connection is closed, and sends a record over another one."""
        opened, lost = self._opened, self._lost
        eventually(lambda: self._producer.poll(0.1) is not None and self._lost > lost)
        self.send()
        eventually(lambda: self._producer.poll(0.1) is not None and self._opened > opened)


def test_a_client_keeps_its_certificate_and_a_new_one_reads_the_files(lab: SafeBroker) -> None:
    settings, topic = lab.certified("rotated"), "rotated"
    lab.allow("User:rotated", "TOPIC", topic, "CREATE", "READ", "WRITE")
    admin = AdminClient(client_config(settings))
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(20)
    old = Connections(settings, topic)
    old.send()
    certificate, key = (lab.folder / f"rotated.{end}" for end in ("crt", "key"))
    elsewhere = lab.folder / "elsewhere"
    elsewhere.mkdir()

    stranger = Authority(elsewhere, "stranger").sign("rotated")
    for made, place in zip(stranger, (certificate, key), strict=True):
        made.replace(place)
    with pytest.raises(Unreachable, match="certificate"):
        connect(settings, 10.0)
    old.send_over_another()  # with the certificate that is not in the files any more

    certificate.unlink()
    old.send_over_another()
    with pytest.raises((KafkaException, BadSecurity)):
        connect(settings, 10.0)

    lab.authority.sign("rotated")  # renewed: another certificate and another key
    connect(settings, 10.0)
    Connections(settings, topic).send()
    old.send_over_another()


def _closed(lab: SafeBroker, name: str) -> Settings:
    tls, other = lab.tls(), Authority(lab.folder, "other").certificate
    worker = "tentalis-worker"
    match name:
        case "wrong password":
            return lab.login(worker, password="not-the-password")
        case "unknown user":
            return lab.login("nobody")
        case "mechanism":
            return lab.login(worker, "SCRAM-SHA-256")
        case "wrong authority":
            return lab.settings("TLS", Security(protocol="SSL", ssl_ca=other))
        case "other host":
            return tls.model_copy(update={"bootstrap": tls.require_bootstrap().replace("127.0.0.1", "localhost")})
        case "plain text to TLS":
            return lab.settings("TLS", Security())
        case "plain text to SASL":
            return lab.settings("OPEN", Security())
        case "no certificate":
            return lab.settings("MTLS", tls.security)
        case "no login":
            return lab.settings("SASL", tls.security)
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wrong password", "refuses the login of User:tentalis-worker by SCRAM-SHA-512"),
        ("unknown user", "refuses the login of User:nobody"),
        ("mechanism", "PLAIN,SCRAM-SHA-512"),
        ("wrong authority", "is not trusted by TENTALIS_SSL_CA"),
        ("other host", "is for another host"),
        ("plain text to TLS", "speaks TLS on this port"),
        ("plain text to SASL", "requires a login on this port.*: set it to SASL_PLAINTEXT"),
        ("no certificate", "requires a client certificate"),
        ("no login", "may require a login"),
    ],
)
def test_a_refused_connection_names_its_cause_within_seconds(lab: SafeBroker, name: str, words: str) -> None:
    began = time.monotonic()
    with pytest.raises(Unreachable, match=words) as raised:
        connect(_closed(lab, name), 30.0)
    assert time.monotonic() - began < 15, "it does not try again what trying again cannot mend"
    assert PASSWORD not in str(raised.value) and "not-the-password" not in str(raised.value)


def test_hostname_verification_can_be_turned_off(lab: SafeBroker) -> None:
    settings = _closed(lab, "other host")
    lax = settings.security.model_copy(update={"ssl_verify_hostname": False})
    connect(settings.model_copy(update={"security": lax}), 10.0)


def _tentalis(settings: Settings, folder: Path, *arguments: str) -> tuple[int, str]:
    """The command in this process with the environment of these settings; exit code and all it said."""
    env = environment(settings, folder / "password")
    done = CliRunner().invoke(app, list(arguments), env=env)
    return done.exit_code, done.output


def test_a_refused_login_ends_a_command_with_4(lab: SafeBroker, tmp_path: Path) -> None:
    code, said = _tentalis(_closed(lab, "wrong password"), tmp_path, "topics", "list")
    assert code == 4 and "refuses the login of User:tentalis-worker" in said
    assert "not-the-password" not in said


@pytest.mark.parametrize(
    ("role", "arguments", "operation", "topic"),
    [
        ("worker", ("produce", topics.ROLLOUTS, "--raw", "--file", __file__), "Write", topics.ROLLOUTS),
        ("auditor", ("produce", topics.ROLLOUTS, "--raw", "--file", __file__), "Write", topics.ROLLOUTS),
        ("hinting", ("consume", topics.SESSIONS), "Read", topics.SESSIONS),
        ("worker", ("manager", "--run", "run"), "Write", topics.TASKS),
        ("scoring", ("serve", "join"), "Write", topics.ROLLOUTS),
    ],
)
def test_what_a_role_must_not_do_is_refused_in_words(
    lab: SafeBroker, tmp_path: Path, role: str, arguments: tuple[str, ...], operation: str, topic: str
) -> None:
    code, said = _tentalis(lab.role(role), tmp_path, *arguments)
    assert code == 6, said
    assert f"User:tentalis-{role}" in said and f"{operation} on topic {topic}" in said
    assert "tentalis topics acls" in said and PASSWORD not in said


def test_runtime_refusals_name_what_is_missing(lab: SafeBroker) -> None:
    worker, hinting = lab.role("worker"), lab.role("hinting")
    publisher = Publisher(worker, "test", make_codec(worker))
    publisher.send_bytes(topics.ROLLOUTS, b"key", b"forged")
    with pytest.raises(Forbidden, match=r"User:tentalis-worker the operation Write on topic tentalis.rollouts.v1"):
        publisher.flush(20.0)
    member = GroupConsumer(worker, "another-group", [topics.TASKS])
    with pytest.raises(Forbidden, match="Read on group another-group"):
        eventually(lambda: member.poll(0.5), 20)
    member.close()
    publisher.send_bytes(topics.RESULTS, b"key", b"something to read")
    publisher.flush(20.0)
    with pytest.raises(Forbidden, match=r"Read on topic tentalis.results.v1; the roles with this ACL are scoring"):
        list(read_to_end(worker, topics.RESULTS))
    follower = Follower(hinting, topics.FEEDBACK)
    with pytest.raises(Forbidden, match="Describe on group tentalis-follower"):
        eventually(lambda: follower.poll(0.5), 20)
    follower.close()
    with pytest.raises(Forbidden, match="User:tentalis-worker the operation DescribeConfigs on topic tentalis"):
        ensure(worker)


def test_the_trainers_transactions_are_the_trainers_alone(lab: SafeBroker) -> None:
    trainer = lab.role("trainer")
    writer = TransactionalWriter(trainer, make_codec(trainer), "assistant")
    promotion = Promotion(policy="assistant", version=1, event_time=now_ms(), sha256="0" * 64, mode="manual", by="test")
    writer.write(topics.POLICIES, promotion)
    # A commit is answered before its markers are written, and only then can it be read.
    eventually(lambda: any(stored.key == promotion.key for stored in read_to_end(trainer, topics.POLICIES)))
    with pytest.raises(Forbidden, match=r"Write on topic tentalis.rollouts.v1"):
        writer.write(topics.ROLLOUTS, promotion)
    with pytest.raises(
        Forbidden, match="Write on transactional-id tentalis-trainer-assistant; the roles with this ACL are"
    ):
        TransactionalWriter(lab.role("worker"), make_codec(trainer), "assistant")


def test_the_admin_role_can_apply_and_a_super_user_can_grant(lab: SafeBroker, tmp_path: Path) -> None:
    code, said = _tentalis(lab.role("admin"), tmp_path, "topics", "apply", "--yes")
    assert code == 0, said
    code, said = _tentalis(lab.role("admin"), tmp_path, "topics", "acls", "--role", "join", "--apply", "--yes")
    assert code == 6 and "to change ACLs" in said
    made = grant(lab.super_user(), bindings([ROLES["join"]], "User:somebody"))
    assert made == len(ROLES["join"].grants)


def test_the_applications_work_with_the_least_acls_until_one_is_taken_away_and_keep_the_secret(
    lab: SafeBroker, tmp_path: Path, started: list[Application]
) -> None:
    # No feedback of this test makes a hint, so that no teacher is asked.
    options = {"join": (), "scoring": (), "hinting": ("--server", "http://127.0.0.1:9"), "aggregation": ()}
    started += [Application(name, lab.role(name), tmp_path, *more) for name, more in options.items()]
    join = started[0]
    auditor = lab.role("auditor")
    manager, worker = (Publisher(who, "test", make_codec(who)) for who in (lab.role("manager"), lab.role("worker")))

    def play(task_id: str) -> None:
        task = make_task(task_id, n_samples=1)
        result = make_result(task, opened_at=now_ms())
        manager.send(topics.TASKS, task)
        worker.send(topics.RESULTS, result)
        manager.send(topics.FEEDBACK, make_feedback(result))
        manager.flush(20.0)
        worker.flush(20.0)

    def there(topic: str, key: str) -> bool:
        for application in started:
            assert application.process.poll() is None, application.said()
        return any((stored.key or "").startswith(key) for stored in read_to_end(auditor, topic))

    play("safe-task")
    for topic, key in ((topics.ROLLOUTS, "safe-task"), (topics.META, "m1/")):
        eventually(lambda topic=topic, key=key: there(topic, key), 90, 0.5)
    argv = Path(f"/proc/{join.process.pid}/cmdline").read_bytes()
    lab.revoke("User:tentalis-join", topics.OUTCOMES)
    play("after-the-revocation")
    assert join.process.wait(60) == 6, join.said()
    assert f"do not allow User:tentalis-join the operation Write on topic {topics.OUTCOMES}" in join.said()
    assert PASSWORD.encode() not in argv
    assert all(PASSWORD not in application.said() for application in started)
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "secret"]
    assert [path for path in left if PASSWORD.encode() in path.read_bytes()] == []


def test_a_stream_application_without_its_group_ends_and_says_so(
    lab: SafeBroker, tmp_path: Path, started: list[Application]
) -> None:
    lab.add_users(["groupless"])
    without = [each for each in bindings([ROLES["join"]], "User:groupless") if each[2].resource is not Resource.GROUP]
    grant(lab.super_user(), without)
    join = Application("join", lab.login("groupless"), tmp_path)
    started.append(join)
    assert join.process.wait(60) == 6, join.said()
    assert "User:groupless" in join.said() and "Read on group tentalis-join" in join.said()
