"""Options of commands that play episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
        help="Turns of the policy in one episode. Default: 10; 50 for terminal and swe.",
        show_default=False,
    ),
]
Episodes = Annotated[int, typer.Option("--episodes", min=1, help="Number of episodes played at the same time.")]
EnvironmentSeconds = Annotated[
    float,
    typer.Option(
        "--environment-seconds",
        min=1,
        help="Seconds that the environment may take in one episode. Waits for the model server do not count.",
    ),
]
Attempts = Annotated[int, typer.Option("--attempts", min=1, help="Attempts at an episode whose infrastructure fails.")]
