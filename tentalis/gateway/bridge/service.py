"""What the bridge does, without HTTP: each post once by its id and acknowledged, each question from the log."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from schemas import topics
from schemas.ids import derived_id, turn_task_id
from schemas.records import Feedback, Outcome, Record, Result, SessionEvent, Task
from tentalis import rewards
from tentalis.gateway.bridge import mapping
from tentalis.gateway.bridge.events import Events
from tentalis.gateway.bridge.facts import Fact, Facts, short
from tentalis.gateway.bridge.groups import COMPONENTS, TRAINER, TRAINING_LOOP
from tentalis.gateway.bridge.ports import Found, TheLog
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
MOST_POLLS = 1000
# Results of one task that are looked at; more come only of workers that answer again and again.
MOST_RESULTS = 512
HORIZON_MS = 3_600_000
MOST_FACTS = 100_000
_PREFIXES = ("chatcmpl-", "cmpl-", "msg_")
_ITEM: TypeAdapter[Trace | TraceFeedback] = TypeAdapter(Annotated[Trace | TraceFeedback, Field(discriminator="kind")])


class Bridge:
    """The service of one gateway.

    Args:
        policy: of tasks that name none.
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
        horizon_ms: int = HORIZON_MS,
        most_facts: int = MOST_FACTS,
    ) -> None:
        self._log = log
        self._gateway_id, self._policy = gateway_id, policy
        self._facts = Facts(most_facts, horizon_ms)
        self._training = Training()
        self.events = Events()
        self._polls: dict[bytes, set[asyncio.Future[None]]] = {}
        self._waiting = 0
        self._locks: dict[tuple[str, str], list[Any]] = {}

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
            for poll in self._polls.get(short(fact.topic, key), ()):
                if not poll.done():
                    poll.set_result(None)

    # Posts

    async def assign(self, body: TaskBody, caller: Caller, user_id: str, idempotency_key: str) -> Assigned:
        """POST /tasks/assign. Raises Refused."""
        task_id = body.task_id or _drawn(caller, idempotency_key)
        with _valid():
            task = mapping.task_of(
                body,
                task_id=task_id,
                now_ms=now_ms(),
                policy=self._policy,
                user_id=user_id or None,
                environments=list(ENVIRONMENTS),
            )
            rewards.check(task)
        await self._once(topics.TASKS, task)
        return Assigned(task_id=task_id, topic=topics.TASKS)

    async def result(self, body: ResultBody, caller: Caller, user_id: str) -> ResultTaken:
        """POST /tasks/result. Raises Refused."""
        async with self._alone(topics.RESULTS, body.task_id):
            task, opened_at = await self._task_of(body, user_id)
            _owned(caller, task.user_id, f"the task {body.task_id}")
            with _valid():
                result = mapping.result_of(body, task, opened_at=opened_at, now_ms=now_ms())
            for before in await self._results(body.task_id):
                if (before.sample_index, before.worker_id) != (result.sample_index, result.worker_id):
                    continue
                if not mapping.same(before, result):
                    raise _conflict(
                        f"{result.worker_id} gave another result for sample {result.sample_index} of this task"
                    )
                return ResultTaken(task_id=body.task_id, topic=topics.RESULTS, result_id=before.result_id)
            await self._append(topics.RESULTS, result)
        return ResultTaken(task_id=body.task_id, topic=topics.RESULTS, result_id=result.result_id)

    async def _task_of(self, body: ResultBody, user_id: str) -> tuple[Task, int]:
        """The task that a result came for, and when it was opened (ms)."""
        found = await self._log.records(self._facts.of_key(topics.TASKS, body.task_id)[:1], Task)
        if found:
            fact, task = found[0]
            return task, fact.appended
        with _valid():
            task = mapping.task_of_result(
                body,
                now_ms=now_ms(),
                policy=self._policy,
                user_id=user_id or None,
                environments=list(ENVIRONMENTS),
            )
        return task, now_ms()

    async def feedback(self, body: FeedbackBody, caller: Caller) -> FeedbackTaken:
        """POST /feedback. Raises Refused."""
        result = await self._spoken_of(body.task_id, body.sample_index, caller)
        with _valid():
            feedback = mapping.feedback_of(body, result, now_ms=now_ms())
        await self._say(feedback)
        return FeedbackTaken(task_id=body.task_id, feedback_id=feedback.feedback_id)

    async def user_feedback(self, body: UserFeedbackBody, caller: Caller, user_id: str) -> FeedbackTaken:
        """POST /v1/feedback. Raises Refused."""
        if body.task_id:
            task_id = body.task_id
            result = await self._spoken_of(task_id, body.sample_index, caller)
        else:  # found in a session of theirs; its result may still be on its way
            task_id = await self._turn(body, caller, user_id)
            result = await self._result_of(task_id, body.sample_index)
        with _valid():
            feedback = mapping.user_feedback_of(body, task_id, user_id or caller.key_id, result, now_ms=now_ms())
        await self._say(feedback)
        return FeedbackTaken(task_id=task_id, feedback_id=feedback.feedback_id)

    async def log_session(self, body: SessionBody, caller: Caller, user_id: str) -> SessionLogged:
        """POST /sessions/log. Raises Refused."""
        with _valid():
            event = mapping.session_event_of(
                body,
                session_id=namespaced(caller.namespace(user_id), body.session_id),
                user_id=user_id or None,
                now_ms=now_ms(),
                gateway_id=self._gateway_id,
            )
        await self._once(topics.SESSIONS, event)
        return SessionLogged(session_id=body.session_id, session_event_id=event.session_event_id)

    async def traces(self, items: Sequence[dict[str, Any]], caller: Caller, user_id: str) -> TracesTaken:
        """POST /v1/traces: every item by itself. Raises Refused (503): then none is to be taken for written."""
        taken = await asyncio.gather(*(self._trace(item, caller, user_id) for item in items), return_exceptions=True)
        for each in taken:
            if isinstance(each, BaseException):
                raise each
        return TracesTaken(items=[each for each in taken if isinstance(each, TraceTaken)])

    async def _trace(self, item: dict[str, Any], caller: Caller, user_id: str) -> TraceTaken:
        name = str(item.get("feedback_id") or item.get("trace_id") or "")[:200]
        try:
            with _valid():
                read = _ITEM.validate_python(item)
                session_id = namespaced(caller.namespace(user_id), mapping.trace_session(read.trace_id))
                if isinstance(read, Trace):
                    event = mapping.trace_event_of(
                        read, session_id=session_id, user_id=user_id or None, gateway_id=self._gateway_id
                    )
            if isinstance(read, Trace):
                await self._once(topics.SESSIONS, event)
                return TraceTaken(id=read.trace_id, status="published")
            task_id = turn_task_id(session_id, read.trace_id)
            # The turn's own session says whose it is; its result may still be on its way.
            result = await self._result_of(task_id, None)
            with _valid():
                feedback = mapping.trace_feedback_of(read, task_id, user_id or caller.key_id, result)
            await self._say(feedback)
            return TraceTaken(id=read.feedback_id, status="published")
        except Refused as error:
            if error.status >= 500:
                raise
            return TraceTaken(id=name, status="refused", error=str(error))

    async def _say(self, feedback: Feedback) -> None:
        """Feedback that does not fit with its result goes without it: it is paired with it again (docs/feedback.md)."""
        try:
            await self._once(topics.FEEDBACK, feedback)
        except Refused as error:
            if error.status != 413 or feedback.result is None:
                raise
            await self._once(topics.FEEDBACK, feedback.model_copy(update={"result": None}))

    async def _once(self, topic: str, record: Record) -> None:
        """Appends a record, unless it is on the log. Raises Refused: 409 if another of its id is."""
        async with self._alone(topic, record.event_id):
            fact = self._facts.of_id(topic, record.event_id)
            for _, before in await self._log.records([] if fact is None else [fact], type(record)):
                if not mapping.same(before, record):
                    raise _conflict(f"the id {record.event_id} stands for something else already")
                return
            await self._append(topic, record)

    async def _append(self, topic: str, record: Record) -> None:
        fact = await self._log.append(topic, record)
        self._note(fact, record.key.encode())

    @asynccontextmanager
    async def _alone(self, topic: str, name: str) -> AsyncIterator[None]:
        """One post of an id at a time."""
        entry = self._locks.setdefault((topic, name), [asyncio.Lock(), 0])
        entry[1] += 1
        try:
            async with entry[0]:
                yield
        finally:
            entry[1] -= 1
            if not entry[1]:
                del self._locks[topic, name]

    # Questions

    async def status(self, task_id: str, seconds: float, caller: Caller) -> TaskStatus:
        """GET /tasks/{id}/status: waits for up to so many seconds for the results of a task that is known. Raises
        Refused (503)."""
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            seen = len(self._facts.of_key(topics.RESULTS, task_id))
            status, needed = await self._status(task_id, caller)
            if status.status == "completed" or not status.known:
                return status
            # What is not enough to complete it is not worth another look, unless the time is over.
            while (have := len(self._facts.of_key(topics.RESULTS, task_id))) < needed or have == seen:
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0 and have == seen:
                    return status
                if left <= 0:
                    return (await self._status(task_id, caller))[0]
                with self._poll(topics.RESULTS, task_id) as arrived:
                    if arrived is None:
                        return status
                    await asyncio.wait([arrived], timeout=left)

    async def _status(self, task_id: str, caller: Caller) -> tuple[TaskStatus, int]:
        """The status as it is, and how many results the task needs at least."""
        known = bool(self._facts.of_key(topics.TASKS, task_id))
        results = await self._results(task_id)
        if caller.user is not None and not await self._is_theirs(task_id, results, caller.user):
            return TaskStatus(task_id=task_id, status="pending", known=False), 1
        if not results:
            return TaskStatus(task_id=task_id, status="pending", known=known), 1
        # The join binds a sample to its first result, and so does this.
        first = {result.sample_index: result for result in reversed(results)}
        answers = [mapping.answer_of(first[index]) for index in sorted(first)]
        needed = max(result.task.n_samples for result in results)
        complete = len(first) == needed
        outcomes = await self._log.records(self._facts.of_key(topics.OUTCOMES, task_id)[:MOST_RESULTS], Outcome)
        latest = {outcome.sample_index: outcome for _, outcome in outcomes}
        status = TaskStatus(
            task_id=task_id,
            status="completed" if complete else "pending",
            known=True,
            result=answers[0] if complete else None,
            results=answers,
            outcomes=[mapping.outcome_answer(latest[index]) for index in sorted(latest)],
        )
        return status, needed

    async def _is_theirs(self, task_id: str, results: Sequence[Result], user: str) -> bool:
        if results:
            return all(result.task.user_id == user for result in results)
        tasks = await self._log.records(self._facts.of_key(topics.TASKS, task_id)[:1], Task)
        return bool(tasks) and tasks[0][1].user_id == user

    @contextmanager
    def _poll(self, topic: str, key: str) -> Iterator[asyncio.Future[None] | None]:
        """Something to wait for the next record of a key with; None if too many wait."""
        if self._waiting >= MOST_POLLS:
            yield None
            return
        name, arrived = short(topic, key), asyncio.get_running_loop().create_future()
        self._polls.setdefault(name, set()).add(arrived)
        self._waiting += 1
        try:
            yield arrived
        finally:
            self._waiting -= 1
            waiting = self._polls[name]
            waiting.discard(arrived)
            if not waiting:
                del self._polls[name]

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

    # What is behind an id

    async def _results(self, task_id: str) -> list[Result]:
        """The results of a task, the first in log order first."""
        facts = self._facts.of_key(topics.RESULTS, task_id)[:MOST_RESULTS]
        found = await self._log.records(facts, Result)
        return [result for _, result in found if result.task.task_id == task_id]

    async def _result_of(self, task_id: str, sample_index: int | None) -> Result | None:
        """The first result of a sample; of a task with one sample it need not be named."""
        for result in await self._results(task_id):
            if sample_index == result.sample_index or (sample_index is None and result.task.n_samples == 1):
                return result
        return None

    async def _spoken_of(self, task_id: str, sample_index: int | None, caller: Caller) -> Result | None:
        """The result that feedback speaks of, None where scoring has to find it. Raises Refused."""
        if caller.user is None:
            return await self._result_of(task_id, sample_index)
        results = await self._results(task_id)
        if not await self._is_theirs(task_id, results, caller.user):
            raise Refused(404, f"the user {caller.user} has no task {task_id} of the last {self._hours()}")
        return await self._result_of(task_id, sample_index)

    def _hours(self) -> str:
        return f"{self._facts.horizon_ms / 3_600_000:g} h"

    async def _turn(self, body: UserFeedbackBody, caller: Caller, user_id: str) -> str:
        """The task of the turn that feedback names. Raises Refused (404, 409)."""
        if body.completion_id:
            for name in (body.completion_id, *(body.completion_id.removeprefix(prefix) for prefix in _PREFIXES)):
                fact = self._facts.of_id(topics.SESSIONS, name)
                for _, event in await self._log.records([] if fact is None else [fact], SessionEvent):
                    if caller.user in (None, event.user_id):
                        return self._task_of_turn(event)
            raise Refused(404, f"no completion {body.completion_id} was recorded in the last {self._hours()}")
        session_id = namespaced(caller.namespace(user_id), body.session_id)
        found = await self._numbered(session_id, body.turn_index)
        if found is None:
            raise Refused(
                404, f"no turn {body.turn_index} of the session {body.session_id} is known of the last {self._hours()}"
            )
        return found

    def _task_of_turn(self, event: SessionEvent) -> str:
        """Raises Refused (409) for a turn that has none, and will have none."""
        task_id = turn_task_id(event.session_id, event.session_event_id)
        why = mapping.taskless(event)
        if why and not self._facts.of_key(topics.TASKS, task_id):
            raise Refused(409, f"this turn has no task that feedback could be on: {why}", "conflict_error")
        return task_id

    async def _numbered(self, session_id: str, turn_index: int) -> str | None:
        """The task of a session's turn by its number, which the application `sessions` has given it."""
        names = [turn.event_id for turn in self._facts.of_key(topics.SESSIONS, session_id) if turn.event_id]
        ids = list(dict.fromkeys(turn_task_id(session_id, name) for name in names))
        tasks = [task_id for task_id in ids if self._facts.of_key(topics.TASKS, task_id)]
        at, seen = min(turn_index, len(tasks) - 1), set[int]()
        while 0 <= at < len(tasks) and at not in seen:
            seen.add(at)
            there = await self._log.records(self._facts.of_key(topics.TASKS, tasks[at])[:1], Task)
            if not there or there[0][1].turn_index is None:
                return None
            off = turn_index - (there[0][1].turn_index or 0)
            if off == 0:
                return tasks[at]
            at += off  # the beginning of the session lies before the horizon
        return None


