"""Whole-session experience: which sessions end, the one lesson, and every turn scored anew with it."""

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import topics
from schemas.ids import turn_task_id
from schemas.records import Hint, HintKind, Record, Result, Score, SessionEvent, Source, sample_of
from schemas.tensors import float32_view
from streams.apps.experience.core import MOST_TURNS, ExperiencePartition
from streams.apps.experience.processor import Experience
from streams.apps.hinting.core import hint_half
from streams.apps.join.core import JoinLimits
from streams.apps.join.emit import HalvesPartition, late
from streams.apps.sessions.turns import next_state_of
from streams.fold.session_turns import result_of
from streams.runtime.processor import Effects, LogRecord, Retryable, payload_of
from streams.runtime.rocksdb_store import DiskStore
from streams.runtime.state import StateStore, as_entries
from tentalis.inference.protocol import RequestRefused, ServerUnavailable
from tentalis.opd import FixedModel, Teacher
from tentalis.opd.lesson import END, START, LessonJudge, lesson_of
from tentalis.opd.verdict import VoteStatus
from tentalis.rewards.verdict import ScorerAway
from tests.support.fake_inference import FakeInference
from tests.support.join_support import START as JOINED
from tests.support.join_support import fold
from tests.support.sessions_support import (
    CODEC,
    LIMITS,
    PARTITION,
    drive,
    end,
    forget,
    log_of,
    side,
    tick,
    turn,
    worker,
)
from tests.support.sessions_support import START as BEGAN
from tests.unit.opd.test_judge import Script
from tests.unit.streams.apps.test_sessions_property import QUICK, Spec, logs, record_of
from tests.unit.streams.apps.test_sessions_property import records as lying

IDLE_MS, REMEMBER_MS, FORGET_MS = 1_000, 5_000, 9_000
LESSON = "Do: answer in one line.\nDon't: use lists."
TELLS = f"They wanted it short. {START}\n{LESSON}\n{END} \\boxed{{1}}"


class Log:
    """Reads the records of a log again; `asked` are the offsets."""

    def __init__(self, records: Sequence[LogRecord]) -> None:
        self.records = {record.offset: record for record in records}
        self.asked: list[int] = []

    async def read(self, topic: str, partition: int, offsets: Collection[int]) -> Mapping[int, LogRecord | None]:
        self.asked += offsets
        return {offset: self.records.get(offset) for offset in offsets}


