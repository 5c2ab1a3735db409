"""What the bridge does, without HTTP: each post once by its id and acknowledged, each question from the log."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from schemas import topics
from schemas.ids import derived_id, turn_task_id
from schemas.records import Task
from tentalis import rewards
from tentalis.gateway.bridge import mapping, names
from tentalis.gateway.bridge.events import Events
from tentalis.gateway.bridge.facts import Fact, Facts
from tentalis.gateway.bridge.groups import COMPONENTS, TRAINER, TRAINING_LOOP
from tentalis.gateway.bridge.lookups import Lookups
from tentalis.gateway.bridge.once import Once
from tentalis.gateway.bridge.polls import Polls
from tentalis.gateway.bridge.ports import Found, TheLog
from tentalis.gateway.bridge.refusals import conflict, valid
from tentalis.gateway.bridge.shapes import (
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
from tentalis.gateway.bridge.training import Training, TrainingStatus
from tentalis.gateway.failure import Refused
from tentalis.gateway.keys import Caller
from tentalis.gateway.sessions_of import namespaced
from tentalis.kafka import now_ms
from tentalis.rewards.registry import ENVIRONMENTS

LONGEST_POLL_S = 30.0
HORIZON_MS = 3_600_000
MOST_FACTS = 100_000
_ITEM: TypeAdapter[Trace | TraceFeedback] = TypeAdapter(Annotated[Trace | TraceFeedback, Field(discriminator="kind")])


class Bridge:
    """The service of one gateway.

    Args:
        policy: of tasks that name none.
        personal: by policy that is one's own, whose it is: another's key cannot name it.
        horizon_ms: age (append time) up to which records are found again: for the status of a task, for feedback that
            names a turn, and for telling a post that comes again.
        most_facts: records of which it is remembered where they lie.
    """

    def __init__(
        self,
        log: TheLog,
        *,
        gateway_id: str,
        policy: str,
        personal: Mapping[str, frozenset[str]] = MappingProxyType({}),
        horizon_ms: int = HORIZON_MS,
        most_facts: int = MOST_FACTS,
    ) -> None:
        self._log = log
        self._gateway_id, self._policy, self._personal = gateway_id, policy, personal
        self._facts = Facts(most_facts, horizon_ms)
        self._training = Training()
        self.events = Events()
        self._polls = Polls()
        self._lookups = Lookups(log, self._facts)
        self._once = Once(log, self._facts, self._note)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follows the log while it is open."""
        self._log.start(self._take, lambda: self.events.wanted)
        try:
            yield
        finally:
            await asyncio.to_thread(self._log.close)

    def _take(self, found: Found) -> None:
        for fact, key in found.facts:
            self._note(fact, key)
        for fact, record in found.records:
            self._training.apply(record)
            self.events.tell(fact, record)

    def _note(self, fact: Fact, key: bytes) -> None:
        if fact.topic == topics.OUTCOMES:
            # Under the task's id: task_id/sample_index; those of late and superseded halves have more behind it.
            task_id, _, index = key.rpartition(b"/")
            if not index.isdigit():
                return
            key = task_id
        if self._facts.add(fact, key, now_ms()) and fact.topic == topics.RESULTS:
            self._polls.arrived(fact.topic, key)

    # Posts

    async def assign(self, body: TaskBody, caller: Caller, user_id: str, idempotency_key: str) -> Assigned:
        """POST /tasks/assign. Raises Refused."""
        given = body.task_id or _drawn(caller, idempotency_key)
        with valid():
            task = mapping.task_of(
                body,
                task_id=names.on_log(caller, given),
                now_ms=now_ms(),
                policy=self._policy,
                user_id=user_id or None,
                environments=list(ENVIRONMENTS),
            )
            rewards.check(task)
        self._may_name(caller, task.policy)
        await self._once.put(topics.TASKS, task)
        return Assigned(task_id=given, topic=topics.TASKS)

    async def result(self, body: ResultBody, caller: Caller, user_id: str) -> ResultTaken:
        """POST /tasks/result. Raises Refused."""
        task_id = await self._lookups.named(body.task_id, caller)
        async with self._once.alone(topics.RESULTS, task_id):
            task, opened_at = await self._task_of(body, task_id, caller, user_id)
            _owned(caller, task.user_id, f"the task {body.task_id}")
            with valid():
                result = mapping.result_of(body, task, opened_at=opened_at, now_ms=now_ms())
            for before in await self._lookups.results(task_id):
                if (before.sample_index, before.worker_id) != (result.sample_index, result.worker_id):
                    continue
                if not mapping.same(before, result):
                    raise conflict(
                        f"{result.worker_id} gave another result for sample {result.sample_index} of this task"
                    )
                return ResultTaken(task_id=body.task_id, topic=topics.RESULTS, result_id=before.result_id)
            await self._once.append(topics.RESULTS, result)
        return ResultTaken(task_id=body.task_id, topic=topics.RESULTS, result_id=result.result_id)

    async def _task_of(self, body: ResultBody, task_id: str, caller: Caller, user_id: str) -> tuple[Task, int]:
        """The task that a result came for, and when it was opened (ms)."""
        found = await self._lookups.task(task_id)
        if found is not None:
            fact, task = found
            return task, fact.appended
        with valid():
            task = mapping.task_of_result(
                body,
                task_id=task_id,
                now_ms=now_ms(),
                policy=self._policy,
                user_id=user_id or None,
                environments=list(ENVIRONMENTS),
            )
        self._may_name(caller, task.policy)
        return task, now_ms()

    async def feedback(self, body: FeedbackBody, caller: Caller) -> FeedbackTaken:
        """POST /feedback. Raises Refused."""
        task_id = await self._lookups.named(body.task_id, caller)
        result = await self._lookups.spoken_of(task_id, body.sample_index, caller)
        with valid():
            feedback = mapping.feedback_of(
                body, task_id, result, feedback_id=_given(caller, body.feedback_id), now_ms=now_ms()
            )
        await self._once.say(feedback)
        return FeedbackTaken(task_id=body.task_id, feedback_id=body.feedback_id or feedback.feedback_id)

    async def user_feedback(self, body: UserFeedbackBody, caller: Caller, user_id: str) -> FeedbackTaken:
        """POST /v1/feedback. Raises Refused."""
        if body.task_id:
            task_id = await self._lookups.named(body.task_id, caller)
            result = await self._lookups.spoken_of(task_id, body.sample_index, caller)
        else:  # found in a session of theirs; its result may still be on its way
            task_id = await self._lookups.turn(body, caller, user_id)
            result = await self._lookups.result_of(task_id, body.sample_index)
        with valid():
            feedback = mapping.user_feedback_of(
                body,
                task_id,
                user_id or caller.key_id,
                result,
                feedback_id=_given(caller, body.feedback_id),
                now_ms=now_ms(),
            )
        await self._once.say(feedback)
        return FeedbackTaken(task_id=body.task_id or task_id, feedback_id=body.feedback_id or feedback.feedback_id)

    async def log_session(self, body: SessionBody, caller: Caller, user_id: str) -> SessionLogged:
        """POST /sessions/log. Raises Refused."""
        with valid():
            event = mapping.session_event_of(
                body,
                session_id=namespaced(caller.namespace(user_id), body.session_id),
                session_event_id=_given(caller, body.session_event_id),
                user_id=user_id or None,
                now_ms=now_ms(),
                gateway_id=self._gateway_id,
            )
        self._may_name(caller, event.policy)
        await self._once.put(topics.SESSIONS, event)
        shown = body.session_event_id or event.session_event_id
        return SessionLogged(session_id=body.session_id, session_event_id=shown)

    async def traces(self, items: Sequence[dict[str, Any]], caller: Caller, user_id: str) -> TracesTaken:
        """POST /v1/traces: every item by itself. Raises Refused (503): then none is to be taken for written."""
        taken = await asyncio.gather(*(self._trace(item, caller, user_id) for item in items), return_exceptions=True)
        for each in taken:
            if isinstance(each, BaseException):
                raise each
        return TracesTaken(items=[each for each in taken if isinstance(each, TraceTaken)])

    async def _trace(self, item: dict[str, Any], caller: Caller, user_id: str) -> TraceTaken:
        name = _name(item)
        try:
            with valid():
                read = _ITEM.validate_python(item)
                session_id = namespaced(caller.namespace(user_id), mapping.trace_session(read.trace_id))
                trace_id = names.on_log(caller, read.trace_id)
                if isinstance(read, Trace):
                    event = mapping.trace_event_of(
                        read, trace_id, session_id=session_id, user_id=user_id or None, gateway_id=self._gateway_id
                    )
            if isinstance(read, Trace):
                self._may_name(caller, event.policy)
                await self._once.put(topics.SESSIONS, event)
                return TraceTaken(id=read.trace_id, status="published")
            task_id = turn_task_id(session_id, trace_id)
            # The turn's own session says whose it is; its result may still be on its way.
            result = await self._lookups.result_of(task_id, None)
            with valid():
                feedback_id = names.on_log(caller, read.feedback_id)
                feedback = mapping.trace_feedback_of(read, feedback_id, task_id, user_id or caller.key_id, result)
            await self._once.say(feedback)
            return TraceTaken(id=read.feedback_id, status="published")
        except Refused as error:
            if error.status >= 500:
                raise
            return TraceTaken(id=name, status="refused", error=str(error))

    def _may_name(self, caller: Caller, policy: str) -> None:
        """Raises Refused (403) for a policy that is another user's own."""
        owners = self._personal.get(policy)
        if caller.user is not None and owners is not None and caller.user not in owners:
            raise Refused(403, f"the policy {policy} is another user's own", "permission_error")

    # Questions

    async def status(self, given: str, seconds: float, caller: Caller) -> TaskStatus:
        """GET /tasks/{id}/status: waits for up to so many seconds for the results of a task that is known. Raises
        Refused (503)."""
        deadline = asyncio.get_running_loop().time() + seconds
        task_id = await self._lookups.named(given, caller)
        while True:
            seen = len(self._facts.of_key(topics.RESULTS, task_id))
            status, needed = await self._status(task_id, given, caller)
            if status.status == "completed" or not status.known:
                return status
            # What is not enough to complete it is not worth another look, unless the time is over.
            while (have := len(self._facts.of_key(topics.RESULTS, task_id))) < needed or have == seen:
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0 and have == seen:
                    return status
                if left <= 0:
                    return (await self._status(task_id, given, caller))[0]
                with self._polls.next(topics.RESULTS, task_id) as arrived:
                    if arrived is None:
                        return status
                    await asyncio.wait([arrived], timeout=left)

    async def _status(self, task_id: str, given: str, caller: Caller) -> tuple[TaskStatus, int]:
        """The status as it is, and how many results the task needs at least."""
        results = await self._lookups.results(task_id)
        if caller.user is not None and not await self._lookups.is_theirs(task_id, results, caller.user):
            return TaskStatus(task_id=given, status="pending", known=False), 1
        if not results:
            return TaskStatus(task_id=given, status="pending", known=self._lookups.known(task_id)), 1
        # The join binds a sample to its first result, and so does this.
        first = {result.sample_index: result for result in reversed(results)}
        answers = [mapping.answer_of(first[index], given) for index in sorted(first)]
        needed = max(result.task.n_samples for result in results)
        complete = len(first) == needed
        latest = await self._lookups.outcomes(task_id)
        status = TaskStatus(
            task_id=given,
            status="completed" if complete else "pending",
            known=True,
            result=answers[0] if complete else None,
            results=answers,
            outcomes=[mapping.outcome_answer(latest[index]) for index in sorted(latest)],
        )
        return status, needed

    async def training(self) -> TrainingStatus:
        """GET /training/status."""
        groups, age_s = await self._log.groups()
        members = None
        if groups is not None:
            members = {
                name.removeprefix(TRAINER): each.members for name, each in groups.items() if name.startswith(TRAINER)
            }
        components: dict[str, Any] = {}
        for name, group in COMPONENTS.items():
            found = None if groups is None else groups.get(group)
            components[name] = "unknown" if groups is None else "inactive" if found is None else found.state
        components[TRAINING_LOOP] = "unknown" if members is None else "active" if any(members.values()) else "inactive"
        now = now_ms()
        return TrainingStatus(
            status="ok" if self._log.trouble is None else "stale",
            components=components,
            runs=self._training.runs(now, members),
            policies=self._training.policies(now),
            consumer_groups=dict(groups or {}),
            age_s=None if groups is None else age_s,
        )

    def health(self) -> HealthAnswer:
        """GET /health."""
        trouble = self._log.trouble
        return HealthAnswer(
            status="ok" if trouble is None else "degraded", reason=trouble or "", facts=len(self._facts)
        )

    @property
    def trouble(self) -> str | None:
        """Why it cannot answer from the log now, None if it can."""
        return self._log.trouble


def _owned(caller: Caller, user_id: str | None, what: str) -> None:
    if caller.user is not None and caller.user != user_id:
        raise Refused(403, f"{what} is not this key's user's", "permission_error")


def _drawn(caller: Caller, idempotency_key: str) -> str:
    return derived_id("bridge", caller.key_id, idempotency_key) if idempotency_key else str(uuid.uuid4())


def _given(caller: Caller, name: str) -> str:
    """The id on the log of one that a body gives, "" for none."""
    return name and names.on_log(caller, name)


def _name(item: dict[str, Any]) -> str:
    """What an item calls itself, whatever else it is."""
    return str(item.get("feedback_id") or item.get("trace_id") or "")[:200]


def not_recorded(items: Sequence[dict[str, Any]]) -> TracesTaken:
    """What is answered to items that are not to be written down."""
    return TracesTaken(items=[TraceTaken(id=_name(item), status="not_recorded") for item in items])
