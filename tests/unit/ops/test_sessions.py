"""Conversations as `tentalis sessions` shows them: which turns count, and what followed each."""

import pytest

from schemas.records import EXPLICIT, Feedback, HintKind, OutcomeKind, Polarity, Source, sample_of
from streams.fold.session_turns import result_of
from tentalis.cli.sessions import _reward
from tentalis.ops.sessions.core import (
    NoSuchTurn,
    SessionsView,
    TrainedAt,
    TurnFacts,
    turn_details,
    unique,
)
from tests.support.join_support import hint
from tests.support.loop_records import outcome, task
from tests.support.sessions_support import end, side, turn

LATE_GRADE = "t/0/grade/00000000-0000-5000-8000-000000000001"


def view(*events: object) -> SessionsView:
    made = SessionsView()
    for at, event in enumerate(events):
        made.apply(event, at)  # type: ignore[arg-type]
    return made


def feedback(ident: str, *, author: str = "ann", source: Source = Source.USER, **more: object) -> Feedback:
    return Feedback(feedback_id=ident, event_time=1, task_id="t", source=source, author=author, **more)  # type: ignore[arg-type]


def test_main_turns_are_numbered_and_copies_count_once() -> None:
    one = turn("a", "question")
    (found,) = view(one, side("title"), one, turn("b", "question", "answer", "more"), end()).conversations
    assert [(each.event.session_event_id, each.index) for each in found.turns] == [("a", 0), ("title", None), ("b", 1)]
    row = found.row()
    assert (row["main"], row["side"], row["tasks"], row["ended"]) == (2, 1, 2, True)
    assert (row["first"], row["last"]) == (0, 3)


def test_one_session_id_of_two_users_is_two_conversations() -> None:
    found = view(turn("a", "x"), turn("b", "x", user_id="bob")).conversations
    assert [each.user_id for each in found] == ["bob", "ann"], "the newest first"


def test_a_turn_after_the_end_opens_the_conversation_again() -> None:
    (found,) = view(turn("a", "x", done=True), turn("b", "x")).conversations
    assert not found.ended and len(found.main_turns) == 2


def test_a_turn_without_a_task_says_why() -> None:
    (found,) = view(turn("a", "x", not_trainable="greedy sampling"), side("title")).conversations
    assert [each.task_id for each in found.turns] == [None, None]
    assert [each.no_task for each in found.turns] == ["greedy sampling", "it is a side turn"]
    with pytest.raises(NoSuchTurn, match="has 1 main turns"):
        found.main_turn(1)


def test_the_task_is_the_one_that_the_application_makes() -> None:
    event = turn("a", "question")
    (found,) = view(event).conversations
    assert found.main_turn(0).task_id == result_of(event, 0, 0).task.task_id


def test_details_separate_signals_from_what_people_said() -> None:
    (found,) = view(turn("a", "question", answer="an answer")).conversations
    facts = TurnFacts(
        feedback=[
            feedback("1", source=Source.ENVIRONMENT, author="signal:reasked", polarity=Polarity.NEGATIVE),
            feedback("2", polarity=Polarity.POSITIVE),
            feedback("3", source=Source.NEXT_STATE, author="user", text="shorter please", score=0.25),
        ],
        outcomes=[outcome(task("t", n=1))],
        trained={"t/0": TrainedAt("run-1", 4, "assistant@v5")},
    )
    details = turn_details(found.main_turn(0), facts)
    assert details["signals"] == {"reasked": 1}
    assert [(each["source"], each["verdict"]) for each in details["feedback"]] == [
        ("user", "positive"),
        ("next_state", 0.25),
    ]
    assert details["outcomes"] == [{"kind": "both", "reward": 1.0, "explicit": False, "grade": None}]
    assert details["trained"] == [{"rollout": "t/0", "run": "run-1", "step": 4, "version": "assistant@v5"}]
    assert (details["asked"], details["answered"], details["no_task"]) == ("question", "an answer", None)


@pytest.mark.parametrize(
    ("trained", "said"),
    [
        ({}, "not trained yet"),
        ({"t/0": False}, "not trained yet"),
        ({"t/0": True}, "not used: assistant@v5 has learned from the turn"),
        ({"t/0": False, LATE_GRADE: True}, "trained"),
    ],
)
def test_a_late_grade_shows_what_became_of_it(trained: dict[str, bool], said: str) -> None:
    """A step that trained on the turn's hint alone leaves its reward to the grade."""
    late = outcome(task("t", n=1), reward=-1.0, kind=OutcomeKind.LATE, rollout_id=LATE_GRADE)
    facts = TurnFacts(
        outcomes=[late.model_copy(update={"components": {EXPLICIT: -1.0}})],
        trained={key: TrainedAt("run-1", 4, "assistant@v5", reward=reward) for key, reward in trained.items()},
    )
    (shown,) = facts.as_dict()["outcomes"]
    assert shown == {"kind": "late", "reward": -1.0, "explicit": True, "grade": said}
    assert _reward(shown) == f"-1 explicit late ({said})"


def test_copies_of_feedback_are_shown_once_in_log_order() -> None:
    first, again, other = feedback("1", text="a"), feedback("1", text="b"), feedback("2")
    assert unique([first, other, again]) == [first, other]


def test_a_hint_is_shown_with_the_message_and_the_judge_that_it_came_from() -> None:
    (found,) = view(turn("a", "question", answer="an answer")).conversations
    sample = sample_of(result_of(turn("a", "question"), 0, 0))
    from_user = hint(sample, id="h1").model_copy(update={"feedback_id": "next", "hints": ("Be brief.",)})
    lesson = hint(sample, id="h2").model_copy(update={"feedback_id": None, "hinter": "lesson/1-abc"})
    lost = hint(sample, HintKind.REJECTED, id="h3").model_copy(update={"feedback_id": "gone", "hints": ("x",)})
    facts = TurnFacts(
        feedback=[feedback("next", source=Source.NEXT_STATE, author="user", text="No. Shorter please.")],
        hints=[from_user, lesson, lost, hint(sample, HintKind.NONE, id="h4")],
    )
    shown = turn_details(found.main_turn(0), facts)["hints"]
    assert shown[0] == {
        "kind": "accepted",
        "hints": ["Be brief."],
        "made_by": "rule/1",
        "feedback_id": "next",
        "said": {"source": "next_state", "author": "user", "text": "No. Shorter please."},
    }
    assert [(each["kind"], each["made_by"], each["said"]) for each in shown[1:]] == [
        ("accepted", "lesson/1-abc", None),
        ("rejected", "rule/1", None),
    ]
