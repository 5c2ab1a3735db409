"""A broker with the topics, and the join's processes on it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tentalis.local.broker import EmbeddedBroker
from tentalis.service.settings import Settings
from tests.support.join_worker import JoinWorker
from tests.support.kafka_fixture import ensure_topics


@pytest.fixture
def settings(own_broker: EmbeddedBroker, tmp_path: Path) -> Settings:
    """The settings for a broker of this test, which has the topics."""
    settings = Settings(bootstrap=own_broker.bootstrap, home=tmp_path)
    ensure_topics(settings)
    return settings


@pytest.fixture
def workers() -> Iterator[list[JoinWorker]]:
    """Takes the joins that a test starts; kills those that are left."""
    started: list[JoinWorker] = []
    yield started
    for worker in started:
        if worker.process.poll() is None:
            worker.end(kill=True)
