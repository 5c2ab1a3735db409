"""The table of cases in docs/concepts/sessions.md, and the contract tests of conversations that the fold must pass."""

import asyncio
from typing import Any

import pytest

from schemas import topics
from schemas.records import (
    HintKind,
    Opens,
    Outcome,
    Polarity,
    Record,
    RecordedBy,
    Result,
    Rollout,
    Sampling,
    SessionEvent,
    SessionEventKind,
    Source,
    Status,
    Task,
    ToolCall,
)
from streams.apps.hinting.core import hint_half
from streams.apps.join.core import JoinLimits as JoinLimits
from streams.apps.join.processor import JoinProcessor
from streams.apps.scoring.core import opened_by_feedback, score_of_feedback
from streams.apps.scoring.processor import Scoring
from streams.apps.sessions.core import SessionLimits
from streams.apps.sessions.processor import SessionsProcessor
from streams.apps.sessions.state import decode_session
from streams.apps.sessions.turns import MOST_TEXT, came_late, said_to
from streams.fold.admission_control import OpenBound
from streams.fold.session_turns import session_key
from streams.runtime.processor import DamagedState, LogRecord
from tentalis.rewards.next_state_rules import NextStateRules
from tests.support import join_support
from tests.support.sessions_support import (
    CODEC,
    PARTITION,
    SEEING,
    START,
    Cut,
    Sessions,
    drive,
    end,
    fold,
    forget,
    log_of,
    record_at,
    side,
    tick,
    turn,
    worker,
)

JOIN = JoinLimits()
ONE = turn("1", "hello", answer="hi")
TWO = turn("2", "hello", "hi", "more", answer="so")
THREE = turn("3", "hello", "hi", "more", "so", "thanks", answer="bye")


def counts_of(partition: Sessions, event: Any = ONE) -> tuple[int, int]:
    session = partition.start().partitions[PARTITION]._sessions[session_key(event)]
    return session.requests, session.turns


def test_a_main_turn_becomes_a_task_and_its_result_with_the_tokens_as_they_came() -> None:
    event = turn(
        "1",
        "hello",
        sampling=Sampling(temperature=0.7),
        tool_calls=(ToolCall(name="look"),),
        request='{"tools": []}',
        elapsed_s=1.5,
    )
    task, result = fold((0, event)).records
    assert isinstance(task, Task) and isinstance(result, Result) and result.task == task
    assert (task.policy, task.environment, task.n_samples, task.verifier.name) == ("assistant", "chat", 1, "next_state")  # type: ignore[union-attr]
    assert (task.terms.rl, task.terms.opd, task.terms.opens) == (
        Source.NEXT_STATE,
        Source.NEXT_STATE,
        Opens.FIRST_FEEDBACK,
    )
    assert (task.session_id, task.turn_index, task.user_id) == ("s", 0, "ann")
    assert task.answered and task.target_worker == "gateway-1"
    assert task.metadata["request"] == '{"tools": []}'
    assert (result.prompt_token_ids, result.response_token_ids) == (event.prompt_token_ids, event.response_token_ids)
    assert (result.sampler_logprobs, result.logprobs_mode) == (event.sampler_logprobs, event.logprobs_mode)
    assert (result.sampling, result.tool_calls, result.elapsed_s) == (event.sampling, event.tool_calls, 1.5)
    assert [(span.start, span.policy) for span in result.policy_spans] == [(0, "assistant@v4")]
    assert result.opened_at == START, "the append time, whatever the gateway's clock says"


def test_next_state_is_the_last_message_of_the_next_main_request() -> None:
    partition = fold((0, ONE), (10, side("x")), (20, TWO), (30, turn("3", "hello", "hi", "more", "so", "tool: 21 C")))
    assert partition.heard == [("1", "user", "more"), ("2", "tool", "21 C")]
    first = partition.feedback[0]
    assert (first.source, first.polarity, first.score) == (Source.NEXT_STATE, Polarity.NONE, None)
    assert first.result == partition.results[0] and first.sample_index == 0
    assert [task.turn_index for task in partition.tasks] == [0, 1, 2]


