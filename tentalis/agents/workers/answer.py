"""Answers one task with its n results: chooses the policy version, retries the server, and records the answers."""

import asyncio
import hashlib
import logging
import time

from pydantic import ValidationError

from schemas.ids import parse_policy_name
from schemas.records import Message, Result, Status, Task, result_id
from tentalis.inference.protocol import (
    Generation,
    Inference,
    RequestRefused,
    ServerUnavailable,
    UnknownModel,
)
from tentalis.inference.result import result_of
from tentalis.policies.assignments import AssignedVersions
from tentalis.policies.served import ServedVersions
from tentalis.text.timestamps import now_ms

log = logging.getLogger(__name__)

# Metadata key of a task: the version that was served at issue, whose acknowledgement is on the log already.
SERVED_AT_ISSUE = "served"
WAIT_FOR_ISSUED_S = 10.0
LONGEST_PAUSE_S = 5.0


def seed_of(task_id: str) -> int:
    """Returns the sampling seed of a task, 31 bits: the same adapter answers a repeated task in the same way."""
    return int.from_bytes(hashlib.sha256(task_id.encode()).digest()[:4], "big") & 0x7FFFFFFF


def failed_instead(result: Result, reason: str) -> Result:
    """Returns the failed result to record instead of a `result` that cannot be recorded; it has no answer."""
    return Result(
        result_id=result_id(result.task.task_id, result.sample_index, (), b"", ""),
        event_time=result.event_time,
        opened_at=result.opened_at,
        task=result.task,
        sample_index=result.sample_index,
        worker_id=result.worker_id,
        status=Status.FAILED,
        error=reason,
        sampling=result.sampling,
        server_id=result.server_id,
        elapsed_s=result.elapsed_s,
    )


def without_texts(result: Result) -> Result:
    """Returns a failed result without the texts of its task, which is too large for another record.

    The record of the task still has the texts.
    """
    said = Message(role="user", content="(left out: the task alone fills a record)")
    task = result.task.model_copy(update={"messages": (said,), "metadata": {}, "verifier": None})
    return result.model_copy(update={"task": task})


class Answerer:
    """Answers tasks through an inference server: with the version that an assignment chooses, if the server has it,
    else with the newest version that the server acknowledged as served.

    `patience_s`: seconds for which a call is retried while the server is unavailable or has lost its adapter. `model`:
    the name of a model to ask instead, for a server that loads no adapters of this system.
    """

    def __init__(
        self,
        inference: Inference,
        served: ServedVersions,
        assigned: AssignedVersions,
        *,
        worker_id: str,
        server_id: str,
        patience_s: float = 300.0,
        model: str | None = None,
    ) -> None:
        self._inference = inference
        self._served, self._assigned = served, assigned
        self._worker_id = worker_id
        self._server_id = server_id
        self._patience_s = patience_s
        self._plain_model = model
        self._changed = asyncio.Event()

    def served_changed(self) -> None:
        """Wakes the tasks that wait for a version. The caller calls it after a version or an assignment has changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def answer(self, task: Task, opened_at: int) -> list[Result]:
        """Returns the n results of a task, in sample order.

        The results are failed if the server refused the request or was unavailable for too long. `opened_at` is the
        append time of the task's record, in ms. Waits without a limit until a version is served.
        """
        started = time.monotonic()
        try:
            generation = await self._generate(task)
        except (ServerUnavailable, RequestRefused) as error:
            log.error("task %s failed: %s", task.task_id, error)
            return [self._failed(task, i, opened_at, started, str(error)) for i in range(task.n_samples)]
        return [self._result(task, i, opened_at, started, generation) for i in range(task.n_samples)]

    async def _generate(self, task: Task) -> Generation:
        await self._wait_for_issued(task)
        sampling = task.sampling
        deadline: float | None = None
        pause = 0.25
        lost: set[str] = set()
        while True:
            model = await self._model(task, lost)
            try:
                return await self._inference.generate(
                    model,
                    [{"role": message.role, "content": message.content} for message in task.messages],
                    n=task.n_samples,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    max_tokens=sampling.max_tokens,
                    seed=seed_of(task.task_id),
                    stop=sampling.stop,
                )
            except (ServerUnavailable, UnknownModel) as error:
                if isinstance(error, UnknownModel) and model == self._plain_model:
                    raise
                if isinstance(error, UnknownModel) and model not in lost and model != self._served.name(task.policy):
                    log.warning("task %s: the server lost %s, which is assigned: %s", task.task_id, model, error)
                    lost.add(model)
                    continue
                now = time.monotonic()
                deadline = deadline or now + self._patience_s
                if now + pause > deadline:
                    raise
                log.warning("task %s: %s; retrying in %.1f s", task.task_id, error, pause)
                await self._change_within(pause)
                pause = min(LONGEST_PAUSE_S, 2 * pause)

    async def _wait_for_issued(self, task: Task) -> None:
        """Waits until this server has acknowledged the version that was served when the task was issued.

        The wait has a limit, because a rollback may have removed that version in the meantime.
        """
        wanted = task.metadata.get(SERVED_AT_ISSUE)
        if wanted is None or self._plain_model is not None:
            return
        try:
            _, least = parse_policy_name(wanted)
        except ValueError as error:
            raise RequestRefused(400, f"the task's metadata {SERVED_AT_ISSUE!r}: {error}") from error
        deadline = time.monotonic() + WAIT_FOR_ISSUED_S
        while (left := deadline - time.monotonic()) > 0:
            version = self._served.version(task.policy)
            if version is not None and version >= least:
                return
            await self._change_within(left)
        log.warning("task %s was issued at %s, which this server has not acknowledged", task.task_id, wanted)

    async def _model(self, task: Task, lost: set[str]) -> str:
        """Returns the model to ask; waits for a `policy@vN`. `lost`: names that the server turned out not to have."""
        if self._plain_model is not None:
            return self._plain_model
        while True:
            assigned = self._assigned.name(
                self._server_id,
                task.policy,
                served=self._served.name,
                worker_id=self._worker_id,
                environment=task.environment,
                unit=task.task_id,
            )
            name = assigned if assigned is not None and assigned not in lost else self._served.name(task.policy)
            if name is not None:
                return name
            log.info("no version of %s is served yet", task.policy)
            await self._change_within(30.0)
            lost.clear()

    async def _change_within(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return

    def _result(self, task: Task, index: int, opened_at: int, started: float, generation: Generation) -> Result:
        given = len(generation.completions)
        if index >= given:
            return self._failed(
                task, index, opened_at, started, f"the server returned {given} of {task.n_samples} samples"
            )
        try:
            return result_of(
                task,
                index,
                generation,
                generation.completions[index],
                worker_id=self._worker_id,
                opened_at=opened_at,
                server_id=self._server_id,
                elapsed_s=time.monotonic() - started,
            )
        except ValidationError as error:
            log.error("task %s, sample %d: %s", task.task_id, index, error)
            return self._failed(task, index, opened_at, started, f"the server's answer cannot be a result: {error}")

    def _failed(self, task: Task, index: int, opened_at: int, started: float, reason: str) -> Result:
        return Result(
            result_id=result_id(task.task_id, index, (), b"", ""),
            event_time=now_ms(),
            opened_at=opened_at,
            task=task,
            sample_index=index,
            worker_id=self._worker_id,
            status=Status.FAILED,
            error=reason,
            sampling=task.sampling,
            server_id=self._server_id,
            elapsed_s=time.monotonic() - started,
        )
