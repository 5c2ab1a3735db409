"""A broker that has just started may not know its topics yet: one answer without a topic is not final."""

import asyncio
import itertools
import json
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from schemas import topics
from schemas.ids import sha256_hex
from schemas.wire.avro import all_current
from streams.runtime import topic_guard
from streams.runtime.topic_guard import TopicGuard
from tentalis.kafka import topic_client
from tentalis.kafka.admin import missing_schemas
from tentalis.kafka.codec import make_codec
from tentalis.kafka.errors import NoSuchTopic
from tentalis.kafka.identity import CommitNote, CommittedOffset, OffsetRange, TopicIdentity, TopicLost
from tentalis.kafka.topic_client import TopicClient
from tentalis.kafka.topic_id_log import unrecorded_topics
from tentalis.kafka.topic_ids import TopicIdRecords
from tentalis.ops import lost_topics
from tentalis.ops.repartition.plan import MARKER
from tentalis.service.settings import Settings
from trainer.run import rollouts_topic
from trainer.run.rollouts_topic import TopicPosition, start_topic_id, take_topic

SETTINGS = Settings(bootstrap="127.0.0.1:1")
TOPIC = topics.ROLLOUTS


class ForgetfulBroker:
    """Stands in for AdminClient: knows a topic only after `misses` questions, those of `known` at once."""

    def __init__(self) -> None:
        self.misses, self.asked, self.known = 2, 0, {topics.HALVES}

    def describe_topics(self, names: Collection[str], **_: Any) -> dict[str, Future[Any]]:
        self.asked += 1
        return {name: self._answer(name) for name in names}

    def _answer(self, name: str) -> Future[Any]:
        if name != MARKER and (name in self.known or self.asked > self.misses):
            return answered(SimpleNamespace(topic_id="id", partitions=[0]))
        unknown: Future[Any] = Future()
        unknown.set_exception(KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)))
        return unknown

    def list_offsets(self, places: Collection[Any], **_: Any) -> dict[Any, Future[Any]]:
        return {place: answered(SimpleNamespace(offset=5)) for place in places}

    def forget(self) -> None:
        """From now on it does not know the topics."""
        self.misses = 10**9


def answered(value: object) -> "Future[Any]":
    found: Future[Any] = Future()
    found.set_result(value)
    return found


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> ForgetfulBroker:
    broker = ForgetfulBroker()
    monkeypatch.setattr(topic_client, "AdminClient", lambda *_, **__: broker)
    monkeypatch.setattr(topic_client, "TopicCollection", list)
    monkeypatch.setattr(topic_client, "RETRY_S", 0.01)
    monkeypatch.setattr(topic_client, "TOPIC_PATIENCE_S", 0.5)
    monkeypatch.setattr(topic_guard, "read_topic_ids", lambda _: TopicIdRecords({}))
    monkeypatch.setattr(lost_topics, "read_topic_ids", lambda _: TopicIdRecords({}))
    return broker


def test_an_assignment_asks_again_before_it_calls_a_topic_lost(broker: ForgetfulBroker) -> None:
    async def no_notes(_: Any) -> dict[tuple[str, int], Any]:
        return {}

    guard = TopicGuard(SETTINGS, "app", [TOPIC], None, no_notes)
    asyncio.run(guard.look({TOPIC: 1}))
    assert guard.source_ids == {TOPIC: "id"} and broker.asked == 3 + 1, "the last question is for the recorded ids"
    broker.forget()
    with pytest.raises(TopicLost, match=TOPIC):
        asyncio.run(guard.look({TOPIC: 1}))


def test_a_trainer_asks_again_and_a_topic_that_is_missing_without_a_loss_is_no_loss(broker: ForgetfulBroker) -> None:
    checkpoint = SimpleNamespace(state=SimpleNamespace(rollouts_topic_id=None))
    run = SimpleNamespace(first_manifest=None, run_id="run")
    state: Any = SimpleNamespace(settings=SETTINGS, checkpoint=checkpoint, rollouts_topic_id=None, run=run)
    codec = make_codec(SETTINGS)
    assert take_topic(state, codec, {0: 5}, 0) == TopicPosition({0: 5}) and state.rollouts_topic_id == "id"
    broker.forget()
    with pytest.raises(NoSuchTopic, match=f"{TOPIC}.*topics apply"):
        take_topic(state, codec, {0: 0}, 0)
    with pytest.raises(TopicLost, match=f"{TOPIC} is gone"):
        take_topic(state, codec, {0: 5}, 7)


