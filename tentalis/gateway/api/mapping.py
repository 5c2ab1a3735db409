"""Converts bodies to records and back. Pure: ids and times come from the body or the caller, or are derived."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from schemas.ids import derived_id, parse_policy_name
from schemas.records import (
    Feedback,
    Hint,
    LogprobsMode,
    Message,
    Opens,
    Outcome,
    Polarity,
    PolicySpan,
    Record,
    RecordedBy,
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
from tentalis.gateway.api.bodies import (
    BridgeModel,
    FeedbackBody,
    HintAnswer,
    HintSource,
    MessageBody,
    OutcomeAnswer,
    ResultAnswer,
    ResultBody,
    SessionBody,
    TaskBody,
    TaskSamplingBody,
    Trace,
    TraceFeedback,
    UserFeedbackBody,
)
from tentalis.gateway.calls.backend_request import UNSEEN
from tentalis.gateway.calls.session_id import CHAT_ENVIRONMENT, MAIN
from tentalis.inference.chat_messages import normalised, unseen, unspoken

TASK_TYPE_KEY = "task_type"
# Of two posts of one record, the second may have come later, or to a gateway of another version.
_WRITTEN_FIELDS = ("event_time", "opened_at", "recorded_by")
_POLARITY = {-1: Polarity.NEGATIVE, 0: Polarity.NONE, 1: Polarity.POSITIVE}


def same_content(one: Record, other: Record) -> bool:
    """True if two records with the same id have the same content, apart from what depends on the time and gateway of
    a post, and from looked-up records."""
    return _comparable(one) == _comparable(other)


def _comparable(record: Record) -> dict[str, Any]:
    content = record.model_dump(exclude=set(_WRITTEN_FIELDS))
    if isinstance(record, Result):
        # The task may have reached the log in between, with fields that the worker did not know.
        content["task"] = record.task.task_id
    if isinstance(record, Feedback):
        del content["result"]
    return content


def event_time_ms(created_at: datetime | None, now_ms: int) -> int:
    """The time in ms since the epoch, by default `now_ms`; a time without a zone is UTC."""
    if created_at is None:
        return now_ms
    time = created_at if created_at.tzinfo else created_at.replace(tzinfo=UTC)
    return int(time.timestamp() * 1000)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _messages(bodies: Sequence[MessageBody]) -> tuple[Message, ...]:
    return normalised([message.model_dump() for message in bodies])


def _sampling(body: TaskSamplingBody | None) -> Sampling:
    return Sampling() if body is None else Sampling(**body.model_dump() | {"stop": tuple(body.stop)})


def environment_of(task_type: str, known: Sequence[str]) -> str:
    """The environment for a task type: the one of that name if there is one, else chat."""
    return task_type if task_type in known else CHAT_ENVIRONMENT


def task_of(
    body: TaskBody, *, task_id: str, now_ms: int, policy: str, user_id: str | None, environments: Sequence[str]
) -> Task:
    """Builds the task of a body. Raises ValidationError."""
    verifier = None if body.verifier is None else Verifier(name=body.verifier.name, data=body.verifier.data)
    return Task(
        task_id=task_id,
        event_time=event_time_ms(body.created_at, now_ms),
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
        metadata={name: _text(value) for name, value in body.metadata.items()} | {TASK_TYPE_KEY: body.task_type},
    )


def _terms(body: TaskBody, *, verified: bool) -> Terms:
    terms = body.terms
    if terms is None:
        return Terms(rl=Source.RESULT if verified else Source.MANAGER, opd=Source.MANAGER)
    return Terms(
        rl=None if terms.rl is None else Source(terms.rl),
        opd=None if terms.opd is None else Source(terms.opd),
        opens=Opens(terms.opens),
        deadline_ms=terms.deadline_ms,
        opd_window_ms=terms.opd_window_ms,
    )


def task_of_result(
    body: ResultBody, *, task_id: str, now_ms: int, policy: str, user_id: str | None, environments: Sequence[str]
) -> Task:
    """Builds the task of a result from the result, for a task that is not on the log."""
    return Task(
        task_id=task_id,
        event_time=event_time_ms(body.created_at, now_ms),
        policy=_policy_of_version(body.model_version) or policy,
        environment=environment_of(body.task_type, environments),
        messages=(Message(role="user", content=body.prompt),),
        n_samples=body.sample_index + 1,
        sampling=_sampling(body.sampling),
        terms=Terms(rl=Source.MANAGER, opd=Source.MANAGER),
        target_worker=body.worker_id,
        user_id=user_id,
        metadata={TASK_TYPE_KEY: body.task_type},
    )


def _policy_of_version(model_version: str | None) -> str | None:
    try:
        return None if model_version is None else parse_policy_name(model_version)[0]
    except ValueError:
        return None


def result_of(body: ResultBody, task: Task, *, opened_at: int, now_ms: int) -> Result:
    """Builds the result of a body on a task. `opened_at`: append time of the task (ms). Raises ValidationError."""
    tokens = int32_bytes([token.id for token in body.response_tokens])
    # A policy version of ours (`policy@vN`), or the worker's own name for its model.
    is_policy = body.model_version is not None and _policy_of_version(body.model_version) is not None
    spans = (PolicySpan(start=0, policy=body.model_version),) if is_policy and body.model_version is not None else ()
    logprobs = float32_bytes([token.logprob for token in body.response_tokens])
    return Result(
        result_id=result_id(task.task_id, body.sample_index, spans, tokens, body.result),
        event_time=event_time_ms(body.created_at, now_ms),
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
        server_id="" if is_policy else body.model_version or "",
        elapsed_s=body.elapsed_seconds,
        recorded_by=RecordedBy.CLIENT,
    )


def _content(body: BridgeModel) -> str:
    """The content from which an id is derived, as JSON: the body without its time and without the fields that name the
    task or turn, which enter the id separately."""
    return body.model_dump_json(
        exclude={"created_at", "task_id", "completion_id", "session_id", "turn_index"}, exclude_defaults=True
    )


def feedback_of(body: FeedbackBody, task_id: str, result: Result | None, *, feedback_id: str, now_ms: int) -> Feedback:
    """Builds the feedback of a body. `task_id`, `feedback_id`: ids on the log; the latter is derived if it is "".
    `result`: the judged result, if known. Raises ValidationError."""
    return Feedback(
        feedback_id=feedback_id or derived_id("feedback", "bridge", task_id, _content(body)),
        event_time=event_time_ms(body.created_at, now_ms),
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
    """Builds a person's feedback on a turn; ids as for `feedback_of`. Raises ValidationError."""
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


