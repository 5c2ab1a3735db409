"""Schemas that change while the topics live: one version behind and one ahead, in both wire formats; and the join
through a registry, a real one where it can be had, that is away for a while."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas import topics
from schemas.records import Score
from schemas.wire.codec import CONFLUENT, SINGLE_OBJECT
from schemas.wire.registry import ConfluentRegistry
from tentalis.cli.shared.record_json import to_plain
from tentalis.kafka.admin import ensure
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
from tests.support.kafka_fixture import Kafka, eventually
from tests.support.loop_records import feedback_on, result, task
from tests.support.next_version import NextVersion
from tests.support.registry_fixture import Door, Registry, door

pytestmark = pytest.mark.broker


def ready(settings: Settings) -> Settings:
    eventually(lambda: ensure(settings) is not None, 30)
    return settings


def both_ways(settings: Settings, folder: Path, key: str, magic: bytes) -> None:
    """Each version writes a Feedback, and both read both."""
    ahead = NextVersion(folder, settings.require_bootstrap(), settings.schema_registry)
    ahead.run("topics", "apply", "--yes")
    ours = feedback_on(result(task(key)), f"{key}-ours").model_copy(update={"text": "Too long.", "author": "ann"})
    publisher = Publisher(settings, "test", make_codec(settings))
    publisher.send(topics.FEEDBACK, ours)
    publisher.flush()
    plain = to_plain(ours) | {"feedback_id": f"{key}-ahead", "channel": "mail"}
    ahead.writes(topics.FEEDBACK, "Feedback", {name: value for name, value in plain.items() if name != "author"})

    stored = [each for each in read_to_end(settings, topics.FEEDBACK) if each.key == key]
    assert [each.value[: len(magic)] for each in stored if each.value] == [magic, magic]
    found = [each.decode_own(make_codec(settings)) for each in stored]
    assert found == [ours, ours.model_copy(update={"feedback_id": f"{key}-ahead", "author": ""})]

    seen = [each["value"] for each in ahead.reads(topics.FEEDBACK, key)]
    assert [(each["feedback_id"], each["channel"]) for each in seen] == [
        (ours.feedback_id, ""),
        (f"{key}-ahead", "mail"),
    ]
    assert all("author" not in each and each["text"] == "Too long." for each in seen)


def test_records_of_the_previous_and_the_next_schema_version_are_processed(
    kafka: Kafka, unique: str, tmp_path: Path
) -> None:
    both_ways(ready(Settings(bootstrap=kafka.bootstrap)), tmp_path, unique, SINGLE_OBJECT)


@pytest.fixture
def way(registry: Registry) -> Iterator[Door]:
    """The way to the registry, which can be shut."""
    with door(registry.url) as found:
        yield found


def test_schema_versions_mix_through_a_registry_too(
    own_broker: EmbeddedBroker,
    way: Door,
    workers: list[JoinWorker],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = ready(Settings(bootstrap=own_broker.bootstrap, schema_registry=way.url))
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
