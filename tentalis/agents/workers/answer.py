"""Answers one task with its n results: chooses the policy version, retries the server, and records the answers."""

import hashlib
import json
import logging
import time
from collections.abc import Callable

from pydantic import ValidationError

from schemas.records import Message, Result, Status, Task, result_id
from tentalis.agents.workers.policy_calls import PolicyCalls
from tentalis.inference.protocol import (
    Generation,
    Inference,
    RequestRefused,
    ServerUnavailable,
)
from tentalis.inference.result import result_of
from tentalis.kafka.errors import RecordTooLarge
from tentalis.text.timestamps import now_ms

log = logging.getLogger(__name__)

LEFT_OUT = "left_out"
"""Key of the JSON in the place of a content that was left out; its value is the number of characters."""


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


def without_call_contents(result: Result) -> Result:
    """Returns a result whose tool calls have names alone: arguments and results are `{"left_out": CHARACTERS}`."""
    calls = (
        call.model_copy(
            update={
                "arguments": json.dumps({LEFT_OUT: len(call.arguments)}),
                "result": None if call.result is None else json.dumps({LEFT_OUT: len(call.result)}),
            }
        )
        for call in result.tool_calls
    )
    return result.model_copy(update={"tool_calls": tuple(calls)})


def send_fitting(send: Callable[[Result], None], result: Result) -> None:
    """Sends a result. If it is too large for a record, sends it without the contents of its tool calls, which do not
    depend on the policy alone; and if that is too large too, a failed one in its place. `send` raises RecordTooLarge.
    """
    try:
        return send(result)
    except RecordTooLarge as error:
        log.error("%s", error)
        failed = failed_instead(result, result.error or str(error))
    smaller = (without_call_contents(result), failed) if result.tool_calls else (failed,)
    for each in smaller:
        try:
            return send(each)
        except RecordTooLarge as error:
            log.error("%s", error)
    return send(without_texts(failed))


class Answerer:
    """Answers tasks with one completion per sample, through an inference server."""

    def __init__(self, inference: Inference, policies: PolicyCalls, *, worker_id: str, server_id: str) -> None:
        self._inference = inference
        self._policies = policies
        self._worker_id = worker_id
        self._server_id = server_id

    async def answer(self, task: Task, opened_at: int) -> list[Result]:
        """Returns the n results of a task, in sample order.

        The results are failed if the server refused the request's content, and have the status infra if it was
        unavailable for too long, failed or gave no usable answer. `opened_at` is the append time of the task's record,
        in ms. Waits without a limit until a version is served.
        """
        started = time.monotonic()
        try:
            generation, held_s = await self._generate(task, opened_at)
        except (ServerUnavailable, RequestRefused) as error:
            log.error("task %s failed: %s", task.task_id, error)
            refused = isinstance(error, RequestRefused) and error.by_content
            status = Status.FAILED if refused else Status.INFRA
            return [self._failed(task, i, opened_at, started, str(error), status) for i in range(task.n_samples)]
        # An answer that was held back was complete before: that time is not the answer's.
        return [self._result(task, i, opened_at, started + held_s, generation) for i in range(task.n_samples)]

    async def _generate(self, task: Task, opened_at: int) -> tuple[Generation, float]:
        """Returns the answer, and the seconds for which it was held back."""
        sampling = task.sampling
        return await self._policies.issued_call(
            task,
            opened_at,
            lambda model: self._inference.generate(
                model,
                [{"role": message.role, "content": message.content} for message in task.messages],
                n=task.n_samples,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                seed=seed_of(task.task_id),
                stop=sampling.stop,
            ),
        )

    def _result(self, task: Task, index: int, opened_at: int, started: float, generation: Generation) -> Result:
        given = len(generation.completions)
        if index >= given:
            return self._failed(
                task,
                index,
                opened_at,
                started,
                f"the server returned {given} of {task.n_samples} samples",
                Status.INFRA,
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
            reason = f"the server's answer cannot be a result: {error}"
            return self._failed(task, index, opened_at, started, reason, Status.INFRA)

    def _failed(self, task: Task, index: int, opened_at: int, started: float, reason: str, status: Status) -> Result:
        return Result(
            result_id=result_id(task.task_id, index, (), b"", ""),
            event_time=now_ms(),
            opened_at=opened_at,
            task=task,
            sample_index=index,
            worker_id=self._worker_id,
            status=status,
            error=reason,
            sampling=task.sampling,
            server_id=self._server_id,
            elapsed_s=time.monotonic() - started,
        )
