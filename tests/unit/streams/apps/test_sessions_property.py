"""Properties of the sessions over logs that nobody would write: against an oracle, and against their own undisturbed
self. Logs are short and dense: few sessions, times around every boundary, repetitions, turns out of order, people who
leave, rubbish."""

import functools
import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from schemas import topics
from schemas.records import Feedback, Record
from streams.runtime.processor import LogRecord
from tests.support.sessions_oracle import Oracle, told
from tests.support.sessions_support import (
    CODEC,
    LIMITS,
    PARTITION,
    SEEING,
    START,
    Cut,
    Disk,
    Sessions,
    alive,
    drive,
    end,
    forget,
    record_at,
    side,
    tick,
    turn,
)

# More for a long search: TENTALIS_TEST_EXAMPLES=20000 pytest tests/unit/streams/apps/test_sessions_property.py
EXAMPLES = int(os.environ.get("TENTALIS_TEST_EXAMPLES", "50"))
QUICK = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Disk]:
    made = Disk(tmp_path_factory.mktemp("disk"), None)
    yield made
    made.close()


STEPS = (0, 0, 0, 1, 5, 5, 40, 300, 999, 1000, 1001, -50, -500)
LEAPS = (2500, 5000, 5001, 9001)
TALK = ("q", "a0", "that's wrong", "a1", "user: s", "a2", "tool: Error: t", "tool: fine", "assistant: a3", "user: u")
"""The conversation that every session has."""
ASKED_WITH = (1, 3, 5, 8, 10)
"""The number of its first messages with which each turn is asked."""

Spec = tuple[Any, ...]


@functools.cache
def record_of(spec: Spec) -> Record:
    """The record that a spec stands for; the same spec is the same event."""
    what, session, user, *rest = spec
    whose: dict[str, Any] = {"session": session, "user_id": user}
    match what:
        case "tick":
            return tick()
        case "forget":
            given: dict[str, Any] = ({"user_id": user}, {"session_id": session}, {"before": START + 500})[rest[0]]
            return forget(**given)
        case "end":
            return end(f"end-{rest[0]}", **whose)
        case "side":
            return side(f"side-{rest[0]}", done=rest[1], **whose)
    number, variant, done = rest
    texts = TALK[: ASKED_WITH[number]]
    if variant == "shortened":
        texts = (f"user: in short {number}",)
    fields: dict[str, Any] = {"not_trainable": "no token ids"} if variant == "untrainable" else {}
    answer = f"other {number}" if variant == "again" else f"a{number}"
    return turn(f"{number}-{variant}", *texts, answer=answer, done=done, **whose, **fields)


@functools.cache
def encoded(spec: Spec) -> tuple[str, bytes]:
    record = record_of(spec)
    return record.key, CODEC.encode(topics.SESSIONS, record)


# Each strategy is made once, and choices that belong together are one: drawing was most of the time of these tests. The
# first of each is the simplest, to which a failing log is shrunk.
WHATS = st.sampled_from(["turn"] * 12 + ["side", "side", "end", "end", "tick", "tick", "forget", "rubbish"])
WHOSE = st.sampled_from([(session, user) for user in ["ann"] * 5 + ["bob", None] for session in ["s", "s", "s", "t"]])
THREE = st.integers(0, 2)
SIDES = st.sampled_from([(number, done) for done in [False] * 5 + [True] for number in (0, 1)])
# Mostly the conversation goes on, sometimes it skips a turn, goes back or comes twice.
TURNS = st.sampled_from(
    [
        (further, variant, done)
        for done in [False] * 7 + [True]
        for variant in ["first"] * 8 + ["again", "shortened", "untrainable"]
        for further in [1, 1, 1, 1, 2, 0, -1]
    ]
)
PAUSES = st.sampled_from(STEPS * 4 + LEAPS)
LENGTHS = {most: st.integers(1, most) for most in (20, 40, 60)}