@contextmanager
def _valid() -> Iterator[None]:
    """What cannot be a record is the caller's mistake. Raises Refused (422)."""
    try:
        yield
    except ValidationError as error:
        raise Refused(
            422, problems(error.errors(include_url=False, include_context=False, include_input=False))
        ) from None
    except rewards.UnknownVerifier as error:
        raise Refused(404, str(error)) from error
    except (rewards.RewardError, OverflowError) as error:
        raise Refused(422, str(error)) from error


def problems(errors: Sequence[Any]) -> str:
    """What is wrong with a body, in words."""
    told = [f"{'.'.join(str(part) for part in e['loc'] if part != 'body') or 'body'}: {e['msg']}" for e in errors[:5]]
    left = len(errors) - len(told)
    return "; ".join(told) + (f"; and {left} more" if left > 0 else "")


def _owned(caller: Caller, user_id: str | None, what: str) -> None:
    if caller.user is not None and caller.user != user_id:
        raise Refused(403, f"{what} is not this key's user's", "permission_error")


def _conflict(why: str) -> Refused:
    return Refused(409, f"{why}: what is on the log stays as it is", "conflict_error")


def _drawn(caller: Caller, idempotency_key: str) -> str:
    return derived_id("bridge", caller.key_id, idempotency_key) if idempotency_key else str(uuid.uuid4())