@pytest.mark.parametrize("way", ["header", "call", "idle", "side"])
def test_the_end_and_idle_time_flush_the_last_turn_with_nothing_to_say(way: str) -> None:
    endings: dict[str, list[tuple[int, Record | bytes]]] = {
        "header": [(20, TWO.model_copy(update={"done": True}))],
        "call": [(20, TWO), (30, end())],
        "idle": [(20, TWO), (1021, tick())],
        "side": [(20, TWO), (30, side("x", done=True))],
    }
    partition = fold((0, ONE), *endings[way], (1100, end("again")), (1200, tick()), (3000, tick()))
    assert partition.heard == [("1", "user", "more"), ("2", "", "")], "exactly one, and it says nothing"
    assert partition.feedback[-1].polarity is Polarity.NONE
    state = partition.start().partitions[PARTITION]
    assert (state.open_sessions, state.remembered, state.open_bytes) == (0, 1, 0)
    tally = Sessions(partition.log).start()
    drive(tally.process(PARTITION, partition.log))
    assert dict(tally._tally.ended) == {"header" if way == "side" else way: 1}


def test_a_session_ends_only_behind_its_idle_time() -> None:
    assert fold((0, ONE), (1000, tick())).feedback == []
    assert fold((0, ONE), (1000, side("x")), (1001, tick())).heard == [("1", "", "")], "side turns do not prolong it"
    assert fold((0, ONE), (1001, b"rubbish")).heard == [("1", "", "")], "time is all that counts"
    assert fold((0, ONE), (-5000, tick()), (1000, tick())).feedback == [], "time does not run backwards"


def test_turns_count_requests_not_the_history_that_is_sent_again() -> None:
    partition = fold((0, ONE), (1, side("x")), (2, TWO), (3, TWO), (4, THREE), (5, end()))
    assert counts_of(partition) == (4, 3)
    assert [task.turn_index for task in partition.tasks] == [0, 1, 2]


def test_a_turn_after_the_end_goes_on_counting_and_says_nothing_to_the_one_before() -> None:
    partition = fold((0, ONE), (10, end()), (20, TWO), (30, THREE))
    assert partition.heard == [("1", "", ""), ("2", "user", "thanks")]
    assert [task.turn_index for task in partition.tasks] == [0, 1, 2]


def test_the_end_of_nothing_and_side_turns_alone_bring_about_nothing() -> None:
    partition = fold((0, end()), (1, side("x")), (2, end("again")), (2000, tick()))
    assert partition.records == [] and counts_of(partition) == (1, 0)
    assert fold((0, side("x")), (5001, tick())).start().partitions[PARTITION]._sessions == {}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"not_trainable": "no token ids"}, "no token ids"),
        ({"response_token_ids": b"", "sampler_logprobs": b""}, "no response tokens"),
        ({"status": Status.FAILED}, "failed"),
        ({"policy": ""}, "no policy"),
        ({"messages": ()}, "no messages"),
        ({"sampling": Sampling(temperature=0.0)}, "greedy sampling"),
        ({"request": "x" * 30_000}, "too large"),
    ],
)
def test_a_turn_that_nobody_can_train_on_has_no_task_but_its_place(fields: dict[str, Any], reason: str) -> None:
    middle = TWO.model_copy(update=fields)
    partition = Sessions(log_of((0, ONE), (10, middle), (20, THREE), (30, end())))
    processor = partition.start()
    drive(processor.process(PARTITION, partition.log))
    assert dict(processor._tally.not_trainable) == {reason: 1}
    partition.run()
    what = "" if not middle.messages else "more"
    assert partition.heard == [("1", "user" if what else "", what), ("3", "", "")], "its answer goes to nobody"
    assert [task.turn_index for task in partition.tasks] == [0, 2]
    assert counts_of(partition) == (3, 3)