def test_a_branch_begins_on_the_topic_whose_offsets_it_continues(
    broker: ForgetfulBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: dict[str, list[str | None]] = {"begun": [], "ended": ["newest", "older"], "of 0.1.0": [None]}

    def read(root: Path, damaged: list[Any]) -> list[Any]:
        return [SimpleNamespace(state=SimpleNamespace(rollouts_topic_id=each)) for each in known[root.name]]

    monkeypatch.setattr(rollouts_topic, "read_checkpoints", read)
    settings = SETTINGS.model_copy(update={"home": tmp_path})
    assert start_topic_id(settings, "ended") == "newest"
    assert [start_topic_id(settings, each) for each in (None, "begun", "of 0.1.0")] == ["id"] * 3
    broker.forget()
    assert start_topic_id(settings, None) is None


def test_the_doctor_asks_again_unless_the_broker_has_none_of_the_topics(
    broker: ForgetfulBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, TopicIdentity]] = []
    monkeypatch.setattr(lost_topics, "newest_checkpoint_states", lambda _: [])
    monkeypatch.setattr(lost_topics, "committed_notes", lambda *_: {})
    monkeypatch.setattr(lost_topics, "_of_stream", lambda *given: seen.append(given[2]) or "")
    assert lost_topics.lost_topics(SETTINGS) == []
    assert seen and all(TOPIC in each for each in seen)
    broker.forget()
    broker.known, broker.asked = set(), 0
    assert lost_topics.lost_topics(SETTINGS) == [] and broker.asked == 1, "a new broker has nothing to lose"


def test_topics_of_a_new_broker_are_planned_without_a_wait(broker: ForgetfulBroker) -> None:
    broker.forget()
    broker.known = set()
    assert missing_schemas(SETTINGS) == list(all_current()) and unrecorded_topics(SETTINGS) == []
    assert broker.asked == 2, "each question is asked once, and nothing is read"


def test_a_log_that_grows_while_it_is_looked_at_is_not_lost(
    broker: ForgetfulBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.misses = 0
    grown = itertools.count(1)

    def notes(settings: Settings, group: str, places: list[tuple[str, int]]) -> dict[tuple[str, int], CommittedOffset]:
        return {place: CommittedOffset(next(grown), CommitNote("id")) for place in places if place[1] == 0}

    def ranges(client: TopicClient, places: Iterable[tuple[str, int]]) -> dict[tuple[str, int], OffsetRange]:
        return {place: OffsetRange(0, next(grown)) for place in places}

    monkeypatch.setattr(lost_topics, "newest_checkpoint_states", lambda _: [])
    monkeypatch.setattr(lost_topics, "committed_notes", notes)
    monkeypatch.setattr(TopicClient, "ranges", ranges)
    assert lost_topics.lost_topics(SETTINGS) == []


def test_a_damaged_checkpoint_tells_of_no_loss(
    broker: ForgetfulBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker has the topic, with 5 records. Only the state.json that matches its digest can tell otherwise."""
    broker.misses = 0
    monkeypatch.setattr(lost_topics, "committed_notes", lambda *_: {})
    monkeypatch.setattr(lost_topics, "_of_stream", lambda *_: "")
    monkeypatch.setattr(lost_topics, "not_given_up", lambda _settings, _codec, losses, _run: losses)
    settings = SETTINGS.model_copy(update={"home": tmp_path})
    state = tmp_path / "checkpoints" / "run" / "000001-001-owner" / "state.json"
    state.parent.mkdir(parents=True)
    fields = {"run_id": "run", "step": 1, "plan_id": "plan", "low_water": {"0": 7}, "rollouts_topic_id": "id"}
    digest = sha256_hex(json.dumps(fields, sort_keys=True).encode())

    def found(**changed: object) -> list[str]:
        state.write_text(json.dumps(fields | {"digest": digest} | changed))
        return lost_topics.lost_topics(settings)

    (loss,) = found()
    assert "run run" in loss and TOPIC in loss
    assert found(low_water={"0": 9}) == [] and found(low_water=None) == []
    state.write_text("[]")
    assert lost_topics.lost_topics(settings) == []


def test_without_patience_the_first_answer_counts(broker: ForgetfulBroker) -> None:
    assert TopicClient(SETTINGS).identities([TOPIC]) == {}
