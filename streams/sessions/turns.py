"""What becomes of a turn: its task, its result, and the feedback in what came next. Pure, and of the log alone."""

from collections.abc import Collection, Sequence
from itertools import dropwhile, takewhile

from schemas.ids import derived_id, turn_task_id
from schemas.records import (
    Feedback,
    Message,
    Opens,
    PolicySpan,
    Result,
    SessionEvent,
    Source,
    Status,
    Task,
    Terms,
    Verifier,
    not_trainable_by_ratio,
    result_id,
    sample_of,
)
from tentalis import signals

ENVIRONMENT = "chat"
VERIFIER = Verifier(name="next_state")
TERMS = Terms(rl=Source.NEXT_STATE, opd=Source.NEXT_STATE, opens=Opens.FIRST_FEEDBACK)
MOST_TEXT = 256 * 1024
"""Characters of a next state: a judge reads no more, and feedback must fit a record beside its result."""
CUT = "\n[cut]"


# --- which message is the answer to a turn ----------------------------------------------------------------------------


def said_to(turn: SessionEvent, later: SessionEvent) -> tuple[Message, ...]:
    """What somebody said to a turn, found in the request of a later one; nothing if the request says nothing to it. The
    last of them is the next state.

    Where the request goes on from the turn's own, these are the messages before the assistant speaks again: the last of
    the request, unless calls between the two were not recorded. But where the assistant said something else than this
    turn did (another conversation that begins alike, or an answer that was made again), they speak of that. Where it
    asks the same again, or goes back to an earlier place, nobody has said anything to the turn. Everywhere else (the
    client shortened the conversation, or changed it) it is the newest message that is not the assistant's own.

    System messages are left out: clients put the time of day there.
    """
    had, has = _said(turn.messages), _said(later.messages)
    if len(has) > len(had) and has[: len(had)] == had:
        rest = has[len(had) :]
        return _first_said(rest) if _may_be(turn, next(filter(_by_assistant, rest), None)) else ()
    if had[: len(has)] == has:
        return ()
    return tuple(message for message in reversed(has) if message.role != "assistant")[:1]


def came_late(turn: SessionEvent, event: SessionEvent) -> bool:
    """Whether an event is an earlier turn of the conversation than the turn: its answer stands in the turn's request.

    Of an answer without text nobody can tell.
    """
    had, has = _said(turn.messages), _said(event.messages)
    n, answer = len(has), event.response.strip()
    if not answer or n >= len(had) or had[:n] != has:
        return False
    return had[n].role == "assistant" and had[n].content.strip() == answer


def _said(messages: Sequence[Message]) -> tuple[Message, ...]:
    return tuple(message for message in messages if message.role != "system")


def _first_said(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages between the first words of the assistant and the next ones."""
    others = dropwhile(_by_assistant, messages)
    return tuple(takewhile(lambda message: not _by_assistant(message), others))


def _may_be(turn: SessionEvent, answer: Message | None) -> bool:
    """Whether a message may be the turn's answer. Clients take reasoning and blanks out; of one without text nobody can
    tell."""
    if answer is None:
        return True
    heard, told = answer.content.strip(), turn.response.strip()
    return heard in told or told in heard


def _by_assistant(message: Message) -> bool:
    return message.role == "assistant"


# --- the records ------------------------------------------------------------------------------------------------------


def result_of(event: SessionEvent, turn_index: int, at: int) -> Result:
    """The result of a main turn, with its task. `at`: stream time of the turn (ms). The event has messages and names
    its policy."""
    known = {
        "session_event_id": event.session_event_id,
        "gateway_id": event.gateway_id,
        "decided_by": event.decided_by,
        "request": event.request,
    }
    worker_id = event.worker_id or event.gateway_id or "gateway"
    task = Task(
        task_id=turn_task_id(event.session_id, event.session_event_id),
        event_time=at,
        policy=event.policy,
        environment=ENVIRONMENT,
        messages=event.messages,
        sampling=event.sampling,
        verifier=VERIFIER,
        terms=TERMS,
        target_worker=worker_id,
        session_id=event.session_id,
        turn_index=turn_index,
        user_id=event.user_id,
        metadata={name: value for name, value in known.items() if value},
    )
    spans = (PolicySpan(start=0, policy=event.model or event.policy),)
    return Result(
        result_id=result_id(task.task_id, 0, spans, event.response_token_ids, event.response),
        event_time=at,
        opened_at=at,
        task=task,
        sample_index=0,
        worker_id=worker_id,
        status=event.status,
        text=event.response,
        prompt_token_ids=event.prompt_token_ids,
        response_token_ids=event.response_token_ids,
        sampler_logprobs=event.sampler_logprobs,
        logprobs_mode=event.logprobs_mode,
        sampling=event.sampling,
        policy_spans=spans,
        tool_calls=event.tool_calls,
        finish_reason=event.finish_reason,
        server_id=event.gateway_id,
        elapsed_s=event.elapsed_s,
    )


def not_trainable(event: SessionEvent, size: int, most_bytes: int) -> str | None:
    """Why a main turn gets no task; None if it gets one. `size`: bytes of the event on the log.

    Nobody but the trainer would read what became of it, and everything on the way there would be done for nothing.
    """
    if event.status is not Status.OK:
        return "failed"
    if event.not_trainable:
        return event.not_trainable
    if not event.policy:
        return "no policy"
    if not event.messages:
        return "no messages"
    if size > most_bytes:
        return "too large"
    return not_trainable_by_ratio(sample_of(result_of(event, 0, 0)))


def next_state_of(result: Result, said: Sequence[Message], at: int) -> Feedback:
    """The one next-state feedback of a turn: the last that was said to it, or that nothing was. `at`: stream time
    (ms)."""
    author, text = (said[-1].role, said[-1].content) if said else ("", "")
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


def signals_of(
    turn: SessionEvent,
    result: Result,
    shown: Sequence[signals.Event],
    event_id: str,
    at: int,
    enabled: Collection[str],
) -> list[Feedback]:
    """What came after a turn without anybody grading it: the first of each kind of signal, as feedback.

    `event_id`: what showed it. `at`: stream time (ms).
    """
    question = next((message.content for message in reversed(turn.messages) if message.role == "user"), "")
    calls = tuple(call.name for call in turn.tool_calls)
    before = signals.Turn(question, turn.response, turn.finish_reason, calls)
    found: dict[str, signals.Signal] = {}
    for event in shown:
        for signal in signals.detect(before, event, enabled):
            found.setdefault(signal.name, signal)
    return [signals.feedback_of(signal, result, event_id, at) for signal in found.values()]


def shown_by(said: Sequence[Message]) -> list[signals.Event]:
    """What people and tools said, as the detectors take it."""
    kinds = {"user": signals.Said, "tool": signals.Returned}
    return [kinds[message.role](message.content) for message in said if message.role in kinds]
