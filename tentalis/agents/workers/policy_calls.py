"""Calls of the model server under the assigned or the served version, with waits and retries."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from schemas.ids import policy_name
from schemas.records import Task
from tentalis.agents.workers.places import Places
from tentalis.inference.protocol import NotTokenExact, RequestRefused, ServerUnavailable, UnknownModel
from tentalis.inference.replicas.client import prefix_key
from tentalis.policies.assignments import AssignedVersions
from tentalis.policies.candidates import ISSUED_FOR, Candidates, issued_for
from tentalis.policies.served import ServedVersions
from tentalis.text.timestamps import now_ms

log = logging.getLogger(__name__)

WAIT_FOR_ISSUED_S = 10.0
"""Seconds for which a task waits until the version that it was issued for is known here."""
WAIT_FOR_SERVER_S = 120.0
"""Seconds for which a task waits until this server serves a version that another server serves."""
LOADED_POLL_S = 0.25
LONGEST_PAUSE_S = 5.0
ERROR_PATIENCE_S = 5.0
"""Seconds for which a call is retried that the server fails on (500): the reason may be the call itself."""
T = TypeVar("T")


class _Pauses:
    """The pauses between the attempts of one call. `deadlines`: by patience, from the first failure that has it."""

    def __init__(self) -> None:
        self._deadlines: dict[float, float] = {}
        self._pause = 0.25

    def next(self, patience: float) -> float | None:
        """Returns the seconds until the next attempt after a failure that is retried for `patience` seconds, None if
        they are over."""
        now, pause = time.monotonic(), self._pause
        if now + pause > self._deadlines.setdefault(patience, now + patience):
            return None
        self._pause = min(LONGEST_PAUSE_S, 2 * pause)
        return pause


class PolicyCalls:
    """Makes calls about tasks: with the version that an assignment chooses, if the server has it, else with the newest
    version that the server acknowledged as served.

    `patience_s`: seconds for which a call is retried while the server is unavailable or has lost its adapter. `model`:
    the name of a model to ask instead, for a server that loads no adapters of this system. `places`: those of the
    worker; a call lends the place of its task while it waits for a candidate. None: nothing else is answered.
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
        places: Places | None = None,
    ) -> None:
        self._served, self._assigned, self._candidates = served, assigned, candidates
        self._worker_id = worker_id
        self._server_id = server_id
        self._patience_s = patience_s
        self._plain_model = model
        self._places = places or Places(1)
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
        pauses = _Pauses()
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
                pause = pauses.next(patience)
                if pause is None:
                    raise
                log.warning("task %s: %s; retrying in %.1f s", task.task_id, error, pause)
                await self._change_within(pause)

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

    async def issued_call(self, task: Task, opened_at: int, request: Callable[[str], Awaitable[T]]) -> tuple[T, float]:
        """As `call`, by the version that the task was issued for if this server comes to serve it. Also returns the
        seconds for which the answer was held back.

        If that version is a candidate, it is asked at once, and its answer is returned when the server serves it. If
        the candidate is refused, the answer is dropped and the task asked again. `opened_at`: the append time of the
        task's record, in ms. If this server stays behind another one that serves the candidate, the version that it
        serves answers. Raises the errors of `call`, RequestRefused if the task's metadata are unusable, and
        ServerUnavailable if nothing was decided before the task's deadline.
        """
        wanted = await self._wait_for_issued(task)
        if wanted is not None and self._follows_latest(task):
            while (candidate := self._pending(task, wanted)) is not None:
                answer = await self._candidate_call(task, candidate, opened_at, request)
                if answer is not None:
                    return answer
                if self._is_behind(task, candidate):
                    break
        return await self.call(task, request), 0.0

    async def wait_for_issued(self, task: Task, opened_at: int) -> None:
        """Waits until this server serves the version that the task was issued for, or that version was refused.

        Arguments and errors as of `issued_call`.
        """
        wanted = await self._wait_for_issued(task)
        if wanted is not None:
            while (candidate := self._pending(task, wanted)) is not None:
                await self._wait_for_decision(task, candidate, opened_at)
                if self._is_behind(task, candidate):
                    break

    async def _wait_for_issued(self, task: Task) -> int | None:
        """Returns the version that a task was issued for; waits a time until it is known. None: it does not matter."""
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
            if self._serves(task, wanted) or self._candidates.published(task.policy, wanted):
                return wanted
            await self._change_within(left)
        log.warning("task %s was issued for version %d, which this server has not acknowledged", task.task_id, wanted)
        return None

    def _serves(self, task: Task, version: int) -> bool:
        """Returns True if the server serves a version, or a newer one."""
        served = self._served.version(task.policy)
        return served is not None and served >= version

    def _pending(self, task: Task, wanted: int) -> int | None:
        """Returns the candidate that may come to be served, if it is the version that a task was issued for or a newer
        one; None if the version is served, refused or passed over."""
        candidate = self._candidates.version(task.policy)
        return None if self._serves(task, wanted) or candidate is None or candidate < wanted else candidate

    def _follows_latest(self, task: Task) -> bool:
        """Returns True if the served version answers a task, and not an assigned one that this server has."""
        chosen = self._assigned.assignments.chosen(task.policy, **self._assigned_by(task))
        return chosen is None or chosen.version is None or self._assigned_name(task) is None

    async def _candidate_call(
        self, task: Task, candidate: int, opened_at: int, request: Callable[[str], Awaitable[T]]
    ) -> tuple[T, float] | None:
        """Returns the answer of a candidate and the seconds for which it was held, once the server serves it; None if
        it is refused, or does not answer."""
        asking = asyncio.create_task(self._ask_candidate(task, candidate, request))
        deciding = asyncio.create_task(self._wait_for_decision(task, candidate, opened_at))
        try:
            await asyncio.wait({asking, deciding}, return_when=asyncio.FIRST_COMPLETED)
            held_from = time.monotonic()
            if not deciding.done():
                with self._places.lending():
                    await asyncio.wait({deciding})
            await deciding
            held_s = time.monotonic() - held_from
            if self._served.version(task.policy) == candidate:
                try:
                    return await asking, held_s
                except (ServerUnavailable, RequestRefused) as error:
                    log.info("task %s is asked again: %s", task.task_id, error)
                    return None
        finally:
            for each in (asking, deciding):
                each.cancel()
            await asyncio.gather(asking, deciding, return_exceptions=True)
        await self._places.exchange()  # all tasks of the round are asked again now
        return None

    async def _wait_for_decision(self, task: Task, candidate: int, opened_at: int) -> None:
        """Waits until a candidate is served, refused or overtaken, or until this server is behind another one for
        WAIT_FOR_SERVER_S. Raises ServerUnavailable at the task's deadline."""
        name = policy_name(task.policy, candidate)
        deadline_ms = opened_at + task.terms.deadline_ms
        behind_until: float | None = None
        while self._candidates.version(task.policy) == candidate:
            left = (deadline_ms - now_ms()) / 1000
            if left <= 0:
                raise ServerUnavailable(f"{name}, for which the task was issued, was not served before its deadline")
            if self._is_behind(task, candidate):
                now = time.monotonic()
                behind_until = behind_until or now + WAIT_FOR_SERVER_S
                if now >= behind_until:
                    log.warning("task %s: another server serves %s, and this one does not yet", task.task_id, name)
                    return
                left = min(left, behind_until - now)
            await self._change_within(left)

    def _is_behind(self, task: Task, candidate: int) -> bool:
        """Returns True if another server serves a version that this one does not serve."""
        return not self._serves(task, candidate) and self._candidates.served_by_any(task.policy, candidate)

    async def _ask_candidate(self, task: Task, candidate: int, request: Callable[[str], Awaitable[T]]) -> T:
        """Returns the answer of a candidate, as soon as the server has loaded it.

        While nothing is decided, failures of the server are retried as those of a `call`. Raises InferenceError.
        """
        name, pauses = policy_name(task.policy, candidate), _Pauses()
        while True:
            try:
                with prefix_key(task.task_id):
                    return await request(name)
            except (ServerUnavailable, RequestRefused) as error:
                if self._candidates.version(task.policy) != candidate:
                    raise
                if isinstance(error, UnknownModel):
                    with self._places.lending():
                        await asyncio.sleep(LOADED_POLL_S)
                    await self._places.exchange()
                    continue
                patience = self._patience(error, name)
                pause = None if patience is None else pauses.next(patience)
                if pause is None:
                    raise
                log.warning("task %s: %s; retrying in %.1f s", task.task_id, error, pause)
                await self._change_within(pause)

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
        return self._assigned.name(self._server_id, task.policy, served=self._served.name, **self._assigned_by(task))

    def _assigned_by(self, task: Task) -> dict[str, str]:
        return {"worker_id": self._worker_id, "environment": task.environment, "unit": task.task_id}

    async def _change_within(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return
