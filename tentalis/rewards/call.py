"""Calls a scorer on a result, within the time limit of its kind."""

import asyncio

from schemas.records import Result, Task
from tentalis.rewards.thread_runner import THREAD_S, verify_in_thread
from tentalis.rewards.verdict import Judge, ResultVerifier, Verdict


async def call_scorer(
    scorer: ResultVerifier | Judge, task: Task, result: Result, thread_s: float = THREAD_S
) -> Verdict:
    """Returns the verdict of a judge, or of a verifier: a slow one runs in a thread, within its own time limit or else
    `thread_s` seconds. Raises TimeoutError, Hung, and what the scorer raises."""
    if isinstance(scorer, Judge):
        async with asyncio.timeout(scorer.time_limit_s):
            return await scorer.judge(task, result)
    if not scorer.slow:
        return scorer.verify(task, result)
    return await verify_in_thread(scorer, task, result, thread_s)
