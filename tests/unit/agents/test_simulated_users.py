"""The users of the personalisation scenario: their rules, and what a session with them is like."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tentalis.opd import rule_hint
from tests.bench.users import LEAST_WORDS, LONG_ENOUGH, USERS, User, long_enough, plain, praising

ANSWERS = st.lists(
    st.one_of(
        st.text(max_size=200),
        st.sampled_from(
            [
                "Leaves fall because the tree saves water.",
                "1. One\n2. Two\n3. Three and more words",
                "**Bold** is bold, yes it is",
            ]
        ),
        st.sampled_from(["Well done, that is a very good answer.", "No, it is Mercury that is closest."]),
        st.integers(0, 90).map(lambda count: " ".join(["word", "and"] * count)),
    ),
    max_size=8,
)
EACH = st.sampled_from(sorted(USERS.values(), key=lambda user: user.name))


@pytest.mark.parametrize(
    ("answer", "fits"),
    [
        ("The water rises, cools and falls again.", True),
        ("The water **rises**, cools and falls again.", False),
        ("Remember:\n1. it rises\n2. it falls", False),
        ("Remember:\n- it rises\n- it falls", False),
        ("## Water\nIt rises and falls.", False),
        ("It is $\\boxed{42}$, as you see.", False),
        ("┌──┐\n│42│\n└──┘", False),
        ("In 1789 the king, 3 of 4 times, said 2*3 is 6.", True),
    ],
)
def test_the_student_wants_plain_text(answer: str, fits: bool) -> None:
    assert plain(answer) is fits


def test_the_assistant_teacher_counts_words() -> None:
    assert long_enough("word " * LONG_ENOUGH)
    assert not long_enough("word " * (LONG_ENOUGH - 1))
    assert not long_enough("...! " * LONG_ENOUGH), "punctuation is no words"


@pytest.mark.parametrize(
    ("answer", "fits"),
    [
        ("Well done! It is Mercury, though.", True),
        ("That's a GREAT start.", True),
        ("You did very well.", True),
        ("I am so proud of you.", True),
        ("Keep it up!", True),
        ("The answer is wrong.", False),
        ("A good day for great whales.", False),
        ("Work is good for you.", False),
    ],
)
def test_the_teacher_looks_for_praise(answer: str, fits: bool) -> None:
    assert praising(answer) is fits


@given(EACH, st.integers(0, 5), st.integers(0, 500), ANSWERS, st.integers(1, 6))
def test_a_session_ends_with_thanks_or_after_its_turns(
    user: User, seed: int, session: int, answers: list[str], turns: int
) -> None:
    """Against any answers: one question, complaints until the first good answer, then thanks and no more."""
    given_so_far: list[str] = []
    said: list[str] = []
    for answer in [*answers, "Well done. " + "That is plain and long enough for everybody. " * 9, "Bye."]:
        message = user.next_message(seed, session, given_so_far, turns)
        if message is None:
            break
        said.append(message)
        given_so_far.append(answer)
    assert user.next_message(seed, session, given_so_far, turns) is None
    assert said[0] == user.opening(seed, session)
    content = [user.content(answer) for answer in given_so_far]
    if any(content):
        first = content.index(True)
        assert said[first + 1 :] == [said[-1]] and said[-1] in user.thanks
        assert len(given_so_far) == first + 2, "what is answered to thanks is not judged"
    else:
        assert len(said) == turns
    assert all(": please " in message for message in said[1 : len(said) - any(content)])


@given(EACH, st.integers(0, 3), st.integers(0, 300))
def test_a_run_is_repeatable_and_asks_everything_before_anything_again(user: User, seed: int, session: int) -> None:
    assert user.opening(seed, session) == user.opening(seed, session)
    lap = session - session % len(user.asks)
    assert {user.opening(seed, at) for at in range(lap, lap + len(user.asks))} == set(user.asks)


@given(EACH, st.text(max_size=300))
def test_an_empty_answer_contents_nobody(user: User, text: str) -> None:
    if len(text.split()) < LEAST_WORDS and user.content(text):
        assert any(not char.isspace() for char in text)
    assert not user.content("") and not user.content("**") and not user.content("Good work!")


@pytest.mark.parametrize("user", USERS.values(), ids=USERS)
def test_a_complaint_is_a_hint_and_thanks_are_none(user: User) -> None:
    short, wrong = (
        user.next_message(0, 0, ["No."], 4),
        user.next_message(0, 0, ["- a\n- list of few words\n- **bold**"], 4),
    )
    for said in (short, wrong):
        assert said is not None
        hint = rule_hint(said)
        assert hint is not None and hint.lower() == f"please {user.wish}.".lower()
    assert all(rule_hint(thanks) is None for thanks in user.thanks)


@pytest.mark.parametrize("user", USERS.values(), ids=USERS)
def test_what_a_user_asks_does_not_give_the_rule_away(user: User) -> None:
    """Else the prompt would do what training is to do."""
    told = set(user.wish.replace(",", "").split()) - {
        "a",
        "and",
        "for",
        "the",
        "or",
        "with",
        "is",
        "be",
        "pupil",
        "write",
        "comment",
    }
    assert not any(word in ask.lower().replace("?", "").split() for ask in user.asks for word in told)
