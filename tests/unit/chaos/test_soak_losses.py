"""A soak that has lost something says what; one that has not says nothing. The soak of these tests has no broker: what
the drivers send goes through the applications one record at a time, all of it on one partition."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pytest

from schemas import topics
from schemas.ids import turn_task_id
from schemas.records import Hint, OutcomeKind, Record, Score, SessionEvent, Source, Tick
from streams.apps.aggregation import processor as aggregation
from streams.apps.aggregation.processor import Aggregation
from streams.apps.experience import processor as experience
from streams.apps.hinting import processor as hinting
from streams.apps.join import processor as join
from streams.apps.scoring import processor as scoring
from streams.apps.sessions import processor as sessions
from streams.apps.sessions.core import SessionLimits
from streams.fold.pairing import HORIZON_MS
from streams.runtime.processor import LogRecord, Processor
from tentalis.kafka.consumer import Stored
from tentalis.text.timestamps import now_ms
from tests.chaos.conversations import conversation
from tests.chaos.driver import events_of
from tests.chaos.losses import TOPICS, lost
from tests.support.fake_inference import FakeInference
from tests.support.pairing_support import make_app
from tests.support.sessions_support import CODEC, PARTITION
from tests.support.stream_records import make_task
from tests.unit.opd.test_judge import Script
from tests.unit.streams.apps.test_experience import TELLS, Lab

TASKS, SESSIONS = 40, 6
IDLE_MS, OVER_MS = 30_000, 2 * 3_600_000
SILENT = "nobody-answers"


@dataclass
class Again:
    """Reads records again, as pairing does."""

    logs: Mapping[str, Sequence[LogRecord]]

    async def read(self, topic: str, partition: int, offsets: Collection[int]) -> dict[int, LogRecord]:
        return {offset: self.logs[topic][offset] for offset in offsets}


class Soak:
    """Returns the records on the topics at the end.

    Args:
        passes_over: an application, and the id of a record that it never sees.
    """

    def __init__(self, passes_over: tuple[str, str] = ("", "")) -> None:
        self.logs: dict[str, list[LogRecord]] = {topic: [] for topic in TOPICS}
        self._passes_over = passes_over
        chance, now = random.Random(3), now_ms()
        self._put(topics.TASKS, now, make_task(SILENT, event_time=now, n_samples=1))
        for number in range(TASKS):
            for after, topic, record in events_of(chance, "soak", number):
                self._put(topic, now + 200 * number + round(1000 * after), record)
        for number in range(SESSIONS):
            for after, topic, record in conversation(chance, "talk", number):
                self._put(topic, now + 500 * number + round(1000 * after), record)
        for topic in (topics.SESSIONS, topics.HALVES):
            self._put(topic, now + OVER_MS, Tick(event_time=0, partition=PARTITION))
        asyncio.run(self._run())

    def read(self, topic: str) -> Iterator[Stored]:
        """Returns the records of a topic."""
        for record in self.logs[topic]:
            yield Stored(topic, PARTITION, record.offset, record.timestamp, record.key, record.value, record.headers)

    def first(self, topic: str, picked: Callable[[Any], bool]) -> Any:
        """The first record of a topic that is picked."""
        return next(record for stored in self.read(topic) if picked(record := stored.decode(CODEC)))

    def without(self, topic: str, gone: Record) -> list[str]:
        """Returns the losses that are found if a record is not on its topic, however often it was written."""
        there = [stored for stored in self.read(topic) if stored.decode(CODEC).event_id != gone.event_id]
        return lost(lambda name: there if name == topic else self.read(name), CODEC)

    async def _run(self) -> None:
        limits = SessionLimits(idle_ms=IDLE_MS, remember_ms=4 * IDLE_MS)
        await self._through(sessions.SessionsProcessor(CODEC, limits), topics.SESSIONS)
        again = Again(self.logs)
        await self._through(make_app("scoring", again, HORIZON_MS), topics.TASKS, topics.RESULTS, topics.FEEDBACK)
        await self._through(make_app("hinting", again, HORIZON_MS), topics.RESULTS, topics.FEEDBACK)
        lessons = Lab(self.logs[topics.SESSIONS], Script(*[TELLS] * 100), FakeInference())
        await self._through(lessons.app, topics.SESSIONS)
        await self._through(join.JoinProcessor(CODEC), topics.HALVES)
        await self._through(Aggregation(CODEC), topics.OUTCOMES, topics.FEEDBACK)

    async def _through(self, application: Processor, *inputs: str) -> None:
        """An application reads all of its topics, in the order of their append times."""
        for topic in inputs:
            log = sorted(self.logs[topic], key=lambda record: record.timestamp)
            self.logs[topic] = [record._replace(offset=offset) for offset, record in enumerate(log)]
        application.restore(PARTITION, {})
        log = [record for topic in inputs for record in self.logs[topic]]
        for record in sorted(log, key=lambda record: record.timestamp):
            said = CODEC.decode(record.value, topic=record.topic, partition=PARTITION, offset=record.offset)
            if (application.app_id, said.event_id) == self._passes_over:
                continue
            effects = await application.process(PARTITION, [record])
            assert not effects.dead
            for made in effects.outputs:
                self._append(made.topic, record.timestamp, made.key, made.value, made.headers)

    def _put(self, topic: str, at: int, record: Record) -> None:
        self._append(topic, at, record.key, CODEC.encode(topic, record), ())

    def _append(self, topic: str, at: int, key: str, value: bytes, headers: Any) -> None:
        self.logs[topic].append(LogRecord(topic, PARTITION, len(self.logs[topic]), at, key, value, headers))


@pytest.fixture(scope="module")
def soak() -> Soak:
    return Soak()


def test_a_complete_run_has_no_losses(soak: Soak) -> None:
    assert lost(soak.read, CODEC) == []
    kinds = Counter(record.kind for stored in soak.read(topics.OUTCOMES) if (record := stored.decode(CODEC)))
    wanted = {OutcomeKind.BOTH, OutcomeKind.RL, OutcomeKind.FAILED, OutcomeKind.EXPIRED}
    assert kinds.keys() >= wanted | {OutcomeKind.LATE, OutcomeKind.SUPERSEDED}, "every fate is among it"


def test_a_record_written_twice_is_no_loss(soak: Soak) -> None:
    assert lost(lambda topic: chain(soak.read(topic), soak.read(topic)), CODEC) == []


def is_main(event: Record) -> bool:
    return isinstance(event, SessionEvent) and event.turn_type == "main"


def is_own(outcome: Any) -> bool:
    return outcome.kind not in (OutcomeKind.LATE, OutcomeKind.SUPERSEDED)


def turn_of(event: SessionEvent) -> str:
    return turn_task_id(event.session_id, event.session_event_id)


def answers(half: Record, kind: type[Score | Hint], feedback: bool) -> bool:
    return isinstance(half, kind) and (half.feedback_id is not None) == feedback


@pytest.mark.parametrize(
    ("app", "topic", "picked", "told"),
    [
        (scoring, topics.TASKS, lambda task: task.task_id == SILENT, lambda task: f"{SILENT}/0 has no outcome"),
        (
            scoring,
            topics.RESULTS,
            lambda result: result.task.terms.rl is Source.RESULT,
            lambda result: f"result {result.result_id} was not scored",
        ),
        (
            scoring,
            topics.FEEDBACK,
            lambda said: said.source is said.result.task.terms.rl,
            lambda said: f"feedback {said.feedback_id} was not scored",
        ),
        (
            hinting,
            topics.FEEDBACK,
            lambda said: said.source is said.result.task.terms.opd,
            lambda said: f"feedback {said.feedback_id} led to no hint",
        ),
        (sessions, topics.SESSIONS, is_main, lambda event: f"turn {turn_of(event)} has no result"),
        (sessions, topics.SESSIONS, is_main, lambda event: f"{turn_of(event)}/0 has no outcome"),
        (experience, topics.SESSIONS, is_main, lambda event: f"turn {turn_of(event)} was not learnt from"),
        (
            join,
            topics.HALVES,
            lambda half: answers(half, Score, feedback=False),
            lambda half: f"half {half.event_id} is in no rollout, and neither late nor superseded",
        ),
        (
            join,
            topics.HALVES,
            lambda half: isinstance(half, Hint) and half.hinter == "driver" and half.teacher_logprobs is not None,
            lambda half: f"half {half.event_id} is in no rollout, and neither late nor superseded",
        ),
        (aggregation, topics.OUTCOMES, is_own, lambda outcome: f"{aggregation.APP_ID} counted "),
    ],
)
def test_a_record_that_an_application_skipped_is_a_loss(
    soak: Soak, app: Any, topic: str, picked: Callable[[Any], bool], told: Callable[[Any], str]
) -> None:
    record = soak.first(topic, picked)
    found = lost(Soak((app.APP_ID, record.event_id)).read, CODEC)
    assert any(line.startswith(told(record)) for line in found), found


@pytest.mark.parametrize(
    ("topic", "picked", "told"),
    [
        (
            topics.ROLLOUTS,
            lambda rollout: True,
            lambda rollout: f"rollout {rollout.rollout_id} is named by an outcome but missing",
        ),
        (topics.OUTCOMES, is_own, lambda outcome: f"{outcome.outcome_key} has no outcome"),
        (
            topics.RESULTS,
            lambda result: result.task.terms.rl is Source.NEXT_STATE,
            lambda result: f"turn {result.task.task_id} has no result",
        ),
        (
            topics.HALVES,
            lambda half: answers(half, Score, feedback=False),
            lambda score: f"result {score.sample.result_id} was not scored",
        ),
        (
            topics.HALVES,
            lambda half: answers(half, Score, feedback=True) and half.source is half.sample.head.terms.rl,
            lambda score: f"feedback {score.feedback_id} was not scored",
        ),
        (
            topics.HALVES,
            lambda half: answers(half, Hint, feedback=True) and half.source is half.sample.head.terms.opd,
            lambda hint: f"feedback {hint.feedback_id} led to no hint",
        ),
        (
            topics.HALVES,
            lambda half: isinstance(half, Hint) and half.hinter.startswith("experience/"),
            lambda hint: f"turn {hint.key} was not learnt from",
        ),
        (topics.META, lambda signal: bool(signal.outcomes), lambda signal: f"{aggregation.APP_ID} counted "),
    ],
)
def test_a_record_that_is_not_on_its_topic_is_a_loss(
    soak: Soak, topic: str, picked: Callable[[Any], bool], told: Callable[[Any], str]
) -> None:
    record = soak.first(topic, picked)
    found = soak.without(topic, record)
    assert any(line.startswith(told(record)) for line in found), found
