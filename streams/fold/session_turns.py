"""Derives the session, the task and the result of a turn. Pure functions of one event.

The applications `sessions` and `experience` derive the same result from a turn, so the halves of `experience` belong to
the task that `sessions` wrote.
"""

from schemas.ids import turn_task_id
from schemas.records import (
    Opens,
    PolicySpan,
    Result,
    SessionEvent,
    Source,
    Status,
    Task,
    TaskHead,
    Terms,
    Verifier,
    not_trainable_by_ratio,
    result_id,
    sample_of,
)
from streams.fold.hashing import short

MAIN, SIDE = "main", "side"
"""The types of a turn. A side turn, such as a request for a title, gets no task."""
ENVIRONMENT = "chat"
VERIFIER = Verifier(name="next_state")
TERMS = Terms(rl=Source.NEXT_STATE, opd=Source.NEXT_STATE, opens=Opens.FIRST_FEEDBACK)


def session_key(event: SessionEvent) -> str:
    """Returns 16 hex digits. A session belongs to one user: the same id under two users makes two sessions."""
    return short(event.user_id is not None, event.user_id or "", event.session_id).hex()


def head_of(session_id: str, user_id: str | None, policy: str) -> TaskHead:
    """Returns a task head to match against requests to forget."""
    return TaskHead(
        task_id="turn",
        policy=policy or "none",
        environment=ENVIRONMENT,
        terms=TERMS,
        session_id=session_id,
        user_id=user_id,
    )


def result_of(event: SessionEvent, turn_index: int, at: int) -> Result:
    """Returns the result of a main turn, with its task. `at`: stream time of the turn (ms). The event must have
    messages and name its policy."""
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
        recorded_by=event.recorded_by,
    )


def not_trainable(event: SessionEvent, size: int, most_bytes: int) -> str | None:
    """Returns the reason why a main turn gets no task; None if it gets one. `size`: bytes of the event on the log.

    Only the trainer would read the outcome of such a turn, so all processing before it would be wasted.
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
