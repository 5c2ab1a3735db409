"""Bodies to records and back. Pure: ids and times come from the body and the caller, or are derived."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from schemas.ids import derived_id, parse_policy_name
from schemas.records import (
    Feedback,
    LogprobsMode,
    Message,
    Opens,
    Outcome,
    Polarity,
    PolicySpan,
    Record,
    Result,
    Sampling,
    SessionEvent,
    Source,
    Status,
    Task,
    Terms,
    Verifier,
    result_id,
)
from schemas.tensors import float32_bytes, int32_bytes
from tentalis.gateway.asking import UNSEEN
from tentalis.gateway.bridge.shapes import (
    FeedbackBody,
    OutcomeAnswer,
    ResultAnswer,
    ResultBody,
    Said,
    SamplingBody,
    SessionBody,
    Shape,
    TaskBody,
    Trace,
    TraceFeedback,
    UserFeedbackBody,
)
from tentalis.gateway.messages import normalised, unseen, unspoken
from tentalis.gateway.sessions_of import MAIN

CHAT = "chat"
TASK_TYPE = "task_type"
_TIMES = ("event_time", "opened_at")
_POLARITY = {-1: Polarity.NEGATIVE, 0: Polarity.NONE, 1: Polarity.POSITIVE}


def same(one: Record, other: Record) -> bool:
    """Whether two records with one id say the same; when they were written, and what was looked up for them, does not
    matter."""
    return _said(one) == _said(other)


def _said(record: Record) -> dict[str, Any]:
    said = record.model_dump(exclude=set(_TIMES))
    if isinstance(record, Result):
        # Its task may have come to the log in between, with what the worker did not know of it.
        said["task"] = record.task.task_id
    if isinstance(record, Feedback):
        del said["result"]
    return said


def moment(created_at: datetime | None, now_ms: int) -> int:
    """ms since the epoch; a time without a zone is UTC."""
    if created_at is None:
        return now_ms
    at = created_at if created_at.tzinfo else created_at.replace(tzinfo=UTC)
    return int(at.timestamp() * 1000)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _messages(said: Sequence[Said]) -> tuple[Message, ...]:
    return normalised([message.model_dump() for message in said])


def _sampling(body: SamplingBody | None) -> Sampling:
    return Sampling() if body is None else Sampling(**body.model_dump() | {"stop": tuple(body.stop)})


def environment_of(task_type: str, known: Sequence[str]) -> str:
    """The environment of the ancestors' task type: that of its name if there is one, else chat."""
    return task_type if task_type in known else CHAT


def task_of(
    body: TaskBody, *, task_id: str, now_ms: int, policy: str, user_id: str | None, environments: Sequence[str]
) -> Task:
    """The task of a body. Raises ValidationError."""
    verifier = None if body.verifier is None else Verifier(name=body.verifier.name, data=body.verifier.data)
    return Task(
        task_id=task_id,
        event_time=moment(body.created_at, now_ms),
        policy=body.policy or policy,
        environment=environment_of(body.task_type, environments),
        messages=(*_messages(body.messages), Message(role="user", content=body.prompt)),
        n_samples=body.n_samples,
        sampling=_sampling(body.sampling),
        verifier=verifier,
        terms=_terms(body, verified=verifier is not None),
        manager_id=body.manager_id,
        target_worker=body.target_worker,
        user_id=user_id,
        metadata={name: _text(value) for name, value in body.metadata.items()} | {TASK_TYPE: body.task_type},
    )


def _terms(body: TaskBody, *, verified: bool) -> Terms:
    said = body.terms
    if said is None:
        return Terms(rl=Source.RESULT if verified else Source.MANAGER, opd=Source.MANAGER)
    return Terms(
        rl=None if said.rl is None else Source(said.rl),
        opd=None if said.opd is None else Source(said.opd),
        opens=Opens(said.opens),
        deadline_ms=said.deadline_ms,
        opd_window_ms=said.opd_window_ms,
    )


def task_of_result(
    body: ResultBody, *, task_id: str, now_ms: int, policy: str, user_id: str | None, environments: Sequence[str]
) -> Task:
    """The task that a result came for, where it is not on the log: what the result says of it."""
    return Task(
        task_id=task_id,
        event_time=moment(body.created_at, now_ms),
        policy=_policy_in(body.model_version) or policy,
        environment=environment_of(body.task_type, environments),
        messages=(Message(role="user", content=body.prompt),),
        n_samples=body.sample_index + 1,
        sampling=_sampling(body.sampling),
        terms=Terms(rl=Source.MANAGER, opd=Source.MANAGER),
        target_worker=body.worker_id,
        user_id=user_id,
        metadata={TASK_TYPE: body.task_type},
    )


