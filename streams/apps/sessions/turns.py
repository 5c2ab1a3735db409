"""The replies to a turn, and the feedback made from them. Pure functions of the log."""

from collections.abc import Collection, Sequence
from itertools import dropwhile, takewhile

from schemas.ids import derived_id
from schemas.records import Feedback, Message, Result, SessionEvent, Source
from streams.fold.continuation import by_assistant, continuation, is_guessed, without_system
from tentalis import signals

MOST_TEXT = 256 * 1024
"""The most characters of a next state: a judge reads no more, and feedback must fit into a record beside its result."""
CUT = "\n[cut]"


# --- replies to a turn ------------------------------------------------------------------------------------------------


def said_to(turn: SessionEvent, later: SessionEvent) -> tuple[Message, ...]:
    """Returns the replies to a turn, found in the request of a later turn; empty if it has none.

    - The request continues the turn's own: the replies are the messages before the assistant's next one. They end the
      request, unless calls between the two turns were not recorded. If the assistant's message differs from the turn's
      answer (another conversation with the same beginning, or a regenerated answer), there is no reply to this turn.
    - The request repeats the turn's own, or goes back to an earlier place: there is no reply.
    - Any other request (the client shortened or changed the conversation): the reply is the newest message that is not
      the assistant's.

    Where the gateway guessed the session, two people's conversations may share its name. Then a request has replies
    only if it certainly continues the turn: it repeats the turn's request and then its answer.

    System messages are ignored: clients put the time of day there.
    """
    had, has = without_system(turn.messages), without_system(later.messages)
    if is_guessed(turn.session_id):
        return _first_said(continuation(turn, later))
    if len(has) > len(had) and has[: len(had)] == had:
        rest = has[len(had) :]
        return _first_said(rest) if _may_be(turn, next(filter(by_assistant, rest), None)) else ()
    if had[: len(has)] == has:
        return ()
    return tuple(message for message in reversed(has) if message.role != "assistant")[:1]


def came_late(turn: SessionEvent, event: SessionEvent) -> bool:
    """Returns true if an event is an earlier turn of the conversation: its answer stands in the turn's request.

    An answer without text cannot be recognised.
    """
    had, has = without_system(turn.messages), without_system(event.messages)
    n, answer = len(has), event.response.strip()
    if not answer or n >= len(had) or had[:n] != has:
        return False
    return had[n].role == "assistant" and had[n].content.strip() == answer


def _first_said(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Returns the first run of messages that are not the assistant's."""
    others = dropwhile(by_assistant, messages)
    return tuple(takewhile(lambda message: not by_assistant(message), others))


def _may_be(turn: SessionEvent, answer: Message | None) -> bool:
    """Returns true if a message may be the turn's answer. Clients remove reasoning and blanks; a message without text
    may be any answer."""
    if answer is None:
        return True
    heard, told = answer.content.strip(), turn.response.strip()
    return heard in told or told in heard


# --- the feedback -----------------------------------------------------------------------------------------------------


def next_state_of(result: Result, said: Sequence[Message], at: int) -> Feedback:
    """Returns the one next-state feedback of a turn: the reply that judges it, or an empty text without author if there
    is no reply. `at`: stream time (ms)."""
    reply = _judging_reply(said) if said else None
    author, text = (reply.role, reply.content) if reply is not None else ("", "")
    return Feedback(
        feedback_id=derived_id("next_state", result.task.task_id),
        event_time=at,
        task_id=result.task.task_id,
        sample_index=0,
        source=Source.NEXT_STATE,
        author=author,
        text=text if len(text) <= MOST_TEXT else text[: MOST_TEXT - len(CUT)] + CUT,
        result=result,
    )


def _judging_reply(said: Sequence[Message]) -> Message:
    """Returns the reply that judges a turn: the last. Of the outputs of tools that were called together it is the first
    that reports a failure. `said` is not empty."""
    events = [signals.event_of(message.role, message.content) for message in said]
    if isinstance(events[-1], signals.ToolOutput):
        for message, event in zip(said, events, strict=True):
            if event is not None and signals.shows_failure(event):
                return message
    return said[-1]


def signals_of(
    turn: SessionEvent,
    result: Result,
    shown: Sequence[signals.NextEvent],
    event_id: str,
    at: int,
    enabled: Collection[str],
) -> list[Feedback]:
    """Returns the implicit signals after a turn as feedback: the first of each kind.

    `event_id`: the event that showed them. `at`: stream time (ms).
    """
    question = next((message.content for message in reversed(turn.messages) if message.role == "user"), "")
    calls = tuple(call.name for call in turn.tool_calls)
    before = signals.AnsweredTurn(question, turn.response, turn.finish_reason, calls)
    found: dict[str, signals.Signal] = {}
    for event in shown:
        for signal in signals.detect(before, event, enabled):
            found.setdefault(signal.name, signal)
    return [signals.feedback_of(signal, result, event_id, at) for signal in found.values()]


def shown_by(said: Sequence[Message]) -> list[signals.NextEvent]:
    """Converts the replies of users and tools into the events that the detectors take."""
    events = (signals.event_of(message.role, message.content) for message in said)
    return [event for event in events if event is not None]
