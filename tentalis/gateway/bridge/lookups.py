"""What lies behind an id: tasks, results and turns, read from the log where facts say that they lie."""

from collections.abc import Sequence

from schemas import topics
from schemas.ids import turn_task_id
from schemas.records import Outcome, Result, SessionEvent, Task
from tentalis.gateway.bridge import mapping, names
from tentalis.gateway.bridge.facts import Fact, Facts
from tentalis.gateway.bridge.ports import TheLog
from tentalis.gateway.bridge.shapes import UserFeedbackBody
from tentalis.gateway.failure import Refused
from tentalis.gateway.keys import Caller
from tentalis.gateway.sessions_of import namespaced

# Results of one task that are looked at; more come only of workers that answer again and again.
MOST_RESULTS = 512
_PREFIXES = ("chatcmpl-", "cmpl-", "msg_")


class Lookups:
    """All raise Refused (503) while the log cannot be read."""

    def __init__(self, log: TheLog, facts: Facts) -> None:
        self._log, self._facts = log, facts

    def known(self, task_id: str) -> bool:
        """Whether a task, or a result of it, lies within the horizon."""
        return any(self._facts.of_key(topic, task_id) for topic in (topics.TASKS, topics.RESULTS))

    async def named(self, given: str, caller: Caller) -> str:
        """The id on the log of the task that a caller calls `given`: the caller's own, or one that somebody else made
        for the caller's user (the proxy, a manager that writes to the log)."""
        own = names.on_log(caller, given)
        if caller.user is None or own == given or self.known(own) or not self.known(given):
            return own
        return given if await self.is_theirs(given, await self.results(given), caller.user) else own

    async def task(self, task_id: str) -> tuple[Fact, Task] | None:
        """The task of an id, and where it lies."""
        found = await self._log.records(self._facts.of_key(topics.TASKS, task_id)[:1], Task)
        return found[0] if found else None

    async def outcomes(self, task_id: str) -> dict[int, Outcome]:
        """The newest outcome of each sample of a task."""
        found = await self._log.records(self._facts.of_key(topics.OUTCOMES, task_id)[:MOST_RESULTS], Outcome)
        return {outcome.sample_index: outcome for _, outcome in found}

    async def is_theirs(self, task_id: str, results: Sequence[Result], user: str) -> bool:
        """Whether a task, of which these are the results, is a user's."""
        if results:
            return all(result.task.user_id == user for result in results)
        found = await self.task(task_id)
        return found is not None and found[1].user_id == user

    async def results(self, task_id: str) -> list[Result]:
        """The results of a task, the first in log order first."""
        facts = self._facts.of_key(topics.RESULTS, task_id)[:MOST_RESULTS]
        found = await self._log.records(facts, Result)
        return [result for _, result in found if result.task.task_id == task_id]

    async def result_of(self, task_id: str, sample_index: int | None) -> Result | None:
        """The first result of a sample; of a task with one sample it need not be named."""
        for result in await self.results(task_id):
            if sample_index == result.sample_index or (sample_index is None and result.task.n_samples == 1):
                return result
        return None

    async def spoken_of(self, task_id: str, sample_index: int | None, caller: Caller) -> Result | None:
        """The result that feedback speaks of, None where scoring has to find it. Raises Refused."""
        if caller.user is None:
            return await self.result_of(task_id, sample_index)
        results = await self.results(task_id)
        if not await self.is_theirs(task_id, results, caller.user):
            asked = names.shown(caller, task_id)
            raise Refused(404, f"the user {caller.user} has no task {asked} of the last {self._hours()}")
        return await self.result_of(task_id, sample_index)

    def _hours(self) -> str:
        return f"{self._facts.horizon_ms / 3_600_000:g} h"

    async def turn(self, body: UserFeedbackBody, caller: Caller, user_id: str) -> str:
        """The task of the turn that feedback names. Raises Refused (404, 409)."""
        if body.completion_id:
            given = (body.completion_id, *(body.completion_id.removeprefix(prefix) for prefix in _PREFIXES))
            for name in (names.on_log(caller, body.completion_id), *given):
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
        turns = [turn.event_id for turn in self._facts.of_key(topics.SESSIONS, session_id) if turn.event_id]
        ids = list(dict.fromkeys(turn_task_id(session_id, name) for name in turns))
        tasks = [task_id for task_id in ids if self._facts.of_key(topics.TASKS, task_id)]
        at, seen = min(turn_index, len(tasks) - 1), set[int]()
        while 0 <= at < len(tasks) and at not in seen:
            seen.add(at)
            there = await self.task(tasks[at])
            if there is None or there[1].turn_index is None:
                return None
            off = turn_index - there[1].turn_index
            if off == 0:
                return tasks[at]
            at += off  # the beginning of the session lies before the horizon
        return None
