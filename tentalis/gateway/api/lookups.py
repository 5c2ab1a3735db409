"""Looks up tasks, results and turns by id: the offset index finds them, the log provides their content."""

from collections.abc import Sequence

from schemas import topics
from schemas.ids import turn_task_id
from schemas.records import Feedback, Hint, HintKind, Outcome, Result, SessionEvent, Task
from tentalis.gateway.api import log_ids, mapping
from tentalis.gateway.api.bodies import UserFeedbackBody
from tentalis.gateway.api.offset_index import IndexedRecord, OffsetIndex
from tentalis.gateway.api.record_log import RecordLog
from tentalis.gateway.calls.session_id import namespaced
from tentalis.gateway.http.errors import APIError
from tentalis.gateway.http.keys import Caller

# Maximum number of results read per task; only workers that answer repeatedly produce more.
MAX_RESULTS = 512
# Maximum number of hints read per task: they hold the teacher's log-probs.
MAX_HINTS = 32
_COMPLETION_PREFIXES = ("chatcmpl-", "cmpl-", "msg_", "resp_")


class Lookups:
    """Looks records up. Every method that reads the log raises APIError (503) while it cannot be read."""

    def __init__(self, log: RecordLog, offset_index: OffsetIndex) -> None:
        self._log, self._offset_index = log, offset_index

    def knows_turn(self, event_id: str) -> bool:
        """True if a turn with this id is within the horizon."""
        return self._offset_index.by_id(topics.SESSIONS, event_id) is not None

    async def turn(self, event_id: str) -> SessionEvent | None:
        """The turn with this id, if it is within the horizon and the log still holds it."""
        ref = self._offset_index.by_id(topics.SESSIONS, event_id)
        found = await self._log.records([] if ref is None else [ref], SessionEvent)
        return found[0][1] if found else None

    def has_task(self, task_id: str) -> bool:
        """True if a task, or a result of it, is within the horizon."""
        return any(self._offset_index.by_key(topic, task_id) for topic in (topics.TASKS, topics.RESULTS))

    async def log_task_id(self, given: str, caller: Caller) -> str:
        """The id on the log of a caller's task `given`: one that the caller posted, or one that another program made
        for the caller's user (the proxy, a manager that writes to the log)."""
        own_id = log_ids.log_id(caller, given)
        if caller.user is None or own_id == given or self.has_task(own_id) or not self.has_task(given):
            return own_id
        return given if await self.is_owned_by(given, await self.results(given), caller.user) else own_id

    async def task(self, task_id: str) -> tuple[IndexedRecord, Task] | None:
        """The task of an id, with its place on the log."""
        found = await self._log.records(self._offset_index.by_key(topics.TASKS, task_id)[:1], Task)
        return found[0] if found else None

    async def outcomes(self, task_id: str) -> dict[int, Outcome]:
        """The newest outcome of each sample of a task."""
        found = await self._log.records(self._offset_index.by_key(topics.OUTCOMES, task_id)[:MAX_RESULTS], Outcome)
        return {outcome.sample_index: outcome for _, outcome in found}

    async def hints(self, task_id: str) -> list[tuple[Hint, Feedback | None]]:
        """The hints of a task, each with the feedback that it was made from, in log order; those of kind none are left
        out, and a copy counts once."""
        found = await self._log.records(self._offset_index.by_key(topics.HALVES, task_id)[:MAX_HINTS], Hint)
        hints: dict[str, Hint] = {}
        for _, hint in found:
            if hint.kind is not HintKind.NONE:
                hints.setdefault(hint.hint_id, hint)
        feedback_ids = {hint.feedback_id for hint in hints.values() if hint.feedback_id is not None}
        refs = (self._offset_index.by_id(topics.FEEDBACK, feedback_id) for feedback_id in sorted(feedback_ids))
        sources = await self._log.records([ref for ref in refs if ref is not None], Feedback)
        by_id = {feedback.feedback_id: feedback for _, feedback in sources if feedback.task_id == task_id}
        return [(hint, by_id.get(hint.feedback_id or "")) for hint in hints.values()]

    async def is_owned_by(self, task_id: str, results: Sequence[Result], user: str | None) -> bool:
        """True if a task belongs to a user, or to nobody if `user` is None. `results`: those of the task."""
        if results:
            return all(result.task.user_id == user for result in results)
        found = await self.task(task_id)
        return found is not None and found[1].user_id == user

    async def results(self, task_id: str) -> list[Result]:
        """The results of a task, in log order."""
        refs = self._offset_index.by_key(topics.RESULTS, task_id)[:MAX_RESULTS]
        found = await self._log.records(refs, Result)
        return [result for _, result in found if result.task.task_id == task_id]

    async def result_of(self, task_id: str, sample_index: int | None) -> Result | None:
        """The first result of a sample; the index may be None for a task with one sample."""
        for result in await self.results(task_id):
            if sample_index == result.sample_index or (sample_index is None and result.task.n_samples == 1):
                return result
        return None

    async def feedback_target(self, task_id: str, sample_index: int | None, caller: Caller) -> Result | None:
        """The result that feedback refers to, None if scoring has to find it. Raises APIError."""
        if caller.user is None:
            return await self.result_of(task_id, sample_index)
        results = await self.results(task_id)
        if not await self.is_owned_by(task_id, results, caller.user):
            given_id = log_ids.public_id(caller, task_id)
            raise APIError(404, f"the user {caller.user} has no task {given_id} in the last {self._horizon_text()}")
        return await self.result_of(task_id, sample_index)

    def _horizon_text(self) -> str:
        return f"{self._offset_index.horizon_ms / 3_600_000:g} h"

    async def task_id_of_turn(self, body: UserFeedbackBody, caller: Caller, user_id: str) -> str:
        """The id of the task of the turn that feedback names. Raises APIError (404, 409)."""
        if body.completion_id:
            backend_ids = (
                body.completion_id,
                *(body.completion_id.removeprefix(prefix) for prefix in _COMPLETION_PREFIXES),
            )
            for event_id in (log_ids.log_id(caller, body.completion_id), *backend_ids):
                ref = self._offset_index.by_id(topics.SESSIONS, event_id)
                for _, event in await self._log.records([] if ref is None else [ref], SessionEvent):
                    if caller.user in (None, event.user_id):
                        return self._task_id_of_event(event)
            raise APIError(404, f"no completion {body.completion_id} was recorded in the last {self._horizon_text()}")
        session_id = namespaced(caller.namespace(user_id), body.session_id)
        task_id = await self._task_id_by_turn_index(session_id, body.turn_index)
        if task_id is None:
            raise APIError(
                404,
                f"no turn {body.turn_index} of the session {body.session_id} is known in the last "
                f"{self._horizon_text()}",
            )
        return task_id

    def _task_id_of_event(self, event: SessionEvent) -> str:
        """The id of a turn's task. Raises APIError (409) for a turn that never gets a task."""
        task_id = turn_task_id(event.session_id, event.session_event_id)
        reason = mapping.no_task_reason(event)
        if reason and not self._offset_index.by_key(topics.TASKS, task_id):
            raise APIError(409, f"this turn has no task, so it takes no feedback: {reason}", "conflict_error")
        return task_id

    async def _task_id_by_turn_index(self, session_id: str, turn_index: int) -> str | None:
        """The id of the task of a session's turn, by the turn index that the application `sessions` assigned."""
        event_ids = [turn.event_id for turn in self._offset_index.by_key(topics.SESSIONS, session_id) if turn.event_id]
        ids = list(dict.fromkeys(turn_task_id(session_id, event_id) for event_id in event_ids))
        tasks = [task_id for task_id in ids if self._offset_index.by_key(topics.TASKS, task_id)]
        position, seen = min(turn_index, len(tasks) - 1), set[int]()
        while 0 <= position < len(tasks) and position not in seen:
            seen.add(position)
            found = await self.task(tasks[position])
            if found is None or found[1].turn_index is None:
                return None
            shift = turn_index - found[1].turn_index
            if shift == 0:
                return tasks[position]
            position += shift  # the session began before the horizon
        return None