def no_task_reason(event: SessionEvent) -> str:
    """Returns the reason why the application `sessions` makes no task of a turn, judged from the turn alone.

    "" if the turn shows no such reason.
    """
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
    """Builds the turn of a body; ids as on the log. The event id is derived if it is "". Raises ValidationError."""
    messages = [message.model_dump() for message in body.messages]
    normalised_messages = normalised(messages)
    return _session_event(
        session_event_id=session_event_id or derived_id("session", "bridge", session_id, _content(body)),
        event_time=event_time_ms(body.created_at, now_ms),
        session_id=session_id,
        turn_type=body.turn_type,
        worker_id=body.worker_id,
        model=body.model,
        policy=body.policy,
        messages=normalised_messages,
        request=unspoken({}, messages),
        response=body.response,
        done=body.done,
        user_id=user_id,
        gateway_id=gateway_id,
        finish_reason=body.finish_reason,
        elapsed_s=body.elapsed_seconds,
        tokens=(body.prompt_token_ids, body.response_token_ids, body.token_logprobs),
        sampling=body.sampling,
        original_messages=messages,
    )


def trace_event_of(
    trace: Trace, trace_id: str, *, session_id: str, user_id: str | None, gateway_id: str
) -> SessionEvent:
    """Builds the turn of a trace; ids as on the log. Raises ValidationError."""
    messages = (
        [{"role": "user", "content": trace.prompt}]
        if isinstance(trace.prompt, str)
        else [message.model_dump() for message in trace.prompt]
    )
    trace_fields = {"task": trace.task, "metadata": trace.metadata, "judgement": trace.judgement}
    return _session_event(
        session_event_id=trace_id,
        event_time=trace.recorded_at,
        session_id=session_id,
        turn_type="main",
        worker_id=trace.worker_id,
        model=trace.model,
        policy=_policy_of_version(trace.model) or "",
        messages=normalised(messages),
        request=_text({"trace": trace_fields} | json.loads(unspoken({}, messages) or "{}")),
        response=trace.response,
        done=trace.done,
        user_id=user_id,
        gateway_id=gateway_id,
        finish_reason="",
        elapsed_s=trace.elapsed_seconds,
        tokens=(trace.prompt_token_ids, trace.response_token_ids, trace.sampler_logprobs),
        sampling=trace.sampling,
        original_messages=messages,
    )