def test_the_same_event_twice_is_one() -> None:
    partition = fold((0, ONE), (10, TWO), (20, ONE), (30, TWO), (40, end()), (50, end()), (60, TWO))
    assert partition.heard == [("1", "user", "more"), ("2", "", "")]
    assert len(partition.tasks) == 2


def test_one_session_id_of_two_users_is_two_sessions() -> None:
    other = TWO.model_copy(update={"user_id": "bob", "session_event_id": "bob"})
    nobody = TWO.model_copy(update={"user_id": None, "session_event_id": "nobody"})
    partition = fold((0, ONE), (10, other), (20, nobody), (30, end(user_id="bob")), (40, TWO))
    assert partition.heard == [("bob", "", ""), ("1", "user", "more")]


def test_a_turn_that_comes_late_still_finds_what_was_said_to_it() -> None:
    partition = fold((0, ONE), (10, THREE), (20, TWO), (30, end()))
    # The third says to the first what the second's request would have said.
    assert partition.heard == [("1", "user", "more"), ("2", "user", "thanks"), ("3", "", "")]
    done = TWO.model_copy(update={"done": True})
    assert fold((0, THREE), (10, done)).heard == [("2", "user", "thanks")], "it does not end what went on"
    lost = TWO.model_copy(update={"not_trainable": "no token ids"})
    assert fold((0, THREE), (10, lost), (20, end())).heard == [("3", "", "")]


def test_asking_again_or_going_back_says_nothing_to_the_turn_before() -> None:
    again = turn("2", "hello", answer="hi, again")
    assert fold((0, ONE), (10, again)).heard == [("1", "", "")]
    back = turn("3", "hello", answer="another")
    assert fold((0, TWO), (10, back)).heard == [("2", "", "")]


def test_what_is_said_to_another_answer_is_not_said_to_this_one() -> None:
    """Two conversations that begin alike, or an answer that was made again: what comes next speaks of one of them."""
    later = turn("b", "q", "Blue.", "no, shorter")
    assert said_to(turn("a", "q", answer="Green."), later) == ()
    for own in ("Blue.", " Blue.\n", "<think>Sky?</think>Blue."):
        assert [message.content for message in said_to(turn("a", "q", answer=own), later)] == ["no, shorter"]


def test_in_a_guessed_session_only_what_certainly_continues_a_turn_replies_to_it() -> None:
    """Two people who begin alike share a guessed session: what one says must not be said of the other's answer."""

    def guessed(ident: str, *texts: str, answer: str = "") -> SessionEvent:
        return turn(ident, *texts, answer=answer, session="*key/auto-1")

    mine = guessed("1", "hello", answer="Hi there!")
    assert [m.content for m in said_to(mine, guessed("2", "hello", "Hi there!", "That's wrong."))] == ["That's wrong."]
    others = guessed("2", "hello", "Hi", "That's wrong.")
    assert said_to(mine, others) == ()
    assert said_to(turn("1", "hello", answer="Hi there!"), turn("2", "hello", "Hi", "That's wrong.")) != ()
    compacted = guessed("3", "The conversation so far: hello, hi there.", "Fine.", "That's wrong.")
    edited, regenerated = guessed("4", "hello, again"), guessed("5", "hello")
    assert [said_to(mine, each) for each in (compacted, edited, regenerated)] == [(), (), ()]
    thinking = guessed("1", "hello", answer="<think>A greeting.</think>Hi!")
    assert said_to(thinking, guessed("2", "hello", "Hi!", "Thanks."))[0].content == "Thanks."
    assert fold((0, mine), (10, others)).heard[0] == ("1", "", "")


