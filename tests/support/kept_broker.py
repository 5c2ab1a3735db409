"""Brokers that outlive a test: they are emptied for the next one, and frozen while no test uses them."""

import signal
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, NewTopic

from schemas import keyed_partitions, topics
from tentalis.local.broker import EmbeddedBroker
from tests.support.kafka_fixture import Kafka, eventually, started_broker

FEW_PARTITIONS = 2


class KeptBroker:
    """One embedded broker after the other: the next one starts when a test has ended the one before."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self.folders = folders
        self.broker: EmbeddedBroker | None = None

    def lent(self) -> EmbeddedBroker:
        """Returns a broker without topics and groups."""
        if self.broker is None:
            self.broker = started_broker(self.folders.mktemp("own-kafka") / "kafka")
        return self.broker

    def take_back(self) -> None:
        """Empties the broker, if the test has left it running."""
        broker, self.broker = self.broker, None
        if broker is None or broker.process is None or broker.process.poll() is not None:
            return
        try:
            _empty(broker)
            self.broker = broker
        finally:
            if self.broker is None:
                broker.kill()


_USED: dict[str, Kafka | KeptBroker] = {}
_FROZEN: dict[str, EmbeddedBroker] = {}
"""By the name of the fixture that has the broker: what a test has used, and the brokers that are frozen."""


@pytest.fixture(scope="session")
def kept_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeptBroker]:
    """The broker behind `own_broker`."""
    kept = KeptBroker(tmp_path_factory)
    yield kept
    if kept.broker is not None:
        kept.broker.kill()


@pytest.fixture
def own_broker(kept_broker: KeptBroker) -> Iterator[EmbeddedBroker]:
    """An embedded broker for this test only, started and ready, without topics and groups; the test may kill it."""
    yield kept_broker.lent()
    kept_broker.take_back()


@pytest.fixture
def few_partitions() -> Iterator[None]:
    """Each keyed topic has FEW_PARTITIONS partitions, in this process and in those that it starts, on a broker of the
    test's own: half of its time goes into topics, and part of that of its clients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(keyed_partitions.VARIABLE, str(FEW_PARTITIONS))
        topics.table.cache_clear()
        yield
    topics.table.cache_clear()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Thaws the brokers that a test uses."""
    for name in _FROZEN.keys() & _fixtures(item):
        _thaw(_FROZEN.pop(name))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Freezes the brokers that the next test does not use, if that is one of another file: one that nobody asks
    anything takes 2% of a core."""
    fixtures = getattr(item, "funcargs", {})
    _USED.update({name: fixtures[name] for name in ("kafka", "kept_broker") if name in fixtures})
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            for name in _USED.keys() - _fixtures(nextitem):
                broker = _USED.pop(name).broker
                if broker is not None and broker.process is not None and broker.process.poll() is None:
                    broker.process.send_signal(signal.SIGSTOP)
                    _FROZEN[name] = broker


def _fixtures(item: pytest.Item | None) -> set[str]:
    return {*getattr(item, "fixturenames", ())}


def _thaw(broker: EmbeddedBroker) -> None:
    """Lets a frozen broker run, and waits until it takes commands: its controller may find that the broker was silent
    for too long, and then takes none until it has heard from it."""
    assert broker.process is not None
    broker.process.send_signal(signal.SIGCONT)
    admin, name = AdminClient({"bootstrap.servers": broker.bootstrap}), "thawed"
    created = [NewTopic(name, 1, 1)]
    eventually(lambda: _done(admin.create_topics(created), unless=KafkaError.INVALID_REPLICATION_FACTOR), 60)
    eventually(lambda: _done(admin.delete_topics([name]), unless=KafkaError.UNKNOWN_TOPIC_OR_PART), 60)


def _empty(broker: EmbeddedBroker) -> None:
    """Deletes all topics. Those of Kafka itself are among them, and with them go all groups, even those with members,
    and all transactions."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})

    def has_no_topics() -> bool:
        try:
            names = [*admin.list_topics(timeout=30).topics]
        except KafkaException as error:
            if error.args[0].code() != KafkaError._PARTIAL:  # topics were deleted while it answered
                raise
            return False
        if names:
            _done(admin.delete_topics(names), unless=KafkaError.UNKNOWN_TOPIC_OR_PART)
        return not names

    eventually(has_no_topics, 60, message="topics come back: a client of the test still runs")
    eventually(lambda: not admin.list_consumer_groups().result(30).valid, 60, message="groups stay")


def _done(asked: Mapping[str, "Future[Any]"], *, unless: int) -> bool:
    """True if all is done; False if one error has this code. Raises any other KafkaException."""
    done = True
    for future in asked.values():
        try:
            future.result(60)
        except KafkaException as error:
            if error.args[0].code() != unless:
                raise
            done = False
    return done