@pytest.fixture(params=["memory", "rocksdb"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StateStore | DiskStore]:
    """The state store, in memory and on disk, for a test about state."""
    store = StateStore() if request.param == "memory" else DiskStore(tmp_path)
    yield store
    store.close()


class Lab:
    """The application over a log, and its state: in memory if nothing else is said."""

    def __init__(
        self,
        log: Sequence[LogRecord],
        chat: Script,
        inference: FakeInference | None = None,
        kept: StateStore | DiskStore | None = None,
    ) -> None:
        async def model() -> str:
            return "base"

        async def shorten(text: str) -> str:
            return text[:40]

        self.log, self.chat, self.inference = list(log), chat, inference or FakeInference(prompt=(7, 8))
        self.reader = Log(log)
        self.app = Experience(
            CODEC,
            self.reader,
            LessonJudge(chat, ["m"], 0.6, 4096),
            Teacher(self.inference, FixedModel(model)),
            shorten,
            idle_ms=IDLE_MS,
            remember_ms=REMEMBER_MS,
            forget_ttl_ms=FORGET_MS,
        )
        self.kept = kept or StateStore()
        self._start()

    @property
    def store(self) -> dict[str, bytes]:
        """The state."""
        return dict(self.kept.entries(PARTITION))

    def run(self, *records: LogRecord, crashes: bool = False) -> list[Hint]:
        """Processes records, all if none are given; `crashes`: before the changelog has it."""
        batch = records or self.log
        effects: Effects = asyncio.run(self.app.process(PARTITION, batch))
        assert not effects.dead
        if not crashes:
            self.kept.apply(PARTITION, as_entries(effects.changes, self.kept.entries(PARTITION), batch[0].offset))
        halves = [CODEC.decode(made.value, topic=made.topic, partition=0, offset=0) for made in effects.outputs]
        return [half for half in halves if isinstance(half, Hint)]

    def again(self) -> None:
        """As after a batch that was given up, or a restart."""
        self.app.revoke(PARTITION)
        self._start()

    def _start(self) -> None:
        self.kept.open(PARTITION)
        self.app.restore(PARTITION, self.kept.entries(PARTITION))


def content(lab: Lab) -> list[str]:
    """Keys of the state of sessions of which more is known than a count."""
    return [key for key, value in lab.store.items() if key.startswith("session/") and b'"' in payload_of(value)]


FIRST = turn("a", "Why do cats purr?")
SECOND = turn("b", "Why do cats purr?", "answer of a", "Shorter!")


def test_every_turn_of_an_ended_session_becomes_a_late_half_of_its_own_result() -> None:
    lab = Lab(log_of((0, FIRST), (1, side("s")), (2, SECOND), (3, end())), Script(TELLS))
    halves = lab.run()
    results = [result_of(FIRST, 0, BEGAN), result_of(SECOND, 1, BEGAN + 2)]
    assert [half.sample.result_id for half in halves] == [result.result_id for result in results]
    for half, result in zip(halves, results, strict=True):
        assert half.hints == (LESSON[:40],) and half.source is Source.RESULT and half.feedback_id is None
        assert half.hinter.startswith("experience/3-") and half.key == result.task.task_id
        assert half.sample.head.turn_index == result.task.turn_index
        assert len(float32_view(half.teacher_logprobs or b"")) == 5
        emission = late(HalvesPartition(topics.HALVES, 0), half, 7, 9, as_rollout=True)
        assert emission.rollout is not None and emission.rollout.rollout_id == f"{half.key}/0/opd/{half.hint_id}"
    shown = lab.chat.asked[0][1]["content"]
    assert "user: Why do cats purr?\n\nassistant: answer of a\n\nuser: Shorter!\n\nassistant: answer of b" in shown
    prompts = [prompt[-1]["content"] for prompt in lab.inference.rendered]
    assert len(prompts) == 2 and all(prompt.endswith(LESSON[:40]) for prompt in prompts)
    assert len({half.hint_id for half in halves}) == 2 and not content(lab)


@pytest.mark.parametrize(
    "over", [(2, end()), (2 + IDLE_MS, tick()), (2 + IDLE_MS, turn("x", "Hi", session="other")), (2, b"no record")]
)
def test_a_session_ends_by_call_and_by_idle_time_and_not_before(over: tuple[int, Record | bytes]) -> None:
    lab = Lab(log_of((0, FIRST), (1, SECOND), over), Script(TELLS))
    assert len(lab.run()) == (0 if isinstance(over[1], bytes) else 2)


def test_a_header_ends_it_with_its_own_turn() -> None:
    done = SECOND.model_copy(update={"done": True})
    assert len(Lab(log_of((0, FIRST), (1, done)), Script(TELLS)).run()) == 2


@pytest.mark.parametrize("answer", [None, "hm", "\\boxed{-1}", f"{START}Do: it{END} \\boxed{{1}}"])
def test_no_lesson_is_made_up(answer: str | None) -> None:
    lab = Lab(log_of((0, FIRST), (1, end())), Script(answer))
    assert not lab.run() and not lab.inference.rendered and not content(lab)


@given(st.text())
def test_whatever_a_judge_answers_is_a_lesson_or_none(answer: str) -> None:
    lesson = lesson_of(answer)
    assert (lesson.status is VoteStatus.ACCEPTED) == bool(lesson.text)


def test_state_is_places_alone_and_outlives_a_restart(kept: StateStore | DiskStore) -> None:
    lab = Lab(log_of((0, FIRST), (1, SECOND), (2, end())), Script(TELLS), kept=kept)
    assert not lab.run(*lab.log[:2])
    (value,) = (lab.store[key] for key in content(lab))
    assert b"purr" not in value and len(value) < 200
    lab.again()
    assert len(lab.run(lab.log[2])) == 2 and not content(lab)


def numbers(halves: Sequence[Hint]) -> list[int | None]:
    return [half.sample.head.turn_index for half in halves]


@pytest.mark.parametrize("restarts", [False, True])
def test_the_numbers_of_turns_go_on_when_a_session_goes_on_after_its_end(
    kept: StateStore | DiskStore, restarts: bool
) -> None:
    third = turn("c", "Why?", "answer of b", "And dogs?")
    timed = ((0, FIRST), (1, end()), (2, SECOND), (2 + IDLE_MS + 1, tick()), (2 + IDLE_MS + 2, third))
    lab = Lab(log_of(*timed, (2 + IDLE_MS + 3, end("end 2"))), Script(TELLS, TELLS, TELLS), kept=kept)
    made = []
    for record in lab.log:
        made += numbers(lab.run(record))
        if restarts:
            lab.again()
    assert made == [0, 1, 2]


def test_of_a_session_that_has_ended_a_count_is_kept_for_its_time_and_nothing_of_a_person(
    kept: StateStore | DiskStore,
) -> None:
    late = turn("c", "Why?")
    log = log_of((0, FIRST), (1, end()), (1 + REMEMBER_MS, side("s")), (2 + 2 * REMEMBER_MS, tick()), (20_000, late))
    lab = Lab(log, Script(TELLS, TELLS), kept=kept)
    lab.run(*lab.log[:3])
    assert any(key.startswith("session/") for key in lab.store), "a side turn prolongs it, as it does the sessions' own"
    assert all(b"ann" not in value and b"assistant" not in value for value in lab.store.values())
    lab.again()
    lab.run(lab.log[3])
    assert not lab.store
    lab.run(lab.log[4])
    assert len(lab.app.partitions[PARTITION]) == 1


def test_a_turn_that_comes_twice_counts_once_and_makes_no_lesson_after_the_end() -> None:
    failed = FIRST.model_copy(update={"not_trainable": "greedy"})
    log = log_of((0, failed), (1, failed), (2, SECOND), (3, end()), (4, SECOND), (5, end("end 2")))
    lab = Lab(log, Script(TELLS))
    assert numbers(lab.run()) == [1] and len(lab.chat.asked) == 1


@QUICK
@given(logs(most=20))
def test_the_result_of_every_turn_is_the_one_that_the_sessions_made(log: list[tuple[int, Spec | None]]) -> None:
    sessions, lies = worker({}), lying(log, tail=1)
    written = drive(sessions.process(PARTITION, lies)).outputs
    results = [CODEC.decode(each.value, topic=each.topic, partition=0, offset=0) for each in written]
    if sessions._tally.late:
        return  # seen by the sessions alone: they know what is said in a turn, and end such a session sooner
    times = {"remember_ms": LIMITS.remember_ms, "forget_ttl_ms": LIMITS.forget_ttl_ms}
    fold, said = ExperiencePartition(PARTITION, {}, idle_ms=LIMITS.idle_ms, **times), dict[int, SessionEvent]()
    for record, spec in zip(lies, [*(spec for _, spec in log), ("tick", None, None)], strict=True):
        event = None if spec is None else record_of(spec)
        ended = fold.advance(record.offset, record.timestamp)
        if isinstance(event, SessionEvent):
            said[record.offset] = event
        if event is not None:
            ended += fold.apply(event, len(record.value))
        for made in (result_of(said[each.offset], each.number, each.at) for one in ended for each in one.turns):
            assert made in [each for each in results if isinstance(each, Result)]


def test_what_is_delivered_again_changes_nothing_and_makes_the_same_ids(kept: StateStore | DiskStore) -> None:
    lab = Lab(log_of((0, FIRST), (1, FIRST), (2, SECOND), (3, end())), Script(TELLS, TELLS), kept=kept)
    once = [half.hint_id for half in lab.run(crashes=True)]
    lab.again()
    assert [half.hint_id for half in lab.run()] == once and len(once) == 2


def test_an_end_that_is_delivered_again_does_not_end_a_newer_session(kept: StateStore | DiskStore) -> None:
    newer = Lab(log_of((0, FIRST), (1, end()), (2, SECOND)), Script(TELLS, TELLS), kept=kept)
    newer.run()
    newer.again()
    assert not newer.run(newer.log[1]), "the end of an earlier session of that id"
    assert newer.store


def test_sessions_of_a_forgotten_user_are_dropped() -> None:
    lab = Lab(log_of((0, FIRST), (1, forget(user_id="ann")), (2, end())), Script())
    assert not lab.run() and not content(lab)


def test_a_forgotten_user_stays_forgotten_through_restarts(kept: StateStore | DiskStore) -> None:
    other = turn("x", "Hi", session="other", user_id="bob")
    log = log_of(
        *((0, FIRST), (1, forget(user_id="ann")), (2, SECOND), (3, other), (4, end())),
        *((5, end("over", "other", user_id="bob")), (FORGET_MS + 2, SECOND), (FORGET_MS + 3, end("end 2"))),
    )
    lab = Lab(log, Script(TELLS, TELLS), kept=kept)
    assert not lab.run(*log[:2]) and not content(lab) and f"forget/{PARTITION}/1" in lab.store
    lab.again()
    (half,) = lab.run(*log[2:6])
    assert half.key == turn_task_id("other", "x") and not content(lab)
    lab.again()
    (half,) = lab.run(*log[6:])
    assert half.key == turn_task_id("s", "b") and not content(lab)
    assert not any(key.startswith("forget/") for key in lab.store), "the request is remembered for its time"


def test_nobody_is_asked_for_a_lesson_of_who_leaves_in_the_batch_that_ends_their_session() -> None:
    lab = Lab(log_of((0, FIRST), (1, end()), (2, forget(session_id="s"))), Script())
    assert not lab.run() and not content(lab)


def test_only_what_is_older_than_the_request_says_is_forgotten() -> None:
    log = log_of((0, FIRST), (1, forget(before=BEGAN + 2)), (2, turn("c", "Why?")), (3, end()))
    (half,) = Lab(log, Script(TELLS)).run()
    assert half.key == turn_task_id("s", "c")


def test_a_judge_or_teacher_that_is_away_is_waited_for_and_asked_only_for_what_is_missing(
    kept: StateStore | DiskStore,
) -> None:
    chat = Script(ScorerAway("refused"))
    lab = Lab(log_of((0, FIRST), (1, SECOND), (2, end())), chat, kept=kept)
    with pytest.raises(Retryable, match="lesson of a session is unavailable: refused"):
        lab.run()
    chat.answers = [TELLS]
    calls = iter(range(10))
    lab.inference.fails = lambda model: ServerUnavailable("away") if next(calls) == 1 else None
    lab.again()
    with pytest.raises(Retryable, match="the teacher is unavailable"):
        lab.run()
    lab.again()
    assert len(lab.run()) == 2 and len(chat.asked) == 2 and len(lab.inference.scored) == 2


def test_a_lesson_that_the_server_cannot_count_is_given_up_and_holds_nothing() -> None:
    lab = Lab(log_of((0, FIRST), (1, end())), Script(TELLS))

    async def refuse(text: str) -> str:
        raise RequestRefused(400, "longer than the context")

    lab.app._shorten = refuse
    assert not lab.run() and not content(lab)


def test_turns_that_are_gone_or_refused_are_left_out_and_the_others_are_not() -> None:
    chat = Script(TELLS)
    lab = Lab(log_of((0, FIRST), (1, SECOND), (2, turn("c", "Why?", "x", "And?")), (3, end())), chat)
    del lab.reader.records[0]
    refusals = iter([RequestRefused(400, "too long")])
    lab.inference.fails = lambda model: next(refusals, None)
    assert len(lab.run()) == 1


def test_the_lesson_of_a_guessed_session_is_for_the_turns_of_its_last_conversation_alone() -> None:
    """Conversations that begin alike share a guessed session: one person's lesson is no hint on another's answer."""

    def guessed(ident: str, *texts: str) -> SessionEvent:
        return turn(ident, *texts, session="*key/auto-1")

    mine = guessed("a", "hello")
    others = [guessed("b", "hello"), guessed("c", "hello", "answer of b", "That's wrong.")]
    turns = [mine, *others]
    lab = Lab(log_of(*enumerate([*turns, end(session="*key/auto-1")])), Script(TELLS))
    assert {half.key for half in lab.run()} == {turn_task_id(each.session_id, each.session_event_id) for each in others}
    assert lab.app._turns == {"accepted": 2, "other_conversation": 1}
    named = [each.model_copy(update={"session_id": "s"}) for each in turns]
    assert len(Lab(log_of(*enumerate([*named, end()])), Script(TELLS)).run()) == 3, "a client that names its session"


def test_a_turn_that_cannot_be_trained_on_is_left_out() -> None:
    lab = Lab(log_of((0, FIRST.model_copy(update={"not_trainable": "greedy"})), (1, SECOND), (2, end())), Script(TELLS))
    (half,) = lab.run()
    assert half.key == turn_task_id(SECOND.session_id, SECOND.session_event_id) and half.sample.head.turn_index == 1


def test_a_session_without_end_keeps_its_newest_turns() -> None:
    fold = ExperiencePartition(PARTITION, {}, idle_ms=IDLE_MS, remember_ms=REMEMBER_MS, forget_ttl_ms=FORGET_MS)
    for number in range(MOST_TURNS + 5):
        fold.advance(number, BEGAN)
        fold.apply(turn(str(number), "Hi"), 100)
    (value,) = (value for key, value in fold.take_changes()[0] if key.startswith("session/"))
    assert value is not None and len(value) < 4_000
    fold.advance(1_000, BEGAN)
    (ended,) = fold.apply(end(), 10)
    assert [each.offset for each in ended.turns] == list(range(5, MOST_TURNS + 5))
    assert fold.left_out == {"too_many": 5} and ended.turns[-1].number == MOST_TURNS + 4


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (0, 2, 1)])
def test_the_join_makes_a_rollout_of_its_own_of_it_whatever_comes_first(order: tuple[int, int, int]) -> None:
    (experience,) = Lab(log_of((0, FIRST), (1, end())), Script(TELLS)).run()
    said = next_state_of(result_of(FIRST, 0, JOINED), (), JOINED)
    assert said.result is not None
    score = Score(
        score_id="s",
        event_time=JOINED,
        opened_at=JOINED,
        sample=sample_of(said.result),
        source=Source.NEXT_STATE,
        reward=1.0,
        scorer="next_state/2",
    )
    none = hint_half(said, said.result, JOINED, hinter="none/1", kind=HintKind.NONE)
    halves = [score, none, experience]
    written = fold(*((place, halves[each]) for place, each in enumerate(order)), limits=JoinLimits())
    key = f"{turn_task_id(FIRST.session_id, FIRST.session_event_id)}/0"
    assert set(written.rollouts) == {key, f"{key}/opd/{experience.hint_id}"} and not written.dead
    own, late_one = written.rollouts[key], written.rollouts[f"{key}/opd/{experience.hint_id}"]
    assert (own.has_rl, own.has_opd) == (True, False) and (late_one.has_rl, late_one.has_opd) == (False, True)
    assert late_one.teacher_logprobs == experience.teacher_logprobs and late_one.hints == experience.hints
