"""The lines of `tentalis gateway tail`: which records say something about a turn, and what earlier ones add."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from typer.testing import CliRunner

from schemas.records import Feedback, HintKind, Polarity, Record, Result, Sample, Source, sample_of
from streams.fold.session_turns import result_of
from tentalis.cli.main import app
from tentalis.ops.sessions.learned import LearnedEntry, LearnedTail, entry_of
from tests.support.join_support import hint, open_, score, tick
from tests.support.loop_records import outcome, plan, step_result, task
from tests.support.sessions_support import end, side, turn

TURN = turn("a", "Why?", session="ann/s")
RESULT: Result = result_of(TURN, 3, 0)
TASK = RESULT.task
SAMPLE: Sample = sample_of(RESULT)
SHORTER = Feedback(
    feedback_id="next",
    event_time=1,
    task_id=TASK.task_id,
    source=Source.NEXT_STATE,
    author="user",
    text="Shorter, please.",
    result=RESULT,
)
HINT = hint(SAMPLE, id="h").model_copy(update={"feedback_id": "next"})
ROLLOUT = f"{TASK.task_id}/0"


def signal(**more: Any) -> Feedback:
    values: dict[str, Any] = {
        "feedback_id": "signal",
        "event_time": 1,
        "task_id": TASK.task_id,
        "source": Source.ENVIRONMENT,
        "author": "signal:correction",
        "polarity": Polarity.NEGATIVE,
    }
    return Feedback(**(values | more))


def told(*records: Record, tail: LearnedTail | None = None) -> list[dict[str, Any]]:
    """The lines of records in this order, one millisecond apart."""
    tail = tail or LearnedTail()
    entries = [entry for at, record in enumerate(records) if (entry := entry_of(record, at)) is not None]
    return [line for entry in entries for line in tail.lines(entry)]


def test_a_turn_is_followed_to_the_version_that_trained_on_it() -> None:
    lines = told(
        TURN,
        signal(),
        SHORTER,
        HINT,
        score(SAMPLE, -1.0),
        outcome(TASK),
        plan(1, ["other/0", ROLLOUT]),
        step_result(1, 5),
    )
    assert [line["event"] for line in lines] == ["turn", "signal", "feedback", "hint", "score", "outcome", "trained"]
    assert {(line["session"], line["user"], line["task"]) for line in lines} == {("ann/s", "ann", TASK.task_id)}
    # The number of a turn is known from the first record of its task on.
    assert [line["turn"] for line in lines] == [None, None, 3, 3, 3, 3, 3]
    asked, signalled, said, hinted, scored, outcome_, trained = lines
    assert (asked["at"], asked["asked"], asked["answered"], asked["no_task"]) == (0, "Why?", "answer of a", None)
    assert (signalled["signal"], signalled["verdict"]) == ("correction", "negative")
    assert (said["source"], said["text"]) == ("next_state", "Shorter, please.")
    assert (hinted["hints"], hinted["made_by"]) == (["Be brief."], "rule/1")
    assert hinted["said"] == {"source": "next_state", "author": "user", "text": "Shorter, please."}
    assert scored["reward"] == -1.0
    assert (outcome_["kind"], outcome_["reward"], outcome_["explicit"]) == ("both", 1.0, False)
    assert (trained["rollout"], trained["step"], trained["version"]) == (ROLLOUT, 1, "assistant@v5")


def test_a_side_turn_and_an_end_are_shown_without_a_task() -> None:
    first, last = told(side("title", session="ann/s"), end(session="ann/s"))
    assert (first["event"], first["task"], first["no_task"]) == ("turn", None, "it is a side turn")
    assert (last["event"], last["session"]) == ("end", "ann/s")


def test_what_says_nothing_about_a_conversation_is_left_out() -> None:
    of_no_session = task("math-1")
    none = hint(SAMPLE, HintKind.NONE, id="none")
    assert told(tick(), open_(TASK.head), none, outcome(of_no_session)) == []
    assert told(signal(task_id="math-1", result=RESULT.model_copy(update={"task": of_no_session}))) == []


def test_a_copy_is_shown_once_and_a_step_without_known_rollouts_not_at_all() -> None:
    assert [line["event"] for line in told(TURN, HINT, TURN, HINT)] == ["turn", "hint"]
    assert told(plan(1, [ROLLOUT]), step_result(1, 5)) == []
    # A result of no plan (step 0) trained nothing.
    assert [line["event"] for line in told(outcome(TASK), plan(1, [ROLLOUT]), step_result(0, 0, plan_id=None))] == [
        "outcome"
    ]


def test_feedback_whose_session_nothing_names_is_counted() -> None:
    tail = LearnedTail()
    assert told(signal(), tail=tail) == [] and tail.unattributed == 1
    # Its task is known from any record that names its session.
    lines = told(outcome(TASK), signal(feedback_id="late"), tail=tail)
    assert [(line["event"], line["session"]) for line in lines] == [("outcome", "ann/s"), ("signal", "ann/s")]
    assert tail.unattributed == 1


def test_a_hint_names_its_feedback_even_if_its_words_came_before_the_start() -> None:
    (line,) = told(HINT)
    assert (line["said"], line["feedback_id"]) == (None, "next")


def test_only_the_lines_of_a_user_or_session_are_shown() -> None:
    records = [TURN, turn("b", "x", session="bob/s", user_id="bob"), SHORTER]
    assert [line["user"] for line in told(*records, tail=LearnedTail(user_id="bob"))] == ["bob"]
    of_ann = told(*records, tail=LearnedTail(session_id="ann/s"))
    assert [line["event"] for line in of_ann] == ["turn", "feedback"]
    # What another line needs is remembered although it is not shown.
    assert told(*records, tail=LearnedTail(user_id="nobody")) == []


def test_what_is_remembered_is_bounded() -> None:
    tail = LearnedTail(most=2)
    told(TURN, SHORTER, *(turn(f"t{n}", "x") for n in range(3)), tail=tail)
    assert told(signal(), tail=tail) == [] and tail.unattributed == 1


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> list[LearnedEntry]:
    """The entries that the command reads; then it is interrupted."""
    found: list[LearnedEntry] = []

    def follow(settings: object, since_ms: int | None, *, stop_at_end: bool) -> Iterator[LearnedEntry]:
        yield from found
        if not stop_at_end:
            raise KeyboardInterrupt

    @contextmanager
    def reached(bootstrap: str | None) -> Iterator[None]:
        yield None

    monkeypatch.setattr("tentalis.ops.sessions.follow.follow_learning", follow)
    monkeypatch.setattr("tentalis.cli.gateway.reached", reached)
    return found


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["gateway", "tail", *arguments])


def test_the_table_has_one_line_per_event_and_ctrl_c_ends_with_130(entries: list[LearnedEntry]) -> None:
    records = [
        turn("a", "Why?", answer="It is\x1b[2J so.", session="ann/s"),
        side("title", session="ann/s"),
        signal(),
        SHORTER,
        signal(feedback_id="nothing", source=Source.NEXT_STATE, author="", polarity=Polarity.NONE),
        HINT,
        score(SAMPLE, None),
        outcome(TASK, components={"explicit": 1.0}),
        plan(1, [ROLLOUT]),
        step_result(1, 5),
        end(session="ann/s"),
    ]
    entries += [entry for record in records if (entry := entry_of(record, 1_000)) is not None]
    done = run()
    assert done.exit_code == 130
    head, *rows = [line.split(None, 4) for line in done.stdout.splitlines()]
    assert head == ["TIME", "SESSION", "TURN", "EVENT", "WHAT"]
    assert {(row[0], row[1]) for row in rows} == {("1970-01-01T00:00:01Z", "ann/s")}
    assert [(row[2], row[3], row[4].strip()) for row in rows] == [
        ("-", "turn", 'main "Why?" -> "It is [2J so."'),
        ("-", "turn", 'side "ping" -> "answer of title" (not learned from: it is a side turn)'),
        ("-", "signal", "correction: negative"),
        ("3", "feedback", 'next_state user: "Shorter, please."'),
        ("3", "feedback", "next_state: nothing followed"),
        ("3", "hint", '"Be brief." from next_state user by rule/1'),
        ("3", "score", "unknown by rule/1 from result"),
        ("3", "outcome", "both reward 1 explicit"),
        ("3", "trained", "run-1 step 1 -> assistant@v5"),
        ("-", "end", "the session ended"),
    ]


def test_json_is_one_object_per_line(entries: list[LearnedEntry]) -> None:
    entries += [entry for record in (TURN, SHORTER, signal(task_id="t")) if (entry := entry_of(record, 1)) is not None]
    done = run("--since", "1h", "--exit", "-o", "json")
    assert done.exit_code == 0 and "left out: 1 feedback records" in done.stderr
    assert [json.loads(line)["event"] for line in done.stdout.splitlines()] == ["turn", "feedback"]
    assert len(run("--since", "1h", "-n", "1", "-o", "json").stdout.splitlines()) == 1


def test_wrong_options_are_refused() -> None:
    assert "--since: 'x' is not a time" in run("--since", "x").stderr
    done = run("--exit")
    assert done.exit_code == 2 and "give --since" in done.stderr
