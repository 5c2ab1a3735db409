"""The tasks of a pool, from the `task_meta` of its callers. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from schemas.problems import problems
from schemas.records import Message, Task, Verifier
from tentalis.agents.environments.registry import data_problem
from tentalis.agents.pool.refusals import PoolError
from tentalis.rewards.environment_file import EPISODE, TAKES_TASKS
from tentalis.rewards.registry import declared_environments


def task_of(environment: str, task_id: str, now_ms: int, meta: Mapping[str, Any]) -> Task:
    """Returns the task that `task_meta` describes: `instruction` is the user's message, `data` the data of the verifier
    `episode`. `task_name` names a task folder of terminal, or an instance of swe. Raises PoolError (400)."""
    declared = declared_environments().get(environment)
    given = meta.get("data", {})
    if not isinstance(given, dict):
        raise _bad("task_meta.data is no JSON object")
    data = {**({} if declared is None else declared.data), **given}
    named, said = meta.get("task_name"), meta.get("instruction")
    if named and (environment if declared is None else declared.base) in TAKES_TASKS:
        # Such an environment reads the instruction in its own folder.
        data, said = {"task": named, **data}, named
    if not isinstance(said, str) or not said.strip():
        raise _bad("task_meta.instruction is missing: the text of the task")
    if (problem := data_problem(environment, data)) is not None:
        raise _bad(problem)
    try:
        return Task(
            task_id=task_id,
            event_time=now_ms,
            policy="env-pool",
            environment=environment,
            messages=(Message(role="user", content=said),),
            verifier=Verifier(name=EPISODE, data=json.dumps(data)),
        )
    except ValidationError as error:
        raise _bad(problems(error, "task_meta")) from error


def _bad(problem: str) -> PoolError:
    return PoolError(400, "BAD_TASK", problem)
