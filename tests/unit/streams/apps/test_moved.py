"""States moved to topics with more partitions: the applications go on as if they had always had so many."""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas import topics
from schemas.place import RecordPlace
from schemas.records import Forget, Outcome, Record, Tick
from streams.apps.aggregation import moved as aggregation
from streams.apps.aggregation.core import Event, TopicFold, commit, entries_of, fold, topic_folds
from streams.apps.experience import moved as experience
from streams.apps.experience.core import ExperienceSession, TurnRef, decode_session, encode_session
from streams.apps.join import moved as join
from streams.apps.join.core import JoinLimits
from streams.apps.join.processor import JoinProcessor
from streams.apps.scoring import moved as scoring
from streams.apps.sessions import moved as sessions
from streams.apps.sessions.core import SessionLimits
from streams.apps.sessions.processor import SessionsProcessor
from streams.fold.hashing import id_hash
from streams.fold.recent_results import FEEDBACK, RESULTS, OffsetRef, RecentResults, offset_refs
from streams.runtime.moving import MovableApplication, Move, States
from streams.runtime.processor import LogRecord
from tentalis.kafka.partitioner import partition_of
from tests.support.join_support import CODEC, START, drive, head, hint, open_, sample, score
from tests.support.sessions_support import end as session_end
from tests.support.sessions_support import turn

BEFORE, AFTER = 4, 6
LIMITS = JoinLimits(marker_ttl_ms=60_000, max_samples=16)


@dataclass
class Log:
    """A topic before and after its move: records by partition, and the partitions' first unread offsets."""

    topic: str
    partitions: int
    records: dict[int, list[LogRecord]] = field(default_factory=lambda: defaultdict(list))

    def append(self, key: str, value: bytes, at: int, partition: int | None = None) -> None:
        p = partition_of(key.encode(), self.partitions) if partition is None else partition
        self.records[p].append(LogRecord(self.topic, p, len(self.records[p]), at, key, value))

    def moved(
        self, after: int, consumed: Mapping[int, int]
    ) -> tuple["Log", dict[RecordPlace, RecordPlace], dict[int, int]]:
        """The topic with `after` partitions: what was consumed first, each part by append time."""
        there, places, begin = Log(self.topic, after), dict[RecordPlace, RecordPlace](), dict[int, int]()
        everything = sorted(
            (record for records in self.records.values() for record in records),
            key=lambda each: (each.offset >= consumed[each.partition], each.timestamp, each.partition, each.offset),
        )
        for record in everything:
            assert record.key is not None
            targets: Sequence[int | None] = [None]
            if record.key.startswith(("tick/", "forget")):
                unread = record.key == "forget" and record.offset >= consumed[record.partition]
                targets = range(after) if unread else range(record.partition, after, self.partitions)
            for target in targets:
                there.append(record.key, record.value, record.timestamp, target)
                p = partition_of(record.key.encode(), after) if target is None else target
                offset = len(there.records[p]) - 1
                places[RecordPlace(self.topic, record.partition, record.offset)] = RecordPlace(self.topic, p, offset)
                if record.offset >= consumed[record.partition]:
                    begin.setdefault(p, offset)
        return there, places, {p: begin.get(p, len(there.records[p])) for p in range(after)}


def halves(chance: random.Random, tasks: int) -> list[tuple[int, Record, int | None]]:
    """Tasks of every fate over a minute, with ticks: (append time, record, its partition if it is addressed)."""
    found: list[tuple[int, Record, int | None]] = []
    for number in range(tasks):
        at = START + chance.randrange(60_000)
        task = head(f"task-{number}", 1 + number % 3, deadline_ms=30_000, opd_window_ms=5_000)
        found.append((at, open_(task, at), None))
        for index in range(task.n_samples):
            for make in (score, hint):
                if chance.random() < 0.8:
                    late = at + chance.randrange(40_000)
                    found.append((late, make(sample(task, index), at=at), None))
    found += [
        (at, Tick(event_time=0, partition=p), p) for at in range(START, START + 160_000, 1000) for p in range(BEFORE)
    ]
    forget = Forget(forget_id="forget", event_time=START, user_id="user-task-3")
    found += [(START + 20_000, forget, p) for p in range(BEFORE)]
    return sorted(found, key=lambda each: each[0])


def folded(
    log: Log, states: Mapping[int, Mapping[str, bytes]], begin: Mapping[int, int], end: Mapping[int, int]
) -> tuple[dict[str, Outcome], dict[int, dict[str, bytes]], int]:
    """The outcomes of a join, its states, and the number of writes of outcomes."""
    processor, outcomes, left, writes = JoinProcessor(CODEC, LIMITS), dict[str, Outcome](), {}, 0
    for partition in range(log.partitions):
        state = dict(states.get(partition, {}))
        processor.restore(partition, dict(state))
        records = log.records[partition][begin.get(partition, 0) : end.get(partition)]
        for at in range(0, len(records), 7):
            effects = drive(processor.process(partition, records[at : at + 7]))
            assert not effects.dead
            for output in effects.outputs:
                if output.topic == topics.OUTCOMES:
                    outcomes[output.key] = CODEC.decode(output.value, topic=output.topic, partition=0, offset=0)
                    writes += 1
            for key, value in (change for wave in effects.changes for change in wave):
                state.pop(key, None) if value is None else state.update({key: value})
        left[partition] = state
    return outcomes, left, writes