@st.composite
def specs(draw: Any, near: list[int]) -> Spec | None:
    what = draw(WHATS)
    if what == "rubbish":
        return None
    session, user = draw(WHOSE)
    if what == "tick":
        return what, session, user
    if what == "forget":
        return what, session, user or "ann", draw(THREE)
    if what == "end":
        return what, session, user, draw(THREE)
    if what == "side":
        return what, session, user, *draw(SIDES)
    further, variant, done = draw(TURNS)
    near[0] = max(0, min(4, near[0] + further))
    return what, session, user, near[0], variant, done


@st.composite
def logs(draw: Any, most: int = 40) -> list[tuple[int, Spec | None]]:
    """(append time after START, spec or None for rubbish) each; offsets are the places in the list."""
    found: list[tuple[int, Spec | None]] = []
    now, near = 0, [-1]
    for _ in range(draw(LENGTHS[most])):
        now += draw(PAUSES)
        found.append((now, draw(specs(near))))
    return found


def records(log: list[tuple[int, Spec | None]], tail: int = 0) -> list[LogRecord]:
    found = []
    for offset, (after, spec) in enumerate(log):
        key, value = encoded(spec) if spec is not None else ("?", b"rubbish")
        found.append(LogRecord(topics.SESSIONS, PARTITION, offset, START + after, key, value))
    last = max((after for after, _ in log), default=0)
    return found + [record_at(len(log) + i, last + 20_000 * (i + 1), tick()) for i in range(tail)]


def _said(spec: Spec | None) -> Record | None:
    return None if spec is None else record_of(spec)


# Of the wave at which a flush was cut, the first entries are on the changelog: its producer writes in order. Sessions
# rely on it where a turn that was forgotten comes again: its session is written before the mark that it was seen.
cuts = st.builds(
    Cut,
    stage=st.integers(0, 4),
    kept=st.integers(0, 7).map(lambda most: frozenset(range(most))),
    back=st.sampled_from([0, 0, 1, 3, 1000]),
    wakes=st.sampled_from([None, 0, 1, 3]),
)
SIZES = st.lists(st.integers(1, 12), min_size=1, max_size=5)
PLANS = st.dictionaries(st.integers(0, 12), cuts, max_size=6)


@QUICK
@given(logs(most=60))
def test_what_the_oracle_says(log: list[tuple[int, Spec | None]]) -> None:
    """Same outputs, same dead letters, as the brute force over the same log; in the same order, but for sessions that
    end at the same record."""
    oracle = Oracle(LIMITS.idle_ms, LIMITS.remember_ms, LIMITS.forget_ttl_ms)
    lies = records(log, tail=1)
    said = [tick() if i == len(log) else _said(log[i][1]) for i in range(len(lies))]
    oracle.fold([(record.offset, record.timestamp, what) for record, what in zip(lies, said, strict=True)])
    partition = Sessions(lies)
    partition.run()
    found = [told(record) for record in partition.records]
    for fact in found:
        event(" ".join(fact[:1] + (fact[2:3] if fact[0] == "feedback" else ())))
    assert sorted(map(repr, found)) == sorted(map(repr, oracle.written))
    assert [offset for offset, _ in partition.written.dead] == oracle.dead
    for name in {fact[1] for fact in found}:
        assert [f for f in found if f[1] == name] == [f for f in oracle.written if f[1] == name]


@QUICK
@given(logs(), SIZES)
def test_batches_do_not_matter(log: list[tuple[int, Spec | None]], sizes: list[int]) -> None:
    whole, pieces = Sessions(records(log)), Sessions(records(log))
    assert whole.run().produced == pieces.run(sizes).produced
    assert whole.written.dead == pieces.written.dead
    assert alive(whole.start()) == alive(pieces.start())