def test_which_message_is_the_next_state() -> None:
    def between(had: tuple[str, ...], has: tuple[str, ...]) -> str | None:
        found = said_to(turn("a", *had), turn("b", *has))
        return found[-1].content if found else None

    assert between(("q",), ("q", "a", "b")) == "b"
    assert between(("q",), ("q", "a", "tool: 1", "tool: 2")) == "2"
    assert between(("q",), ("q", "a", "b", "c", "d")) == "b", "calls between the two were not recorded"
    assert between(("q",), ("q", "a", "b", "assistant: Sure, ")) == "b", "the answer's beginning is not an answer"
    assert between(("q",), ("q", "a")) is None
    assert between(("q",), ("q", "user: and another thing")) == "and another thing"
    assert between(("system: 9:00", "user: q"), ("system: 9:05", "user: q", "a", "user: b")) == "b"
    assert between(("q", "a", "b"), ("user: summary so far", "assistant: ok", "user: c")) == "c", "shortened"
    assert between(("q", "a", "b"), ("q", "a", "user: rather this")) == "rather this", "changed"
    assert between(("q",), ("system: only this",)) is None


def next_message_of(*replies: str) -> tuple[str, float | None]:
    """The next state of a turn with these replies, and its reward by the rules."""
    partition = fold((0, ONE), (10, turn("2", "hello", "hi", *replies)))
    (feedback,) = partition.feedback
    assert feedback.result is not None
    verdict = asyncio.run(NextStateRules().judge_feedback(feedback.result.task, feedback.result, feedback))
    return feedback.text, verdict.reward


def test_of_parallel_tool_results_the_first_failure_is_the_next_state() -> None:
    failed, other, fine = "tool: Error: no such file", "tool: exit code: 2", 'tool: {"success": true}'
    assert next_message_of(failed, fine) == ("Error: no such file", -1.0)
    assert next_message_of(fine, failed) == ("Error: no such file", -1.0)
    assert next_message_of(fine, other, failed, fine) == ("exit code: 2", -1.0)
    assert next_message_of("tool: 1", fine) == ('{"success": true}', 1.0)
    assert next_message_of(failed, "user: Thanks!") == ("Thanks!", 1.0), "the user's words decide"
    assert next_message_of("user: Error: see below", fine) == ('{"success": true}', 1.0), "no tool said it"


def test_implicit_signals_are_feedback_of_the_environment_and_each_can_be_switched_off() -> None:
    wrong = turn("2", "hello", "hi", "That's wrong, I said hello.")
    assert fold((0, ONE), (10, wrong), limits=SEEING).heard[1] == (
        "1",
        "signal:correction",
        "That's wrong, I said hello.",
    )
    calls = turn("1", "look", tool_calls=(ToolCall(name="look"),))
    failing = turn("2", "look", "assistant: ", "tool: Error: no such file", "tool: fine")
    partition = fold((0, calls), (10, failing), limits=SEEING)
    assert partition.heard[:2] == [
        ("1", "tool", "Error: no such file"),
        ("1", "signal:tool_failure", "Error: no such file"),
    ]
    found = partition.feedback[1]
    assert (found.source, found.polarity) == (Source.ENVIRONMENT, Polarity.NEGATIVE)
    assert len(fold((0, ONE), (10, wrong)).heard) == 1
    cut = turn("1", "hello", finish_reason="length")
    silent, closed = fold((0, cut), (1001, tick()), limits=SEEING), fold((0, cut), (10, end()), limits=SEEING)
    assert [author for _, author, _ in silent.heard] == ["", "signal:abandoned"]
    assert [author for _, author, _ in closed.heard] == [""]


def test_a_lone_surrogate_inside_a_tool_s_json_is_evidence_that_can_be_written() -> None:
    failing = turn("2", "hello", "hi", 'tool: {"error": "\\ud800"}')
    heard = fold((0, ONE), (10, failing), limits=SEEING).heard
    assert heard[1] == ("1", "signal:tool_failure", '{"error": "?"}')


def test_an_answer_without_text_does_not_show_that_a_turn_was_late() -> None:
    later = turn("2", "hello", "assistant: ", "tool: 1")
    assert not came_late(later, turn("1", "hello").model_copy(update={"response": ""}))
    assert came_late(TWO, ONE) and not came_late(ONE, TWO) and not came_late(ONE, ONE)