def facts(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """Returns the outcomes without the user erased in the middle: the request may be known earlier than before."""
    return {
        key: (each.kind, each.reward, each.not_trainable)
        for key, each in outcomes.items()
        if each.head.user_id != "user-task-3"
    }


def test_a_join_that_was_moved_writes_the_outcomes_of_one_that_was_not() -> None:
    for seed in range(5):
        chance, log = random.Random(seed), Log(topics.HALVES, BEFORE)
        for at, record, partition in halves(chance, 120):
            log.append(record.key, CODEC.encode(topics.HALVES, record), at, partition)
        expected, _, _ = folded(log, {}, {}, {})
        # Partitions that are not equally far.
        consumed = {p: chance.randrange(len(log.records[p])) for p in range(BEFORE)}
        first, states, writes = folded(log, {}, {}, consumed)
        there, places, begin = log.moved(AFTER, consumed)
        new = join.moved(states, move(topics.HALVES, states, join, consumed, places, begin))
        second, _, more = folded(there, new, begin, {})
        assert not {key for key in first if "/late/" not in key} & second.keys(), "no sample twice"
        assert facts(first | second) == facts(expected)
        assert writes + more == len(first | second), "every outcome is written once"
        assert {key for key in first | second if key.startswith("task-3/0")}


def move(
    topic: str,
    states: States,
    application: MovableApplication,
    consumed: Mapping[int, int],
    places: Mapping[RecordPlace, RecordPlace],
    begin: Mapping[int, int],
) -> Move:
    """With the places alone that the copy notes: those that the state asks for, and of unread records."""
    wanted = set(application.places(states))
    noted = {old: new for old, new in places.items() if old in wanted or old.offset >= consumed[old.partition]}
    return Move(
        BEFORE,
        AFTER,
        noted,
        {(topic, p): offset for p, offset in consumed.items()},
        {(topic, p): offset for p, offset in begin.items()},
    )


def test_feedback_still_finds_its_results_after_a_move() -> None:
    states: dict[int, dict[str, bytes]] = {}
    places: dict[RecordPlace, RecordPlace] = {}
    ends: dict[tuple[str, int], int] = defaultdict(int)
    where: dict[str, int] = {}
    for partition in range(BEFORE):
        recent = RecentResults(horizon_ms=1000)
        names = [name for name in map(str, range(100)) if partition_of(name.encode(), BEFORE) == partition]
        for offset, name in enumerate(names):
            target = where[name] = partition_of(name.encode(), AFTER)
            for topic in (topics.RESULTS, topics.FEEDBACK):
                there = ends[topic, target]
                ends[topic, target] += 1
                places[RecordPlace(topic, partition, offset)] = RecordPlace(topic, target, there)
            recent.add_result(OffsetRef(offset, START + offset, id_hash(name)))
            recent.add_feedback(OffsetRef(offset, START + offset, id_hash(f"waits-{name}")), answered=False)
        states[partition] = {key: value for wave in recent.take_changes() for key, value in wave if value is not None}
    gone = RecordPlace(topics.RESULTS, 0, 0)  # removed by retention: nothing can be paired with it any more
    assert gone in set(scoring.places(states))
    del places[gone]
    new = scoring.moved(states, Move(BEFORE, AFTER, places, {}, ends))
    found = {(kind, ref.task): p for p, state in new.items() for kind, ref in offset_refs(state)}
    lost = {
        name
        for name in where
        if partition_of(name.encode(), BEFORE) == 0
        and id_hash(name) not in {task for kind, task in found if kind == RESULTS}
    }
    assert len(lost) == 1
    assert found == {(RESULTS, id_hash(name)): p for name, p in where.items() if name not in lost} | {
        (FEEDBACK, id_hash(f"waits-{name}")): p for name, p in where.items()
    }
    for p, state in new.items():
        again = RecentResults(horizon_ms=1000)
        again.restore(state)
        assert again.waiting == sum(target == p for target in where.values())


def test_the_counts_of_aggregation_move_once() -> None:
    def event(number: int, offset: int) -> Event:
        return Event(offset, START, START, f"event-{number}", "m", "w", "chat", number / 10, "rl")

    states: dict[int, dict[str, bytes]] = {}
    for partition in range(BEFORE):
        topic_fold = TopicFold()
        events = [event(10 * partition + n, n) for n in range(10)]
        commit(topic_fold, fold(topic_fold, events, 9, window_ms=60_000, retention_ms=3_600_000))
        states[partition] = entries_of("outcomes", topic_fold)
    begin = {(topic, p): 7 for topic in (topics.OUTCOMES, topics.FEEDBACK) for p in range(AFTER)}
    new = aggregation.moved(states, Move(BEFORE, AFTER, {}, {}, begin))
    folds = {p: topic_folds(("outcomes", "feedback"), state)["outcomes"] for p, state in new.items()}
    assert sum(bucket.moments.n for each in folds.values() for bucket in each.buckets.values()) == 10 * BEFORE
    for p, each in folds.items():
        # An event that is sent again to any partition that its key can be on is known there.
        for partition in range(BEFORE):
            if p % 2 == partition % 2:
                step = fold(each, [event(10 * partition, 7)], 7, window_ms=60_000, retention_ms=3_600_000)
                assert step.duplicates == 1 and not step.buckets


def spoken(log: Log, states: States, begin: Mapping[int, int], end: Mapping[int, int]) -> tuple[Counter[str], States]:
    """The tasks, results and feedback that the application sessions writes, by their ids, and its states."""
    limits = SessionLimits(frozenset(), idle_ms=20_000, remember_ms=90_000, forget_ttl_ms=90_000)
    processor, written, left = SessionsProcessor(CODEC, limits), Counter[str](), dict[int, dict[str, bytes]]()
    for partition in range(log.partitions):
        state = dict(states.get(partition, {}))
        processor.restore(partition, dict(state))
        records = log.records[partition][begin.get(partition, 0) : end.get(partition)]
        for at in range(0, len(records), 7):
            effects = asyncio.run(processor.process(partition, records[at : at + 7]))
            assert not effects.dead
            for output in effects.outputs:
                record = CODEC.decode(output.value, topic=output.topic, partition=0, offset=0)
                written[f"{type(record).__name__} {record.event_id}"] += 1
            for key, value in (change for wave in effects.changes for change in wave):
                state.pop(key, None) if value is None else state.update({key: value})
        left[partition] = state
    return written, left


def test_conversations_go_on_after_a_move() -> None:
    for seed in range(3):
        chance, log = random.Random(seed), Log(topics.SESSIONS, BEFORE)
        events: list[tuple[int, Record, int | None]] = []
        for number in range(40):
            session, at, texts = f"s{number}", START + chance.randrange(40_000), list[str]()
            for index in range(chance.randrange(1, 5)):
                at += chance.randrange(8_000)
                texts.append(f"question {index}")
                event = turn(f"{session}-{index}", *texts, session=session)
                texts.append(event.response)
                events.append((at, event, None))
                if chance.random() < 0.2:
                    events.append((at + 3_000, event, None))  # sent again
            if chance.random() < 0.5:
                events.append((at + 1_000, session_end(f"{session}-end", session), None))
        events += [
            (at, Tick(event_time=0, partition=p), p)
            for at in range(START, START + 120_000, 1000)
            for p in range(BEFORE)
        ]
        for at, record, partition in sorted(events, key=lambda each: each[0]):
            log.append(record.key, CODEC.encode(topics.SESSIONS, record), at, partition)
        expected, _ = spoken(log, {}, {}, {})
        consumed = {p: chance.randrange(len(log.records[p])) for p in range(BEFORE)}
        first, states = spoken(log, {}, {}, consumed)
        there, places, begin = log.moved(AFTER, consumed)
        new = sessions.moved(states, move(topics.SESSIONS, states, sessions, consumed, places, begin))
        second, _ = spoken(there, new, begin, {})
        assert first and second and first + second == expected


def test_the_turns_of_an_open_session_are_found_after_a_move() -> None:
    turns = [TurnRef(offset, START + offset, offset) for offset in (3, 5)]
    opened = ExperienceSession(5, START, 2, open=True, session_id="s1", policy="assistant", turns=turns)
    ended = ExperienceSession(4, START, 7)
    partition = partition_of(b"s1", BEFORE)
    target = partition_of(b"s1", AFTER)
    states = {partition: {"session/open": encode_session(opened), "session/ended": encode_session(ended)}}
    places = {
        RecordPlace(topics.SESSIONS, partition, offset): RecordPlace(topics.SESSIONS, target, offset - 2)
        for offset in (3, 5)
    }
    assert set(experience.places(states)) == set(places)
    begin = {(topics.SESSIONS, p): 9 for p in range(AFTER)}
    new = experience.moved(states, Move(BEFORE, AFTER, places, {(topics.SESSIONS, partition): 6}, begin))
    found = decode_session("session/open", new[target]["session/open"])
    assert [turn.offset for turn in found.turns] == [1, 3] and found.applied == 8
    assert {p for p, state in new.items() if "session/open" in state} == {target}
    assert {p for p, state in new.items() if "session/ended" in state} == {
        p for p in range(AFTER) if p % 2 == partition % 2
    }
