"""Offsets of partitions from a broker that has just started."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, TopicPartition

from tentalis.kafka import topic_client
from tentalis.kafka.topic_client import TopicClient
from tentalis.service.settings import Settings


class RestartedBroker:
    """Answers a request for offsets with an error as often as `refusals` says, and with offset 7 afterwards. Without a
    code its refusal is librdkafka's offset for "not known"."""

    def __init__(self, code: int | None, refusals: int) -> None:
        self.code, self.refusals = code, refusals

    def list_offsets(self, wanted: dict[TopicPartition, Any], request_timeout: float) -> dict[TopicPartition, Any]:
        answer = Future[Any]()
        if self.refusals:
            self.refusals -= 1
            if self.code is None:
                answer.set_result(SimpleNamespace(offset=OFFSET_INVALID))
            else:
                answer.set_exception(KafkaException(KafkaError(self.code, "Failed to get offsets: Local: Unknown")))
        else:
            answer.set_result(SimpleNamespace(offset=7))
        return dict.fromkeys(wanted, answer)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> TopicClient:
    monkeypatch.setattr(topic_client, "RETRY_S", 0.0)
    return TopicClient(Settings(bootstrap="127.0.0.1:1"))


@pytest.mark.parametrize(
    "code",
    [
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._NOENT,
        KafkaError._TIMED_OUT,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.UNKNOWN_LEADER_EPOCH,
    ],
)
def test_offsets_are_asked_for_again_while_a_broker_starts(client: TopicClient, code: int) -> None:
    client._client = RestartedBroker(code, refusals=2)
    assert {place: (r.begin, r.end) for place, r in client.ranges([("tentalis.tasks.v1", 3)]).items()} == {
        ("tentalis.tasks.v1", 3): (7, 7)
    }


def test_an_offset_that_the_response_lacks_is_asked_for_again(client: TopicClient) -> None:
    # Seen when a broker was killed and started again under load: read as an end, it made a complete log look cut.
    client._client = RestartedBroker(None, refusals=2)
    found = client.ranges([("tentalis.halves.v1", 0)])["tentalis.halves.v1", 0]
    assert (found.begin, found.end) == (7, 7)


def test_offsets_that_are_denied_are_not_asked_for_again(client: TopicClient) -> None:
    client._client = RestartedBroker(KafkaError.TOPIC_AUTHORIZATION_FAILED, refusals=1)
    with pytest.raises(KafkaException):
        client.ranges([("tentalis.tasks.v1", 3)])