def test_a_next_state_of_any_length_fits_its_record() -> None:
    partition = fold((0, ONE), (10, turn("2", "hello", "hi", "x" * (MOST_TEXT + 1))))
    assert len(partition.feedback[0].text) == MOST_TEXT and partition.feedback[0].text.endswith("[cut]")
    room = topics.table().record_limit_bytes - SessionLimits().most_bytes
    assert room >= 4 * MOST_TEXT + 2**20


def test_who_asked_to_be_forgotten_leaves_nothing_and_comes_in_no_more() -> None:
    partition = fold((0, ONE), (10, forget(user_id="ann")), (20, TWO), (30, end()), (40, tick()))
    assert partition.heard == [] and len(partition.tasks) == 1, "what was written before is the join's to drop"
    values = [value for key, value in partition.recovered().items() if not key.startswith("forget/")]
    assert not any(b"ann" in value or b"hello" in value for value in values)
    later = Sessions([*partition.log, record_at(5, 9_100, THREE)])
    later.run()
    assert len(later.tasks) == 2, "the request is remembered for its time"


def test_a_request_that_names_another_or_nobody_changes_nothing() -> None:
    for request in (forget(session_id="other"), forget(before=START), forget(policy="assistant")):
        assert fold((0, ONE), (10, request), (20, TWO)).heard == [("1", "user", "more")]
    assert fold((0, ONE), (10, forget(session_id="s")), (20, TWO)).heard == []
    assert fold((0, ONE), (10, forget(before=START + 1)), (20, TWO), (30, THREE)).heard == [("2", "user", "thanks")]


def test_what_cannot_be_understood_is_a_dead_letter() -> None:
    odd: list[Record | bytes] = [
        turn("1", "hello", turn_type="heartbeat"),
        turn("2", "hello", kind=SessionEventKind.UNKNOWN),
        b"rubbish",
    ]
    partition = fold(*((number, what) for number, what in enumerate(odd)))
    assert partition.written.dead == [(0, "validate"), (1, "validate"), (2, "decode")]
    elsewhere = Sessions([record_at(0, 0, ONE, key="t")])
    elsewhere.run()
    assert elsewhere.written.dead == [(0, "validate")] and elsewhere.records == []


def test_an_ended_session_keeps_counts_and_nothing_of_a_person() -> None:
    log = log_of((0, ONE), (10, TWO), (20, end()), (30, tick()))
    waiting, ended = Sessions(log[:2]), Sessions(log)
    waiting.run([1])
    assert b"hello" in waiting.recovered()[f"turn/{PARTITION}/1"]
    ended.run([1])
    entries = ended.recovered()
    assert {key.partition("/")[0] for key in entries} == {"session", "seen", "clock"}
    session = next(value for key, value in entries.items() if key.startswith("session/"))
    assert b"ann" not in session and decode_session(session).turns == 2
    assert len(session) < 120


def rollouts_and_outcomes(hours: float) -> tuple[list[str], list[str]]:
    """Returns the join's output for a turn whose next message comes this many hours later."""
    later = round(hours * 3_600_000)
    patient = SessionLimits(frozenset(), idle_ms=47 * 3_600_000, remember_ms=48 * 3_600_000)
    feedback = fold((0, ONE), (later, TWO), limits=patient).feedback[0]
    assert feedback.result is not None
    appended = START + later + 1
    opened, score = opened_by_feedback(feedback, appended), score_of_feedback(feedback, appended)
    hint = hint_half(feedback, feedback.result, appended, kind=HintKind.NONE, hinter="rule/1")
    assert opened is not None and score is not None
    judged = score.model_copy(update={"reward": 1.0})
    made = join_support.fold(*((later + 1 + i, half) for i, half in enumerate((opened, judged, hint))), limits=JOIN)
    return sorted(made.rollouts), sorted(outcome.kind.value for outcome in made.outcomes.values())


def test_an_answer_after_twenty_hours_is_joined_and_one_after_more_than_the_joins_memory_is_late() -> None:
    assert rollouts_and_outcomes(20) == ([f"{fold((0, ONE)).tasks[0].task_id}/0"], ["rl"])
    assert rollouts_and_outcomes(24.1) == ([], ["late", "late", "late"])
    assert SessionLimits().idle_ms < JOIN.marker_ttl_ms, "by default no session is open for so long"


