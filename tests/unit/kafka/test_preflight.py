"""Checks at the start of a process: a topic that is missing, and one that is gone."""

from typing import Any

import pytest

from schemas import topics
from tentalis.kafka import preflight
from tentalis.kafka.errors import NoSuchTopic
from tentalis.kafka.identity import TopicLost
from tentalis.kafka.topic_ids import TopicIdRecords
from tentalis.service.settings import Settings

CLIENT: Any = None


@pytest.mark.parametrize(
    ("recorded", "error", "says"),
    [
        (None, NoSuchTopic, "`tentalis topics apply` creates it"),
        ({topics.TASKS: "a"}, NoSuchTopic, "`tentalis topics apply` creates it"),
        ({topics.TASKS: "a", topics.HALVES: "b"}, TopicLost, r"halves.v1 is gone \(its id was b\)\. .*--accept-loss"),
    ],
    ids=["no-record", "never-recorded", "recorded"],
)
def test_a_topic_that_was_recorded_is_lost_and_not_missing(
    recorded: dict[str, str] | None, error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "TOPIC_PATIENCE_S", 0.0)
    monkeypatch.setattr(preflight, "check", lambda *_: [topics.HALVES])
    monkeypatch.setattr(preflight, "read_topic_ids", lambda _: TopicIdRecords(recorded))
    with pytest.raises(error, match=says):
        preflight.check_role(CLIENT, Settings(bootstrap="b:1"), "join")