def _policy_in(model_version: str | None) -> str | None:
    try:
        return None if model_version is None else parse_policy_name(model_version)[0]
    except ValueError:
        return None


def result_of(body: ResultBody, task: Task, *, opened_at: int, now_ms: int) -> Result:
    """The result of a body on a task; `opened_at`: append time of the task (ms). Raises ValidationError."""
    tokens = int32_bytes([token.id for token in body.response_tokens])
    # A version of a policy of ours, or whatever else the worker calls its model.
    ours = body.model_version is not None and _policy_in(body.model_version) is not None
    spans = (PolicySpan(start=0, policy=body.model_version),) if ours and body.model_version is not None else ()
    logprobs = float32_bytes([token.logprob for token in body.response_tokens])
    return Result(
        result_id=result_id(task.task_id, body.sample_index, spans, tokens, body.result),
        event_time=moment(body.created_at, now_ms),
        opened_at=opened_at,
        task=task,
        sample_index=body.sample_index,
        worker_id=body.worker_id,
        status=Status.OK if body.status == "success" else Status.FAILED,
        error=None if body.status == "success" else body.result,
        text=body.result,
        steps=tuple(body.steps),
        prompt_token_ids=int32_bytes(body.prompt_token_ids),
        response_token_ids=tokens,
        sampler_logprobs=logprobs,
        logprobs_mode=LogprobsMode.PROCESSED if logprobs else LogprobsMode.NONE,
        sampling=task.sampling if body.sampling is None else _sampling(body.sampling),
        policy_spans=spans,
        finish_reason=body.finish_reason,
        server_id="" if ours else body.model_version or "",
        elapsed_s=body.elapsed_seconds,
    )


def _content(body: Shape) -> str:
    """What an id is derived from beside what it speaks of: all that a body says, but for when, and by which of its
    names it calls that."""
    return body.model_dump_json(
        exclude={"created_at", "task_id", "completion_id", "session_id", "turn_index"}, exclude_defaults=True
    )


def feedback_of(body: FeedbackBody, task_id: str, result: Result | None, *, feedback_id: str, now_ms: int) -> Feedback:
    """The feedback of a body. `task_id`, `feedback_id`: as the log has them, the latter derived if it is "";
    `result`: what it speaks of, where that is known. Raises ValidationError."""
    return Feedback(
        feedback_id=feedback_id or derived_id("feedback", "bridge", task_id, _content(body)),
        event_time=moment(body.created_at, now_ms),
        task_id=task_id,
        sample_index=body.sample_index,
        source=Source(body.source),
        author=body.manager_id,
        score=body.score,
        text=body.textual_feedback,
        result=result,
    )


def user_feedback_of(
    body: UserFeedbackBody, task_id: str, author: str, result: Result | None, *, feedback_id: str, now_ms: int
) -> Feedback:
    """What a person says of a turn; ids as for `feedback_of`. Raises ValidationError."""
    score = body.score if body.score >= 0 else None
    return Feedback(
        feedback_id=feedback_id or derived_id("feedback", "user", task_id, author, _content(body)),
        event_time=now_ms,
        task_id=task_id,
        sample_index=body.sample_index,
        source=Source.USER,
        author=author,
        score=score,
        polarity={"up": Polarity.POSITIVE, "down": Polarity.NEGATIVE}.get(body.thumb, Polarity.NONE),
        text=body.comment,
        result=result,
    )


def taskless(event: SessionEvent) -> str:
    """Why the application `sessions` makes no task of a turn, as far as the turn says so itself; "" if it says nothing
    against one."""
    if event.turn_type != MAIN:
        return f"it is a {event.turn_type} turn"
    return event.not_trainable or ("" if event.policy else "no policy answered")


def session_event_of(
    body: SessionBody,
    *,
    session_id: str,
    session_event_id: str,
    user_id: str | None,
    now_ms: int,
    gateway_id: str,
) -> SessionEvent:
    """The turn of a body; ids as the log has them, that of the event derived if it is "". Raises ValidationError."""
    messages = [message.model_dump() for message in body.messages]
    said = normalised(messages)
    return _turn(
        session_event_id=session_event_id or derived_id("session", "bridge", session_id, _content(body)),
        event_time=moment(body.created_at, now_ms),
        session_id=session_id,
        turn_type=body.turn_type,
        worker_id=body.worker_id,
        model=body.model,
        policy=body.policy,
        messages=said,
        request=unspoken({}, messages),
        response=body.response,
        done=body.done,
        user_id=user_id,
        gateway_id=gateway_id,
        finish_reason=body.finish_reason,
        elapsed_s=body.elapsed_seconds,
        tokens=(body.prompt_token_ids, body.response_token_ids, body.token_logprobs),
        sampling=body.sampling,
        given=messages,
    )