@settings(QUICK, max_examples=2 * EXAMPLES)
@given(logs(), SIZES, PLANS)
def test_crashes_redelivery_and_zombies_do_not_matter(
    log: list[tuple[int, Spec | None]], sizes: list[int], plan: dict[int, Cut]
) -> None:
    """Flushes cut between and within outputs, state and commit, redelivery from any earlier offset, late flushes of
    workers thought dead: every write is one of the undisturbed run, byte for byte, none is missing, and the state ends
    up the same."""
    calm, rough = Sessions(records(log), SEEING), Sessions(records(log), SEEING)
    calm.run()
    rough.run(sizes, plan)
    assert set(rough.written.produced) == set(calm.written.produced)
    assert {offset for offset, _ in rough.written.dead} == {offset for offset, _ in calm.written.dead}
    assert alive(rough.start()) == alive(calm.start())


@settings(QUICK, max_examples=max(1, EXAMPLES // 5))
@given(logs(), SIZES, PLANS)
def test_state_on_disk_is_the_same_state(
    disk: Disk, log: list[tuple[int, Spec | None]], sizes: list[int], plan: dict[int, Cut]
) -> None:
    """With the state in a database that outlives its worker: what is written is what it is in memory, and so is the
    state after every start, though a start reads the changelog only from where the database ends."""
    calm, rough = Sessions(records(log), SEEING), Sessions(records(log), SEEING)
    kept = Sessions(records(log), SEEING, disk)
    calm.run()
    rough.run(sizes, plan)
    kept.run(sizes, plan)
    assert set(kept.written.produced) == set(calm.written.produced)
    assert kept.written.produced == rough.written.produced
    assert alive(kept.start()) == alive(rough.start())


@QUICK
@given(logs(), SIZES, PLANS)
def test_every_task_has_one_feedback_in_the_end_unless_it_was_forgotten(
    log: list[tuple[int, Spec | None]], sizes: list[int], plan: dict[int, Cut]
) -> None:
    partition = Sessions(records(log, tail=1))
    partition.run(sizes, plan)
    heard: dict[str, set[str]] = {}
    for feedback in partition.feedback:  # no implicit signals among it
        heard.setdefault(feedback.task_id, set()).add(feedback.model_dump_json())
    tasks = {task.task_id for task in partition.tasks}
    if not any(spec is not None and spec[0] == "forget" for _, spec in log):
        # An id that comes again after it was forgotten is another event: ids are given once.
        assert heard.keys() == tasks
    assert heard.keys() <= tasks
    for feedback in partition.feedback:
        assert isinstance(feedback, Feedback) and feedback.result is not None
        assert feedback.result.task.session_id in ("s", "t")


@QUICK
@given(logs(), SIZES, PLANS)
def test_state_is_bounded(log: list[tuple[int, Spec | None]], sizes: list[int], plan: dict[int, Cut]) -> None:
    """The changelog holds the clock, a header per session that is remembered, the turns that open ones wait with, a
    mark per event of its time and the requests to forget; in the end the clock alone."""
    partition = Sessions(records(log))
    partition.run(sizes, plan)
    processor = partition.start()
    again = record_at(len(log), max(after for after, _ in log), tick())
    tail = records(log, tail=3)[len(log) :]
    for record in (again, *(LogRecord(r.topic, r.partition, r.offset + 1, r.timestamp, r.key, r.value) for r in tail)):
        state = processor.partitions[PARTITION]
        waiting = sum(session.pending is not None for session in state._sessions.values())
        remembered, marks, leavers = len(state._sessions), len(state._seen), len(state._kernel.forgotten)
        stages = partition._stages(drive(processor.process(PARTITION, [record])), [record])
        for stage in stages:
            partition._arrive(stage)
        partition._apply(stages)
        kinds = [key.partition("/")[0] for key in partition.store]
        if record is again:
            assert (kinds.count("clock"), kinds.count("session"), kinds.count("turn")) == (1, remembered, waiting)
            assert (kinds.count("seen"), kinds.count("forget")) == (marks, leavers)
    assert kinds == ["clock"]
