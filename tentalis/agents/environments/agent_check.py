"""The check of an episode of a program: a command of the operator, which scores what the program left.

It runs after the program and everything that it started have ended. The program could neither read nor change it.
"""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schemas.records import Task
from tentalis.agents.environments.agent_program import ProgramPlace, check_limits, started
from tentalis.agents.environments.terminal_checks import disarm_repositories, remove_outside_links
from tentalis.agents.environments.terminal_shell import CommandStops, clean_variables
from tentalis.agents.sandbox import CommandEnd, CommandOutput, Wall
from tentalis.rewards.environment_file import AgentProgram
from tentalis.rewards.episode import REWARD
from tentalis.text.tool_output import readable_text

CHECK = "check"
_INPUT, _VARIABLES = "episode.json", "variables"


class BadCheckReward(ValueError):
    """A reward of a check that is not a number in [-1, 1]."""


@dataclass(frozen=True, slots=True)
class CheckedProgram:
    """The reward of a check, its further parts, and the output."""

    reward: float
    parts: Mapping[str, float]
    output: CommandOutput


def checked_program(
    wall: Wall,
    place: ProgramPlace,
    program: AgentProgram,
    task: Task,
    data: Mapping[str, Any],
    ended: CommandOutput,
    readable: Sequence[Path],
    stop: CommandStops,
) -> CheckedProgram:
    """Runs the check of an episode. `data`: of the verifier; `ended`: the output of the program.

    Raises OSError, SandboxFault or BadCheckReward.
    """
    assert program.check is not None, "an environment without a check"
    remove_outside_links(place.agent)
    disarm_repositories(place.agent)
    folder = place.episode / CHECK
    for each in ("home", "tmp", "work"):
        (folder / each).mkdir(parents=True, exist_ok=True)
    content = {
        "task_id": task.task_id,
        "messages": [{"role": each.role, "content": each.content} for each in task.messages],
        "data": dict(data),
        "workspace": str(place.workspace),
        "exit_code": ended.exit_code,
        "stdout": readable_text(ended.stdout),
    }
    (folder / _INPUT).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    variables = clean_variables(folder / "home", folder / "tmp")
    variables |= {
        "PATH": f"{place.python.parent}:{variables['PATH']}",
        "PYTHONNOUSERSITE": "1",
        "PYTHONSAFEPATH": "1",  # no module of the program's folder in the place of one of Python
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    (folder / _VARIABLES).write_text("\n".join([*lines, ""]), encoding="utf-8")
    words = [place.filled(word, task.messages[-1].content, task.policy) for word in program.check]
    output = wall.run(
        started(folder / _VARIABLES, folder / "work", words),
        place.episode,
        check_limits(program),
        stdin=folder / _INPUT,
        readable=[*readable, place.folder],
        stop=stop.event(),
    )
    return CheckedProgram(*reward_of(output), output)


def reward_of(output: CommandOutput) -> tuple[float, dict[str, float]]:
    """Returns the reward of a check and its parts.

    The last line of its output may be a JSON object with `reward`, in [-1, 1], and further numbers. Without it the
    reward is 1 for the exit code 0 and 0 for another one. A check that was stopped counts as 0: the program may have
    left what made it hang. Raises BadCheckReward.
    """
    if output.end is not CommandEnd.EXITED:
        return 0.0, {"check_stopped": 1.0}
    numbers = _numbers(output.stdout)
    if output.exit_code != 0 or REWARD not in numbers:
        return float(output.exit_code == 0), {f"check.{name}": value for name, value in numbers.items()}
    reward = numbers.pop(REWARD)
    if not -1.0 <= reward <= 1.0:
        raise BadCheckReward(f"the check gave the reward {reward:g}, outside [-1, 1]")
    return reward, {f"check.{name}": value for name, value in numbers.items()}


def _numbers(stdout: bytes) -> dict[str, float]:
    """Returns the numbers of the JSON object in the last line; none without one."""
    lines = stdout.decode("utf-8", errors="replace").strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else {}
    except ValueError:
        return {}
    return {
        str(name): float(value)
        for name, value in (found.items() if isinstance(found, dict) else ())
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }
