"""Where the tests find a Kafka broker, and how they wait.

The ladder, tried once per session: `TENTALIS_TEST_KAFKA` (bootstrap servers of a running broker) -> a container, if a
Docker engine answers (`TENTALIS_TEST_KAFKA_IMAGE` names another image) -> the embedded broker in a temporary folder.
`TENTALIS_TEST_KAFKA=embedded` or `=container` takes that rung and no other.
"""

from __future__ import annotations

import os
import re
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from confluent_kafka import KafkaError, KafkaException

from tentalis.admin import ensure
from tentalis.config import Settings
from tentalis.local.broker import EmbeddedBroker, metadata_ready
from tentalis.local.ports import free_port

T = TypeVar("T")


@dataclass(frozen=True)
class Kafka:
    """A broker to test against. `broker` is there when it is the embedded one, for tests that kill it."""

    bootstrap: str
    kind: str  # given | container | embedded
    broker: EmbeddedBroker | None = None


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """A real broker for the whole session. Topics and groups are shared: name yours with `unique`."""
    wanted = os.environ.get("TENTALIS_TEST_KAFKA", "")
    if wanted and wanted not in ("embedded", "container"):
        eventually(lambda: metadata_ready(wanted), 30, message=f"no Kafka answers on TENTALIS_TEST_KAFKA={wanted}")
        yield Kafka(wanted, "given")
    else:
        container = None
        if wanted == "container" or (wanted != "embedded" and docker_answers()):
            container = _container(required=wanted == "container")
        if container is not None:
            with container:
                yield Kafka(container.get_bootstrap_server(), "container")
        else:
            yield from _embedded(tmp_path_factory.mktemp("kafka"))


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """An embedded broker of this test alone, started and ready: to be killed."""
    broker = EmbeddedBroker(tmp_path / "kafka", *_two_ports())
    try:
        broker.start()
        broker.wait_ready()
        yield broker
    finally:
        broker.stop()


@pytest.fixture
def unique(request: pytest.FixtureRequest) -> str:
    """A prefix for the names of topics, groups and transactions that no other test has, nor an earlier run."""
    name = re.sub(r"[^a-zA-Z0-9]+", "-", request.node.name).strip("-")[:40]
    return f"{name}-{uuid.uuid4().hex[:8]}"


def eventually(
    check: Callable[[], T], timeout: float = 30.0, interval: float = 0.05, message: str | Callable[[], str] = ""
) -> T:
    """Call `check` until it returns something true, and return that; an AssertionError in it counts as false.

    Raises:
        AssertionError: `timeout` seconds went by; with `message` and what the last call returned or raised.
    """
    deadline = time.monotonic() + timeout
    while True:
        cause: AssertionError | None = None
        try:
            last = check()
            if last:
                return last
            seen = f"last result: {last!r}"
        except AssertionError as error:
            cause, seen = error, f"last: {error}"
        if time.monotonic() > deadline:
            text = message() if callable(message) else message or "the condition did not come true"
            raise AssertionError(f"{text} (waited {timeout:g} s; {seen})") from cause
        time.sleep(interval)


def known(check: Callable[[], T]) -> T:
    """What `check` returns; that a broker which has just started does not know of a new topic yet is an
    AssertionError."""
    try:
        return check()
    except KafkaException as error:
        assert error.args[0].code() != KafkaError._UNKNOWN_PARTITION, error
        raise


def ensure_topics(settings: Settings) -> None:
    """Creates what is missing on a broker, which may have started a moment ago. Raises what does not pass by itself."""

    def ensured() -> bool:
        try:
            ensure(settings)
        except KafkaException as error:  # partitions just created may not have a leader yet
            if not error.args[0].retriable() and error.args[0].code() != KafkaError.NOT_LEADER_FOR_PARTITION:
                raise
            return False
        return True

    eventually(ensured, 30, message="no topics")


def docker_answers() -> bool:
    """Whether there is a Docker engine."""
    try:
        import docker  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        return False
    try:
        client = docker.from_env(timeout=2)
        try:
            return bool(client.ping())
        finally:
            client.close()
    except (docker.errors.DockerException, OSError):
        return False


def _container(required: bool) -> Any:
    """A container whose image is there or can be pulled; else None with a warning, or an error if it is required."""
    from testcontainers.community.kafka import KafkaContainer

    image = os.environ.get("TENTALIS_TEST_KAFKA_IMAGE", "confluentinc/cp-kafka:8.1.0")
    reason = no_image(image)
    if reason is None:
        return KafkaContainer(image).with_kraft()
    if required:
        raise RuntimeError(reason)
    warnings.warn(f"{reason}; using the embedded broker", stacklevel=1)
    return None


def no_image(image: str) -> str | None:
    """Why the Docker engine that answers has no such image, nor can pull it; None if it has it now."""
    import docker

    client = docker.from_env()
    try:
        if not client.images.list(name=image):
            client.images.pull(image)
    except docker.errors.DockerException as error:
        return f"a Docker engine answers, but has no {image}: {error}"
    finally:
        client.close()
    return None


def _embedded(folder: Path) -> Iterator[Kafka]:
    broker = EmbeddedBroker(folder, *_two_ports())
    try:
        broker.start()
        broker.wait_ready()
        yield Kafka(broker.bootstrap, "embedded", broker)
    finally:
        broker.stop()


def _two_ports() -> tuple[int, int]:
    port = free_port()
    return port, free_port(avoid=(port,))
