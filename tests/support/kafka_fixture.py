"""The Kafka broker of the tests, and helpers to wait for conditions.

The first available of these is used, once per session: `TENTALIS_TEST_KAFKA` (bootstrap servers of a running broker); a
container, if a Docker engine answers and has or can pull apache/kafka, or has the image that `make test-docker` builds
in its place (`TENTALIS_TEST_KAFKA_IMAGE` names another one with the variables of apache/kafka); the embedded broker in
a temporary folder. `TENTALIS_TEST_KAFKA=embedded` or `=container` selects one of them.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from tentalis.kafka.admin import ensure
from tentalis.kafka.config import client_config
from tentalis.local.broker import EmbeddedBroker, metadata_ready, new_cluster_id
from tentalis.local.ports import free_port
from tentalis.service.settings import Settings
from tests.docker.images import STOCK_KAFKA
from tests.docker.local_images import KAFKA as LOCAL_KAFKA

T = TypeVar("T")


@dataclass(frozen=True)
class Kafka:
    """A broker to test against. `broker` is set for the embedded one, for tests that kill it."""

    bootstrap: str
    kind: str  # given | container | embedded
    broker: EmbeddedBroker | None = None


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """A real broker for the whole session, shared by all tests: use `unique` to name topics and groups."""
    wanted = os.environ.get("TENTALIS_TEST_KAFKA", "")
    if wanted and wanted not in ("embedded", "container"):
        eventually(lambda: metadata_ready(wanted), 30, message=f"no Kafka answers on TENTALIS_TEST_KAFKA={wanted}")
        yield Kafka(wanted, "given")
    else:
        image = None
        if wanted == "container" or (wanted != "embedded" and docker_answers()):
            image = _image(required=wanted == "container")
        yield from _embedded(tmp_path_factory.mktemp("kafka")) if image is None else _container(image)


@pytest.fixture
def unique(request: pytest.FixtureRequest) -> str:
    """A prefix for names of topics, groups and transactions, unique across tests and runs."""
    name = re.sub(r"[^a-zA-Z0-9]+", "-", request.node.name).strip("-")[:40]
    return f"{name}-{uuid.uuid4().hex[:8]}"


def eventually(
    check: Callable[[], T], timeout: float = 30.0, interval: float = 0.05, message: str | Callable[[], str] = ""
) -> T:
    """Calls `check` until it returns a true value, and returns that; an AssertionError in it counts as false.

    Waits `interval` seconds between the calls; three times as long as a call has computed, if that is longer: it shares
    the processors with what it waits for.

    Raises:
        AssertionError: after `timeout` seconds; with `message` and the result or error of the last call.
    """
    deadline = time.monotonic() + timeout
    while True:
        cause: AssertionError | None = None
        computed = time.process_time()
        try:
            last = check()
            if last:
                return last
            seen = f"last result: {last!r}"
        except AssertionError as error:
            cause, seen = error, f"last: {error}"
        if time.monotonic() > deadline:
            text = message() if callable(message) else message or "the condition did not become true"
            raise AssertionError(f"{text} (waited {timeout:g} s; {seen})") from cause
        time.sleep(max(interval, 3 * (time.process_time() - computed)))


def known(check: Callable[[], T]) -> T:
    """Returns the result of `check`. Raises AssertionError, for `eventually`, while a broker that has just started does
    not know a new topic yet."""
    try:
        return check()
    except KafkaException as error:
        assert error.args[0].code() != KafkaError._UNKNOWN_PARTITION, error
        raise


def remove_before(settings: Settings, topic: str, offsets: Mapping[int, int]) -> None:
    """Removes the records before an offset of each partition, as retention does."""
    places = [TopicPartition(topic, partition, offset) for partition, offset in offsets.items()]
    admin = AdminClient(client_config(settings))  # it answers as long as it is referenced
    for future in admin.delete_records(places).values():
        future.result(30)


def ensure_topics(settings: Settings) -> None:
    """Creates missing topics on a broker that may have just started. Retries transient errors and raises others."""

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
    """True if a Docker engine answers."""
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


def _image(required: bool) -> str | None:
    """The first image that the engine has or can pull; without one None and a warning, or an error if `required`."""
    named = os.environ.get("TENTALIS_TEST_KAFKA_IMAGE")
    reasons = []
    for image in [named] if named else [STOCK_KAFKA, LOCAL_KAFKA]:
        reason = no_image(image)
        if reason is None:
            return image
        reasons.append(reason)
    if required:
        raise RuntimeError("; ".join(reasons))
    warnings.warn(f"{'; '.join(reasons)}; using the embedded broker", stacklevel=1)
    return None


def _container(image: str) -> Iterator[Kafka]:
    """A broker with the settings of the embedded one, in an image with the variables of apache/kafka."""
    from testcontainers.core.config import testcontainers_config
    from testcontainers.core.container import DockerContainer

    if no_image(testcontainers_config.ryuk_image) is not None:
        testcontainers_config.ryuk_disabled = True  # without it, a container stays if this process is killed
    port, controller_port = _two_ports()
    settings = EmbeddedBroker(Path(), port, controller_port).properties() | {
        "listeners": f"PLAINTEXT://:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "log.dirs": "/var/lib/kafka/data",
    }
    variables = {f"KAFKA_{name.upper().replace('.', '_')}": value for name, value in settings.items()}
    container = DockerContainer(image).with_bind_ports(port, port).with_envs(CLUSTER_ID=new_cluster_id(), **variables)
    with container:
        bootstrap = f"127.0.0.1:{port}"
        eventually(lambda: metadata_ready(bootstrap), 60, message=f"no Kafka answers in a container of {image}")
        yield Kafka(bootstrap, "container")


def no_image(image: str) -> str | None:
    """Pulls an image if it is missing; returns None, or the reason why the Docker engine cannot get it."""
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
    # No test kills it, and it is not fenced for its silence while it is frozen (tests/support/kept_broker.py).
    broker = started_broker(folder, {"broker.session.timeout.ms": str(24 * 60 * 60 * 1000)})
    try:
        yield Kafka(broker.bootstrap, "embedded", broker)
    finally:
        broker.kill()


def new_broker(
    folder: Path,
    port: int | None = None,
    controller_port: int | None = None,
    settings: dict[str, str] | None = None,
) -> EmbeddedBroker:
    """Returns a broker without records, with free ports if none are given. `settings`: as EmbeddedBroker takes them.

    Its storage is a copy of one that was formatted once, for that takes a JVM of its own.
    """
    if port is None or controller_port is None:
        port, controller_port = _two_ports()
    shutil.copytree(Path(_formatted().name) / "log", folder / "log")
    properties = folder / "log" / "meta.properties"
    identity = f"cluster.id={new_cluster_id()}"
    properties.write_text(re.sub(r"^cluster\.id=.*$", identity, properties.read_text(), flags=re.MULTILINE))
    return EmbeddedBroker(folder, port, controller_port, settings=settings)


def started_broker(folder: Path, settings: dict[str, str] | None = None) -> EmbeddedBroker:
    """Returns a new broker that is ready; the caller kills it."""
    broker = new_broker(folder, settings=settings)
    try:
        broker.start()
        broker.wait_ready(120.0)
    except BaseException:
        broker.kill()
        raise
    return broker


@cache
def _formatted() -> tempfile.TemporaryDirectory[str]:
    """The folder of a broker that never ran."""
    folder = tempfile.TemporaryDirectory(prefix="tentalis-storage-")
    EmbeddedBroker(Path(folder.name), *_two_ports()).prepare()
    return folder


def _two_ports() -> tuple[int, int]:
    port = free_port()
    return port, free_port(avoid=(port,))
