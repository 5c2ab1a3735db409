"""The bridge without HTTP: posts are acknowledged and idempotent by id, queries are answered from the log."""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from schemas import topics
from schemas.ids import derived_id, turn_task_id
from schemas.records import Feedback, SessionEvent, Task
from tentalis.gateway.api import log_ids, mapping
from tentalis.gateway.api.bodies import (
    Assigned,
    FeedbackBody,
    FeedbackTaken,
    HealthAnswer,
    ResultBody,
    ResultTaken,
    SessionBody,
    SessionLogged,
    TaskBody,
    TaskStatus,
    Trace,
    TraceFeedback,
    TracesTaken,
    TraceTaken,
    UserFeedbackBody,
)
from tentalis.gateway.api.errors import conflict_error, validation_as_api_errors
from tentalis.gateway.api.events import LiveEvents
from tentalis.gateway.api.groups import TRAINER, TRAINING_LOOP, components, halted
from tentalis.gateway.api.idempotent import IdempotentWriter
from tentalis.gateway.api.long_poll import LongPolls
from tentalis.gateway.api.lookups import Lookups
from tentalis.gateway.api.offset_index import IndexedRecord, OffsetIndex
from tentalis.gateway.api.record_log import LogBatch, RecordLog
from tentalis.gateway.api.training import TrainingStatus, TrainingView
from tentalis.gateway.calls.session_id import namespaced
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.http.key_limits import KeyLimits
from tentalis.gateway.http.keys import Caller
from tentalis.rewards import registry
from tentalis.rewards.registry import ENVIRONMENTS
from tentalis.text.timestamps import now_ms

LONGEST_POLL_S = 30.0
HEALTH_TIMEOUT_S = 2.0
HORIZON_MS = 3_600_000
MAX_RECORDS = 100_000
_TRACE_ITEM: TypeAdapter[Trace | TraceFeedback] = TypeAdapter(
    Annotated[Trace | TraceFeedback, Field(discriminator="kind")]
)


