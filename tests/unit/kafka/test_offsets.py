"""Questions about offsets to a broker that has just started."""

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_END, OFFSET_INVALID, KafkaError, KafkaException, TopicPartition

from tentalis.kafka import offsets, removal
from tentalis.kafka.errors import Forbidden
from tentalis.service.settings import Settings

SETTINGS = Settings(bootstrap="127.0.0.1:1")


class RestartedBroker:
    """Answers the first two questions with an error, and with offsets afterwards. Without a code these two answers are
    librdkafka's offset for "not known"."""

    def __init__(self, code: int | None) -> None:
        self.code, self.refusals = code, 2

    def _offset(self) -> int:
        if not self.refusals:
            return 7
        self.refusals -= 1
        if self.code is None:
            return OFFSET_INVALID
        raise KafkaException(KafkaError(self.code, "Failed to get offsets: Local: Unknown partition"))

    def offsets_for_times(self, places: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        offset = self._offset()
        return [TopicPartition(place.topic, place.partition, offset) for place in places]

    def get_watermark_offsets(self, place: TopicPartition, timeout: float) -> tuple[int, int]:
        return 3, self._offset()

    def close(self) -> None:
        pass


class Asked:
    """An admin client that gives one offset for every time."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def list_offsets(self, places: dict[TopicPartition, Any]) -> dict[TopicPartition, Any]:
        answer = Future[Any]()
        answer.set_result(SimpleNamespace(offset=self.offset))
        return dict.fromkeys(places, answer)


QUESTIONS: dict[str, tuple[Callable[[], Any], Any]] = {
    "offsets_at": (lambda: offsets.offsets_at(SETTINGS, "tentalis.tasks.v1.dlq", 5), {0: 7}),
    "end_offsets": (lambda: offsets.end_offsets(SETTINGS, "tentalis.tasks.v1.dlq"), {0: 7}),
}


@pytest.fixture(params=QUESTIONS)
def question(request: pytest.FixtureRequest) -> tuple[Callable[[], Any], Any]:
    return QUESTIONS[request.param]


def answered_by(broker: RestartedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offsets, "Consumer", lambda config: broker)
    monkeypatch.setattr(offsets, "_partitions", lambda settings, consumer, topic: [0])


@pytest.mark.parametrize("code", [KafkaError._UNKNOWN_PARTITION, KafkaError._NOENT, KafkaError._TRANSPORT, None])
def test_a_broker_that_starts_is_asked_again(
    question: tuple[Callable[[], Any], Any], code: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered_by(RestartedBroker(code), monkeypatch)
    ask, answer = question
    assert ask() == answer


def test_a_refusal_is_not_questioned(question: tuple[Callable[[], Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    broker = RestartedBroker(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    answered_by(broker, monkeypatch)
    with pytest.raises(Forbidden):
        question[0]()
    assert broker.refusals == 1


@pytest.mark.parametrize(("answer", "first"), [(7, {0: 7}), (OFFSET_END, {})])
def test_records_are_removed_up_to_the_first_one_that_is_recent_enough(answer: int, first: dict[int, int]) -> None:
    assert removal._first_offsets(Asked(answer), "tentalis.tasks.v1.dlq", [0], 5) == first


def test_records_are_not_removed_where_the_response_lacks_a_partition() -> None:
    # Read as "no record is that recent", it would remove the newest records too.
    with pytest.raises(KafkaException):
        removal._first_offsets(Asked(OFFSET_INVALID), "tentalis.tasks.v1.dlq", [0], 5)