def test_a_conversation_becomes_a_rollout_with_the_tokens_of_the_backend_and_the_reward_of_what_was_said() -> None:
    recorded = ONE.model_copy(update={"recorded_by": RecordedBy.GATEWAY})
    partition = fold((0, recorded), (10, turn("2", "hello", "hi", "That's wrong.")), (20, end()))
    scoring, join = Scoring(CODEC), JoinProcessor(CODEC)
    scoring.restore(PARTITION, {})
    join.restore(PARTITION, {})
    halves: list[tuple[str, bytes]] = []
    for offset, (topic, key, value) in enumerate(partition.written.produced):
        at = START + 100 + offset
        effects = asyncio.run(scoring.process(PARTITION, [LogRecord(topic, PARTITION, offset, at, key, value)]))
        assert not effects.dead, "scoring knows the verifier that the tasks name, and needs no worker"
        halves += [(output.key, output.value) for output in effects.outputs]
    for feedback in partition.feedback:
        assert feedback.result is not None
        hint = hint_half(feedback, feedback.result, START + 200, kind=HintKind.NONE, hinter="rule/1")
        halves.append((hint.key, CODEC.encode(topics.HALVES, hint)))
    log = [
        LogRecord(topics.HALVES, PARTITION, offset, START + 300, key, value)
        for offset, (key, value) in enumerate(halves)
    ]
    outputs = drive(join.process(PARTITION, log)).outputs
    made = [CODEC.decode(each.value, topic=each.topic, partition=0, offset=0) for each in outputs]
    (rollout,) = [record for record in made if isinstance(record, Rollout)]
    first = partition.results[0]
    assert rollout.token_ids == first.prompt_token_ids + first.response_token_ids
    assert (rollout.head.task_id, rollout.reward) == (first.task.task_id, -1.0)
    assert rollout.recorded_by is first.recorded_by is RecordedBy.GATEWAY
    kinds = sorted(record.kind.value for record in made if isinstance(record, Outcome))
    assert kinds == ["empty", "rl"], "nothing was said to the last turn"


def test_at_the_bound_the_input_waits() -> None:
    made = SessionsProcessor(CODEC, bound=OpenBound(tasks=2))
    made.restore(PARTITION, {})
    drive(made.process(PARTITION, [record_at(i, 0, turn(str(i), "q", session=str(i))) for i in range(2)]))
    assert made.waits(PARTITION)
    assert "2 sessions" in str(made.full())


def test_ticks_go_to_every_partition_now_and_then() -> None:
    made = SessionsProcessor(CODEC)
    assert [output.partition for output in made.ticks([1, 4])] == [1, 4]
    assert made.ticks([1, 4]) == ()


def test_state_that_this_code_did_not_write_is_refused() -> None:
    for entries in (
        {"else/1": b"12345678"},
        {"session/1": b"12345678{}"},
        {"seen/1": b"12345678"},
        {"turn/3/x": b"12345678"},
    ):
        with pytest.raises(DamagedState):
            worker(entries)
    partition = fold((0, ONE))
    lost = {key: value for key, value in partition.recovered().items() if not key.startswith("turn/")}
    with pytest.raises(DamagedState, match="lost records"):
        worker(lost)
    with pytest.raises(ValueError, match="that must be above 0 and below"):
        SessionLimits(idle_ms=10, remember_ms=10)


def test_a_request_read_again_after_a_crash_expires_as_if_nothing_had_happened() -> None:
    """The second request outlives the crash, the clock does not: the first is read again when the second is known."""
    log = log_of(
        (0, tick()),
        (0, forget(session_id="s")),
        (9_001, forget(user_id="ann")),
        (9_002, turn("a", "Hi", user_id="bob")),
    )
    calm, rough = Sessions(log), Sessions(log)
    calm.run()
    rough.run([1, 2], {1: Cut(stage=2)})
    assert rough.written.produced == calm.written.produced and len(calm.tasks) == 1