class Bridge:
    """The service of one gateway.

    Args:
        policy: the default policy of tasks.
        policy_owners: the users of each personal policy; other users' keys cannot name it.
        horizon_ms: maximum age (by append time) of records that are found: for the status of a task, for feedback that
            names a turn, and for detecting a repeated post.
        max_records: maximum number of records in the offset index.
        limits: those of every key without own limits; of them, `feedback_per_turn`.
    """

    def __init__(
        self,
        log: RecordLog,
        *,
        gateway_id: str,
        policy: str,
        policy_owners: Mapping[str, frozenset[str]] = MappingProxyType({}),
        horizon_ms: int = HORIZON_MS,
        max_records: int = MAX_RECORDS,
        limits: KeyLimits = KeyLimits(),
    ) -> None:
        self._limits = limits
        self._feedback_in_flight: Counter[str] = Counter()
        self._log = log
        self._gateway_id, self._policy, self._policy_owners = gateway_id, policy, policy_owners
        self._offset_index = OffsetIndex(max_records, horizon_ms)
        self._training = TrainingView()
        self.events = LiveEvents()
        self._long_polls = LongPolls()
        self._lookups = Lookups(log, self._offset_index)
        self._writer = IdempotentWriter(log, self._offset_index, self._index)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follows the log while the context is open."""
        self._log.start(self._apply_batch, lambda: self.events.has_clients)
        try:
            yield
        finally:
            await asyncio.to_thread(self._log.close)

    def _apply_batch(self, batch: LogBatch) -> None:
        for ref, key in batch.refs:
            self._index(ref, key)
        for ref, record in batch.records:
            self._training.apply(record)
            self.events.publish(ref, record)

    def _index(self, ref: IndexedRecord, key: bytes) -> None:
        if ref.topic == topics.OUTCOMES:
            # Indexed by task id: the key is task_id/sample_index. Longer keys (late and superseded halves) are skipped.
            task_id, _, index = key.rpartition(b"/")
            if not index.isdigit():
                return
            key = task_id
        if self._offset_index.add(ref, key, now_ms()) and ref.topic == topics.RESULTS:
            self._long_polls.wake(ref.topic, key)

    # Turns that responses continue: see tentalis.gateway.calls.earlier_turns.TurnSource

    @property
    def horizon_s(self) -> float:
        """See TurnSource."""
        return self._offset_index.horizon_ms / 1000

    def knows_turn(self, event_id: str) -> bool:
        """See TurnSource."""
        return self._lookups.knows_turn(event_id)

    async def turn(self, event_id: str) -> SessionEvent | None:
        """See TurnSource."""
        return await self._lookups.turn(event_id)

    # Posts

    async def assign(self, body: TaskBody, caller: Caller, user_id: str, idempotency_key: str) -> Assigned:
        """POST /tasks/assign. Raises APIError."""
        given_id = body.task_id or _new_task_id(caller, idempotency_key)
        with validation_as_api_errors():
            task = mapping.task_of(
                body,
                task_id=log_ids.log_id(caller, given_id),
                now_ms=now_ms(),
                policy=self._policy,
                user_id=user_id or None,
                environments=list(ENVIRONMENTS),
            )
            registry.check(task)
        self._check_policy_access(caller, task.policy)
        await self._writer.append_once(topics.TASKS, task)
        return Assigned(task_id=given_id, topic=topics.TASKS)

    async def result(self, body: ResultBody, caller: Caller, user_id: str) -> ResultTaken:
        """POST /tasks/result. Raises APIError."""
        task_id = await self._lookups.log_task_id(body.task_id, caller)
        async with self._writer.serialised(topics.RESULTS, task_id):
            task, opened_at = await self._task_of(body, task_id, caller, user_id)
            _check_owner(caller, task.user_id, f"the task {body.task_id}")
            with validation_as_api_errors():
                result = mapping.result_of(body, task, opened_at=opened_at, now_ms=now_ms())
            for existing in await self._lookups.results(task_id):
                if (existing.sample_index, existing.worker_id) != (result.sample_index, result.worker_id):
                    continue
                if not mapping.same_content(existing, result):
                    raise conflict_error(
                        f"{result.worker_id} gave another result for sample {result.sample_index} of this task"
                    )
                return ResultTaken(task_id=body.task_id, topic=topics.RESULTS, result_id=existing.result_id)
            await self._writer.append(topics.RESULTS, result)
        return ResultTaken(task_id=body.task_id, topic=topics.RESULTS, result_id=result.result_id)

    async def _task_of(self, body: ResultBody, task_id: str, caller: Caller, user_id: str) -> tuple[Task, int]:
        """Returns the task of a result, and the time at which it was opened (ms)."""
        found = await self._lookups.task(task_id)
        if found is not None:
            ref, task = found
            return task, ref.appended_at
        with validation_as_api_errors():
            task = mapping.task_of_result(
                body,
                task_id=task_id,
                now_ms=now_ms(),
                policy=self._policy,
                user_id=user_id or None,
                environments=list(ENVIRONMENTS),
            )
        self._check_policy_access(caller, task.policy)
        return task, now_ms()

    async def feedback(self, body: FeedbackBody, caller: Caller) -> FeedbackTaken:
        """POST /feedback. Raises APIError."""
        task_id = await self._lookups.log_task_id(body.task_id, caller)
        result = await self._lookups.feedback_target(task_id, body.sample_index, caller)
        with validation_as_api_errors():
            feedback = mapping.feedback_of(
                body, task_id, result, feedback_id=_log_id_if_given(caller, body.feedback_id), now_ms=now_ms()
            )
        await self._writer.append_feedback(feedback)
        return FeedbackTaken(task_id=body.task_id, feedback_id=body.feedback_id or feedback.feedback_id)

    async def user_feedback(self, body: UserFeedbackBody, caller: Caller, user_id: str) -> FeedbackTaken:
        """POST /v1/feedback. Raises APIError."""
        if body.task_id:
            task_id = await self._lookups.log_task_id(body.task_id, caller)
            result = await self._lookups.feedback_target(task_id, body.sample_index, caller)
        else:  # the turn is looked up in the user's own session; its result may not be on the log yet
            task_id = await self._lookups.task_id_of_turn(body, caller, user_id)
            result = await self._lookups.result_of(task_id, body.sample_index)
        with validation_as_api_errors():
            feedback = mapping.user_feedback_of(
                body,
                task_id,
                user_id or caller.key_id,
                result,
                feedback_id=_log_id_if_given(caller, body.feedback_id),
                now_ms=now_ms(),
            )
        with self._feedback_slot(feedback, caller):
            await self._writer.append_feedback(feedback)
        return FeedbackTaken(task_id=body.task_id or task_id, feedback_id=body.feedback_id or feedback.feedback_id)

    async def log_session(self, body: SessionBody, caller: Caller, user_id: str) -> SessionLogged:
        """POST /sessions/log. Raises APIError."""
        with validation_as_api_errors():
            event = mapping.session_event_of(
                body,
                session_id=namespaced(caller.namespace(user_id), body.session_id),
                session_event_id=_log_id_if_given(caller, body.session_event_id),
                user_id=user_id or None,
                now_ms=now_ms(),
                gateway_id=self._gateway_id,
            )
        self._check_policy_access(caller, event.policy)
        await self._writer.append_once(topics.SESSIONS, event)
        event_id = body.session_event_id or event.session_event_id
        return SessionLogged(session_id=body.session_id, session_event_id=event_id)

    async def traces(self, items: Sequence[dict[str, Any]], caller: Caller, user_id: str) -> TracesTaken:
        """POST /v1/traces: each item separately. Raises APIError (503); then no item counts as written."""
        answers = await asyncio.gather(*(self._trace(item, caller, user_id) for item in items), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return TracesTaken(items=[answer for answer in answers if isinstance(answer, TraceTaken)])

    async def _trace(self, item: dict[str, Any], caller: Caller, user_id: str) -> TraceTaken:
        item_id = _item_id(item)
        try:
            with validation_as_api_errors():
                trace = _TRACE_ITEM.validate_python(item)
                session_id = namespaced(caller.namespace(user_id), mapping.session_of_trace(trace.trace_id))
                trace_id = log_ids.log_id(caller, trace.trace_id)
                if isinstance(trace, Trace):
                    event = mapping.trace_event_of(
                        trace, trace_id, session_id=session_id, user_id=user_id or None, gateway_id=self._gateway_id
                    )
            if isinstance(trace, Trace):
                self._check_policy_access(caller, event.policy)
                await self._writer.append_once(topics.SESSIONS, event)
                return TraceTaken(id=trace.trace_id, status="published")
            task_id = turn_task_id(session_id, trace_id)
            # The session id holds the user, so no ownership check is needed; the result may not be on the log yet.
            result = await self._lookups.result_of(task_id, None)
            with validation_as_api_errors():
                feedback_id = log_ids.log_id(caller, trace.feedback_id)
                feedback = mapping.trace_feedback_of(trace, feedback_id, task_id, user_id or caller.key_id, result)
            with self._feedback_slot(feedback, caller):
                await self._writer.append_feedback(feedback)
            return TraceTaken(id=trace.feedback_id, status="published")
        except APIError as error:
            if error.status >= 500:
                raise
            return TraceTaken(id=item_id, status="refused", error=str(error))

    @contextmanager
    def _feedback_slot(self, feedback: Feedback, caller: Caller) -> Iterator[None]:
        """Keeps a place for feedback while it is written, so that what comes at the same time counts too. Raises
        APIError (429) for new feedback on a task that has as much as is allowed."""
        task_id = feedback.task_id
        known = len(self._offset_index.by_key(topics.FEEDBACK, task_id)) + self._feedback_in_flight[task_id]
        repeated = self._offset_index.by_id(topics.FEEDBACK, feedback.feedback_id) is not None
        if known >= self._limits.replaced_by(caller.limits).feedback_per_turn and not repeated:
            raise APIError(429, f"this turn has {known} feedback records, which is the limit", "rate_limit_error")
        self._feedback_in_flight[task_id] += 1
        try:
            yield
        finally:
            self._feedback_in_flight[task_id] -= 1
            if not self._feedback_in_flight[task_id]:
                del self._feedback_in_flight[task_id]

    def _check_policy_access(self, caller: Caller, policy: str) -> None:
        """Raises APIError (403) for another user's personal policy."""
        owners = self._policy_owners.get(policy)
        if caller.user is not None and owners is not None and caller.user not in owners:
            raise APIError(403, f"the policy {policy} belongs to another user", "permission_error")

    # Queries

    async def status(self, given_id: str, seconds: float, caller: Caller) -> TaskStatus:
        """GET /tasks/{id}/status: waits up to `seconds` for the results of a known task. Raises APIError (503)."""
        deadline = asyncio.get_running_loop().time() + seconds
        task_id = await self._lookups.log_task_id(given_id, caller)
        while True:
            previous = len(self._offset_index.by_key(topics.RESULTS, task_id))
            status, required = await self._status(task_id, given_id, caller)
            if status.status == "completed" or not status.known:
                return status
            # Results are read again only if they may complete the task, or once the time is over.
            while (count := len(self._offset_index.by_key(topics.RESULTS, task_id))) < required or count == previous:
                remaining = deadline - asyncio.get_running_loop().time()
                if remaining <= 0 and count == previous:
                    return status
                if remaining <= 0:
                    return (await self._status(task_id, given_id, caller))[0]
                with self._long_polls.next_record(topics.RESULTS, task_id) as future:
                    if future is None:
                        return status
                    await asyncio.wait([future], timeout=remaining)

    async def _status(self, task_id: str, given_id: str, caller: Caller) -> tuple[TaskStatus, int]:
        """Returns the current status, and the least number of results that the task needs."""
        results = await self._lookups.results(task_id)
        if not caller.sees_everybody and not await self._lookups.is_owned_by(task_id, results, caller.user):
            return TaskStatus(task_id=given_id, status="pending", known=False), 1
        if not results:
            return TaskStatus(task_id=given_id, status="pending", known=self._lookups.has_task(task_id)), 1
        # As in the join, the first result of a sample counts.
        first_by_sample = {result.sample_index: result for result in reversed(results)}
        answers = [mapping.result_answer(first_by_sample[index], given_id) for index in sorted(first_by_sample)]
        required = max(result.task.n_samples for result in results)
        complete = len(first_by_sample) == required
        newest_outcomes = await self._lookups.outcomes(task_id)
        status = TaskStatus(
            task_id=given_id,
            status="completed" if complete else "pending",
            known=True,
            result=answers[0] if complete else None,
            results=answers,
            outcomes=[mapping.outcome_answer(newest_outcomes[index]) for index in sorted(newest_outcomes)],
            hints=[mapping.hint_answer(hint, feedback) for hint, feedback in await self._lookups.hints(task_id)],
        )
        return status, required

    async def training(self) -> TrainingStatus:
        """GET /training/status."""
        groups, age_s = await self._log.consumer_groups()
        members = None
        if groups is not None:
            members = {
                name.removeprefix(TRAINER): answer.members
                for name, answer in groups.items()
                if name.startswith(TRAINER)
            }
        states: dict[str, Any] = {}
        for name, group in components().items():
            answer = None if groups is None else groups.get(group)
            states[name] = "unknown" if groups is None else "inactive" if answer is None else answer.state
        states[TRAINING_LOOP] = "unknown" if members is None else "active" if any(members.values()) else "inactive"
        now = now_ms()
        return TrainingStatus(
            status="ok" if self._log.stale_reason is None else "stale",
            components=states,
            runs=self._training.runs(now, members),
            policies=self._training.policies(now),
            consumer_groups=dict(groups or {}),
            age_s=None if groups is None else age_s,
        )

    async def health(self) -> HealthAnswer:
        """GET /health."""
        stale_reason, halted = self._log.stale_reason, await self._halted()
        reasons = [stale_reason] if stale_reason else []
        if halted:
            reasons.append(f"no process does the work of {', '.join(halted)}: `tentalis status` shows the cause")
        return HealthAnswer(
            status="degraded" if reasons else "ok",
            reason="; ".join(reasons),
            halted=halted,
            facts=len(self._offset_index),
        )

    async def _halted(self) -> list[str]:
        """The stream applications that have worked before and have no running process now, by name."""
        try:
            async with asyncio.timeout(HEALTH_TIMEOUT_S):
                groups, _ = await self._log.consumer_groups()
        except TimeoutError:  # the log does not answer either, which `stale_reason` reports
            return []
        return halted(groups or {})

    @property
    def stale_reason(self) -> str | None:
        """The reason why the log cannot be read now, None if it can."""
        return self._log.stale_reason


def _check_owner(caller: Caller, user_id: str | None, what: str) -> None:
    if caller.user is not None and caller.user != user_id:
        raise APIError(403, f"{what} belongs to another user", "permission_error")


def _new_task_id(caller: Caller, idempotency_key: str) -> str:
    return derived_id("bridge", caller.key_id, idempotency_key) if idempotency_key else str(uuid.uuid4())


def _log_id_if_given(caller: Caller, given_id: str) -> str:
    """The id on the log for an id in a body; "" if the body gives none."""
    return given_id and log_ids.log_id(caller, given_id)


def _item_id(item: dict[str, Any]) -> str:
    """The id that an item gives for itself, even if the item is invalid."""
    return str(item.get("feedback_id") or item.get("trace_id") or "")[:200]


def not_recorded(items: Sequence[dict[str, Any]]) -> TracesTaken:
    """The answer for items that are not to be recorded."""
    return TracesTaken(items=[TraceTaken(id=_item_id(item), status="not_recorded") for item in items])
