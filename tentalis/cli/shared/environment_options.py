"""Options of commands that play episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tentalis.cli.shared.options import variable_option
from tentalis.service import variables


def _use_environments(path: Path | None) -> Path | None:
    if path is not None:
        from tentalis.rewards.registry import use_environments

        use_environments(path)
    return path


EnvironmentFile = Annotated[
    Path | None, variable_option(variables.ENVIRONMENT_FILE, "--environment-file", callback=_use_environments)
]
File = Annotated[Path | None, variable_option(variables.ENVIRONMENT_FILE, "--file", callback=_use_environments)]
Tools = Annotated[
    Path | None,
    typer.Option(
        "--tools", envvar="TOOLS_CONFIG", help="JSON or YAML file of the tools of toolcall.", show_default=False
    ),
]
Tasks = Annotated[
    Path | None,
    typer.Option(
        "--tasks", help="Folder with the task folders of terminal, or the instances of swe.", show_default=False
    ),
]
AllowUnsandboxed = Annotated[
    bool,
    typer.Option(
        "--allow-unsandboxed",
        help="Run the actions of a model without a wall, as this user, if this machine has no wall.",
    ),
]
MaxTurns = Annotated[
    int | None,
    typer.Option(
        "--max-turns",
        min=1,
        help="Turns of the policy in one episode. Default: that of the file of environments, else 50 for agent, "
        "env-pool, openenv, swe and terminal, 20 for gui, and 10 for others.",
        show_default=False,
    ),
]
Episodes = Annotated[int, typer.Option("--episodes", min=1, help="Number of episodes played at the same time.")]
EnvironmentSeconds = Annotated[
    float | None,
    typer.Option(
        "--environment-seconds",
        min=1,
        help="Seconds that the environment may take in one episode. Waits for the model server do not count. Default: "
        "that of the file of environments, else 600.",
        show_default=False,
    ),
]
Attempts = Annotated[
    int | None,
    typer.Option(
        "--attempts",
        min=1,
        help="Attempts at an episode whose infrastructure fails. Default: that of the file of environments, else 3.",
        show_default=False,
    ),
]
