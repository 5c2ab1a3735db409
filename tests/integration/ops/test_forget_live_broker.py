"""People leave in the middle of their conversations: sessions, experience, scoring, hinting and join as processes on a
real broker, with turns that are still open; afterwards the view and the replay."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas import topics
from schemas.records import Feedback, Hint, Record, SessionEvent, Task
from schemas.tensors import int32_bytes
from tentalis.kafka import topology
from tentalis.kafka.consumer import read_to_end
from tentalis.kafka.offsets import committed_offsets, end_offsets
from tentalis.local.broker import EmbeddedBroker
from tests.support.forget_lab import POLICY, Person, Stage
from tests.support.gateway_lab import PROMPT_IDS
from tests.support.sessions_support import end, turn
from tests.support.whole_server import WholeServer, whole_server

pytestmark = [pytest.mark.broker, pytest.mark.usefixtures("few_partitions")]

GROUPS = [each.consumer_group() for each in topology.personal()[topics.SESSIONS]]
STATES = [name for app in ("sessions", "experience", "join") for name in topology.named(app).changelogs]
ANN = Person("user-ann", "timbuktu", (51, 52, 53))
EVE = Person("user-eve", "zanzibar", (41, 42, 43))
BOB = Person("user-bob", "honolulu", (31, 32, 33))
# Ann has two conversations.
TALKS = {"first of ann": ANN, "second of ann": ANN, "of eve": EVE, "of bob": BOB}
COMPLAINT = "That was too long, please answer in one sentence."


@pytest.fixture
def server() -> Iterator[WholeServer]:
    with whole_server() as found:
        yield found


@pytest.fixture
def stage(own_broker: EmbeddedBroker, server: WholeServer, tmp_path: Path) -> Iterator[Stage]:
    found = Stage(own_broker, tmp_path)
    hinters = tmp_path / "hinters.yaml"
    hinters.write_text(server.hinters())
    try:
        found.serve("sessions", "--idle", "3600")
        found.serve("scoring")
        found.serve("hinting", "--server", server.url)
        found.serve("experience", "--server", server.url, "--hinters", str(hinters), "--idle", "3600")
        found.serve("join")
        yield found
    finally:
        found.end()


def said(session: str, number: int) -> SessionEvent:
    """The turn of that number, counted from 0: whatever was said before is in its request."""
    person = TALKS[session]
    texts = [
        f"{COMPLAINT} {person.word} {i // 2}" if i % 2 == 0 else f"{person.word} it is" for i in range(2 * number + 1)
    ]
    return turn(
        f"{session} {number}",
        *texts,
        answer=f"{person.word} it is",
        session=session,
        user_id=person.user,
        policy=POLICY,
        model=f"{POLICY}@v0",
        prompt_token_ids=int32_bytes(PROMPT_IDS),
        response_token_ids=person.response,
    )


def put(stage: Stage, *events: Record) -> None:
    for event in events:
        stage.publisher.send(topics.SESSIONS, event)
    stage.publisher.flush()


def read(stage: Stage, topic: str) -> list[Record]:
    return [stored.decode(stage.codec) for stored in read_to_end(stage.settings, topic)]


def turns_of(stage: Stage, session: str) -> set[int | None]:
    """Numbers of the turns that became tasks."""
    return {
        task.turn_index for task in read(stage, topics.TASKS) if isinstance(task, Task) and task.session_id == session
    }


def test_users_are_forgotten_in_the_middle_of_a_conversation(stage: Stage, server: WholeServer) -> None:
    put(stage, *(said(session, number) for number in (0, 1) for session in TALKS))
    # The first turn of each was answered by its second, which waits for its own next state.
    rollouts = stage.wait(lambda: len(found := stage.newest(topics.ROLLOUTS)) == len(TALKS) and found)
    of = {person: stage.traces(topics.ROLLOUTS, person) for person in TALKS.values()}
    assert [len(of[person]) for person in (ANN, EVE, BOB)] == [2, 1, 1]
    stage.wait(lambda: all(stage.traces(state, each) for each in of for state in STATES[:2]))
    stage.train(batch_rollouts=len(TALKS), steps=1)
    assert stage.viewed() == set(rollouts)

    stage.forget("--session", "of eve", husks=1)
    stage.forget("--user", ANN.user, husks=2)
    gone = of[ANN] | of[EVE]
    assert not any(stage.traces(state, each) for each in (ANN, EVE) for state in STATES)
    assert not any(stage.traces(topics.ROLLOUTS, each) for each in (ANN, EVE))
    assert all(stage.traces(state, BOB) for state in STATES[:2]), "who stays is not forgotten"
    assert stage.viewed() == of[BOB] and set(stage.newest(topics.ROLLOUTS)) == set(rollouts)

    # All of them go on, as clients do that know of nothing, and end.
    asked = len(server.shown)
    put(stage, *(said(session, 2) for session in TALKS))
    put(stage, *(end(f"end of {session}", session, user_id=person.user) for session, person in TALKS.items()))
    ends = end_offsets(stage.settings, topics.SESSIONS)

    def everything_is_read() -> bool:
        behind = [committed_offsets(stage.settings, group, [topics.SESSIONS]) for group in GROUPS]
        return all(found.get((topics.SESSIONS, p), 0) >= last for found in behind for p, last in ends.items() if last)

    stage.wait(everything_is_read)
    assert {session: turns_of(stage, session) for session in TALKS} == {
        session: {0, 1, 2} if person is BOB else {0, 1} for session, person in TALKS.items()
    }
    heard = [f for f in read(stage, topics.FEEDBACK) if isinstance(f, Feedback) and not f.author.startswith("signal")]
    answered = {(f.result.task.session_id, f.result.task.turn_index) for f in heard if f.result}
    assert answered == {(session, 0) for session in TALKS} | {("of bob", 1), ("of bob", 2)}
    (lesson,) = server.shown[asked:]
    assert BOB.word in lesson, "nobody extracts a lesson from what was forgotten"
    taught = [h for h in read(stage, topics.HALVES) if isinstance(h, Hint) and h.hinter.startswith("experience/")]
    assert {hint.sample.head.user_id for hint in taught} == {BOB.user}
    assert not any(stage.traces(topic, each) for each in (ANN, EVE) for topic in (*STATES, topics.ROLLOUTS))
    assert stage.viewed() >= of[BOB] and not stage.viewed() & gone
    stage.forgotten(gone)
    code, replayed = stage.replayed("--allow-missing")
    assert (code, replayed["equal"], len(replayed["left_out"])) == (0, None, len(gone)), replayed
