"""The thread that looks at topics: its errors reach the process."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from schemas import topics
from tentalis.kafka import topic_watch
from tentalis.kafka.identity import PartitionsChanged, TopicIdentity, TopicLost
from tentalis.kafka.topic_watch import TopicWatch
from tentalis.service.settings import Settings

Look = Callable[[], dict[str, TopicIdentity]]


class ScriptedClient:
    """Answers each request for identities with the next of `looks`, and the last one for ever."""

    def __init__(self, looks: list[Look]) -> None:
        self.looks = looks

    def identities(self, names: Any) -> dict[str, TopicIdentity]:
        return (self.looks.pop(0) if len(self.looks) > 1 else self.looks[0])()


def error_of(looks: list[Look], monkeypatch: pytest.MonkeyPatch) -> Exception:
    """The error that `check` raises after these looks."""
    monkeypatch.setattr(topic_watch, "LOOK_S", 0.001)
    monkeypatch.setattr(topic_watch, "TopicClient", lambda _: ScriptedClient(looks))
    seen = threading.Event()
    watch = TopicWatch(Settings(bootstrap="127.0.0.1:1"), ["tasks"], "Ways on.", seen.set)
    assert seen.wait(10)
    with pytest.raises(Exception) as caught:
        watch.check()
    return caught.value


def late() -> dict[str, TopicIdentity]:
    raise TimeoutError


def broken() -> dict[str, TopicIdentity]:
    raise AttributeError("a defect")


def test_a_broker_that_answers_late_does_not_end_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ({"tasks": TopicIdentity(each, 1)} for each in "ab")
    assert isinstance(error_of([lambda: first, late, lambda: second], monkeypatch), TopicLost)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_unforeseen_error_of_a_look_reaches_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "a defect" in str(error_of([broken], monkeypatch))


def test_keyed_topics_of_different_sizes_end_a_process_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = {topics.TASKS: TopicIdentity("a", 9), topics.RESULTS: TopicIdentity("b", 8)}
    error = error_of([lambda: grown], monkeypatch)
    assert isinstance(error, PartitionsChanged)
    assert f"{topics.TASKS} has 9 partitions, and {topics.RESULTS} has 8" in str(error)
