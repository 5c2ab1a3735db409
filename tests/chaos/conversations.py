"""Sessions as gateways record them: several turns each, some side turns, some events twice, all kinds of ends."""

import random
from collections.abc import Iterator

from schemas import topics
from schemas.records import LogprobsMode, Message, SessionEvent, SessionEventKind
from schemas.tensors import float32_bytes, int32_bytes
from tentalis.text.timestamps import now_ms
from tests.chaos.driver import TOKENS, Event

MOST_TURNS = 9
MEAN_TURNS = (1 + MOST_TURNS) / 2
SAYS = (
    "Thank you, that helps!",
    "That's wrong. Please answer in one sentence.",
    "And why do dogs bark?",
    "No, I meant something shorter. Please try again.",
    "Tell me more about that.",
)


def conversation(chance: random.Random, run: str, number: int) -> Iterator[Event]:
    """Yields the events of one session; every main turn is trainable."""
    session_id, user_id = f"{run}-{number}", f"user-{chance.randrange(50)}"
    messages: tuple[Message, ...] = ()
    turns, ends = chance.randint(1, MOST_TURNS), chance.choice(["header", "call", "idle"])
    at = 0.0
    for index in range(turns):
        said = chance.choice(SAYS) if messages else "Why do cats purr?"
        messages += (Message(role="user", content=said),)
        turn = _turn(chance, session_id, user_id, index, messages)
        if ends == "header" and index == turns - 1:
            turn = turn.model_copy(update={"done": True})
        yield at, topics.SESSIONS, turn
        if chance.random() < 0.04:
            yield at + chance.uniform(0.0, 5.0), topics.SESSIONS, turn
        if chance.random() < 0.1:
            side = turn.model_copy(update={"session_event_id": f"{session_id}-side-{index}", "turn_type": "side"})
            yield at + 0.3, topics.SESSIONS, side.model_copy(update={"done": False})
        messages += (Message(role="assistant", content=turn.response),)
        at += chance.uniform(1.0, 6.0)
    if ends == "call":
        end = SessionEvent(
            session_event_id=f"{session_id}-end",
            event_time=now_ms(),
            session_id=session_id,
            user_id=user_id,
            kind=SessionEventKind.END,
        )
        yield at, topics.SESSIONS, end


def _turn(
    chance: random.Random, session_id: str, user_id: str, index: int, messages: tuple[Message, ...]
) -> SessionEvent:
    return SessionEvent(
        session_event_id=f"{session_id}-{index}",
        event_time=now_ms(),
        session_id=session_id,
        worker_id="gateway-1",
        gateway_id="gateway-1",
        model="assistant@v1",
        policy="assistant",
        user_id=user_id,
        messages=messages,
        response=f"Cats purr when they are content, and to soothe themselves, turn {index}.",
        prompt_token_ids=int32_bytes([1, 2, 3]),
        response_token_ids=int32_bytes([chance.randrange(1000) for _ in range(TOKENS)]),
        sampler_logprobs=float32_bytes([-chance.random() for _ in range(TOKENS)]),
        logprobs_mode=LogprobsMode.PROCESSED,
        finish_reason="stop",
    )