def trace_event_of(
    trace: Trace, trace_id: str, *, session_id: str, user_id: str | None, gateway_id: str
) -> SessionEvent:
    """The turn of a trace; ids as the log has them. Raises ValidationError."""
    messages = (
        [{"role": "user", "content": trace.prompt}]
        if isinstance(trace.prompt, str)
        else [message.model_dump() for message in trace.prompt]
    )
    kept = {"task": trace.task, "metadata": trace.metadata, "judgement": trace.judgement}
    return _turn(
        session_event_id=trace_id,
        event_time=trace.recorded_at,
        session_id=session_id,
        turn_type="main",
        worker_id=trace.worker_id,
        model=trace.model,
        policy=_policy_in(trace.model) or "",
        messages=normalised(messages),
        request=_text({"trace": kept} | json.loads(unspoken({}, messages) or "{}")),
        response=trace.response,
        done=trace.done,
        user_id=user_id,
        gateway_id=gateway_id,
        finish_reason="",
        elapsed_s=trace.elapsed_seconds,
        tokens=(trace.prompt_token_ids, trace.response_token_ids, trace.sampler_logprobs),
        sampling=trace.sampling,
        given=messages,
    )


def _turn(
    *,
    tokens: tuple[list[int], list[int], list[float]],
    sampling: SamplingBody | None,
    given: list[dict[str, Any]],
    **fields: Any,
) -> SessionEvent:
    """`given`: the messages as they came, which `fields` have as texts."""
    prompt, response, logprobs = tokens
    whole = bool(prompt and response) and len(response) == len(logprobs)
    why = UNSEEN if unseen(given) else ""
    if not whole or sampling is None:
        why = "logged by a client without token ids, log-probs and sampling"
    return SessionEvent(
        **fields,
        decided_by="body",
        prompt_token_ids=int32_bytes(prompt if whole else []),
        response_token_ids=int32_bytes(response if whole else []),
        sampler_logprobs=float32_bytes(logprobs if whole else []),
        logprobs_mode=LogprobsMode.PROCESSED if whole else LogprobsMode.NONE,
        sampling=_sampling(sampling),
        not_trainable=why,
    )


def trace_session(trace_id: str) -> str:
    """The session of a trace: what stands before the last dot of its id, else the id itself (a session of its own)."""
    return trace_id.rpartition(".")[0] or trace_id


def trace_feedback_of(
    body: TraceFeedback, feedback_id: str, task_id: str, author: str, result: Result | None
) -> Feedback:
    """What somebody says of a trace; ids as the log has them. Raises ValidationError."""
    return Feedback(
        feedback_id=feedback_id,
        event_time=body.recorded_at,
        task_id=task_id,
        sample_index=0,
        source=Source.USER,
        author=author,
        polarity=_POLARITY[body.polarity],
        text=body.text,
        result=result,
    )


def _created(ms: int) -> datetime:
    # The years that a date can have; beyond them the nearest.
    return datetime.fromtimestamp(min(max(ms, 0), 253_402_300_799_999) / 1000, UTC)


def answer_of(result: Result, task_id: str) -> ResultAnswer:
    """A result as people ask for it, by the name that they have for its task."""
    asked = [message.content for message in result.task.messages if message.role == "user"]
    return ResultAnswer(
        task_id=task_id,
        worker_id=result.worker_id,
        prompt=asked[-1] if asked else "",
        result=result.text,
        status="success" if result.status is Status.OK else "failed",
        steps=list(result.steps),
        elapsed_seconds=result.elapsed_s,
        model_version=result.policy_spans[-1].policy if result.policy_spans else result.server_id or None,
        created_at=_created(result.event_time),
        result_id=result.result_id,
        sample_index=result.sample_index,
        finish_reason=result.finish_reason,
        error=result.error,
    )


def outcome_answer(outcome: Outcome) -> OutcomeAnswer:
    """An outcome as people ask for it."""
    return OutcomeAnswer(
        sample_index=outcome.sample_index,
        kind=outcome.kind.value,
        reward=outcome.reward,
        components=outcome.components,
    )