def _session_event(
    *,
    tokens: tuple[list[int], list[int], list[float]],
    sampling: TaskSamplingBody | None,
    original_messages: list[dict[str, Any]],
    **fields: Any,
) -> SessionEvent:
    """Builds a turn. `original_messages`: the original messages; `fields` holds them as text."""
    prompt, response, logprobs = tokens
    has_tokens = bool(prompt and response) and len(response) == len(logprobs)
    reason = UNSEEN if unseen(original_messages) else ""
    if not has_tokens or sampling is None:
        reason = "logged by a client without token ids, log-probs and sampling"
    return SessionEvent(
        **fields,
        decided_by="body",
        prompt_token_ids=int32_bytes(prompt if has_tokens else []),
        response_token_ids=int32_bytes(response if has_tokens else []),
        sampler_logprobs=float32_bytes(logprobs if has_tokens else []),
        logprobs_mode=LogprobsMode.PROCESSED if has_tokens else LogprobsMode.NONE,
        sampling=_sampling(sampling),
        not_trainable=reason,
        recorded_by=RecordedBy.CLIENT,
    )


def session_of_trace(trace_id: str) -> str:
    """The session of a trace: its id up to the last dot; the whole id if there is no dot (a session of one trace)."""
    return trace_id.rpartition(".")[0] or trace_id


def trace_feedback_of(
    body: TraceFeedback, feedback_id: str, task_id: str, author: str, result: Result | None
) -> Feedback:
    """Builds the feedback on a trace; ids as on the log. Raises ValidationError."""
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


def _datetime_of(ms: int) -> datetime:
    # Clamped to the range of datetime.
    return datetime.fromtimestamp(min(max(ms, 0), 253_402_300_799_999) / 1000, UTC)


def result_answer(result: Result, task_id: str) -> ResultAnswer:
    """Converts a result to an answer. `task_id`: the caller's name of the task."""
    user_messages = [message.content for message in result.task.messages if message.role == "user"]
    return ResultAnswer(
        task_id=task_id,
        worker_id=result.worker_id,
        prompt=user_messages[-1] if user_messages else "",
        result=result.text,
        status="success" if result.status is Status.OK else "failed",
        steps=list(result.steps),
        elapsed_seconds=result.elapsed_s,
        model_version=result.policy_spans[-1].policy if result.policy_spans else result.server_id or None,
        created_at=_datetime_of(result.event_time),
        result_id=result.result_id,
        sample_index=result.sample_index,
        finish_reason=result.finish_reason,
        error=result.error,
    )


def outcome_answer(outcome: Outcome) -> OutcomeAnswer:
    """Converts an outcome to an answer."""
    return OutcomeAnswer(
        sample_index=outcome.sample_index,
        kind=outcome.kind.value,
        reward=outcome.reward,
        components=outcome.components,
    )


def hint_answer(hint: Hint, feedback: Feedback | None) -> HintAnswer:
    """Converts a hint to an answer. `feedback`: the feedback that it was made from, if it is known."""
    said = None
    if feedback is not None:
        said = HintSource(source=feedback.source.value, author=feedback.author, text=feedback.text)
    return HintAnswer(
        sample_index=hint.sample.sample_index,
        kind=hint.kind.value,
        hints=list(hint.hints),
        made_by=hint.hinter,
        feedback_id=hint.feedback_id,
        said=said,
    )
