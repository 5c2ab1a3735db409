"""Plays episodes of the environment terminal on the tasks of this folder."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from schemas.records import Task, Verifier
from tentalis.agents.environments import EnvironmentOptions, Transition
from tentalis.agents.environments.terminal import TerminalEnvironment
from tentalis.agents.sandbox import Wall
from tests.support.loop_records import task
from tests.support.transitions import with_ending

TASKS = Path(__file__).parent / "terminal_tasks"
"""Ten small tasks of the environment terminal."""


def of_folder(name: str) -> Task:
    """Returns a task on the log that names a folder of TASKS."""
    return task(
        environment="terminal",
        n=1,
        messages=[{"role": "user", "content": name}],
        verifier=Verifier(name="episode"),
    )


def block(command: str) -> str:
    """Returns a turn with a command."""
    return f"```bash\n{command}\n```"


def played(wall: Wall, name: str, turns: Sequence[str]) -> tuple[list[Transition], dict[str, float]]:
    """Plays turns of a task. Returns the transitions and the score."""

    async def play() -> tuple[list[Transition], dict[str, float]]:
        made = TerminalEnvironment(EnvironmentOptions(lambda: wall, tasks=TASKS))
        try:
            await made.reset(of_folder(name))
            transitions = [await made.step(turn) for turn in turns]
            score = dict(await made.score())
            return with_ending(transitions, made), score
        finally:
            await made.close()

    return asyncio.run(play())
