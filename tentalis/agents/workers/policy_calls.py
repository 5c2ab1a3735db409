"""Calls of the model server under the assigned or the served version, with waits and retries."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from schemas.ids import policy_name
from schemas.records import Task
from tentalis.inference.protocol import NotTokenExact, RequestRefused, ServerUnavailable, UnknownModel
from tentalis.inference.replicas.client import prefix_key
from tentalis.policies.assignments import AssignedVersions
from tentalis.policies.candidates import ISSUED_FOR, Candidates, issued_for
from tentalis.policies.served import ServedVersions

log = logging.getLogger(__name__)

WAIT_FOR_ISSUED_S = 10.0
WAIT_FOR_DECISION_S = 120.0
"""Seconds for which a task waits for the decision on the candidate that it was issued for."""
LOADED_POLL_S = 0.25
LONGEST_PAUSE_S = 5.0
ERROR_PATIENCE_S = 5.0
"""Seconds for which a call is retried that the server fails on (500): the reason may be the call itself."""
T = TypeVar("T")


class PolicyCalls:
    """Makes calls about tasks: with the version that an assignment chooses, if the server has it, else with the newest
    version that the server acknowledged as served.

    `patience_s`: seconds for which a call is retried while the server is unavailable or has lost its adapter. `model`:
    the name of a model to ask instead, for a server that loads no adapters of this system.
    """

    def __init__(
        self,
        served: ServedVersions,
        assigned: AssignedVersions,
        candidates: Candidates,
        *,
        worker_id: str,
        server_id: str,
        patience_s: float = 300.0,
        model: str | None = None,
    ) -> None:
        self._served, self._assigned, self._candidates = served, assigned, candidates
        self._worker_id = worker_id
        self._server_id = server_id
        self._patience_s = patience_s
        self._plain_model = model
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Wakes the calls that wait for a version, after a version, a candidate or an assignment has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def call(self, task: Task, request: Callable[[str], Awaitable[T]]) -> T:
        """Returns the answer of `request`, called with the name of the model or adapter (`policy@vN`) to use.

        All calls of a task prefer the same replica of the server: its samples, and the turns of its episodes, share
        their prompt's prefix. Waits without a limit until a version is served. Raises ServerUnavailable or UnknownModel
        after `patience_s`, an internal error of the server after ERROR_PATIENCE_S, other refusals immediately.
        """
        deadlines: dict[float, float] = {}  # by patience, from the first failure that has it
        pause = 0.25
        lost: set[str] = set()
        while True:
            model = await self._model(task, lost)
            try:
                with prefix_key(task.task_id):
                    return await request(model)
            except (ServerUnavailable, RequestRefused) as error:
                patience = self._patience(error, model)
                if patience is None:
                    raise
                if isinstance(error, UnknownModel) and model not in lost and model != self._served.name(task.policy):
                    log.warning("task %s: the server lost %s, which is assigned: %s", task.task_id, model, error)
                    lost.add(model)
                    continue
                now = time.monotonic()
                if now + pause > deadlines.setdefault(patience, now + patience):
                    raise
                log.warning("task %s: %s; retrying in %.1f s", task.task_id, error, pause)
                await self._change_within(pause)
                pause = min(LONGEST_PAUSE_S, 2 * pause)

    def _patience(self, error: ServerUnavailable | RequestRefused, model: str) -> float | None:
        """Returns the seconds for which a call that failed so is retried, None: not at all."""
        match error:
            case UnknownModel():
                return None if model == self._plain_model else self._patience_s
            case NotTokenExact():
                return None
            case RequestRefused():
                return min(ERROR_PATIENCE_S, self._patience_s) if error.status >= 500 else None
            case _:
                return self._patience_s

    async def issued_call(self, task: Task, request: Callable[[str], Awaitable[T]]) -> T:
        """As `call`, by the version that the task was issued for if this server comes to serve it.

        If that version is a candidate, it is asked at once, and its answer is returned when the server serves it. If
        the candidate is refused, or not decided on within WAIT_FOR_DECISION_S, the answer is dropped and the task asked
        again. Raises the errors of `call`, and RequestRefused if the task's metadata are unusable.
        """
        candidate = await self._wait_for_issued(task)
        if candidate is not None and self._assigned_name(task) is None:
            asking = asyncio.create_task(self._ask_candidate(task, candidate, request))
            try:
                await self._wait_for_decision(task, candidate)
                if self._served.version(task.policy) == candidate:
                    return await asking
            except (ServerUnavailable, RequestRefused) as error:
                log.info("task %s is asked again: %s", task.task_id, error)
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        return await self.call(task, request)

    async def wait_for_issued(self, task: Task) -> None:
        """Waits until this server has acknowledged the version that the task was issued for.

        Both waits, for a version that was served then and for the decision on a candidate, have a limit: a rollback may
        have removed that version in the meantime. Raises RequestRefused if the task's metadata are unusable.
        """
        candidate = await self._wait_for_issued(task)
        if candidate is not None:
            await self._wait_for_decision(task, candidate)

    async def _wait_for_issued(self, task: Task) -> int | None:
        """Waits until the version that the task was issued for is served, or is the candidate: then returns it."""
        if self._plain_model is not None:
            return None
        try:
            wanted = issued_for(task)
        except ValueError as error:
            raise RequestRefused(400, f"the task's metadata {ISSUED_FOR!r}: {error}") from error
        if wanted is None:
            return None
        deadline = time.monotonic() + WAIT_FOR_ISSUED_S
        while (left := deadline - time.monotonic()) > 0:
            version = self._served.version(task.policy)
            if version is not None and version >= wanted:
                return None
            if self._candidates.version(task.policy) == wanted:
                return wanted
            await self._change_within(left)
        log.warning("task %s was issued for version %d, which this server has not acknowledged", task.task_id, wanted)
        return None

    async def _wait_for_decision(self, task: Task, candidate: int) -> None:
        deadline = time.monotonic() + WAIT_FOR_DECISION_S
        while self._candidates.version(task.policy) == candidate and (left := deadline - time.monotonic()) > 0:
            await self._change_within(left)

    async def _ask_candidate(self, task: Task, candidate: int, request: Callable[[str], Awaitable[T]]) -> T:
        """Returns the answer of a candidate, as soon as the server has loaded it."""
        while True:
            try:
                with prefix_key(task.task_id):
                    return await request(policy_name(task.policy, candidate))
            except UnknownModel:
                await asyncio.sleep(LOADED_POLL_S)

    async def _model(self, task: Task, lost: set[str]) -> str:
        """Returns the model to ask; waits for a `policy@vN`. `lost`: names that the server turned out not to have."""
        if self._plain_model is not None:
            return self._plain_model
        while True:
            assigned = self._assigned_name(task)
            name = assigned if assigned is not None and assigned not in lost else self._served.name(task.policy)
            if name is not None:
                return name
            log.info("no version of %s is served yet", task.policy)
            await self._change_within(30.0)
            lost.clear()

    def _assigned_name(self, task: Task) -> str | None:
        return self._assigned.name(
            self._server_id,
            task.policy,
            served=self._served.name,
            worker_id=self._worker_id,
            environment=task.environment,
            unit=task.task_id,
        )

    async def _change_within(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return
